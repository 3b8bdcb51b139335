// Mamba-2 between its projections, in two phases: the convolution over channels, and the states over heads.
#pragma once

#include "state.h"
#include "token.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kConvBlock = 256;  // channels of a task

template <typename T>
size_t mamba2_scratch(const Mamba2Phase& phase) {
  Arena count;
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(kConvBlock * phase.conv_width);
  count.take<T>(kConvBlock);
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(round_up<T>(static_cast<int>(phase.state)));
  for (int buffer = 0; buffer < 3; ++buffer) count.take<T>(phase.head_width);
  return count.used();
}

// A row as it will be read back from memory of `dtype`.
template <typename T>
void rounded_row(T* target, const T* source, int64_t dtype, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 4)
      target[i] = dtype == kBFloat16  ? from_bfloat16(to_bfloat16(source[i]))
                  : dtype == kFloat16 ? from_float16(to_float16(source[i]))
                                      : source[i];
    else
      target[i] = source[i];
  }
}

// sums[c] += <window[c], weight[c]>, where each window has moved on by one to end with x[c].
template <int kWidth, typename T>
void conv_windows(T* window, const T* weight, const T* x, T* sums, int64_t count, int64_t any_width) {
  const int64_t w = kWidth ? kWidth : any_width;
  for (int64_t c = 0; c < count; ++c) {
    T sum = sums[c];
    for (int64_t k = 0; k + 1 < w; ++k) {
      window[c * w + k] = window[c * w + k + 1];
      sum += window[c * w + k] * weight[c * w + k];
    }
    window[c * w + w - 1] = x[c];
    sums[c] = sum + x[c] * weight[c * w + w - 1];
  }
}

// act = silu(conv) of some channels of a row, whose windows move on by one.
template <typename T>
void conv_channels(const Token<T>& token, const Mamba2Phase& phase, int64_t row, int64_t start, int64_t count,
                   Arena arena) {
  const int64_t w = phase.conv_width, dtype = token.args.dtype;
  const int64_t channels = phase.heads * phase.head_width + 2 * phase.groups * phase.state;
  T *window = arena.take<T>(kConvBlock * w), *weight_buffer = arena.take<T>(kConvBlock * w);
  T *x = arena.take<T>(kConvBlock), *act = token.at(row, phase.act + start);
  const int64_t at = (row * channels + start) * w;
  const int size = static_cast<int>(count), taps = static_cast<int>(count * w);
  read_row(window, token.before(phase.cache_window, at, dtype), dtype, taps, taps);
  rounded_row(x, token.at(row, phase.xbc + start), dtype, count);
  if (phase.conv_bias.data)
    read_row(act, static_cast<const char*>(phase.conv_bias.data) + start * size_of(phase.conv_bias.dtype),
             phase.conv_bias.dtype, size, size);
  else
    std::memset(act, 0, count * sizeof(T));
  const T* weight = read_parameter(weight_buffer, phase.conv_weight, start * w, count * w);
  if (w == 4)
    conv_windows<4>(window, weight, x, act, count, w);
  else
    conv_windows<0>(window, weight, x, act, count, w);
  write_row(token.after(phase.cache_window, at, dtype), window, dtype, taps);
  for (int64_t c = 0; c < count; c += kLanes<T>)
    store_first(act + c, silu<T>(load_first(act + c, count - c)), count - c);
}

template <typename T>
void mamba2_conv(const Token<T>& token, const Mamba2Phase& phase, void* scratch) {
  const int64_t channels = phase.heads * phase.head_width + 2 * phase.groups * phase.state;
  const int64_t blocks = (channels + kConvBlock - 1) / kConvBlock;
  share(token.args.batch * blocks, [&](int64_t task) {
    const int64_t start = task % blocks * kConvBlock, left = channels - start;
    conv_channels(token, phase, task / blocks, start, left < kConvBlock ? left : kConvBlock, Arena(scratch));
  });
}

// `n` numbers with zeros behind them up to a whole vector.
template <typename T>
const T* padded(T* buffer, const T* source, int64_t n) {
  const int64_t width = round_up<T>(static_cast<int>(n));
  if (width == n) return source;
  std::memcpy(buffer, source, n * sizeof(T));
  for (int64_t i = n; i < width; ++i) buffer[i] = 0;
  return buffer;
}

// y of one head of a row, whose state moves on by one.
template <typename T>
void mamba2_head(const Token<T>& token, const Mamba2Phase& phase, int64_t row, int64_t head, Arena arena) {
  const int64_t p = phase.head_width, n = phase.state, inner = phase.heads * p;
  const int64_t group = head / (phase.heads / phase.groups), stride = round_up<T>(static_cast<int>(n));
  T *b_buffer = arena.take<T>(stride), *c_buffer = arena.take<T>(stride);
  T *values = arena.take<T>(p), *skip_buffer = arena.take<T>(p);
  const T *act = token.at(row, phase.act), *x = act + head * p;
  const T dt = step_size(*token.at(row, phase.dt + head) + read_parameter<T>(phase.dt_bias, head), phase.dt_min,
                         phase.dt_max);
  for (int64_t i = 0; i < p; ++i) values[i] = dt * x[i];
  const int64_t at = (row * phase.heads + head) * p * n;
  HeadState<T> state;
  state.before = reinterpret_cast<const T*>(token.before(phase.cache_state, at, own_dtype<T>()));
  state.after = reinterpret_cast<T*>(token.after(phase.cache_state, at, own_dtype<T>()));
  state.p = p, state.n = n, state.stride = stride;
  state.decay = std::exp(-dt * std::exp(read_parameter<T>(phase.a_log, head)));
  state.values = values;
  state.keys = padded(b_buffer, act + inner + group * n, n);
  state.queries = padded(c_buffer, act + inner + (phase.groups + group) * n, n);
  state.y = token.at(row, phase.to + head * p);
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
void mamba2_heads(const Token<T>& token, const Mamba2Phase& phase, void* scratch) {
  share(token.args.batch * phase.heads,
        [&](int64_t task) { mamba2_head(token, phase, task / phase.heads, task % phase.heads, Arena(scratch)); });
}

}  // namespace ANYMAMBA_ISA
