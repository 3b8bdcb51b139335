"""Train a model to forecast the next value of an electroencephalogram, and compare it with linear autoregression.

    python -m examples.series [--seeds 0 1 2] [--out runs/series]

The series, four channels of 800 values, comes with matplotlib. The last tenth is held out; the order of the linear
models is chosen by the tenth before it. The model reads values and changes, and forecasts changes. A run that was
stopped continues when the command is given again. The table is printed and written to OUT/series.md, and a plot of the
held-out values to OUT/series.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.tasks.tabular import TabularTask
from anymamba.training.tasks.tabular_tasks import make_task
from examples.runs import Finished, Given, command, file_config, markdown, report

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


def config_of(given: Given, seed: int, source: Path) -> TabularConfig:
    """A run on the series."""
    return file_config(
        given,
        seed,
        "next-value",
        150,
        model={"n_layer": 1, "d_model": 32, "d_state": 16, "stack": {"dropout": 0.2}},
        data={"sources": [str(source)], "held_out": HELD_OUT},
        batch={"rows": 16, "length": 128},
        optimizer={"lr": 2e-3, "weight_decay": 0.1},
    )


def forecasts(found: Finished[TabularTask], series: np.ndarray, cut: int) -> np.ndarray:
    """The last value and the change that the model expects, for each step from `cut` on, (s, c)."""
    scale = found.task.scale
    assert scale is not None
    inputs = torch.tensor(scale.shrink(with_changes(series[:-1]))[None], dtype=torch.float32)
    with torch.no_grad():
        outputs = scale.grow(found.model(inputs)[0].double().numpy())
    change: np.ndarray = outputs[cut - 1 :, CHANNELS:]
    return series[cut - 1 : -1] + change


def plot(figure: Any, series: np.ndarray, cut: int, found: dict[str, np.ndarray]) -> None:
    """The first channel of the held-out steps, and what was predicted for each."""
    axes = figure.add_subplot(xlabel="step", ylabel="first channel")
    axes.plot(range(cut, len(series)), series[cut:, 0], color="black", lw=1.5, label="held out")
    for name, values in found.items():
        axes.plot(range(cut, len(series)), values[:, 0], lw=1, label=name)
    axes.legend()


def run(given: Given) -> None:
    """Fit the linear models, train ours from every seed, and forecast the held-out steps."""
    series, source = load_series(), given.out / "series.npy"
    given.out.mkdir(parents=True, exist_ok=True)
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
    for seed in given.seeds:
        found = given.trained(make_task(config_of(given, seed, source), report))
        predicted = forecasts(found, series, cut)
        shown.setdefault("Mamba-3", predicted)
        rows.append([f"Mamba-3, seed {seed}", found.parameters, f"{rmse(predicted, held):.4f}", f"{found.seconds:.0f}"])
    given.draw("series", (9, 4), lambda figure: plot(figure, series, cut, shown))
    given.write("series", markdown(["", "parameters", "error of the next value", "seconds"], rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("series", __doc__, run, arguments, seeds=(0, 1, 2))


if __name__ == "__main__":
    raise SystemExit(main())
