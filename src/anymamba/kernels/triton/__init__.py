"""The operators on a GPU: Triton kernels, one source for NVIDIA and AMD.

**They have been interpreted on a CPU and compiled for nine architectures, and not yet run or timed on a GPU.** So on
the first use of each operator on a GPU, its results and gradients for a tiny case are compared with the portable code,
and an operator that differs is dropped with one line on stderr (`first_use.py`).

Importing this file registers the operators and costs nothing: Triton, and the module of an operator, are imported when
the operator first runs on a GPU. Without Triton every operator says so in its `missing`.

Reading order:

1. `selection.py`: `GpuKernel`, and when one runs: device, dtype, coverage.
2. `launch.py`: how a kernel is launched, or recorded, so that it can be compiled for a GPU that is not there.
3. `block_sizes.py`: the sizes of blocks by architecture. Nothing is tuned at run time, so that bits do not change.
4. `tiles.py`: functions that several kernels share: chunks of time, decays, products in a given precision.
5. `chunk_states.py`, `chunk_outputs.py`, `chunk_gradients.py`: the scan's kernels. `ssd_operators.py`: its operators.
6. `angle_kernels.py`, `trapezoid_operator.py`: Mamba-3's rotations, and its scan on the same kernels.
7. `selective_kernels.py`: Mamba-1's scan. `part_sums.py`: sums of what several programs computed.
8. `elementwise.py`: activations. `conv_kernels.py`, `norm_kernels.py`, `gate_kernels.py`, `discretize_kernels.py`: the
   other operators of a block, whose kernels have no products.
9. `first_use.py`: the comparison with the portable code.

One call, `scan(v, k, q, log_decay)` on a GPU: the registry asks `selection.missing`, which imports `ssd_operators` and
compares it with the portable code once. Its forward cuts time into chunks and launches three kernels: what each chunk
adds to the state, the states that enter the chunks, and the outputs.

Rules for kernels:

- no inline assembly, no atomics, no autotuning, nothing that depends on the order of programs: every program writes
  what no other one writes, and sums over programs are taken by torch, in one order;
- no size of a block depends on the batch, so a row has the same bits alone, in a batch and packed;
- states, decays and sums are float32; products of bfloat16 are exact, and what is computed from them is rounded to
  bfloat16 only where it is an operand of a product whose result is an output, not a state;
- at most 99 KB of shared memory, 64 KB on AMD; `make compile-triton` checks it;
- float64 runs under the interpreter only, so that tests compare formulas to 1e-10.

Tests run every kernel on a CPU: `TRITON_INTERPRET=1 ANYMAMBA_KERNELS=triton python -m pytest tests/scan`. Triton's
interpreter stores bfloat16 as 16-bit integers and multiplies these, so kernels never compute in bfloat16 but only
convert to it (`tiles.py`).

To add an operator: a module with the kernels and a `KERNELS` table of `GpuKernel`, its line in `_MODULES` below, tests
in `tests/kernels/triton/`, and a case in `model_shapes.py` there.
"""

import importlib
from collections.abc import Callable
from typing import Any

from anymamba.core.registry import Implementation, register, register_library, requested_library
from anymamba.kernels.triton import selection

# The module of each operator.
_MODULES = {
    "scan": "ssd_operators",
    "ssd": "ssd_operators",
    "rotated_trapezoid_scan": "trapezoid_operator",
    "selective_scan": "selective_kernels",
    "causal_conv": "conv_kernels",
    "rms_norm": "norm_kernels",
    "rank_gate": "gate_kernels",
    "step_sizes": "discretize_kernels",
    "discretize": "discretize_kernels",
}


def _implementation(operator: str, module: str) -> Implementation:
    """Return an implementation that imports its module when it is first used."""

    def load() -> selection.GpuKernel:
        kernels = importlib.import_module(f"{__name__}.{module}").KERNELS
        kernel: selection.GpuKernel = kernels[operator]
        return kernel

    def run(name: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(load(), name)(*arguments)

    return Implementation(run("forward"), run("backward"), lambda *inputs: selection.missing(operator, load, inputs))


# Tests ask for these kernels on the CPU, where Triton's interpreter runs them.
_DEVICES = ("cuda", "cpu") if requested_library() == "triton" else ("cuda",)

register_library("triton", selection.describe)
for _operator, _module in _MODULES.items():
    for _device in _DEVICES:
        register(_operator, _device, _implementation(_operator, _module), library="triton")
