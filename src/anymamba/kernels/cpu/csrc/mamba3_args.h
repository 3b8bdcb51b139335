// What Python hands to the kernels around Mamba-3's scan. The ctypes structures in kernels/cpu mirror these.
#pragma once

#include <cstdint>

// Rows are batch and time fused. The last axis of every tensor is dense; those without a row stride are contiguous.
extern "C" struct PrepareArgs {
  int64_t dtype;  // of the four inputs and their gradients (DType); all else is float, or double for double
  int64_t threads;
  int64_t batch, time, heads, pairs;
  int64_t heavy_tail;  // activation of the decay rate: heavy tail, else softplus
  double rate_floor, dt_min, dt_max, range;
  const int64_t* lengths;  // real steps of each row of the batch, null for all; dt is zero behind them
  const void* dt_raw;      // (rows, heads)
  int64_t dt_raw_row;
  const void* a_raw;  // (rows, heads)
  int64_t a_raw_row;
  const void* trap_raw;  // (rows, heads)
  int64_t trap_raw_row;
  const void* turn_raw;  // (rows, pairs)
  int64_t turn_raw_row;
  const void* dt_bias;  // (heads)
  void* dt;             // (rows, heads), like the next three
  void* log_decay;
  void* gamma;
  void* kappa;
  void* rate;  // (rows, pairs)
  // The backward only.
  const void* ddt;
  const void* dlog_decay;
  const void* dgamma;
  const void* dkappa;
  const void* drate;
  void* ddt_raw;
  void* da_raw;
  void* dtrap_raw;
  void* dturn_raw;
  void* ddt_bias;
};

extern "C" struct GateArgs {
  int64_t dtype;  // of y, z, out and their gradients; the weights are float, or double for double
  int64_t threads;
  int64_t rows, rank, channels;
  const void* y;  // (rows, rank, channels)
  const void* z;  // (rows, channels)
  int64_t z_row;
  const void* gate_weight;  // (rank, channels); null, like the next, for ones
  const void* out_weight;
  void* out;  // (rows, channels)
  // The backward only.
  const void* dout;
  int64_t dout_row;
  void* dy;
  void* dz;
  void* dweights;  // (2, rank, channels), of gate_weight and of out_weight; where there are any
};
