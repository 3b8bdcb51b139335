// The causal depthwise convolution, followed by SiLU. Formulas: ops/conv.py and the window's part below.
//
// Time is cut into blocks, each a task over all channels. Step t of a sequence reads inputs t - width + 1 .. t; those
// before the sequence's start come from its window, whose column j is input j - width. The new window's column j is
// input end - width + j.
#pragma once

#include "schema.h"
#include "simd/vector_rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kConvSteps = 32;  // steps of a task; it fixes the order in which the weight's gradient is summed

struct ConvTask {
  int64_t sequence, batch, first, length;  // of the sequence: its row and first step in x
  int64_t start, stop;                     // steps of this task, counted from the sequence's first
  int64_t end;                             // where the new window ends
};

inline int64_t conv_blocks(int64_t length) { return (length + kConvSteps - 1) / kConvSteps; }

inline ConvTask conv_sequence(const ConvArgs& args, int64_t sequence) {
  ConvTask task = {};
  task.sequence = sequence;
  task.batch = args.bounds ? 0 : sequence;
  task.first = args.bounds ? args.bounds[sequence] : 0;
  task.length = args.bounds ? args.bounds[sequence + 1] - task.first : args.time;
  task.end = args.lengths ? args.lengths[sequence] : task.length;
  return task;
}

// The blocks of all sequences, one after the other.
class ConvTasks {
 public:
  explicit ConvTasks(const ConvArgs& args)
      : args_(args), memory_(args.bounds ? args.sequences * sizeof(int64_t) : 0), ends_(static_cast<int64_t*>(memory_.get())) {
    if (!args.bounds || !ok()) return;
    for (int64_t s = 0, end = 0; s < args.sequences; ++s) ends_[s] = end += conv_blocks(conv_sequence(args, s).length);
  }

  bool ok() const { return ends_; }

  int64_t count() const {
    return args_.bounds ? ends_[args_.sequences - 1] : args_.batch * conv_blocks(args_.time);
  }

  ConvTask operator[](int64_t index) const {
    const int64_t sequence = args_.bounds ? packed_sequence(index) : index / conv_blocks(args_.time);
    const int64_t before = !args_.bounds ? sequence * conv_blocks(args_.time) : sequence ? ends_[sequence - 1] : 0;
    ConvTask task = conv_sequence(args_, sequence);
    task.start = (index - before) * kConvSteps;
    task.stop = task.start + kConvSteps < task.length ? task.start + kConvSteps : task.length;
    return task;
  }

 private:
  // The first sequence that ends after the block.
  int64_t packed_sequence(int64_t index) const {
    int64_t low = 0, high = args_.sequences - 1;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (ends_[middle] > index)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }

  const ConvArgs& args_;
  const Scratch memory_;
  int64_t* const ends_;  // packed: how many blocks the sequences up to each have
};

// The inputs of a sequence as rows of T: the window's columns, rows of x in place, or converted ones.
template <typename T>
class ConvInputs {
 public:
  ConvInputs(const ConvArgs& args, const ConvTask& task, Arena& arena)
      : args_(args),
        task_(task),
        window_(arena.take<T>(args.channels * args.width)),
        ring_(arena.take<T>(args.dtype == own_dtype<T>() ? 0 : args.channels * args.width)),
        column_(arena.take<T>(args.width)) {}

  // Reads the window, transposed to (width, channels).
  void read_window() {
    const int64_t v = args_.channels, w = args_.width, size = static_cast<int64_t>(size_of(args_.dtype));
    const char* source = static_cast<const char*>(args_.window) + task_.sequence * v * w * size;
    for (int64_t c = 0; c < v; ++c) {
      read_row(column_, source + c * w * size, args_.dtype, static_cast<int>(w), static_cast<int>(w));
      for (int64_t j = 0; j < w; ++j) window_[j * v + c] = column_[j];
    }
  }

  // The row of step t >= -width. A converted row stays valid until `width` more rows were requested.
  const T* row(int64_t t) const {
    if (t < 0) return window_ + (args_.width + t) * args_.channels;
    return row_as(ring_ + (t % args_.width) * args_.channels, args_.x,
                  task_.batch * args_.x_strides[0] + (task_.first + t) * args_.x_strides[1], args_.dtype,
                  args_.channels);
  }

 private:
  const ConvArgs& args_;
  const ConvTask& task_;
  T *window_, *ring_, *column_;
};

// The weight as (width, channels).
template <typename T>
void conv_weight(T* target, const ConvArgs& args) {
  transpose(target, args.channels, static_cast<const T*>(args.weight), args.width, static_cast<int>(args.channels),
            static_cast<int>(args.width));
}

// The convolution before its SiLU, for one vector of channels.
template <typename T>
inline Vec<T> conv_at(const T* const* taps, const T* weight, const T* bias, int64_t v, int64_t w, int64_t c) {
  Vec<T> sum = bias ? load_first(bias + c, v - c) : Vec<T>{};
  for (int64_t k = 0; k < w; ++k) sum += load_first(taps[k] + c, v - c) * load_first(weight + k * v + c, v - c);
  return sum;
}

template <typename T>
void conv_forward_task(const ConvArgs& args, const ConvTask& task, const T* weight, void* scratch) {
  const int64_t v = args.channels, w = args.width, size = static_cast<int64_t>(size_of(args.dtype));
  Arena arena(scratch);
  ConvInputs<T> inputs(args, task, arena);
  T* out_buffer = arena.take<T>(v);
  const T** taps = arena.take<const T*>(w);
  if (task.start < w || task.end < w) inputs.read_window();
  for (int64_t k = 0; k + 1 < w; ++k) taps[k + 1] = inputs.row(task.start - w + 1 + k);
  for (int64_t t = task.start; t < task.stop; ++t) {
    for (int64_t k = 0; k + 1 < w; ++k) taps[k] = taps[k + 1];
    taps[w - 1] = inputs.row(t);
    char* target = static_cast<char*>(args.out) + (task.batch * args.time + task.first + t) * v * size;
    T* out = args.dtype == own_dtype<T>() ? reinterpret_cast<T*>(target) : out_buffer;
    for (int64_t c = 0; c < v; c += kLanes<T>)
      store_first(out + c, silu<T>(conv_at(taps, weight, static_cast<const T*>(args.bias), v, w, c)), v - c);
    if (out == out_buffer) write_row(target, out, args.dtype, static_cast<int>(v));
  }
  if (task.start > 0) return;
  // The sequence's first task also writes the new window: copies of inputs.
  char* target = static_cast<char*>(args.new_window) + task.sequence * v * w * size;
  const char* window = static_cast<const char*>(args.window) + task.sequence * v * w * size;
  const char* x = static_cast<const char*>(args.x) + (task.batch * args.x_strides[0] + task.first * args.x_strides[1]) * size;
  for (int64_t j = 0; j < w; ++j) {
    const int64_t t = task.end - w + j;
    for (int64_t c = 0; c < v; ++c)
      std::memcpy(target + (c * w + j) * size,
                  t < 0 ? window + (c * w + w + t) * size : x + (t * args.x_strides[1] + c) * size, size);
  }
}

constexpr int64_t kConvChannels = 256;  // of a task that takes one step

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

// act = silu(act + conv) of some channels, act being the bias before; their windows advance by x.
template <typename T>
void conv_step(const char* before, char* after, int64_t dtype, const T* x, const T* weight, T* act, int64_t count,
               int64_t w, T* window) {
  const int taps = static_cast<int>(count * w);
  read_row(window, before, dtype, taps, taps);
  if (w == 4)
    conv_windows<4>(window, weight, x, act, count, w);
  else
    conv_windows<0>(window, weight, x, act, count, w);
  if (after) write_row(after, window, dtype, taps);
  for (int64_t c = 0; c < count; c += kLanes<T>)
    store_first(act + c, silu<T>(load_first(act + c, count - c)), count - c);
}

// Rows of one step.
template <typename T>
bool conv_steps(const ConvArgs& args) {
  const int64_t v = args.channels, w = args.width, size = static_cast<int64_t>(size_of(args.dtype));
  const int64_t blocks = (v + kConvChannels - 1) / kConvChannels;
  Arena counted;
  counted.take<T>(kConvChannels * w), counted.take<T>(kConvChannels), counted.take<T>(kConvChannels);
  return run_tasks(args.batch * blocks, args.threads, counted.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    T *window = arena.take<T>(kConvChannels * w), *x = arena.take<T>(kConvChannels), *act = arena.take<T>(kConvChannels);
    const int64_t row = task / blocks, start = task % blocks * kConvChannels, left = v - start;
    const int64_t count = left < kConvChannels ? left : kConvChannels, at = (row * v + start) * w * size;
    const int width = static_cast<int>(count);
    read_row(x, static_cast<const char*>(args.x) + (row * args.x_strides[0] + start) * size, args.dtype, width, width);
    if (args.bias)
      std::memcpy(act, static_cast<const T*>(args.bias) + start, count * sizeof(T));
    else
      std::memset(act, 0, count * sizeof(T));
    const char* before = static_cast<const char*>(args.window) + at;
    char* after = static_cast<char*>(args.new_window) + at;
    const bool is_real = !args.lengths || args.lengths[row] > 0;
    if (!is_real) std::memcpy(after, before, count * w * size);
    conv_step(before, is_real ? after : nullptr, args.dtype, x, static_cast<const T*>(args.weight) + start * w, act, count,
              w, window);
    write_row(static_cast<char*>(args.out) + (row * v + start) * size, act, args.dtype, width);
  });
}

template <typename T>
bool conv_forward(const ConvArgs& args) {
  if (args.time == 1 && !args.bounds) return conv_steps<T>(args);
  const int64_t v = args.channels, w = args.width;
  const Scratch shared(v * w * sizeof(T));
  const ConvTasks tasks(args);
  if (!shared.get() || !tasks.ok()) return false;
  T* weight = static_cast<T*>(shared.get());
  conv_weight(weight, args);
  const ConvTask none = {};
  Arena count;
  ConvInputs<T>(args, none, count);
  count.take<T>(v);
  count.take<const T*>(w);
  return run_tasks(tasks.count(), args.threads, count.used(), [&](int64_t index, void* scratch) {
    conv_forward_task<T>(args, tasks[index], weight, scratch);
  });
}

template <typename T>
struct ConvBackwardBuffers {
  T *dpre, *dx, *dout, *column;
  const T** taps;
  ConvBackwardBuffers(const ConvArgs& args, Arena& arena)
      : dpre(arena.take<T>((kConvSteps + args.width) * args.channels)),
        dx(arena.take<T>(args.channels)),
        dout(arena.take<T>(args.channels)),
        column(arena.take<T>(args.channels * args.width)),
        taps(arena.take<const T*>(args.width)) {}
};

// sum[c] = sum over k of weight_k dpre[t + width - 1 - k], the gradient of input t; steps outside of the sequence and
// of [from, to) count as zero.
template <typename T>
void conv_input_gradient(T* sum, const T* dpre, const T* weight, int64_t t, int64_t from, int64_t to, int64_t v,
                         int64_t w) {
  for (int64_t c = 0; c < v; c += kLanes<T>) {
    Vec<T> total = {};
    for (int64_t k = 0; k < w; ++k) {
      const int64_t step = t + w - 1 - k;
      if (step < from || step >= to) continue;
      total += load_first(weight + k * v + c, v - c) * load_first(dpre + (step - from) * v + c, v - c);
    }
    store_first(sum + c, total, v - c);
  }
}

template <typename T>
void conv_backward_task(const ConvArgs& args, const ConvTask& task, const T* weight, T* dparameters, void* scratch) {
  const int64_t v = args.channels, w = args.width, size = static_cast<int64_t>(size_of(args.dtype));
  Arena arena(scratch);
  ConvInputs<T> inputs(args, task, arena);
  ConvBackwardBuffers<T> b(args, arena);
  if (task.start < w) inputs.read_window();
  std::memset(dparameters, 0, v * (w + 1) * sizeof(T));
  T* dbias = dparameters + v * w;

  // The gradient before the SiLU, for this task's steps and those after it that read its inputs.
  const int64_t reach = task.stop + w - 1 < task.length ? task.stop + w - 1 : task.length;
  for (int64_t k = 0; k + 1 < w; ++k) b.taps[k + 1] = inputs.row(task.start - w + 1 + k);
  for (int64_t t = task.start; t < reach; ++t) {
    for (int64_t k = 0; k + 1 < w; ++k) b.taps[k] = b.taps[k + 1];
    b.taps[w - 1] = inputs.row(t);
    const T* dout = row_as(b.dout, args.dout,
                           task.batch * args.dout_strides[0] + (task.first + t) * args.dout_strides[1], args.dtype, v);
    T* dpre = b.dpre + (t - task.start) * v;
    const bool own = t < task.stop;
    for (int64_t c = 0; c < v; c += kLanes<T>) {
      const Vec<T> pre = conv_at(b.taps, weight, static_cast<const T*>(args.bias), v, w, c);
      const Vec<T> grad = load_first(dout + c, v - c) * silu_slope<T>(pre);
      store_first(dpre + c, grad, v - c);
      if (!own) continue;
      store_first(dbias + c, load_first(dbias + c, v - c) + grad, v - c);
      for (int64_t k = 0; k < w; ++k) {
        T* dweight = dparameters + k * v + c;
        store_first(dweight, load_first(dweight, v - c) + grad * load_first(b.taps[k] + c, v - c), v - c);
      }
    }
  }

  const char* dnew_window = static_cast<const char*>(args.dnew_window) + task.sequence * v * w * size;
  const auto add_new_window = [&](T* sum, int64_t t) {
    const int64_t j = t - task.end + w;
    if (j < 0 || j >= w) return;
    for (int64_t c = 0; c < v; ++c) {
      T grad;
      read_row(&grad, dnew_window + (c * w + j) * size, args.dtype, 1, 1);
      sum[c] += grad;
    }
  };
  for (int64_t t = task.start; t < task.stop; ++t) {
    conv_input_gradient(b.dx, b.dpre, weight, t, task.start, reach, v, w);
    add_new_window(b.dx, t);
    write_row(static_cast<char*>(args.dx) + (task.batch * args.time + task.first + t) * v * size, b.dx, args.dtype,
              static_cast<int>(v));
  }
  if (task.start > 0) return;
  char* dwindow = static_cast<char*>(args.dwindow) + task.sequence * v * w * size;
  for (int64_t j = 0; j < w; ++j) {
    conv_input_gradient(b.dx, b.dpre, weight, j - w, int64_t{0}, reach, v, w);
    add_new_window(b.dx, j - w);
    for (int64_t c = 0; c < v; ++c) write_row(dwindow + (c * w + j) * size, b.dx + c, args.dtype, 1);
  }
}

template <typename T>
bool conv_backward(const ConvArgs& args) {
  const int64_t v = args.channels, w = args.width, parameters = v * (w + 1);
  const ConvTasks tasks(args);
  if (!tasks.ok()) return false;
  const Scratch shared((v * w + (tasks.count() + 1) * parameters) * sizeof(T));
  if (!shared.get()) return false;
  T* weight = static_cast<T*>(shared.get());
  T* total = weight + v * w;
  T* partial = total + parameters;
  conv_weight(weight, args);
  const ConvTask none = {};
  Arena count;
  ConvInputs<T>(args, none, count);
  ConvBackwardBuffers<T>(args, count);
  const bool ok = run_tasks(tasks.count(), args.threads, count.used(), [&](int64_t index, void* scratch) {
    conv_backward_task<T>(args, tasks[index], weight, partial + index * parameters, scratch);
  });
  sum_blocks(total, partial, tasks.count(), parameters);
  transpose(static_cast<T*>(args.dweight), w, total, v, static_cast<int>(w), static_cast<int>(v));
  std::memcpy(args.dbias, total + v * w, v * sizeof(T));
  return ok;
}

}  // namespace ANYMAMBA_ISA
