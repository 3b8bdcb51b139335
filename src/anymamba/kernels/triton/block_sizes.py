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
# By kernel, and by kernel and architecture where it needs others. Under "float32" are all operands of four bytes.
_SIZES: dict[str, dict[str | tuple[str, int | str], BlockSizes]] = {
    "bfloat16": {
        "write_outputs": BlockSizes(num_warps=8),
        "write_value_gradients": BlockSizes(num_warps=8),
        "write_key_query_gradients": BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
        ("add_chunk_states", "gfx1100"): BlockSizes(width=32, state=32, num_stages=1),
        ("add_chunk_states", "gfx1201"): BlockSizes(num_warps=8, num_stages=1),
    },
    "float32": {
        "add_chunk_states": BlockSizes(width=32, state=32, num_warps=4, num_stages=1),
        "write_outputs": BlockSizes(width=32, state=32, num_stages=1),
        "write_value_gradients": BlockSizes(width=32, state=32, num_stages=1),
        "write_key_query_gradients": BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
        ("write_outputs", "gfx1100"): BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
        ("write_outputs", "gfx1201"): BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
        ("write_value_gradients", "gfx1100"): BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
        ("write_value_gradients", "gfx1201"): BlockSizes(width=32, state=32, num_warps=8, num_stages=1),
    },
}


def block_sizes(kernel: str, target: Target, dtype: torch.dtype) -> BlockSizes:
    """Return the sizes for a kernel on an architecture, for inputs of `dtype`."""
    if target.backend == "cpu":
        return _DEFAULT
    sizes = _SIZES["bfloat16" if dtype == torch.bfloat16 else "float32"]
    return sizes.get((kernel, target.arch), sizes.get(kernel, _DEFAULT))


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
    return 32 if target.backend != "cpu" and (dtype != torch.bfloat16 or target.arch == "gfx1100") else 64


_POINTWISE_NUMBERS = 2048  # of a block in kernels without products: 8 per thread


def pointwise_rows(width: int) -> tuple[int, int]:
    """Return how many rows of `width` numbers, a power of two, a block has, and the warps of its program."""
    return max(1, _POINTWISE_NUMBERS // width), min(16, max(8, width // 256))


def fit(size: int, largest: int) -> int:
    """Return the power of two from 16 to `largest` that holds `size`, or `largest`."""
    return min(largest, max(16, 1 << (size - 1).bit_length()))
