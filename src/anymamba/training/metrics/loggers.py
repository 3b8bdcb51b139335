"""Logs of a run for other programs: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from anymamba.training.config.run_config import RunConfig
from anymamba.training.metrics.metrics_table import Row


@runtime_checkable
class Log(Protocol):
    """What the loop asks of a log."""

    def add(self, row: Row) -> None:
        """Log a step."""

    def close(self) -> None:
        """Write what is left."""


def open_logs(config: RunConfig, directory: Path, step: int) -> list[Log]:
    """The logs that a config asks for; `step` steps have been taken.

    Raises:
        ValueError: a library that one needs is not installed.
    """
    logs: list[Log] = []
    if config.evaluation.tensorboard:
        logs.append(TensorBoard(directory / "tensorboard", step))
    if config.evaluation.wandb is not None:
        logs.append(WeightsAndBiases(config.evaluation.wandb, directory, config.flat()))
    return logs


class TensorBoard:
    """Logs for TensorBoard."""

    def __init__(self, directory: Path, step: int) -> None:
        """Open the logs; what was written after `step` before a resume no longer counts."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "evaluation.tensorboard = true needs TensorBoard: pip install 'anymamba[train]', or set it to false"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1)

    def add(self, row: Row) -> None:
        """Log a step."""
        for name, value in row.metrics().items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run on wandb.ai, or on disk only with WANDB_MODE=offline; a resumed run continues the same log."""

    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """Open the run."""
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(f"evaluation.wandb = {project} needs Weights & Biases: pip install 'anymamba[wandb]'")
        import wandb

        file = directory / "wandb-id.txt"
        if not file.is_file():
            file.write_text(f"{secrets.token_hex(4)}\n", encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                project=project,
                dir=str(directory),
                name=directory.name,
                id=file.read_text(encoding="utf-8").strip(),
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"evaluation.wandb = {project}: {error} (WANDB_MODE=offline logs to the run's directory only)"
            ) from error

    def add(self, row: Row) -> None:
        """Log a step."""
        self._run.log(row.metrics(), step=row.step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
