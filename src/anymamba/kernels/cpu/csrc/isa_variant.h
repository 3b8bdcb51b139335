// The table of kernels that each instruction set provides.
#pragma once

#include "schema.h"

struct Kernels {
#define ANYMAMBA_MEMBER(function, structure) bool (*function)(const structure&);
  ANYMAMBA_KERNELS(ANYMAMBA_MEMBER)
#undef ANYMAMBA_MEMBER
};
