// The scan's backward over one chunk of one head: its products, in the order in which they need each other.
//
// The formulas are those of scan/serial_recalculated.py, with the weights of v folded into the decayed scores. Two
// products are saved against it: `out_i = <q_i, U_i H>` comes from the query's gradient, and only the parts of the
// causal blocks that are not zero are computed. States and their gradients are held as (n, p), keys, queries and their
// gradients as (n, rows).
#pragma once

#include "scan/scan_backward_chunk.h"

namespace ANYMAMBA_ISA {

// dq += k dscores, dk += q dscores', of a head or of a group.
template <typename T>
void backward_keys(T* dk, T* dq, int rows, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int row = size.rows_row, cols = round_up<T>(rows);
  Gemm<T> queries{b.keys.k, row, 1, b.dscores, row, dq, row, size.n, cols, rows};
  queries.c_in = {dq, row};
  queries.span = Span::kDepthUpToColumn;
  queries.rank = size.rank;
  gemm(queries);
  transpose_chunk(b.dscores_t, b.dscores, row, rows, rows, size);
  Gemm<T> keys{b.keys.q, row, 1, b.dscores_t, row, dk, row, size.n, cols, rows};
  keys.c_in = {dk, row};
  keys.span = Span::kDepthFromColumn;
  keys.rank = size.rank;
  gemm(keys);
}

// The rows of a state of a chunk.
template <typename T>
inline RowPrefetch prefetch_state(const T* state, const ChunkSizes<T>& size) {
  RowPrefetch rows;
  rows.base = reinterpret_cast<const char*>(state);
  rows.outer_bytes = size.p_row * sizeof(T);
  rows.outer = size.n;
  rows.row_bytes = size.p * sizeof(T);
  return rows;
}

// One head in one chunk.
template <typename T>
struct HeadChunk {
  const Chunk& chunk;
  const Sequence& seq;
  int64_t sequence, head;
  const T* state;               // the state that entered the chunk
  T* g;                         // gradient of the leaving state, replaced by that of the entering state
  RowPrefetch next_v, next_dy;  // rows that the next head or chunk will read
};

template <typename T>
void read_head(const ScanArgs& args, const HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = at.chunk.steps * size.rank;
  b.decay.read(args, at.chunk, at.head, size.rank);
  b.weights.read(args, at.chunk, at.seq, at.head, size.rank);
  read_values(b.v, b.rank_weight, args, at.chunk, at.head, size);
  read_chunk(b.dy, size.p_row, args.dy, args.dtype, args.dy_strides, at.head, at.chunk, size.rank, size.p);
  transpose_chunk(b.dy_t, b.dy, size.p_row, rows, size.p, size);
  transpose_chunk(b.v_t, b.v, size.p_row, rows, size.p, size);
}

// dweighted = v dy', and the gradients that follow from it. The state is needed later; it is prefetched here.
template <typename T>
void backward_within(const HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = at.chunk.steps * size.rank, row = size.rows_row;
  Gemm<T> m{b.v, size.p_row, 1, b.dy_t, row, b.dweighted, row, rows, round_up<T>(rows), size.p};
  m.span = Span::kColumnsFromRow;
  m.rank = size.rank;
  RowPrefetch state = prefetch_state(at.state, size);
  m.ahead = &state;
  gemm(m);
  backward_scores(b, at.chunk.steps, size);
}

// Through the state that entered, with u the decays from the start: dq = u (H dy'), out = <q, dq>. A group gains dq.
template <typename T>
void backward_entering(const ScanArgs& args, const HeadChunk<T>& at, BackwardBuffers<T>& b,
                       const ChunkSizes<T>& size) {
  const int cols = round_up<T>(at.chunk.steps * size.rank), row = size.rows_row;
  Gemm<T> m{at.state, size.p_row, 1, b.dy_t, row, b.dq, row, size.n, cols, size.p};
  m.col_scale = b.decay.from_start;
  m.col_with = {b.keys.q, row};
  m.col_sums = b.out;
  if (!args.k_bias) m.c_in = {b.dq, row};
  RowPrefetch dv;
  if (!args.value_weight) dv = prefetch_result(args.dv, args, at.head, at.chunk, size.rank, size.p);
  m.ahead = &dv;
  fill_zero(b.out, row);
  gemm(m);
}

// dv = w rho (k G) + W dy + skip dy with w the weights, and in = <v, rho (k G)>.
template <typename T>
void backward_values(const ScanArgs& args, const HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = at.chunk.steps * size.rank, row = size.rows_row, p_row = size.p_row;
  const bool in_place = !args.value_weight && writes_in_place<T>(args, size);
  const ptrdiff_t dv_row = in_place ? args.heads * args.width : p_row;
  T* dv = in_place ? static_cast<T*>(args.dv) + first_row(args, at.chunk) * dv_row + at.head * args.width : b.dv;
  Gemm<T> m{b.keys.k, 1, row, at.g, p_row, dv, dv_row, rows, size.p_cols, size.n};
  m.row_scale = b.decay.to_end;
  m.row_with = {b.v, p_row};
  m.row_sums = b.in;
  m.then_row_scale = b.weights.later;
  m.second = {b.weighted, row, 1, b.dy, p_row, rows};
  m.span = Span::kDepthFromRow;
  m.rank = size.rank;
  if (args.skip) {
    read_parameters(b.skip, args.skip, at.head, size.p);
    m.addend = {b.dy, p_row};
    m.addend_scale = b.skip;
    backward_skip(args, at.sequence, at.head, rows, b, size);
  }
  fill_zero(b.in, row);
  gemm(m);
  if (args.value_weight)
    backward_rank_values(args, at.chunk, at.sequence, at.head, b, size);
  else if (!in_place)
    write_chunk(args.dv, b.dv, p_row, args.dtype, args, at.head, args.heads, at.chunk, size.p);
}

// Through the state that leaves: dk = G (w rho v)'. A group gains it.
template <typename T>
void backward_leaving(const ScanArgs& args, HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int cols = round_up<T>(at.chunk.steps * size.rank), row = size.rows_row;
  for (int i = 0; i < cols; i += kLanes<T>)
    store(b.decay.to_end + i, load(b.decay.to_end + i) * load(b.weights.later + i));
  Gemm<T> m{at.g, size.p_row, 1, b.v_t, row, b.dk, row, size.n, cols, size.p};
  m.col_scale = b.decay.to_end;
  if (!args.k_bias) m.c_in = {b.dk, row};
  m.ahead = &at.next_v;
  gemm(m);
}

// G <- kept G + q (u dy)
template <typename T>
void advance_gradient(HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = at.chunk.steps * size.rank, p_row = size.p_row;
  scale_rows(b.dy, b.dy, b.decay.from_start, rows, size.p_cols, p_row);
  Gemm<T> m{b.keys.q, size.rows_row, 1, b.dy, p_row, at.g, p_row, size.n, size.p_cols, rows};
  m.c_in = {at.g, p_row};
  m.c_in_scale = b.decay.kept;
  m.ahead = &at.next_dy;
  gemm(m);
}

// The sum of the products of two states, (n, p).
template <typename T>
double overlap(const T* x, const T* y, const ChunkSizes<T>& size) {
  double sum = 0;
  for (int row = 0; row < size.n; ++row, x += size.p_row, y += size.p_row) {
    Vec<T> part = {};
    for (int c = 0; c < size.p_cols; c += kLanes<T>) part += load(x + c) * load(y + c);
    sum += static_cast<double>(sum_lanes<T>(part));
  }
  return sum;
}

template <typename T>
void backward_head(const ScanArgs& args, HeadChunk<T>& at, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  read_head(args, at, b, size);
  backward_within(at, b, size);
  backward_entering(args, at, b, size);
  const double keep = static_cast<double>(b.decay.kept) * overlap(at.g, at.state, size);
  backward_values(args, at, b, size);
  backward_leaving(args, at, b, size);
  for (int i = 0; i < at.chunk.steps * size.rank; ++i) b.d_later[i] += b.in[i], b.in[i] *= b.weights.later[i];
  write_dlog_decay(args, at.chunk, at.head, b.out, b.in, keep, b.crossing);
  write_dweights(args, at.chunk, at.seq, at.head, b.d_later, b.d_own);
  advance_gradient(at, b, size);
}

}  // namespace ANYMAMBA_ISA
