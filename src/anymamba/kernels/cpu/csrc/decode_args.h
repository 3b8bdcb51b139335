// What Python hands to the decoder: one token of each row through a block or a whole model, as a program of phases. The
// ctypes structures in kernels/cpu/program.py mirror these field by field.
//
// Between phases everything is float (double for double) in slots: columns of a (batch, width) matrix that all phases
// share. Parameters are read in place, in their own dtype; caches have the dtype of the activations where they hold
// those, and float or double where they hold states.
#pragma once

#include <cstdint>

extern "C" struct Parameter {
  const void* data;  // null: there is none
  int64_t dtype;
};

enum PhaseKind : int64_t {
  kRead = 0,
  kNorm = 1,
  kGate = 2,
  kLinear = 3,
  kConv = 4,
  kMamba2 = 5,
  kMamba3Keys = 6,
  kMamba3Heads = 7,
  kMamba1 = 8,
  kWrite = 9,
};

extern "C" struct Phase {
  int64_t kind;
  const void* args;  // of the kind's own structure
};

// slot = input, or output = slot
extern "C" struct EdgePhase {
  int64_t width, slot;
};

// to = weight x / rms(x) over groups of channels; with a gate, as norm.h has it.
extern "C" struct NormPhase {
  int64_t width, group_size, norm_before_gate;
  double eps;
  int64_t x, z, to;  // z < 0: no gate
  Parameter weight;
};

// to = x silu(z)
extern "C" struct GatePhase {
  int64_t width, x, z, to;
};

// to = x weightᵀ + bias, or to += it
extern "C" struct LinearPhase {
  int64_t in, out, x, to;  // to < 0: the program's output
  int64_t add;
  Parameter weight;  // (out, in), contiguous
  Parameter bias;    // (out)
};

// to = silu of the causal convolution of x, whose window in the cache moves on by one
extern "C" struct ConvPhase {
  int64_t channels, width, x, to, cache_window;
  Parameter weight;  // (channels, 1, width)
  Parameter bias;    // (channels)
};

// Mamba-1 behind its inner projections, the gate included.
extern "C" struct Mamba1Phase {
  int64_t channels, state;
  int64_t x, dt, z, b, c;  // slots; dt is before its softplus
  int64_t to;              // slot of the gated output, (channels)
  int64_t cache_state;
  Parameter a_log, skip;
};

// Mamba-2 between its convolution and its norm.
extern "C" struct Mamba2Phase {
  int64_t heads, head_width, groups, state, skip_per_channel;
  double dt_min, dt_max;
  int64_t dt;   // slot of the projection
  int64_t act;  // slot of the convolution's output: x, B, C
  int64_t to;   // slot of y, (heads, head_width)
  int64_t cache_state;
  Parameter dt_bias, a_log, skip;
};

// Mamba-3 between its projections, the gate and the norm included.
extern "C" struct Mamba3Phase {
  int64_t heads, head_width, groups, state, rank, pairs;
  int64_t interleaved, heavy_tail;
  double rate_range, dt_min, dt_max, a_floor, key_eps, query_eps, out_eps;
  int64_t z, x, b, c, dt, a, trap, angle;  // slots of the projection
  int64_t keys;                            // slot of the normed B and C, each (rank, groups, state)
  int64_t to;                              // slot of the gated output, (heads, head_width)
  int64_t cache_state, cache_k, cache_v, cache_angle;
  Parameter key_norm, query_norm, key_bias, query_bias, dt_bias, skip;
  Parameter mimo_x, mimo_z, mimo_o;  // none: SISO
  Parameter out_norm;                // none: no norm before the gate
};

extern "C" struct ProgramArgs {
  int64_t dtype;  // of the output and of the activations in caches
  int64_t threads;
  int64_t batch, width;
  int64_t count;
  const Phase* phases;
  const void* input;
  int64_t input_dtype, input_row;
  void* output;
  int64_t output_width;
  const void* const* old_cache;
  void* const* new_cache;  // the same memory or other memory, tensor by tensor
};
