// One token of the causal convolution with SiLU behind it.
#pragma once

#include "token.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kConvBlock = 256;  // channels of a task

template <typename T>
size_t conv_scratch(const ConvPhase& phase) {
  Arena count;
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(kConvBlock * phase.width);
  count.take<T>(kConvBlock);
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
void conv_channels(const Token<T>& token, const ConvPhase& phase, int64_t row, int64_t start, int64_t count,
                   Arena arena) {
  const int64_t w = phase.width, dtype = token.args.dtype;
  T *window = arena.take<T>(kConvBlock * w), *weight_buffer = arena.take<T>(kConvBlock * w);
  T *x = arena.take<T>(kConvBlock), *act = token.at(row, phase.to + start);
  const int64_t at = (row * phase.channels + start) * w;
  const int size = static_cast<int>(count), taps = static_cast<int>(count * w);
  read_row(window, token.before(phase.cache_window, at, dtype), dtype, taps, taps);
  rounded_row(x, token.at(row, phase.x + start), dtype, count);
  if (phase.bias.data)
    read_row(act, static_cast<const char*>(phase.bias.data) + start * size_of(phase.bias.dtype),
             phase.bias.dtype, size, size);
  else
    std::memset(act, 0, count * sizeof(T));
  const T* weight = read_parameter(weight_buffer, phase.weight, start * w, count * w);
  if (w == 4)
    conv_windows<4>(window, weight, x, act, count, w);
  else
    conv_windows<0>(window, weight, x, act, count, w);
  write_row(token.after(phase.cache_window, at, dtype), window, dtype, taps);
  for (int64_t c = 0; c < count; c += kLanes<T>)
    store_first(act + c, silu<T>(load_first(act + c, count - c)), count - c);
}

template <typename T>
void convolve(const Token<T>& token, const ConvPhase& phase, void* scratch) {
  const int64_t blocks = (phase.channels + kConvBlock - 1) / kConvBlock;
  share(token.args.batch * blocks, [&](int64_t task) {
    const int64_t start = task % blocks * kConvBlock, left = phase.channels - start;
    conv_channels(token, phase, task / blocks, start, left < kConvBlock ? left : kConvBlock, Arena(scratch));
  });
}

}  // namespace ANYMAMBA_ISA
