// A projection, with the convolution of what it writes.
#pragma once

#include "linear/gemv.h"
#include "decode/step_conv.h"
#include "decode/step_pointwise.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

template <typename T>
size_t phase_scratch(const LinearPhase& phase, int64_t batch) {
  Arena count;
  with_rows<T>(phase.weight.data, phase.scale.data, phase.weight.dtype, phase.out, phase.in,
               [&](const auto& weight) { operand(count, weight, static_cast<const T*>(nullptr), 0, batch); });
  return count.used();
}

// Roughly how many bytes a projection reads from memory.
inline int64_t linear_bytes(const LinearPhase& phase) {
  const int64_t dtype = phase.weight.dtype, numbers = phase.in * phase.out;
  return dtype == kInt8 ? numbers : dtype == kInt4 ? numbers / 2 : numbers * static_cast<int64_t>(size_of(dtype));
}

// Where the partition of a thread begins in the weight of a projection.
template <typename T>
const char* first_weights(const LinearPhase& phase, int thread, int team) {
  const char* first = nullptr;
  with_rows<T>(phase.weight.data, phase.scale.data, phase.weight.dtype, phase.out, phase.in, [&](const auto& weight) {
    const int64_t rows = task_rows(weight), tasks = (phase.out + rows - 1) / rows;
    first = weight.address(Queue::first(tasks, thread, team) * rows);
  });
  return first;
}

inline bool is_apart(int64_t slot, int64_t width, int64_t other, int64_t other_width) {
  return slot + width <= other || other + other_width <= slot;
}

// Whether a convolution reads only what a projection writes, and writes nothing that it reads: then each task of the
// projection can convolve its own columns.
inline bool can_fuse_conv(const LinearPhase& linear, const ConvPhase& conv) {
  const bool reads_it = conv.x >= linear.to && conv.x + conv.channels <= linear.to + linear.out;
  return linear.to >= 0 && !linear.add && reads_it && is_apart(conv.to, conv.channels, linear.x, linear.in) &&
         is_apart(conv.to, conv.channels, linear.to, linear.out);
}

template <typename T, typename Rows>
void project(const StepContext<T>& context, const LinearPhase& phase, const Rows& weight) {
  const int64_t rows = task_rows(weight);
  Arena arena(context.scratch);
  auto x = operand(arena, weight, context.at(0, phase.x), context.args.width, context.args.batch);
  const auto emit = [&](int64_t col, int64_t row, T* products, int count) {
    if (phase.bias.data)
      for (int i = 0; i < count; ++i) products[i] += read_parameter<T>(phase.bias, row + i);
    if (phase.to < 0) return write_row(output_at(context, col, row), products, context.args.dtype, count);
    T* to = context.at(col, phase.to + row);
    for (int i = 0; i < count; ++i) to[i] = phase.add ? to[i] + products[i] : products[i];
  };
  context.parallel_for((phase.out + rows - 1) / rows, [&](int64_t task) {
    const int64_t start = task * rows, stop = start + rows < phase.out ? start + rows : phase.out;
    const ColumnsConv<T> columns(context, context.conv, phase.to, start, stop);
    columns.prefetch();
    x.prepare();  // only with a task: a thread that comes late must not read slots that later stages write
    small_product(weight, start, stop, x, emit);
    columns.run(arena);
  });
}

template <typename T>
void run_phase(Kind<kLinear>, const StepContext<T>& context, const LinearPhase& phase) {
  with_rows<T>(phase.weight.data, phase.scale.data, phase.weight.dtype, phase.out, phase.in,
               [&](const auto& weight) { project(context, phase, weight); });
}

}  // namespace ANYMAMBA_ISA
