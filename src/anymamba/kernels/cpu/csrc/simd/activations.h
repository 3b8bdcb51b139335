// Activations of step sizes and rates as vectors, within a few ulp: softplus and tanh.
#pragma once

#include "simd/simd.h"

namespace ANYMAMBA_ISA {

// log(1 + x) for 0 <= x <= 1: twice the series of atanh(s), s = x / (2 + x) <= 1/3.
template <typename T>
inline Vec<T> log1p_of_fraction(Vec<T> x) {
  constexpr int terms = sizeof(T) == 8 ? 17 : 8;
  const Vec<T> s = x / (T(2) + x), square = s * s;
  Vec<T> sum = broadcast(T(1) / T(2 * terms - 1));
#pragma GCC unroll 17
  for (int i = terms - 2; i >= 0; --i) sum = sum * square + T(1) / T(2 * i + 1);
  return T(2) * s * sum;
}

// log(1 + exp(x)).
template <typename T>
inline Vec<T> softplus(Vec<T> x) {
  const Vec<T> zero = {};
  return (x < zero ? zero : x) + log1p_of_fraction<T>(exp_nonpositive(x < zero ? x : -x));
}

// tanh(x): by the series of sinh and cosh near zero, by exp(-2 |x|) elsewhere.
template <typename T>
inline Vec<T> tanh(Vec<T> x) {
  const Vec<T> zero = {}, size = x < zero ? -x : x, square = x * x;
  Vec<T> sinh, cosh;
  if constexpr (sizeof(T) == 8) {
    sinh = square * T(1.0 / 1307674368000.0) + T(1.0 / 6227020800.0);
    sinh = sinh * square + T(1.0 / 39916800.0);
    sinh = sinh * square + T(1.0 / 362880.0);
    cosh = square * T(1.0 / 87178291200.0) + T(1.0 / 479001600.0);
    cosh = cosh * square + T(1.0 / 3628800.0);
    cosh = cosh * square + T(1.0 / 40320.0);
  } else {
    sinh = broadcast(T(1.0 / 362880.0));
    cosh = broadcast(T(1.0 / 40320.0));
  }
  sinh = sinh * square + T(1.0 / 5040.0);
  sinh = sinh * square + T(1.0 / 120.0);
  sinh = sinh * square + T(1.0 / 6.0);
  sinh = x + x * (square * sinh);
  cosh = cosh * square + T(1.0 / 720.0);
  cosh = cosh * square + T(1.0 / 24.0);
  cosh = T(1) + square * (cosh * square + T(0.5));
  const Vec<T> e = exp_nonpositive(T(-2) * size), far = (T(1) - e) / (T(1) + e);
  return size < broadcast(T(0.5)) ? sinh / cosh : x < zero ? -far : far;
}

}  // namespace ANYMAMBA_ISA
