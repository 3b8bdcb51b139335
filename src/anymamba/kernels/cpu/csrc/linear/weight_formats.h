// The formats of a matrix: its rows, read as vectors of plain numbers.
#pragma once

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "simd/dtypes.h"
#include "linear/gemv_int.h"
#include "simd/vector_rows.h"
#include "simd/simd.h"

namespace ANYMAMBA_ISA {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Vec<float> load_as(const float* source) { return load(source); }
inline Vec<double> load_as(const double* source) { return load(source); }

// As many numbers of 16 bits as a vector of float has lanes.
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

inline Vec<float> load_as(const BFloat16* source) { return (Vec<float>)(load_halves(source) << 16); }

#if defined(__aarch64__)
inline Vec<float> load_as(const Float16* source) {
  float16x4_t halves;
  std::memcpy(&halves, source, sizeof halves);
  return (Vec<float>)vcvt_f32_f16(halves);
}
#elif defined(__AVX512F__)
inline Vec<float> load_as(const Float16* source) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
#elif defined(__F16C__) && defined(__AVX2__) && !defined(ANYMAMBA_WIDE)
inline Vec<float> load_as(const Float16* source) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
#else
// `from_float16` of dtypes.h, lane by lane.
inline Vec<float> load_as(const Float16* source) {
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
inline Vec<T> load_as_first(const W* source, int64_t count) {
  W padded[kLanes<T>] = {};
  std::memcpy(padded, source, count * sizeof(W));
  return load_as(padded);
}

// As many bytes as a vector of float has lanes, as integers. Compilers would convert them in several steps.
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

// The rows of a matrix with k columns, read as vectors of T. Columns form groups, whose scale is read once.
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
  Vec<T> at(int64_t row, int64_t j, Scale) const { return load_as(data + row * k + j); }
  Vec<T> first(int64_t row, int64_t j, Scale, int64_t count) const {
    return load_as_first<T>(data + row * k + j, count);
  }
};

// Integers of eight bits, times one scale per group of columns. The products are exact: seven bits by eight.
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
  Vec<float> at(int64_t row, int64_t j, Scale scale) const { return to_float(codes + row * k + j) * scale; }
  Vec<float> first(int64_t row, int64_t j, Scale scale, int64_t count) const {
    int8_t padded[kLanes<float>] = {};
    std::memcpy(padded, codes + row * k + j, count);
    return to_float(padded) * scale;
  }

 private:
  static Vec<float> to_float(const int8_t* source) {
    return __builtin_convertvector(load_bytes(source), Vec<float>);
  }
};

// The same with four bits: a group is 16 bytes, with column c in the low half of byte c and column 16 + c in the high
// one, each plus 8. Rows are padded to complete groups.
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
  // Zeros after the end of the row.
  Vec<float> first(int64_t row, int64_t j, Scale scale, int64_t) const { return at(row, j, scale); }
};

// Dequantizes the first `count` rows of w.
template <typename T, typename Rows>
inline void convert_rows(T* target, const Rows& w, int64_t count) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t j = 0; j < w.k;) {
      const typename Rows::Scale scale = w.scale(row, j);
      const int64_t stop = w.k - j < Rows::kGroup ? w.k : j + Rows::kGroup;
      for (; j + kLanes<T> <= stop; j += kLanes<T>) store<T>(target + row * w.k + j, w.at(row, j, scale));
      if (j < stop) store_first<T>(target + row * w.k + j, w.first(row, j, scale, stop - j), stop - j), j = stop;
    }
}

// body(rows) with the reader of a weight (rows, k) of a dtype or format. Half precision and quantized weights are read
// as float only.
template <typename T, typename Body>
inline void with_rows(const void* data, const void* scales, int64_t dtype, int64_t rows, int64_t k, const Body& body) {
  if constexpr (sizeof(T) == 4) {
    const uint16_t* bits = static_cast<const uint16_t*>(scales);
    if (dtype == kBFloat16) return body(Numbers<T, BFloat16>{static_cast<const BFloat16*>(data), k});
    if (dtype == kFloat16) return body(Numbers<T, Float16>{static_cast<const Float16*>(data), k});
    if (dtype == kInt8)
      return body(Int8Rows{static_cast<const int8_t*>(data), bits, nullptr, k}.until(rows));
    if (dtype == kInt4)
      return body(Int4Rows{static_cast<const uint8_t*>(data), bits, nullptr, k}.until(rows));
  }
  body(Numbers<T, T>{static_cast<const T*>(data), k});
}

}  // namespace ANYMAMBA_ISA
