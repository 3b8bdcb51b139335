// Vectors as wide as the instruction set allows, by the compiler's vector extensions.
//
// This header is compiled once per instruction set, each time in a separate namespace (ANYMAMBA_ISA), so that no
// function of one set can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ANYMAMBA_ISA {

// A tile of a product has kTileRows rows of kTileVectors vectors in registers; `python -m benchmarks.tune` measures
// which shape is the fastest on a machine.
#if defined(__AVX512F__) || defined(ANYMAMBA_WIDE)
constexpr int kVectorBytes = 64;
constexpr int kOwnTile[2] = {8, 2};
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kOwnTile[2] = {6, 2};
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kOwnTile[2] = {8, 2};
#else
constexpr int kVectorBytes = 16;
constexpr int kOwnTile[2] = {4, 2};
#endif
#if defined(ANYMAMBA_TILE_ROWS)
constexpr int kTileRows = ANYMAMBA_TILE_ROWS, kTileVectors = ANYMAMBA_TILE_VECTORS;
#else
constexpr int kTileRows = kOwnTile[0], kTileVectors = kOwnTile[1];
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
inline Vec<T> load(const T* source) {
  Vec<T> x;
  std::memcpy(&x, source, sizeof x);
  return x;
}

template <typename T>
inline void store(T* target, Vec<T> x) {
  std::memcpy(target, &x, sizeof x);
}

template <typename T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // the compilers' own way to spread a scalar; x - 0 is x for every x
}

template <typename T>
inline T sum_lanes(Vec<T> x) {
  // Halves are added to halves: as vectors down to 16 bytes, then one by one.
  typedef T Sixteen __attribute__((vector_size(16)));
  Sixteen parts[kVectorBytes / 16];
  std::memcpy(parts, &x, sizeof x);
  for (int width = kVectorBytes / 32; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  const Sixteen lanes = parts[0];
  if constexpr (sizeof(T) == 8)
    return lanes[0] + lanes[1];
  else
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Rows of memory to prefetch during a computation: they are far apart, which hardware prefetchers do not handle, and
// requests for all of them at once would only queue.
struct RowPrefetch {
  const char* base = nullptr;
  ptrdiff_t outer_bytes = 0, inner_bytes = 0;
  int outer = 0, inner = 1, row_bytes = 0;
  int at_outer = 0, at_inner = 0, at_once = 1;

  // Each of `calls` calls of `advance` prefetches an equal number of rows.
  void spread_over(int calls) { at_once = calls ? ((outer - at_outer) * inner + calls - 1) / calls : 1; }

  // Prefetches the next rows, if any are left.
  void advance() {
    for (int i = 0; i < at_once && at_outer < outer; ++i) {
      const char* row = base + at_outer * outer_bytes + at_inner * inner_bytes;
      for (int byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 3);
      if (++at_inner == inner) at_inner = 0, ++at_outer;
    }
  }
};

template <typename T>
constexpr int round_up(int x) {
  return (x + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <typename T>
struct ExpRange;
template <>
struct ExpRange<float> {
  static constexpr float lowest = -87.33654f;  // below, the result would be denormal
};
template <>
struct ExpRange<double> {
  static constexpr double lowest = -708.3964185322641;
};

// x, and zero where a < b. Computed on the bits, except for masks in mask registers: compilers turn a selection of zero
// into one of two loaded vectors.
template <typename T, typename Bits>
inline Vec<T> zero_where_less(Vec<T> x, Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  return a < b ? Vec<T>{} : x;
#else
  return (Vec<T>)((Vec<Bits>)x & ~(Vec<Bits>)(a < b));
#endif
}

// exp(x) for x <= 0, within 2 ulp; exactly 0 below `lowest`; NaN stays NaN.
inline Vec<float> exp_nonpositive(Vec<float> x, float lowest = ExpRange<float>::lowest) {
  const Vec<float> floor = broadcast(lowest);
  const Vec<float> in_range = x < floor ? floor : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits
  const Vec<float> shifted = in_range * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = (in_range - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec<float> y = p * (r * r) + r + 1.0f;
  const Vec<int32_t> power = ((Vec<int32_t>)shifted << 23) + (127 << 23);
  return zero_where_less<float, int32_t>(y * (Vec<float>)power, x, floor);
}

inline Vec<double> exp_nonpositive(Vec<double> x, double lowest = ExpRange<double>::lowest) {
  const Vec<double> floor = broadcast(lowest);
  const Vec<double> in_range = x < floor ? floor : x;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> shifted = in_range * 1.4426950408889634073599 + magic;
  const Vec<double> n = shifted - magic;
  const Vec<double> r = (in_range - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  const Vec<double> rr = r * r;
  const Vec<double> p =
      r * ((rr * 1.26177193074810590878e-4 + 3.02994407707441961300e-2) * rr + 9.99999999999999999910e-1);
  const Vec<double> q =
      ((rr * 3.00198505138664455042e-6 + 2.52448340349684104192e-3) * rr + 2.27265548208155028766e-1) * rr + 2.0;
  const Vec<double> y = 1.0 + 2.0 * (p / (q - p));
  const Vec<int64_t> power = ((Vec<int64_t>)shifted << 52) + (int64_t{1023} << 52);
  return zero_where_less<double, int64_t>(y * (Vec<double>)power, x, floor);
}

template <typename T>
inline T exp_nonpositive_scalar(T x, T lowest = ExpRange<T>::lowest) {
  return exp_nonpositive(broadcast(x), lowest)[0];
}

template <typename T>
inline Vec<T> sigmoid(Vec<T> x) {
  const Vec<T> e = exp_nonpositive(x < Vec<T>{} ? x : -x);
  const Vec<T> inverse = T(1) / (T(1) + e);
  return x < Vec<T>{} ? e * inverse : inverse;
}

// The steps of a 4 x 4 transposition, by the builtins of either compiler.
#if defined(__clang__)
#define ANYMAMBA_SHUFFLE(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#else
typedef int32_t ShuffleIndex __attribute__((vector_size(16)));
#define ANYMAMBA_SHUFFLE(x, y, a, b, c, d) __builtin_shuffle(x, y, ShuffleIndex{a, b, c, d})
#endif
template <typename Four>
inline Four interleave_low(Four x, Four y) {
  return ANYMAMBA_SHUFFLE(x, y, 0, 4, 1, 5);
}
template <typename Four>
inline Four interleave_high(Four x, Four y) {
  return ANYMAMBA_SHUFFLE(x, y, 2, 6, 3, 7);
}
template <typename Four>
inline Four first_halves(Four x, Four y) {
  return ANYMAMBA_SHUFFLE(x, y, 0, 1, 4, 5);
}
template <typename Four>
inline Four second_halves(Four x, Four y) {
  return ANYMAMBA_SHUFFLE(x, y, 2, 3, 6, 7);
}
#undef ANYMAMBA_SHUFFLE

// target (cols x rows) = source (rows x cols), transposed.
template <typename T>
inline void transpose(T* target, ptrdiff_t target_row, const T* source, ptrdiff_t source_row, int rows, int cols) {
  int row = 0;
  if constexpr (sizeof(T) == 4) {
    typedef T Four __attribute__((vector_size(16)));
    for (; row + 4 <= rows; row += 4) {
      int col = 0;
      for (; col + 4 <= cols; col += 4) {
        const T* from = source + row * source_row + col;
        Four a, b, c, d;
        std::memcpy(&a, from, 16);
        std::memcpy(&b, from + source_row, 16);
        std::memcpy(&c, from + 2 * source_row, 16);
        std::memcpy(&d, from + 3 * source_row, 16);
        const Four ab_low = interleave_low(a, b), ab_high = interleave_high(a, b);
        const Four cd_low = interleave_low(c, d), cd_high = interleave_high(c, d);
        const Four out[4] = {first_halves(ab_low, cd_low), second_halves(ab_low, cd_low),
                             first_halves(ab_high, cd_high), second_halves(ab_high, cd_high)};
        for (int i = 0; i < 4; ++i) std::memcpy(target + (col + i) * target_row + row, &out[i], 16);
      }
      for (; col < cols; ++col)
        for (int i = 0; i < 4; ++i) target[col * target_row + row + i] = source[(row + i) * source_row + col];
    }
  }
  for (; row < rows; ++row)
    for (int col = 0; col < cols; ++col) target[col * target_row + row] = source[row * source_row + col];
}

}  // namespace ANYMAMBA_ISA
