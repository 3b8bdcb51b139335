// The scan's backward: the states that enter the chunks are recomputed, then the chunks are walked from last to first.
//
// The formulas are those of scan/serial_recalculated.py. Two products are saved against it: `out_i = <q_i, U_i H>` comes
// from the query's gradient, and only the parts of the causal blocks that are not zero are computed.
#pragma once

#include "scan_chunk.h"

namespace ANYMAMBA_ISA {

// Heads whose key and query gradients are summed in one task. It fixes the order of the sum, so it must depend neither
// on the number of threads nor on the batch.
constexpr int64_t kBackwardHeads = 4;

template <typename T>
struct BackwardBuffers {
  T *k, *q, *q_t, *scores, *dscores, *dk, *dq;       // of the group
  T *x, *scale, *skip;                               // of a head: v before its scale (rows, p), (rows), (p)
  T *v, *dy, *dy_t, *rv, *u, *dv, *weights, *dweights;  // of a head
  T *read, *g_t, *sums, *out, *in;
  T *g;         // (heads of the block, p, n): gradient of the state that leaves the chunk
  T *entering;  // (heads of the block, chunks, p, n): the states that enter the chunks
  Decay<T> decay;

  BackwardBuffers(Arena& arena, const ChunkSizes<T>& s, int64_t heads, int64_t chunks)
      : k(arena.take<T>(size_t(s.rows) * s.n_row)),
        q(arena.take<T>(size_t(s.rows) * s.n_row)),
        q_t(arena.take<T>(size_t(s.n) * s.rows_row)),
        scores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dscores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dk(arena.take<T>(size_t(s.rows) * s.n_row)),
        dq(arena.take<T>(size_t(s.rows) * s.n_row)),
        x(arena.take<T>(size_t(s.rows) * s.p_row)),
        scale(arena.take<T>(s.rows_row)),
        skip(arena.take<T>(s.p_row)),
        v(arena.take<T>(size_t(s.rows) * s.p_row)),
        dy(arena.take<T>(size_t(s.rows) * s.p_row)),
        dy_t(arena.take<T>(size_t(s.p) * s.rows_row)),
        rv(arena.take<T>(size_t(s.rows) * s.p_row)),
        u(arena.take<T>(size_t(s.rows) * s.p_row)),
        dv(arena.take<T>(size_t(s.rows) * s.p_row)),
        weights(arena.take<T>(size_t(s.rows) * s.rows_row)),
        dweights(arena.take<T>(size_t(s.rows) * s.rows_row)),
        read(arena.take<T>(size_t(s.rows) * s.n_row)),
        g_t(arena.take<T>(size_t(s.n) * s.p_row)),
        sums(arena.take<T>(s.rows_row)),
        out(arena.take<T>(s.rows_row)),
        in(arena.take<T>(s.rows_row)),
        g(arena.take<T>(size_t(heads) * s.p * s.n_row)),
        entering(arena.take<T>(size_t(heads) * chunks * s.p * s.n_row)),
        decay(arena, s) {}
};

template <typename T>
inline T dot(const T* x, const T* y, int width) {
  Vec<T> sum = {};
  for (int c = 0; c < width; c += kLanes<T>) sum += load(x + c) * load(y + c);
  return sum_lanes<T>(sum);
}

// The elementwise middle of the backward. On entry dweights[j, i] = <v_j, dy_i>. On exit weights holds the decayed
// scores, dscores has gained the decayed dweights, and crossing[l] = sum over i at or after l, j before l of
// E[j, i] = dweights * weights, the gradient on the exponent of the decay from j to i.
template <typename T>
void backward_scores(BackwardBuffers<T>& b, double* crossing, int steps, const ChunkSizes<T>& size) {
  const int rank = size.rank, cols = round_up<T>(steps * rank);
  fill_zero(b.sums, cols);
  for (int l = 0; l < steps; ++l) {
    // b.sums[i] runs over all keys before step l; queries before l no longer count.
    Vec<T> total = {};
    for (int i = first_vector<T>(l * rank, 1); i < cols; i += kLanes<T>) total += load(b.sums + i);
    crossing[l] = static_cast<double>(sum_lanes<T>(total));
    for (int j = l * rank; j < (l + 1) * rank; ++j) {
      const ptrdiff_t row = j * static_cast<ptrdiff_t>(size.rows_row);
      const int first = first_vector<T>(j, rank);
      fill_zero(b.weights + row, first);
      for (int i = first; i < cols; i += kLanes<T>) {
        const Vec<T> decay = b.decay.between(j, i), score = load(b.scores + row + i);
        const auto causal = b.decay.at_or_after(j, i);
        const Vec<T> dweight = causal ? load(b.dweights + row + i) * decay : Vec<T>{};
        store(b.weights + row + i, causal ? score * decay : Vec<T>{});
        store(b.dscores + row + i, load(b.dscores + row + i) + dweight);
        store(b.sums + i, load(b.sums + i) + (causal ? dweight * score : Vec<T>{}));
      }
    }
    for (int i = l * rank; i < (l + 1) * rank; ++i) b.sums[i] = 0;
  }
}

// da_l = sum of `out` from l on + sum of `in` before l + keep + crossing_l
template <typename T>
void write_dlog_decay(const ScanArgs& args, const Chunk& chunk, int64_t head, const T* out, const T* in, double keep,
                      const double* crossing) {
  const int rank = static_cast<int>(args.rank);
  T* target = static_cast<T*>(args.dlog_decay) + (chunk.batch * args.time + chunk.start) * args.heads + head;
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

// Reads v, and scales it where there is a scale; b.x then holds it as it came.
template <typename T>
void read_values(const ScanArgs& args, const Chunk& chunk, int64_t head, BackwardBuffers<T>& b,
                 const ChunkSizes<T>& size) {
  T* target = args.scale ? b.x : b.v;
  read_chunk(target, size.p_row, args.v, args.dtype, args.v_strides, head, chunk, size.rank, size.p);
  if (!args.scale) return;
  read_scale(b.scale, args, chunk, head, size.rank);
  scale_rows(b.v, b.x, b.scale, chunk.steps * size.rank, size.p_cols, size.p_row);
}

// From the gradient of the scaled v in b.dv to that of v as it came, of the scale, and of the skip.
template <typename T>
void backward_scale_and_skip(const ScanArgs& args, const Chunk& chunk, int64_t sequence, int64_t head,
                             BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank, rank = size.rank;
  const ptrdiff_t row = size.p_row;
  if (args.scale) {
    T* dscale = static_cast<T*>(args.dscale) + (chunk.batch * args.time + chunk.start) * args.heads + head;
    for (int l = 0; l < chunk.steps; ++l) {
      T sum = 0;
      for (int i = l * rank; i < (l + 1) * rank; ++i) sum += dot(b.x + i * row, b.dv + i * row, size.p_cols);
      dscale[l * args.heads] = sum;
    }
    scale_rows(b.dv, b.dv, b.scale, rows, size.p_cols, size.p_row);
  }
  if (args.skip) {
    const T* x = args.scale ? b.x : b.v;
    T* dskip = static_cast<T*>(args.dskip) + (sequence * args.heads + head) * args.width;
    read_skip(b.skip, args, head);
    for (int c = 0; c < size.p_cols; c += kLanes<T>) {
      const Vec<T> skip = load(b.skip + c);
      Vec<T> sum = {};
      for (int i = 0; i < rows; ++i) {
        const Vec<T> dy = load(b.dy + i * row + c);
        sum += dy * load(x + i * row + c);
        store(b.dv + i * row + c, load(b.dv + i * row + c) + skip * dy);
      }
      for (int i = c; i < c + kLanes<T> && i < size.p; ++i) dskip[i] += sum[i - c];
    }
  }
}

template <typename T>
void backward_head(const ScanArgs& args, const Chunk& chunk, int64_t sequence, int64_t head, const T* state, T* g, double* crossing,
                   RowPrefetch& next_v, RowPrefetch& next_dy, BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank, rows_cols = round_up<T>(rows);
  const int p_row = size.p_row, n_row = size.n_row, p_cols = size.p_cols, n_cols = size.n_cols;
  b.decay.read(args, chunk, head, size.rank);
  read_values(args, chunk, head, b, size);
  read_chunk(b.dy, p_row, args.dy, args.dtype, args.dy_strides, head, chunk, size.rank, size.p);
  if (rows_cols > rows) fill_zero(b.dy_t, size_t(size.p) * size.rows_row);
  transpose(b.dy_t, size.rows_row, b.dy, p_row, rows, size.p);
  scale_rows(b.u, b.dy, b.decay.from_start, rows, p_cols, p_row);
  scale_rows(b.rv, b.v, b.decay.to_end, rows, p_cols, p_row);

  // Through the state that entered: dq += U H, out = <q, U H>.
  gemm(Gemm<T>{b.u, p_row, 1, state, n_row, b.read, n_row, rows, n_cols, size.p});
  for (int i = 0; i < rows; ++i) {
    const ptrdiff_t row = i * static_cast<ptrdiff_t>(n_row);
    b.out[i] = dot(b.read + row, b.q + row, n_cols);
    for (int c = 0; c < n_cols; c += kLanes<T>)
      store(b.dq + row + c, load(b.dq + row + c) + load(b.read + row + c));
  }

  // Through the state that leaves: dv = rho (k G'), in = <v, dv>, dk += (rho v) G.
  const double keep = [&] {
    double sum = 0;
    for (int i = 0; i < size.p; ++i)
      sum += static_cast<double>(dot(g + i * ptrdiff_t(n_row), state + i * ptrdiff_t(n_row), n_cols));
    return sum * static_cast<double>(b.decay.kept);
  }();
  transpose(b.g_t, p_row, g, n_row, size.p, size.n);
  Gemm<T> into{b.k, n_row, 1, b.g_t, p_row, b.dv, p_row, rows, p_cols, size.n};
  into.row_scale = b.decay.to_end;
  gemm(into);
  for (int i = 0; i < rows; ++i) b.in[i] = dot(b.v + i * ptrdiff_t(p_row), b.dv + i * ptrdiff_t(p_row), p_cols);
  Gemm<T> keys{b.rv, p_row, 1, g, n_row, b.dk, n_row, rows, n_cols, size.p};
  keys.c_in = b.dk;
  keys.ahead = &next_v;
  gemm(keys);

  // Within the chunk: dv += W' dy.
  Gemm<T> dweights{b.v, p_row, 1, b.dy_t, size.rows_row, b.dweights, size.rows_row, rows, rows_cols, size.p};
  dweights.span = Span::kColumnsFromRow;
  dweights.rank = size.rank;
  gemm(dweights);
  backward_scores(b, crossing, chunk.steps, size);
  Gemm<T> within{b.weights, size.rows_row, 1, b.dy, p_row, b.dv, p_row, rows, p_cols, rows};
  within.c_in = b.dv;
  within.span = Span::kDepthFromRow;
  within.rank = size.rank;
  gemm(within);
  backward_scale_and_skip(args, chunk, sequence, head, b, size);
  write_chunk(args.dv, b.dv, p_row, args.dtype, args, head, args.heads, chunk, size.p);
  write_dlog_decay(args, chunk, head, b.out, b.in, keep, crossing);

  // G <- kept G + U' q
  Gemm<T> next{b.u, 1, p_row, b.q, n_row, g, n_row, size.p, n_cols, rows};
  next.c_in = g;
  next.c_in_scale = b.decay.kept;
  next.ahead = &next_dy;
  gemm(next);
}

// Fills b.entering: H_0 = initial state, H_{c+1} = kept H_c + (rho v)' k.
template <typename T>
void recompute_states(const ScanArgs& args, const Task& task, const Sequence& seq, int64_t chunks,
                      BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const size_t numbers = size_t(size.p) * size.n_row;
  for (int64_t e = 0; e < task.heads; ++e) {
    T* first = b.entering + e * chunks * numbers;
    fill_zero(first, numbers);
    if (!args.initial_state) continue;
    const T* source = static_cast<const T*>(args.initial_state) +
                      (task.sequence * args.heads + task.first_head + e) * args.width * args.state;
    for (int i = 0; i < size.p; ++i) std::memcpy(first + size_t(i) * size.n_row, source + size_t(i) * size.n, size.n * sizeof(T));
  }
  for (int64_t c = 0; c + 1 < chunks; ++c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    read_chunk(b.k, size.n_row, args.k, args.dtype, args.k_strides, task.group, chunk, size.rank, size.n);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last = e + 1 == task.heads;
      RowPrefetch next_v = prefetch_of(args.v, args.dtype, args.v_strides, task.first_head + (last ? 0 : e + 1),
                                       last ? chunk_of(seq, c + 1, size.steps) : chunk, size.rank, size.p);
      b.decay.read(args, chunk, task.first_head + e, size.rank);
      read_values(args, chunk, task.first_head + e, b, size);
      scale_rows(b.v, b.v, b.decay.to_end, rows, size.p_cols, size.p_row);
      T* state = b.entering + (e * chunks + c) * numbers;
      Gemm<T> add{b.v, 1, size.p_row, b.k, size.n_row, state + numbers, size.n_row, size.p, size.n_cols, rows};
      add.c_in = state;
      add.c_in_scale = b.decay.kept;
      add.ahead = &next_v;
      gemm(add);
    }
  }
}

// Where a task's key and query gradients go: straight to the results where a group is one block, else to `partial`,
// (block of the group, batch, time, rank, group, n) of T.
template <typename T>
struct Partials {
  T *dk = nullptr, *dq = nullptr;
  int64_t numbers = 0;
};

template <typename T>
void backward_task(const ScanArgs& args, const Task& task, const ChunkSizes<T>& size, int64_t most_chunks,
                   const Partials<T>& partial, void* scratch) {
  Arena arena(scratch);
  BackwardBuffers<T> b(arena, size, task.heads, most_chunks);
  double* crossing = arena.take<double>(size.steps);
  const Sequence seq = sequence_of(args, task.sequence);
  const int64_t chunks = (seq.stop - seq.start + size.steps - 1) / size.steps;
  const size_t numbers = size_t(size.p) * size.n_row;
  const int64_t state_row = (task.sequence * args.heads + task.first_head) * args.width;

  recompute_states(args, task, seq, chunks, b, size);
  fill_zero(b.g_t, size_t(size.n) * size.p_row);
  fill_zero(b.g, task.heads * numbers);
  const T* dfinal = static_cast<const T*>(args.dfinal_state) + state_row * args.state;
  for (int64_t i = 0; i < task.heads * args.width; ++i)
    std::memcpy(b.g + i * size.n_row, dfinal + i * size.n, size.n * sizeof(T));

  if (args.skip)
    fill_zero(static_cast<T*>(args.dskip) + state_row, task.heads * args.width);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    read_chunk(b.k, size.n_row, args.k, args.dtype, args.k_strides, task.group, chunk, size.rank, size.n);
    read_chunk(b.q, size.n_row, args.q, args.dtype, args.q_strides, task.group, chunk, size.rank, size.n);
    if (round_up<T>(rows) > rows) fill_zero(b.q_t, size_t(size.n) * size.rows_row);
    transpose(b.q_t, size.rows_row, b.q, size.n_row, rows, size.n);
    chunk_scores(b.scores, b.k, b.q_t, rows, size);
    fill_zero(b.dscores, size_t(rows) * size.rows_row);
    fill_zero(b.dk, size_t(rows) * size.n_row);
    fill_zero(b.dq, size_t(rows) * size.n_row);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last = e + 1 == task.heads;
      RowPrefetch next_v, next_dy;
      if (!last || c > 0) {
        const Chunk next = last ? chunk_of(seq, c - 1, size.steps) : chunk;
        const int64_t head = task.first_head + (last ? 0 : e + 1);
        next_v = prefetch_of(args.v, args.dtype, args.v_strides, head, next, size.rank, size.p);
        next_dy = prefetch_of(args.dy, args.dtype, args.dy_strides, head, next, size.rank, size.p);
      }
      backward_head(args, chunk, task.sequence, task.first_head + e, b.entering + (e * chunks + c) * numbers, b.g + e * numbers,
                    crossing, next_v, next_dy, b, size);
    }
    Gemm<T> dq{b.dscores, 1, size.rows_row, b.k, size.n_row, b.dq, size.n_row, rows, size.n_cols, rows};
    dq.c_in = b.dq;
    dq.span = Span::kDepthUpToRow;
    dq.rank = size.rank;
    gemm(dq);
    Gemm<T> dk{b.dscores, size.rows_row, 1, b.q, size.n_row, b.dk, size.n_row, rows, size.n_cols, rows};
    dk.c_in = b.dk;
    dk.span = Span::kDepthFromRow;
    dk.rank = size.rank;
    gemm(dk);
    const int64_t dtype = partial.dk ? (sizeof(T) == 8 ? kFloat64 : kFloat32) : args.dtype;
    void* dk_target = partial.dk ? partial.dk + task.block * partial.numbers : args.dk;
    void* dq_target = partial.dq ? partial.dq + task.block * partial.numbers : args.dq;
    write_chunk(dk_target, b.dk, size.n_row, dtype, args, task.group, args.groups, chunk, size.n);
    write_chunk(dq_target, b.dq, size.n_row, dtype, args, task.group, args.groups, chunk, size.n);
  }
  T* dinitial = static_cast<T*>(args.dinitial_state) + state_row * args.state;
  for (int64_t i = 0; i < task.heads * args.width; ++i)
    std::memcpy(dinitial + i * size.n, b.g + i * size.n_row, size.n * sizeof(T));
}

// target = sum over blocks of partial, always in the same order.
template <typename T>
bool sum_partials(void* target, const T* partial, int64_t blocks, int64_t numbers, int64_t width, const ScanArgs& args) {
  const int64_t rows = width ? numbers / width : 0, rows_per_task = 256;
  return run_tasks((rows + rows_per_task - 1) / rows_per_task, args.threads, width * sizeof(T),
                   [&](int64_t index, void* scratch) {
                     T* sum = static_cast<T*>(scratch);
                     const int64_t stop = (index + 1) * rows_per_task < rows ? (index + 1) * rows_per_task : rows;
                     for (int64_t row = index * rows_per_task; row < stop; ++row) {
                       std::memcpy(sum, partial + row * width, width * sizeof(T));
                       for (int64_t block = 1; block < blocks; ++block)
                         for (int64_t i = 0; i < width; ++i) sum[i] += partial[block * numbers + row * width + i];
                       write_row(static_cast<char*>(target) + row * width * size_of(args.dtype), sum, args.dtype,
                                 static_cast<int>(width));
                     }
                   });
}

template <typename T>
bool scan_backward(const ScanArgs& args) {
  const ChunkSizes<T> size(args);
  const HeadBlocks blocks(args, kBackwardHeads);
  if (blocks.tasks(args) == 0) return true;
  const int64_t most_chunks = (longest_sequence(args) + size.steps - 1) / size.steps;
  Arena count;
  BackwardBuffers<T>(count, size, blocks.block, most_chunks);
  count.take<double>(size.steps);

  Partials<T> partial;
  partial.numbers = args.batch * args.time * args.rank * args.groups * args.state;
  const Scratch sums(blocks.blocks_per_group > 1 ? 2 * blocks.blocks_per_group * partial.numbers * sizeof(T) : 0);
  if (!sums.get()) return false;
  if (blocks.blocks_per_group > 1) {
    partial.dk = static_cast<T*>(sums.get());
    partial.dq = partial.dk + blocks.blocks_per_group * partial.numbers;
  }
  const bool ok = run_tasks(blocks.tasks(args), args.threads, count.used(), [&](int64_t index, void* scratch) {
    backward_task<T>(args, Task(blocks, args, index), size, most_chunks, partial, scratch);
  });
  if (!ok || !partial.dk) return ok;
  return sum_partials(args.dk, partial.dk, blocks.blocks_per_group, partial.numbers, args.state, args) &&
         sum_partials(args.dq, partial.dq, blocks.blocks_per_group, partial.numbers, args.state, args);
}

}  // namespace ANYMAMBA_ISA
