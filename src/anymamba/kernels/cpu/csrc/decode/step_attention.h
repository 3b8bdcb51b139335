// One token of attention: the query and the key rotate by the row's position, key and value are appended to the row's
// own, and the query heads that share them read all of them, block after block.
//
// A row's steps are (steps, key or value, groups, head_width), as ops/causal_attention.py has them. Every block updates
// the softmax of what was read so far: the largest score, the sum of weights and the weighted sum of values. Blocks
// begin at the first key that is read, so a row has the same bits in any batch and on any number of threads.
#pragma once

#include <cmath>
#include <limits>

#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kAttentionKeys = 64;  // keys of a block

template <typename T>
size_t phase_scratch(const AttentionPhase& phase, int64_t) {
  const int64_t shared = phase.heads / phase.groups;
  Arena count;
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(shared * phase.head_width);
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(phase.rotated / 2);
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(shared);
  count.take<T>(shared * kAttentionKeys);
  count.take<T>(phase.head_width);
  return count.used();
}

// Turns the first channels of a head by the angles of a position.
template <typename T>
void rotate_head(T* head, const AttentionPhase& phase, const T* cosines, const T* sines) {
  const int64_t pairs = phase.rotated / 2, step = phase.interleaved ? 2 : 1, apart = phase.interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    T &first = head[i * step], &second = head[i * step + apart];
    const T x = first, y = second;
    first = x * cosines[i] - y * sines[i];
    second = y * cosines[i] + x * sines[i];
  }
}

template <typename T>
T dot(const T* a, const T* b, int64_t n) {
  Vec<T> sum = {};
  for (int64_t c = 0; c < n; c += kLanes<T>) sum += load_first(a + c, n - c) * load_first(b + c, n - c);
  return sum_lanes<T>(sum);
}

// y of the heads of a row that share a group's keys and values.
template <typename T>
void attend_group(const StepContext<T>& context, const AttentionPhase& phase, int64_t row, int64_t group, Arena arena) {
  const int64_t e = phase.head_width, shared = phase.heads / phase.groups, dtype = context.args.dtype;
  const int64_t size = static_cast<int64_t>(size_of(dtype)), pairs = phase.rotated / 2;
  T *queries = arena.take<T>(shared * e), *sums = arena.take<T>(shared * e);
  T *cosines = arena.take<T>(pairs), *sines = arena.take<T>(pairs);
  T *largest = arena.take<T>(shared), *totals = arena.take<T>(shared);
  T *weights = arena.take<T>(shared * kAttentionKeys), *buffer = arena.take<T>(e);
  // 1) The query heads and the key, at the row's position.
  const T* x = context.at(row, phase.x);
  const int64_t position = static_cast<const int64_t*>(context.args.old_cache[phase.cache_lengths])[row];
  const double* frequencies = static_cast<const double*>(phase.frequencies.data);
  for (int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    cosines[i] = static_cast<T>(std::cos(angle));
    sines[i] = static_cast<T>(std::sin(angle));
  }
  std::memcpy(queries, x + group * shared * e, shared * e * sizeof(T));
  for (int64_t head = 0; head < shared; ++head) rotate_head(queries + head * e, phase, cosines, sines);
  // 2) The key and the value, after those of the row.
  const int64_t step = 2 * phase.groups * e, value = phase.groups * e;
  char* const steps = static_cast<char*>(context.args.new_cache[phase.cache_kv]) +
                      (row * context.args.capacities[phase.cache_kv] * step + group * e) * size;
  std::memcpy(buffer, x + (phase.heads + group) * e, e * sizeof(T));
  rotate_head(buffer, phase, cosines, sines);
  write_row(steps + position * step * size, buffer, dtype, static_cast<int>(e));
  write_row(steps + (position * step + value) * size, x + (phase.heads + phase.groups + group) * e, dtype,
            static_cast<int>(e));
  // 3) Scores, weights and values, block after block.
  for (int64_t head = 0; head < shared; ++head) largest[head] = -std::numeric_limits<T>::infinity(), totals[head] = 0;
  std::memset(sums, 0, shared * e * sizeof(T));
  const T scale = static_cast<T>(phase.scale), cap = static_cast<T>(phase.softcap);
  const int64_t end = position + 1, first = phase.window && end > phase.window ? end - phase.window : 0;
  for (int64_t begin = first; begin < end; begin += kAttentionKeys) {
    const int64_t count = end - begin < kAttentionKeys ? end - begin : kAttentionKeys;
    for (int64_t j = 0; j < count; ++j) {
      const T* key = row_as(buffer, steps, (begin + j) * step, dtype, e);
      for (int64_t head = 0; head < shared; ++head) {
        const T score = scale * dot(queries + head * e, key, e);
        weights[head * kAttentionKeys + j] = cap > 0 ? cap * std::tanh(score / cap) : score;
      }
    }
    for (int64_t head = 0; head < shared; ++head) {
      T* scores = weights + head * kAttentionKeys;
      for (int64_t j = count; j < kAttentionKeys; ++j) scores[j] = -std::numeric_limits<T>::infinity();
      T top = largest[head];
      for (int64_t j = 0; j < count; ++j) top = scores[j] > top ? scores[j] : top;
      Vec<T> total = {};
      for (int64_t j = 0; j < kAttentionKeys; j += kLanes<T>) {
        const Vec<T> weight = exp_nonpositive(load(scores + j) - broadcast(top));
        store(scores + j, weight);
        total += weight;
      }
      const T before = begin == first ? T(0) : exp_nonpositive_scalar<T>(largest[head] - top);
      totals[head] = totals[head] * before + sum_lanes<T>(total);
      T* sum = sums + head * e;
      for (int64_t c = 0; c < e; ++c) sum[c] *= before;
      largest[head] = top;
    }
    for (int64_t j = 0; j < count; ++j) {
      const T* values = row_as(buffer, steps, (begin + j) * step + value, dtype, e);
      for (int64_t head = 0; head < shared; ++head) {
        T* sum = sums + head * e;
        const Vec<T> weight = broadcast(weights[head * kAttentionKeys + j]);
        for (int64_t c = 0; c < e; c += kLanes<T>)
          store_first(sum + c, load_first(sum + c, e - c) + weight * load_first(values + c, e - c), e - c);
      }
    }
  }
  // 4) The weighted means.
  T* y = context.at(row, phase.to + group * shared * e);
  for (int64_t head = 0; head < shared; ++head)
    for (int64_t c = 0; c < e; ++c) y[head * e + c] = sums[head * e + c] / totals[head];
}

template <typename T>
void run_phase(Kind<kAttention>, const StepContext<T>& context, const AttentionPhase& phase) {
  context.parallel_for(context.args.batch * phase.groups, [&](int64_t task) {
    attend_group(context, phase, task / phase.groups, task % phase.groups, Arena(context.scratch));
  });
}

}  // namespace ANYMAMBA_ISA
