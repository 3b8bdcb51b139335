"""Run one block on every path, show that they agree, and what each costs.

    python -m examples.paths_agree [--family mamba2|mamba3] [--length 512]

Every path computes the outputs, the final state and the gradients of the input and of all parameters. They are compared
with the recurrence in float64, the definition itself. The exit code is 1 if a path disagrees.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import torch
from torch import Tensor

from anymamba import Mamba2, Mamba3, SsdPath
from anymamba.kernels import missing_kernel

Block = Mamba2 | Mamba3
Outcome = dict[str, Tensor]
TOLERANCE = 1e-4  # float32, relative to the largest entry


def outcome(block: Block, x: Tensor, run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Outcome:
    """Return the outputs, the final state and the gradients of the mean square of both."""
    leaf = x.clone().requires_grad_()
    y, state = run(leaf)
    loss = y.square().mean() + state.square().mean()
    names = ["x", *(name for name, _ in block.named_parameters())]
    grads = torch.autograd.grad(loss, [leaf, *block.parameters()])
    return {"y": y.detach(), "state": state.detach(), **{f"grad {n}": g for n, g in zip(names, grads, strict=True)}}


def difference(actual: Outcome, expected: Outcome, prefix: str) -> float:
    """Return the largest relative difference over the entries whose name starts with `prefix`."""
    names = [name for name in expected if name.startswith(prefix)]
    scales = ((actual[n].double() - expected[n]).abs().max() / expected[n].abs().max() for n in names)
    return max(float(scale) for scale in scales)


def count_kept_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps for the backward pass of `run`, counting each storage once."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(storages.values())


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median wall time of `run` in milliseconds, after a warm-up."""
    samples = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return 1e3 * statistics.median(samples[1:])


def main() -> int:
    """Compare, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["mamba2", "mamba3"], default="mamba2")
    parser.add_argument("--length", type=int, default=512, help="tokens of the input (default: %(default)s)")
    parser.add_argument("--d-model", type=int, default=256, help="width of the block (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.length < 1:
        parser.error(f"--length must be at least 1, got {arguments.length}")

    torch.manual_seed(0)
    block: Block = (Mamba2 if arguments.family == "mamba2" else Mamba3)(d_model=arguments.d_model, d_state=64)
    x = torch.randn(1, arguments.length, arguments.d_model)
    wide = copy.deepcopy(block).double()

    print(
        f"One {type(block).__name__} block, d_model {arguments.d_model}, {arguments.length} tokens, float32, CPU with ",
        end="",
    )
    print(f"{torch.get_num_threads()} threads. Each path against the recurrence in float64:\n")
    oracle = outcome(wide, x.double(), partial(prefill, wide, path=SsdPath.recurrent()))
    columns = ("path", "outputs", "final state", "gradients", "forward", "+ backward", "kept for backward")
    print("{:<24}{:>9}{:>13}{:>11}{:>12}{:>13}{:>20}".format(*columns))
    agree = True
    paths = [SsdPath.recurrent(), SsdPath.minimal(), SsdPath.serial(), SsdPath.serial_recalculated()]
    missing = missing_kernel("scan", x)
    if not missing:
        paths.append(SsdPath.fused())
    for path in paths:
        run = partial(prefill, block, path=path)
        result = outcome(block, x, run)
        errors = [difference(result, oracle, prefix) for prefix in ("y", "state", "grad")]
        agree &= max(errors) <= TOLERANCE
        forward = milliseconds(torch.no_grad()(partial(run, x)))
        both = milliseconds(partial(outcome, block, x, run))
        kept = count_kept_bytes(partial(run, x.clone().requires_grad_())) / 2**20
        cells = "".join(f"{error:>{width}.1e}" for error, width in zip(errors, (9, 13, 11), strict=True))
        print(f"{path.algorithm:<24}{cells}{forward:>9.1f} ms{both:>10.1f} ms{kept:>16.1f} MiB", flush=True)

    steps = outcome(block, x, partial(unroll, block))
    errors = [difference(steps, oracle, prefix) for prefix in ("y", "state", "grad")]
    agree &= max(errors) <= TOLERANCE
    cells = "".join(f"{error:>{width}.1e}" for error, width in zip(errors, (9, 13, 11), strict=True))
    print(f"{'step, token by token':<24}{cells}")
    if missing:
        print(f"\nNo compiled kernels: {missing}.")
    print(f"\nAll agree to {TOLERANCE:.0e}." if agree else f"\nSome path disagrees by more than {TOLERANCE:.0e}.")
    return 0 if agree else 1


def prefill(block: Block, x: Tensor, path: SsdPath) -> tuple[Tensor, Tensor]:
    """Return the outputs and the final state of a sequence."""
    y, cache = block.prefill(x, path=path)
    return y, cache.ssm


def unroll(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and the final state, computed token by token."""
    cache: Any = None
    ys = []
    for token in x.unbind(1):
        y, cache = block.step(token, cache)
        ys.append(y)
    return torch.stack(ys, 1), cache.ssm


if __name__ == "__main__":
    sys.exit(main())
