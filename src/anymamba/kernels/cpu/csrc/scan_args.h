// What Python hands to the scan. The ctypes structure in library.py mirrors it field by field.
#pragma once

#include <cstdint>

// Strides count elements. The last axis of every tensor is dense; results and states are contiguous.
extern "C" struct ScanArgs {
  int64_t dtype;  // of v, k, q, y and their gradients (DType); all else is float, or double for double
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
  const void* initial_state;  // null for zeros
  void* y;
  void* final_state;
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
};
