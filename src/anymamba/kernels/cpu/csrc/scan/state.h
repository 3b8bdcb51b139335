// One token of a head's state: S = decay S + Σ_j values[j] ⊗ keys[j], then y[r] = S queries[r].
#pragma once

#include "simd/vector_rows.h"

namespace ANYMAMBA_ISA {

// Pointers of a head; keys and queries are padded with zeros to whole vectors, `stride` apart.
template <typename T>
struct HeadState {
  const T* before;  // (p, n)
  T* after;         // (p, n), may be `before`
  int64_t p, n, stride;
  T decay;
  const T *values, *keys;  // (terms, p), (terms, stride)
  const T* queries;        // (reads, stride)
  T* y;                    // (reads, p)
};

template <int kTerms, int kReads, typename T>
inline void advance(const HeadState<T>& head, int64_t any_terms, int64_t any_reads) {
  const int64_t terms = kTerms ? kTerms : any_terms, reads = kReads ? kReads : any_reads;
  for (int64_t i = 0; i < head.p; ++i) {
    const T* before = head.before + i * head.n;
    T* after = head.after + i * head.n;
    for (int64_t j = 0; j < head.n; j += kLanes<T>) {
      Vec<T> s = head.decay * load_first(before + j, head.n - j);
      for (int64_t term = 0; term < terms; ++term)
        s += head.values[term * head.p + i] * load(head.keys + term * head.stride + j);
      store_first(after + j, s, head.n - j);
    }
    for (int64_t read = 0; read < reads; ++read) {
      Vec<T> sum = {};
      for (int64_t j = 0; j < head.n; j += kLanes<T>)
        sum += load_first(after + j, head.n - j) * load(head.queries + read * head.stride + j);
      head.y[read * head.p + i] = sum_lanes<T>(sum);
    }
  }
}

template <typename T>
inline void advance_state(const HeadState<T>& head, int64_t terms, int64_t reads) {
  if (terms == 1 && reads == 1) return advance<1, 1>(head, terms, reads);
  if (terms == 2 && reads == 1) return advance<2, 1>(head, terms, reads);
  if (terms == 8 && reads == 4) return advance<8, 4>(head, terms, reads);
  advance<0, 0>(head, terms, reads);
}

}  // namespace ANYMAMBA_ISA
