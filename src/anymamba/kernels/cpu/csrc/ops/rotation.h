// The rotations of keys and queries, one step of one head at a time: angles in planes, or unit quaternions.
// Formulas: ops/rotation.py. The gradient is computed in scan/scan_rotation.h (`RotationGradient`), driven by
// scan/scan_backward.h; in portable code by autograd through scan/mamba3_scan.py.
#pragma once

#include <cmath>

#include "simd/trig.h"

namespace ANYMAMBA_ISA {

// Advances the angles of a head by dt * rate and computes their cosines and sines. All arrays but `rate` are padded to
// whole vectors; `quarter` and `rest` are scratch.
template <typename T>
inline void advance_angles(double* angle, const T* rate, double dt, int pairs, T* quarter, T* rest, T* cos, T* sin) {
  for (int s = 0; s < pairs; ++s) {
    angle[s] = wrap_angle(angle[s] + dt * static_cast<double>(rate[s]));
    split_angle(angle[s], quarter + s, rest + s);
  }
  for (int s = 0; s < pairs; s += kLanes<T>) {
    Vec<T> c, d;
    cos_sin<T>(load(quarter + s), load(rest + s), &c, &d);
    store(cos + s, c);
    store(sin + s, d);
  }
}

// The unit quaternions of a head, stored by component: w, x, y and z, `lanes` numbers each. `lanes` is a multiple of
// the vector width; the first `blocks` numbers are used.

template <typename T>
inline double quaternion_length(const T* q) {
  double square = 0;
  for (int i = 0; i < 4; ++i) square += static_cast<double>(q[i]) * static_cast<double>(q[i]);
  return std::sqrt(square);
}

// Reads quaternions (blocks, 4) and normalizes them; lanes without a block hold 1.
template <typename T>
inline void read_quaternions(double* target, const T* source, int blocks, int lanes) {
  for (int j = 0; j < blocks; ++j) {
    const T* q = source + 4 * j;
    const double scale = 1 / quaternion_length(q);
    for (int i = 0; i < 4; ++i) target[i * lanes + j] = static_cast<double>(q[i]) * scale;
  }
  for (int j = blocks; j < lanes; ++j)
    for (int i = 0; i < 4; ++i) target[i * lanes + j] = i == 0;
}

template <typename T, typename From>
inline void write_quaternions(T* target, const From* source, int blocks, int lanes) {
  for (int j = 0; j < blocks; ++j)
    for (int i = 0; i < 4; ++i) target[4 * j + i] = static_cast<T>(source[i * lanes + j]);
}

// target (3, lanes) = source (blocks, 3), with zeros after the blocks.
template <typename To, typename T>
inline void split_vectors(To* target, const T* source, int blocks, int lanes) {
  for (int j = 0; j < blocks; ++j)
    for (int i = 0; i < 3; ++i) target[i * lanes + j] = static_cast<To>(source[3 * j + i]);
  for (int j = blocks; j < lanes; ++j)
    for (int i = 0; i < 3; ++i) target[i * lanes + j] = 0;
}

// Rotates the quaternions (4, lanes) of a head by the vectors dt * rate (blocks, 3). `components` receives the result
// as T, and `half_cos` and `half_sinc` (lanes) cos(h) and sin(h) / h for half the angle h. `scratch` holds 4 * lanes
// numbers.
template <typename T>
inline void advance_quaternions(double* q, const T* rate, double dt, int blocks, int lanes, double* scratch,
                                T* components, T* half_cos, T* half_sinc) {
  double *x = scratch, *y = x + lanes, *z = y + lanes, *half = z + lanes;
  split_vectors(x, rate, blocks, lanes);
  for (int j = 0; j < lanes; ++j) {
    x[j] *= dt, y[j] *= dt, z[j] *= dt;
    half[j] = 0.5 * std::sqrt(x[j] * x[j] + y[j] * y[j] + z[j] * z[j]);
  }
  for (int j = 0; j < lanes; j += kLanes<double>) {
    const Vec<double> h = load(half + j), zero = {};
    const Vec<double> quarters = (h * 0.63661977236758134308 + kNearest) - kNearest;
    Vec<double> c, s;
    cos_sin<double>(quarters, (h - quarters * kQuarterHigh) - quarters * kQuarterLow, &c, &s);
    const Vec<double> sinc = h > zero ? s / (h > zero ? h : broadcast(1.0)) : broadcast(1.0);
    const Vec<double> tx = 0.5 * sinc * load(x + j), ty = 0.5 * sinc * load(y + j), tz = 0.5 * sinc * load(z + j);
    double *qw = q + j, *qx = qw + lanes, *qy = qx + lanes, *qz = qy + lanes;
    const Vec<double> w = load(qw), a = load(qx), b = load(qy), d = load(qz);
    const Vec<double> new_w = c * w - tx * a - ty * b - tz * d, new_x = c * a + tx * w + ty * d - tz * b;
    const Vec<double> new_y = c * b - tx * d + ty * w + tz * a, new_z = c * d + tx * b - ty * a + tz * w;
    // The length is 1 up to rounding, so one Newton step gives its inverse.
    const Vec<double> scale = 1.5 - 0.5 * (new_w * new_w + new_x * new_x + new_y * new_y + new_z * new_z);
    store(qw, new_w * scale), store(qx, new_x * scale), store(qy, new_y * scale), store(qz, new_z * scale);
    for (int i = 0; i < kLanes<double>; ++i) half_cos[j + i] = static_cast<T>(c[i]);
    for (int i = 0; i < kLanes<double>; ++i) half_sinc[j + i] = static_cast<T>(sinc[i]);
  }
  for (int i = 0; i < 4 * lanes; ++i) components[i] = static_cast<T>(q[i]);
}

// Rotates the pairs of a row, (2 i, 2 i + 1) or (i, i + n / 2).
template <typename T>
inline void rotate_pairs(T* x, const T* cos, const T* sin, int64_t pairs, int64_t n, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : n / 2;
  for (int64_t s = 0; s < pairs; ++s) {
    const T u = x[s * step], w = x[s * step + other];
    x[s * step] = u * cos[s] - w * sin[s];
    x[s * step + other] = u * sin[s] + w * cos[s];
  }
}

// Multiplies the blocks of four of a row from the left by the conjugates of q, (4, lanes).
template <typename T>
inline void rotate_blocks(T* x, const T* q, int64_t blocks, int64_t lanes) {
  for (int64_t j = 0; j < blocks; ++j, x += 4) {
    const T w = q[j], a = q[lanes + j], b = q[2 * lanes + j], c = q[3 * lanes + j];
    const T x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
    x[0] = w * x0 + a * x1 + b * x2 + c * x3;
    x[1] = w * x1 - a * x0 - b * x3 + c * x2;
    x[2] = w * x2 + a * x3 - b * x0 - c * x1;
    x[3] = w * x3 - a * x2 + b * x1 - c * x0;
  }
}

}  // namespace ANYMAMBA_ISA
