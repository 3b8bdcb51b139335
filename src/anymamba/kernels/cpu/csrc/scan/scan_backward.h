// The scan's backward: the states that enter the chunks are recomputed, then the chunks are visited from last to first.
#pragma once

#include "scan/scan_backward_head.h"

namespace ANYMAMBA_ISA {

// Heads whose key and query gradients are summed in one task. It fixes the order of the sum, so it must depend neither
// on the number of threads nor on the batch. With more heads, fewer blocks are summed and a task reads the keys less
// often, but there are fewer tasks, and each keeps more states.
constexpr int64_t kBackwardHeads = 4;

// Fills b.entering: H_0 = initial state, H_{c+1} = kept H_c + k (w rho v), and b.rotations.
template <typename T>
void recompute_states(const ScanArgs& args, const Task& task, const Sequence& seq, int64_t chunks,
                      BackwardBuffers<T>& b, const ChunkSizes<T>& size) {
  const size_t numbers = size_t(size.n) * size.p_row;
  for (int64_t e = 0; e < task.heads; ++e) {
    T* first = b.entering + e * chunks * numbers;
    const int64_t sequence_head = task.sequence * args.heads + task.first_head + e;
    fill_zero(first, numbers);
    transpose(first, size.p_row, static_cast<const T*>(args.initial_state) + sequence_head * args.width * args.state,
              size.n, size.p, size.n);
    if (args.k_bias)
      read_rotation(b.rotations + e * chunks * size.rotation.state, args.initial_rotation, sequence_head, args,
                    size.rotation);
  }
  for (int64_t c = 0; c + 1 < chunks; ++c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    b.keys.read_group_keys(chunk, task.group);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last = e + 1 == task.heads;
      const int64_t head = task.first_head + e;
      RowPrefetch next_v = prefetch_of(args.v, args.dtype, args.v_strides, last ? task.first_head : head + 1,
                                       last ? chunk_of(seq, c + 1, size.steps) : chunk, size.rank, size.p);
      if (args.k_bias) {
        double* rotation = b.rotations + (e * chunks + c) * size.rotation.state;
        std::memcpy(rotation + size.rotation.state, rotation, size.rotation.state * sizeof(double));
        b.keys.rotations.advance(args, chunk, head, rotation + size.rotation.state, size);
        b.keys.rotate_head_keys(e, rows);
      }
      b.decay.read(args, chunk, head, size.rank);
      b.weights.read(args, chunk, seq, head, size.rank);
      read_values(b.v, b.rank_weight, args, chunk, head, size);
      for (int i = 0; i < rows; ++i) b.decay.to_end[i] *= b.weights.later[i];
      scale_rows(b.v, b.v, b.decay.to_end, rows, size.p_cols, size.p_row);
      T* state = b.entering + (e * chunks + c) * numbers;
      Gemm<T> add{b.keys.k, size.rows_row, 1, b.v, size.p_row, state + numbers, size.p_row, size.n, size.p_cols, rows};
      add.c_in = {state, size.p_row};
      add.c_in_scale = b.decay.kept;
      add.ahead = &next_v;
      gemm(add);
    }
  }
}

// The destination of a task's sums over heads: the results if there is one block, else `partial`, one tensor of T per
// block.
template <typename T>
struct Partials {
  T *dk = nullptr, *dq = nullptr, *drate = nullptr;
  int64_t numbers = 0, rate_numbers = 0;
};

// Writes a chunk's key or query gradients, (n, rows).
template <typename T>
void write_keys(void* target, T* partial, const Partials<T>& partials, const T* source, const ScanArgs& args,
                const Task& task, const Chunk& chunk, T* rows_buffer, const ChunkSizes<T>& size) {
  transpose(rows_buffer, size.n_row, source, size.rows_row, size.n, chunk.steps * size.rank);
  if (partial)
    write_chunk(partial + task.block * partials.numbers, rows_buffer, size.n_row, own_dtype<T>(), args, task.group,
                args.groups, chunk, size.n);
  else
    write_chunk(target, rows_buffer, size.n_row, args.dtype, args, task.group, args.groups, chunk, size.n);
}

template <typename T>
void backward_task(const ScanArgs& args, const Task& task, const ChunkSizes<T>& size, int64_t most_chunks,
                   const Partials<T>& partial, void* scratch) {
  Arena arena(scratch);
  BackwardBuffers<T> b(arena, args, size, task.heads, most_chunks);
  T* rows_buffer = arena.take<T>(size_t(size.rows) * size.n_row);
  const Sequence seq = sequence_of(args, task.sequence);
  const int64_t chunks = (seq.stop - seq.start + size.steps - 1) / size.steps, last = last_step(args, task.sequence);
  const size_t numbers = size_t(size.n) * size.p_row, key_numbers = size_t(size.n) * size.rows_row;
  const int64_t first_sequence_head = task.sequence * args.heads + task.first_head;
  const bool shared_rates = size.rotation.count && !size.rotation.quaternion;
  const int64_t all_block = task.group * HeadBlocks(args, kBackwardHeads).blocks_per_group + task.block;

  b.keys.start(task);
  recompute_states(args, task, seq, chunks, b, size);
  fill_zero(b.g, task.heads * numbers);
  for (int64_t e = 0; e < task.heads; ++e) {
    const int64_t sequence_head = first_sequence_head + e;
    transpose(b.g + e * numbers, size.p_row,
              static_cast<const T*>(args.dfinal_state) + sequence_head * args.width * args.state, size.n, size.p,
              size.n);
  }
  if (args.k_bias) {
    b.drotations.clear(size);
    fill_zero(b.dk_bias, task.heads * b.keys.pattern_numbers());
    fill_zero(b.dq_bias, task.heads * b.keys.pattern_numbers());
  }
  if (args.skip) fill_zero(static_cast<T*>(args.dskip) + first_sequence_head * args.width, task.heads * args.width);
  if (args.value_weight)
    fill_zero(static_cast<T*>(args.dvalue_weight) + first_sequence_head * args.rank * args.width,
              task.heads * args.rank * args.width);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    const Chunk chunk = chunk_of(seq, c, size.steps);
    const int rows = chunk.steps * size.rank;
    b.keys.read_group_keys(chunk, task.group);
    b.keys.read_group_queries(chunk, task.group);
    if (!args.k_bias) {
      chunk_scores(b.scores, b.keys.k, b.keys.q, rows, size);
      fill_zero(b.dscores, size_t(rows) * size.rows_row);
    }
    fill_zero(b.dgroup_k, key_numbers);
    fill_zero(b.dgroup_q, key_numbers);
    if (shared_rates) fill_zero(b.drotations.drate, size_t(size.steps) * size.rotation.lanes);
    for (int64_t e = 0; e < task.heads; ++e) {
      const bool last_head = e + 1 == task.heads;
      const int64_t head = task.first_head + e;
      const T* state = b.entering + (e * chunks + c) * numbers;
      HeadChunk<T> at{chunk, seq, task.sequence, head, state, b.g + e * numbers, {}, {}};
      if (!last_head || c > 0) {
        const Chunk next = last_head ? chunk_of(seq, c - 1, size.steps) : chunk;
        const int64_t next_head = last_head ? task.first_head : head + 1;
        at.next_v = prefetch_of(args.v, args.dtype, args.v_strides, next_head, next, size.rank, size.p);
        at.next_dy = prefetch_of(args.dy, args.dtype, args.dy_strides, next_head, next, size.rank, size.p);
      }
      if (args.k_bias) {
        std::memcpy(b.rotation, b.rotations + (e * chunks + c) * size.rotation.state,
                    size.rotation.state * sizeof(double));
        b.keys.rotations.advance(args, chunk, head, b.rotation, size);
        if (c + 1 == chunks)
          read_drotation(b.drotations.sum + e * size.rotation.axes, b.rotation, first_sequence_head + e, args,
                         size.rotation);
        b.keys.rotate_head_keys(e, rows);
        b.keys.rotate_head_queries(e, rows);
        chunk_scores(b.scores, b.keys.k, b.keys.q, rows, size);
        fill_zero(b.dscores, size_t(rows) * size.rows_row);
      }
      backward_head(args, at, b, size);
      if (args.k_bias) {
        backward_keys(b.dk, b.dq, rows, b, size);
        if (last >= chunk.start && last < chunk.start + chunk.steps)
          b.keys.add_last(b.dk, chunk, last, task.sequence, head);
        b.keys.rotate_backward_keys(b.dk, b.dgroup_k, b.dk_bias + e * b.keys.pattern_numbers(), b.drotations.rows,
                                    rows);
        b.keys.rotate_backward_queries(b.dq, b.dgroup_q, b.dq_bias + e * b.keys.pattern_numbers(), b.drotations.rows,
                                       rows);
        b.drotations.backward_chunk(args, chunk, head, b.drotations.sum + e * size.rotation.axes,
                                    b.rotations + (e * chunks + c) * size.rotation.state, b.keys.rotations, size);
      }
    }
    if (!args.k_bias) backward_keys(b.dgroup_k, b.dgroup_q, rows, b, size);
    write_keys(args.dk, partial.dk, partial, b.dgroup_k, args, task, chunk, rows_buffer, size);
    write_keys(args.dq, partial.dq, partial, b.dgroup_q, args, task, chunk, rows_buffer, size);
    if (shared_rates) {
      T* drate = partial.drate ? partial.drate + all_block * partial.rate_numbers : static_cast<T*>(args.drate);
      for (int l = 0; l < chunk.steps; ++l)
        std::memcpy(drate + (chunk.batch * args.time + chunk.start + l) * args.rates,
                    b.drotations.drate + l * ptrdiff_t(size.rotation.lanes), args.rates * sizeof(T));
    }
  }
  for (int64_t e = 0; e < task.heads; ++e) {
    const int64_t sequence_head = first_sequence_head + e;
    transpose(static_cast<T*>(args.dinitial_state) + sequence_head * args.width * args.state, size.n, b.g + e * numbers,
              size.p_row, size.n, size.p);
    if (!args.k_bias) continue;
    b.keys.gather_bias(args.dk_bias, sequence_head, b.dk_bias + e * b.keys.pattern_numbers());
    b.keys.gather_bias(args.dq_bias, sequence_head, b.dq_bias + e * b.keys.pattern_numbers());
    write_dstart(b.drotations.sum + e * size.rotation.axes, b.rotations + e * chunks * size.rotation.state,
                 sequence_head, args, size.rotation);
  }
}

// target = sum over blocks of partial, always in the same order.
template <typename T>
bool sum_partials(void* target, int64_t dtype, const T* partial, int64_t blocks, int64_t numbers, int64_t width,
                  int64_t threads) {
  const int64_t rows = width ? numbers / width : 0, rows_per_task = 256;
  return run_tasks((rows + rows_per_task - 1) / rows_per_task, threads, width * sizeof(T),
                   [&](int64_t index, void* scratch) {
                     T* sum = static_cast<T*>(scratch);
                     const int64_t stop = (index + 1) * rows_per_task < rows ? (index + 1) * rows_per_task : rows;
                     for (int64_t row = index * rows_per_task; row < stop; ++row) {
                       std::memcpy(sum, partial + row * width, width * sizeof(T));
                       for (int64_t block = 1; block < blocks; ++block)
                         for (int64_t i = 0; i < width; ++i) sum[i] += partial[block * numbers + row * width + i];
                       write_row(static_cast<char*>(target) + row * width * size_of(dtype), sum, dtype,
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
  BackwardBuffers<T>(count, args, size, blocks.block, most_chunks);
  count.take<T>(size_t(size.rows) * size.n_row);

  const int64_t in_group = blocks.blocks_per_group, in_all = args.groups * in_group;
  Partials<T> partial;
  partial.numbers = args.batch * args.time * args.rank * args.groups * args.state;
  const bool shared_rates = size.rotation.count && !size.rotation.quaternion;  // across heads, whose gradients are summed
  partial.rate_numbers = shared_rates ? args.batch * args.time * args.rates : 0;
  Arena counted;
  if (in_group > 1) counted.take<T>(in_group * partial.numbers), counted.take<T>(in_group * partial.numbers);
  if (shared_rates && in_all > 1) counted.take<T>(in_all * partial.rate_numbers);
  const Scratch sums(counted.used());
  if (!sums.get()) return false;
  prefer_large_pages(sums.get(), counted.used());
  Arena arena(sums.get());
  if (in_group > 1) {
    partial.dk = arena.take<T>(in_group * partial.numbers);
    partial.dq = arena.take<T>(in_group * partial.numbers);
  }
  if (shared_rates && in_all > 1) partial.drate = arena.take<T>(in_all * partial.rate_numbers);
  bool ok = run_tasks(blocks.tasks(args), args.threads, count.used(), [&](int64_t index, void* scratch) {
    backward_task<T>(args, Task(blocks, args, index), size, most_chunks, partial, scratch);
  });
  if (ok && in_group > 1)
    ok = sum_partials(args.dk, args.dtype, partial.dk, in_group, partial.numbers, args.state, args.threads) &&
         sum_partials(args.dq, args.dtype, partial.dq, in_group, partial.numbers, args.state, args.threads);
  if (ok && partial.drate)
    ok = sum_partials(args.drate, own_dtype<T>(), partial.drate, in_all, partial.rate_numbers, args.rates,
                      args.threads);
  return ok;
}

}  // namespace ANYMAMBA_ISA
