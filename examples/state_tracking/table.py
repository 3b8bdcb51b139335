"""The runs of a table, and the table and plot of their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from anymamba import MambaLM
from anymamba.training import can_plot, read_metrics, train_or_resume
from examples.state_tracking.tracking import TrackingConfig, TrackingTask, nearest_half_circle

LABELS = {
    "mamba3": "Mamba-3",
    "mamba3-fixed-rotation": "Mamba-3, fixed rotation",
    "mamba3-no-rotation": "Mamba-3, no rotation",
    "mamba2": "Mamba-2",
}
# Lahoti et al. 2026, table 5: scaled accuracy at 256 tokens, in percent.
PAPER = {
    "parity": {"mamba3": 100.0, "mamba3-fixed-rotation": 1.56, "mamba3-no-rotation": 2.27, "mamba2": 0.9},
    "arithmetic": {"mamba3": 98.51, "mamba3-fixed-rotation": 20.7, "mamba3-no-rotation": 1.49, "mamba2": 47.81},
    "brackets": {"mamba3": 87.75, "mamba3-fixed-rotation": 2.62, "mamba3-no-rotation": 0.72, "mamba2": 0.88},
}
_CURVE = (8, 16, 24, 32, 40, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024)
_TEST_ROWS, _CURVE_ROWS = 2048, 256


class Result(NamedTuple):
    """The result of a run.

    Attributes:
        config: Config of the run, as nested dicts.
        validation: Best scaled accuracy of the evaluations during training.
        test: Scaled accuracy of the last weights on new sequences of the length that counts.
        curve: Pairs of a length and the scaled accuracy at that length.
        steps: Number of steps taken.
        minutes: Minutes that the steps took.
        parameters: Number of parameters of the model.
        half_circles: Rotation of a pair of states at a 0 and at a 1 of parity, in half circles; empty for other runs.
    """

    config: dict[str, Any]
    validation: float
    test: float
    curve: list[tuple[int, float]]
    steps: int
    minutes: float
    parameters: int
    half_circles: list[float]

    @property
    def tracking(self) -> dict[str, Any]:
        """Return the section of the config with the task and the model."""
        section: dict[str, Any] = self.config["tracking"]
        return section


def run(config: TrackingConfig, directory: Path, report: Callable[[str], None]) -> Result | None:
    """Begin or continue a run, and evaluate its model; return None if it was interrupted."""
    file = directory / "result.json"
    task = TrackingTask(config)
    trainer = train_or_resume(task, directory, report)
    if file.is_file():
        return read_result(file)
    c = config.tracking
    report(f"{c.language}, {LABELS[c.variant]}, d_model {c.d_model}, lr {config.optimizer.lr:g}: {directory}")
    if not trainer.run():
        return None
    model = trainer.model
    assert isinstance(model, MambaLM)
    rows = read_metrics(directory / "metrics.csv")
    result = Result(
        config=json.loads(json.dumps(config.to_dict())),  # as it is read again
        validation=max(row.evaluation["scaled_accuracy"] for row in rows if row.evaluation),
        test=task.test(model, c.judged, _TEST_ROWS),
        curve=[(length, task.test(model, length, _CURVE_ROWS)) for length in _CURVE],
        steps=trainer.step,
        minutes=sum(row.seconds for row in rows) / 60,
        parameters=sum(p.numel() for p in model.parameters()),
        half_circles=nearest_half_circle(model)[:2] if (c.language, c.variant) == ("parity", "mamba3") else [],
    )
    file.write_text(json.dumps(result._asdict()), encoding="utf-8")
    report(f"scaled accuracy {100 * result.test:.1f} at {c.judged} tokens, after {result.steps} steps")
    return result


def read_result(path: Path) -> Result:
    """Read the result of a finished run."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return Result(**{**values, "curve": [tuple(point) for point in values["curve"]]})


def read_results(directory: Path) -> list[Result]:
    """Read the results of all runs below a directory."""
    return [read_result(path) for path in sorted(directory.glob("**/result.json"))]


def best(results: Iterable[Result]) -> dict[str, Result]:
    """Return the run with the best validation by variant; of equals the one with the fewest steps."""
    best_results: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: (-r.validation, r.steps)):
        best_results.setdefault(result.tracking["variant"], result)
    return {variant: best_results[variant] for variant in LABELS if variant in best_results}


def markdown(language: str, results: list[Result]) -> str:
    """Return the table of a language."""
    lines = [
        "| | paper | ours | best on the way | lr | d_model | parameters | steps | minutes | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    note = ""
    for variant, result in best(results).items():
        runs = [r for r in results if r.tracking["variant"] == variant]
        lines.append(
            f"| {LABELS[variant]} | {PAPER[language][variant]:.1f} | {100 * result.test:.1f} "
            f"| {100 * result.validation:.1f} | {result.config['optimizer']['lr']:g} | {result.tracking['d_model']} "
            f"| {result.parameters:,} | {result.steps:,} | {result.minutes:.0f} | {len(runs)} |"
        )
        if result.half_circles:
            zero, one = result.half_circles
            note = (
                f"\nMamba-3 rotates a pair of its states by {one:.4f} half circles at a 1, and by {zero:.4f} at a 0.\n"
            )
    return "\n".join(lines) + "\n" + note


def over_seeds(results: list[Result]) -> str:
    """Return the mean, least and greatest scaled accuracy at every length, for configs run from several seeds."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_without_seed(result), []).append(result)
    parts = []
    for group in (group for group in groups.values() if len(group) > 1):
        label, rate = LABELS[group[0].tracking["variant"]], group[0].config["optimizer"]["lr"]
        seeds = ", ".join(str(seed) for seed in sorted(result.config["seed"] for result in group))
        lines = [
            f"{label}, lr {rate:g}, seeds {seeds}:",
            "",
            "| tokens | mean | least | greatest |",
            "|---|---|---|---|",
        ]
        for points in zip(*(result.curve for result in group), strict=True):
            values = [100 * value for _, value in points]
            mean = sum(values) / len(values)
            lines.append(f"| {points[0][0]:,} | {mean:.1f} | {min(values):.1f} | {max(values):.1f} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _without_seed(result: Result) -> str:
    return json.dumps({**result.config, "seed": None}, sort_keys=True)


def plot(language: str, results: list[Result], target: Path) -> None:
    """Draw the scaled accuracy over the length; training lengths are shaded, other seeds of a run are thin lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=language, xlabel="tokens", ylabel="scaled accuracy, %", ylim=(-10, 105))
    chosen = best(results)
    for variant, result in chosen.items():
        label = f"{LABELS[variant]}, seed {result.config['seed']}"
        (line,) = axes.plot(*_points(result), marker=".", label=label)
        for other in results:
            if other is not result and _without_seed(other) == _without_seed(result):
                axes.plot(*_points(other), color=line.get_color(), lw=0.8, alpha=0.6)
    section = next(iter(chosen.values())).tracking
    axes.axvspan(section["shortest"], section["longest_last"], color="gray", alpha=0.15, label="training")
    axes.axvline(section["judged"], color="gray", ls="--", lw=1)
    axes.legend()
    figure.savefig(target, format="png")


def _points(result: Result) -> tuple[list[int], list[float]]:
    return [length for length, _ in result.curve], [100 * value for _, value in result.curve]


def write_summary(language: str, directory: Path) -> str:
    """Write table.md, results.json and plot.png of all finished runs below a directory, and return the table."""
    results = read_results(directory)
    if not results:
        raise ValueError(f"{directory}: expected finished runs, got none")
    text = "\n".join(part for part in (markdown(language, results), over_seeds(results)) if part)
    (directory / "table.md").write_text(text, encoding="utf-8")
    values = json.dumps([result._asdict() for result in results], indent=1)
    (directory / "results.json").write_text(values, encoding="utf-8")
    if can_plot():
        plot(language, results, directory / "plot.png")
    return text
