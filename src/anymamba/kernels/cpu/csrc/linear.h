// Few rows times a matrix: y = x Wᵀ, every number of W read once, in its own dtype.
//
// A product is summed over vectors in one fixed order, so that a row's result does not depend on the rows beside it.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "dtypes.h"
#include "rows.h"
#include "simd.h"

namespace ANYMAMBA_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec<float> load_wide(const float* source) { return load(source); }
inline Vec<double> load_wide(const double* source) { return load(source); }

// As many half-wide numbers as a vector of float has lanes.
struct HalfVector {
  typedef uint16_t type __attribute__((vector_size(kVectorBytes / 2)));
};
inline Vec<uint32_t> load_halves(const void* source) {
  HalfVector::type halves;
  std::memcpy(&halves, source, sizeof halves);
  return __builtin_convertvector(halves, Vec<uint32_t>);
}

inline Vec<float> load_wide(const BFloat16* source) { return (Vec<float>)(load_halves(source) << 16); }

#if defined(__AVX512F__)
inline Vec<float> load_wide(const Float16* source) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
#elif defined(__F16C__) && defined(__AVX2__) && !defined(ANYMAMBA_WIDE)
inline Vec<float> load_wide(const Float16* source) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
#else
// `from_float16` of dtypes.h, lane by lane.
inline Vec<float> load_wide(const Float16* source) {
  const Vec<uint32_t> x = load_halves(source);
  const Vec<uint32_t> shifted = (x & 0x7fffu) << 13, exponent = shifted & (0x7c00u << 13);
  const Vec<uint32_t> normal = shifted + ((127u - 15u) << 23);
  const Vec<uint32_t> special = normal + ((128u - 16u) << 23);
  const Vec<float> least = (Vec<float>)(Vec<uint32_t>{} + (113u << 23));
  const Vec<uint32_t> denormal = (Vec<uint32_t>)((Vec<float>)(normal + (1u << 23)) - least);
  const Vec<uint32_t> bits = exponent == (0x7c00u << 13) ? special : exponent == 0 ? denormal : normal;
  return (Vec<float>)(bits | ((x & 0x8000u) << 16));
}
#endif

// The first `count` numbers with zeros after them.
template <typename T, typename W>
inline Vec<T> load_wide_first(const W* source, int64_t count) {
  W padded[kLanes<T>] = {};
  std::memcpy(padded, source, count * sizeof(W));
  return load_wide(padded);
}

// A vector that stays in its register; the compiler would load it anew for each use.
template <typename T>
inline Vec<T> kept(Vec<T> x) {
#if defined(ANYMAMBA_WIDE)
  // Two registers: no operand of an instruction.
#elif defined(__x86_64__) || defined(__i386__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

constexpr int kDotRows = kTileRows, kDotCols = 2;  // sums and operands of a tile fill the registers

// Asks for memory ahead of its use, little by little: `step` bytes at a time.
struct Ahead {
  const char *at, *until;
  int64_t step;

  void advance() {
    for (until += step; at < until; at += 64) __builtin_prefetch(at, 0, 3);
  }
};

// emit(col, row, products, count) for kRows rows of W, of which the first is `row`, and kCols rows of x.
template <int kRows, int kCols, typename T, typename W, typename Emit>
inline void dot_tile(const W* w, int64_t k, int64_t row, const T* x, int64_t x_row, int64_t col, Ahead& ahead,
                     const Emit& emit) {
  x += col * x_row;
  Vec<T> sum[kRows][kCols] = {};
  int64_t j = 0;
  for (; j + kLanes<T> <= k; j += kLanes<T>) {
    ahead.advance();
    Vec<T> xs[kCols];
#pragma GCC unroll 4
    for (int c = 0; c < kCols; ++c) xs[c] = kept<T>(load(x + c * x_row + j));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> ws = kept<T>(load_wide(w + r * k + j));
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) sum[r][c] += ws * xs[c];
    }
  }
  if (j < k)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> ws = load_wide_first<T>(w + r * k + j, k - j);
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) sum[r][c] += ws * load_first(x + c * x_row + j, k - j);
    }
#pragma GCC unroll 4
  for (int c = 0; c < kCols; ++c) {
    T y[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) y[r] = sum_lanes<T>(sum[r][c]);
    emit(col + c, row, y, kRows);
  }
}

// The same for all `cols` rows of x, while the rows of W that follow are on their way.
template <int kRows, typename T, typename W, typename Emit>
inline void dot_rows(const W* w, int64_t k, int64_t row, const T* x, int64_t x_row, int64_t cols, Ahead ahead,
                     const Emit& emit) {
  int64_t col = 0;
  for (; col + kDotCols <= cols; col += kDotCols) dot_tile<kRows, kDotCols>(w, k, row, x, x_row, col, ahead, emit);
  for (; col < cols; ++col) dot_tile<kRows, 1>(w, k, row, x, x_row, col, ahead, emit);
}

// emit(col, row, products, count) for all products of the rows [start, stop) of W, k wide, with the `cols` rows of x.
// `buffer` has kDotRows * k numbers.
template <typename T, typename W, typename Emit>
inline void small_product(const W* w, int64_t k, int64_t start, int64_t stop, const T* x, int64_t x_row, int64_t cols,
                          T* buffer, const Emit& emit) {
  const int64_t passes = (cols + kDotCols - 1) / kDotCols, tile = kDotRows * k;
  // A single pass over wide numbers waits for memory only, and the processor's own foresight serves it better.
  const bool wide = sizeof(W) == sizeof(T);
  const int64_t step = wide && passes == 1 ? 0 : kDotRows * kLanes<T> * static_cast<int64_t>(sizeof(W)) / passes;
  int64_t row = start;
  for (; row + kDotRows <= stop; row += kDotRows) {
    const char* next = reinterpret_cast<const char*>(w + (row + kDotRows) * k);
    const Ahead ahead{next, next, step};
    if (wide || passes == 1) {
      dot_rows<kDotRows>(w + row * k, k, row, x, x_row, cols, ahead, emit);
      continue;
    }
    // Narrow numbers are widened once for all passes.
    int64_t i = 0;
    for (; i + kLanes<T> <= tile; i += kLanes<T>) store<T>(buffer + i, load_wide(w + row * k + i));
    if (i < tile) store_first<T>(buffer + i, load_wide_first<T>(w + row * k + i, tile - i), tile - i);
    dot_rows<kDotRows>(static_cast<const T*>(buffer), k, row, x, x_row, cols, ahead, emit);
  }
  for (; row < stop; ++row) dot_rows<1>(w + row * k, k, row, x, x_row, cols, Ahead{}, emit);
}

}  // namespace ANYMAMBA_ISA
