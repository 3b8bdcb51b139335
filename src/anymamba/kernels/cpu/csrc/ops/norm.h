// The RMS norm over groups of channels, gated or not, one pass over memory each way. Formulas: ops/norms_and_gates.py.
#pragma once

#include <cmath>

#include "schema.h"
#include "simd/vector_rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kNormRows = 32;  // rows of a task; it fixes the order in which the weight's gradient is summed

template <typename T>
T inverse_root(T sum_of_squares, int64_t count, double eps) {
  return static_cast<T>(1 / std::sqrt(static_cast<double>(sum_of_squares) / static_cast<double>(count) + eps));
}

template <typename T>
void norm_forward_group(const T* x, const T* z, const T* weight, T* unit, T* y, int64_t width, bool norm_first,
                        double eps) {
  Vec<T> squares = {};
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> u = load_first(x + c, width - c);
    if (!norm_first) u *= silu<T>(load_first(z + c, width - c));
    squares += u * u;
    store_first(unit + c, u, width - c);
  }
  const T rho = inverse_root(sum_lanes<T>(squares), width, eps);
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> out = load_first(unit + c, width - c) * rho * load_first(weight + c, width - c);
    if (norm_first && z) out *= silu<T>(load_first(z + c, width - c));
    store_first(y + c, out, width - c);
  }
}

template <typename T>
bool norm_forward(const NormArgs& args) {
  const int64_t i = args.channels, width = args.group_size;
  Arena count;
  for (int buffer = 0; buffer < 4; ++buffer) count.take<T>(i);
  return run_tasks((args.rows + kNormRows - 1) / kNormRows, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    T *x_buffer = arena.take<T>(i), *z_buffer = arena.take<T>(i), *unit = arena.take<T>(i), *y = arena.take<T>(i);
    const int64_t stop = (task + 1) * kNormRows < args.rows ? (task + 1) * kNormRows : args.rows;
    for (int64_t row = task * kNormRows; row < stop; ++row) {
      const T* x = row_as(x_buffer, args.x, row * args.x_strides[0], args.dtype, i);
      const T* z = args.z ? row_as(z_buffer, args.z, row * args.z_strides[0], args.dtype, i) : nullptr;
      const T* weight = static_cast<const T*>(args.weight);
      T* out = args.dtype == own_dtype<T>() ? static_cast<T*>(args.y) + row * i : y;
      for (int64_t c = 0; c < i; c += width)
        norm_forward_group(x + c, z ? z + c : nullptr, weight + c, unit, out + c, width, args.norm_before_gate != 0, args.eps);
      if (out == y)
        write_row(static_cast<char*>(args.y) + row * i * static_cast<int64_t>(size_of(args.dtype)), y, args.dtype,
                  static_cast<int>(i));
    }
  });
}

// du = rho (g - unit mean(g unit)) with g = weight * d(unit), and on from u to x and z.
template <typename T>
void norm_backward_group(const T* x, const T* z, const T* dy, const T* weight, T* unit, T* dx, T* dz, T* dweight,
                         int64_t width, bool norm_first, double eps) {
  Vec<T> squares = {};
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> u = load_first(x + c, width - c);
    if (!norm_first) u *= silu<T>(load_first(z + c, width - c));
    squares += u * u;
    store_first(unit + c, u, width - c);
  }
  const T rho = inverse_root(sum_lanes<T>(squares), width, eps);
  Vec<T> radial = {};
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    const int64_t left = width - c;
    const Vec<T> u = load_first(unit + c, left) * rho;
    Vec<T> dunit = load_first(dy + c, left);
    if (norm_first && z) dunit *= silu<T>(load_first(z + c, left));
    store_first(dweight + c, load_first(dweight + c, left) + dunit * u, left);
    dunit *= load_first(weight + c, left);
    radial += dunit * u;
    store_first(unit + c, u, left);
    store_first(dx + c, dunit, left);
  }
  const T mean = sum_lanes<T>(radial) / static_cast<T>(width);
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    const int64_t left = width - c;
    const Vec<T> u = load_first(unit + c, left), du = rho * (load_first(dx + c, left) - u * mean);
    if (!z) {
      store_first(dx + c, du, left);
      continue;
    }
    const Vec<T> gate = load_first(z + c, left);
    const Vec<T> dgate = norm_first ? load_first(dy + c, left) * u * load_first(weight + c, left)
                                    : du * load_first(x + c, left);
    store_first(dz + c, dgate * silu_slope<T>(gate), left);
    store_first(dx + c, norm_first ? du : du * silu<T>(gate), left);
  }
}

template <typename T>
bool norm_backward(const NormArgs& args) {
  const int64_t i = args.channels, width = args.group_size, tasks = (args.rows + kNormRows - 1) / kNormRows;
  const Scratch partial(tasks * i * sizeof(T));
  if (!partial.get()) return false;
  Arena count;
  for (int buffer = 0; buffer < 6; ++buffer) count.take<T>(i);
  const bool ok = run_tasks(tasks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    T *x_buffer = arena.take<T>(i), *z_buffer = arena.take<T>(i), *dy_buffer = arena.take<T>(i);
    T *unit = arena.take<T>(i), *dx = arena.take<T>(i), *dz = arena.take<T>(i);
    T* dweight = static_cast<T*>(partial.get()) + task * i;
    std::memset(dweight, 0, i * sizeof(T));
    const int64_t stop = (task + 1) * kNormRows < args.rows ? (task + 1) * kNormRows : args.rows;
    for (int64_t row = task * kNormRows; row < stop; ++row) {
      const T* x = row_as(x_buffer, args.x, row * args.x_strides[0], args.dtype, i);
      const T* z = args.z ? row_as(z_buffer, args.z, row * args.z_strides[0], args.dtype, i) : nullptr;
      const T* dy = row_as(dy_buffer, args.dy, row * args.dy_strides[0], args.dtype, i);
      for (int64_t c = 0; c < i; c += width)
        norm_backward_group(x + c, z ? z + c : nullptr, dy + c, static_cast<const T*>(args.weight) + c, unit, dx + c, dz + c,
                            dweight + c, width, args.norm_before_gate != 0, args.eps);
      const int64_t at = row * i * static_cast<int64_t>(size_of(args.dtype));
      write_row(static_cast<char*>(args.dx) + at, dx, args.dtype, static_cast<int>(i));
      if (z) write_row(static_cast<char*>(args.dz) + at, dz, args.dtype, static_cast<int>(i));
    }
  });
  sum_blocks(static_cast<T*>(args.dweight), static_cast<const T*>(partial.get()), tasks, i);
  return ok;
}

}  // namespace ANYMAMBA_ISA
