// One token of the causal convolution in a program.
#pragma once

#include "conv.h"
#include "token.h"

namespace ANYMAMBA_ISA {

template <typename T>
size_t conv_scratch(const ConvPhase& phase) {
  Arena count;
  for (int buffer = 0; buffer < 2; ++buffer) count.take<T>(kConvChannels * phase.width);
  count.take<T>(kConvChannels);
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

template <typename T>
void convolve(const Token<T>& token, const ConvPhase& phase, void* scratch) {
  const int64_t blocks = (phase.channels + kConvChannels - 1) / kConvChannels, w = phase.width, dtype = token.args.dtype;
  token.share(token.args.batch * blocks, [&](int64_t task) {
    Arena arena(scratch);
    T *window = arena.take<T>(kConvChannels * w), *weight_buffer = arena.take<T>(kConvChannels * w);
    T* x = arena.take<T>(kConvChannels);
    const int64_t row = task / blocks, start = task % blocks * kConvChannels, left = phase.channels - start;
    const int64_t count = left < kConvChannels ? left : kConvChannels, at = (row * phase.channels + start) * w;
    T* act = token.at(row, phase.to + start);
    rounded_row(x, token.at(row, phase.x + start), dtype, count);
    if (phase.bias.data)
      read_row(act, static_cast<const char*>(phase.bias.data) + start * size_of(phase.bias.dtype), phase.bias.dtype,
               static_cast<int>(count), static_cast<int>(count));
    else
      std::memset(act, 0, count * sizeof(T));
    const T* weight = read_parameter(weight_buffer, phase.weight, start * w, count * w);
    conv_step(token.before(phase.cache_window, at, dtype), token.after(phase.cache_window, at, dtype), dtype, x, weight,
              act, count, w, window);
  });
}

}  // namespace ANYMAMBA_ISA
