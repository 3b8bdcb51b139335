// Everything that depends on the instruction set. The build compiles this file once per set, with ANYMAMBA_ISA naming it.
#include "conv.h"
#include "decode.h"
#include "discretise.h"
#include "gate.h"
#include "narrow.h"
#include "norm.h"
#include "scan_backward.h"
#include "scan_forward.h"
#include "selective.h"
#include "variant.h"

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
