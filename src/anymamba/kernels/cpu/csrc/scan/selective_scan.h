// Mamba-1's scan. Formulas: scan/selective_scan.py.
//
// A task is a block of channels of one row of the batch over all time steps: channels are independent. Vectors run over
// channels, so that the sum over the states needs no sum over lanes; a block's rates and states are stored as (state,
// channels) in first-level cache. The backward stores the states at the beginning of each chunk of time and recomputes
// those within it, and their decays.
#pragma once

#include "simd/activations.h"
#include "simd/vector_rows.h"
#include "schema.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kSelectiveChannels = 32;  // of a task
constexpr int64_t kSelectiveSteps = 32;     // of a chunk of the backward

// States after a step, for sequences and for single tokens: h <- exp(size rate) h + input b.
template <typename T>
struct SelectiveStates {
  Vec<T> decay, after;

  SelectiveStates(Vec<T> size, Vec<T> rate, Vec<T> before, Vec<T> input, Vec<T> b)
      : decay(exp_nonpositive(size * rate)), after(decay * before + input * b) {}
};

// Channels [first, first + count) of a row, and the parameters that are read repeatedly.
template <typename T>
struct SelectiveBlock {
  static constexpr int64_t kWidth = kSelectiveChannels;

  const SelectiveArgs& args;
  int64_t row, first, count;
  T *rates, *skip;      // (n, kWidth) and (kWidth), zero after `count`
  T *x, *dt, *z, *out;  // (kWidth)
  T *b, *c;             // (n)

  SelectiveBlock(const SelectiveArgs& args, Arena& arena)
      : args(args),
        row(0),
        first(0),
        count(0),
        rates(arena.take<T>(args.state * kWidth)),
        skip(arena.take<T>(kWidth)),
        x(arena.take<T>(kWidth)),
        dt(arena.take<T>(kWidth)),
        z(arena.take<T>(kWidth)),
        out(arena.take<T>(kWidth)),
        b(arena.take<T>(args.state)),
        c(arena.take<T>(args.state)) {}

  static int64_t blocks(const SelectiveArgs& args) { return (args.channels + kWidth - 1) / kWidth; }

  void begin(int64_t task) {
    row = task / blocks(args);
    first = task % blocks(args) * kWidth;
    count = args.channels - first < kWidth ? args.channels - first : kWidth;
    read_columns(rates, args.rates, 0);
    std::memset(skip, 0, kWidth * sizeof(T));
    if (args.skip) std::memcpy(skip, static_cast<const T*>(args.skip) + first, count * sizeof(T));
  }

  // A (rows, channels, state) tensor's part of this block, as (state, kWidth), and back.
  void read_columns(T* target, const void* base, int64_t index) const {
    const T* source = static_cast<const T*>(base) + (index * args.channels + first) * args.state;
    std::memset(target, 0, args.state * kWidth * sizeof(T));
    transpose(target, kWidth, source, args.state, static_cast<int>(count), static_cast<int>(args.state));
  }
  void write_columns(void* base, const T* source, int64_t index) const {
    T* target = static_cast<T*>(base) + (index * args.channels + first) * args.state;
    transpose(target, args.state, source, kWidth, static_cast<int>(args.state), static_cast<int>(count));
  }

  // This block's channels of a (batch, time, channels) tensor at step t, with zeros after them, and back.
  void read_channels(T* target, const void* base, const int64_t* strides, int64_t t, int64_t dtype) const {
    const int64_t at = row * strides[0] + t * strides[1] + first;
    read_row(target, static_cast<const char*>(base) + at * static_cast<int64_t>(size_of(dtype)), dtype,
             static_cast<int>(count), static_cast<int>(kWidth));
  }
  void write_channels(void* base, const T* source, int64_t t, int64_t dtype) const {
    const int64_t at = (row * args.time + t) * args.channels + first;
    write_row(static_cast<char*>(base) + at * static_cast<int64_t>(size_of(dtype)), source, dtype,
              static_cast<int>(count));
  }
  // A row of B or C.
  void read_states(T* target, const void* base, const int64_t* strides, int64_t t) const {
    const int64_t at = row * strides[0] + t * strides[1], n = args.state;
    read_row(target, static_cast<const char*>(base) + at * static_cast<int64_t>(size_of(args.dtype)), args.dtype,
             static_cast<int>(n), static_cast<int>(n));
  }

  // The inputs of step t, the step size after its softplus.
  void read_step(int64_t t) {
    read_channels(x, args.x, args.x_strides, t, args.dtype);
    read_channels(dt, args.dt, args.dt_strides, t, own_dtype<T>());
    read_states(b, args.b, args.b_strides, t);
    read_states(c, args.c, args.c_strides, t);
    for (int64_t i = 0; i < count; i += kLanes<T>) store(dt + i, softplus<T>(load(dt + i)));
  }

  // y before its gate; the states before a step are replaced by those after it. `decays` and `states`, if not null,
  // receive the decays and the new states.
  template <bool kKeep>
  void advance(T* h, T* decays, T* states) {
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const Vec<T> size = load(dt + i), value = load(x + i), input = size * value;
      Vec<T> y = load(skip + i) * value;
      for (int64_t n = 0; n < args.state; ++n) {
        const int64_t at = n * kWidth + i;
        const SelectiveStates<T> state(size, load(rates + at), load(h + at), input, broadcast(b[n]));
        store(h + at, state.after);
        if constexpr (kKeep) store(decays + at, state.decay), store(states + at, state.after);
        y += state.after * c[n];
      }
      store(out + i, y);
    }
  }
};

template <typename T>
void selective_forward_task(const SelectiveArgs& args, int64_t task, void* scratch) {
  Arena arena(scratch);
  SelectiveBlock<T> block(args, arena);
  T* h = arena.take<T>(args.state * kSelectiveChannels);
  block.begin(task);
  const int64_t sequences = args.bounds ? args.sequences : 1;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t index = args.bounds ? s : block.row;
    const int64_t start = args.bounds ? args.bounds[s] : 0, stop = args.bounds ? args.bounds[s + 1] : args.time;
    block.read_columns(h, args.initial_state, index);
    for (int64_t t = start; t < stop; ++t) {
      block.read_step(t);
      block.template advance<false>(h, nullptr, nullptr);
      if (args.z) {
        block.read_channels(block.z, args.z, args.z_strides, t, args.dtype);
        for (int64_t i = 0; i < block.count; i += kLanes<T>)
          store(block.out + i, load(block.out + i) * silu<T>(load(block.z + i)));
      }
      block.write_channels(args.y, block.out, t, args.dtype);
    }
    block.write_columns(args.final_state, h, index);
  }
}

template <typename T>
bool selective_forward(const SelectiveArgs& args) {
  Arena count;
  SelectiveBlock<T>(args, count);
  count.take<T>(args.state * kSelectiveChannels);
  return run_tasks(args.batch * SelectiveBlock<T>::blocks(args), args.threads, count.used(),
                   [&](int64_t task, void* scratch) { selective_forward_task<T>(args, task, scratch); });
}

template <typename T>
struct SelectiveBackward {
  SelectiveBlock<T> block;
  T *h, *starts, *decays, *states, *carry, *drates, *dskip, *dy, *dx, *ddt, *dz;

  SelectiveBackward(const SelectiveArgs& args, Arena& arena)
      : block(args, arena),
        h(arena.take<T>(size(args))),
        starts(arena.take<T>(size(args) * ((args.time + kSelectiveSteps - 1) / kSelectiveSteps))),
        decays(arena.take<T>(size(args) * kSelectiveSteps)),
        states(arena.take<T>(size(args) * kSelectiveSteps)),
        carry(arena.take<T>(size(args))),
        drates(arena.take<T>(size(args))),
        dskip(arena.take<T>(kSelectiveChannels)),
        dy(arena.take<T>(kSelectiveChannels)),
        dx(arena.take<T>(kSelectiveChannels)),
        ddt(arena.take<T>(kSelectiveChannels)),
        dz(arena.take<T>(kSelectiveChannels)) {}

  static int64_t size(const SelectiveArgs& args) { return args.state * kSelectiveChannels; }

  // Steps [start, stop) from the last to the first. `shared` receives this block's part of dB and dC, (time, 2, n).
  void chunk(int64_t start, int64_t stop, const T* before, T* shared) {
    const SelectiveArgs& args = block.args;
    std::memcpy(h, before, size(args) * sizeof(T));
    for (int64_t t = start; t < stop; ++t) {
      block.read_step(t);
      block.template advance<true>(h, decays + (t - start) * size(args), states + (t - start) * size(args));
    }
    for (int64_t t = stop - 1; t >= start; --t) {
      const int64_t at = (t - start) * size(args);
      block.read_step(t);
      block.read_channels(dy, args.dy, args.dy_strides, t, args.dtype);
      gate(t, states + at);
      step(t > start ? states + at - size(args) : before, decays + at, states + at, shared + t * 2 * args.state);
      block.read_channels(block.z, args.dt, args.dt_strides, t, own_dtype<T>());  // once more, before its softplus
      for (int64_t i = 0; i < block.count; i += kLanes<T>)
        store(ddt + i, load(ddt + i) * sigmoid<T>(load(block.z + i)));
      block.write_channels(args.dx, dx, t, args.dtype);
      block.write_channels(args.ddt, ddt, t, own_dtype<T>());
      if (args.z) block.write_channels(args.dz, dz, t, args.dtype);
    }
  }

  // Computes dz, and replaces dy by the gradient before the gate.
  void gate(int64_t t, const T* state) {
    const SelectiveArgs& args = block.args;
    if (!args.z) return;
    block.read_channels(block.z, args.z, args.z_strides, t, args.dtype);
    for (int64_t i = 0; i < block.count; i += kLanes<T>) {
      Vec<T> y = load(block.skip + i) * load(block.x + i);
      for (int64_t n = 0; n < args.state; ++n) y += load(state + n * kSelectiveChannels + i) * block.c[n];
      const Vec<T> z = load(block.z + i), grad = load(dy + i);
      store(dz + i, grad * y * silu_slope<T>(z));
      store(dy + i, grad * silu<T>(z));
    }
  }

  // One step of the backward; ddt is the gradient after the softplus.
  void step(const T* previous, const T* decay, const T* state, T* shared) {
    const SelectiveArgs& args = block.args;
    for (int64_t i = 0; i < block.count; i += kLanes<T>) {
      store(dskip + i, load(dskip + i) + load(dy + i) * load(block.x + i));
      store(dx + i, Vec<T>{});
      store(ddt + i, Vec<T>{});
    }
    for (int64_t n = 0; n < args.state; ++n) {
      Vec<T> db = {}, dc = {};
      for (int64_t i = 0; i < block.count; i += kLanes<T>) {
        const int64_t at = n * kSelectiveChannels + i;
        const Vec<T> grad = load(dy + i), size = load(block.dt + i), x = load(block.x + i);
        const Vec<T> g = grad * block.c[n] + load(carry + at), kept = g * load(decay + at);
        const Vec<T> dexponent = kept * load(previous + at);
        store(carry + at, kept);
        store(drates + at, load(drates + at) + dexponent * size);
        store(ddt + i, load(ddt + i) + dexponent * load(block.rates + at) + g * x * block.b[n]);
        store(dx + i, load(dx + i) + g * block.b[n]);
        db += g * (size * x);
        dc += grad * load(state + at);
      }
      shared[n] = sum_lanes<T>(db);
      shared[args.state + n] = sum_lanes<T>(dc);
    }
    for (int64_t i = 0; i < block.count; i += kLanes<T>)
      store(dx + i, load(dx + i) * load(block.dt + i) + load(dy + i) * load(block.skip + i));
  }

  void sequence(int64_t start, int64_t stop, int64_t index, T* shared) {
    const SelectiveArgs& args = block.args;
    block.read_columns(starts, args.initial_state, index);
    const int64_t chunks = (stop - start + kSelectiveSteps - 1) / kSelectiveSteps;
    for (int64_t i = 0; i + 1 < chunks; ++i) {
      T* next = starts + (i + 1) * size(args);
      std::memcpy(next, starts + i * size(args), size(args) * sizeof(T));
      for (int64_t t = start + i * kSelectiveSteps; t < start + (i + 1) * kSelectiveSteps; ++t) {
        block.read_step(t);
        block.template advance<false>(next, nullptr, nullptr);
      }
    }
    block.read_columns(carry, args.dfinal_state, index);
    for (int64_t i = chunks - 1; i >= 0; --i) {
      const int64_t first = start + i * kSelectiveSteps, end = first + kSelectiveSteps;
      chunk(first, end < stop ? end : stop, starts + i * size(args), shared);
    }
    block.write_columns(args.dinitial_state, carry, index);
  }
};

// The sum over blocks of channels of what each adds to dB and dC.
template <typename T>
bool selective_sum(const SelectiveArgs& args, const T* shared, int64_t blocks) {
  const int64_t n = args.state, rows = args.batch * args.time, size = static_cast<int64_t>(size_of(args.dtype));
  return run_tasks((rows + 63) / 64, args.threads, 2 * n * sizeof(T), [&](int64_t task, void* scratch) {
    T* sum = static_cast<T*>(scratch);
    for (int64_t row = task * 64; row < rows && row < (task + 1) * 64; ++row) {
      const int64_t batch = row / args.time, t = row % args.time;
      for (int64_t block = 0; block < blocks; ++block) {
        const T* part = shared + ((batch * blocks + block) * args.time + t) * 2 * n;
        for (int64_t i = 0; i < 2 * n; ++i) sum[i] = block ? sum[i] + part[i] : part[i];
      }
      write_row(static_cast<char*>(args.db) + row * n * size, sum, args.dtype, static_cast<int>(n));
      write_row(static_cast<char*>(args.dc) + row * n * size, sum + n, args.dtype, static_cast<int>(n));
    }
  });
}

template <typename T>
bool selective_backward(const SelectiveArgs& args) {
  const int64_t e = args.channels, n = args.state, blocks = SelectiveBlock<T>::blocks(args);
  // A row's part of drates and dskip, and a block's of dB and dC.
  const Scratch rows(args.batch * e * (n + 1) * sizeof(T)), parts(args.batch * blocks * args.time * 2 * n * sizeof(T));
  if (!rows.get() || !parts.get()) return false;
  T *drates = static_cast<T*>(rows.get()), *dskip = drates + args.batch * e * n, *shared = static_cast<T*>(parts.get());
  Arena count;
  SelectiveBackward<T>(args, count);
  const bool ok = run_tasks(args.batch * blocks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    SelectiveBackward<T> back(args, arena);
    back.block.begin(task);
    std::memset(back.drates, 0, back.size(args) * sizeof(T));
    std::memset(back.dskip, 0, kSelectiveChannels * sizeof(T));
    T* own = shared + task * args.time * 2 * n;
    if (args.bounds)
      for (int64_t s = 0; s < args.sequences; ++s) back.sequence(args.bounds[s], args.bounds[s + 1], s, own);
    else
      back.sequence(0, args.time, back.block.row, own);
    back.block.write_columns(drates, back.drates, back.block.row);
    std::memcpy(dskip + back.block.row * e + back.block.first, back.dskip, back.block.count * sizeof(T));
  });
  if (!ok || !selective_sum(args, shared, blocks)) return false;
  sum_blocks(static_cast<T*>(args.drates), drates, args.batch, e * n);
  sum_blocks(static_cast<T*>(args.dskip), dskip, args.batch, e);
  return true;
}

}  // namespace ANYMAMBA_ISA
