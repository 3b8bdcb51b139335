"""Train the models of a table, and write it next to the paper's figures.

python -m examples.state_tracking --task parity --quick        # Mamba-3 and Mamba-2, one learning rate
python -m examples.state_tracking --task arithmetic            # all models; the same command continues
python -m examples.state_tracking --task parity --variants mamba2 --lr 1e-3 --set tracking.d_model=64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.state_tracking.table import LABELS, run, write_summary
from examples.state_tracking.tracking import TrackingConfig

# Settings that the runs of a language share; RESULTS.md has what was tried.
_EXPRESSIONS = {
    "tracking.n_layer": "3",
    # An angle is a rate times a step size: a fifth or a quarter of a circle needs larger steps than language does.
    "tracking.block": "{dt_min = 0.1, dt_max = 1.0}",
    "tracking.tokens": "4096",
    "optimizer.kind": "muon",
    "optimizer.weight_decay": "0.1",
}
_SETTINGS: dict[str, dict[str, str]] = {
    "parity": {
        "tracking.n_layer": "1",
        "tracking.rotating": "1.0",
        "tracking.block": "{dt_min = 0.1, dt_max = 1.0}",
        "tracking.tokens": "4096",
        "tracking.grows_from": "0.15",
        "tracking.grows_to": "0.35",
        "tracking.rotation_penalty": "0.3",
        "tracking.penalty_from": "0.4",
        "tracking.penalty_to": "0.6",
        "schedule.steps": "2000",
    },
    "arithmetic": {
        **_EXPRESSIONS,
        "tracking.d_model": "32",
        "tracking.rotating": "1.0",
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
    """Train, and print the table; a user's mistake exits with code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.state_tracking", description="State tracking: train the models of a table."
    )
    parser.add_argument("--task", choices=sorted(_SETTINGS), required=True)
    parser.add_argument(
        "--variants", default=",".join(LABELS), help="models, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--lr", help="learning rates, with commas: one run each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="Mamba-3 and Mamba-2, one learning rate")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the config")
    parser.add_argument("--out", default="runs/state_tracking", help="directory (default: %(default)s)")
    parser.add_argument("--summary", action="store_true", help="only write the table of the finished runs")
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
    """Train every model of the table; return False if a run was interrupted."""
    for variant, configs in _configs(args).items():
        for rate, config in configs.items():
            name = f"{variant}/d{config.tracking.d_model}-lr{rate}-seed{args.seed}"
            result = run(config, directory / name, lambda text: print(text, file=sys.stderr, flush=True))
            if result is None:
                return False
            if result.validation >= config.tracking.solved:
                break
    return True


def _configs(args: argparse.Namespace) -> dict[str, dict[str, TrackingConfig]]:
    """Return the configs of all runs, by variant and learning rate, so that a mistake is seen before the first run."""
    if invalid := [item for item in args.set if "=" not in item]:
        raise ValueError(f"--set: expected NAME=VALUE, got {invalid[0]!r}")
    fields = dict(item.split("=", 1) for item in args.set)
    if named := fields.keys() & _OPTIONS.keys():
        raise ValueError(f"--set {min(named)}: expected {_OPTIONS[min(named)]} instead, which also names the run")
    variants = ["mamba3", "mamba2"] if args.quick else args.variants.split(",")
    rates = (args.lr or _RATES[args.task]).split(",")[: 1 if args.quick else None]
    settings = {**_COMMON, **_SETTINGS[args.task], **fields}
    settings |= {"tracking.language": args.task, "seed": str(args.seed)}
    return {
        variant: {
            rate: TrackingConfig().with_overrides({**settings, "tracking.variant": variant, "optimizer.lr": rate})
            for rate in rates
        }
        for variant in variants
    }


if __name__ == "__main__":
    main()
