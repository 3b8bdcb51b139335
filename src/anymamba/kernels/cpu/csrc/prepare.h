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
struct StepSize {
  Vec<double> value, slope;

  StepSize(Vec<double> x, const PrepareArgs& args, bool padding) {
    const Vec<double> zero = {}, low = broadcast(args.dt_min), high = broadcast(args.dt_max);
    const Vec<double> free = softplus<double>(x);
    value = padding ? zero : free < low ? low : free > high ? high : free;
    slope = padding ? zero : free < low ? zero : free > high ? zero : sigmoid<double>(x);
  }
};

// The decay rate, never positive, and its derivative.
struct DecayRate {
  Vec<double> value, slope;

  DecayRate(Vec<double> x, const PrepareArgs& args) {
    const Vec<double> zero = {}, floor = broadcast(args.rate_floor);
    Vec<double> free, steep;
    if (args.heavy_tail) {
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
void widen(double* target, T* buffer, const void* base, int64_t at, int64_t dtype, int64_t width) {
  const T* source = row_as(buffer, base, at, dtype, width);
  for (int64_t c = 0; c < width; ++c) target[c] = static_cast<double>(source[c]);
  for (int64_t c = width; c < round_up<double>(static_cast<int>(width)); ++c) target[c] = 0;
}

// The raw numbers of a row, in doubles: the error of a step size or rate grows with the length of the sequence.
template <typename T>
struct PrepareRow {
  double *dt, *a, *trap, *turn, *results[5];
  T* narrow;

  PrepareRow(const PrepareArgs& args, Arena& arena) {
    const size_t h = round_up<double>(static_cast<int>(args.heads)), s = round_up<double>(static_cast<int>(args.pairs));
    dt = arena.take<double>(h), a = arena.take<double>(h), trap = arena.take<double>(h), turn = arena.take<double>(s);
    for (int i = 0; i < 5; ++i) results[i] = arena.take<double>(h > s ? h : s);
    narrow = arena.take<T>(h > s ? h : s);
  }

  void read(const PrepareArgs& args, int64_t row) {
    widen(dt, narrow, args.dt_raw, row * args.dt_raw_row, args.dtype, args.heads);
    for (int64_t c = 0; c < args.heads; ++c) dt[c] += static_cast<double>(static_cast<const T*>(args.dt_bias)[c]);
    widen(a, narrow, args.a_raw, row * args.a_raw_row, args.dtype, args.heads);
    widen(trap, narrow, args.trap_raw, row * args.trap_raw_row, args.dtype, args.heads);
    widen(turn, narrow, args.turn_raw, row * args.turn_raw_row, args.dtype, args.pairs);
  }

  // One result out, in `dtype`.
  void write(void* target, int result, int64_t row, int64_t width, int64_t dtype) {
    if (!width) return;
    for (int64_t c = 0; c < width; ++c) narrow[c] = static_cast<T>(results[result][c]);
    write_row(static_cast<char*>(target) + row * width * static_cast<int64_t>(size_of(dtype)), narrow, dtype,
              static_cast<int>(width));
  }
};

template <typename T>
void prepare_forward_row(const PrepareArgs& args, int64_t row, PrepareRow<T>& b) {
  const bool padding = is_padding(args, row);
  b.read(args, row);
  for (int64_t c = 0; c < args.heads; c += kLanes<double>) {
    const Vec<double> dt = StepSize(load(b.dt + c), args, padding).value;
    store(b.results[0] + c, dt);
    store(b.results[1] + c, dt * DecayRate(load(b.a + c), args).value);
    store(b.results[2] + c, sigmoid<double>(load(b.trap + c)) * dt);
    store(b.results[3] + c, sigmoid<double>(-load(b.trap + c)) * dt);
  }
  for (int64_t c = 0; c < args.pairs; c += kLanes<double>)
    store(b.results[4] + c, args.range * kHalfTurn * tanh<double>(load(b.turn + c)));
  void* const targets[4] = {args.dt, args.log_decay, args.gamma, args.kappa};
  for (int i = 0; i < 4; ++i) b.write(targets[i], i, row, args.heads, own_dtype<T>());
  b.write(args.rate, 4, row, args.pairs, own_dtype<T>());
}

template <typename T>
bool prepare_forward(const PrepareArgs& args) {
  const int64_t rows = args.batch * args.time;
  Arena count;
  PrepareRow<T>(args, count);
  const int64_t tasks = (rows + kPrepareRows - 1) / kPrepareRows;
  return run_tasks(tasks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    PrepareRow<T> b(args, arena);
    const int64_t stop = (task + 1) * kPrepareRows < rows ? (task + 1) * kPrepareRows : rows;
    for (int64_t row = task * kPrepareRows; row < stop; ++row) prepare_forward_row(args, row, b);
  });
}

// `grads` is scratch for five rows of doubles.
template <typename T>
void prepare_backward_row(const PrepareArgs& args, int64_t row, double* dbias, PrepareRow<T>& b, double* const* grads) {
  const int64_t h = args.heads, s = args.pairs;
  const bool padding = is_padding(args, row);
  b.read(args, row);
  const void* const sources[4] = {args.ddt, args.dlog_decay, args.dgamma, args.dkappa};
  for (int i = 0; i < 4; ++i) widen(grads[i], b.narrow, sources[i], row * h, own_dtype<T>(), h);
  widen(grads[4], b.narrow, args.drate, row * s, own_dtype<T>(), s);
  for (int64_t c = 0; c < h; c += kLanes<double>) {
    const StepSize dt(load(b.dt + c), args, padding);
    const DecayRate rate(load(b.a + c), args);
    const Vec<double> now = sigmoid<double>(load(b.trap + c)), before = sigmoid<double>(-load(b.trap + c));
    const Vec<double> dlog_decay = load(grads[1] + c), dgamma = load(grads[2] + c), dkappa = load(grads[3] + c);
    const Vec<double> ddt = load(grads[0] + c) + dlog_decay * rate.value + dgamma * now + dkappa * before;
    store(b.results[0] + c, ddt * dt.slope);
    store(b.results[1] + c, dlog_decay * dt.value * rate.slope);
    store(b.results[2] + c, (dgamma - dkappa) * dt.value * (now * before));
  }
  for (int64_t c = 0; c < s; c += kLanes<double>) {
    const Vec<double> turn = tanh<double>(load(b.turn + c));
    store(b.results[3] + c, args.range * kHalfTurn * load(grads[4] + c) * ((1.0 - turn) * (1.0 + turn)));
  }
  for (int64_t c = 0; c < h; ++c) dbias[c] += b.results[0][c];
  void* const targets[3] = {args.ddt_raw, args.da_raw, args.dtrap_raw};
  for (int i = 0; i < 3; ++i) b.write(targets[i], i, row, h, args.dtype);
  b.write(args.dturn_raw, 3, row, s, args.dtype);
}

template <typename T>
bool prepare_backward(const PrepareArgs& args) {
  const int64_t h = args.heads, rows = args.batch * args.time, tasks = (rows + kPrepareRows - 1) / kPrepareRows;
  const int widest = round_up<double>(static_cast<int>(h > args.pairs ? h : args.pairs));
  const Scratch partial((tasks + 1) * h * sizeof(double));
  if (!partial.get()) return false;
  double *total = static_cast<double*>(partial.get()), *sums = total + h;
  Arena count;
  PrepareRow<T>(args, count);
  count.take<double>(5 * widest);
  const bool ok = run_tasks(tasks, args.threads, count.used(), [&](int64_t task, void* scratch) {
    Arena arena(scratch);
    PrepareRow<T> b(args, arena);
    double *memory = arena.take<double>(5 * widest), *grads[5];
    for (int i = 0; i < 5; ++i) grads[i] = memory + i * widest;
    double* dbias = sums + task * h;
    std::memset(dbias, 0, h * sizeof(double));
    const int64_t stop = (task + 1) * kPrepareRows < rows ? (task + 1) * kPrepareRows : rows;
    for (int64_t row = task * kPrepareRows; row < stop; ++row) prepare_backward_row(args, row, dbias, b, grads);
  });
  sum_blocks(total, sums, tasks, h);
  for (int64_t c = 0; c < h; ++c) static_cast<T*>(args.ddt_bias)[c] = static_cast<T>(total[c]);
  return ok;
}

}  // namespace ANYMAMBA_ISA
