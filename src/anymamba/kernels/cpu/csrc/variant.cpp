// Everything that depends on the instruction set. The build compiles this file once per set, with ANYMAMBA_ISA naming it.
#include "conv.h"
#include "decode.h"
#include "gate.h"
#include "norm.h"
#include "prepare.h"
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
    by_dtype<ScanArgs, scan_forward<float>, scan_forward<double>>,
    by_dtype<ScanArgs, scan_backward<float>, scan_backward<double>>,
    by_dtype<ConvArgs, conv_forward<float>, conv_forward<double>>,
    by_dtype<ConvArgs, conv_backward<float>, conv_backward<double>>,
    by_dtype<NormArgs, norm_forward<float>, norm_forward<double>>,
    by_dtype<NormArgs, norm_backward<float>, norm_backward<double>>,
    by_dtype<ProgramArgs, run_program<float>, run_program<double>>,
    by_dtype<PrepareArgs, prepare_forward<float>, prepare_forward<double>>,
    by_dtype<PrepareArgs, prepare_backward<float>, prepare_backward<double>>,
    by_dtype<GateArgs, gate_forward<float>, gate_forward<double>>,
    by_dtype<GateArgs, gate_backward<float>, gate_backward<double>>,
    by_dtype<SelectiveArgs, selective_forward<float>, selective_forward<double>>,
    by_dtype<SelectiveArgs, selective_backward<float>, selective_backward<double>>,
};

}  // namespace ANYMAMBA_ISA
