// The table of kernels that each instruction set provides.
#pragma once

#include "scan_args.h"

struct Kernels {
  bool (*scan_forward)(const ScanArgs&);
  bool (*scan_backward)(const ScanArgs&);
};
