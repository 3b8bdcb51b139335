// Step sizes of Mamba-2; step sizes, rates and rotations of Mamba-3. Formulas: ops/discretization.py.
//
// Rows are computed in double precision, both for sequences and for single tokens: the error of a step size or rate
// grows with the length of a sequence.
#pragma once

#include <cmath>

#include "simd/activations.h"
#include "schema.h"
#include "simd/vector_rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kDiscretizeRows = 64;  // rows of a task; it fixes the order in which the bias' gradient is summed
constexpr double kHalfTurn = 3.14159265358979323846;

struct StepLimits {
  bool heavy_tail;
  double rate_floor, dt_min, dt_max, range;
};

// The step size, and its derivative: that of softplus within the limits, else zero.
struct StepSize {
  Vec<double> value, slope;

  StepSize(Vec<double> x, const StepLimits& limits, bool padding) {
    const Vec<double> zero = {}, low = broadcast(limits.dt_min), high = broadcast(limits.dt_max);
    const Vec<double> free = softplus<double>(x);
    value = padding ? zero : free < low ? low : free > high ? high : free;
    slope = padding ? zero : free < low ? zero : free > high ? zero : sigmoid<double>(x);
  }
};

// The decay rate, never positive, and its derivative.
struct DecayRate {
  Vec<double> value, slope;

  DecayRate(Vec<double> x, const StepLimits& limits) {
    const Vec<double> zero = {}, floor = broadcast(limits.rate_floor);
    Vec<double> free, steep;
    if (limits.heavy_tail) {
      const Vec<double> below = 1.0 / (1.0 - (x > zero ? zero : x));
      free = (x > zero ? x : zero) + below;
      steep = x > zero ? broadcast(1.0) : below * below;
    } else {
      free = softplus<double>(x);
      steep = sigmoid<double>(x);
    }
    value = free < floor ? -floor : -free;
    slope = free < floor ? zero : -steep;
  }
};

// A row of T as doubles, with zeros up to whole vectors.
template <typename T>
void to_double(double* target, const T* source, int64_t width) {
  for (int64_t c = 0; c < width; ++c) target[c] = static_cast<double>(source[c]);
  for (int64_t c = width; c < round_up<double>(static_cast<int>(width)); ++c) target[c] = 0;
}

// Three-dimensional vectors, stored by component (`lanes` numbers each), with their lengths and directions.
struct Axes {
  int64_t vectors, lanes;
  double *x, *y, *z, *length;

  Axes(Arena& arena, int64_t numbers)
      : vectors(numbers / 3),
        lanes(round_up<double>(static_cast<int>(vectors))),
        x(arena.take<double>(lanes)),
        y(arena.take<double>(lanes)),
        z(arena.take<double>(lanes)),
        length(arena.take<double>(lanes)) {}

  void split(const double* source) {
    for (int64_t j = 0; j < vectors; ++j) x[j] = source[3 * j], y[j] = source[3 * j + 1], z[j] = source[3 * j + 2];
    for (int64_t j = vectors; j < lanes; ++j) x[j] = y[j] = z[j] = 0;
  }
  void join(double* target) const {
    for (int64_t j = 0; j < vectors; ++j) target[3 * j] = x[j], target[3 * j + 1] = y[j], target[3 * j + 2] = z[j];
  }
  // x, y, z become directions. No square overflows or vanishes; a vector of zero has length and direction zero.
  void normalize() {
    for (int64_t j = 0; j < lanes; ++j) {
      const double a = std::fabs(x[j]), b = std::fabs(y[j]), c = std::fabs(z[j]);
      const double most = a > b ? (a > c ? a : c) : (b > c ? b : c), scale = most > 1e-150 ? most : 1e-150;
      const double u = x[j] / scale, v = y[j] / scale, w = z[j] / scale;
      const double size = std::sqrt(u * u + v * v + w * w), inverse = 1 / (size > 1e-150 ? size : 1e-150);
      length[j] = scale * size;
      x[j] = u * inverse, y[j] = v * inverse, z[j] = w * inverse;
    }
  }
};

// The raw numbers of a row, and the step sizes, decays and rates computed from them.
struct DiscretizedRow {
  int64_t heads, rotations;  // rotations: the count of numbers that describe the rotation of a token
  double *dt, *a, *trap, *rotation;
  double* results[5];  // dt, log_decay, gamma, kappa; the rates of rotation
  Axes axes, daxes;    // for rotations about axes

  DiscretizedRow(Arena& arena, int64_t heads, int64_t rotations)
      : heads(heads), rotations(rotations), axes(arena, rotations), daxes(arena, rotations) {
    const size_t h = round_up<double>(static_cast<int>(heads)), s = round_up<double>(static_cast<int>(rotations));
    dt = arena.take<double>(h), a = arena.take<double>(h), trap = arena.take<double>(h), rotation = arena.take<double>(s);
    for (int i = 0; i < 5; ++i) results[i] = arena.take<double>(h > s ? h : s);
  }

  void compute_steps(const StepLimits& limits, bool padding) {
    for (int64_t c = 0; c < heads; c += kLanes<double>)
      store(results[0] + c, StepSize(load(dt + c), limits, padding).value);
  }

  void compute(const StepLimits& limits, bool padding) {
    compute_steps(limits, padding);
    for (int64_t c = 0; c < heads; c += kLanes<double>) {
      const Vec<double> size = load(results[0] + c);
      store(results[1] + c, size * DecayRate(load(a + c), limits).value);
      store(results[2] + c, sigmoid<double>(load(trap + c)) * size);
      store(results[3] + c, sigmoid<double>(-load(trap + c)) * size);
    }
  }

  // The rates of rotation: one number per plane, or a vector of three per axis.
  void bound_rotations(const StepLimits& limits, bool quaternion) {
    if (quaternion) return bound_vectors(limits);
    for (int64_t c = 0; c < rotations; c += kLanes<double>)
      store(results[4] + c, limits.range * kHalfTurn * tanh<double>(load(rotation + c)));
  }
  // The gradient `grad` on them becomes that on the raw numbers, in `out`.
  void bound_rotations_backward(const StepLimits& limits, bool quaternion, const double* grad, double* out) {
    if (quaternion) return bound_vectors_backward(limits, grad, out);
    for (int64_t c = 0; c < rotations; c += kLanes<double>) {
      const Vec<double> bounded = tanh<double>(load(rotation + c));
      store(out + c, limits.range * kHalfTurn * load(grad + c) * ((1.0 - bounded) * (1.0 + bounded)));
    }
  }

 private:
  void bound_vectors(const StepLimits& limits) {
    axes.split(rotation);
    axes.normalize();
    for (int64_t j = 0; j < axes.lanes; j += kLanes<double>) {
      const Vec<double> size = limits.range * kHalfTurn * tanh<double>(load(axes.length + j));
      store(axes.x + j, size * load(axes.x + j));
      store(axes.y + j, size * load(axes.y + j));
      store(axes.z + j, size * load(axes.z + j));
    }
    axes.join(results[4]);
  }

  // Along the direction n the slope of tanh, across it tanh(length) / length.
  void bound_vectors_backward(const StepLimits& limits, const double* grad, double* out) {
    axes.split(rotation);
    axes.normalize();
    daxes.split(grad);
    for (int64_t j = 0; j < axes.lanes; j += kLanes<double>) {
      const Vec<double> length = load(axes.length + j), bounded = tanh<double>(length), least = broadcast(1e-150);
      const Vec<double> across = length > least ? bounded / (length > least ? length : least) : broadcast(1.0);
      const Vec<double> x = load(axes.x + j), y = load(axes.y + j), z = load(axes.z + j);
      const Vec<double> dx = load(daxes.x + j), dy = load(daxes.y + j), dz = load(daxes.z + j);
      const Vec<double> along = ((1.0 - bounded) * (1.0 + bounded) - across) * (x * dx + y * dy + z * dz);
      const double range = limits.range * kHalfTurn;
      store(daxes.x + j, range * (across * dx + along * x));
      store(daxes.y + j, range * (across * dy + along * y));
      store(daxes.z + j, range * (across * dz + along * z));
    }
    daxes.join(out);
  }
};

// The rows of a sequence, read and written in their dtypes.
template <typename T>
struct DiscretizeRows {
  const DiscretizeArgs& args;
  const StepLimits limits;
  DiscretizedRow row;
  T* buffer;

  DiscretizeRows(const DiscretizeArgs& args, Arena& arena)
      : args(args),
        limits{args.heavy_tail != 0, args.rate_floor, args.dt_min, args.dt_max, args.range},
        row(arena, args.heads, args.pairs),
        buffer(arena.take<T>(args.heads > args.pairs ? args.heads : args.pairs)) {}

  bool is_padding(int64_t index) const { return args.lengths && index % args.time >= args.lengths[index / args.time]; }

  void read(int64_t index) {
    read_raw(row.dt, args.dt_raw, index * args.dt_raw_strides[0], args.heads);
    for (int64_t c = 0; c < args.heads; ++c) row.dt[c] += static_cast<double>(static_cast<const T*>(args.dt_bias)[c]);
    if (!args.a_raw) return;
    read_raw(row.a, args.a_raw, index * args.a_raw_strides[0], args.heads);
    read_raw(row.trap, args.trap_raw, index * args.trap_raw_strides[0], args.heads);
    read_raw(row.rotation, args.rotation_raw, index * args.rotation_raw_strides[0], args.pairs);
  }
  void read_raw(double* target, const void* base, int64_t at, int64_t width) {
    to_double(target, row_as(buffer, base, at, args.dtype, width), width);
  }

  // One result out, in `dtype`.
  void write(void* target, int result, int64_t index, int64_t width, int64_t dtype) {
    if (!width) return;
    for (int64_t c = 0; c < width; ++c) buffer[c] = static_cast<T>(row.results[result][c]);
    write_row(static_cast<char*>(target) + index * width * static_cast<int64_t>(size_of(dtype)), buffer, dtype,
              static_cast<int>(width));
  }

  void forward(int64_t index) {
    read(index);
    if (!args.a_raw) {
      row.compute_steps(limits, is_padding(index));
      return write(args.dt, 0, index, args.heads, own_dtype<T>());
    }
    row.compute(limits, is_padding(index));
    row.bound_rotations(limits, args.quaternion != 0);
    void* const targets[4] = {args.dt, args.log_decay, args.gamma, args.kappa};
    for (int i = 0; i < 4; ++i) write(targets[i], i, index, args.heads, own_dtype<T>());
    write(args.rate, 4, index, args.pairs, own_dtype<T>());
  }

  // `grads` is scratch for five rows of doubles.
  void backward(int64_t index, double* dbias, double* const* grads) {
    const int64_t h = args.heads, s = args.pairs;
    const bool padding = is_padding(index);
    read(index);
    const void* const sources[4] = {args.ddt, args.dlog_decay, args.dgamma, args.dkappa};
    for (int i = 0; i < (args.a_raw ? 4 : 1); ++i) to_double(grads[i], static_cast<const T*>(sources[i]) + index * h, h);
    if (!args.a_raw) {
      for (int64_t c = 0; c < h; c += kLanes<double>)
        store(row.results[0] + c, load(grads[0] + c) * StepSize(load(row.dt + c), limits, padding).slope);
      for (int64_t c = 0; c < h; ++c) dbias[c] += row.results[0][c];
      return write(args.ddt_raw, 0, index, h, args.dtype);
    }
    to_double(grads[4], static_cast<const T*>(args.drate) + index * s, s);
    for (int64_t c = 0; c < h; c += kLanes<double>) {
      const StepSize dt(load(row.dt + c), limits, padding);
      const DecayRate rate(load(row.a + c), limits);
      const Vec<double> now = sigmoid<double>(load(row.trap + c)), before = sigmoid<double>(-load(row.trap + c));
      const Vec<double> dlog_decay = load(grads[1] + c), dgamma = load(grads[2] + c), dkappa = load(grads[3] + c);
      const Vec<double> ddt = load(grads[0] + c) + dlog_decay * rate.value + dgamma * now + dkappa * before;
      store(row.results[0] + c, ddt * dt.slope);
      store(row.results[1] + c, dlog_decay * dt.value * rate.slope);
      store(row.results[2] + c, (dgamma - dkappa) * dt.value * (now * before));
    }
    row.bound_rotations_backward(limits, args.quaternion != 0, grads[4], row.results[3]);
    for (int64_t c = 0; c < h; ++c) dbias[c] += row.results[0][c];
    void* const targets[3] = {args.ddt_raw, args.da_raw, args.dtrap_raw};
    for (int i = 0; i < 3; ++i) write(targets[i], i, index, h, args.dtype);
    write(args.drotation_raw, 3, index, s, args.dtype);
  }
};

// body(row) for the rows of a task.
template <typename Body>
void for_rows(const DiscretizeArgs& args, int64_t task, const Body& body) {
  const int64_t first = task * kDiscretizeRows, stop = first + kDiscretizeRows < args.rows ? first + kDiscretizeRows : args.rows;
  for (int64_t row = first; row < stop; ++row) body(row);
}

template <typename T>
bool discretize_forward(const DiscretizeArgs& args) {
  Arena count;
  DiscretizeRows<T>(args, count);
  const int64_t tasks = (args.rows + kDiscretizeRows - 1) / kDiscretizeRows;
  return run_tasks(tasks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    DiscretizeRows<T> rows(args, arena);
    for_rows(args, task, [&](int64_t row) { rows.forward(row); });
  });
}

template <typename T>
bool discretize_backward(const DiscretizeArgs& args) {
  const int64_t h = args.heads, tasks = (args.rows + kDiscretizeRows - 1) / kDiscretizeRows;
  const int widest = round_up<double>(static_cast<int>(h > args.pairs ? h : args.pairs));
  const Scratch partial((tasks + 1) * h * sizeof(double));
  if (!partial.get()) return false;
  double *total = static_cast<double*>(partial.get()), *sums = total + h;
  Arena count;
  DiscretizeRows<T>(args, count);
  count.take<double>(5 * widest);
  const bool ok = run_tasks(tasks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    DiscretizeRows<T> rows(args, arena);
    double *memory = arena.take<double>(5 * widest), *grads[5];
    for (int i = 0; i < 5; ++i) grads[i] = memory + i * widest;
    double* dbias = sums + task * h;
    std::memset(dbias, 0, h * sizeof(double));
    for_rows(args, task, [&](int64_t row) { rows.backward(row, dbias, grads); });
  });
  sum_blocks(total, sums, tasks, h);
  for (int64_t c = 0; c < h; ++c) static_cast<T*>(args.ddt_bias)[c] = static_cast<T>(total[c]);
  return ok;
}

}  // namespace ANYMAMBA_ISA
