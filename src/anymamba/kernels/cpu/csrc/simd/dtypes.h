// The dtypes of activations, and rows of them read into and written from the arithmetic type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ANYMAMBA_ISA {

// The last two are of weights only: integers with a scale for each group of columns (weight_formats.h).
enum DType : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kInt8 = 4, kInt4 = 5 };

inline size_t size_of(int64_t dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

#if defined(__aarch64__)
// The processor's own conversions, which know denormals of float16 whether those of float are flushed or not.
inline float from_float16(uint16_t x) {
  __fp16 half;
  std::memcpy(&half, &x, 2);
  return static_cast<float>(half);
}

inline uint16_t to_float16(float x) {
  const __fp16 half = static_cast<__fp16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else
// No step of the two below passes through a denormal float: they must work while denormals are flushed.
inline float from_float16(uint16_t x) {
  const uint32_t exponent_mask = 0x7c00u << 13;
  const uint32_t shifted = (x & 0x7fffu) << 13;
  const uint32_t exponent = shifted & exponent_mask;
  const uint32_t normal = shifted + ((127u - 15u) << 23);
  const uint32_t special = normal + ((128u - 16u) << 23);
  const uint32_t denormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
  const uint32_t bits = exponent == exponent_mask ? special : exponent == 0 ? denormal : normal;
  return float_of(bits | (static_cast<uint32_t>(x & 0x8000u) << 16));
}

inline uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const uint32_t denormal_magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
  uint32_t half;
  if (magnitude >= (127u + 16u) << 23) {
    half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 113u << 23) {
    half = bits_of(float_of(magnitude) + float_of(denormal_magic)) - denormal_magic;
  } else {
    const uint32_t odd = (magnitude >> 13) & 1u;
    half = (magnitude + ((15u - 127u) << 23) + 0xfffu + odd) >> 13;
  }
  return static_cast<uint16_t>(half | (sign >> 16));
}
#endif

// Read `width` numbers of `dtype` and fill up to `padded` with zeros.
template <typename T>
inline void read_row(T* target, const char* source, int64_t dtype, int width, int padded) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(source);
  switch (dtype) {
    case kFloat32:
    case kFloat64:  // T itself: float for all but double
      if (width > 0) std::memcpy(target, source, width * sizeof(T));
      break;
    case kBFloat16:
      for (int i = 0; i < width; ++i) target[i] = static_cast<T>(from_bfloat16(halves[i]));
      break;
    case kFloat16:
      for (int i = 0; i < width; ++i) target[i] = static_cast<T>(from_float16(halves[i]));
      break;
  }
  for (int i = width; i < padded; ++i) target[i] = 0;
}

template <typename T>
inline void write_row(char* target, const T* source, int64_t dtype, int width) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(target);
  switch (dtype) {
    case kFloat32:
    case kFloat64:
      if (width > 0) std::memcpy(target, source, width * sizeof(T));
      break;
    case kBFloat16:
      for (int i = 0; i < width; ++i) halves[i] = to_bfloat16(static_cast<float>(source[i]));
      break;
    case kFloat16:
      for (int i = 0; i < width; ++i) halves[i] = to_float16(static_cast<float>(source[i]));
      break;
  }
}

}  // namespace ANYMAMBA_ISA
