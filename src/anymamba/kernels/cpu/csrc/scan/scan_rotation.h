// The rotations of keys and queries within a chunk, and their gradient. Formulas: ops/rotation.py.
//
// The gradient on a running rotation is held in the frame that rotates with it: for angles a number, for quaternions
// the vector w with dQ = Q w. In that frame the gradient on the rotation of a step is the sum of the gradients on all
// rotations after it.
#pragma once

#include "ops/rotation.h"
#include "scan/scan_chunk.h"

namespace ANYMAMBA_ISA {

// The rotations of a chunk of one head, running over time.
template <typename T>
struct ChunkRotations {
  T* components;            // (parts, rows): cosines and sines, or w, x, y, z
  T* by_row;            // (rows, parts)
  T *half_cos, *half_sinc;  // (steps, lanes): of the rotation of each step, for quaternions
  T *quarter, *rest;    // scratch, (lanes)
  double* vectors;      // scratch, (4, lanes)

  ChunkRotations(Arena& arena, const ChunkSizes<T>& s)
      : components(arena.take<T>(size_t(s.rotation.parts) * s.rows_row)),
        by_row(arena.take<T>(size_t(s.rows) * s.rotation.parts_row)),
        half_cos(arena.take<T>(s.rotation.quaternion ? size_t(s.steps) * s.rotation.lanes : 0)),
        half_sinc(arena.take<T>(s.rotation.quaternion ? size_t(s.steps) * s.rotation.lanes : 0)),
        quarter(arena.take<T>(s.rotation.lanes)),
        rest(arena.take<T>(s.rotation.lanes)),
        vectors(arena.take<double>(s.rotation.quaternion ? 4 * s.rotation.lanes : 0)) {}

  void clear(const ChunkSizes<T>& size) {
    fill_zero(components, size_t(size.rotation.parts) * size.rows_row);
    fill_zero(by_row, size_t(size.rows) * size.rotation.parts_row);
    fill_zero(quarter, size.rotation.lanes);
    fill_zero(rest, size.rotation.lanes);
  }

  // Advances the rotation `state` over the steps of a chunk.
  void advance(const ScanArgs& args, const Chunk& chunk, int64_t head, double* state, const ChunkSizes<T>& size) {
    const RotationSizes<T>& sizes = size.rotation;
    for (int l = 0; l < chunk.steps; ++l) {
      const double dt = *at_step<T>(args.dt, args, chunk.batch, chunk.start + l, head);
      const T* rate = rates(args, chunk.batch, chunk.start + l, head, sizes);
      T* out = after_step(l, size);
      if (sizes.quaternion)
        advance_quaternions(state, rate, dt, sizes.count, sizes.lanes, vectors, out, half_cos + l * sizes.lanes,
                            half_sinc + l * sizes.lanes);
      else
        advance_angles(state, rate, dt, sizes.count, quarter, rest, out, out + sizes.lanes);
      for (int r = 1; r < size.rank; ++r) std::memcpy(out + r * ptrdiff_t(sizes.parts_row), out, sizes.parts * sizeof(T));
    }
    transpose(components, size.rows_row, by_row, sizes.parts_row, chunk.steps * size.rank, sizes.parts);
  }

  // The rotation after a step, (parts).
  T* after_step(int step, const ChunkSizes<T>& size) const {
    return by_row + step * size.rank * ptrdiff_t(size.rotation.parts_row);
  }

  // The rates of a step: those of all heads, or the head's own.
  static const T* rates(const ScanArgs& args, int64_t batch, int64_t time, int64_t head, const RotationSizes<T>& sizes) {
    const int64_t offset = sizes.quaternion ? head * sizes.count * 3 : 0;
    return static_cast<const T*>(args.rate) + (batch * args.time + time) * args.rates + offset;
  }
};

// The rotation of a head from and to a (sequences, heads, angles) tensor; `sequence_head` is sequence * heads + head.
template <typename T>
void read_rotation(double* state, const void* base, int64_t sequence_head, const ScanArgs& args,
                   const RotationSizes<T>& sizes) {
  const T* source = static_cast<const T*>(base) + sequence_head * args.angles;
  if (sizes.quaternion) return read_quaternions(state, source, sizes.count, sizes.lanes);
  for (int s = 0; s < sizes.count; ++s) state[s] = static_cast<double>(source[s]);
}
template <typename T>
void write_rotation(void* base, const double* state, int64_t sequence_head, const ScanArgs& args,
                    const RotationSizes<T>& sizes) {
  T* target = static_cast<T*>(base) + sequence_head * args.angles;
  if (sizes.quaternion) return write_quaternions(target, state, sizes.count, sizes.lanes);
  for (int s = 0; s < sizes.count; ++s) target[s] = static_cast<T>(state[s]);
}

// The gradient on the rotation after the last step, (axes), from that of the tensor; `state` is the rotation itself.
template <typename T>
void read_drotation(double* grad, const double* state, int64_t sequence_head, const ScanArgs& args,
                    const RotationSizes<T>& sizes) {
  const T* source = static_cast<const T*>(args.dfinal_rotation) + sequence_head * args.angles;
  const int lanes = sizes.lanes;
  for (int i = 0; i < sizes.axes; ++i) grad[i] = 0;
  for (int j = 0; j < sizes.count; ++j) {
    if (!sizes.quaternion) {
      grad[j] = static_cast<double>(source[j]);
      continue;
    }
    // The vector of Q' dQ.
    const double w = state[j], x = state[lanes + j], y = state[2 * lanes + j], z = state[3 * lanes + j];
    const double dw = source[4 * j], dx = source[4 * j + 1], dy = source[4 * j + 2], dz = source[4 * j + 3];
    grad[j] = w * dx - x * dw - y * dz + z * dy;
    grad[lanes + j] = w * dy + x * dz - y * dw - z * dx;
    grad[2 * lanes + j] = w * dz - x * dy + y * dx - z * dw;
  }
}

// The gradient of the tensor that a sequence starts from, given the sum over all steps.
template <typename T>
void write_dstart(const double* grad, const double* state, int64_t sequence_head, const ScanArgs& args,
                  const RotationSizes<T>& sizes) {
  T* target = static_cast<T*>(args.dinitial_rotation) + sequence_head * args.angles;
  const T* start = static_cast<const T*>(args.initial_rotation) + sequence_head * args.angles;
  const int lanes = sizes.lanes;
  for (int j = 0; j < sizes.count; ++j) {
    if (!sizes.quaternion) {
      target[j] = static_cast<T>(grad[j]);
      continue;
    }
    // Q (0, grad), through the normalization of the initial quaternion.
    const double w = state[j], x = state[lanes + j], y = state[2 * lanes + j], z = state[3 * lanes + j];
    const double a = grad[j], b = grad[lanes + j], c = grad[2 * lanes + j];
    const double scale = 1 / quaternion_length(start + 4 * j);
    target[4 * j] = static_cast<T>(scale * (-x * a - y * b - z * c));
    target[4 * j + 1] = static_cast<T>(scale * (w * a + y * c - z * b));
    target[4 * j + 2] = static_cast<T>(scale * (w * b - x * c + z * a));
    target[4 * j + 3] = static_cast<T>(scale * (w * c + x * b - y * a));
  }
}

template <typename T>
struct RotationGradient {
  T *rows, *by_row;    // (axes, rows): of each row's rotation, from its keys and queries; and transposed
  double* sum;         // (axes) of a head: over all steps from the current one on
  T* drate;            // (steps, lanes): of the chunk, for angles, which the heads share
  T *before, *vector, *rate, *grad;  // scratch, (4, lanes) and three times (3, lanes)

  RotationGradient(Arena& arena, const ChunkSizes<T>& s, int64_t heads)
      : rows(arena.take<T>(size_t(s.rotation.axes) * s.rows_row)),
        by_row(arena.take<T>(size_t(s.rows) * s.rotation.axes_row)),
        sum(arena.take<double>(heads * s.rotation.axes)),
        drate(arena.take<T>(s.rotation.quaternion ? 0 : size_t(s.steps) * s.rotation.lanes)),
        before(arena.take<T>(s.rotation.state)),
        vector(arena.take<T>(s.rotation.axes)),
        rate(arena.take<T>(s.rotation.axes)),
        grad(arena.take<T>(s.rotation.axes)) {}

  // Once per task: lanes without a rotation have no gradient.
  void clear(const ChunkSizes<T>& size) { fill_zero(rows, size_t(size.rotation.axes) * size.rows_row); }

  // From the last step of a chunk to the first; `entering` is the rotation before it, `sums` the head's part of `sum`.
  void backward_chunk(const ScanArgs& args, const Chunk& chunk, int64_t head, double* sums, const double* entering,
                      const ChunkRotations<T>& rotations, const ChunkSizes<T>& size) {
    const RotationSizes<T>& sizes = size.rotation;
    const int rank = size.rank;
    transpose(by_row, sizes.axes_row, rows, size.rows_row, sizes.axes, chunk.steps * rank);
    if (sizes.quaternion)
      for (int i = 0; i < sizes.state; ++i) before[i] = static_cast<T>(entering[i]);
    for (int l = chunk.steps - 1; l >= 0; --l) {
      for (int i = l * rank; i < (l + 1) * rank; ++i)
        for (int s = 0; s < sizes.axes; ++s) sums[s] += static_cast<double>(by_row[i * ptrdiff_t(sizes.axes_row) + s]);
      const int64_t time = chunk.start + l;
      const double dt = *at_step<T>(args.dt, args, chunk.batch, time, head);
      const T* given = ChunkRotations<T>::rates(args, chunk.batch, time, head, sizes);
      const T* previous = l ? rotations.after_step(l - 1, size) : before;
      T* ddt = at_step<T>(args.ddt, args, chunk.batch, time, head);
      if (sizes.quaternion)
        *ddt = vectors(sums, given, static_cast<T>(dt), previous, rotations.half_cos + l * sizes.lanes,
                       rotations.half_sinc + l * sizes.lanes, args, given - static_cast<const T*>(args.rate), sizes);
      else
        *ddt = angles(sums, given, dt, drate + l * ptrdiff_t(sizes.lanes), sizes);
    }
  }

 private:
  static T angles(const double* sums, const T* rate, double dt, T* drate, const RotationSizes<T>& sizes) {
    for (int s = 0; s < sizes.count; ++s) drate[s] += static_cast<T>(sums[s] * dt);
    Vec<double> total = {};
    int s = 0;
    for (; s + kLanes<double> <= sizes.count; s += kLanes<double>) {
      Vec<double> wide;
      for (int i = 0; i < kLanes<double>; ++i) wide[i] = static_cast<double>(rate[s + i]);
      total += load(sums + s) * wide;
    }
    double ddt = sum_lanes<double>(total);
    for (; s < sizes.count; ++s) ddt += sums[s] * static_cast<double>(rate[s]);
    return static_cast<T>(ddt);
  }

  // With Q the rotation before the step and v = dt rate the vector it rotates by, through u = Q w Q' and the derivative
  // of the exponential: dv = (sin|v|/|v| u + (1 - cos|v|)/|v|² v × u + (1 - sin|v|/|v|)/|v|² <v, u> v) / 2.
  T vectors(const double* sums, const T* given, T dt, const T* q, const T* half_cos, const T* half_sinc,
            const ScanArgs& args, ptrdiff_t at, const RotationSizes<T>& sizes) const {
    const int lanes = sizes.lanes;
    for (int i = 0; i < 3 * lanes; ++i) vector[i] = static_cast<T>(sums[i]);
    split_vectors(rate, given, sizes.count, lanes);
    Vec<T> total = {};
    for (int j = 0; j < lanes; j += kLanes<T>) {
      const Vec<T> x = load(vector + j), y = load(vector + lanes + j), z = load(vector + 2 * lanes + j);
      const Vec<T> w = load(q + j), a = load(q + lanes + j), b = load(q + 2 * lanes + j), c = load(q + 3 * lanes + j);
      const Vec<T> cx = T(2) * (b * z - c * y), cy = T(2) * (c * x - a * z), cz = T(2) * (a * y - b * x);
      const Vec<T> ux = x + w * cx + (b * cz - c * cy), uy = y + w * cy + (c * cx - a * cz),
                   uz = z + w * cz + (a * cy - b * cx);
      const Vec<T> rx = load(rate + j), ry = load(rate + lanes + j), rz = load(rate + 2 * lanes + j);
      const Vec<T> vx = dt * rx, vy = dt * ry, vz = dt * rz, square = vx * vx + vy * vy + vz * vz;
      const Vec<T> sinc = load(half_sinc + j), along = sinc * load(half_cos + j), across = T(0.5) * sinc * sinc;
      const Vec<T> floor = broadcast(T(1e-30));  // where the last term does not count
      const Vec<T> inner = (T(1) - along) / (square > floor ? square : floor) * (vx * ux + vy * uy + vz * uz);
      const Vec<T> gx = T(0.5) * (along * ux + across * (vy * uz - vz * uy) + inner * vx);
      const Vec<T> gy = T(0.5) * (along * uy + across * (vz * ux - vx * uz) + inner * vy);
      const Vec<T> gz = T(0.5) * (along * uz + across * (vx * uy - vy * ux) + inner * vz);
      total += gx * rx + gy * ry + gz * rz;
      store(grad + j, dt * gx), store(grad + lanes + j, dt * gy), store(grad + 2 * lanes + j, dt * gz);
    }
    T* target = static_cast<T*>(args.drate) + at;
    for (int j = 0; j < sizes.count; ++j)
      for (int i = 0; i < 3; ++i) target[3 * j + i] = grad[i * lanes + j];
    return sum_lanes<T>(total);
  }
};

}  // namespace ANYMAMBA_ISA
