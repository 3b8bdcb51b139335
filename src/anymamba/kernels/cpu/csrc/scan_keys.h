// Keys and queries of a chunk, held transposed, (n, rows): those of a group, or for Mamba-3 a head's own, which are the
// group's with the head's bias, turned by the head's angles. Formulas: ops/rotation.py.
#pragma once

#include <numeric>

#include "rotate.h"
#include "scan_chunk.h"

namespace ANYMAMBA_ISA {

// The step whose key is a sequence's last; -1 where it has none.
inline int64_t last_step(const ScanArgs& args, int64_t sequence) {
  const Sequence seq = sequence_of(args, sequence);
  return (args.lengths ? seq.start + args.lengths[sequence] : seq.stop) - 1;
}

// Which channels turn together, and which stay as they are.
struct Pairing {
  int pairs, stride, apart;     // pair s is (s stride, s stride + apart)
  int still[2], still_stop[2];  // two ranges

  Pairing(const ScanArgs& args, int n)
      : pairs(static_cast<int>(args.pairs)),
        stride(args.interleaved ? 2 : 1),
        apart(args.interleaved ? 1 : n / 2),
        still{args.interleaved ? 2 * pairs : pairs, args.interleaved ? n : n / 2 + pairs},
        still_stop{args.interleaved ? n : n / 2, n} {}
};

// The angles of a chunk of one head: running sums over time, and their cosines and sines, (pairs, rows).
template <typename T>
struct Turns {
  T *cos, *sin;
  T *quarter, *rest, *step_cos, *step_sin;  // scratch, (pairs), (pairs), (steps, pairs), (steps, pairs)

  Turns(Arena& arena, const ChunkSizes<T>& s)
      : cos(arena.take<T>(size_t(s.pairs) * s.rows_row)),
        sin(arena.take<T>(size_t(s.pairs) * s.rows_row)),
        quarter(arena.take<T>(s.pairs_row)),
        rest(arena.take<T>(s.pairs_row)),
        step_cos(arena.take<T>(size_t(s.steps) * s.pairs_row)),
        step_sin(arena.take<T>(size_t(s.steps) * s.pairs_row)) {}

  void clear(const ChunkSizes<T>& size) {
    fill_zero(cos, size_t(size.pairs) * size.rows_row);
    fill_zero(sin, size_t(size.pairs) * size.rows_row);
    fill_zero(quarter, size.pairs_row);
    fill_zero(rest, size.pairs_row);
  }

  // Advances `angle` (pairs) over the steps of a chunk.
  void advance(const ScanArgs& args, const Chunk& chunk, int64_t head, double* angle, const ChunkSizes<T>& size) {
    const int pairs = size.pairs;
    for (int l = 0; l < chunk.steps; ++l) {
      const int64_t time = chunk.start + l;
      const double dt = *at_step<T>(args.dt, args, chunk.batch, time, head);
      const T* rate = static_cast<const T*>(args.rate) + (chunk.batch * args.time + time) * pairs;
      const ptrdiff_t row = l * ptrdiff_t(size.pairs_row);
      advance_angles(angle, rate, dt, pairs, quarter, rest, step_cos + row, step_sin + row);
    }
    spread(cos, step_cos, chunk.steps, size);
    spread(sin, step_sin, chunk.steps, size);
  }

 private:
  // target (pairs, rows) = source (steps, pairs), each step once for every rank.
  static void spread(T* target, const T* source, int steps, const ChunkSizes<T>& size) {
    if (size.rank == 1) return transpose(target, size.rows_row, source, size.pairs_row, steps, size.pairs);
    for (int l = 0; l < steps; ++l)
      for (int s = 0; s < size.pairs; ++s)
        for (int r = 0; r < size.rank; ++r)
          target[s * ptrdiff_t(size.rows_row) + l * size.rank + r] = source[l * ptrdiff_t(size.pairs_row) + s];
  }
};

// Biases vary with the rank, which is the faster index of a row, so a channel's bias along the rows repeats after
// `vectors` whole vectors.
template <typename T>
struct BiasPattern {
  int vectors, row;

  explicit BiasPattern(int rank) : vectors(rank / std::gcd(rank, kLanes<T>)), row(vectors * kLanes<T>) {}

  // target (n, row) from the bias (rank, n) of a head.
  void spread(T* target, const void* bias, int64_t head, int rank, int n) const {
    const T* source = static_cast<const T*>(bias) + head * rank * n;
    for (int c = 0; c < n; ++c)
      for (int i = 0; i < row; ++i) target[c * row + i] = source[i % rank * n + c];
  }

  // The gradient (rank, n) of the bias from that of the pattern.
  void gather(void* dbias, int64_t lane, const T* source, int rank, int n) const {
    T* target = static_cast<T*>(dbias) + lane * rank * n;
    for (int r = 0; r < rank; ++r)
      for (int c = 0; c < n; ++c) {
        T sum = 0;
        for (int i = r; i < row; i += rank) sum += source[c * row + i];
        target[r * n + c] = sum;
      }
  }
};

template <typename T>
class Keys {
 public:
  T *k, *q;  // what the head at hand uses
  T *group_k, *group_q;
  Turns<T> turns;

  Keys(Arena& arena, const ScanArgs& args, const ChunkSizes<T>& size, int64_t heads)
      : group_k(arena.take<T>(size_t(size.n) * size.rows_row)),
        group_q(arena.take<T>(size_t(size.n) * size.rows_row)),
        turns(arena, size),
        args_(args),
        size_(size),
        pairing_(args, size.n),
        pattern_(size.rank),
        rows_(arena.take<T>(size_t(size.rows) * size.n_row)) {
    k = group_k;
    q = group_q;
    if (!args.k_bias) return;
    k = arena.take<T>(size_t(size.n) * size.rows_row);
    q = arena.take<T>(size_t(size.n) * size.rows_row);
    k_bias_ = arena.take<T>(heads * pattern_numbers());
    q_bias_ = arena.take<T>(heads * pattern_numbers());
  }

  size_t pattern_numbers() const { return size_t(size_.n) * pattern_.row; }

  // Once per task, before anything else.
  void start(const Task& task) {
    if (!args_.k_bias) return;
    turns.clear(size_);
    for (int64_t e = 0; e < task.heads; ++e) {
      pattern_.spread(k_bias_ + e * pattern_numbers(), args_.k_bias, task.first_head + e, size_.rank, size_.n);
      pattern_.spread(q_bias_ + e * pattern_numbers(), args_.q_bias, task.first_head + e, size_.rank, size_.n);
    }
  }

  void read_group_keys(const Chunk& chunk, int64_t group) { read(group_k, args_.k, args_.k_strides, chunk, group); }
  void read_group_queries(const Chunk& chunk, int64_t group) { read(group_q, args_.q, args_.q_strides, chunk, group); }

  // The head's own, after `turns` was advanced for it; `e` counts the heads of the task.
  void turn_head_keys(int64_t e, int rows) { turn(k, group_k, k_bias_ + e * pattern_numbers(), rows); }
  void turn_head_queries(int64_t e, int rows) { turn(q, group_q, q_bias_ + e * pattern_numbers(), rows); }

  // From the gradients of the head's own to those of the group's and of the bias' pattern, which gain them, and of the
  // angles, (pairs, rows).
  void turn_back_keys(int64_t e, const T* dk, T* dgroup_k, T* dbias, T* dangle, int rows) const {
    turn_back<false>(dgroup_k, dbias, dangle, dk, group_k, k_bias_ + e * pattern_numbers(), rows);
  }
  void turn_back_queries(int64_t e, const T* dq, T* dgroup_q, T* dbias, T* dangle, int rows) const {
    turn_back<true>(dgroup_q, dbias, dangle, dq, group_q, q_bias_ + e * pattern_numbers(), rows);
  }
  void gather_bias(void* dbias, int64_t lane, const T* pattern) const {
    pattern_.gather(dbias, lane, pattern, size_.rank, size_.n);
  }

  // Writes the keys of one step of the chunk to last_k, and adds the gradient of last_k to theirs.
  void write_last(const Chunk& chunk, int64_t time, int64_t sequence, int64_t head) const {
    for (int r = 0; r < size_.rank; ++r) {
      for (int c = 0; c < size_.n; ++c)
        rows_[c] = k[c * ptrdiff_t(size_.rows_row) + (time - chunk.start) * size_.rank + r];
      write_row(static_cast<char*>(args_.last_k) + last_at(sequence, r, head), rows_, args_.dtype, size_.n);
    }
  }
  void add_last(T* dk, const Chunk& chunk, int64_t time, int64_t sequence, int64_t head) const {
    for (int r = 0; r < size_.rank; ++r) {
      read_row(rows_, static_cast<const char*>(args_.dlast_k) + last_at(sequence, r, head), args_.dtype, size_.n,
               size_.n);
      for (int c = 0; c < size_.n; ++c)
        dk[c * ptrdiff_t(size_.rows_row) + (time - chunk.start) * size_.rank + r] += rows_[c];
    }
  }
  void clear_last(int64_t sequence, int64_t head) const {
    for (int r = 0; r < size_.rank; ++r)
      std::memset(static_cast<char*>(args_.last_k) + last_at(sequence, r, head), 0, size_.n * size_of(args_.dtype));
  }

 private:
  int64_t last_at(int64_t sequence, int r, int64_t head) const {
    return ((sequence * size_.rank + r) * args_.heads + head) * size_.n * static_cast<int64_t>(size_of(args_.dtype));
  }

  void read(T* target, const void* source, const int64_t* strides, const Chunk& chunk, int64_t group) {
    read_chunk(rows_, size_.n_row, source, args_.dtype, strides, group, chunk, size_.rank, size_.n);
    transpose_chunk(target, rows_, size_.n_row, chunk.steps * size_.rank, size_.n, size_);
  }

  void turn(T* own, const T* group, const T* bias, int rows) const {
    const ptrdiff_t row = size_.rows_row;
    for (int s = 0; s < pairing_.pairs; ++s) {
      const int first = s * pairing_.stride, second = first + pairing_.apart;
      int phase = 0;
      for (int i = 0; i < rows; i += kLanes<T>) {
        const Vec<T> u = load(group + first * row + i) + load(bias + first * pattern_.row + phase);
        const Vec<T> w = load(group + second * row + i) + load(bias + second * pattern_.row + phase);
        const Vec<T> cos = load(turns.cos + s * row + i), sin = load(turns.sin + s * row + i);
        store(own + first * row + i, u * cos - w * sin);
        store(own + second * row + i, u * sin + w * cos);
        phase = phase + kLanes<T> == pattern_.row ? 0 : phase + kLanes<T>;
      }
    }
    for (int half = 0; half < 2; ++half)
      for (int c = pairing_.still[half]; c < pairing_.still_stop[half]; ++c) {
        int phase = 0;
        for (int i = 0; i < rows; i += kLanes<T>) {
          store(own + c * row + i, load(group + c * row + i) + load(bias + c * pattern_.row + phase));
          phase = phase + kLanes<T> == pattern_.row ? 0 : phase + kLanes<T>;
        }
      }
  }

  template <bool kAddAngle>
  void turn_back(T* dgroup, T* dbias, T* dangle, const T* d_own, const T* group, const T* bias, int rows) const {
    const ptrdiff_t row = size_.rows_row;
    const auto add = [](T* target, Vec<T> x) { store(target, load(target) + x); };
    for (int s = 0; s < pairing_.pairs; ++s) {
      const int first = s * pairing_.stride, second = first + pairing_.apart;
      int phase = 0;
      for (int i = 0; i < rows; i += kLanes<T>) {
        const Vec<T> u = load(group + first * row + i) + load(bias + first * pattern_.row + phase);
        const Vec<T> w = load(group + second * row + i) + load(bias + second * pattern_.row + phase);
        const Vec<T> cos = load(turns.cos + s * row + i), sin = load(turns.sin + s * row + i);
        const Vec<T> du_own = load(d_own + first * row + i), dw_own = load(d_own + second * row + i);
        const Vec<T> du = du_own * cos + dw_own * sin, dw = dw_own * cos - du_own * sin;
        const Vec<T> angle = u * dw - w * du;
        store(dangle + s * row + i, kAddAngle ? load(dangle + s * row + i) + angle : angle);
        add(dgroup + first * row + i, du);
        add(dgroup + second * row + i, dw);
        add(dbias + first * pattern_.row + phase, du);
        add(dbias + second * pattern_.row + phase, dw);
        phase = phase + kLanes<T> == pattern_.row ? 0 : phase + kLanes<T>;
      }
    }
    for (int half = 0; half < 2; ++half)
      for (int c = pairing_.still[half]; c < pairing_.still_stop[half]; ++c) {
        int phase = 0;
        for (int i = 0; i < rows; i += kLanes<T>) {
          const Vec<T> d = load(d_own + c * row + i);
          add(dgroup + c * row + i, d);
          add(dbias + c * pattern_.row + phase, d);
          phase = phase + kLanes<T> == pattern_.row ? 0 : phase + kLanes<T>;
        }
      }
  }

  const ScanArgs& args_;
  const ChunkSizes<T>& size_;
  const Pairing pairing_;
  const BiasPattern<T> pattern_;
  T *rows_, *k_bias_ = nullptr, *q_bias_ = nullptr;
};

}  // namespace ANYMAMBA_ISA
