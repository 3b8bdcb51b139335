// The table of kernels that each instruction set provides.
#pragma once

#include "block_args.h"
#include "decode_args.h"
#include "mamba3_args.h"
#include "scan_args.h"
#include "selective_args.h"

struct Kernels {
  bool (*scan_forward)(const ScanArgs&);
  bool (*scan_backward)(const ScanArgs&);
  bool (*conv_forward)(const ConvArgs&);
  bool (*conv_backward)(const ConvArgs&);
  bool (*norm_forward)(const NormArgs&);
  bool (*norm_backward)(const NormArgs&);
  bool (*run_program)(const ProgramArgs&);
  bool (*prepare_forward)(const PrepareArgs&);
  bool (*prepare_backward)(const PrepareArgs&);
  bool (*gate_forward)(const GateArgs&);
  bool (*gate_backward)(const GateArgs&);
  bool (*selective_forward)(const SelectiveArgs&);
  bool (*selective_backward)(const SelectiveArgs&);
};
