// The causal convolution, token by token.
#pragma once

#include "ops/conv.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

template <typename T>
size_t phase_scratch(const ConvPhase& phase, int64_t) {
  Arena count;
  for (int buffer = 0; buffer < 3; ++buffer) count.take<T>(kConvChannels * phase.width);
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

// Some channels of a token, up to kConvChannels. Not inlined, so that it is the same arithmetic wherever it is called
// from.
template <typename T>
[[gnu::noinline]] void convolve_token(const StepContext<T>& context, const ConvPhase& phase, const Token& token,
                                      int64_t start, int64_t count, Arena arena) {
  const int64_t w = phase.width, dtype = context.args.dtype, at = (token.sequence * phase.channels + start) * w;
  T *aside = arena.take<T>(kConvChannels * w), *window = arena.take<T>(kConvChannels * w);
  T *weight_buffer = arena.take<T>(kConvChannels * w), *x = arena.take<T>(kConvChannels);
  T* act = context.at(token.row, phase.to + start);
  const CachePart part = context.part(phase.cache_window, at, dtype, token, aside);
  rounded_row(x, context.at(token.row, phase.x + start), dtype, count);
  if (phase.bias.data)
    read_row(act, static_cast<const char*>(phase.bias.data) + start * size_of(phase.bias.dtype), phase.bias.dtype,
             static_cast<int>(count), static_cast<int>(count));
  else
    std::memset(act, 0, count * sizeof(T));
  const T* weight = read_parameter(weight_buffer, phase.weight, start * w, count * w);
  conv_step(part.before, part.after, dtype, x, weight, act, count, w, window);
}

// The same channels of all tokens of a sequence.
template <typename T>
void convolve_channels(const StepContext<T>& context, const ConvPhase& phase, int64_t sequence, int64_t start,
                       int64_t left, Arena arena) {
  const int64_t count = left < kConvChannels ? left : kConvChannels;
  context.for_tokens(sequence,
                     [&](const Token& token) { convolve_token(context, phase, token, start, count, arena); });
}

template <typename T>
void run_phase(Kind<kConv>, const StepContext<T>& context, const ConvPhase& phase) {
  const int64_t blocks = (phase.channels + kConvChannels - 1) / kConvChannels;
  context.parallel_for(context.sequences() * blocks, [&](int64_t task) {
    const int64_t start = task % blocks * kConvChannels;
    convolve_channels(context, phase, task / blocks, start, phase.channels - start, Arena(context.scratch));
  });
}

// The channels whose inputs are the columns [start, stop) of a projection to slot `from`: a channel needs no other.
// Without a phase there are none.
template <typename T>
class ColumnsConv {
 public:
  ColumnsConv(const StepContext<T>& context, const ConvPhase* phase, int64_t from, int64_t start, int64_t stop)
      : context_(context), phase_(phase) {
    if (!phase) return;
    const int64_t shift = phase->x - from;
    begin_ = start < shift ? 0 : start - shift;
    end_ = stop - shift < phase->channels ? stop - shift : phase->channels;
  }

  // Asks for the memory that it will read, before the projection keeps memory busy.
  void prefetch() const {
    if (begin_ >= end_) return;
    const int64_t w = phase_->width, dtype = context_.args.dtype;
    prefetch(static_cast<const char*>(phase_->weight.data), phase_->weight.dtype, begin_ * w);
    for (int64_t sequence = 0; sequence < context_.sequences(); ++sequence)
      prefetch(context_.before(phase_->cache_window, 0, dtype), dtype, (sequence * phase_->channels + begin_) * w);
  }

  void run(Arena arena) const {
    for (int64_t sequence = 0; sequence < context_.sequences(); ++sequence)
      for (int64_t c = begin_; c < end_; c += kConvChannels)
        convolve_channels(context_, *phase_, sequence, c, end_ - c, arena);
  }

 private:
  const StepContext<T>& context_;
  const ConvPhase* phase_;
  int64_t begin_ = 0, end_ = 0;

  void prefetch(const char* base, int64_t dtype, int64_t at) const {
    const int64_t size = static_cast<int64_t>(size_of(dtype)), bytes = (end_ - begin_) * phase_->width * size;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(base + at * size + byte);
  }
};

}  // namespace ANYMAMBA_ISA
