// What Python hands to the kernels around the scan. The ctypes structures in kernels/cpu mirror these field by field.
#pragma once

#include <cstdint>

// Strides count elements. The last axis of every tensor is dense; all but x and dout are contiguous.
extern "C" struct ConvArgs {
  int64_t dtype;  // of x, window, out and their gradients (DType); weight and bias are float, or double for double
  int64_t threads;
  int64_t batch, time, channels, width;
  int64_t sequences;       // packed: how many; else equal to batch
  const int64_t* bounds;   // packed: sequences + 1 numbers; else null
  const int64_t* lengths;  // how many leading steps of a row are real, for the new window; null for all
  const void* x;           // (batch, time, channels)
  int64_t x_strides[2];
  const void* window;  // (sequences, channels, width), newest last
  const void* weight;  // (channels, width)
  const void* bias;    // (channels), or null
  void* out;
  void* new_window;
  // The backward only.
  const void* dout;
  int64_t dout_strides[2];
  const void* dnew_window;
  void* dx;
  void* dwindow;
  void* dweight;
  void* dbias;
};

extern "C" struct NormArgs {
  int64_t dtype;  // of x, z, y and their gradients; the weight is float, or double for double
  int64_t threads;
  int64_t rows, channels, group_size, norm_before_gate;
  double eps;
  const void* x;
  int64_t x_row;
  const void* z;  // null: no gate, and norm_before_gate is set
  int64_t z_row;
  const void* weight;
  void* y;
  // The backward only.
  const void* dy;
  int64_t dy_row;
  void* dx;
  void* dz;
  void* dweight;
};
