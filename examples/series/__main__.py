"""Train a model to forecast the next value of an electroencephalogram, and compare it with linear autoregression.

    python -m examples.series [--seed 0 1 2] [--out runs/series]

The series, four channels of 800 values, comes with matplotlib. The last tenth is held out; the order of the linear
models is chosen by the tenth before it. The model reads values and changes, and forecasts changes. A run that was
stopped continues when the command is given again. The table is printed and written to OUT/series.md, and a plot of the
held-out values to OUT/series.png.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anymamba.training import TabularConfig, TabularTask, make_task
from examples.command import Arguments, FinishedRun, markdown_table, print_progress, run_command, tabular_config

CHANNELS, HELD_OUT, ORDERS = 4, 0.1, (1, 2, 4, 8, 12, 16, 24)


def load_series() -> np.ndarray:
    """Return the series (t, c), each channel with mean 0 and deviation 1.

    Raises:
        ValueError: matplotlib is not installed, or comes without the series.
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
    """Fit least squares on `order` previous values, and predict each step of `whole` after `known`, (s, c)."""

    def inputs(x: np.ndarray, begin: int) -> np.ndarray:
        past = [x[begin - k : len(x) - k] for k in range(1, order + 1)]
        return np.concatenate([*past, np.ones((len(x) - begin, 1))], axis=1)

    weights = np.linalg.lstsq(inputs(known, order), known[order:], rcond=None)[0]
    return inputs(whole, len(known)) @ weights


def with_changes(series: np.ndarray) -> np.ndarray:
    """Return values and their changes since the previous step, (t, 2c): a change is easier to forecast."""
    return np.concatenate([series, np.diff(series, axis=0, prepend=series[:1])], axis=1)


def rmse(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the root of the mean squared error."""
    return float(np.sqrt(((actual - expected) ** 2).mean()))


def best_order(known: np.ndarray) -> int:
    """Return the order that best predicts the last tenth of the known values from the rest."""
    cut = len(known) - round(HELD_OUT * len(known))
    return min(ORDERS, key=lambda order: rmse(autoregression(known[:cut], known, order), known[cut:]))


def run_config(arguments: Arguments, seed: int, source: Path) -> TabularConfig:
    """Return the config of a run on the series."""
    return tabular_config(
        arguments,
        seed,
        "next-value",
        150,
        model={"n_layer": 1, "d_model": 32, "d_state": 16, "stack": {"dropout": 0.2}},
        data={"sources": [str(source)], "held_out": HELD_OUT},
        batch={"rows": 16, "length": 128},
        optimizer={"lr": 2e-3, "weight_decay": 0.1},
    )


def forecast(finished: FinishedRun[TabularTask], series: np.ndarray, cut: int) -> np.ndarray:
    """Return the last value plus the change that the model forecasts, for each step from `cut` on, (s, c)."""
    scale = finished.task.scale
    assert scale is not None
    inputs = torch.tensor(scale.shrink(with_changes(series[:-1]))[None], dtype=torch.float32)
    with torch.no_grad():
        outputs = scale.grow(finished.model(inputs)[0].double().numpy())
    change: np.ndarray = outputs[cut - 1 :, CHANNELS:]
    return series[cut - 1 : -1] + change


def plot(figure: Any, series: np.ndarray, cut: int, predictions: dict[str, np.ndarray]) -> None:
    """Draw the first channel of the held-out steps, and the forecasts of each model."""
    axes = figure.add_subplot(xlabel="step", ylabel="first channel")
    axes.plot(range(cut, len(series)), series[cut:, 0], color="black", lw=1.5, label="held out")
    for name, values in predictions.items():
        axes.plot(range(cut, len(series)), values[:, 0], lw=1, label=name)
    axes.legend()


def run(arguments: Arguments) -> None:
    """Fit the linear models, train one model per seed, and forecast the held-out steps."""
    series, source = load_series(), arguments.out / "series.npy"
    arguments.out.mkdir(parents=True, exist_ok=True)
    np.save(source, with_changes(series))
    cut = len(series) - round(HELD_OUT * len(series))
    known, held = series[:cut], series[cut:]
    order = best_order(known)
    linear = autoregression(known, series, order)
    shown = {f"linear, order {order}": linear}
    rows: list[list[object]] = [
        ["the last value", 0, f"{rmse(series[cut - 1 : -1], held):.4f}", ""],
        [f"linear autoregression, order {order}", (CHANNELS * order + 1) * CHANNELS, f"{rmse(linear, held):.4f}", ""],
    ]
    for seed in arguments.seeds:
        finished = arguments.train(make_task(run_config(arguments, seed, source), print_progress))
        predicted = forecast(finished, series, cut)
        shown.setdefault("Mamba-3", predicted)
        rows.append(
            [f"Mamba-3, seed {seed}", finished.parameters, f"{rmse(predicted, held):.4f}", f"{finished.seconds:.0f}"]
        )
    arguments.draw("series", (9, 4), lambda figure: plot(figure, series, cut, shown))
    arguments.write("series", markdown_table(["", "parameters", "error of the next value", "seconds"], rows))


main = partial(run_command, "series", __doc__, run, seeds=(0, 1, 2))


if __name__ == "__main__":
    raise SystemExit(main())
