// The scan's forward: chunk after chunk, the state of a head held transposed, (n, p), in cache.
#pragma once

#include "scan/scan_keys.h"
#include "scan/state.h"

namespace ANYMAMBA_ISA {

template <typename T>
struct ForwardBuffers {
  Keys<T> keys;
  T* scores;                                // of the group or head: (rows, rows)
  T *v, *weighted, *y, *skip, *rank_weight;  // of a head: (rows, p), (rows, rows), (rows, p), (p), (p)
  T* states;                                // (heads of the block, n, p)
  double* rotations;                        // (heads of the block), running
  Decay<T> decay;
  Weights<T> weights;

  ForwardBuffers(Arena& arena, const ScanArgs& args, const ChunkSizes<T>& s, int64_t heads)
      : keys(arena, args, s, heads),
        scores(arena.take<T>(size_t(s.rows) * s.rows_row)),
        v(arena.take<T>(size_t(s.rows) * s.p_row)),
        weighted(arena.take<T>(size_t(s.rows) * s.rows_row)),
        y(arena.take<T>(size_t(s.rows) * s.p_row)),
        skip(arena.take<T>(s.p_row)),
        rank_weight(arena.take<T>(s.p_row)),
        states(arena.take<T>(size_t(heads) * s.n * s.p_row)),
        rotations(arena.take<double>(size_t(heads) * s.rotation.state)),
        decay(arena, s),
        weights(arena, s) {}
};

// weighted[j, i] = scores[j, i] * decay from j to i * weight of j, and zero where i comes before j.
template <typename T>
void weighted_scores(T* weighted, const T* scores, const Decay<T>& decay, const Weights<T>& weights, int rows,
                     const ChunkSizes<T>& size) {
  const int cols = round_up<T>(rows);
  for (int j = 0; j < rows; ++j) {
    const ptrdiff_t row = j * static_cast<ptrdiff_t>(size.rows_row);
    const int next_step = (j / size.rank + 1) * size.rank;
    const T later = weights.later[j], own = weights.own[j];
    int i = first_vector<T>(j, size.rank);
    fill_zero(weighted + row, i);
    for (; i < next_step; i += kLanes<T>) {
      const Vec<T> weight = decay.after(j, i) ? later * decay.between(j, i) : broadcast(own);
      store(weighted + row + i, decay.at_or_after(j, i) ? load(scores + row + i) * weight : Vec<T>{});
    }
    for (; i < cols; i += kLanes<T>)
      store(weighted + row + i, load(scores + row + i) * (later * decay.between(j, i)));
  }
}

template <typename T>
void forward_head(const ScanArgs& args, const Chunk& chunk, const Sequence& seq, int64_t head, T* state,
                  RowPrefetch& next_v, RowPrefetch& next_y, ForwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const int rows = chunk.steps * size.rank;
  b.decay.read(args, chunk, head, size.rank);
  b.weights.read(args, chunk, seq, head, size.rank);
  read_values(b.v, b.rank_weight, args, chunk, head, size);
  weighted_scores(b.weighted, b.scores, b.decay, b.weights, rows, size);

  // y = decayed (q S) + W v + skip v, written to the result directly if it needs no conversion.
  const bool in_place = writes_in_place<T>(args, size);
  const ptrdiff_t y_row = in_place ? args.heads * args.width : size.p_row;
  T* y = in_place ? static_cast<T*>(args.y) + first_row(args, chunk) * y_row + head * args.width : b.y;
  Gemm<T> read{b.keys.q, 1, size.rows_row, state, size.p_row, y, y_row, rows, size.p_cols, size.n};
  read.row_scale = b.decay.from_start;
  read.second = {b.weighted, 1, size.rows_row, b.v, size.p_row, rows};
  read.span = Span::kDepthUpToRow;
  read.rank = size.rank;
  if (args.skip) {
    read_parameters(b.skip, args.skip, head, size.p);
    read.addend = {b.v, size.p_row};
    read.addend_scale = b.skip;
  }
  gemm(read);
  if (!in_place) write_chunk(args.y, b.y, size.p_row, args.dtype, args, head, args.heads, chunk, size.p);

  for (int i = 0; i < rows; ++i) b.decay.to_end[i] *= b.weights.later[i];
  scale_rows(b.v, b.v, b.decay.to_end, rows, size.p_cols, size.p_row);
  Gemm<T> add{b.keys.k, size.rows_row, 1, b.v, size.p_row, state, size.p_row, size.n, size.p_cols, rows};
  add.c_in = {state, size.p_row};
  add.c_in_scale = b.decay.kept;
  add.ahead = &next_v;
  add.ahead_too = &next_y;
  gemm(add);
}

template <typename T>
void forward_task(const ScanArgs& args, const Task& task, const ChunkSizes<T>& size, void* scratch) {
  Arena arena(scratch);
  ForwardBuffers<T> b(arena, args, size, task.heads);
  const Sequence seq = sequence_of(args, task.sequence);
  const int64_t last = last_step(args, task.sequence), first_lane = task.sequence * args.heads + task.first_head;
  const size_t state_numbers = size_t(size.n) * size.p_row;
  const auto outer_state = [&](auto* base, int64_t e) { return base + (first_lane + e) * args.width * args.state; };

  b.keys.start(task);
  fill_zero(b.states, task.heads * state_numbers);
  for (int64_t e = 0; e < task.heads; ++e)
    transpose(b.states + e * state_numbers, size.p_row, outer_state(static_cast<const T*>(args.initial_state), e),
              size.n, size.p, size.n);
  if (args.k_bias)
    for (int64_t e = 0; e < task.heads; ++e) {
      read_rotation(b.rotations + e * size.rotation.state, args.initial_rotation, first_lane + e, args, size.rotation);
      if (last < seq.start) b.keys.clear_last(task.sequence, task.first_head + e);
    }
  const int64_t chunks = (seq.stop - seq.start + size.steps - 1) / size.steps;
  for (int64_t c = 0; c < chunks; ++c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    b.keys.read_group_keys(chunk, task.group);
    b.keys.read_group_queries(chunk, task.group);
    if (!args.k_bias) chunk_scores(b.scores, b.keys.k, b.keys.q, rows, size);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last_head = e + 1 == task.heads;
      const int64_t head = task.first_head + e;
      RowPrefetch next_v, next_y;
      if (!last_head || c + 1 < chunks) {
        const Chunk next = last_head ? chunk_of(seq, c + 1, size.steps) : chunk;
        const int64_t next_head = last_head ? task.first_head : head + 1;
        next_v = prefetch_of(args.v, args.dtype, args.v_strides, next_head, next, size.rank, size.p);
        next_y = prefetch_result(args.y, args, next_head, next, size.rank, size.p);
      }
      if (args.k_bias) {
        b.keys.rotations.advance(args, chunk, head, b.rotations + e * size.rotation.state, size);
        b.keys.rotate_head_keys(e, rows);
        b.keys.rotate_head_queries(e, rows);
        if (last >= chunk.start && last < chunk.start + chunk.steps)
          b.keys.write_last(chunk, last, task.sequence, head);
        chunk_scores(b.scores, b.keys.k, b.keys.q, rows, size);
      }
      forward_head(args, chunk, seq, head, b.states + e * state_numbers, next_v, next_y, b, size);
    }
  }
  for (int64_t e = 0; e < task.heads; ++e) {
    transpose(outer_state(static_cast<T*>(args.final_state), e), size.n, b.states + e * state_numbers, size.p_row,
              size.n, size.p);
    if (args.k_bias)
      write_rotation(args.final_rotation, b.rotations + e * size.rotation.state, first_lane + e, args, size.rotation);
  }
}

// Sequences of one step: the state of a head is updated in place.
template <typename T>
struct StepBuffers {
  RotationSizes<T> sizes;
  double *rotation, *vectors;
  T *quarter, *rest, *components;
  T *k, *q, *v, *values, *weight, *y;

  StepBuffers(Arena& arena, const ScanArgs& args) : sizes(args) {
    const int64_t n = round_up<T>(static_cast<int>(args.state)), p = round_up<T>(static_cast<int>(args.width));
    rotation = arena.take<double>(sizes.state), vectors = arena.take<double>(4 * sizes.lanes);
    quarter = arena.take<T>(sizes.lanes), rest = arena.take<T>(sizes.lanes), components = arena.take<T>(sizes.parts);
    k = arena.take<T>(args.rank * n), q = arena.take<T>(args.rank * n);
    v = arena.take<T>(args.rank * p), values = arena.take<T>(args.rank * args.width);
    weight = arena.take<T>(p), y = arena.take<T>(args.rank * args.width);
  }
};

// The rotation of a head after its step, and with it its keys and queries, biased and rotated.
template <typename T>
void rotate_step(const ScanArgs& args, const Chunk& chunk, int64_t sequence, int64_t head, StepBuffers<T>& b) {
  const int n = static_cast<int>(args.state), row = round_up<T>(n), rotations = b.sizes.count, lanes = b.sizes.lanes;
  const int64_t sequence_head = sequence * args.heads + head;
  read_rotation(b.rotation, args.initial_rotation, sequence_head, args, b.sizes);
  for (int s = rotations; s < lanes; ++s) b.quarter[s] = b.rest[s] = 0;
  const double dt = static_cast<double>(*at_step<T>(args.dt, args, chunk.batch, chunk.start, head));
  const T* rate = ChunkRotations<T>::rates(args, chunk.batch, chunk.start, head, b.sizes);
  if (b.sizes.quaternion)
    advance_quaternions(b.rotation, rate, dt, rotations, lanes, b.vectors, b.components, b.quarter, b.rest);
  else
    advance_angles(b.rotation, rate, dt, rotations, b.quarter, b.rest, b.components, b.components + lanes);
  write_rotation(args.final_rotation, b.rotation, sequence_head, args, b.sizes);
  const bool is_real = !args.lengths || args.lengths[sequence] > 0;
  for (int64_t r = 0; r < args.rank; ++r) {
    T* const rows[2] = {b.k + r * row, b.q + r * row};
    const void* const biases[2] = {args.k_bias, args.q_bias};
    for (int side = 0; side < 2; ++side) {
      const T* bias = static_cast<const T*>(biases[side]) + (head * args.rank + r) * n;
      for (int c = 0; c < n; ++c) rows[side][c] += bias[c];
      if (b.sizes.quaternion)
        rotate_blocks(rows[side], b.components, rotations, lanes);
      else
        rotate_pairs(rows[side], b.components, b.components + lanes, rotations, n, args.rotation == kInterleaved);
    }
    char* last = static_cast<char*>(args.last_k) +
                 ((sequence * args.rank + r) * args.heads + head) * n * static_cast<int64_t>(size_of(args.dtype));
    if (is_real)
      write_row(last, rows[0], args.dtype, n);
    else
      std::memset(last, 0, n * size_of(args.dtype));
  }
}

template <typename T>
void forward_step(const ScanArgs& args, int64_t sequence, int64_t head, void* scratch) {
  Arena arena(scratch);
  StepBuffers<T> b(arena, args);
  const Sequence seq = sequence_of(args, sequence);
  const Chunk chunk{seq.batch, seq.start, 1};
  const int rank = static_cast<int>(args.rank), n = static_cast<int>(args.state), p = static_cast<int>(args.width);
  const int n_row = round_up<T>(n), p_row = round_up<T>(p);
  const int64_t group = head / (args.heads / args.groups);
  read_chunk(b.k, n_row, args.k, args.dtype, args.k_strides, group, chunk, rank, n);
  read_chunk(b.q, n_row, args.q, args.dtype, args.q_strides, group, chunk, rank, n);
  read_chunk(b.v, p_row, args.v, args.dtype, args.v_strides, head, chunk, rank, p);
  if (args.k_bias) rotate_step(args, chunk, sequence, head, b);
  T scale = 1;
  if (args.gamma)
    scale = *at_step<T>(args.gamma, args, chunk.batch, chunk.start, head);
  else if (args.scale)
    scale = static_cast<const T*>(args.scale)[chunk.batch * args.scale_strides[0] + chunk.start * args.scale_strides[1] +
                                              head * args.scale_strides[2]];
  for (int r = 0; r < rank; ++r)
    for (int c = 0; c < p; ++c) {
      if (args.value_weight) b.v[r * p_row + c] *= static_cast<const T*>(args.value_weight)[(head * rank + r) * p + c];
      b.values[r * p + c] = scale * b.v[r * p_row + c];
    }
  const int64_t at = (sequence * args.heads + head) * p * n;
  const T log_decay = static_cast<const T*>(args.log_decay)[chunk.batch * args.log_decay_strides[0] +
                                                            chunk.start * args.log_decay_strides[1] +
                                                            head * args.log_decay_strides[2]];
  HeadState<T> state;
  state.before = static_cast<const T*>(args.initial_state) + at;
  state.after = static_cast<T*>(args.final_state) + at;
  state.p = p, state.n = n, state.stride = n_row;
  state.decay = exp_nonpositive_scalar(log_decay, kMinExponent<T>);
  state.values = b.values, state.keys = b.k, state.queries = b.q, state.y = b.y;
  advance_state(state, rank, rank);
  const T* skip = args.skip ? static_cast<const T*>(args.skip) + head * p : nullptr;
  for (int r = 0; r < rank; ++r)
    for (int c = 0; skip && c < p; ++c) b.y[r * p + c] += skip[c] * b.v[r * p_row + c];
  write_chunk(args.y, b.y, p, args.dtype, args, head, args.heads, chunk, p);
}

template <typename T>
bool forward_steps(const ScanArgs& args) {
  Arena count;
  StepBuffers<T>(count, args);
  const int64_t heads = 4, blocks = (args.heads + heads - 1) / heads;  // of a task
  return run_tasks(args.sequences * blocks, args.threads, count.used(), [&](int64_t index, void* scratch) {
    const int64_t first = index % blocks * heads, stop = first + heads < args.heads ? first + heads : args.heads;
    for (int64_t head = first; head < stop; ++head) forward_step<T>(args, index / blocks, head, scratch);
  });
}

template <typename T>
bool scan_forward(const ScanArgs& args) {
  if (longest_sequence(args) == 1) return forward_steps<T>(args);
  const ChunkSizes<T> size(args);
  // A head's numbers do not depend on the block that it is computed in, so blocks may shrink to occupy the threads.
  int64_t heads = 6;
  while (heads > 1 && HeadBlocks(args, heads).tasks(args) < 2 * args.threads) heads /= 2;
  const HeadBlocks blocks(args, heads);
  Arena count;
  ForwardBuffers<T>(count, args, size, blocks.block);
  return run_tasks(blocks.tasks(args), args.threads, count.used(), [&](int64_t index, void* scratch) {
    forward_task<T>(args, Task(blocks, args, index), size, scratch);
  });
}

}  // namespace ANYMAMBA_ISA
