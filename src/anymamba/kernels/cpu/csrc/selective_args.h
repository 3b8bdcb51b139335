// What Python hands to Mamba-1's scan. The ctypes structures in kernels/cpu mirror these field by field.
#pragma once

#include <cstdint>

// Strides count elements. The last axis of every tensor is dense; those without strides are contiguous.
extern "C" struct SelectiveArgs {
  int64_t dtype;  // of x, z, B, C, y and their gradients (DType); all else is float, or double for double
  int64_t threads;
  int64_t batch, time, channels, state;
  int64_t sequences;      // packed: how many; else equal to batch
  const int64_t* bounds;  // packed: sequences + 1 numbers; else null
  const void* x;          // (batch, time, channels), like the next two
  int64_t x_strides[2];
  const void* dt;  // before the softplus
  int64_t dt_strides[2];
  const void* z;  // null: no gate
  int64_t z_strides[2];
  const void* b;  // (batch, time, state), like the next
  int64_t b_strides[2];
  const void* c;
  int64_t c_strides[2];
  const void* rates;  // (channels, state), not positive
  const void* skip;   // (channels), or null
  const void* initial_state;  // (sequences, channels, state)
  void* y;
  void* final_state;
  // The backward only.
  const void* dy;
  int64_t dy_strides[2];
  const void* dfinal_state;
  void* dx;
  void* ddt;
  void* dz;
  void* db;
  void* dc;
  void* drates;
  void* dskip;
  void* dinitial_state;
};
