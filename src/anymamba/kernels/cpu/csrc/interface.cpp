// The C interface, and the choice of the instruction set.
#ifdef ANYMAMBA_X86
#include <cpuid.h>
#endif
#include <pthread.h>

#include <cstdlib>
#include <cstring>

#include "variant.h"

namespace baseline {
extern const Kernels kernels;
}
#ifdef ANYMAMBA_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

bool forked = false;

struct Choice {
  const char* name;
  const Kernels* kernels;
};

#ifdef ANYMAMBA_X86
// Conversions of half precision; not every compiler's __builtin_cpu_supports knows their name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}
#endif

Choice widest() {
#ifdef ANYMAMBA_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  if (has_avx512) return {"avx512", &avx512::kernels};
  if (has_avx2) return {"avx2", &avx2::kernels};
#endif
  return {"baseline", &baseline::kernels};
}

// ANYMAMBA_ISA narrows the choice; it cannot widen it beyond what the processor has.
Choice choose() {
  const Choice best = widest();
  const char* wanted = std::getenv("ANYMAMBA_ISA");
  if (!wanted) return best;
  if (!std::strcmp(wanted, "baseline")) return {"baseline", &baseline::kernels};
#ifdef ANYMAMBA_X86
  if (!std::strcmp(wanted, "avx2") && std::strcmp(best.name, "baseline")) return {"avx2", &avx2::kernels};
#endif
  return best;
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

// Runs when the library is loaded.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

int status(bool ok) { return ok ? 0 : 1; }

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

bool anymamba_is_forked() { return forked; }

// The size of an argument structure, 0 for a name that is none: library.py refuses a library with other ones.
int64_t anymamba_size_of(const char* structure) {
#define ANYMAMBA_SIZE_OF(name) \
  if (!std::strcmp(structure, #name)) return sizeof(name);
  ANYMAMBA_SIZE_OF(ScanArgs)
  ANYMAMBA_SIZE_OF(ConvArgs)
  ANYMAMBA_SIZE_OF(NormArgs)
  ANYMAMBA_SIZE_OF(PrepareArgs)
  ANYMAMBA_SIZE_OF(GateArgs)
  ANYMAMBA_SIZE_OF(SelectiveArgs)
  ANYMAMBA_SIZE_OF(Parameter)
  ANYMAMBA_SIZE_OF(Phase)
  ANYMAMBA_SIZE_OF(EdgePhase)
  ANYMAMBA_SIZE_OF(NormPhase)
  ANYMAMBA_SIZE_OF(GatePhase)
  ANYMAMBA_SIZE_OF(LinearPhase)
  ANYMAMBA_SIZE_OF(ConvPhase)
  ANYMAMBA_SIZE_OF(Mamba1Phase)
  ANYMAMBA_SIZE_OF(Mamba2Phase)
  ANYMAMBA_SIZE_OF(Mamba3Phase)
  ANYMAMBA_SIZE_OF(ProgramArgs)
#undef ANYMAMBA_SIZE_OF
  return 0;
}

// Whether it was built with OpenMP; without, everything runs on one thread.
bool anymamba_has_threads() {
#ifdef _OPENMP
  return true;
#else
  return false;
#endif
}

const char* anymamba_isa() { return choice().name; }

// 0: done. 1: out of memory.
int anymamba_scan_forward(const ScanArgs* args) { return status(choice().kernels->scan_forward(*args)); }
int anymamba_scan_backward(const ScanArgs* args) { return status(choice().kernels->scan_backward(*args)); }
int anymamba_conv_forward(const ConvArgs* args) { return status(choice().kernels->conv_forward(*args)); }
int anymamba_conv_backward(const ConvArgs* args) { return status(choice().kernels->conv_backward(*args)); }
int anymamba_norm_forward(const NormArgs* args) { return status(choice().kernels->norm_forward(*args)); }
int anymamba_norm_backward(const NormArgs* args) { return status(choice().kernels->norm_backward(*args)); }
int anymamba_run_program(const ProgramArgs* args) { return status(choice().kernels->run_program(*args)); }
int anymamba_prepare_forward(const PrepareArgs* args) { return status(choice().kernels->prepare_forward(*args)); }
int anymamba_prepare_backward(const PrepareArgs* args) { return status(choice().kernels->prepare_backward(*args)); }
int anymamba_gate_forward(const GateArgs* args) { return status(choice().kernels->gate_forward(*args)); }
int anymamba_gate_backward(const GateArgs* args) { return status(choice().kernels->gate_backward(*args)); }
int anymamba_selective_forward(const SelectiveArgs* args) { return status(choice().kernels->selective_forward(*args)); }
int anymamba_selective_backward(const SelectiveArgs* args) { return status(choice().kernels->selective_backward(*args)); }
#pragma GCC visibility pop
}
