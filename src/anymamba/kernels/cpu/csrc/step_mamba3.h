// Mamba-3 between its projections, in two phases: the norms of B and C, and everything else head by head.
//
//   h = alpha (h + kappa Σ_r v_before[r] ⊗ k_before[r]) + gamma Σ_r v[r] ⊗ k[r]        y[r] = h q[r] + D v[r]
#pragma once

#include "state.h"
#include "token.h"

namespace ANYMAMBA_ISA {

// B and C of every rank and group, normed over the state: (2, rank, groups, state).
template <typename T>
void mamba3_keys(const Token<T>& token, const Mamba3Phase& phase, void* scratch) {
  const int64_t n = phase.state, rows = phase.rank * phase.groups;
  share(token.args.batch * 2, [&](int64_t task) {
    const int64_t row = task / 2, side = task % 2;
    const T* weight = read_parameter(static_cast<T*>(scratch), side ? phase.query_norm : phase.key_norm, 0, n);
    const T* source = token.at(row, side ? phase.c : phase.b);
    T* target = token.at(row, phase.keys + side * rows * n);
    for (int64_t i = 0; i < rows; ++i)
      rms_norm(source + i * n, weight, target + i * n, n, side ? phase.query_eps : phase.key_eps);
  });
}

// The numbers of a head that its ranks share.
template <typename T>
struct HeadWeights {
  T dt, alpha, gamma, kappa;
};

template <typename T>
HeadWeights<T> head_weights(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head) {
  HeadWeights<T> weights;
  weights.dt = step_size(*token.at(row, phase.dt + head) + read_parameter<T>(phase.dt_bias, head), phase.dt_min,
                         phase.dt_max);
  const T a = *token.at(row, phase.a + head), trap = *token.at(row, phase.trap + head);
  const T activated = !phase.heavy_tail ? softplus(a) : a >= 0 ? T(1) + a : T(1) / (T(1) - a);
  const T rate = activated < T(phase.a_floor) ? T(phase.a_floor) : activated;
  const T lambda = sigmoid<T>(broadcast(trap))[0];
  weights.alpha = std::exp(-weights.dt * rate);
  weights.gamma = lambda * weights.dt;
  weights.kappa = (T(1) - lambda) * weights.dt;
  return weights;
}

// The angles of a head move on; their cosines and sines.
template <typename T>
void advance_angles(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head, T dt, T* cosine,
                    T* sine) {
  constexpr double kTurn = 6.283185307179586476925;
  const int64_t at = (row * phase.heads + head) * phase.pairs;
  const T* before = reinterpret_cast<const T*>(token.before(phase.cache_angle, at, own_dtype<T>()));
  T* after = reinterpret_cast<T*>(token.after(phase.cache_angle, at, own_dtype<T>()));
  const T* raw = token.at(row, phase.angle);
  for (int64_t s = 0; s < phase.pairs; ++s) {
    const T rate = static_cast<T>(phase.rate_range) * std::tanh(raw[s]);
    const double angle = static_cast<double>(before[s]) + static_cast<double>(dt) * static_cast<double>(rate);
    after[s] = static_cast<T>(angle - kTurn * std::floor(angle / kTurn));
    cosine[s] = std::cos(after[s]);
    sine[s] = std::sin(after[s]);
  }
}

template <typename T>
void rotate(T* x, const Mamba3Phase& phase, const T* cosine, const T* sine) {
  const int64_t step = phase.interleaved ? 2 : 1, other = phase.interleaved ? 1 : phase.state / 2;
  for (int64_t s = 0; s < phase.pairs; ++s) {
    const T u = x[s * step], w = x[s * step + other];
    x[s * step] = u * cosine[s] - w * sine[s];
    x[s * step + other] = u * sine[s] + w * cosine[s];
  }
}

// out (rank, stride) = rotated(normed + bias), with zeros behind each row.
template <typename T>
void turned_rows(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head, int64_t side,
                 const T* cosine, const T* sine, int64_t stride, T* buffer, T* out) {
  const int64_t n = phase.state, group = head / (phase.heads / phase.groups);
  const Parameter& biases = side ? phase.query_bias : phase.key_bias;
  for (int64_t r = 0; r < phase.rank; ++r) {
    const T* normed = token.at(row, phase.keys + ((side * phase.rank + r) * phase.groups + group) * n);
    const T* bias = read_parameter(buffer, biases, (head * phase.rank + r) * n, n);
    T* target = out + r * stride;
    for (int64_t i = 0; i < n; ++i) target[i] = normed[i] + bias[i];
    for (int64_t i = n; i < stride; ++i) target[i] = 0;
    rotate(target, phase, cosine, sine);
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
void gate_head(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head, T* y, T* z_buffer,
               T* o_buffer, T* norm_buffer) {
  const int64_t p = phase.head_width;
  const T* z = token.at(row, phase.z + head * p);
  T* out = token.at(row, phase.to + head * p);
  if (phase.out_norm.data) {
    const T* weight = read_parameter(norm_buffer, phase.out_norm, head * p, p);
    for (int64_t r = 0; r < phase.rank; ++r) rms_norm(y + r * p, weight, y + r * p, p, phase.out_eps);
  }
  for (int64_t r = 0; r < phase.rank; ++r) {
    const T* mimo_z = of_rank(phase, phase.mimo_z, head, r, z_buffer);
    const T* mimo_o = of_rank(phase, phase.mimo_o, head, r, o_buffer);
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

template <typename T>
struct Mamba3Buffers {
  T *cosine, *sine, *row, *keys, *queries, *values, *before, *y, *z, *o, *norm;

  Mamba3Buffers(Arena& arena, const Mamba3Phase& phase) {
    const int64_t p = phase.head_width, r = phase.rank, stride = round_up<T>(static_cast<int>(phase.state));
    cosine = arena.take<T>(phase.pairs), sine = arena.take<T>(phase.pairs);
    row = arena.take<T>(phase.state > p ? phase.state : p);
    keys = arena.take<T>(2 * r * stride), queries = arena.take<T>(r * stride);
    values = arena.take<T>(2 * r * p), before = arena.take<T>(p), y = arena.take<T>(r * p);
    z = arena.take<T>(p), o = arena.take<T>(p), norm = arena.take<T>(p);
  }
};

template <typename T>
size_t mamba3_scratch(const Mamba3Phase& phase) {
  Arena count;
  const Mamba3Buffers<T> buffers(count, phase);
  return count.used();
}

// The keys and values of the last token, out of the cache, and those of this one into it.
template <typename T>
void exchange_token(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head, const T* x,
                    int64_t stride, const Mamba3Buffers<T>& buffers) {
  const int64_t p = phase.head_width, n = phase.state, rank = phase.rank, dtype = token.args.dtype;
  for (int64_t r = 0; r < rank; ++r) {
    const int64_t at = ((row * rank + r) * phase.heads + head) * n;
    read_row(buffers.keys + (rank + r) * stride, token.before(phase.cache_k, at, dtype), dtype, static_cast<int>(n),
             static_cast<int>(stride));
    write_row(token.after(phase.cache_k, at, dtype), buffers.keys + r * stride, dtype, static_cast<int>(n));
  }
  const int64_t at = (row * phase.heads + head) * p;
  read_row(buffers.before, token.before(phase.cache_v, at, dtype), dtype, static_cast<int>(p), static_cast<int>(p));
  write_row(token.after(phase.cache_v, at, dtype), x, dtype, static_cast<int>(p));
}

template <typename T>
void mamba3_head(const Token<T>& token, const Mamba3Phase& phase, int64_t row, int64_t head, Arena arena) {
  const int64_t p = phase.head_width, n = phase.state, rank = phase.rank, stride = round_up<T>(static_cast<int>(n));
  const Mamba3Buffers<T> buffers(arena, phase);
  const HeadWeights<T> weights = head_weights(token, phase, row, head);
  const T* x = token.at(row, phase.x + head * p);
  advance_angles(token, phase, row, head, weights.dt, buffers.cosine, buffers.sine);
  turned_rows(token, phase, row, head, 0, buffers.cosine, buffers.sine, stride, buffers.row, buffers.keys);
  turned_rows(token, phase, row, head, 1, buffers.cosine, buffers.sine, stride, buffers.row, buffers.queries);
  exchange_token(token, phase, row, head, x, stride, buffers);
  const T pending = weights.alpha * weights.kappa;
  for (int64_t r = 0; r < rank; ++r) {
    const T* mimo_x = of_rank(phase, phase.mimo_x, head, r, buffers.row);
    T *now = buffers.values + r * p, *last = buffers.values + (rank + r) * p;
    for (int64_t i = 0; i < p; ++i) {
      const T factor = mimo_x ? mimo_x[i] : T(1);
      now[i] = weights.gamma * x[i] * factor;
      last[i] = pending * buffers.before[i] * factor;
    }
  }
  const int64_t at = (row * phase.heads + head) * p * n;
  HeadState<T> state;
  state.before = reinterpret_cast<const T*>(token.before(phase.cache_state, at, own_dtype<T>()));
  state.after = reinterpret_cast<T*>(token.after(phase.cache_state, at, own_dtype<T>()));
  state.p = p, state.n = n, state.stride = stride;
  state.decay = weights.alpha;
  state.values = buffers.values, state.keys = buffers.keys, state.queries = buffers.queries;
  state.y = buffers.y;
  advance_state(state, 2 * rank, rank);
  const T skip = read_parameter<T>(phase.skip, head);
  for (int64_t r = 0; r < rank; ++r) {
    const T* mimo_x = of_rank(phase, phase.mimo_x, head, r, buffers.row);
    for (int64_t i = 0; i < p; ++i) buffers.y[r * p + i] += skip * x[i] * (mimo_x ? mimo_x[i] : T(1));
  }
  gate_head(token, phase, row, head, buffers.y, buffers.z, buffers.o, buffers.norm);
}

template <typename T>
void mamba3_heads(const Token<T>& token, const Mamba3Phase& phase, void* scratch) {
  share(token.args.batch * phase.heads,
        [&](int64_t task) { mamba3_head(token, phase, task / phase.heads, task % phase.heads, Arena(scratch)); });
}

}  // namespace ANYMAMBA_ISA
