// The scan's backward over one chunk of one head.
//
// The formulas are those of scan/serial_recalculated.py, with the weights of v folded into the decayed scores. Two
// products are saved against it: `out_i = <q_i, U_i H>` comes from the query's gradient, and only the parts of the causal
// blocks that are not zero are computed. States and their gradients are held as (n, p), keys, queries and their gradients
// as (n, rows).
#pragma once

#include "scan_keys.h"

namespace ANYMAMBA_ISA {

template <typename T>
struct BackwardBuffers {
  Keys<T> keys;
  T *scores, *dscores, *dscores_t;            // of the group or head: (rows, rows)
  T *dgroup_k, *dgroup_q, *dk, *dq;           // of the group, and of the head: (n, rows)
  T *v, *dy, *dv, *weighted, *dweighted;      // of a head: (rows, p), and (rows, rows)
  T *v_t, *dy_t;                              // (p, rows)
  T *skip, *rank_weight, *x;                  // (p)
  T *sums, *out, *in, *d_later, *d_own;         // (rows)
  T* g;                                       // (heads, n, p): gradient of the state that leaves the chunk
  T* entering;                                // (heads, chunks, n, p): the states that enter the chunks
  T *dk_bias, *dq_bias;                       // (heads), patterns
  double *rotations, *rotation;               // (heads, chunks): those that enter the chunks, and the one at hand
  double* crossing;                           // (steps)
  TurnGradient<T> dturns;
  Decay<T> decay;
  Weights<T> weights;

  BackwardBuffers(Arena& arena, const ScanArgs& args, const ChunkSizes<T>& s, int64_t heads, int64_t chunks)
      : keys(arena, args, s, heads),
        scores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dscores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dscores_t(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dgroup_k(arena.take<T>(size_t(s.n) * s.rows_row)),
        dgroup_q(arena.take<T>(size_t(s.n) * s.rows_row)),
        dk(args.k_bias ? arena.take<T>(size_t(s.n) * s.rows_row) : dgroup_k),
        dq(args.k_bias ? arena.take<T>(size_t(s.n) * s.rows_row) : dgroup_q),
        v(arena.take<T>(size_t(s.rows) * s.p_row)),
        dy(arena.take<T>(size_t(s.rows) * s.p_row)),
        dv(arena.take<T>(size_t(s.rows) * s.p_row)),
        weighted(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dweighted(arena.take<T>(size_t(s.rows) * s.rows_row)),
        v_t(arena.take<T>(size_t(s.p) * s.rows_row)),
        dy_t(arena.take<T>(size_t(s.p) * s.rows_row)),
        skip(arena.take<T>(s.p_row)),
        rank_weight(arena.take<T>(s.p_row)),
        x(arena.take<T>(s.p_row)),
        sums(arena.take<T>(s.rows_row)),
        out(arena.take<T>(s.rows_row)),
        in(arena.take<T>(s.rows_row)),
        d_later(arena.take<T>(s.rows_row)),
        d_own(arena.take<T>(s.rows_row)),
        g(arena.take<T>(size_t(heads) * s.n * s.p_row)),
        entering(arena.take<T>(size_t(heads) * chunks * s.n * s.p_row)),
        dk_bias(arena.take<T>(args.k_bias ? heads * keys.pattern_numbers() : 0)),
        dq_bias(arena.take<T>(args.k_bias ? heads * keys.pattern_numbers() : 0)),
        rotations(arena.take<double>(size_t(heads) * chunks * s.turn.state)),
        rotation(arena.take<double>(s.turn.state)),
        crossing(arena.take<double>(s.steps)),
        dturns(arena, s, heads),
        decay(arena, s),
        weights(arena, s) {}
};

template <typename T>
inline T dot(const T* x, const T* y, int width) {
  Vec<T> sum = {};
  for (int c = 0; c < width; c += kLanes<T>) sum += load(x + c) * load(y + c);
  return sum_lanes<T>(sum);
}

// The elementwise middle of the backward. On entry dweighted[j, i] = <v_j, dy_i>. On exit `weighted` holds the decayed
// and weighted scores, dscores has gained its part, d_later and d_own hold the gradients of the rows' weights within the
// chunk, and crossing[l] = sum over i at or after l, j before l of E[j, i], the gradient on the exponent of the decay
// from j to i.
template <typename T>
void backward_scores(BackwardBuffers<T>& b, int steps, const ChunkSizes<T>& size) {
  const int rank = size.rank, cols = round_up<T>(steps * rank);
  fill_zero(b.sums, cols);
  for (int l = 0; l < steps; ++l) {
    // b.sums[i] runs over all keys before step l; queries before l no longer count.
    Vec<T> total = {};
    for (int i = first_vector<T>(l * rank, 1); i < cols; i += kLanes<T>) total += load(b.sums + i);
    b.crossing[l] = static_cast<double>(sum_lanes<T>(total));
    for (int j = l * rank; j < (l + 1) * rank; ++j) {
      const ptrdiff_t row = j * static_cast<ptrdiff_t>(size.rows_row);
      const T later = b.weights.later[j], own = b.weights.own[j];
      Vec<T> d_later = {}, d_own = {};
      int i = first_vector<T>(j, rank);
      fill_zero(b.weighted + row, i);
      for (; i < (l + 1) * rank; i += kLanes<T>) {
        const Vec<T> score = load(b.scores + row + i), grad = load(b.dweighted + row + i);
        const Vec<T> decay = b.decay.between(j, i);
        const auto causal = b.decay.at_or_after(j, i), after = b.decay.after(j, i);
        const Vec<T> weight = causal ? (after ? later * decay : broadcast(own)) : Vec<T>{};
        const Vec<T> crossing = after ? grad * score * decay : Vec<T>{};
        store(b.weighted + row + i, causal ? score * weight : Vec<T>{});
        store(b.dscores + row + i, load(b.dscores + row + i) + (causal ? grad * weight : Vec<T>{}));
        store(b.sums + i, load(b.sums + i) + later * crossing);
        d_later += crossing;
        d_own += causal ? (after ? Vec<T>{} : grad * score) : Vec<T>{};
      }
      for (; i < cols; i += kLanes<T>) {
        const Vec<T> score = load(b.scores + row + i), grad = load(b.dweighted + row + i);
        const Vec<T> decay = b.decay.between(j, i), weight = later * decay, crossing = grad * score * decay;
        store(b.weighted + row + i, score * weight);
        store(b.dscores + row + i, load(b.dscores + row + i) + grad * weight);
        store(b.sums + i, load(b.sums + i) + later * crossing);
        d_later += crossing;
      }
      b.d_later[j] = sum_lanes<T>(d_later);
      b.d_own[j] = sum_lanes<T>(d_own);
    }
    for (int i = l * rank; i < (l + 1) * rank; ++i) b.sums[i] = 0;
  }
}

// da_l = sum of `out` from l on + sum of `in` before l + keep + crossing_l
template <typename T>
void write_dlog_decay(const ScanArgs& args, const Chunk& chunk, int64_t head, const T* out, const T* in, double keep,
                      const double* crossing) {
  const int rank = static_cast<int>(args.rank);
  T* target = at_step<T>(args.dlog_decay, args, chunk.batch, chunk.start, head);
  double before = 0;
  for (int l = 0; l < chunk.steps; ++l) {
    target[l * args.heads] = static_cast<T>(before + keep + crossing[l]);
    for (int i = l * rank; i < (l + 1) * rank; ++i) before += static_cast<double>(in[i]);
  }
  double after = 0;
  for (int l = chunk.steps - 1; l >= 0; --l) {
    for (int i = l * rank; i < (l + 1) * rank; ++i) after += static_cast<double>(out[i]);
    target[l * args.heads] += static_cast<T>(after);
  }
}

// The gradient of each step's weights from those of its rows.
template <typename T>
void write_dweights(const ScanArgs& args, const Chunk& chunk, const Sequence& seq, int64_t head, const T* d_later,
                    const T* d_own) {
  const int rank = static_cast<int>(args.rank);
  if (!args.scale && !args.gamma) return;
  for (int l = 0; l < chunk.steps; ++l) {
    T later = 0, own = 0;
    for (int i = l * rank; i < (l + 1) * rank; ++i) later += d_later[i], own += d_own[i];
    const int64_t time = chunk.start + l;
    if (args.scale) *at_step<T>(args.dscale, args, chunk.batch, time, head) = later + own;
    if (!args.gamma) continue;
    *at_step<T>(args.dgamma, args, chunk.batch, time, head) = later + own;
    if (time == seq.start) *at_step<T>(args.dkappa, args, chunk.batch, time, head) = 0;
    if (time + 1 < seq.stop) *at_step<T>(args.dkappa, args, chunk.batch, time + 1, head) = later;
  }
}

// The gradient of the skip's weights.
template <typename T>
void backward_skip(const ScanArgs& args, int64_t sequence, int64_t head, int rows, BackwardBuffers<T>& b,
                   const ChunkSizes<T>& size) {
  const ptrdiff_t row = size.p_row;
  T* dskip = static_cast<T*>(args.dskip) + (sequence * args.heads + head) * args.width;
  for (int c = 0; c < size.p_cols; c += kLanes<T>) {
    Vec<T> sum = {};
    for (int i = 0; i < rows; ++i) sum += load(b.dy + i * row + c) * load(b.v + i * row + c);
    for (int i = c; i < c + kLanes<T> && i < size.p; ++i) dskip[i] += sum[i - c];
  }
}

// From the gradients of the ranks' values in b.dv to those of the one row that they share, and of their weights.
template <typename T>
void backward_rank_values(const ScanArgs& args, const Chunk& chunk, int64_t sequence, int64_t head,
                          BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rank = size.rank, p = size.p;
  for (int r = 0; r < rank; ++r) {
    read_parameters(b.rank_weight, args.value_weight, head * rank + r, p);
    T* dweight = static_cast<T*>(args.dvalue_weight) + ((sequence * args.heads + head) * rank + r) * p;
    for (int l = 0; l < chunk.steps; ++l) {
      const int64_t* strides = args.v_strides;
      const int64_t at = chunk.batch * strides[0] + (chunk.start + l) * strides[1] + head * strides[3];
      read_row(b.x, static_cast<const char*>(args.v) + at * static_cast<int64_t>(size_of(args.dtype)), args.dtype, p,
               size.p_cols);
      T *dv = b.dv + (l * rank + r) * ptrdiff_t(size.p_row), *dx = b.dv + l * rank * ptrdiff_t(size.p_row);
      for (int c = 0; c < p; ++c) dweight[c] += dv[c] * b.x[c];
      for (int c = 0; c < size.p_cols; c += kLanes<T>) {
        const Vec<T> part = load(dv + c) * load(b.rank_weight + c);
        store(dx + c, r ? load(dx + c) + part : part);
      }
    }
  }
  for (int l = 0; l < chunk.steps; ++l) {
    const int64_t row = (chunk.batch * args.time + chunk.start + l) * args.heads + head;
    write_row(static_cast<char*>(args.dv) + row * p * static_cast<int64_t>(size_of(args.dtype)),
              b.dv + l * rank * ptrdiff_t(size.p_row), args.dtype, p);
  }
}

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

// dv = w rho (k G) + W dy + skip dy with w the weights, and in = <v, rho (k G)>.
template <typename T>
void backward_values(const ScanArgs& args, const Chunk& chunk, int64_t sequence, int64_t head, const T* g,
                     BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank, row = size.rows_row, p_row = size.p_row;
  const bool in_place = !args.value_weight && writes_in_place<T>(args, size);
  const ptrdiff_t dv_row = in_place ? args.heads * args.width : p_row;
  T* dv = in_place ? static_cast<T*>(args.dv) + first_row(args, chunk) * dv_row + head * args.width : b.dv;
  Gemm<T> into{b.keys.k, 1, row, g, p_row, dv, dv_row, rows, size.p_cols, size.n};
  into.row_scale = b.decay.to_end;
  into.row_with = {b.v, p_row};
  into.row_sums = b.in;
  into.then_row_scale = b.weights.later;
  into.second = {b.weighted, row, 1, b.dy, p_row, rows};
  into.span = Span::kDepthFromRow;
  into.rank = size.rank;
  if (args.skip) {
    read_parameters(b.skip, args.skip, head, size.p);
    into.addend = {b.dy, p_row};
    into.addend_scale = b.skip;
    backward_skip(args, sequence, head, rows, b, size);
  }
  fill_zero(b.in, row);
  gemm(into);
  if (args.value_weight)
    backward_rank_values(args, chunk, sequence, head, b, size);
  else if (!in_place)
    write_chunk(args.dv, b.dv, p_row, args.dtype, args, head, args.heads, chunk, size.p);
}

template <typename T>
void backward_head(const ScanArgs& args, const Chunk& chunk, const Sequence& seq, int64_t sequence, int64_t head,
                   const T* state, T* g, RowPrefetch& next_v, RowPrefetch& next_dy, RowPrefetch& next_dv,
                   BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank, cols = round_up<T>(rows), row = size.rows_row;
  const int p_row = size.p_row, p_cols = size.p_cols;
  b.decay.read(args, chunk, head, size.rank);
  b.weights.read(args, chunk, seq, head, size.rank);
  read_values(b.v, b.rank_weight, args, chunk, head, size);
  read_chunk(b.dy, p_row, args.dy, args.dtype, args.dy_strides, head, chunk, size.rank, size.p);
  transpose_chunk(b.dy_t, b.dy, p_row, rows, size.p, size);
  transpose_chunk(b.v_t, b.v, p_row, rows, size.p, size);

  // Through the state that entered, with u the decays from the start: dq = u (H dy'), out = <q, dq>. A group gains it.
  T* dq = args.k_bias ? b.dq : b.dgroup_q;
  Gemm<T> queries{state, p_row, 1, b.dy_t, row, dq, row, size.n, cols, size.p};
  queries.col_scale = b.decay.from_start;
  queries.col_with = {b.keys.q, row};
  queries.col_sums = b.out;
  if (!args.k_bias) queries.c_in = {dq, row};
  fill_zero(b.out, row);
  gemm(queries);

  // Within the chunk.
  Gemm<T> dweighted{b.v, p_row, 1, b.dy_t, row, b.dweighted, row, rows, cols, size.p};
  dweighted.span = Span::kColumnsFromRow;
  dweighted.rank = size.rank;
  gemm(dweighted);
  backward_scores(b, chunk.steps, size);

  // Through the state that leaves: dk = G (w rho v)'.
  double keep = 0;
  for (int c = 0; c < size.n; ++c)
    keep += static_cast<double>(dot(g + c * ptrdiff_t(p_row), state + c * ptrdiff_t(p_row), p_cols));
  keep *= static_cast<double>(b.decay.kept);
  backward_values(args, chunk, sequence, head, g, b, size);
  for (int i = 0; i < cols; i += kLanes<T>)
    store(b.decay.to_end + i, load(b.decay.to_end + i) * load(b.weights.later + i));
  Gemm<T> keys{g, p_row, 1, b.v_t, row, b.dk, row, size.n, cols, size.p};
  keys.col_scale = b.decay.to_end;
  if (!args.k_bias) keys.c_in = {b.dk, row};
  keys.ahead = &next_v;
  keys.ahead_too = &next_dv;
  gemm(keys);
  for (int i = 0; i < rows; ++i) b.d_later[i] += b.in[i], b.in[i] *= b.weights.later[i];
  write_dlog_decay(args, chunk, head, b.out, b.in, keep, b.crossing);
  write_dweights(args, chunk, seq, head, b.d_later, b.d_own);

  // G <- kept G + q (u dy)
  scale_rows(b.dy, b.dy, b.decay.from_start, rows, p_cols, p_row);
  Gemm<T> next{b.keys.q, row, 1, b.dy, p_row, g, p_row, size.n, p_cols, rows};
  next.c_in = {g, p_row};
  next.c_in_scale = b.decay.kept;
  next.ahead = &next_dy;
  gemm(next);
}

}  // namespace ANYMAMBA_ISA
