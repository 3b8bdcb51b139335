// The scan's forward: chunk after chunk, the state of a head held transposed, (n, p), in cache.
#pragma once

#include "scan_chunk.h"

namespace ANYMAMBA_ISA {

template <typename T>
struct ForwardBuffers {
  T *k, *q, *q_t, *scores;    // of the group: (rows, n), (rows, n), (n, rows), (rows, rows)
  T *v, *weights, *y;         // of a head: (rows, p), (rows, rows), (rows, p)
  T *scale, *skip;            // of a head: (rows), (p)
  T* states;                  // (heads of the block, n, p)
  Decay<T> decay;

  ForwardBuffers(Arena& arena, const ChunkSizes<T>& s, int64_t heads)
      : k(arena.take<T>(size_t(s.rows) * s.n_row)),
        q(arena.take<T>(size_t(s.rows) * s.n_row)),
        q_t(arena.take<T>(size_t(s.n) * s.rows_row)),
        scores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        v(arena.take<T>(size_t(s.rows) * s.p_row)),
        weights(arena.take<T>(size_t(s.rows) * s.rows_row)),
        y(arena.take<T>(size_t(s.rows) * s.p_row)),
        scale(arena.take<T>(s.rows_row)),
        skip(arena.take<T>(s.p_row)),
        states(arena.take<T>(size_t(heads) * s.n * s.p_row)),
        decay(arena, s) {}
};

// weights[j, i] = scores[j, i] * decay from j to i, and zero where i comes before j.
template <typename T>
void decayed_scores(T* weights, const T* scores, const Decay<T>& decay, int rows, const ChunkSizes<T>& size) {
  const int cols = round_up<T>(rows);
  for (int j = 0; j < rows; ++j) {
    const ptrdiff_t row = j * static_cast<ptrdiff_t>(size.rows_row);
    const int first = first_vector<T>(j, size.rank);
    fill_zero(weights + row, first);
    for (int i = first; i < cols; i += kLanes<T>) {
      const Vec<T> weight = load(scores + row + i) * decay.between(j, i);
      store(weights + row + i, decay.at_or_after(j, i) ? weight : Vec<T>{});
    }
  }
}

template <typename T>
void forward_head(const ScanArgs& args, const Chunk& chunk, int64_t head, T* state, RowPrefetch& next_v,
                  ForwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank;
  b.decay.read(args, chunk, head, size.rank);
  read_chunk(b.v, size.p_row, args.v, args.dtype, args.v_strides, head, chunk, size.rank, size.p);
  decayed_scores(b.weights, b.scores, b.decay, rows, size);

  Gemm<T> read{b.q, size.n_row, 1, state, size.p_row, b.y, size.p_row, rows, size.p_cols, size.n};
  read.row_scale = b.decay.from_start;
  if (args.skip) {
    read_skip(b.skip, args, head);
    for (int i = 0; i < rows; ++i)
      for (int c = 0; c < size.p_cols; c += kLanes<T>) {
        const ptrdiff_t at = i * static_cast<ptrdiff_t>(size.p_row) + c;
        store(b.y + at, load(b.skip + c) * load(b.v + at));
      }
    read.c_in = b.y;
  }
  if (args.scale) {
    read_scale(b.scale, args, chunk, head, size.rank);
    scale_rows(b.v, b.v, b.scale, rows, size.p_cols, size.p_row);
  }
  gemm(read);
  Gemm<T> within{b.weights, 1, size.rows_row, b.v, size.p_row, b.y, size.p_row, rows, size.p_cols, rows};
  within.c_in = b.y;
  within.span = Span::kDepthUpToRow;
  within.rank = size.rank;
  gemm(within);
  write_chunk(args.y, b.y, size.p_row, args.dtype, args, head, args.heads, chunk, size.p);

  scale_rows(b.v, b.v, b.decay.to_end, rows, size.p_cols, size.p_row);
  Gemm<T> add{b.k, 1, size.n_row, b.v, size.p_row, state, size.p_row, size.n, size.p_cols, rows};
  add.c_in = state;
  add.c_in_scale = b.decay.kept;
  add.ahead = &next_v;
  gemm(add);
}

template <typename T>
void forward_task(const ScanArgs& args, const Task& task, const ChunkSizes<T>& size, void* scratch) {
  Arena arena(scratch);
  ForwardBuffers<T> b(arena, size, task.heads);
  const Sequence seq = sequence_of(args, task.sequence);
  const size_t state_numbers = size_t(size.n) * size.p_row;
  const auto outer_state = [&](auto* base, int64_t head) {
    return base + (task.sequence * args.heads + task.first_head + head) * args.width * args.state;
  };

  fill_zero(b.states, task.heads * state_numbers);
  if (args.initial_state)
    for (int64_t e = 0; e < task.heads; ++e)
      transpose(b.states + e * state_numbers, size.p_row, outer_state(static_cast<const T*>(args.initial_state), e),
                size.n, size.p, size.n);
  const int64_t chunks = (seq.stop - seq.start + size.steps - 1) / size.steps;
  for (int64_t c = 0; c < chunks; ++c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    read_chunk(b.k, size.n_row, args.k, args.dtype, args.k_strides, task.group, chunk, size.rank, size.n);
    read_chunk(b.q, size.n_row, args.q, args.dtype, args.q_strides, task.group, chunk, size.rank, size.n);
    if (round_up<T>(rows) > rows) fill_zero(b.q_t, size_t(size.n) * size.rows_row);
    transpose(b.q_t, size.rows_row, b.q, size.n_row, rows, size.n);
    chunk_scores(b.scores, b.k, b.q_t, rows, size);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last = e + 1 == task.heads;
      RowPrefetch next_v;
      if (!last || c + 1 < chunks)
        next_v = prefetch_of(args.v, args.dtype, args.v_strides, task.first_head + (last ? 0 : e + 1),
                             last ? chunk_of(seq, c + 1, size.steps) : chunk, size.rank, size.p);
      forward_head(args, chunk, task.first_head + e, b.states + e * state_numbers, next_v, b, size);
    }
  }
  for (int64_t e = 0; e < task.heads; ++e)
    transpose(outer_state(static_cast<T*>(args.final_state), e), size.n, b.states + e * state_numbers, size.p_row,
              size.n, size.p);
}

template <typename T>
bool scan_forward(const ScanArgs& args) {
  const ChunkSizes<T> size(args);
  // A head's numbers do not depend on the block that it is computed in, so blocks may shrink to occupy the threads.
  int64_t heads = 6;
  while (heads > 1 && HeadBlocks(args, heads).tasks(args) < 2 * args.threads) heads /= 2;
  const HeadBlocks blocks(args, heads);
  Arena count;
  ForwardBuffers<T>(count, size, blocks.block);
  return run_tasks(blocks.tasks(args), args.threads, count.used(), [&](int64_t index, void* scratch) {
    forward_task<T>(args, Task(blocks, args, index), size, scratch);
  });
}

}  // namespace ANYMAMBA_ISA
