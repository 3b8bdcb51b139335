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

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

bool anymamba_is_forked() { return forked; }

// Names the description that the argument structures were made from: library.py refuses a library with another one.
const char* anymamba_arguments() { return ANYMAMBA_ARGUMENTS; }

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
#define ANYMAMBA_FUNCTION(function, structure) \
  int anymamba_##function(const structure* args) { return choice().kernels->function(*args) ? 0 : 1; }
ANYMAMBA_KERNELS(ANYMAMBA_FUNCTION)
#undef ANYMAMBA_FUNCTION
#pragma GCC visibility pop
}
