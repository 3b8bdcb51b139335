"""The sizes of blocks by architecture: one table, so that every process computes the same bits.

A block of a product is a chunk's rows (its steps times MIMO ranks), `width` channels of a head and `state` channels of
the state. Larger blocks read less and need more registers and shared memory: `make compile-triton` lists what each
kernel takes on each architecture, and with the sizes below no forward kernel spills registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from anymamba.kernels.triton.launch import Target


class BlockSizes(NamedTuple):
    """Sizes of the blocks of one kernel, all powers of two, and how it is launched."""

    width: int = 64
    state: int = 64
    num_warps: int = 4
    num_stages: int = 2


class Precision(NamedTuple):
    """How a product of blocks is computed, for inputs of one dtype on one architecture.

    Attributes:
        operand: Dtype that operands are rounded to.
        output: Precision of a float32 product whose result is an output or a gradient.
        state: Precision of a float32 product whose result is a state.
    """

    operand: torch.dtype
    output: str
    state: str


MAX_RANK = 32  # MIMO ranks, which is the smallest number of rows
_DEFAULT = BlockSizes()
# By kernel, and for an architecture that needs other sizes by (kernel, architecture).
_SIZES: dict[str | tuple[str, int | str], BlockSizes] = {}


def block_sizes(kernel: str, target: Target) -> BlockSizes:
    """Return the sizes for a kernel on an architecture."""
    return _SIZES.get((kernel, target.arch), _SIZES.get(kernel, _DEFAULT))


def precision(dtype: torch.dtype, target: Target) -> Precision:
    """Return how products are computed for inputs of `dtype`.

    Bfloat16 operands stay in bfloat16, and what is multiplied into a state is split into three of them, which hold all
    digits of a float32. Float16 has too small a range for decays and states, so its operands become float32, and TF32
    holds them exactly where there is one. Float32 is rounded to TF32 only if torch's setting allows it.
    """
    has_tf32 = target.backend == "cuda"
    if dtype == torch.bfloat16:
        return Precision(torch.bfloat16, "ieee", "ieee")
    if dtype == torch.float16 and has_tf32:
        return Precision(torch.float32, "tf32", "tf32x3")
    if dtype == torch.float32 and has_tf32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return Precision(torch.float32, "tf32", "tf32")
    return Precision(torch.float64 if dtype == torch.float64 else torch.float32, "ieee", "ieee")


def chunk_rows(dtype: torch.dtype, target: Target) -> int:
    """Return the most steps times MIMO ranks of a chunk: fewer where operands take twice the registers."""
    return 32 if target.backend != "cpu" and (dtype == torch.float32 or target.arch == "gfx1100") else 64


def fit(size: int, largest: int) -> int:
    """Return the power of two from 16 to `largest` that holds `size`, or `largest`."""
    return min(largest, max(16, 1 << (size - 1).bit_length()))
