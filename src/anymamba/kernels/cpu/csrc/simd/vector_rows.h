// Rows of any length in vectors: the last, partial vector is read with zeros after it and written without them.
#pragma once

#include "simd/dtypes.h"
#include "simd/simd.h"

namespace ANYMAMBA_ISA {

template <typename T>
inline Vec<T> load_first(const T* source, int64_t count) {
  if (count >= kLanes<T>) return load(source);
  Vec<T> x = {};
  std::memcpy(&x, source, count * sizeof(T));
  return x;
}

template <typename T>
inline void store_first(T* target, Vec<T> x, int64_t count) {
  if (count >= kLanes<T>)
    store(target, x);
  else
    std::memcpy(target, &x, count * sizeof(T));
}

template <typename T>
constexpr int64_t own_dtype() {
  return sizeof(T) == 8 ? kFloat64 : kFloat32;
}

// A row as T: in place where it is of T already, else converted into `buffer`.
template <typename T>
inline const T* row_as(T* buffer, const void* base, int64_t at, int64_t dtype, int64_t width) {
  const char* source = static_cast<const char*>(base) + at * static_cast<int64_t>(size_of(dtype));
  if (dtype == own_dtype<T>()) return reinterpret_cast<const T*>(source);
  read_row(buffer, source, dtype, static_cast<int>(width), static_cast<int>(width));
  return buffer;
}

// Prefetches memory gradually, `step` bytes at a time.
struct Ahead {
  const char *at, *until;
  int64_t step;

  void advance() {
    for (until += step; at < until; at += 64) __builtin_prefetch(at, 0, 3);
  }
};

// silu(x) and its derivative.
template <typename T>
inline Vec<T> silu(Vec<T> x) {
  return x * sigmoid<T>(x);
}
template <typename T>
inline Vec<T> silu_slope(Vec<T> x) {
  const Vec<T> s = sigmoid<T>(x);
  return s * (T(1) + x * (T(1) - s));
}

// target[i] = sum over blocks of partial[block][i], always in the same order.
template <typename T>
inline void sum_blocks(T* target, const T* partial, int64_t blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = blocks ? partial[i] : T(0);
  for (int64_t block = 1; block < blocks; ++block)
    for (int64_t i = 0; i < count; ++i) target[i] += partial[block * count + i];
}

}  // namespace ANYMAMBA_ISA
