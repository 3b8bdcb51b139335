"""Train a model to forecast the next value of an electroencephalogram, and compare it with linear autoregression.

    python -m examples.series [--seeds 0 1 2] [--out runs/series]

The series, four channels of 800 values, comes with matplotlib. The last tenth is held out; the order of the linear
models is chosen by the tenth before it. The model reads values and changes, and forecasts changes. A run that was
stopped continues when the command is given again. The table is printed and written to OUT/series.md, and a plot of the
held-out values to OUT/series.png.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import numpy as np
import torch
from torch import nn

from anymamba.training.file_config import FileConfig
from anymamba.training.file_task import FileTask, file_task
from anymamba.training.report import can_plot
from examples.runs import parameters_of, report, seconds_of, trained, write_figure, write_text

CHANNELS, HELD_OUT, ORDERS = 4, 0.1, (1, 2, 4, 8, 12, 16, 24)


def load_series() -> np.ndarray:
    """The series (t, c), each channel with mean 0 and deviation 1.

    Raises:
        ValueError: matplotlib is not installed, or does not have it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the series comes with matplotlib: pip install 'anymamba[examples]'") from error
    path = Path(matplotlib.get_data_path()) / "sample_data" / "eeg.dat"
    if not path.is_file():
        raise ValueError(f"{path}: this matplotlib comes without the series")
    return np.fromfile(path, dtype="<f8").reshape(-1, CHANNELS)


def autoregression(known: np.ndarray, whole: np.ndarray, order: int) -> np.ndarray:
    """What least squares on the `order` values before predicts for each step of `whole` after `known`, (s, c)."""

    def inputs(x: np.ndarray, begin: int) -> np.ndarray:
        past = [x[begin - k : len(x) - k] for k in range(1, order + 1)]
        return np.concatenate([*past, np.ones((len(x) - begin, 1))], axis=1)

    weights = np.linalg.lstsq(inputs(known, order), known[order:], rcond=None)[0]
    return inputs(whole, len(known)) @ weights


def with_changes(series: np.ndarray) -> np.ndarray:
    """Values and, beside them, how they changed since the step before, (t, 2c): a change is easier to forecast."""
    return np.concatenate([series, np.diff(series, axis=0, prepend=series[:1])], axis=1)


def rmse(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean squared error."""
    return float(np.sqrt(((found - expected) ** 2).mean()))


def best_order(known: np.ndarray) -> int:
    """The order that predicts the end of what is known best from its beginning."""
    cut = len(known) - round(HELD_OUT * len(known))
    return min(ORDERS, key=lambda order: rmse(autoregression(known[:cut], known, order), known[cut:]))


def config_of(source: Path, seed: int, steps: int) -> FileConfig:
    """A run on the series."""
    return FileConfig.from_dict(
        {
            "task": "next-value",
            "model": {"n_layer": 1, "d_model": 32, "d_state": 16, "stack": {"dropout": 0.2}},
            "data": {"sources": [str(source)], "held_out": HELD_OUT},
            "batch": {"rows": 16, "length": 128},
            "optimiser": {"lr": 2e-3, "weight_decay": 0.1},
            "schedule": {"steps": steps, "final": 0.01},
            "evaluation": {"every": 0, "log_every": 100},
            "checkpoints": {"every": 100, "keep": 1},
            "seed": seed,
            "threads": 1,
        }
    )


def forecasts(model: nn.Module, task: FileTask, series: np.ndarray, cut: int) -> np.ndarray:
    """The last value and the change that the model expects, for each step from `cut` on, (s, c)."""
    assert task.scale is not None
    inputs = torch.tensor(task.scale.shrink(with_changes(series[:-1]))[None], dtype=torch.float32)
    with torch.no_grad():
        outputs = task.scale.grow(model(inputs)[0].double().numpy())
    change: np.ndarray = outputs[cut - 1 :, CHANNELS:]
    return series[cut - 1 : -1] + change


def draw(series: np.ndarray, cut: int, found: dict[str, np.ndarray], target: Path) -> None:
    """The first channel of the held-out steps, and what was predicted for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="first channel")
    axes.plot(range(cut, len(series)), series[cut:, 0], color="black", lw=1.5, label="held out")
    for name, values in found.items():
        axes.plot(range(cut, len(series)), values[:, 0], lw=1, label=name)
    axes.legend()
    write_figure(figure, target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.series", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/series"), help="directory of the runs and results")
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args(arguments)
    try:
        series, source = load_series(), given.out / "series.npy"
        given.out.mkdir(parents=True, exist_ok=True)
        np.save(source, with_changes(series))
        cut = len(series) - round(HELD_OUT * len(series))
        known, held = series[:cut], series[cut:]
        order = best_order(known)
        linear = autoregression(known, series, order)
        found = {f"linear, order {order}": linear}
        lines = ["| | parameters | error of the next value | seconds |", "|---|---|---|---|"]
        lines.append(f"| the last value | 0 | {rmse(series[cut - 1 : -1], held):.4f} | |")
        weights = (CHANNELS * order + 1) * CHANNELS
        lines.append(f"| linear autoregression, order {order} | {weights} | {rmse(linear, held):.4f} | |")
        for seed in given.seeds:
            directory = given.out / f"seed-{seed}"
            task = file_task(config_of(source, seed, given.steps), report)
            if (trainer := trained(task, directory)) is None:
                return 130
            predicted = forecasts(trainer.model, task, series, cut)
            found.setdefault("Mamba-3", predicted)
            facts = f"{parameters_of(trainer.model)} | {rmse(predicted, held):.4f} | {seconds_of(directory):.0f}"
            lines.append(f"| Mamba-3, seed {seed} | {facts} |")
    except ValueError as error:
        parser.error(str(error))
    if can_plot():
        draw(series, cut, found, given.out / "series.png")
    write_text("\n".join(lines) + "\n", given.out / "series.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
