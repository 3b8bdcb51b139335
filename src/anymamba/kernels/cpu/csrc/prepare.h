// What Mamba-3 makes of the raw step sizes, rates and turns of its projection, one pass over memory each way.
// Formulas: `_split` and `_tokens` of blocks/mamba3.py.
#pragma once

#include "activations.h"
#include "mamba3_args.h"
#include "rows.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr int64_t kPrepareRows = 64;  // rows of a task; it fixes the order in which the bias' gradient is summed
constexpr double kHalfTurn = 3.14159265358979323846;

inline bool is_padding(const PrepareArgs& args, int64_t row) {
  return args.lengths && row % args.time >= args.lengths[row / args.time];
}

// The step size, and its derivative: that of softplus within the limits, else zero.
template <typename T>
struct StepSize {
  Vec<T> value, slope;

  StepSize(Vec<T> x, const PrepareArgs& args, bool padding) {
    const Vec<T> zero = {}, low = broadcast(static_cast<T>(args.dt_min)), high = broadcast(static_cast<T>(args.dt_max));
    const Vec<T> free = softplus<T>(x);
    value = padding ? zero : free < low ? low : free > high ? high : free;
    slope = padding ? zero : free < low ? zero : free > high ? zero : sigmoid<T>(x);
  }
};

// The decay rate, never positive, and its derivative.
template <typename T>
struct DecayRate {
  Vec<T> value, slope;

  DecayRate(Vec<T> x, const PrepareArgs& args) {
    const Vec<T> zero = {}, floor = broadcast(static_cast<T>(args.rate_floor));
    Vec<T> free, steep;
    if (args.heavy_tail) {
      const Vec<T> below = T(1) / (T(1) - (x > zero ? zero : x));
      free = (x > zero ? x : zero) + below;
      steep = x > zero ? broadcast(T(1)) : below * below;
    } else {
      free = softplus<T>(x);
      steep = sigmoid<T>(x);
    }
    value = free < floor ? -floor : -free;
    slope = free < floor ? zero : -steep;
  }
};

template <typename T>
void prepare_forward_row(const PrepareArgs& args, int64_t row, T* buffer) {
  const int64_t h = args.heads, s = args.pairs;
  T *dt_buffer = buffer, *a_buffer = buffer + h, *trap_buffer = buffer + 2 * h, *turn_buffer = buffer + 3 * h;
  const T* dt_raw = row_as(dt_buffer, args.dt_raw, row * args.dt_raw_row, args.dtype, h);
  const T* a_raw = row_as(a_buffer, args.a_raw, row * args.a_raw_row, args.dtype, h);
  const T* trap_raw = row_as(trap_buffer, args.trap_raw, row * args.trap_raw_row, args.dtype, h);
  const T* turn_raw = row_as(turn_buffer, args.turn_raw, row * args.turn_raw_row, args.dtype, s);
  const T* bias = static_cast<const T*>(args.dt_bias);
  const bool padding = is_padding(args, row);
  for (int64_t c = 0; c < h; c += kLanes<T>) {
    const int64_t left = h - c, at = row * h + c;
    const Vec<T> dt = StepSize<T>(load_first(dt_raw + c, left) + load_first(bias + c, left), args, padding).value;
    const Vec<T> gamma = sigmoid<T>(load_first(trap_raw + c, left)) * dt;
    const Vec<T> kappa = sigmoid<T>(-load_first(trap_raw + c, left)) * dt;
    store_first(static_cast<T*>(args.dt) + at, dt, left);
    store_first(static_cast<T*>(args.log_decay) + at, dt * DecayRate<T>(load_first(a_raw + c, left), args).value, left);
    store_first(static_cast<T*>(args.gamma) + at, gamma, left);
    store_first(static_cast<T*>(args.kappa) + at, kappa, left);
  }
  const T most = static_cast<T>(args.range * kHalfTurn);
  for (int64_t c = 0; c < s; c += kLanes<T>)
    store_first(static_cast<T*>(args.rate) + row * s + c, most * tanh<T>(load_first(turn_raw + c, s - c)), s - c);
}

template <typename T>
bool prepare_forward(const PrepareArgs& args) {
  const int64_t rows = args.batch * args.time;
  return run_tasks((rows + kPrepareRows - 1) / kPrepareRows, args.threads, (3 * args.heads + args.pairs) * sizeof(T),
                   [&](int64_t task, void* scratch) {
                     const int64_t stop = (task + 1) * kPrepareRows < rows ? (task + 1) * kPrepareRows : rows;
                     for (int64_t row = task * kPrepareRows; row < stop; ++row)
                       prepare_forward_row(args, row, static_cast<T*>(scratch));
                   });
}

template <typename T>
void prepare_backward_row(const PrepareArgs& args, int64_t row, T* dbias, T* buffer) {
  const int64_t h = args.heads, s = args.pairs, size = static_cast<int64_t>(size_of(args.dtype));
  T *dt_buffer = buffer, *a_buffer = buffer + h, *trap_buffer = buffer + 2 * h, *turn_buffer = buffer + 3 * h;
  T *ddt_out = turn_buffer + s, *da_out = ddt_out + h, *dtrap_out = da_out + h, *dturn_out = dtrap_out + h;
  const T* dt_raw = row_as(dt_buffer, args.dt_raw, row * args.dt_raw_row, args.dtype, h);
  const T* a_raw = row_as(a_buffer, args.a_raw, row * args.a_raw_row, args.dtype, h);
  const T* trap_raw = row_as(trap_buffer, args.trap_raw, row * args.trap_raw_row, args.dtype, h);
  const T* turn_raw = row_as(turn_buffer, args.turn_raw, row * args.turn_raw_row, args.dtype, s);
  const T* bias = static_cast<const T*>(args.dt_bias);
  const bool padding = is_padding(args, row);
  for (int64_t c = 0; c < h; c += kLanes<T>) {
    const int64_t left = h - c, at = row * h + c;
    const StepSize<T> dt(load_first(dt_raw + c, left) + load_first(bias + c, left), args, padding);
    const DecayRate<T> rate(load_first(a_raw + c, left), args);
    const Vec<T> now = sigmoid<T>(load_first(trap_raw + c, left)), before = sigmoid<T>(-load_first(trap_raw + c, left));
    const Vec<T> dlog_decay = load_first(static_cast<const T*>(args.dlog_decay) + at, left);
    const Vec<T> dgamma = load_first(static_cast<const T*>(args.dgamma) + at, left);
    const Vec<T> dkappa = load_first(static_cast<const T*>(args.dkappa) + at, left);
    const Vec<T> ddt = load_first(static_cast<const T*>(args.ddt) + at, left) + dlog_decay * rate.value + dgamma * now +
                       dkappa * before;
    const Vec<T> ddt_raw = ddt * dt.slope;
    store_first(dbias + c, load_first(dbias + c, left) + ddt_raw, left);
    store_first(ddt_out + c, ddt_raw, left);
    store_first(da_out + c, dlog_decay * dt.value * rate.slope, left);
    store_first(dtrap_out + c, (dgamma - dkappa) * dt.value * (now * before), left);
  }
  const T most = static_cast<T>(args.range * kHalfTurn);
  for (int64_t c = 0; c < s; c += kLanes<T>) {
    const Vec<T> turn = tanh<T>(load_first(turn_raw + c, s - c));
    const Vec<T> drate = load_first(static_cast<const T*>(args.drate) + row * s + c, s - c);
    store_first(dturn_out + c, most * drate * ((T(1) - turn) * (T(1) + turn)), s - c);
  }
  const auto write = [&](void* target, const T* source, int64_t width) {
    write_row(static_cast<char*>(target) + row * width * size, source, args.dtype, static_cast<int>(width));
  };
  write(args.ddt_raw, ddt_out, h);
  write(args.da_raw, da_out, h);
  write(args.dtrap_raw, dtrap_out, h);
  write(args.dturn_raw, dturn_out, s);
}

template <typename T>
bool prepare_backward(const PrepareArgs& args) {
  const int64_t h = args.heads, rows = args.batch * args.time, tasks = (rows + kPrepareRows - 1) / kPrepareRows;
  const Scratch partial(tasks * h * sizeof(T));
  if (!partial.get()) return false;
  const bool ok =
      run_tasks(tasks, args.threads, 2 * (3 * h + args.pairs) * sizeof(T), [&](int64_t task, void* scratch) {
        T* dbias = static_cast<T*>(partial.get()) + task * h;
        std::memset(dbias, 0, h * sizeof(T));
        const int64_t stop = (task + 1) * kPrepareRows < rows ? (task + 1) * kPrepareRows : rows;
        for (int64_t row = task * kPrepareRows; row < stop; ++row)
          prepare_backward_row(args, row, dbias, static_cast<T*>(scratch));
      });
  sum_blocks(static_cast<T*>(args.ddt_bias), static_cast<const T*>(partial.get()), tasks, h);
  return ok;
}

}  // namespace ANYMAMBA_ISA
