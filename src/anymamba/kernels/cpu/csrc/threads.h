// Tasks over OpenMP threads, with denormals flushed inside them only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

// True in a process that was forked: the pool of its parent does not exist there, and waiting for it would never end.
extern "C" bool anymamba_is_forked();

namespace ANYMAMBA_ISA {

// Flushes denormals in the current thread for as long as it lives, and restores what was set before.
class FlushDenormals {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
#endif
};

// Memory on whole cache lines, not initialised; `get` is null where there was none to be had.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (posix_memalign(&memory_, 64, bytes ? bytes : 64)) memory_ = nullptr;
  }
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
};

// Hands out aligned pieces of a scratch; with no memory it only counts what would be needed.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(size_t count) {
    char* piece = memory_ + (memory_ ? used_ : 0);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(memory_ ? piece : nullptr);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

// Runs body(task, scratch) for every task on up to `threads` threads, each with `bytes` of scratch.
// Returns false when there was no memory for the scratch.
template <typename Body>
bool run_tasks(int64_t tasks, int64_t threads, size_t bytes, const Body& body) {
  int team = static_cast<int>(threads < tasks ? threads : tasks);
  if (team < 1 || anymamba_is_forked()) team = 1;
  bool ok = true;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const FlushDenormals flush;
    const Scratch scratch(bytes);
    if (!scratch.get()) {
#pragma omp atomic write
      ok = false;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task)
      if (scratch.get()) body(task, scratch.get());
  }
  return ok;
}

}  // namespace ANYMAMBA_ISA
