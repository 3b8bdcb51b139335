// Angles: running sums of angles in double, kept in [0, 2 pi), and their cosines and sines within 2 ulp.
#pragma once

#include "simd/simd.h"

namespace ANYMAMBA_ISA {

// pi / 2 in two parts: the first has few enough bits that its products with small integers are exact.
constexpr double kQuarterHigh = 1.57079632673412561417e+00;
constexpr double kQuarterLow = 6.07710050650619224932e-11;

// x rounded to the nearest integer, for |x| < 2^51. No call, so that loops over it become vectors everywhere.
constexpr double kNearest = 6755399441055744.0;  // 1.5 * 2^52
inline double nearest(double x) { return (x + kNearest) - kNearest; }

// The angle in [0, 2 pi).
inline double wrap_angle(double angle) {
  const double turns = angle * 0.15915494309189533577;
  double whole = nearest(turns);
  whole -= whole > turns ? 1.0 : 0.0;
  const double rest = (angle - whole * (4 * kQuarterHigh)) - whole * (4 * kQuarterLow);
  return rest < 0 || rest >= 6.28318530717958647693 ? 0.0 : rest;
}

// angle = quarter * pi / 2 + rest, with rest in [-pi / 4, pi / 4].
template <typename T>
inline void split_angle(double angle, T* quarter, T* rest) {
  const double quarters = nearest(angle * 0.63661977236758134308);
  *quarter = static_cast<T>(quarters);
  *rest = static_cast<T>((angle - quarters * kQuarterHigh) - quarters * kQuarterLow);
}

// x with its sign turned where bit 1 of `quarter` is set.
inline Vec<float> negated_by_bit_1(Vec<float> x, Vec<int32_t> quarter) {
  return (Vec<float>)((Vec<int32_t>)x ^ ((quarter & 2) << 30));
}
inline Vec<double> negated_by_bit_1(Vec<double> x, Vec<int64_t> quarter) {
  return (Vec<double>)((Vec<int64_t>)x ^ ((quarter & 2) << 62));
}

template <typename T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  typedef int32_t type;
  static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
};
template <>
struct IntegerOf<double> {
  typedef int64_t type;
  static constexpr double magic = 6755399441055744.0;
};

// The cosine and sine of an angle split by `split_angle`, by Taylor series.
template <typename T>
inline void cos_sin(Vec<T> quarter, Vec<T> rest, Vec<T>* cos, Vec<T>* sin) {
  const Vec<T> square = rest * rest;
  Vec<T> s, c;
  if constexpr (sizeof(T) == 8) {
    s = square * T(1.0 / 355687428096000.0) - T(1.0 / 1307674368000.0);
    s = s * square + T(1.0 / 6227020800.0);
    s = s * square - T(1.0 / 39916800.0);
    s = s * square + T(1.0 / 362880.0);
    c = T(1.0 / 20922789888000.0) - square * T(1.0 / 6402373705728000.0);
    c = c * square - T(1.0 / 87178291200.0);
    c = c * square + T(1.0 / 479001600.0);
    c = c * square - T(1.0 / 3628800.0);
    c = c * square + T(1.0 / 40320.0);
  } else {
    s = broadcast(T(1.0 / 362880.0));
    c = T(1.0 / 40320.0) - square * T(1.0 / 3628800.0);
  }
  s = s * square - T(1.0 / 5040.0);
  s = s * square + T(1.0 / 120.0);
  s = s * square - T(1.0 / 6.0);
  s = rest + rest * (square * s);
  c = c * square - T(1.0 / 720.0);
  c = c * square + T(1.0 / 24.0);
  c = T(1) + square * (c * square - T(0.5));
  typedef Vec<typename IntegerOf<T>::type> Integers;
  const Integers bits = (Integers)(quarter + IntegerOf<T>::magic);
  const auto odd = (bits & 1) != Integers{};
  *sin = negated_by_bit_1(odd ? c : s, bits);
  *cos = negated_by_bit_1(odd ? s : c, bits + 1);
}

}  // namespace ANYMAMBA_ISA
