// One token through a Mamba-2 block between its projections: convolution, dt, state, readout, skip, gate and norm.
#pragma once

#include <cmath>

#include "block_args.h"
#include "norm.h"
#include "rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

// act (channels) = silu(conv) of a row, whose window moves on by one.
template <typename T>
void step_conv(const StepArgs& args, int64_t row, int64_t channels, T* act, T* taps) {
  const int64_t w = args.conv_width, size = static_cast<int64_t>(size_of(args.dtype));
  const char* old_window = static_cast<const char*>(args.window) + row * channels * w * size;
  const char* token = static_cast<const char*>(args.xbc) + row * args.xbc_row * size;
  char* new_window = static_cast<char*>(args.new_window) + row * channels * w * size;
  const T* weight = static_cast<const T*>(args.conv_weight);
  const T* bias = static_cast<const T*>(args.conv_bias);
  for (int64_t c = 0; c < channels; ++c) {
    std::memcpy(new_window + c * w * size, old_window + (c * w + 1) * size, (w - 1) * size);
    std::memcpy(new_window + (c * w + w - 1) * size, token + c * size, size);
  }
  const T* window = row_as(taps, new_window, 0, args.dtype, channels * w);
  for (int64_t c = 0; c < channels; ++c) {
    T sum = bias ? bias[c] : T(0);
    for (int64_t k = 0; k < w; ++k) sum += window[c * w + k] * weight[c * w + k];
    act[c] = sum;
  }
  for (int64_t c = 0; c < channels; c += kLanes<T>)
    store_first(act + c, silu<T>(load_first(act + c, channels - c)), channels - c);
}

template <typename T>
T softplus(T x) {
  return x > T(20) ? x : static_cast<T>(std::log1p(std::exp(x)));
}

// y (p) of one head of a row, from act; its state moves on by one.
template <typename T>
void step_head(const StepArgs& args, int64_t row, int64_t head, const T* act, T* y) {
  const int64_t p = args.head_width, n = args.state, inner = args.heads * p;
  const int64_t group = head / (args.heads / args.groups);
  const T *x = act + head * p, *b = act + inner + group * n, *c = act + inner + (args.groups + group) * n;
  T raw;
  read_row(&raw, static_cast<const char*>(args.dt) + (row * args.dt_row + head) * static_cast<int64_t>(size_of(args.dtype)),
           args.dtype, 1, 1);
  T dt = softplus(raw + static_cast<const T*>(args.dt_bias)[head]);
  dt = dt < T(args.dt_min) ? T(args.dt_min) : dt > T(args.dt_max) ? T(args.dt_max) : dt;
  const T decay = std::exp(-dt * std::exp(static_cast<const T*>(args.a_log)[head]));
  const T* old_state = static_cast<const T*>(args.old_state) + (row * args.heads + head) * p * n;
  T* new_state = static_cast<T*>(args.new_state) + (row * args.heads + head) * p * n;
  const T* skip = static_cast<const T*>(args.skip);
  for (int64_t i = 0; i < p; ++i) {
    const T value = dt * x[i];
    Vec<T> sum = {};
    for (int64_t j = 0; j < n; j += kLanes<T>) {
      const int64_t left = n - j;
      const Vec<T> state = decay * load_first(old_state + i * n + j, left) + value * load_first(b + j, left);
      store_first(new_state + i * n + j, state, left);
      sum += state * load_first(c + j, left);
    }
    y[i] = sum_lanes<T>(sum) + skip[args.skip_per_channel ? head * p + i : head] * x[i];
  }
}

// Norm and gate of a row, in place in y, and out in the activations' dtype.
template <typename T>
void step_output(const StepArgs& args, int64_t row, T* y, T* z_buffer, T* unit) {
  const int64_t inner = args.heads * args.head_width;
  const T* z = row_as(z_buffer, args.z, row * args.z_row, args.dtype, inner);
  if (const T* weight = static_cast<const T*>(args.norm_weight)) {
    for (int64_t c = 0; c < inner; c += args.group_size)
      norm_forward_group(y + c, z + c, weight + c, unit, y + c, args.group_size, args.norm_before_gate != 0, args.eps);
  } else {
    for (int64_t c = 0; c < inner; c += kLanes<T>)
      store_first(y + c, load_first(y + c, inner - c) * silu<T>(load_first(z + c, inner - c)), inner - c);
  }
  write_row(static_cast<char*>(args.y) + row * inner * static_cast<int64_t>(size_of(args.dtype)), y, args.dtype,
            static_cast<int>(inner));
}

template <typename T>
bool step(const StepArgs& args) {
  const int64_t inner = args.heads * args.head_width, channels = inner + 2 * args.groups * args.state;
  const Scratch shared(args.batch * (inner + channels) * sizeof(T));
  if (!shared.get()) return false;
  T* y = static_cast<T*>(shared.get());
  T* act = y + args.batch * inner;
  // Threads divide the states, which is where the bytes are; few rows of the rest are not worth waking them.
  const int64_t row_threads = args.batch >= 4 ? args.threads : 1;
  return run_tasks(args.batch, row_threads, channels * args.conv_width * sizeof(T),
                   [&](int64_t row, void* taps) {
                     step_conv(args, row, channels, act + row * channels, static_cast<T*>(taps));
                   }) &&
         run_tasks(args.batch * args.heads, args.threads, 0,
                   [&](int64_t index, void*) {
                     const int64_t row = index / args.heads, head = index % args.heads;
                     step_head(args, row, head, act + row * channels, y + row * inner + head * args.head_width);
                   }) &&
         run_tasks(args.batch, row_threads, 2 * inner * sizeof(T), [&](int64_t row, void* scratch) {
           T* buffer = static_cast<T*>(scratch);
           step_output(args, row, y + row * inner, buffer, buffer + inner);
         });
}

}  // namespace ANYMAMBA_ISA
