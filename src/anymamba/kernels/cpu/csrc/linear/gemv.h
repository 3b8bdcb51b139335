// Few rows times a matrix: y = x Wᵀ, where W is read once, in its dtype.
//
// A product is summed over vectors in one fixed order, so that a row's result does not depend on the other rows.
#pragma once

#include "threads.h"
#include "linear/weight_formats.h"

namespace ANYMAMBA_ISA {

// A vector that stays in its register; the compiler would load it again for each use.
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

// emit(col, row, products, count) for the first kRows rows of w, which are those from `row` on, and kCols rows of x.
// Not inlined: in its callers, its sums would no longer fit the registers.
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

// The same for all `cols` rows of x, while the next rows of w are prefetched.
template <int kRows, typename T, typename Rows, typename Emit>
inline void dot_rows(const Rows& w, int64_t row, const T* x, int64_t x_row, int64_t cols, Ahead ahead,
                     const Emit& emit) {
  int64_t col = 0;
  for (; col + kDotCols <= cols; col += kDotCols) dot_tile<kRows, kDotCols>(w, row, x, x_row, col, ahead, emit);
  for (; col < cols; ++col) dot_tile<kRows, 1>(w, row, x, x_row, col, ahead, emit);
}

// The number of rows of a matrix per task.
constexpr int64_t kTaskBytes = 96 << 10;
template <typename Rows>
inline int64_t task_rows(const Rows& w) {
  const int64_t wanted = kTaskBytes / w.row_bytes();
  return wanted < kDotRows ? kDotRows : wanted / kDotRows * kDotRows;
}

// Rows of x in the format in which they are multiplied, in memory of the calling thread.
template <typename T, typename W>
struct Operand {
  const T* x;
  int64_t x_row, cols;
  T* buffer;  // kDotRows rows of the matrix, converted

  Operand(Arena& arena, const Numbers<T, W>& w, const T* x, int64_t x_row, int64_t cols)
      : x(x), x_row(x_row), cols(cols), buffer(arena.take<T>(kDotRows * w.k)) {}
  void prepare() {}
};
template <typename Rows>
struct CodeOperand {
  int64_t cols;
  Activations<typename Rows::Block> x;

  CodeOperand(Arena& arena, const Rows& w, const float* source, int64_t x_row, int64_t cols)
      : cols(cols), x(arena, cols, w.k), source_(source), source_row_(x_row), k_(w.k) {}

  // Quantizes the rows. Called before the first product, when the source is known to be complete.
  void prepare() {
    if (is_prepared_) return;
    for (int64_t col = 0; col < cols; ++col) x.fill(col, source_ + col * source_row_, k_);
    is_prepared_ = true;
  }

 private:
  const float* source_;
  int64_t source_row_, k_;
  bool is_prepared_ = false;
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
  // A single pass over numbers of T waits for memory only, and the processor prefetches it better.
  const bool is_converted = sizeof(W) < sizeof(T);
  const int64_t step =
      !is_converted && passes == 1 ? 0 : (kDotRows * w.row_bytes() + vectors * passes - 1) / (vectors * passes);
  int64_t row = start;
  for (; row + kDotRows <= stop; row += kDotRows) {
    const char* next = w.address(row + kDotRows);
    const Ahead ahead{next, next, step};
    if (!is_converted || passes == 1) {
      dot_rows<kDotRows>(w.from(row), row, x.x, x.x_row, x.cols, ahead, emit);
      continue;
    }
    // Numbers of another dtype are converted once for all passes.
    convert_rows<T>(x.buffer, w.from(row), kDotRows);
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

}  // namespace ANYMAMBA_ISA
