// The phases of a program that take a row at a time: its input and output, norms, gates and scales.
#pragma once

#include "ops/norm.h"
#include "decode/step_context.h"

namespace ANYMAMBA_ISA {

template <typename T>
void read_input(const Token<T>& token, const EdgePhase& phase) {
  const int64_t dtype = token.args.input_dtype, size = static_cast<int64_t>(size_of(dtype));
  token.share(token.args.batch, [&](int64_t row) {
    const char* source = static_cast<const char*>(token.args.input) + row * token.args.input_row * size;
    read_row(token.at(row, phase.slot), source, dtype, static_cast<int>(phase.width), static_cast<int>(phase.width));
  });
}

// Where a row's output begins, from column `at` on.
template <typename T>
char* output_at(const Token<T>& token, int64_t row, int64_t at) {
  const int64_t size = static_cast<int64_t>(size_of(token.args.dtype));
  return static_cast<char*>(token.args.output) + (row * token.args.output_width + at) * size;
}

template <typename T>
void write_output(const Token<T>& token, const EdgePhase& phase) {
  token.share(token.args.batch, [&](int64_t row) {
    write_row(output_at(token, row, 0), token.at(row, phase.slot), token.args.dtype, static_cast<int>(phase.width));
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
size_t norm_scratch(const NormPhase& phase) {
  Arena count;
  count.take<T>(phase.width), count.take<T>(phase.group_size);
  return count.used();
}

template <typename T>
void norm_rows(const Token<T>& token, const NormPhase& phase) {
  token.share(token.args.batch, [&](int64_t row) {
    Arena arena(token.scratch);
    const T* weight = read_weight(arena.take<T>(phase.width), phase.weight, phase.width);
    T* unit = arena.take<T>(phase.group_size);
    const T* x = token.at(row, phase.x);
    T* to = token.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; c += phase.group_size)
      if (phase.z < 0)
        rms_norm(x + c, weight + c, to + c, phase.group_size, phase.eps);
      else
        norm_forward_group(x + c, token.at(row, phase.z) + c, weight + c, unit, to + c, phase.group_size,
                           phase.norm_before_gate != 0, phase.eps);
  });
}

template <typename T>
void gate_rows(const Token<T>& token, const GatePhase& phase) {
  token.share(token.args.batch, [&](int64_t row) {
    const T *x = token.at(row, phase.x), *z = token.at(row, phase.z);
    T* to = token.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; c += kLanes<T>)
      store_first(to + c, load_first(x + c, phase.width - c) * silu<T>(load_first(z + c, phase.width - c)),
                  phase.width - c);
  });
}

template <typename T>
void scale_rows(const Token<T>& token, const ScalePhase& phase) {
  token.share(token.args.batch, [&](int64_t row) {
    const T* weight = read_weight(static_cast<T*>(token.scratch), phase.weight, phase.width);
    const T *x = token.at(row, phase.x), factor = static_cast<T>(phase.factor);
    T* to = token.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; ++c) to[c] = x[c] * factor * weight[c];
  });
}

}  // namespace ANYMAMBA_ISA
