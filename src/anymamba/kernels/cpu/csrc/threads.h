// Tasks over OpenMP threads, with denormals flushed inside them only.
//
// Other programs may take a core from one of the threads for milliseconds. So a thread waits for work that is not done,
// never for a thread that has none; and it spins for microseconds only, then sleeps, which leaves its own core to the
// one that it waits for.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "large_pages.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef ANYMAMBA_STD_THREADS  // in place of OpenMP, whose synchronization ThreadSanitizer does not see
#include <thread>
#include <vector>
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

// Memory on whole cache lines, not initialized; `get()` is null if allocation failed.
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

// Hands out aligned parts of scratch memory; without memory it only counts the bytes that would be needed.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(size_t count) {
    char* part = memory_ + (memory_ ? used_ : 0);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(memory_ ? part : nullptr);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Nanoseconds = int64_t;

inline Nanoseconds now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// How long the current thread has slept because others were not done.
inline thread_local Nanoseconds slept = 0;

// Counts finished tasks, up to a total that all threads know.
class Counter {
 public:
  // Adds to the count and returns it.
  int32_t add(int32_t count, int32_t total) {
    const int32_t done = value_.fetch_add(count) + count;
    if (done == total && sleepers_.load()) wake();
    return done;
  }

  // Waits until the count is `total`; spins at first, and calls idle() while it does.
  template <typename Idle>
  void wait_for(int32_t total, Idle idle) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (value_.load(std::memory_order_acquire) >= total) return;
      idle();
      relax();
    }
    const Nanoseconds begin = now_ns();
    sleepers_.fetch_add(1);
    for (int32_t now = value_.load(); now < total; now = value_.load()) sleep(now);
    sleepers_.fetch_sub(1);
    slept += now_ns() - begin;
  }

 private:
  static constexpr int kSpins = 1000;  // 20 to 50 microseconds: longer than a task takes a thread that has a core
  std::atomic<int32_t> value_{0}, sleepers_{0};

#if defined(__linux__)
  void sleep(int32_t now) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(int32_t) { sched_yield(); }
  void wake() {}
#endif
};

// Tasks that threads take one by one. A thread that comes late finds them taken, and does not keep the others waiting.
//
// They are divided into partitions of neighboring tasks, one per thread. A thread takes those of its own partition
// first, where it does not compete with others and reads memory in order, and then tasks that the others have not
// begun.
class Queue {
 public:
  static constexpr int kPartitions = 8;  // threads beyond this count share a partition

  // The first task of a thread's partition.
  static int64_t first(int64_t tasks, int thread, int partitions) {
    partitions = partitions < kPartitions ? partitions : kPartitions;
    return tasks * (thread % partitions) / partitions;
  }

  // body(task) for every task, by any free thread, then finish() by one of them; returns when all is done.
  // Without tasks there is nothing to finish. A thread that waits calls idle().
  template <typename Body, typename Finish, typename Idle>
  void parallel_for(int64_t tasks, int thread, int partitions, const Body& body, const Finish& finish, const Idle& idle) {
    if (tasks == 0) return;
    partitions = partitions < kPartitions ? partitions : kPartitions;
    int32_t own = 0;
    for (int i = 0; i < partitions; ++i) {
      const int partition = (thread + i) % partitions;
      const int64_t begin = tasks * partition / partitions, end = tasks * (partition + 1) / partitions;
      for (int64_t task; (task = begin + next_[partition].value.fetch_add(1, std::memory_order_relaxed)) < end; ++own)
        body(task);
    }
    // One count for all partitions, which every thread writes to.
    const int32_t all = static_cast<int32_t>(tasks) + 1;  // finish() is one more
    if (own && done_.add(own, all) == all - 1) finish(), done_.add(1, all);
    done_.wait_for(all, idle);
  }

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> value{0};
  };
  alignas(64) Counter done_;
  Next next_[kPartitions];
};

// An array of queues; `get()` is null if allocation failed.
class Queues {
 public:
  explicit Queues(int64_t count) : memory_(count * sizeof(Queue)) {
    if (memory_.get())
      for (int64_t i = 0; i < count; ++i) new (get() + i) Queue;
  }
  Queue* get() const { return static_cast<Queue*>(memory_.get()); }

 private:
  Scratch memory_;
};

// The number of threads that a number of tasks is worth.
inline int team_size(int64_t threads, int64_t tasks) {
  const int team = static_cast<int>(threads < tasks ? threads : tasks);
  return team < 1 || anymamba_is_forked() ? 1 : team;
}

// body(thread) by each thread of a team; returns when all of them have.
template <typename Body>
void run_team([[maybe_unused]] int team, const Body& body) {
#ifdef ANYMAMBA_STD_THREADS
  const auto run = [&](int thread) {
    const FlushDenormals flush;
    body(thread);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < team; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
#else
  Counter left;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const FlushDenormals flush;
#ifdef _OPENMP
    const int thread = omp_get_thread_num(), size = omp_get_num_threads();
#else
    const int thread = 0, size = 1;
#endif
    body(thread);
    // OpenMP's own barrier ends the region and may spin for milliseconds: no thread enters it before all are done.
    left.add(1, size);
    left.wait_for(size, [] {});
  }
#endif
}

// For short work that is done again and again. Where other programs keep a thread from its core, waiting for it takes
// longer than doing without. So after a run that waited for long, the next ones take one thread, ever more of them as
// long as that is so, and then all are tried again. How many threads there are changes no bit.
class Teams {
 public:
  // body(size) with as many threads as are worth it.
  template <typename Body>
  void run(int team, const Body& body) {
    if (team > 1 && alone_.load(std::memory_order_relaxed) > 0) {
      alone_.fetch_sub(1, std::memory_order_relaxed);
      return body(1);
    }
    slept = 0;
    const Nanoseconds begin = team > 1 ? now_ns() : 0;
    body(team);
    if (team > 1) note(slept, now_ns() - begin);
  }

 private:
  static constexpr Nanoseconds kShort = 200000;
  static constexpr int kFew = 8, kMany = 64;
  std::atomic<int> alone_{0}, next_{kFew};

  void note(Nanoseconds waited, Nanoseconds all) {
    if (waited < kShort || 4 * waited < all) return next_.store(kFew, std::memory_order_relaxed);
    const int runs = next_.load(std::memory_order_relaxed);
    alone_.store(runs, std::memory_order_relaxed);
    next_.store(2 * runs < kMany ? 2 * runs : kMany, std::memory_order_relaxed);
  }
};

// Runs body(task, scratch) for every task on up to `threads` threads, each with `bytes` of scratch.
// Returns false when there was no memory for the scratch.
template <typename Body>
bool run_tasks(int64_t tasks, int64_t threads, size_t bytes, const Body& body) {
  const int team = team_size(threads, tasks);
  // The calling thread allocates for all: what the others allocate is returned to the system at the end of every call.
  bytes = (bytes + 63) / 64 * 64;
  const Scratch scratch(team * bytes);
  if (!scratch.get()) return false;
  prefer_large_pages(scratch.get(), team * bytes);
  Queue queue;
  run_team(team, [&](int thread) {
    char* own = static_cast<char*>(scratch.get()) + thread * bytes;
    const auto run = [&](int64_t task) { body(task, own); };
    queue.parallel_for(tasks, 0, 1, run, [] {}, [] {});  // in order: neighboring tasks share memory
  });
  return true;
}

}  // namespace ANYMAMBA_ISA
