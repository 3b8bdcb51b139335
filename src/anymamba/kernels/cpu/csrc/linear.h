// Few rows times a matrix: y = x Wᵀ, every number of W read once, in its own dtype.
//
// A product is summed over vectors in one fixed order, so that a row's result does not depend on the rows beside it.
#pragma once

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "dtypes.h"
#include "integers.h"
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
#if defined(__aarch64__)
  // In one instruction; the compilers' own conversion of a vector goes lane by lane.
  uint16x4_t halves;
  std::memcpy(&halves, source, sizeof halves);
  return (Vec<uint32_t>)vmovl_u16(halves);
#else
  HalfVector::type halves;
  std::memcpy(&halves, source, sizeof halves);
  return __builtin_convertvector(halves, Vec<uint32_t>);
#endif
}

inline Vec<float> load_wide(const BFloat16* source) { return (Vec<float>)(load_halves(source) << 16); }

#if defined(__aarch64__)
inline Vec<float> load_wide(const Float16* source) {
  float16x4_t halves;
  std::memcpy(&halves, source, sizeof halves);
  return (Vec<float>)vcvt_f32_f16(halves);
}
#elif defined(__AVX512F__)
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

// As many bytes as a vector of float has lanes, as whole numbers. Left to themselves, compilers widen them in steps.
template <typename Byte>
inline Vec<int32_t> load_bytes(const Byte* source) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return (Vec<int32_t>)(Byte(-1) < 0 ? _mm512_maskz_cvtepi8_epi32(0xffff, bytes)
                                     : _mm512_maskz_cvtepu8_epi32(0xffff, bytes));
#elif defined(__AVX2__) && !defined(ANYMAMBA_WIDE)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return (Vec<int32_t>)(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Bytes __attribute__((vector_size(kVectorBytes / 4)));
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, Vec<int32_t>);
#endif
}

// The rows of a matrix, k wide, read as vectors of T. Columns lie in groups, whose scale is fetched once.
template <typename T, typename W>
struct Numbers {
  static constexpr int64_t kGroup = int64_t{1} << 62;  // all of a row: there are no scales
  struct Scale {};
  const W* data;
  int64_t k;

  int64_t row_bytes() const { return k * static_cast<int64_t>(sizeof(W)); }
  const char* address(int64_t row) const { return reinterpret_cast<const char*>(data + row * k); }
  Numbers from(int64_t row) const { return {data + row * k, k}; }
  Scale scale(int64_t, int64_t) const { return {}; }
  Vec<T> at(int64_t row, int64_t j, Scale) const { return load_wide(data + row * k + j); }
  Vec<T> first(int64_t row, int64_t j, Scale, int64_t count) const {
    return load_wide_first<T>(data + row * k + j, count);
  }
};

// Whole numbers of eight bits, times a scale for each group of columns. The products are exact: seven bits by eight.
struct Int8Rows {
  static constexpr int64_t kGroup = 64;
  using Block = Int8Block;
  using Scale = Vec<float>;
  const int8_t* codes;
  const uint16_t *scales, *scales_end;  // bfloat16
  int64_t k;

  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t row_bytes() const { return k; }
  const char* address(int64_t row) const { return reinterpret_cast<const char*>(codes + row * k); }
  Int8Rows until(int64_t rows) const { return {codes, scales, scales + rows * groups(), k}; }
  Int8Rows from(int64_t row) const { return {codes + row * k, scales + row * groups(), scales_end, k}; }
  Scale scale(int64_t row, int64_t j) const {
    return broadcast(from_bfloat16(scales[row * groups() + j / kGroup]));
  }
  Vec<float> at(int64_t row, int64_t j, Scale scale) const { return widened(codes + row * k + j) * scale; }
  Vec<float> first(int64_t row, int64_t j, Scale scale, int64_t count) const {
    int8_t padded[kLanes<float>] = {};
    std::memcpy(padded, codes + row * k + j, count);
    return widened(padded) * scale;
  }

 private:
  static Vec<float> widened(const int8_t* source) {
    return __builtin_convertvector(load_bytes(source), Vec<float>);
  }
};

// The same with four bits: a group is 16 bytes, with column c in the low half of byte c and column 16 + c in the high
// one, each plus 8. Rows are filled up to whole groups.
struct Int4Rows {
  static constexpr int64_t kGroup = 32;
  using Block = Int4Block;
  using Scale = Vec<float>;
  const uint8_t* codes;
  const uint16_t *scales, *scales_end;
  int64_t k;

  int64_t groups() const { return (k + kGroup - 1) / kGroup; }
  int64_t row_bytes() const { return groups() * (kGroup / 2); }
  const char* address(int64_t row) const { return reinterpret_cast<const char*>(codes + row * row_bytes()); }
  Int4Rows until(int64_t rows) const { return {codes, scales, scales + rows * groups(), k}; }
  Int4Rows from(int64_t row) const {
    return {codes + row * row_bytes(), scales + row * groups(), scales_end, k};
  }
  Scale scale(int64_t row, int64_t j) const {
    return broadcast(from_bfloat16(scales[row * groups() + j / kGroup]));
  }
  Vec<float> at(int64_t row, int64_t j, Scale scale) const {
    const uint8_t* bytes = codes + row * row_bytes() + j / kGroup * (kGroup / 2) + j % (kGroup / 2);
    const int high = static_cast<int>(j & 16) >> 2;
    return __builtin_convertvector(((load_bytes(bytes) >> high) & 15) - 8, Vec<float>) * scale;
  }
  // Beyond the row there are zeros.
  Vec<float> first(int64_t row, int64_t j, Scale scale, int64_t) const { return at(row, j, scale); }
};

constexpr int kDotRows = kTileRows, kDotCols = 2;  // sums and operands of a tile fill the registers

// emit(col, row, products, count) for the first kRows rows of w, which are those from `row` on, and kCols rows of x.
// A function of its own: inlined into its callers, its sums no longer fit the registers.
template <int kRows, int kCols, typename T, typename Rows, typename Emit>
[[gnu::noinline]] void dot_tile(const Rows& w, int64_t row, const T* x, int64_t x_row, int64_t col, Ahead& ahead,
                     const Emit& emit) {
  x += col * x_row;
  const int64_t k = w.k, whole = k - k % kLanes<T>;
  Vec<T> sum[kRows][kCols] = {};
  int64_t j = 0;
  while (j < whole) {
    typename Rows::Scale scale[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) scale[r] = w.scale(r, j);
    const int64_t stop = whole - j < Rows::kGroup ? whole : j + Rows::kGroup;
    for (; j < stop; j += kLanes<T>) {
      ahead.advance();
      Vec<T> xs[kCols];
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) xs[c] = kept<T>(load(x + c * x_row + j));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> ws = kept<T>(w.at(r, j, scale[r]));
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) sum[r][c] += ws * xs[c];
      }
    }
  }
  if (j < k)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> ws = w.first(r, j, w.scale(r, j), k - j);
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

// The same for all `cols` rows of x, while the rows of w that follow are on their way.
template <int kRows, typename T, typename Rows, typename Emit>
inline void dot_rows(const Rows& w, int64_t row, const T* x, int64_t x_row, int64_t cols, Ahead ahead,
                     const Emit& emit) {
  int64_t col = 0;
  for (; col + kDotCols <= cols; col += kDotCols) dot_tile<kRows, kDotCols>(w, row, x, x_row, col, ahead, emit);
  for (; col < cols; ++col) dot_tile<kRows, 1>(w, row, x, x_row, col, ahead, emit);
}

// The first `count` rows of w as plain numbers, one after another.
template <typename T, typename Rows>
inline void widen_rows(T* target, const Rows& w, int64_t count) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t j = 0; j < w.k;) {
      const typename Rows::Scale scale = w.scale(row, j);
      const int64_t stop = w.k - j < Rows::kGroup ? w.k : j + Rows::kGroup;
      for (; j + kLanes<T> <= stop; j += kLanes<T>) store<T>(target + row * w.k + j, w.at(row, j, scale));
      if (j < stop) store_first<T>(target + row * w.k + j, w.first(row, j, scale, stop - j), stop - j), j = stop;
    }
}

// How many rows of a matrix make a task.
constexpr int64_t kTaskBytes = 96 << 10;
template <typename Rows>
inline int64_t task_rows(const Rows& w) {
  const int64_t wanted = kTaskBytes / w.row_bytes();
  return wanted < kDotRows ? kDotRows : wanted / kDotRows * kDotRows;
}

// Rows of x as the product with a matrix wants them, in memory of the caller's thread.
template <typename T, typename W>
struct Operand {
  const T* x;
  int64_t x_row, cols;
  T* buffer;  // kDotRows rows of the matrix, widened

  Operand(Arena& arena, const Numbers<T, W>& w, const T* x, int64_t x_row, int64_t cols)
      : x(x), x_row(x_row), cols(cols), buffer(arena.take<T>(kDotRows * w.k)) {}
};
template <typename Rows>
struct CodeOperand {
  int64_t cols;
  Activations<typename Rows::Block> x;

  CodeOperand(Arena& arena, const Rows& w, const float* source, int64_t x_row, int64_t cols)
      : cols(cols), x(arena, cols, w.k) {
    if (x.words)
      for (int64_t col = 0; col < cols; ++col) x.fill(col, source + col * x_row, w.k);
  }
};
template <typename T, typename W>
inline Operand<T, W> operand(Arena& arena, const Numbers<T, W>& w, const T* x, int64_t x_row, int64_t cols) {
  return {arena, w, x, x_row, cols};
}
template <typename T, typename Rows, typename = typename Rows::Block>
inline CodeOperand<Rows> operand(Arena& arena, const Rows& w, const T* x, int64_t x_row, int64_t cols) {
  return {arena, w, x, x_row, cols};
}

// emit(col, row, products, count) for all products of the rows [start, stop) of w with the rows of x.
template <typename T, typename W, typename Emit>
inline void small_product(const Numbers<T, W>& w, int64_t start, int64_t stop, const Operand<T, W>& x,
                          const Emit& emit) {
  const int64_t passes = (x.cols + kDotCols - 1) / kDotCols, vectors = w.k / kLanes<T> + 1;
  // A single pass over wide numbers waits for memory only, and the processor's own foresight serves it better.
  const bool is_narrow = sizeof(W) < sizeof(T);
  const int64_t step =
      !is_narrow && passes == 1 ? 0 : (kDotRows * w.row_bytes() + vectors * passes - 1) / (vectors * passes);
  int64_t row = start;
  for (; row + kDotRows <= stop; row += kDotRows) {
    const char* next = w.address(row + kDotRows);
    const Ahead ahead{next, next, step};
    if (!is_narrow || passes == 1) {
      dot_rows<kDotRows>(w.from(row), row, x.x, x.x_row, x.cols, ahead, emit);
      continue;
    }
    // Narrow numbers are widened once for all passes.
    widen_rows<T>(x.buffer, w.from(row), kDotRows);
    dot_rows<kDotRows>(Numbers<T, T>{x.buffer, w.k}, row, x.x, x.x_row, x.cols, ahead, emit);
  }
  for (; row < stop; ++row) dot_rows<1>(w.from(row), row, x.x, x.x_row, x.cols, Ahead{}, emit);
}

constexpr int kCodeRows = 4, kCodeCols = kTileRows > 4 ? 4 : 2;
constexpr int64_t kAheadBytes = 12 << 10;  // nearer, memory comes too late; a tile itself is too little

template <int kRows, typename Rows, typename Emit>
inline void code_rows(const Rows& w, int64_t row, const CodeOperand<Rows>& x, Ahead ahead, const Emit& emit) {
  int64_t col = 0;
  for (; col + kCodeCols <= x.cols; col += kCodeCols) code_tile<kRows, kCodeCols>(w, row, x.x, col, ahead, emit);
  for (; col < x.cols; ++col) code_tile<kRows, 1>(w, row, x.x, col, ahead, emit);
}

template <typename Rows, typename Emit>
inline void small_product(const Rows& w, int64_t start, int64_t stop, const CodeOperand<Rows>& x, const Emit& emit) {
  const int64_t passes = x.cols / kCodeCols + x.cols % kCodeCols, blocks = w.row_bytes() / Rows::Block::kBytes + 1;
  const int64_t step = (kCodeRows * w.row_bytes() + blocks * passes - 1) / (blocks * passes);
  const int64_t tile = kCodeRows * w.row_bytes(), distance = (kAheadBytes + tile - 1) / tile * tile;
  int64_t row = start;
  for (; row + kCodeRows <= stop; row += kCodeRows) {
    const char* next = w.address(row) + distance;
    code_rows<kCodeRows>(w.from(row), row, x, Ahead{next, next, step}, emit);
  }
  for (; row < stop; ++row) code_rows<1>(w.from(row), row, x, Ahead{}, emit);
}

// body(rows) with the reader of a weight (rows, k) of a dtype. Narrow weights are read as float only.
template <typename T, typename Body>
inline void with_rows(const void* data, const void* scales, int64_t dtype, int64_t rows, int64_t k, const Body& body) {
  if constexpr (sizeof(T) == 4) {
    const uint16_t* bits = static_cast<const uint16_t*>(scales);
    if (dtype == kBFloat16) return body(Numbers<T, BFloat16>{static_cast<const BFloat16*>(data), k});
    if (dtype == kFloat16) return body(Numbers<T, Float16>{static_cast<const Float16*>(data), k});
    if (dtype == kInt8) {
      const Int8Rows reader{static_cast<const int8_t*>(data), bits, nullptr, k};
      return body(reader.until(rows));
    }
    if (dtype == kInt4) {
      const Int4Rows reader{static_cast<const uint8_t*>(data), bits, nullptr, k};
      return body(reader.until(rows));
    }
  }
  body(Numbers<T, T>{static_cast<const T*>(data), k});
}

}  // namespace ANYMAMBA_ISA
