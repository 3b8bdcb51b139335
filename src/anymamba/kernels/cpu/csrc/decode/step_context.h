// What the phases of a decode step have in common: the slots of all rows, and the threads.
#pragma once

#include <cmath>

#include "schema.h"
#include "simd/vector_rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kNextBytes = 64 << 10;  // that a thread prefetches while it waits

// A token of a sequence: the rows of a sequence follow each other, `window` of them.
struct Token {
  int64_t row, sequence, position;
};

// A part of a cache before and after a token.
struct CachePart {
  const char* before;
  char* after;
};

// A kind of phase as a type, by which `run_phase` is overloaded.
template <int64_t kKind>
struct Kind {};

template <typename T>
struct StepContext {
  const StepArgs& args;
  T* slots;          // (batch, width)
  Queue* queue;      // of the present stage; null where a thread works alone
  int thread, team;  // this one, and how many there are
  void* scratch;     // of this thread
  // Runs the phases from `rest` on, by one thread, when the work of the stage's first phase is done.
  void (*finish)(const StepContext&);
  const Phase *rest = nullptr, *rest_end = nullptr;
  const ConvPhase* conv = nullptr;  // of what the stage's projection writes; null for none
  const char* next = nullptr;  // what this thread will read first in the next stage, if that is known

  T* at(int64_t row, int64_t slot) const { return slots + row * args.width + slot; }
  int64_t sequences() const { return args.batch / args.window; }
  // The tensor of the old cache from element `at` on.
  const char* before(int64_t tensor, int64_t at, int64_t dtype) const {
    return static_cast<const char*>(args.old_cache[tensor]) + at * static_cast<int64_t>(size_of(dtype));
  }
  // The same part of the cache around a token: the first one continues from the old cache, the others from what the one
  // before them left. That is in `scratch`, as large as the part, if the call leaves the cache as it is.
  CachePart part(int64_t tensor, int64_t at, int64_t dtype, const Token& token, void* scratch) const {
    char* after = static_cast<char*>(scratch);
    if (args.new_cache) after = static_cast<char*>(args.new_cache[tensor]) + at * static_cast<int64_t>(size_of(dtype));
    return {token.position ? after : before(tensor, at, dtype), after};
  }
  // body(token) for the tokens of a sequence in their order: all of its window, or as many as are replayed.
  template <typename Body>
  void for_tokens(int64_t sequence, const Body& body) const {
    const int64_t count = args.replayed ? args.replayed[sequence] : args.window;
    for (int64_t i = 0; i < count; ++i) body(Token{sequence * args.window + i, sequence, i});
  }
  // body(task) for every task, by any free thread, until all are done; called once per stage.
  template <typename Body>
  void parallel_for(int64_t tasks, const Body& body) const {
    const char *line = next, *const end = next ? next + kNextBytes : nullptr;
    const auto look_ahead = [line, end]() mutable {
      for (int i = 0; i < 4 && line != end; ++i, line += 64) __builtin_prefetch(line, 0, 3);
    };
    if (queue) return queue->parallel_for(tasks, thread, team, body, [&] { finish(*this); }, look_ahead);
    for (int64_t task = 0; task < tasks; ++task) body(task);
  }
};

// `width` numbers of a parameter from element `at` on, in `buffer` unless they are of T already.
template <typename T>
inline const T* read_parameter(T* buffer, const Parameter& parameter, int64_t at, int64_t width) {
  return row_as(buffer, parameter.data, at, parameter.dtype, width);
}
template <typename T>
inline T read_parameter(const Parameter& parameter, int64_t at) {
  T buffer = 0;
  return *read_parameter(&buffer, parameter, at, 1);
}

// `n` numbers, with zeros after them to the end of a vector.
template <typename T>
const T* padded(T* buffer, const T* source, int64_t n) {
  const int64_t width = round_up<T>(static_cast<int>(n));
  if (width == n) return source;
  std::memcpy(buffer, source, n * sizeof(T));
  for (int64_t i = n; i < width; ++i) buffer[i] = 0;
  return buffer;
}

// y = weight x / sqrt(mean(x²) + eps); y may be x.
template <typename T>
inline void rms_norm(const T* x, const T* weight, T* y, int64_t width, double eps) {
  Vec<T> squares = {};
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    const Vec<T> u = load_first(x + c, width - c);
    squares += u * u;
  }
  const double mean = static_cast<double>(sum_lanes<T>(squares)) / static_cast<double>(width);
  const T rho = static_cast<T>(1 / std::sqrt(mean + eps));
  for (int64_t c = 0; c < width; c += kLanes<T>)
    store_first(y + c, load_first(x + c, width - c) * rho * load_first(weight + c, width - c), width - c);
}

}  // namespace ANYMAMBA_ISA
