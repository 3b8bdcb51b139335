// Few rows times a matrix of integers: y = x Wᵀ, summed in integers within each group of columns.
//
//   y = Σ_groups scale_w scale_x Σ_columns code_w code_x
//
// Activations are rounded to integers of 16 bits, with one scale per group: to within 2⁻¹⁶ of the largest of their
// group. Sums over columns are then exact in any order. Sums over groups are taken lane by lane in one fixed order, so
// that a row's result does not depend on the other rows.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "simd/dtypes.h"
#include "simd/vector_rows.h"
#include "simd/simd.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

// a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1].
inline Vec<int32_t> dot_pairs(Vec<int16_t> a, Vec<int16_t> b) {
#if defined(__AVX512BW__)
  return (Vec<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(ANYMAMBA_WIDE)
  const Vec<int32_t> x = (Vec<int32_t>)a, y = (Vec<int32_t>)b;
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#elif defined(__AVX2__)
  return (Vec<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Vec<int32_t>)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (Vec<int32_t>)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  const Vec<int32_t> x = (Vec<int32_t>)a, y = (Vec<int32_t>)b;
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// As many bytes as a vector of words has lanes, as words.
template <typename Byte>
inline Vec<int16_t> load_words(const Byte* source) {
#if defined(__AVX512BW__)
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return (Vec<int16_t>)(Byte(-1) < 0 ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#elif defined(__AVX2__) && !defined(ANYMAMBA_WIDE)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return (Vec<int16_t>)(Byte(-1) < 0 ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#else
  typedef Byte Bytes __attribute__((vector_size(kVectorBytes / 2)));
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, Vec<int16_t>);
#endif
}

// `scales[0]` in the first half of the lanes, `scales[1]` in the second.
inline Vec<float> broadcast_halves(const float* scales) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scales[0]), _mm512_set1_ps(scales[1]));
#else
  float lanes[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) lanes[i] = scales[i >= kLanes<float> / 2];
  return load(lanes);
#endif
}

constexpr int kWords = kLanes<int16_t>;

// The codes of eight bits of a block, which is one group of 64 columns.
struct Int8Block {
  static constexpr int kGroup = 64, kGroups = 1, kBytes = 64, kVectors = 64 / kWords;
  Vec<int16_t> words[kVectors];

  explicit Int8Block(const void* bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) words[i] = load_words(static_cast<const int8_t*>(bytes) + i * kWords);
  }
  // The index of a column of a block among the words.
  static int place(int column) { return column; }
};

// The codes of four bits of a block: one group of 32 columns, or two side by side where a vector holds both.
struct Int4Block {
  static constexpr int kGroup = 32, kGroups = kWords > 16 ? kWords / 16 : 1, kBytes = 16 * kGroups;
  static constexpr int kVectors = 2 * kBytes / kWords;
  Vec<int16_t> words[kVectors];

  explicit Int4Block(const void* bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors / 2; ++i) {
      const Vec<int16_t> pairs = load_words(static_cast<const uint8_t*>(bytes) + i * kWords);
      words[i] = (pairs & 15) - 8;
      words[kVectors / 2 + i] = (pairs >> 4) - 8;
    }
  }
  static int place(int column) {
    const int group = column / kGroup, half = column % kGroup / 16;
    return (half * kGroups + group) * 16 + column % 16;
  }
};

// Rows of activations as integers, in the order of the blocks of a format and padded with zeros.
template <typename Block>
struct Activations {
  static constexpr int64_t kColumns = Block::kGroup * Block::kGroups;
  int64_t width, groups;  // of a row: words in complete blocks, and scales in complete vectors
  int16_t* words;
  float* scales;

  Activations(Arena& arena, int64_t rows, int64_t k)
      : width((k + kColumns - 1) / kColumns * kColumns),
        groups(round_up<float>(static_cast<int>(width / Block::kGroup))),
        words(arena.take<int16_t>(rows * width)),
        scales(arena.take<float>(rows * groups)) {}

  void fill(int64_t row, const float* x, int64_t k) {
    std::memset(words + row * width, 0, width * sizeof(int16_t));
    std::memset(scales + row * groups, 0, groups * sizeof(float));
    for (int64_t start = 0; start < k; start += Block::kGroup) {
      const int64_t left = k - start, count = left < Block::kGroup ? left : Block::kGroup;
      const int64_t in_block = start % kColumns;
      scales[row * groups + start / Block::kGroup] =
          fill_group(words + row * width + start - in_block, static_cast<int>(in_block), x + start, count);
    }
  }

 private:
  // Writes the words of a group and returns its scale, which is not finite if an input is not.
  static float fill_group(int16_t* block, int in_block, const float* x, int64_t count) {
    Vec<float> top = {}, rest = {};
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      const Vec<float> u = load_first(x + i, count - i), size = u < 0 ? -u : u;
      top = top < size ? size : top;
      rest += u * 0.0f;
    }
    float largest = 0;
    for (int i = 0; i < kLanes<float>; ++i) largest = largest < top[i] ? top[i] : largest;
    const float flaw = sum_lanes<float>(rest);
    if (flaw != flaw) return flaw;
    if (largest < 0x1p-100f) return 0;  // so small that its inverse would not be a number
    const float magic = 12582912.0f;    // 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits
    const Vec<float> inverse = broadcast(32767.0f / largest);
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      const Vec<int32_t> codes = (Vec<int32_t>)(load_first(x + i, count - i) * inverse + magic);
      int16_t some[kLanes<float>];
      for (int lane = 0; lane < kLanes<float>; ++lane) some[lane] = static_cast<int16_t>(codes[lane]);
      const int64_t here = count - i < kLanes<float> ? count - i : kLanes<float>;
      std::memcpy(block + Block::place(in_block + static_cast<int>(i)), some, here * sizeof(int16_t));
    }
    return largest / 32767.0f;
  }
};

// The scales of a vector's width of groups; `end` is where the memory of all scales ends.
inline Vec<float> load_scales(const uint16_t* source, const uint16_t* end) {
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  Halves halves = {};
  if (end - source >= kLanes<float>)
    std::memcpy(&halves, source, sizeof halves);
  else
    for (int i = 0; i < end - source; ++i) halves[i] = source[i];
  return (Vec<float>)(__builtin_convertvector(halves, Vec<uint32_t>) << 16);
}

// The products of a block with the words of its columns, summed within each group.
// Always inlined: only then is it contracted with the sum that it is added to in the same way everywhere.
template <typename Block>
[[gnu::always_inline]] inline Vec<float> block_products(const Block& block, const int16_t* words, const float* scales) {
  Vec<int32_t> dot = dot_pairs(block.words[0], load(words));
#pragma GCC unroll 8
  for (int i = 1; i < Block::kVectors; ++i) dot += dot_pairs(block.words[i], load(words + i * kWords));
  return __builtin_convertvector(dot, Vec<float>) *
         (Block::kGroups == 1 ? broadcast(scales[0]) : broadcast_halves(scales));
}

// The rest of row r of w after its complete blocks, from a group on, times row `col` of x. Not inlined: few matrices
// have such a rest, and it would take registers from the others.
template <typename Rows>
[[gnu::noinline]] Vec<float> last_products(const Rows& w, int r, const Activations<typename Rows::Block>& x,
                                           int64_t col, int64_t group) {
  using Block = typename Rows::Block;
  const int64_t groups = w.groups(), at = group / Block::kGroups * Block::kBytes;
  char padded[Block::kBytes] = {};
  std::memcpy(padded, w.address(r) + at, w.row_bytes() - at);
  float scales[Block::kGroups] = {};
  for (int64_t i = 0; group + i < groups; ++i)
    scales[i] = from_bfloat16(w.scales[r * groups + group + i]) * x.scales[col * x.groups + group + i];
  return block_products(Block(padded), x.words + col * x.width + group * Block::kGroup, scales);
}

// emit(col, row, products, count) for the first kRows rows of w, which are those from `row` on, and kCols rows of x.
template <int kRows, int kCols, typename Rows, typename Emit>
inline void code_tile(const Rows& w, int64_t row, const Activations<typename Rows::Block>& x, int64_t col,
                      Ahead& ahead, const Emit& emit) {
  using Block = typename Rows::Block;
  const int64_t groups = w.groups(), whole = w.k / Block::kGroup / Block::kGroups * Block::kGroups;
  const int64_t row_bytes = w.row_bytes();
  const char* codes = w.address(0);
  const int16_t* words = x.words + col * x.width;
  Vec<float> sum[kRows][kCols] = {};
  alignas(64) float scales[kRows][kCols][kLanes<float>];
  for (int64_t start = 0; start < whole; start += kLanes<float>) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<float> own = load_scales(w.scales + r * groups + start, w.scales_end);
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) store<float>(scales[r][c], own * load(x.scales + (col + c) * x.groups + start));
    }
    const int64_t count = whole - start < kLanes<float> ? whole - start : kLanes<float>;
    for (int64_t i = 0; i < count; i += Block::kGroups, codes += Block::kBytes) {
      ahead.advance();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Block block(codes + r * row_bytes);
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) sum[r][c] += block_products(block, words + c * x.width, scales[r][c] + i);
      }
      words += Block::kGroup * Block::kGroups;
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kCols; ++c) {
    float y[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if (whole < groups) sum[r][c] += last_products(w, r, x, col + c, whole);
      y[r] = sum_lanes<float>(sum[r][c]);
    }
    emit(col + c, row, y, kRows);
  }
}

}  // namespace ANYMAMBA_ISA
