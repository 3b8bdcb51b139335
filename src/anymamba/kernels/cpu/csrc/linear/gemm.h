// Matrix products of a chunk: one register-blocked kernel, and all operations that are fused into it, on a tile of the
// result in registers.
//
//   C = scales * (A B) + A2 B2 + addend_scale * addend + c_in_scale * C_in
//
// B and C have rows padded with zeros to whole vectors, so columns have no tails. A is read one number at a time and
// may be stored by rows or by columns.
#pragma once

#include "simd/simd.h"

namespace ANYMAMBA_ISA {

// Which part of a causal product is not zero. "Row" and "column" are fused (time, rank) indices; ranks of one time step
// see each other.
enum class Span {
  kAll,
  kDepthUpToRow,     // A[i, k] = 0 where time(k) > time(i)
  kDepthFromRow,     // A[i, k] = 0 where time(k) < time(i)
  kColumnsFromRow,   // only C[i, j] with time(j) >= time(i) are needed; others may be left untouched
  kDepthUpToColumn,  // B[k, j] = 0 where time(k) > time(j)
  kDepthFromColumn,  // B[k, j] = 0 where time(k) < time(j)
};

// A second product, without scales.
template <typename T>
struct Product {
  const T* a = nullptr;
  ptrdiff_t a_row = 0, a_step = 0;
  const T* b = nullptr;
  ptrdiff_t b_step = 0;
  int depth = 0;
};

// A matrix of C's shape, read in a tile's epilogue.
template <typename T>
struct EpilogueMatrix {
  const T* data = nullptr;
  ptrdiff_t row = 0;
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
  Span span = Span::kAll;       // of the second product where there is one, else of the first
  int rank = 1;
  // The epilogue of A B, in this order; null pointers are skipped.
  const T* row_scale = nullptr;
  const T* col_scale = nullptr;
  EpilogueMatrix<T> row_with = {}, col_with = {};  // row_sums += Σ_cols C row_with, col_sums += Σ_rows C col_with
  T *row_sums = nullptr, *col_sums = nullptr;
  const T* then_row_scale = nullptr;
  Product<T> second = {};
  EpilogueMatrix<T> addend = {};
  const T* addend_scale = nullptr;  // of the columns
  EpilogueMatrix<T> c_in = {};
  T c_in_scale = 1;
  RowPrefetch *ahead = nullptr, *ahead_too = nullptr;  // rows to prefetch
};

// The part of the depth that a tile needs.
template <typename T, int kRows, int kVectors>
inline void depth_of_tile(const Gemm<T>& m, int row, int col, int* from, int* to) {
  int limit = *to;
  if (m.span == Span::kDepthUpToRow) {
    limit = ((row + kRows - 1) / m.rank + 1) * m.rank;
  } else if (m.span == Span::kDepthFromRow) {
    *from = row / m.rank * m.rank;
  } else if (m.span == Span::kDepthUpToColumn) {
    limit = ((col + kVectors * kLanes<T> - 1) / m.rank + 1) * m.rank;
  } else if (m.span == Span::kDepthFromColumn) {
    *from = col / m.rank * m.rank;
  }
  if (limit < *to) *to = limit;
}

template <typename T, int kRows, int kVectors>
inline void multiply_tile(Vec<T> (&acc)[kRows][kVectors], const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
                          ptrdiff_t b_step, int depth) {
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k, a += a_step, b += b_step) {
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
}

// body(i, j) for every vector of a tile.
template <int kRows, int kVectors, typename Body>
inline void for_tile(const Body& body) {
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) body(i, j);
}

// Called once per tile, also for tiles that are skipped.
template <typename T>
inline void ask_ahead(const Gemm<T>& m) {
  if (m.ahead) m.ahead->advance();
  if (m.ahead_too) m.ahead_too->advance();
}

template <typename T, int kRows, int kVectors>
inline void gemm_tile(const Gemm<T>& m, int row, int col) {
  if (m.span == Span::kColumnsFromRow && col + kLanes<T> <= row / m.rank * m.rank) {
    // The first vector is not needed.
    if constexpr (kVectors > 1)
      gemm_tile<T, kRows, kVectors - 1>(m, row, col + kLanes<T>);
    else
      ask_ahead(m);
    return;
  }
  const bool two = m.second.a != nullptr;
  int from = 0, to = two ? m.second.depth : m.depth;
  depth_of_tile<T, kRows, kVectors>(m, row, col, &from, &to);
  ask_ahead(m);
  Vec<T> acc[kRows][kVectors] = {};
  const int first = two ? 0 : from, depth = two ? m.depth : to - from;
  multiply_tile(acc, m.a + row * m.a_row + first * m.a_step, m.a_row, m.a_step, m.b + first * m.b_step + col, m.b_step,
                depth);
  const auto load_from = [&](const EpilogueMatrix<T>& x, int i, int j) {
    return load(x.data + (row + i) * x.row + col + j * kLanes<T>);
  };
  if (m.row_scale) for_tile<kRows, kVectors>([&](int i, int j) { acc[i][j] *= m.row_scale[row + i]; });
  if (m.col_scale)
    for_tile<kRows, kVectors>([&](int i, int j) { acc[i][j] *= load(m.col_scale + col + j * kLanes<T>); });
  if (m.row_sums)
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      Vec<T> sum = {};
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum += acc[i][j] * load_from(m.row_with, i, j);
      m.row_sums[row + i] += sum_lanes<T>(sum);
    }
  if (m.col_sums)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      T* at = m.col_sums + col + j * kLanes<T>;
      Vec<T> sum = load(at);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum += acc[i][j] * load_from(m.col_with, i, j);
      store(at, sum);
    }
  if (m.then_row_scale) for_tile<kRows, kVectors>([&](int i, int j) { acc[i][j] *= m.then_row_scale[row + i]; });
  if (two) {
    const Product<T>& s = m.second;
    multiply_tile(acc, s.a + row * s.a_row + from * s.a_step, s.a_row, s.a_step, s.b + from * s.b_step + col, s.b_step,
                  to - from);
  }
  if (m.addend.data)
    for_tile<kRows, kVectors>(
        [&](int i, int j) { acc[i][j] += load(m.addend_scale + col + j * kLanes<T>) * load_from(m.addend, i, j); });
  if (m.c_in.data) for_tile<kRows, kVectors>([&](int i, int j) { acc[i][j] += m.c_in_scale * load_from(m.c_in, i, j); });
  T* c = m.c + row * m.c_row + col;
  for_tile<kRows, kVectors>([&](int i, int j) { store(c + i * m.c_row + j * kLanes<T>, acc[i][j]); });
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
  constexpr int wide = kTileVectors * kLanes<T>;
  const int tiles = ((m.rows + kTileRows - 1) / kTileRows) * ((m.cols + wide - 1) / wide);
  if (m.ahead) m.ahead->spread_over(tiles);
  if (m.ahead_too) m.ahead_too->spread_over(tiles);
  int col = 0;
  for (; col + wide <= m.cols; col += wide) gemm_columns<T, kTileVectors>(m, col);
  if constexpr (kTileVectors > 2)
    for (; col + 2 * kLanes<T> <= m.cols; col += 2 * kLanes<T>) gemm_columns<T, 2>(m, col);
  for (; col < m.cols; col += kLanes<T>) gemm_columns<T, 1>(m, col);
}

}  // namespace ANYMAMBA_ISA
