// The gate over ranks, one pass over memory each way. Formulas: ops/norms_and_gates.py.
#pragma once

#include "schema.h"
#include "simd/vector_rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kGateRows = 32;  // rows of a task; it fixes the order in which the weights' gradients are summed

// The rank's weights for one vector of channels.
template <typename T>
inline Vec<T> gate_weight(const void* weight, int64_t rank, int64_t channels, int64_t c) {
  return weight ? load_first(static_cast<const T*>(weight) + rank * channels + c, channels - c) : broadcast(T(1));
}

template <typename T>
bool gate_forward(const GateArgs& args) {
  const int64_t i = args.channels, rank = args.rank, size = static_cast<int64_t>(size_of(args.dtype));
  return run_tasks((args.rows + kGateRows - 1) / kGateRows, args.threads, (rank + 2) * i * sizeof(T),
                   [&](int64_t task, void* scratch) {
                     T *y_buffer = static_cast<T*>(scratch), *z_buffer = y_buffer + rank * i, *buffer = z_buffer + i;
                     const int64_t stop = (task + 1) * kGateRows < args.rows ? (task + 1) * kGateRows : args.rows;
                     for (int64_t row = task * kGateRows; row < stop; ++row) {
                       const T* y = row_as(y_buffer, args.y, row * rank * i, args.dtype, rank * i);
                       const T* z = row_as(z_buffer, args.z, row * args.z_strides[0], args.dtype, i);
                       char* target = static_cast<char*>(args.out) + row * i * size;
                       T* out = args.dtype == own_dtype<T>() ? reinterpret_cast<T*>(target) : buffer;
                       for (int64_t c = 0; c < i; c += kLanes<T>) {
                         const Vec<T> gate = load_first(z + c, i - c);
                         Vec<T> sum = {};
                         for (int64_t r = 0; r < rank; ++r)
                           sum += silu<T>(gate * gate_weight<T>(args.gate_weight, r, i, c)) *
                                  gate_weight<T>(args.out_weight, r, i, c) * load_first(y + r * i + c, i - c);
                         store_first(out + c, sum, i - c);
                       }
                       if (out == buffer) write_row(target, out, args.dtype, static_cast<int>(i));
                     }
                   });
}

template <typename T>
void gate_backward_row(const GateArgs& args, int64_t row, T* dweights, T* buffer) {
  const int64_t i = args.channels, rank = args.rank, size = static_cast<int64_t>(size_of(args.dtype));
  T *y_buffer = buffer, *z_buffer = y_buffer + rank * i, *dout_buffer = z_buffer + i, *dy = dout_buffer + i;
  T *dz = dy + rank * i, *dgate_weight = dweights, *dout_weight = dweights + rank * i;
  const T* y = row_as(y_buffer, args.y, row * rank * i, args.dtype, rank * i);
  const T* z = row_as(z_buffer, args.z, row * args.z_strides[0], args.dtype, i);
  const T* dout = row_as(dout_buffer, args.dout, row * args.dout_strides[0], args.dtype, i);
  const auto add = [](T* target, Vec<T> x, int64_t left) { store_first(target, load_first(target, left) + x, left); };
  for (int64_t c = 0; c < i; c += kLanes<T>) {
    const int64_t left = i - c;
    const Vec<T> gate = load_first(z + c, left), grad = load_first(dout + c, left);
    Vec<T> dgate = {};
    for (int64_t r = 0; r < rank; ++r) {
      const Vec<T> weight = gate_weight<T>(args.gate_weight, r, i, c), x = gate * weight, s = sigmoid<T>(x);
      const Vec<T> value = load_first(y + r * i + c, left), open = x * s;
      const Vec<T> weighted = grad * gate_weight<T>(args.out_weight, r, i, c);
      const Vec<T> dx = weighted * value * (s * (T(1) + x * (T(1) - s)));
      store_first(dy + r * i + c, weighted * open, left);
      dgate += dx * weight;
      if (!args.gate_weight) continue;
      add(dgate_weight + r * i + c, dx * gate, left);
      add(dout_weight + r * i + c, grad * value * open, left);
    }
    store_first(dz + c, dgate, left);
  }
  write_row(static_cast<char*>(args.dy) + row * rank * i * size, dy, args.dtype, static_cast<int>(rank * i));
  write_row(static_cast<char*>(args.dz) + row * i * size, dz, args.dtype, static_cast<int>(i));
}

template <typename T>
bool gate_backward(const GateArgs& args) {
  const int64_t i = args.channels, rank = args.rank, tasks = (args.rows + kGateRows - 1) / kGateRows;
  const int64_t numbers = args.gate_weight ? 2 * rank * i : 0;
  const Scratch partial(tasks * numbers * sizeof(T));
  if (!partial.get()) return false;
  const bool ok =
      run_tasks(tasks, args.threads, (2 * rank + 3) * i * sizeof(T), [&](int64_t task, void* scratch) {
        T* dweights = static_cast<T*>(partial.get()) + task * numbers;
        std::memset(dweights, 0, numbers * sizeof(T));
        const int64_t stop = (task + 1) * kGateRows < args.rows ? (task + 1) * kGateRows : args.rows;
        for (int64_t row = task * kGateRows; row < stop; ++row)
          gate_backward_row(args, row, dweights, static_cast<T*>(scratch));
      });
  if (!numbers) return ok;
  sum_blocks(static_cast<T*>(args.dweights), static_cast<const T*>(partial.get()), tasks, numbers);
  return ok;
}

}  // namespace ANYMAMBA_ISA
