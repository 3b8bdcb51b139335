// Products of the small matrices of a chunk: one register-blocked kernel.
//
//   C = row_scale * (A B) + c_in_scale * C_in
//
// B and C have rows padded with zeros to whole vectors, so columns have no tails. A is read one number at a time and may
// lie in memory either way round.
#pragma once

#include "simd.h"

namespace ANYMAMBA_ISA {

// Which part of a causal product is not zero. "Row" and "column" are fused (time, rank) indices; ranks of one time step
// see each other.
enum class Span {
  kAll,
  kDepthUpToRow,     // A[i, k] = 0 where time(k) > time(i)
  kDepthFromRow,     // A[i, k] = 0 where time(k) < time(i)
  kColumnsFromRow,   // only C[i, j] with time(j) >= time(i) are wanted; others may be left untouched
  kDepthUpToColumn,  // B[k, j] = 0 where time(k) > time(j)
  kDepthFromColumn,  // B[k, j] = 0 where time(k) < time(j)
};

template <typename T>
struct Gemm {
  const T* a;
  ptrdiff_t a_row, a_step;
  const T* b;
  ptrdiff_t b_step;
  T* c;
  ptrdiff_t c_row;
  int rows, cols, depth;
  const T* c_in = nullptr;
  T c_in_scale = 1;
  const T* row_scale = nullptr;
  Span span = Span::kAll;
  int rank = 1;
  RowPrefetch* ahead = nullptr;  // advanced once a tile
};

template <typename T, int kRows, int kVectors>
inline void gemm_tile(const Gemm<T>& m, int row, int col) {
  int from = 0, to = m.depth;
  if (m.span == Span::kDepthUpToRow) {
    const int limit = ((row + kRows - 1) / m.rank + 1) * m.rank;
    to = limit < m.depth ? limit : m.depth;
  } else if (m.span == Span::kDepthFromRow) {
    from = row / m.rank * m.rank;
  } else if (m.span == Span::kDepthUpToColumn) {
    const int limit = ((col + kVectors * kLanes<T> - 1) / m.rank + 1) * m.rank;
    to = limit < m.depth ? limit : m.depth;
  } else if (m.span == Span::kDepthFromColumn) {
    from = col / m.rank * m.rank;
  } else if (m.span == Span::kColumnsFromRow && col + kVectors * kLanes<T> <= row / m.rank * m.rank) {
    return;
  }
  if (m.ahead) m.ahead->advance();
  Vec<T> acc[kRows][kVectors] = {};
  const T* a = m.a + row * m.a_row + from * m.a_step;
  const T* b = m.b + from * m.b_step + col;
  const ptrdiff_t a_row = m.a_row, a_step = m.a_step, b_step = m.b_step;
#pragma GCC unroll 2
  for (int k = from; k < to; ++k, a += a_step, b += b_step) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const T left = a[i * a_row];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] += left * right[j];
    }
  }
  if (const T* scale = m.row_scale) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] *= scale[row + i];
  }
  const ptrdiff_t c_row = m.c_row, at = row * c_row + col;
  if (m.c_in) {
    const T* c_in = m.c_in + at;
    const T scale = m.c_in_scale;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] += scale * load(c_in + i * c_row + j * kLanes<T>);
  }
  T* c = m.c + at;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c + i * c_row + j * kLanes<T>, acc[i][j]);
}

template <typename T, int kVectors>
inline void gemm_columns(const Gemm<T>& m, int col) {
  int row = 0;
  for (; row + kTileRows <= m.rows; row += kTileRows) gemm_tile<T, kTileRows, kVectors>(m, row, col);
  if constexpr (kTileRows > 4)
    for (; row + 4 <= m.rows; row += 4) gemm_tile<T, 4, kVectors>(m, row, col);
  for (; row + 2 <= m.rows; row += 2) gemm_tile<T, 2, kVectors>(m, row, col);
  for (; row < m.rows; ++row) gemm_tile<T, 1, kVectors>(m, row, col);
}

template <typename T>
__attribute__((noinline)) void gemm(const Gemm<T>& m) {
  int col = 0;
  for (; col + 2 * kLanes<T> <= m.cols; col += 2 * kLanes<T>) gemm_columns<T, 2>(m, col);
  if (col < m.cols) gemm_columns<T, 1>(m, col);
}

}  // namespace ANYMAMBA_ISA
