// What Python hands to the scan. The ctypes structure in kernels/cpu/scan.py mirrors it field by field.
#pragma once

#include <cstdint>

// Strides count elements. The last axis of every tensor is dense; results, states and all that has no strides here are
// contiguous.
extern "C" struct ScanArgs {
  int64_t dtype;  // of v, k, q, y, last_k and their gradients (DType); all else is float, or double for double
  int64_t threads;
  int64_t batch, time, rank, heads, groups, width, state;
  int64_t chunk_len;
  int64_t sequences;      // packed: how many; else equal to batch
  const int64_t* bounds;  // packed: sequences + 1 numbers; else null
  const void* v;
  int64_t v_strides[4];  // batch, time, rank, head
  const void* k;
  int64_t k_strides[4];  // batch, time, rank, group
  const void* q;
  int64_t q_strides[4];
  const void* log_decay;
  int64_t log_decay_strides[3];  // batch, time, head
  const void* scale;             // of v, (batch, time, heads); null for one
  int64_t scale_strides[3];
  const void* skip;           // (heads, width), y gains skip * v before its scale; null for none
  const void* initial_state;  // (sequences, heads, width, state), like final_state
  void* y;
  void* final_state;
  // Mamba-3 only; k_bias is null elsewhere. Keys and queries are biased and turned for each head, the scale of v is
  // that of the trapezoidal rule, and v may be one row for all ranks, each with weights of its own.
  const void* k_bias;  // (heads, rank, state)
  const void* q_bias;
  int64_t pairs, interleaved;  // how many channels turn, and whether pairs are (2 i, 2 i + 1) or (i, i + state / 2)
  const void* rate;            // (batch, time, pairs), angles per unit of dt
  const void* dt;              // (batch, time, heads)
  const void* start;           // (sequences, heads, pairs), angles before the first step
  const void* gamma;           // (batch, time, heads), weight of a token in its own step
  const void* kappa;           // (batch, time, heads), of the token before it; the scale is gamma + the next kappa
  const void* value_weight;    // (heads, rank, width), or null
  const int64_t* lengths;      // real steps of each row, null for all: which key is the last
  void* last_k;                // (sequences, rank, heads, state)
  void* turned;                // (sequences, heads, pairs), angles after the last step
  // The backward only.
  const void* dy;
  int64_t dy_strides[4];
  const void* dfinal_state;
  void* dv;
  void* dk;
  void* dq;
  void* dlog_decay;
  void* dscale;  // where there is a scale
  void* dskip;   // (sequences, heads, width), where there is a skip
  void* dinitial_state;
  const void* dlast_k;  // from here on Mamba-3 only
  const void* dturned;
  void* dk_bias;  // (sequences, heads, rank, state)
  void* dq_bias;
  void* drate;
  void* ddt;
  void* dstart;
  void* dgamma;
  void* dkappa;         // but for the first step of a sequence, which the caller has in the initial state
  void* dvalue_weight;  // (sequences, heads, rank, width)
};
