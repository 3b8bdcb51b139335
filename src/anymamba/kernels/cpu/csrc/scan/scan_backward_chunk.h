// The local memory of the scan's backward for a chunk, and its elementwise computations.
#pragma once

#include "scan/scan_keys.h"

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
  double *rotations, *rotation;               // (heads, chunks): those that enter the chunks, and the current one
  double* crossing;                           // (steps)
  RotationGradient<T> drotations;
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
        rotations(arena.take<double>(size_t(heads) * chunks * s.rotation.state)),
        rotation(arena.take<double>(s.rotation.state)),
        crossing(arena.take<double>(s.steps)),
        drotations(arena, s, heads),
        decay(arena, s),
        weights(arena, s) {}
};

// The elementwise middle of the backward. On entry dweighted[j, i] = <v_j, dy_i>. On exit `weighted` holds the decayed
// and weighted scores, dscores has gained its part, d_later and d_own hold the gradients of the rows' weights within
// the chunk, and crossing[l] = sum over i at or after l, j before l of E[j, i], the gradient on the exponent of the
// decay from j to i.
template <typename T>
void backward_scores(BackwardBuffers<T>& b, int steps, const ChunkSizes<T>& size) {
  const int rank = size.rank, cols = round_up<T>(steps * rank);
  fill_zero(b.sums, cols);
  for (int l = 0; l < steps; ++l) {
    // b.sums[i] runs over all keys before step l; queries before l do not count.
    int query = first_vector<T>(l * rank, 1);
    Vec<T> total = b.decay.at_or_after(l * rank, query) ? load(b.sums + query) : Vec<T>{};
    while ((query += kLanes<T>) < cols) total += load(b.sums + query);
    b.crossing[l] = static_cast<double>(sum_lanes<T>(total));
    for (int j = l * rank; j < (l + 1) * rank; ++j) {
      const ptrdiff_t row = j * static_cast<ptrdiff_t>(size.rows_row);
      const T later = b.weights.later[j], own = b.weights.own[j];
      Vec<T> d_later = {};
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
      b.d_own[j] = 0;
      for (int i = l * rank; i < (l + 1) * rank; ++i) b.d_own[j] += b.dweighted[row + i] * b.scores[row + i];
    }
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

// From the gradients of the ranks' values in b.dv, computes those of the row that the ranks share, and of its weights.
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

}  // namespace ANYMAMBA_ISA
