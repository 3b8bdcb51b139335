// Mamba-2 between its convolution and its norm: the states, over heads.
#pragma once

#include "ops/discretization.h"
#include "scan/state.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

template <typename T>
size_t phase_scratch(const Mamba2Phase& phase, int64_t) {
  Arena count;
  count.take<T>(phase.head_width * phase.state);
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(round_up<T>(static_cast<int>(phase.state)));
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(phase.head_width);
  return count.used();
}

// y of one head of a token, whose state advances by one. Not inlined, so that it is the same arithmetic in a window of
// any length.
template <typename T>
[[gnu::noinline]] void mamba2_head(const StepContext<T>& context, const Mamba2Phase& phase, const Token& token,
                                   int64_t head, Arena arena) {
  const int64_t p = phase.head_width, n = phase.state, inner = phase.heads * p, row = token.row;
  T* aside = arena.take<T>(p * n);
  const int64_t group = head / (phase.heads / phase.groups), stride = round_up<T>(static_cast<int>(n));
  T *b_buffer = arena.take<T>(stride), *c_buffer = arena.take<T>(stride);
  T *values = arena.take<T>(p), *skip_buffer = arena.take<T>(p);
  const T *act = context.at(row, phase.act), *x = act + head * p;
  const double raw = static_cast<double>(*context.at(row, phase.dt + head)) + read_parameter<T>(phase.dt_bias, head);
  const StepLimits limits{false, 0, phase.dt_min, phase.dt_max, 0};
  const T dt = static_cast<T>(StepSize(broadcast(raw), limits, false).value[0]);
  for (int64_t i = 0; i < p; ++i) values[i] = dt * x[i];
  const int64_t at = (token.sequence * phase.heads + head) * p * n;
  const CachePart part = context.part(phase.cache_state, at, own_dtype<T>(), token, aside);
  HeadState<T> state;
  state.before = reinterpret_cast<const T*>(part.before);
  state.after = reinterpret_cast<T*>(part.after);
  state.p = p, state.n = n, state.stride = stride;
  state.decay = std::exp(-dt * std::exp(read_parameter<T>(phase.a_log, head)));
  state.values = values;
  state.keys = padded(b_buffer, act + inner + group * n, n);
  state.queries = padded(c_buffer, act + inner + (phase.groups + group) * n, n);
  state.y = context.at(row, phase.to + head * p);
  advance_state(state, 1, 1);
  if (phase.skip_per_channel) {
    const T* skip = read_parameter(skip_buffer, phase.skip, head * p, p);
    for (int64_t i = 0; i < p; ++i) state.y[i] += skip[i] * x[i];
  } else {
    const T skip = read_parameter<T>(phase.skip, head);
    for (int64_t i = 0; i < p; ++i) state.y[i] += skip * x[i];
  }
}

template <typename T>
void run_phase(Kind<kMamba2>, const StepContext<T>& context, const Mamba2Phase& phase) {
  context.parallel_for(context.sequences() * phase.heads, [&](int64_t task) {
    context.for_tokens(task / phase.heads, [&](const Token& token) {
      mamba2_head(context, phase, token, task % phase.heads, Arena(context.scratch));
    });
  });
}

}  // namespace ANYMAMBA_ISA
