"""Which tile shape and how many rows of a chunk make the compiled scan fastest on this machine.

    python -m benchmarks.tune
    python -m benchmarks.tune --tiles 8x2 12x2 --chunk-rows 64 96 --rounds 9

Every tile shape is a separate library, built from the sources with cmake in a temporary folder. The libraries are
measured in turn, each in its own process; the result is a table and the constants to write into the sources.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# By instruction set: sums, one row of B and a number of A must fit into its 16 or 32 registers.
TILES = {
    "avx512": ("8x2", "12x2", "14x2", "6x4"),
    "avx2": ("6x2", "4x2", "4x3"),
    "baseline": ("8x2", "4x2", "6x4") if os.uname().machine == "aarch64" else ("4x2", "6x2", "4x3"),
}
CHUNK_ROWS = (32, 48, 64, 96, 128)
AGREEMENT = 1e-4  # of the sizes of all results, relative
NOISE = 0.03  # a smaller gain does not count


class Choice(NamedTuple):
    """A tile of `rows` x `vectors`, and the rows of a chunk."""

    tile: str
    chunk_rows: int


class Measured(NamedTuple):
    """Milliseconds of a forward, and of a forward and backward pass, and a checksum of the results."""

    forward: float
    both: float
    size: float


def parse_tile(text: str) -> str:
    """Return a tile as `8x2`.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and 1 <= int(part) <= 16 for part in parts):
        raise argparse.ArgumentTypeError(f"a tile is rows x vectors from 1 to 16, such as 8x2, got {text!r}")
    return text


def build(tile: str, isa: str, folder: Path) -> Path:
    """Build the library with that tile for one instruction set, and return it."""
    target = folder / tile
    options = [f"-DANYMAMBA_VARIANTS={isa}", f"-DANYMAMBA_TILE={tile}"]
    for command in (["-S", str(ROOT), "-B", str(target), *options], ["--build", str(target)]):
        subprocess.run(["cmake", *command], check=True, stdout=subprocess.DEVNULL)
    return next(path for path in target.glob("libanymamba_cpu.*") if path.is_file())


def measure_here(chunk_rows: list[int], tokens: int) -> dict[int, Measured]:
    """Measure the SSD of a mamba2-130m layer with this process's library, the best of three calls."""
    from dataclasses import replace

    from anymamba import SsdPath
    from benchmarks.device import seconds
    from benchmarks.mamba2 import LAYER_130M, Mode, set_up_ssd

    shape, measured = replace(LAYER_130M, t=tokens), {}
    for rows in chunk_rows:
        times, size = [], 0.0
        modes: tuple[Mode, ...] = ("forward", "forward+backward")
        for mode in modes:
            call = set_up_ssd(SsdPath.fused(rows), mode, shape)
            size = sum(float(x.double().norm()) for x in call().values())
            times.append(min(1e3 * seconds(call, 1) for _ in range(3)))
        measured[rows] = Measured(times[0], times[1], size)
    return measured


def measure(library: Path, options: argparse.Namespace) -> tuple[dict[int, Measured], float | None]:
    """Run `measure_here` in a process with another library; also return the cores that other programs used."""
    command = [sys.executable, "-m", "benchmarks.tune", "--here", "--tokens", str(options.tokens), "--chunk-rows"]
    command += map(str, options.chunk_rows)
    environment = {**os.environ, "ANYMAMBA_LIBRARY": str(library)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=ROOT)
    measured, others = json.loads(done.stdout)
    return {int(rows): Measured(*values) for rows, values in measured.items()}, others


def medians(samples: dict[Choice, list[Measured]]) -> dict[Choice, Measured]:
    """Measure every choice.

    Raises:
        ValueError: the choices do not compute the same.
    """
    median_by_choice = {
        choice: Measured(*(statistics.median(values) for values in zip(*measured, strict=True)))
        for choice, measured in samples.items()
    }
    sizes = [measured.size for measured in median_by_choice.values()]
    if max(sizes) - min(sizes) > AGREEMENT * max(sizes):
        raise ValueError(f"the libraries disagree: the sizes of their results are from {min(sizes)} to {max(sizes)}")
    return median_by_choice


def best(measured: dict[Choice, Measured], present: Choice) -> Choice:
    """Return the fastest choice, or the present one if it is as fast except for noise."""
    fastest = min(measured, key=lambda choice: measured[choice].both)
    if present in measured and measured[present].both <= (1 + NOISE) * measured[fastest].both:
        return present
    return fastest


def report(measured: dict[Choice, Measured], present: Choice, isa: str) -> str:
    """Return the table, and the constants to write."""
    lines = ["| tile | rows of a chunk | forward | forward + backward |", "|---|---:|---:|---:|"]
    for (tile, rows), (forward, both, _) in sorted(measured.items(), key=lambda item: item[1].both):
        lines.append(f"| {tile} | {rows} | {forward:.2f} ms | {both:.2f} ms |")
    choice = best(measured, present)
    height, width = choice.tile.split("x")
    kept = " (as now)" if choice == present else ""
    lines += ["", f"{isa}{kept}:", f"  csrc/simd/simd.h: constexpr int kOwnTile[2] = {{{height}, {width}}};"]
    return "\n".join([*lines, f"  kernels/cpu/scan_kernels.py: CHUNK_ROWS = {choice.chunk_rows}"])


def warning(others: list[float | None], advice: str) -> str:
    """Return a line about the cores that other programs used at most; empty if the machine was idle."""
    from benchmarks.harness import MAX_CORES_USED_BY_OTHERS

    most = max((used for used in others if used is not None), default=0.0)
    return f"other programs used {most:.2f} cores: {advice}\n" if most > MAX_CORES_USED_BY_OTHERS else ""


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiles", type=parse_tile, nargs="+", help="rows x vectors; several for each instruction set")
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=CHUNK_ROWS, metavar="N", help="steps times ranks")
    parser.add_argument("--rounds", type=int, default=5, help="how often each library is measured (5)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the sequence (2048)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from benchmarks.machine import OtherPrograms

    if options.here:
        other_programs = OtherPrograms()
        print(json.dumps((measure_here(options.chunk_rows, options.tokens), other_programs.cores_used())))
        return 0
    from anymamba.kernels.cpu.bindings import LIBRARY
    from anymamba.kernels.cpu.scan_kernels import CHUNK_ROWS as PRESENT_ROWS

    if LIBRARY.handle is None:
        parser.error(f"the kernels must be built, but: {LIBRARY.reason}")
    tiles = options.tiles or TILES[LIBRARY.isa]
    samples: dict[Choice, list[Measured]] = defaultdict(list)
    other_programs = OtherPrograms()
    time.sleep(1)
    others = [other_programs.cores_used()]
    print(warning(others, "do not trust what follows"), end="", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        libraries = {tile: build(tile, LIBRARY.isa, Path(folder)) for tile in tiles}
        for _ in range(options.rounds):
            for tile, library in libraries.items():
                by_rows, used = measure(library, options)
                others.append(used)
                for rows, measured in by_rows.items():
                    samples[Choice(tile, rows)].append(measured)
    print(report(medians(samples), Choice(TILES[LIBRARY.isa][0], PRESENT_ROWS), LIBRARY.isa))
    print(warning(others[1:], "do not trust this, and measure again"), end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
