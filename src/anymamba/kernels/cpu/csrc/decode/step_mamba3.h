// Mamba-3 between its projections, in two phases: what heads have in common, and everything else head by head.
//
//   h = alpha (h + kappa Σ_r v_before[r] ⊗ k_before[r]) + gamma Σ_r v[r] ⊗ k[r]        y[r] = h q[r] + D v[r]
#pragma once

#include "ops/discretization.h"
#include "ops/rotation.h"
#include "scan/state.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

// How many numbers describe the rotation of one token, and the running rotation of a head.
inline int64_t rate_count(const Mamba3Phase& phase) {
  return phase.rotation == kQuaternion ? phase.heads * phase.num_rotations * 3 : phase.num_rotations;
}
inline int64_t rotation_count(const Mamba3Phase& phase) {
  return phase.rotation == kQuaternion ? 4 * phase.num_rotations : phase.num_rotations;
}

// Step sizes, decays, weights and rates of a row, in slot `numbers`: dt, log_decay, gamma, kappa (heads each), rates.
template <typename T>
void discretize_token(const StepContext<T>& context, const Mamba3Phase& phase, int64_t row, Arena arena) {
  const int64_t h = phase.heads, count = rate_count(phase);
  const StepLimits limits{phase.heavy_tail != 0, phase.a_floor, phase.dt_min, phase.dt_max, phase.rate_range};
  DiscretizedRow numbers(arena, h, count);
  const T* bias = read_parameter(arena.take<T>(h), phase.dt_bias, 0, h);
  to_double(numbers.dt, context.at(row, phase.dt), h);
  for (int64_t c = 0; c < h; ++c) numbers.dt[c] += static_cast<double>(bias[c]);
  to_double(numbers.a, context.at(row, phase.a), h);
  to_double(numbers.trap, context.at(row, phase.trap), h);
  to_double(numbers.rotation, context.at(row, phase.rotation_raw), count);
  numbers.compute(limits, false);
  numbers.bound_rotations(limits, phase.rotation == kQuaternion);
  T* to = context.at(row, phase.numbers);
  for (int i = 0; i < 5; ++i)
    for (int64_t c = 0; c < (i < 4 ? h : count); ++c) to[i * h + c] = static_cast<T>(numbers.results[i][c]);
}

// The above, and B and C of every rank and group, normed over the state: (2, rank, groups, state).
template <typename T>
void run_phase(Kind<kMamba3Tokens>, const StepContext<T>& context, const Mamba3Phase& phase) {
  const int64_t n = phase.state, rows = phase.rank * phase.groups;
  context.parallel_for(context.args.batch * 3, [&](int64_t task) {
    const int64_t row = task / 3, side = task % 3;
    if (side == 2) return discretize_token(context, phase, row, Arena(context.scratch));
    const T* weight = read_parameter(static_cast<T*>(context.scratch), side ? phase.query_norm : phase.key_norm, 0, n);
    const T* source = context.at(row, side ? phase.c : phase.b);
    T* target = context.at(row, phase.keys + side * rows * n);
    for (int64_t i = 0; i < rows; ++i)
      rms_norm(source + i * n, weight, target + i * n, n, side ? phase.query_eps : phase.key_eps);
  });
}

template <typename T>
struct Mamba3Buffers {
  int lanes;  // of a part of the rotation
  double *rotation, *vectors;
  T *quarter, *rest, *components;  // components: cosines and sines, or w, x, y, z
  T *row, *keys, *queries, *values, *before, *y, *z, *o, *norm;
  T *aside_state, *aside_k, *aside_v, *aside_rotation;  // the head's part of a cache that the call leaves as it is

  Mamba3Buffers(Arena& arena, const Mamba3Phase& phase) {
    const int64_t p = phase.head_width, r = phase.rank, stride = round_up<T>(static_cast<int>(phase.state));
    lanes = round_up<T>(static_cast<int>(phase.num_rotations));
    rotation = arena.take<double>(4 * lanes), vectors = arena.take<double>(4 * lanes);
    quarter = arena.take<T>(lanes), rest = arena.take<T>(lanes), components = arena.take<T>(4 * lanes);
    row = arena.take<T>(phase.state > p ? phase.state : p);
    keys = arena.take<T>(2 * r * stride), queries = arena.take<T>(r * stride);
    values = arena.take<T>(2 * r * p), before = arena.take<T>(p), y = arena.take<T>(r * p);
    z = arena.take<T>(p), o = arena.take<T>(p), norm = arena.take<T>(p);
    aside_state = arena.take<T>(p * phase.state), aside_k = arena.take<T>(r * phase.state), aside_v = arena.take<T>(p);
    aside_rotation = arena.take<T>(rotation_count(phase));
  }
};

template <typename T>
size_t phase_scratch(const Mamba3Phase& phase, int64_t) {
  Arena heads, tokens;
  const Mamba3Buffers<T> buffers(heads, phase);
  const DiscretizedRow numbers(tokens, phase.heads, rate_count(phase));
  tokens.take<T>(phase.heads > phase.state ? phase.heads : phase.state);
  return heads.used() > tokens.used() ? heads.used() : tokens.used();
}

// The rotation of a head advances by one step.
template <typename T>
void advance_rotation(const StepContext<T>& context, const Mamba3Phase& phase, const Token& token, int64_t head, T dt,
                      const Mamba3Buffers<T>& b) {
  const int64_t count = rotation_count(phase), at = (token.sequence * phase.heads + head) * count;
  const CachePart part = context.part(phase.cache_rotation, at, own_dtype<T>(), token, b.aside_rotation);
  const T* before = reinterpret_cast<const T*>(part.before);
  T* after = reinterpret_cast<T*>(part.after);
  const T* rates = context.at(token.row, phase.numbers + 4 * phase.heads);
  const int rotations = static_cast<int>(phase.num_rotations);
  if (phase.rotation == kQuaternion) {
    read_quaternions(b.rotation, before, rotations, b.lanes);
    advance_quaternions(b.rotation, rates + head * phase.num_rotations * 3, static_cast<double>(dt), rotations,
                        b.lanes, b.vectors, b.components, b.quarter, b.rest);
    return write_quaternions(after, b.components, rotations, b.lanes);
  }
  for (int64_t s = 0; s < count; ++s) b.rotation[s] = static_cast<double>(before[s]);
  for (int64_t s = count; s < b.lanes; ++s) b.quarter[s] = b.rest[s] = 0;
  advance_angles(b.rotation, rates, static_cast<double>(dt), rotations, b.quarter, b.rest, b.components,
                 b.components + b.lanes);
  for (int64_t s = 0; s < count; ++s) after[s] = static_cast<T>(b.rotation[s]);
}

// out (rank, stride) = rotated(normed + bias), with zeros after each row.
template <typename T>
void rotated_rows(const StepContext<T>& context, const Mamba3Phase& phase, int64_t row, int64_t head, int64_t side,
                 int64_t stride, const Mamba3Buffers<T>& b, T* out) {
  const int64_t n = phase.state, group = head / (phase.heads / phase.groups);
  const Parameter& biases = side ? phase.query_bias : phase.key_bias;
  for (int64_t r = 0; r < phase.rank; ++r) {
    const T* normed = context.at(row, phase.keys + ((side * phase.rank + r) * phase.groups + group) * n);
    const T* bias = read_parameter(b.row, biases, (head * phase.rank + r) * n, n);
    T* target = out + r * stride;
    for (int64_t i = 0; i < n; ++i) target[i] = normed[i] + bias[i];
    for (int64_t i = n; i < stride; ++i) target[i] = 0;
    if (phase.rotation == kQuaternion)
      rotate_blocks(target, b.components, phase.num_rotations, b.lanes);
    else
      rotate_pairs(target, b.components, b.components + b.lanes, phase.num_rotations, n,
                   phase.rotation == kInterleaved);
  }
}

// A parameter (heads, rank, head_width) of one head and rank, or null for none.
template <typename T>
const T* of_rank(const Mamba3Phase& phase, const Parameter& parameter, int64_t head, int64_t r, T* buffer) {
  if (!parameter.data) return nullptr;
  return read_parameter(buffer, parameter, (head * phase.rank + r) * phase.head_width, phase.head_width);
}

// Σ_r mimo_o[r] norm(y[r]) silu(z mimo_z[r]) of a head, where mimo_o, mimo_z and the norm are there.
template <typename T>
void gate_head(const StepContext<T>& context, const Mamba3Phase& phase, int64_t row, int64_t head,
               const Mamba3Buffers<T>& b) {
  const int64_t p = phase.head_width;
  const T* z = context.at(row, phase.z + head * p);
  T *out = context.at(row, phase.to + head * p), *y = b.y;
  if (phase.out_norm.data) {
    const T* weight = read_parameter(b.norm, phase.out_norm, head * p, p);
    for (int64_t r = 0; r < phase.rank; ++r) rms_norm(y + r * p, weight, y + r * p, p, phase.out_eps);
  }
  for (int64_t r = 0; r < phase.rank; ++r) {
    const T* mimo_z = of_rank(phase, phase.mimo_z, head, r, b.z);
    const T* mimo_o = of_rank(phase, phase.mimo_o, head, r, b.o);
    for (int64_t i = 0; i < p; i += kLanes<T>) {
      const int64_t left = p - i;
      Vec<T> gate = load_first(z + i, left);
      if (mimo_z) gate *= load_first(mimo_z + i, left);
      Vec<T> o = load_first(y + r * p + i, left) * silu<T>(gate);
      if (mimo_o) o *= load_first(mimo_o + i, left);
      store_first(out + i, r ? load_first(out + i, left) + o : o, left);
    }
  }
}

// The keys and values of the last token, out of the cache, and those of this one into it.
template <typename T>
void exchange_token(const StepContext<T>& context, const Mamba3Phase& phase, const Token& token, int64_t head,
                    const T* x, int64_t stride, const Mamba3Buffers<T>& buffers) {
  const int64_t p = phase.head_width, n = phase.state, rank = phase.rank, dtype = context.args.dtype;
  for (int64_t r = 0; r < rank; ++r) {
    const int64_t at = ((token.sequence * rank + r) * phase.heads + head) * n;
    const CachePart k = context.part(phase.cache_k, at, dtype, token, buffers.aside_k + r * n);
    read_row(buffers.keys + (rank + r) * stride, k.before, dtype, static_cast<int>(n), static_cast<int>(stride));
    write_row(k.after, buffers.keys + r * stride, dtype, static_cast<int>(n));
  }
  const int64_t at = (token.sequence * phase.heads + head) * p;
  const CachePart v = context.part(phase.cache_v, at, dtype, token, buffers.aside_v);
  read_row(buffers.before, v.before, dtype, static_cast<int>(p), static_cast<int>(p));
  write_row(v.after, x, dtype, static_cast<int>(p));
}

// The gated y of one head of a token, whose state advances by one. Not inlined, so that it is the same arithmetic in a
// window of any length.
template <typename T>
[[gnu::noinline]] void mamba3_head(const StepContext<T>& context, const Mamba3Phase& phase, const Token& token,
                                   int64_t head, Arena arena) {
  const int64_t p = phase.head_width, n = phase.state, rank = phase.rank, row = token.row;
  const int64_t stride = round_up<T>(static_cast<int>(n));
  const Mamba3Buffers<T> buffers(arena, phase);
  const T* numbers = context.at(row, phase.numbers + head);
  const T dt = numbers[0], alpha = exp_nonpositive_scalar(numbers[phase.heads]);
  const T gamma = numbers[2 * phase.heads], pending = alpha * numbers[3 * phase.heads];
  const T* x = context.at(row, phase.x + head * p);
  advance_rotation(context, phase, token, head, dt, buffers);
  rotated_rows(context, phase, row, head, 0, stride, buffers, buffers.keys);
  rotated_rows(context, phase, row, head, 1, stride, buffers, buffers.queries);
  exchange_token(context, phase, token, head, x, stride, buffers);
  for (int64_t r = 0; r < rank; ++r) {
    const T* mimo_x = of_rank(phase, phase.mimo_x, head, r, buffers.row);
    T *now = buffers.values + r * p, *last = buffers.values + (rank + r) * p;
    for (int64_t i = 0; i < p; ++i) {
      const T factor = mimo_x ? mimo_x[i] : T(1);
      now[i] = gamma * x[i] * factor;
      last[i] = pending * buffers.before[i] * factor;
    }
  }
  const int64_t at = (token.sequence * phase.heads + head) * p * n;
  const CachePart part = context.part(phase.cache_state, at, own_dtype<T>(), token, buffers.aside_state);
  HeadState<T> state;
  state.before = reinterpret_cast<const T*>(part.before);
  state.after = reinterpret_cast<T*>(part.after);
  state.p = p, state.n = n, state.stride = stride;
  state.decay = alpha;
  state.values = buffers.values, state.keys = buffers.keys, state.queries = buffers.queries;
  state.y = buffers.y;
  advance_state(state, 2 * rank, rank);
  const T skip = read_parameter<T>(phase.skip, head);
  for (int64_t r = 0; r < rank; ++r) {
    const T* mimo_x = of_rank(phase, phase.mimo_x, head, r, buffers.row);
    for (int64_t i = 0; i < p; ++i) buffers.y[r * p + i] += skip * x[i] * (mimo_x ? mimo_x[i] : T(1));
  }
  gate_head(context, phase, row, head, buffers);
}

template <typename T>
void run_phase(Kind<kMamba3Heads>, const StepContext<T>& context, const Mamba3Phase& phase) {
  context.parallel_for(context.sequences() * phase.heads, [&](int64_t task) {
    context.for_tokens(task / phase.heads, [&](const Token& token) {
      mamba3_head(context, phase, token, task % phase.heads, Arena(context.scratch));
    });
  });
}

}  // namespace ANYMAMBA_ISA
