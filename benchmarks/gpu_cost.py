"""What the GPU kernels cost on paper: `python -m benchmarks.gpu_cost` prints the tables of docs/gpu.md.

The operators run on the meta device and their launches are recorded, so launches and bytes are those of the code: each
tensor of a launch is read or written once. Operations are those of the matrix products (`_PRODUCTS`), and of Mamba-1's
scan, which has no products. A kernel's time on a card is the longer of two: that of its bytes at the card's
bandwidth, and that of its operations at its peak. Real times are longer.

Letters: h heads, p head width, n state, i channels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.kernels import triton as gpu_kernels
from anymamba.kernels.triton.launch import Launch, Target, recording

_TARGET = Target("cuda", 90)
_CASES: Any = import_module("tests.kernels.triton.model_shapes").CASES  # those of the compile check


class Card(NamedTuple):
    """A card, with the figures of its vendor's data sheet.

    Attributes:
        products: Operations per second in dense bfloat16 products with float32 sums.
        vectors: Operations per second in float32 outside of products.
        bandwidth: Bytes per second.
    """

    name: str
    products: float
    vectors: float
    bandwidth: float


CARDS = (
    Card("A100 80 GB SXM", 312e12, 19.5e12, 2.039e12),
    Card("H100 SXM", 989e12, 67e12, 3.35e12),
    Card("B200", 2250e12, 75e12, 8e12),
    Card("RTX 4090", 165e12, 82.6e12, 1.008e12),
    Card("MI300X", 1307e12, 163.4e12, 5.3e12),
)

# The layers of released models, as the cases of the compile check: operators of one layer.
LAYERS = {
    "mamba-130m": ("convolution of mamba-130m, packed", "selective scan of mamba-130m"),
    "mamba2-130m": (
        "convolution of mamba2-130m",
        "step sizes of mamba2-130m",
        "ssd of mamba2-130m",
        "norm of mamba2-130m",
    ),
    "mamba2-1.3b, scan and norm": ("ssd of mamba2-1.3b", "norm of mamba2-1.3b"),
    "mamba3-187m, SISO": (
        "norm of the keys of mamba3-187m",
        "discretization of mamba3-187m",
        "mamba3-187m, SISO",
        "gate of mamba3-187m, SISO",
    ),
    "mamba3-187m, MIMO of rank 4": (
        "norm of the keys of mamba3-187m",
        "discretization of mamba3-187m",
        "mamba3-187m, MIMO of rank 4",
        "gate of mamba3-187m, MIMO 4",
    ),
}


class Cost(NamedTuple):
    """What one launch costs."""

    kernel: str
    bytes: int
    products: float
    vectors: float

    def seconds(self, card: Card) -> float:
        """Return the shortest time on a card."""
        return max(self.bytes / card.bandwidth, self.products / card.products + self.vectors / card.vectors)


def record_costs(case: str) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of the launches of a case, forward and backward, in bfloat16."""
    operator, inputs = _CASES[case](torch.bfloat16)
    kernel = import_module(f"{gpu_kernels.__name__}.{gpu_kernels._MODULES[operator]}").KERNELS[operator]
    with recording(_TARGET) as forward:
        outputs = kernel.forward(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    with recording(_TARGET) as backward:
        kernel.backward(*(torch.empty_like(y) for y in outputs), *inputs)
    return [_cost(x, inputs) for x in forward], [_cost(x, inputs) for x in backward]


def _cost(launch: Launch, inputs: tuple[Any, ...]) -> Cost:
    name = launch.kernel.fn.__name__
    tensors = {id(x): x for x in launch.arguments if isinstance(x, Tensor)}
    size = sum(x.numel() * x.element_size() for x in tensors.values())
    if name in ("slide_window", "differentiate_window"):  # they read the ends of sequences only
        size = sum(x.numel() * x.element_size() for x in tensors.values() if x.shape == inputs[1].shape)
    programs, rows = math.prod(launch.grid[:2]), launch.constants.get("ROWS", 0)
    if name in _PRODUCTS:
        p, n = inputs[0].shape[-1], inputs[4 if inputs[0].ndim == 4 and inputs[1].ndim == 3 else 1].shape[-1]
        heads = launch.constants.get("HEADS", 1) if launch.grid[1] < inputs[0].shape[-2] else 1
        return Cost(name, size, programs * heads * _PRODUCTS[name](rows, p, n), 0)
    if name in _STEPS:
        x, rates = inputs[0], inputs[2]
        return Cost(name, size, 0, _STEPS[name] * x.numel() * rates.shape[1])
    return Cost(name, size, 0, 0)


# Operations per chunk of `rows` steps times ranks, and per head.
_PRODUCTS = {
    "add_chunk_states": lambda rows, p, n: 2 * rows * p * n,
    "write_outputs": lambda rows, p, n: 2 * rows * (rows * (n + p) + n * p),
    "write_value_gradients": lambda rows, p, n: 2 * rows * (rows * (n + p) + n * p),
    "write_key_query_gradients": lambda rows, p, n: 2 * rows * (rows * (p + 3 * n) + 2 * n * p),
}
# Operations per step, channel and state: an exponential counts as one.
_STEPS = {"scan_channels": 6, "scan_channels_backward": 20}


def official_ssd_bytes(b: int, t: int, h: int, p: int, g: int, n: int, chunk_len: int = 256) -> int:
    """Return the bytes that the five forward kernels of mamba_ssm's SSD read and write in bfloat16.

    They are read from `_mamba_chunk_scan_combined_fwd`: cumulative sums, states of chunks in float32, passing of
    states, products of queries and keys in float32, and outputs.
    """
    states, scores = b * (t // chunk_len) * h * p * n, b * t * g * chunk_len
    heads, values, keys = b * t * h, b * t * h * p, b * t * g * n
    return (
        (2 * heads + 8 * heads)
        + (2 * keys + 2 * values + 8 * heads + 4 * states)
        + (4 * states + 2 * states)
        + (4 * keys + 4 * scores)
        + (4 * scores + 2 * values + 8 * heads + 2 * keys + 2 * states + 2 * values)
    )


def layer_table() -> list[tuple[str, ...]]:
    """Return per layer and direction: launches, bytes, operations, intensity, and the time on each card."""
    rows = [("layer", "", "launches", "MiB", "GFLOP", "FLOP per byte", *(f"{card.name}, µs" for card in CARDS))]
    for layer, cases in LAYERS.items():
        costs = [record_costs(case) for case in cases]
        for direction, index in (("forward", 0), ("backward", 1)):
            rows.append((layer, direction, *_figures([x for pair in costs for x in pair[index]])))
    return rows


def kernel_table(cases: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the same per kernel of some cases."""
    rows = [("operator", "kernel", "launches", "MiB", "GFLOP", "FLOP per byte", *(f"{x.name}, µs" for x in CARDS))]
    for case in cases:
        for direction, costs in zip(("", ", backward"), record_costs(case), strict=True):
            names = dict.fromkeys(x.kernel for x in costs)
            by_name = {name: [x for x in costs if x.kernel == name] for name in names}
            rows += [(case + direction, f"`{name}`", *_figures(launches)) for name, launches in by_name.items()]
    return rows


def _figures(costs: list[Cost]) -> tuple[str, ...]:
    size, operations = sum(x.bytes for x in costs), sum(x.products + x.vectors for x in costs)
    times = (f"{1e6 * sum(x.seconds(card) for x in costs):.0f}" for card in CARDS)
    return str(len(costs)), f"{size / 2**20:.1f}", f"{operations / 1e9:.1f}", f"{operations / size:.0f}", *times


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows as a table in Markdown."""
    rule = "|" + "|".join("---" if i < 2 else "---:" for i in range(len(rows[0]))) + "|"
    print("\n".join([f"| {' | '.join(rows[0])} |", rule, *(f"| {' | '.join(row)} |" for row in rows[1:])]))


def main() -> int:
    """Print both tables."""
    print_table(layer_table())
    print()
    print_table(kernel_table(dict.fromkeys(case for cases in LAYERS.values() for case in cases)))
    print()
    for name, heads in (("mamba2-130m", 24), ("mamba2-1.3b", 64)):
        official = official_ssd_bytes(2, 2048, heads, 64, 1, 128) / 2**20
        ours = sum(x.bytes for x in record_costs(f"ssd of {name}")[0]) / 2**20
        print(f"ssd of {name}, forward: official {official:.0f} MiB, ours {ours:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
