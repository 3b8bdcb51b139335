// Everything that depends on the instruction set. The build compiles this file once per set, with ANYMAMBA_ISA naming it.
#include "scan_backward.h"
#include "scan_forward.h"
#include "variant.h"

namespace ANYMAMBA_ISA {

static bool forward(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_forward<double>(args) : scan_forward<float>(args);
}

static bool backward(const ScanArgs& args) {
  return args.dtype == kFloat64 ? scan_backward<double>(args) : scan_backward<float>(args);
}

extern const Kernels kernels;
const Kernels kernels = {forward, backward};

}  // namespace ANYMAMBA_ISA
