// The C interface, and the choice of the instruction set.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>

#include <cstdlib>
#include <cstring>

#include "isa_variant.h"
#include "variants.h"

#define ANYMAMBA_DECLARE(isa)    \
  namespace isa {                \
  extern const Kernels kernels;  \
  }
ANYMAMBA_VARIANTS(ANYMAMBA_DECLARE)
#undef ANYMAMBA_DECLARE

namespace {

bool forked = false;

struct Variant {
  const char* name;
  const Kernels* kernels;
};

// The instruction sets that this library was built with, from the shortest vectors to the longest.
const Variant variants[] = {
#define ANYMAMBA_VARIANT(isa) {#isa, &isa::kernels},
    ANYMAMBA_VARIANTS(ANYMAMBA_VARIANT)
#undef ANYMAMBA_VARIANT
};

#if defined(__x86_64__)
// Conversions of half precision; not every compiler's __builtin_cpu_supports knows their name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool processor_has(const char* isa) {
  __builtin_cpu_init();
  if (!std::strcmp(isa, "baseline")) return true;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (std::strcmp(isa, "avx512")) return has_avx2;
  return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
}
#else
bool processor_has(const char*) { return true; }
#endif

// The longest vectors that the processor has, up to ANYMAMBA_ISA; empty if the processor has none of them.
Variant choose() {
  const char* wanted = std::getenv("ANYMAMBA_ISA");
  Variant best = {"", nullptr};
  for (const Variant& variant : variants) {
    if (processor_has(variant.name)) best = variant;
    if (wanted && !std::strcmp(wanted, variant.name)) break;
  }
  return best;
}

const Variant& choice() {
  static const Variant chosen = choose();
  return chosen;
}

// Runs when the library is loaded.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

bool anymamba_is_forked() { return forked; }

// The hash of the schema that the argument structures were made from; bindings.py rejects a library with another.
const char* anymamba_arguments() { return ANYMAMBA_ARGUMENTS; }

// True if the library was built with OpenMP; without it, everything runs on one thread.
bool anymamba_has_threads() {
#if defined(_OPENMP) || defined(ANYMAMBA_STD_THREADS)
  return true;
#else
  return false;
#endif
}

// Empty where this processor has none of the instruction sets that the library was built with.
const char* anymamba_isa() { return choice().name; }

// 0: done. 1: out of memory.
#define ANYMAMBA_FUNCTION(function, structure) \
  int anymamba_##function(const structure* args) { return choice().kernels->function(*args) ? 0 : 1; }
ANYMAMBA_KERNELS(ANYMAMBA_FUNCTION)
#undef ANYMAMBA_FUNCTION
#pragma GCC visibility pop
}
