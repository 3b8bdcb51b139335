// Everything that depends on the instruction set. The build compiles this file once per set, with ANYMAMBA_ISA naming
// it.
#include "ops/conv.h"
#include "decode/decode.h"
#include "ops/discretization.h"
#include "ops/gate.h"
#include "linear/quantized_linear.h"
#include "ops/norm.h"
#include "scan/scan_backward.h"
#include "scan/scan_forward.h"
#include "scan/selective_scan.h"
#include "isa_variant.h"

namespace ANYMAMBA_ISA {

// A kernel in the arithmetic that the activations' dtype asks for.
template <typename Args, bool (*kSingle)(const Args&), bool (*kDouble)(const Args&)>
bool by_dtype(const Args& args) {
  return args.dtype == kFloat64 ? kDouble(args) : kSingle(args);
}

extern const Kernels kernels;
const Kernels kernels = {
#define ANYMAMBA_ENTRY(function, structure) by_dtype<structure, function<float>, function<double>>,
    ANYMAMBA_KERNELS(ANYMAMBA_ENTRY)
#undef ANYMAMBA_ENTRY
};

}  // namespace ANYMAMBA_ISA
