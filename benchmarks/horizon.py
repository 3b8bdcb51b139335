"""Memory against the number of passes, as a picture, from the JSON of a run of `stacks/horizon` and `stacks/whole`.

python -m benchmarks --only stacks/horizon stacks/whole --json horizon.json
python -m benchmarks.horizon horizon.json docs/horizon.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from anymamba.core.io import atomic_write

CASES = {"stacks/whole": "all passes keep a graph", "stacks/horizon": "the last two keep one (grad_horizon=2)"}


def read_memory(path: Path) -> dict[str, dict[int, float]]:
    """Return MiB by number of passes, by case.

    Raises:
        ValueError: the file is not a result of the benchmarks, or lacks a case or its memory.
    """
    try:
        cases = {case["case"]: case for case in json.loads(path.read_text())["cases"]}
        return {
            name: {int(c["contender"].split()[0]): c["peak_bytes"] / 2**20 for c in cases[name]["contenders"]}
            for name in CASES
        }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a run of {' and '.join(CASES)} with memory, got {error!r}") from error


def plot(cases: dict[str, dict[int, float]], target: Path) -> None:
    """Draw one line per case."""
    from matplotlib.figure import Figure  # slow, and an extra

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="passes", ylabel="MiB above parameters and inputs", ylim=(0, None))
    for name, by_passes in cases.items():
        axes.plot(list(by_passes), list(by_passes.values()), "o-", label=CASES[name])
    axes.legend()
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.horizon", description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="JSON file of a run that measured both cases")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args()
    try:
        plot(read_memory(options.results), options.picture)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
