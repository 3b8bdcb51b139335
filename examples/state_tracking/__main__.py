"""Train the models of a table, and write it beside the paper's figures.

python -m examples.state_tracking --task parity --quick        # Mamba-3 and Mamba-2, one learning rate
python -m examples.state_tracking --task arithmetic            # all rows; when it was stopped, it continues
python -m examples.state_tracking --task parity --variants mamba2 --lr 1e-3 --set tracking.d_model=64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.state_tracking.table import LABELS, run, write_summary
from examples.state_tracking.tracking import TrackingConfig

# What is common to all runs of a language; see RESULTS.md for what was tried.
_EXPRESSIONS = {
    "tracking.n_layer": "3",
    # A turn is a rate times a step size: by a fifth or a quarter of a circle it needs larger steps than language does.
    "tracking.block": "{dt_min = 0.1, dt_max = 1.0}",
    "tracking.tokens": "4096",
    "optimizer.kind": "muon",
    "optimizer.weight_decay": "0.1",
}
_SETTINGS: dict[str, dict[str, str]] = {
    "parity": {
        "tracking.n_layer": "1",
        "tracking.turning": "1.0",
        "tracking.block": "{dt_min = 0.1, dt_max = 1.0}",
        "tracking.tokens": "4096",
        "tracking.grows_from": "0.15",
        "tracking.grows_to": "0.35",
        "tracking.settle": "0.3",
        "tracking.settles_from": "0.4",
        "tracking.settles_to": "0.6",
        "schedule.steps": "2000",
    },
    "arithmetic": {
        **_EXPRESSIONS,
        "tracking.d_model": "32",
        "tracking.turning": "1.0",
        "tracking.longest_last": "512",
        "tracking.grows_from": "0.4",
        "tracking.grows_to": "0.75",
        "schedule.steps": "10000",
    },
    "brackets": {
        **_EXPRESSIONS,
        "tracking.longest_last": "320",
        "tracking.grows_from": "0.25",
        "tracking.grows_to": "0.7",
        "schedule.steps": "14000",
    },
}
_RATES = {"parity": "1e-3", "arithmetic": "2e-3", "brackets": "2e-3"}
_OPTIONS = {"tracking.language": "--task", "tracking.variant": "--variants", "optimizer.lr": "--lr", "seed": "--seed"}
_COMMON = {
    "optimizer.weight_decay": "0",
    "optimizer.beta2": "0.999",
    "optimizer.clip": "0.1",
    "schedule.warmup": "100",
    "schedule.final": "0",
    "evaluation.every": "250",
    "evaluation.log_every": "50",
    "checkpoints.every": "250",
    "threads": "1",
    "tracking.rows": "64",
    "tracking.d_model": "64",
    "tracking.solved": "2",  # never: the last weights count
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, and print the table; a mistake gives a line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.state_tracking", description="State tracking: one row of runs per model, and a table."
    )
    parser.add_argument("--task", choices=sorted(_SETTINGS), required=True)
    parser.add_argument("--variants", default=",".join(LABELS), help="rows, with commas (default: %(default)s)")
    parser.add_argument("--lr", help="learning rates, with commas: one run each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="Mamba-3 and Mamba-2, one learning rate")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config")
    parser.add_argument("--out", default="runs/state_tracking", help="directory (default: %(default)s)")
    parser.add_argument("--summary", action="store_true", help="only make the table of the runs that are finished")
    args = parser.parse_args(arguments)
    directory = Path(args.out) / (f"{args.task}-quick" if args.quick else args.task)
    try:
        if not args.summary and not _run_all(args, directory):
            print(f"stopped; the same command continues. Finished runs: {directory}")
            return
        print(write_summary(args.task, directory))
    except ValueError as error:
        parser.error(str(error))
    print(f"table.md, results.json, plot.png: {directory}")


def _run_all(args: argparse.Namespace, directory: Path) -> bool:
    """Every run of the table; False if there was an interrupt."""
    for variant, configs in _configs(args).items():
        for rate, config in configs.items():
            where = f"{variant}/d{config.tracking.d_model}-lr{rate}-seed{args.seed}"
            result = run(config, directory / where, lambda text: print(text, file=sys.stderr, flush=True))
            if result is None:
                return False
            if result.validation >= config.tracking.solved:
                break
    return True


def _configs(args: argparse.Namespace) -> dict[str, dict[str, TrackingConfig]]:
    """The configs of all runs, by variant and learning rate: a mistake is found before the first run."""
    if wrong := [item for item in args.set if "=" not in item]:
        raise ValueError(f"--set: expected NAME=VALUE, got {wrong[0]!r}")
    given = dict(item.split("=", 1) for item in args.set)
    if named := given.keys() & _OPTIONS.keys():
        raise ValueError(f"--set {min(named)}: expected {_OPTIONS[min(named)]} instead, which also names the run")
    variants = ["mamba3", "mamba2"] if args.quick else args.variants.split(",")
    rates = (args.lr or _RATES[args.task]).split(",")[: 1 if args.quick else None]
    settings = {**_COMMON, **_SETTINGS[args.task], **given}
    settings |= {"tracking.language": args.task, "seed": str(args.seed)}
    return {
        variant: {
            rate: TrackingConfig().replaced({**settings, "tracking.variant": variant, "optimizer.lr": rate})
            for rate in rates
        }
        for variant in variants
    }


if __name__ == "__main__":
    main()
