// Keys and queries of a chunk, held transposed, (n, rows): those of a group, or for Mamba-3 those of a head, which are
// the group's with the head's bias, rotated by the head's rotations. Formulas: ops/rotation.py.
#pragma once

#include <numeric>

#include "scan/scan_rotation.h"

namespace ANYMAMBA_ISA {

// The step whose key is a sequence's last; -1 where it has none.
inline int64_t last_step(const ScanArgs& args, int64_t sequence) {
  const Sequence seq = sequence_of(args, sequence);
  return (args.lengths ? seq.start + args.lengths[sequence] : seq.stop) - 1;
}

// The channels that rotate together, and those that are not rotated.
struct Pairing {
  bool quaternion;
  int rotations, stride, apart;     // channel i of rotation s is s stride + i apart
  int unrotated[2], unrotated_stop[2];  // two ranges

  Pairing(const ScanArgs& args, int rotations, int n)
      : quaternion(args.rotation == kQuaternion),
        rotations(rotations),
        stride(quaternion ? 4 : args.rotation == kInterleaved ? 2 : 1),
        apart(args.rotation == kHalves ? n / 2 : 1),
        unrotated{stride * rotations, args.rotation == kHalves ? n / 2 + rotations : n},
        unrotated_stop{args.rotation == kHalves ? n / 2 : n, n} {}
};

// Biases vary with the rank, which is the faster index of a row, so a channel's bias along the rows repeats after
// `vectors` vectors.
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
  void gather(void* dbias, int64_t sequence_head, const T* source, int rank, int n) const {
    T* target = static_cast<T*>(dbias) + sequence_head * rank * n;
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
  T *k, *q;  // of the current head
  T *group_k, *group_q;
  ChunkRotations<T> rotations;

  Keys(Arena& arena, const ScanArgs& args, const ChunkSizes<T>& size, int64_t heads)
      : group_k(arena.take<T>(size_t(size.n) * size.rows_row)),
        group_q(arena.take<T>(size_t(size.n) * size.rows_row)),
        rotations(arena, size),
        args_(args),
        size_(size),
        pairing_(args, size.rotation.count, size.n),
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

  // Called once per task, before the other methods.
  void start(const Task& task) {
    if (!args_.k_bias) return;
    rotations.clear(size_);
    for (int64_t e = 0; e < task.heads; ++e) {
      pattern_.spread(k_bias_ + e * pattern_numbers(), args_.k_bias, task.first_head + e, size_.rank, size_.n);
      pattern_.spread(q_bias_ + e * pattern_numbers(), args_.q_bias, task.first_head + e, size_.rank, size_.n);
    }
  }

  void read_group_keys(const Chunk& chunk, int64_t group) { read(group_k, args_.k, args_.k_strides, chunk, group); }
  void read_group_queries(const Chunk& chunk, int64_t group) { read(group_q, args_.q, args_.q_strides, chunk, group); }

  // Computes those of a head, after `rotations` was advanced for it; `e` counts the heads of the task.
  void rotate_head_keys(int64_t e, int rows) { rotate(k, group_k, k_bias_ + e * pattern_numbers(), rows); }
  void rotate_head_queries(int64_t e, int rows) { rotate(q, group_q, q_bias_ + e * pattern_numbers(), rows); }

  // Adds the gradients of the head's keys and queries to those of the group's and of the bias' pattern, and computes
  // those of the rotations, (axes, rows).
  void rotate_backward_keys(const T* dk, T* dgroup_k, T* dbias, T* drotation, int rows) const {
    rotate_backward<false>(dgroup_k, dbias, drotation, dk, k, rows);
  }
  void rotate_backward_queries(const T* dq, T* dgroup_q, T* dbias, T* drotation, int rows) const {
    rotate_backward<true>(dgroup_q, dbias, drotation, dq, q, rows);
  }
  void gather_bias(void* dbias, int64_t sequence_head, const T* pattern) const {
    pattern_.gather(dbias, sequence_head, pattern, size_.rank, size_.n);
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

  // body(i, phase) for every vector of a row, with its position in the bias' pattern.
  template <typename Body>
  void for_vectors(int rows, const Body& body) const {
    int phase = 0;
    for (int i = 0; i < rows; i += kLanes<T>) {
      body(i, phase);
      phase = phase + kLanes<T> == pattern_.row ? 0 : phase + kLanes<T>;
    }
  }
  // body(c) for every channel that is not rotated.
  template <typename Body>
  void for_unrotated(const Body& body) const {
    for (int half = 0; half < 2; ++half)
      for (int c = pairing_.unrotated[half]; c < pairing_.unrotated_stop[half]; ++c) body(c);
  }
  // Part `part` of rotation s.
  const T* part(int part, int s) const {
    return rotations.components + (part * size_.rotation.lanes + s) * ptrdiff_t(size_.rows_row);
  }

  void rotate(T* own, const T* group, const T* bias, int rows) const {
    const ptrdiff_t row = size_.rows_row;
    const auto biased = [&](int c, int i, int phase) {
      return load(group + c * row + i) + load(bias + c * pattern_.row + phase);
    };
    for (int s = 0; s < pairing_.rotations; ++s) {
      const int first = s * pairing_.stride, second = first + pairing_.apart;
      if (pairing_.quaternion)
        for_vectors(rows, [&](int i, int phase) {
          const Vec<T> x0 = biased(first, i, phase), x1 = biased(first + 1, i, phase);
          const Vec<T> x2 = biased(first + 2, i, phase), x3 = biased(first + 3, i, phase);
          const Vec<T> w = load(part(0, s) + i), a = load(part(1, s) + i);
          const Vec<T> b = load(part(2, s) + i), c = load(part(3, s) + i);
          store(own + first * row + i, w * x0 + a * x1 + b * x2 + c * x3);
          store(own + (first + 1) * row + i, w * x1 - a * x0 - b * x3 + c * x2);
          store(own + (first + 2) * row + i, w * x2 + a * x3 - b * x0 - c * x1);
          store(own + (first + 3) * row + i, w * x3 - a * x2 + b * x1 - c * x0);
        });
      else
        for_vectors(rows, [&](int i, int phase) {
          const Vec<T> u = biased(first, i, phase), w = biased(second, i, phase);
          const Vec<T> cos = load(part(0, s) + i), sin = load(part(1, s) + i);
          store(own + first * row + i, u * cos - w * sin);
          store(own + second * row + i, u * sin + w * cos);
        });
    }
    for_unrotated([&](int c) {
      for_vectors(rows, [&](int i, int phase) { store(own + c * row + i, biased(c, i, phase)); });
    });
  }

  // The gradient on a rotation, in the frame that rotates with it, follows from the rotated vector and its gradient.
  template <bool kAddRotation>
  void rotate_backward(T* dgroup, T* dbias, T* drotation, const T* d_own, const T* own, int rows) const {
    const ptrdiff_t row = size_.rows_row, axis = size_.rotation.lanes * row;
    const auto add = [](T* target, Vec<T> x) { store(target, load(target) + x); };
    const auto gain = [&](int c, int i, int phase, Vec<T> x) {
      add(dgroup + c * row + i, x);
      add(dbias + c * pattern_.row + phase, x);
    };
    const auto rotation = [&](T* target, Vec<T> x) { store(target, kAddRotation ? load(target) + x : x); };
    for (int s = 0; s < pairing_.rotations; ++s) {
      const int first = s * pairing_.stride, second = first + pairing_.apart;
      T* const to = drotation + s * row;
      if (pairing_.quaternion)
        for_vectors(rows, [&](int i, int phase) {
          const T *x = own + first * row + i, *dx = d_own + first * row + i;
          const Vec<T> x0 = load(x), x1 = load(x + row), x2 = load(x + 2 * row), x3 = load(x + 3 * row);
          const Vec<T> d0 = load(dx), d1 = load(dx + row), d2 = load(dx + 2 * row), d3 = load(dx + 3 * row);
          const Vec<T> w = load(part(0, s) + i), a = load(part(1, s) + i);
          const Vec<T> b = load(part(2, s) + i), c = load(part(3, s) + i);
          rotation(to + i, x1 * d0 - x0 * d1 + x3 * d2 - x2 * d3);
          rotation(to + axis + i, x2 * d0 - x0 * d2 + x1 * d3 - x3 * d1);
          rotation(to + 2 * axis + i, x3 * d0 - x0 * d3 + x2 * d1 - x1 * d2);
          gain(first, i, phase, w * d0 - a * d1 - b * d2 - c * d3);
          gain(first + 1, i, phase, w * d1 + a * d0 + b * d3 - c * d2);
          gain(first + 2, i, phase, w * d2 - a * d3 + b * d0 + c * d1);
          gain(first + 3, i, phase, w * d3 + a * d2 - b * d1 + c * d0);
        });
      else
        for_vectors(rows, [&](int i, int phase) {
          const Vec<T> u = load(own + first * row + i), w = load(own + second * row + i);
          const Vec<T> du = load(d_own + first * row + i), dw = load(d_own + second * row + i);
          const Vec<T> cos = load(part(0, s) + i), sin = load(part(1, s) + i);
          rotation(to + i, u * dw - w * du);
          gain(first, i, phase, du * cos + dw * sin);
          gain(second, i, phase, dw * cos - du * sin);
        });
    }
    for_unrotated([&](int c) {
      for_vectors(rows, [&](int i, int phase) { gain(c, i, phase, load(d_own + c * row + i)); });
    });
  }

  const ScanArgs& args_;
  const ChunkSizes<T>& size_;
  const Pairing pairing_;
  const BiasPattern<T> pattern_;
  T *rows_, *k_bias_ = nullptr, *q_bias_ = nullptr;
};

}  // namespace ANYMAMBA_ISA
