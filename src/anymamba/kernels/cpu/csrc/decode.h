// One token of each row through a program: phase after phase in one team of threads.
#pragma once

#include "linear.h"
#include "norm.h"
#include "step_conv.h"
#include "step_mamba1.h"
#include "step_mamba2.h"
#include "step_mamba3.h"
#include "token.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kTeamBytes = 128 << 10;  // a program that reads less is not worth waking threads

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
void norm_rows(const Token<T>& token, const NormPhase& phase, void* scratch) {
  token.share(token.args.batch, [&](int64_t row) {
    Arena arena(scratch);
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
void scale_rows(const Token<T>& token, const ScalePhase& phase, void* scratch) {
  token.share(token.args.batch, [&](int64_t row) {
    const T* weight = read_weight(static_cast<T*>(scratch), phase.weight, phase.width);
    const T *x = token.at(row, phase.x), factor = static_cast<T>(phase.factor);
    T* to = token.at(row, phase.to);
    for (int64_t c = 0; c < phase.width; ++c) to[c] = x[c] * factor * weight[c];
  });
}

template <typename T, typename Rows>
void project(const Token<T>& token, const LinearPhase& phase, const Rows& weight, void* scratch) {
  const int64_t rows = task_rows(weight);
  Arena arena(scratch);
  const auto x = operand(arena, weight, token.at(0, phase.x), token.args.width, token.args.batch);
  token.share((phase.out + rows - 1) / rows, [&](int64_t task) {
    const int64_t start = task * rows, stop = start + rows < phase.out ? start + rows : phase.out;
    const auto emit = [&](int64_t col, int64_t row, T* products, int count) {
      if (phase.bias.data)
        for (int i = 0; i < count; ++i) products[i] += read_parameter<T>(phase.bias, row + i);
      if (phase.to < 0) return write_row(output_at(token, col, row), products, token.args.dtype, count);
      T* to = token.at(col, phase.to + row);
      for (int i = 0; i < count; ++i) to[i] = phase.add ? to[i] + products[i] : products[i];
    };
    small_product(weight, start, stop, x, emit);
  });
}

template <typename T>
void project_any(const Token<T>& token, const LinearPhase& phase, void* scratch) {
  with_rows<T>(phase.weight.data, phase.scale.data, phase.weight.dtype, phase.out, phase.in,
               [&](const auto& weight) { project(token, phase, weight, scratch); });
}

template <typename Args>
const Args& args_of(const Phase& phase) {
  return *static_cast<const Args*>(phase.args);
}

template <typename T>
size_t linear_scratch(const LinearPhase& phase, int64_t batch) {
  Arena count;
  with_rows<T>(phase.weight.data, phase.scale.data, phase.weight.dtype, phase.out, phase.in,
               [&](const auto& weight) { operand(count, weight, static_cast<const T*>(nullptr), 0, batch); });
  return count.used();
}

template <typename T>
size_t phase_scratch(const Phase& phase, int64_t batch) {
  switch (phase.kind) {
    case kNorm: {
      Arena count;
      count.take<T>(args_of<NormPhase>(phase).width), count.take<T>(args_of<NormPhase>(phase).group_size);
      return count.used();
    }
    case kScale:
      return static_cast<size_t>(args_of<ScalePhase>(phase).width) * sizeof(T);
    case kLinear:
      return linear_scratch<T>(args_of<LinearPhase>(phase), batch);
    case kConv:
      return conv_scratch<T>(args_of<ConvPhase>(phase));
    case kMamba1:
      return mamba1_scratch<T>(args_of<Mamba1Phase>(phase));
    case kMamba2:
      return mamba2_scratch<T>(args_of<Mamba2Phase>(phase));
    case kMamba3Tokens:
    case kMamba3Heads:
      return mamba3_scratch<T>(args_of<Mamba3Phase>(phase));
    default:
      return 0;
  }
}

// What a phase reads from memory, about.
inline int64_t phase_bytes(const Phase& phase) {
  if (phase.kind != kLinear) return 0;
  const LinearPhase& linear = args_of<LinearPhase>(phase);
  const int64_t dtype = linear.weight.dtype, numbers = linear.in * linear.out;
  return dtype == kInt8 ? numbers : dtype == kInt4 ? numbers / 2 : numbers * static_cast<int64_t>(size_of(dtype));
}

template <typename T>
void run_phase(const Token<T>& token, const Phase& phase, void* scratch) {
  switch (phase.kind) {
    case kRead:
      return read_input(token, args_of<EdgePhase>(phase));
    case kWrite:
      return write_output(token, args_of<EdgePhase>(phase));
    case kNorm:
      return norm_rows(token, args_of<NormPhase>(phase), scratch);
    case kGate:
      return gate_rows(token, args_of<GatePhase>(phase));
    case kScale:
      return scale_rows(token, args_of<ScalePhase>(phase), scratch);
    case kLinear:
      return project_any(token, args_of<LinearPhase>(phase), scratch);
    case kConv:
      return convolve(token, args_of<ConvPhase>(phase), scratch);
    case kMamba1:
      return mamba1_states(token, args_of<Mamba1Phase>(phase), scratch);
    case kMamba2:
      return mamba2_heads(token, args_of<Mamba2Phase>(phase), scratch);
    case kMamba3Tokens:
      return mamba3_tokens(token, args_of<Mamba3Phase>(phase), scratch);
    case kMamba3Heads:
      return mamba3_heads(token, args_of<Mamba3Phase>(phase), scratch);
  }
}

template <typename T>
bool run_program(const ProgramArgs& args) {
  size_t bytes = 0;
  int64_t read = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    const size_t needed = phase_scratch<T>(args.phases[i], args.batch);
    bytes = needed > bytes ? needed : bytes;
    read += phase_bytes(args.phases[i]);
  }
  const int team = team_size(args.threads, read < kTeamBytes ? 1 : args.threads);
  // Everything is there before the threads come, so that none waits for another to begin.
  bytes = (bytes + 63) / 64 * 64;
  const Scratch slots(static_cast<size_t>(args.batch * args.width) * sizeof(T)), scratch(bytes * team);
  const Queues queues(args.count);
  if (!slots.get() || !scratch.get() || !queues.get()) return false;
  static Teams teams;
  teams.run(team, [&](int size) {
    run_team(size, [&](int thread) {
      Token<T> token{args, static_cast<T*>(slots.get()), queues.get()};
      void* own = static_cast<char*>(scratch.get()) + bytes * thread;
      for (int64_t i = 0; i < args.count; ++i, ++token.queue) run_phase(token, args.phases[i], own);
    });
  });
  return true;
}

}  // namespace ANYMAMBA_ISA
