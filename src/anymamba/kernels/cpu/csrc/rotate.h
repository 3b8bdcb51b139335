// How keys and queries turn, one step of one head at a time: angles in planes, or unit quaternions about axes.
// Formulas: ops/rotation.py.
#pragma once

#include <cmath>

#include "trig.h"

namespace ANYMAMBA_ISA {

// The angles of a head advance by dt * rate; their cosines and sines. All arrays but `rate` are padded to whole vectors,
// `quarter` and `rest` are scratch.
template <typename T>
inline void advance_angles(double* angle, const T* rate, double dt, int pairs, T* quarter, T* rest, T* cos, T* sin) {
  for (int s = 0; s < pairs; ++s) {
    angle[s] = full_turns_removed(angle[s] + dt * static_cast<double>(rate[s]));
    split_angle(angle[s], quarter + s, rest + s);
  }
  for (int s = 0; s < pairs; s += kLanes<T>) {
    Vec<T> c, d;
    cos_sin<T>(load(quarter + s), load(rest + s), &c, &d);
    store(cos + s, c);
    store(sin + s, d);
  }
}

struct Quaternion {
  double w, x, y, z;

  Quaternion times(const Quaternion& q) const {
    return {w * q.w - x * q.x - y * q.y - z * q.z, w * q.x + x * q.w + y * q.z - z * q.y,
            w * q.y - x * q.z + y * q.w + z * q.x, w * q.z + x * q.y - y * q.x + z * q.w};
  }
};

// The turn by the vector dt * rate, after `before`, at length 1.
template <typename T>
inline Quaternion advance_quaternion(const Quaternion& before, const T* rate, double dt) {
  const double v[3] = {dt * rate[0], dt * rate[1], dt * rate[2]};
  const double half = 0.5 * std::sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2]);
  const double factor = 0.5 * (half > 1e-9 ? std::sin(half) / half : 1.0);
  const Quaternion q = Quaternion{std::cos(half), factor * v[0], factor * v[1], factor * v[2]}.times(before);
  const double scale = 1 / std::sqrt(q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z);
  return {q.w * scale, q.x * scale, q.y * scale, q.z * scale};
}

// Turns the pairs of a row, (2 i, 2 i + 1) or (i, i + n / 2).
template <typename T>
inline void rotate_pairs(T* x, const T* cos, const T* sin, int64_t pairs, int64_t n, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : n / 2;
  for (int64_t s = 0; s < pairs; ++s) {
    const T u = x[s * step], w = x[s * step + other];
    x[s * step] = u * cos[s] - w * sin[s];
    x[s * step + other] = u * sin[s] + w * cos[s];
  }
}

// Multiplies a block of four from the left by the conjugate of q.
template <typename T>
inline void rotate_block(T* x, const T* q) {
  const T w = q[0], a = -q[1], b = -q[2], c = -q[3];
  const T x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
  x[0] = w * x0 - a * x1 - b * x2 - c * x3;
  x[1] = w * x1 + a * x0 + b * x3 - c * x2;
  x[2] = w * x2 - a * x3 + b * x0 + c * x1;
  x[3] = w * x3 + a * x2 - b * x1 + c * x0;
}

}  // namespace ANYMAMBA_ISA
