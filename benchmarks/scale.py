"""Tables and a picture of what the cost model (`benchmarks.cost_model`) predicts for large models on many ranks.

python -m benchmarks.scale --picture docs/scale.png

Nothing is measured here. The figures of a rank are assumptions, and options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from anymamba.core.io import atomic_write
from anymamba.models.config import MambaLMConfig
from benchmarks.cost_model import (
    Machine,
    Mesh,
    Sizes,
    best_context,
    fits,
    messages,
    ring_attention_bytes,
    sizes_of,
    step_seconds,
)

SHAPES = {
    "1.3B": {"d_model": 2048, "n_layer": 48, "vocab_size": 50277},
    "7B": {"d_model": 4096, "n_layer": 64, "vocab_size": 32768},
}
FAMILIES = {"Mamba-1": "Mamba1", "Mamba-2": "Mamba2", "Mamba-3": "Mamba3"}
RANKS = (8, 64, 512, 4096)
LENGTHS = {"2k": 2**11, "128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
GIGABITS = (10, 100, 400)
GROUPED = 1024  # width of the keys of eight heads of 128, which groups of query heads share


def sizes_by_name() -> dict[str, dict[str, Sizes]]:
    """Return the sizes of every model, computing in bfloat16, by size and family."""
    return {
        shape: {
            name: sizes_of(MambaLMConfig(**fields, ssm_cfg={"layer": family}), torch.bfloat16)  # type: ignore[arg-type]
            for name, family in FAMILIES.items()
        }
        for shape, fields in SHAPES.items()
    }


def machine_with(gigabits: float, options: argparse.Namespace) -> Machine:
    """Return a rank that sends so many Gbit/s."""
    return Machine(options.flops, gigabits * 1e9 / 8, options.latency, options.memory * 1e9)


def bytes_sent(sizes: Sizes, mesh: Mesh) -> float:
    """Return the bytes that a rank sends in a step; of those that share a row, one in the middle."""
    return sum(message.sent for message in messages(sizes, mesh, cp_rank=min(1, mesh.context - 1)))


def bytes_table(sizes: dict[str, dict[str, Sizes]]) -> Iterator[str]:
    """Yield the tables of bytes per step, by how the ranks are arranged."""
    columns = [(shape, family) for shape, families in sizes.items() for family in families]
    yield f"| bytes that a rank sends in a step | {' | '.join(f'{s} {f}' for s, f in columns)} |"
    yield "|---|" + "---:|" * len(columns)

    def row(name: str, cells: list[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    models = [sizes[shape][family] for shape, family in columns]
    yield row("parameters", [f"{x.parameters / 1e9:.2f} · 10⁹" for x in models])
    yield row("operations of a token, forward and backward", [f"{x.flops() / 1e9:.1f} · 10⁹" for x in models])
    for count in (8, 4096):
        yield row(f"replicate = {count:,}", [_bytes(bytes_sent(x, Mesh(replicate=count))) for x in models])
    yield row("shard = 8", [_bytes(bytes_sent(x, Mesh(shard=8))) for x in models])
    yield row("replicate = 512, shard = 8", [_bytes(bytes_sent(x, Mesh(replicate=512, shard=8))) for x in models])
    # What is left after the gradients, which all ranks add up whatever they share.
    added = [bytes_sent(x, Mesh(context=8)) - bytes_sent(x, Mesh(replicate=8)) for x in models]
    yield row("context, above the gradients, any length", [_bytes(x) for x in added])
    for name, length in LENGTHS.items():
        cells = []
        for shape, _ in columns:
            fields = SHAPES[shape]
            widths = (fields["d_model"], GROUPED)
            cells.append(" / ".join(_bytes(ring_attention_bytes(fields["n_layer"], w, length, 8)) for w in widths))
        yield row(f"ring attention, {name} tokens: all heads / grouped", cells)


def fastest(sizes: Sizes, ranks: int, length: int, machine: Machine, tokens: int, most: int) -> tuple[Mesh, float]:
    """Return the mesh with the shortest step whose `context` is at most `most`, and its seconds."""
    powers = [2**i for i in range(ranks.bit_length())]
    meshes = [
        Mesh(ranks // (shard * context), shard, context)
        for context in powers
        for shard in powers
        if shard * context <= ranks and context <= most
    ]
    rows = max(1, tokens // length)
    timed = [(step_seconds(sizes, m, rows, length, machine), m) for m in meshes if fits(sizes, m, machine)]
    seconds, mesh = min(timed, key=lambda pair: (pair[0], pair[1].context, pair[1].shard))
    return mesh, seconds


def time_table(shape: str, sizes: Sizes, options: argparse.Namespace) -> Iterator[str]:
    """Yield the tables of the shortest steps, with context and without."""
    speeds = " / ".join(map(str, GIGABITS))
    yield (
        f"| {shape} Mamba-2: tokens of a row | ranks | replicate · shard · context at {GIGABITS[1]} Gbit/s | "
        f"seconds of a step at {speeds} Gbit/s | without context | of ideal |"
    )
    yield "|---:|---:|---|---:|---:|---:|"
    for name, length in LENGTHS.items():
        for ranks in RANKS:
            meshes = []
            for gigabits in GIGABITS:
                machine = machine_with(gigabits, options)
                shared = fastest(sizes, ranks, length, machine, options.tokens, ranks)
                alone = fastest(sizes, ranks, length, machine, options.tokens, 1)
                meshes.append((shared, alone, machine))
            (mesh, seconds), _, machine = meshes[1]
            tokens = max(1, options.tokens // length) * length
            ideal = tokens * sizes.flops() / machine.flops / ranks / seconds
            times = [" / ".join(_seconds(run[which][1]) for run in meshes) for which in (0, 1)]
            yield (
                f"| {name} | {ranks:,} | {mesh.replicate} · {mesh.shard} · {mesh.context} | {times[0]} | "
                f"{times[1]} | {ideal:.0%} |"
            )


def tables(options: argparse.Namespace) -> Iterator[str]:
    """Yield all lines of all tables."""
    sizes = sizes_by_name()
    yield from bytes_table(sizes)
    for shape, families in sizes.items():
        yield ""
        yield from time_table(shape, families["Mamba-2"], options)


def plot(options: argparse.Namespace, target: Path) -> None:
    """Draw bytes over the length of a row, and seconds over the number of ranks that share it."""
    import matplotlib.pyplot as plt  # slow, and an extra

    shape, length = "1.3B", LENGTHS["1M"]
    families, fields = sizes_by_name()[shape], SHAPES[shape]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    lengths = [2**i for i in range(11, 24)]
    for name, width, style in (("all heads", fields["d_model"], "-"), ("grouped heads", GROUPED, "--")):
        moved = [ring_attention_bytes(fields["n_layer"], width, t, 8) for t in lengths]
        left.plot(lengths, moved, style, color="tab:red", label=f"ring attention, {name}")
    styles = (("tab:green", "-"), ("tab:blue", "-"), ("tab:orange", "--"))  # the last two coincide
    for (name, sizes), (color, style) in zip(families.items(), styles, strict=True):
        moved = [bytes_sent(sizes, Mesh(context=8)) - bytes_sent(sizes, Mesh(replicate=8))] * len(lengths)
        left.plot(lengths, moved, style, color=color, label=f"context, {name}")
    gradients = bytes_sent(families["Mamba-2"], Mesh(replicate=8))
    left.axhline(gradients, color="gray", linestyle=":", label="gradients, for comparison")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set(xlabel="tokens of a row", ylabel="bytes", title=f"sent by a rank of 8 that share a row, {shape}")
    left.legend(fontsize=8)
    _plot_seconds(right, families["Mamba-2"], length, options)
    right.set_title(f"a step of one row of {length:,} tokens, {shape} Mamba-2")
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _plot_seconds(axes: Any, sizes: Sizes, length: int, options: argparse.Namespace) -> None:
    counts = [2**i for i in range(13)]
    for gigabits, color in zip(GIGABITS, ("tab:red", "tab:blue", "tab:green"), strict=True):
        machine = machine_with(gigabits, options)
        seconds = [step_seconds(sizes, Mesh(context=count), 1, length, machine) for count in counts]
        axes.plot(counts, seconds, "o-", markersize=3, color=color, label=f"{gigabits} Gbit/s")
        axes.axvline(best_context(sizes, length, machine), color=color, linestyle=":", linewidth=1)
    alone = step_seconds(sizes, Mesh(), 1, length, machine_with(GIGABITS[0], options))
    axes.plot(counts, [alone / count for count in counts], "--", color="gray", label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="ranks that share the row (dotted: the best number)", ylabel="seconds")
    axes.legend(fontsize=8)


def _bytes(size: float) -> str:
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed options: the assumptions, and the file of the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flops", type=float, default=2e14, help="operations a second that a rank achieves")
    parser.add_argument("--latency", type=float, default=1e-5, help="seconds of a message, however short")
    parser.add_argument("--memory", type=float, default=80, help="gigabytes of a rank")
    parser.add_argument("--tokens", type=int, default=2**22, help="of a step, or one row if that is longer")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the program, and return its exit code."""
    options = options_of(sys.argv[1:])
    print("\n".join(tables(options)))
    if options.picture is not None:
        plot(options, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
