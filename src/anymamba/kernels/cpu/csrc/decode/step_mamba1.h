// Mamba-1 between its projections, token by token: the states of every channel, and the gate.
#pragma once

#include "scan/selective_scan.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kMamba1Block = 64;  // channels of a task

template <typename T>
size_t phase_scratch(const Mamba1Phase& phase, int64_t) {
  Arena count;
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(round_up<T>(static_cast<int>(phase.state)));
  for (int buffer = 0; buffer < 3; ++buffer) count.take<T>(kMamba1Block * phase.state);
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(kMamba1Block);
  return count.used();
}

// exp(x) for any x.
template <typename T>
inline Vec<T> exp_any(Vec<T> x) {
  const Vec<T> zero = {}, e = exp_nonpositive(x < zero ? x : -x);
  return x < zero ? e : T(1) / e;
}

// The gated y of some channels of a token, whose states advance by one. Not inlined, so that it is the same arithmetic
// in a window of any length.
template <typename T>
[[gnu::noinline]] void mamba1_channels(const StepContext<T>& context, const Mamba1Phase& phase, const Token& token,
                                       int64_t start, int64_t count, Arena arena) {
  const int64_t n = phase.state, stride = round_up<T>(static_cast<int>(n)), row = token.row;
  T* aside = arena.take<T>(kMamba1Block * n);
  T *b_buffer = arena.take<T>(stride), *c_buffer = arena.take<T>(stride);
  T *log_buffer = arena.take<T>(kMamba1Block * n), *rates = arena.take<T>(kMamba1Block * n);
  T *skip_buffer = arena.take<T>(kMamba1Block), *sizes = arena.take<T>(kMamba1Block);
  const T *b = padded(b_buffer, context.at(row, phase.b), n), *c = padded(c_buffer, context.at(row, phase.c), n);
  const T *x = context.at(row, phase.x + start), *dt = context.at(row, phase.dt + start);
  const T* z = context.at(row, phase.z + start);
  const T* a_log = read_parameter(log_buffer, phase.a_log, start * n, count * n);
  const T* skip = read_parameter(skip_buffer, phase.skip, start, count);
  T* y = context.at(row, phase.to + start);
  const int64_t at = (token.sequence * phase.channels + start) * n;
  const CachePart part = context.part(phase.cache_state, at, own_dtype<T>(), token, aside);
  const T* before = reinterpret_cast<const T*>(part.before);
  T* after = reinterpret_cast<T*>(part.after);
  // The rates of a block in one go: a state may be shorter than a vector.
  for (int64_t i = 0; i < count * n; i += kLanes<T>)
    store_first(rates + i, -exp_any<T>(load_first(a_log + i, count * n - i)), count * n - i);
  for (int64_t i = 0; i < count; i += kLanes<T>)
    store_first(sizes + i, softplus<T>(load_first(dt + i, count - i)), count - i);
  for (int64_t i = 0; i < count; ++i) {
    const Vec<T> size = broadcast(sizes[i]), input = broadcast(sizes[i] * x[i]);
    Vec<T> sum = {};
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      const int64_t k = i * n + j, left = n - j;
      const SelectiveStates<T> state(size, load_first(rates + k, left), load_first(before + k, left), input, load(b + j));
      store_first(after + k, state.after, left);
      sum += state.after * load(c + j);
    }
    y[i] = sum_lanes<T>(sum) + skip[i] * x[i];
  }
  for (int64_t i = 0; i < count; i += kLanes<T>)
    store_first(y + i, load_first(y + i, count - i) * silu<T>(load_first(z + i, count - i)), count - i);
}

template <typename T>
void run_phase(Kind<kMamba1>, const StepContext<T>& context, const Mamba1Phase& phase) {
  const int64_t blocks = (phase.channels + kMamba1Block - 1) / kMamba1Block;
  context.parallel_for(context.sequences() * blocks, [&](int64_t task) {
    const int64_t start = task % blocks * kMamba1Block, left = phase.channels - start;
    const int64_t count = left < kMamba1Block ? left : kMamba1Block;
    context.for_tokens(task / blocks, [&](const Token& token) {
      mamba1_channels(context, phase, token, start, count, Arena(context.scratch));
    });
  });
}

}  // namespace ANYMAMBA_ISA
