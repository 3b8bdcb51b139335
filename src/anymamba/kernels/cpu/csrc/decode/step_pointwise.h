// Phases that take one row at a time: input and output, norms, gates and scales.
#pragma once

#include "ops/norm.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

template <typename T>
void run_phase(Kind<kRead>, const StepContext<T>& context, const EdgePhase& phase) {
  const int64_t dtype = context.args.input_dtype, size = static_cast<int64_t>(size_of(dtype));
  context.parallel_for(context.args.batch, [&](int64_t row) {
    const char* source = static_cast<const char*>(context.args.input) + row * context.args.input_row * size;
    read_row(context.at(row, phase.slot), source, dtype, static_cast<int>(phase.width), static_cast<int>(phase.width));
  });
}

// Where a row's output begins, from column `at` on.
template <typename T>
char* output_at(const StepContext<T>& context, int64_t row, int64_t at) {
  const int64_t size = static_cast<int64_t>(size_of(context.args.dtype));
  return static_cast<char*>(context.args.output) + (row * context.args.output_width + at) * size;
}

template <typename T>
void run_phase(Kind<kWrite>, const StepContext<T>& context, const EdgePhase& phase) {
  context.parallel_for(context.args.batch, [&](int64_t row) {
    write_row(output_at(context, row, 0), context.at(row, phase.slot), context.args.dtype,
              static_cast<int>(phase.width));
  });
}

// The weights of all channels; ones where there are none.
template <typename T>
const T* read_weight(T* buffer, const Parameter& weight, int64_t width) {
  if (weight.data) return read_parameter(buffer, weight, 0, width);
  for (int64_t c = 0; c < width; ++c) buffer[c] = T(1);
  return buffer;
}

template <typename T>
size_t phase_scratch(const EdgePhase&, int64_t) {
  return 0;
}

template <typename T>
size_t phase_scratch(const NormPhase& phase, int64_t) {
  Arena count;
  count.take<T>(phase.width), count.take<T>(phase.group_size);
  return count.used();
}

template <typename T>
void run_phase(Kind<kNorm>, const StepContext<T>& context, const NormPhase& phase) {
  context.parallel_for(context.args.batch, [&](int64_t row) {
    Arena arena(context.scratch);
    const T* weight = read_weight(arena.take<T>(phase.width), phase.weight, phase.width);
    T* unit = arena.take<T>(phase.group_size);
    const T* x = context.at(row, phase.x);
    T* to = context.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; c += phase.group_size)
      if (phase.z < 0)
        rms_norm(x + c, weight + c, to + c, phase.group_size, phase.eps);
      else
        norm_forward_group(x + c, context.at(row, phase.z) + c, weight + c, unit, to + c, phase.group_size,
                           phase.norm_before_gate != 0, phase.eps);
  });
}

template <typename T>
size_t phase_scratch(const GatePhase&, int64_t) {
  return 0;
}

template <typename T>
void run_phase(Kind<kGate>, const StepContext<T>& context, const GatePhase& phase) {
  context.parallel_for(context.args.batch, [&](int64_t row) {
    const T *x = context.at(row, phase.x), *z = context.at(row, phase.z);
    T* to = context.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; c += kLanes<T>)
      store_first(to + c, load_first(x + c, phase.width - c) * silu<T>(load_first(z + c, phase.width - c)),
                  phase.width - c);
  });
}

template <typename T>
size_t phase_scratch(const ScalePhase& phase, int64_t) {
  return static_cast<size_t>(phase.width) * sizeof(T);
}

template <typename T>
void run_phase(Kind<kScale>, const StepContext<T>& context, const ScalePhase& phase) {
  context.parallel_for(context.args.batch, [&](int64_t row) {
    const T* weight = read_weight(static_cast<T*>(context.scratch), phase.weight, phase.width);
    const T *x = context.at(row, phase.x), factor = static_cast<T>(phase.factor);
    T* to = context.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; ++c) to[c] = x[c] * factor * weight[c];
  });
}

}  // namespace ANYMAMBA_ISA
