// Shared by forward and backward of the scan: sequences, chunks of them in local memory, and their decays.
//
// Letters, as in the Python sources: i, j rows of a chunk, (time, rank) fused; p head width; n state.
// Score and decay blocks are held with the key's row j outermost and the query's row i innermost, so that the running
// sums over keys that the log-decay's gradient needs are sums of whole vectors.
#pragma once

#include "simd/dtypes.h"
#include "linear/gemm.h"
#include "simd/vector_rows.h"
#include "schema.h"
#include "simd/simd.h"
#include "threads.h"

namespace ANYMAMBA_ISA {

constexpr double kMinLogDecay = -1000.0;  // a factor of zero in either precision

// exp of anything lower is exactly zero; log(smallest normal) + 18 keeps products with it free of denormals
template <typename T>
constexpr T kMinExponent = ExpRange<T>::lowest + T(18);

struct Sequence {
  int64_t batch, start, stop;
};

inline Sequence sequence_of(const ScanArgs& args, int64_t index) {
  if (args.bounds) return {0, args.bounds[index], args.bounds[index + 1]};
  return {index, 0, args.time};
}

inline int64_t longest_sequence(const ScanArgs& args) {
  int64_t longest = 0;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const Sequence seq = sequence_of(args, s);
    if (seq.stop - seq.start > longest) longest = seq.stop - seq.start;
  }
  return longest;
}

// A task is one sequence and up to `block` neighboring heads of one group, which share keys, queries and scores.
struct HeadBlocks {
  int64_t per_group, block, blocks_per_group;

  HeadBlocks(const ScanArgs& args, int64_t heads_per_block)
      : per_group(args.heads / args.groups),
        block(heads_per_block < per_group ? heads_per_block : per_group),
        blocks_per_group(per_group ? (per_group + block - 1) / block : 0) {}

  int64_t tasks(const ScanArgs& args) const { return args.sequences * args.groups * blocks_per_group; }
};

struct Task {
  int64_t sequence, group, block, first_head, heads;

  Task(const HeadBlocks& blocks, const ScanArgs& args, int64_t index) {
    block = index % blocks.blocks_per_group;
    group = index / blocks.blocks_per_group % args.groups;
    sequence = index / blocks.blocks_per_group / args.groups;
    const int64_t from = block * blocks.block;
    first_head = group * blocks.per_group + from;
    heads = blocks.per_group - from < blocks.block ? blocks.per_group - from : blocks.block;
  }
};

// The distance between rows of a matrix in local memory: whole vectors, and an odd number of cache lines, so that a
// column of a tile spreads over all sets of the cache.
template <typename T>
constexpr int row_stride(int x) {
  constexpr int line = 64 / static_cast<int>(sizeof(T));
  return ((x + line - 1) / line | 1) * line;
}

// How the keys and queries of a head are rotated: `count` pairs of channels by an angle each, or as many blocks of four
// channels by a quaternion each. Arrays hold them part by part, each part `lanes` numbers long.
template <typename T>
struct RotationSizes {
  bool quaternion;
  int count, lanes;
  int state;   // numbers of a running rotation: angles, or four parts
  int parts;   // numbers that a key is multiplied with: cosine and sine, or four
  int axes;    // numbers of its gradient: an angle, or a vector
  int parts_row, axes_row;

  explicit RotationSizes(const ScanArgs& args)
      : quaternion(args.rotation == kQuaternion),
        count(static_cast<int>(!args.k_bias ? 0 : quaternion ? args.angles / 4 : args.angles)),
        lanes(round_up<T>(count)),
        state((quaternion ? 4 : 1) * lanes),
        parts((quaternion ? 4 : 2) * lanes),
        axes((quaternion ? 3 : 1) * lanes),
        parts_row(row_stride<T>(parts)),
        axes_row(row_stride<T>(axes)) {}
};

// Sizes of a chunk's matrices, in numbers: as they are, rounded up to whole vectors (`_cols`), and as strides (`_row`).
template <typename T>
struct ChunkSizes {
  int steps, rank, rows, p, n;
  int p_cols;
  int rows_row, p_row, n_row;
  RotationSizes<T> rotation;

  explicit ChunkSizes(const ScanArgs& args)
      : steps(static_cast<int>(args.chunk_len < longest_sequence(args) ? args.chunk_len : longest_sequence(args))),
        rank(static_cast<int>(args.rank)),
        rows(steps * rank),
        p(static_cast<int>(args.width)),
        n(static_cast<int>(args.state)),
        p_cols(round_up<T>(p)),
        rows_row(row_stride<T>(rows)),
        p_row(row_stride<T>(p)),
        n_row(row_stride<T>(n)),
        rotation(args) {}
};

// Consecutive time steps of one sequence.
struct Chunk {
  int64_t batch, start;
  int steps;
};

inline Chunk chunk_of(const Sequence& seq, int64_t index, int64_t steps) {
  const int64_t start = seq.start + index * steps;
  const int64_t left = seq.stop - start;
  return {seq.batch, start, static_cast<int>(left < steps ? left : steps)};
}

// The rows of a chunk of one head or group, to prefetch.
inline RowPrefetch prefetch_of(const void* source, int64_t dtype, const int64_t* strides, int64_t lane,
                               const Chunk& chunk, int rank, int width) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(size_of(dtype));
  RowPrefetch rows;
  rows.base = static_cast<const char*>(source) +
              (chunk.batch * strides[0] + chunk.start * strides[1] + lane * strides[3]) * size;
  rows.outer_bytes = strides[1] * size;
  rows.inner_bytes = strides[2] * size;
  rows.outer = chunk.steps;
  rows.inner = rank;
  rows.row_bytes = static_cast<int>(width * size);
  return rows;
}

// The number of a chunk's first row, (batch, time, rank) fused.
inline int64_t first_row(const ScanArgs& args, const Chunk& chunk) {
  return (chunk.batch * args.time + chunk.start) * args.rank;
}

// The same of a contiguous (batch, time, rank, heads, width) result.
inline RowPrefetch prefetch_result(const void* target, const ScanArgs& args, int64_t head, const Chunk& chunk, int rank,
                                   int width) {
  const int64_t row = args.heads * args.width, strides[4] = {args.time * rank * row, rank * row, row, args.width};
  return prefetch_of(target, args.dtype, strides, head, chunk, rank, width);
}

// True if a tile may be stored to the result directly: the result has dtype T, and its rows are whole vectors.
template <typename T>
inline bool writes_in_place(const ScanArgs& args, const ChunkSizes<T>& size) {
  return args.dtype == own_dtype<T>() && size.p == size.p_cols;
}

// Reads the rows (time, rank) of a chunk of one head or group into `target`, zero-padded to whole vectors.
template <typename T>
void read_chunk(T* target, int target_row, const void* source, int64_t dtype, const int64_t* strides, int64_t lane,
                const Chunk& chunk, int rank, int width) {
  const char* base = static_cast<const char*>(source);
  const bool whole = dtype == own_dtype<T>() && width == round_up<T>(width);
  for (int l = 0; l < chunk.steps; ++l)
    for (int r = 0; r < rank; ++r) {
      const int64_t at = chunk.batch * strides[0] + (chunk.start + l) * strides[1] + r * strides[2] + lane * strides[3];
      T* row = target + (l * rank + r) * static_cast<ptrdiff_t>(target_row);
      if (whole)
        for (int c = 0; c < width; c += kLanes<T>) store(row + c, load(static_cast<const T*>(source) + at + c));
      else
        read_row(row, base + at * size_of(dtype), dtype, width, round_up<T>(width));
    }
}

// Writes a chunk of one of `lanes` heads or groups to a contiguous (batch, time, rank, lanes, width) tensor.
template <typename T>
void write_chunk(void* target, const T* source, int source_row, int64_t dtype, const ScanArgs& args, int64_t lane,
                 int64_t lanes, const Chunk& chunk, int width) {
  char* base = static_cast<char*>(target);
  const int rank = static_cast<int>(args.rank);
  for (int l = 0; l < chunk.steps; ++l)
    for (int r = 0; r < rank; ++r) {
      const int64_t row = (chunk.batch * args.time + chunk.start + l) * rank + r;
      write_row(base + (row * lanes + lane) * width * size_of(dtype),
                source + (l * rank + r) * static_cast<ptrdiff_t>(source_row), dtype, width);
    }
}

// The decays of one head within a chunk.
//
// The running sum of log-decays is held as the sum of two T (high and low part), so that differences of it keep their
// digits after a hard reset.
template <typename T>
struct Decay {
  T *high, *low, *step;  // per row: the running sum, and the row's time step; padding has step -1
  T *from_start, *to_end;
  T kept;

  Decay(Arena& arena, const ChunkSizes<T>& size)
      : high(arena.take<T>(size.rows_row)),
        low(arena.take<T>(size.rows_row)),
        step(arena.take<T>(size.rows_row)),
        from_start(arena.take<T>(size.rows_row)),
        to_end(arena.take<T>(size.rows_row)) {}

  void read(const ScanArgs& args, const Chunk& chunk, int64_t head, int rank) {
    const int64_t* strides = args.log_decay_strides;
    const T* source = static_cast<const T*>(args.log_decay) + chunk.batch * strides[0] + head * strides[2];
    const int rows = chunk.steps * rank, rows_pad = round_up<T>(rows);
    double end = 0;
    for (int l = 0; l < chunk.steps; ++l) end += cut(source[(chunk.start + l) * strides[1]]);
    double sum = 0;
    for (int l = 0; l < chunk.steps; ++l) {
      sum += cut(source[(chunk.start + l) * strides[1]]);
      for (int i = l * rank; i < (l + 1) * rank; ++i) {
        high[i] = static_cast<T>(sum);
        low[i] = static_cast<T>(sum - static_cast<double>(high[i]));
        step[i] = static_cast<T>(l);
        from_start[i] = static_cast<T>(sum);
        to_end[i] = static_cast<T>(end - sum);
      }
    }
    for (int i = rows; i < rows_pad; ++i) high[i] = low[i] = from_start[i] = to_end[i] = 0, step[i] = -1;
    for (int i = 0; i < rows_pad; i += kLanes<T>) {
      store(from_start + i, exp_nonpositive(load(from_start + i), kMinExponent<T>));
      store(to_end + i, exp_nonpositive(load(to_end + i), kMinExponent<T>));
    }
    kept = exp_nonpositive_scalar(static_cast<T>(end), kMinExponent<T>);
  }

  // The decay from row j to the rows i, i + 1, ... of a vector, and which of them come at or after j's step, or after.
  Vec<T> between(int j, int i) const {
    const Vec<T> exponent = (load(high + i) - high[j]) + (load(low + i) - low[j]);
    return exp_nonpositive(exponent < Vec<T>{} ? exponent : Vec<T>{} + exponent * T(0), kMinExponent<T>);
  }
  auto at_or_after(int j, int i) const { return load(step + i) >= broadcast(step[j]); }
  auto after(int j, int i) const { return load(step + i) > broadcast(step[j]); }

 private:
  static double cut(T x) { return x < kMinLogDecay ? kMinLogDecay : static_cast<double>(x); }
};

// target row i = scale[i] * source row i
template <typename T>
inline void scale_rows(T* target, const T* source, const T* scale, int rows, int cols, ptrdiff_t row) {
  for (int i = 0; i < rows; ++i)
    for (int c = 0; c < cols; c += kLanes<T>) store(target + i * row + c, scale[i] * load(source + i * row + c));
}

// A (batch, time, heads) tensor of T at one step of one head.
template <typename T>
inline const T* at_step(const void* base, const ScanArgs& args, int64_t batch, int64_t time, int64_t head) {
  return static_cast<const T*>(base) + (batch * args.time + time) * args.heads + head;
}
template <typename T>
inline T* at_step(void* base, const ScanArgs& args, int64_t batch, int64_t time, int64_t head) {
  return static_cast<T*>(base) + (batch * args.time + time) * args.heads + head;
}

// The weight of each row's v: `later` in the state and in later steps, `own` in the same step.
template <typename T>
struct Weights {
  T *later, *own;

  Weights(Arena& arena, const ChunkSizes<T>& size)
      : later(arena.take<T>(size.rows_row)), own(arena.take<T>(size.rows_row)) {}

  void read(const ScanArgs& args, const Chunk& chunk, const Sequence& seq, int64_t head, int rank) {
    for (int l = 0; l < chunk.steps; ++l) {
      T now = 1, after = 1;
      const int64_t time = chunk.start + l;
      if (args.gamma) {
        now = after = *at_step<T>(args.gamma, args, chunk.batch, time, head);
        if (time + 1 < seq.stop) after += *at_step<T>(args.kappa, args, chunk.batch, time + 1, head);
      } else if (args.scale) {
        const int64_t* strides = args.scale_strides;
        const int64_t at = chunk.batch * strides[0] + time * strides[1] + head * strides[2];
        now = after = static_cast<const T*>(args.scale)[at];
      }
      for (int r = 0; r < rank; ++r) later[l * rank + r] = after, own[l * rank + r] = now;
    }
    for (int i = chunk.steps * rank; i < round_up<T>(chunk.steps * rank); ++i) later[i] = own[i] = 0;
  }
};

// A row of parameters, padded with zeros to whole vectors.
template <typename T>
inline void read_parameters(T* target, const void* base, int64_t row, int width) {
  read_row(target, reinterpret_cast<const char*>(static_cast<const T*>(base) + row * width),
           sizeof(T) == 8 ? kFloat64 : kFloat32, width, round_up<T>(width));
}

// The values of a chunk of one head, (rows, p); `weight` is scratch for those of the ranks.
template <typename T>
void read_values(T* v, T* weight, const ScanArgs& args, const Chunk& chunk, int64_t head, const ChunkSizes<T>& size) {
  read_chunk(v, size.p_row, args.v, args.dtype, args.v_strides, head, chunk, size.rank, size.p);
  if (!args.value_weight) return;
  for (int r = 0; r < size.rank; ++r) {
    read_parameters(weight, args.value_weight, head * size.rank + r, size.p);
    for (int i = r; i < chunk.steps * size.rank; i += size.rank)
      for (int c = 0; c < size.p_cols; c += kLanes<T>) {
        T* at = v + i * ptrdiff_t(size.p_row) + c;
        store(at, load(at) * load(weight + c));
      }
  }
}

template <typename T>
inline void fill_zero(T* target, size_t count) {
  std::memset(target, 0, count * sizeof(T));
}

// target (cols, rows) = source (rows, cols) of a chunk, with zeros up to whole vectors of rows.
template <typename T>
inline void transpose_chunk(T* target, const T* source, ptrdiff_t source_row, int rows, int cols,
                            const ChunkSizes<T>& size) {
  if (round_up<T>(rows) > rows) fill_zero(target, size_t(cols) * size.rows_row);
  transpose(target, size.rows_row, source, source_row, rows, cols);
}

// The first vector with a row at or after j's step; everything before it in row j of a block is zero or unused.
template <typename T>
inline int first_vector(int j, int rank) {
  return j / rank * rank / kLanes<T> * kLanes<T>;
}

// scores[j, i] = <k_j, q_i> for i at or after j.  k and q are (n, rows).
template <typename T>
inline void chunk_scores(T* scores, const T* k, const T* q, int rows, const ChunkSizes<T>& size) {
  Gemm<T> m{k, 1, size.rows_row, q, size.rows_row, scores, size.rows_row, rows, round_up<T>(rows), size.n};
  m.span = Span::kColumnsFromRow;
  m.rank = size.rank;
  gemm(m);
}

}  // namespace ANYMAMBA_ISA
