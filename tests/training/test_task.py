"""The loop with a task other than text: one block on real numbers, at growing lengths, until it is solved."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from anymamba import Mamba3
from anymamba.training.api import train_or_resume
from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import check_at_least, option
from anymamba.training.metrics.loggers import read_metrics
from anymamba.training.tasks.task import Evaluation, Task
from tests.training.cases import silent


@dataclass(frozen=True, kw_only=True)
class SumSection:
    rows: int = option(4, "rows of a step")
    solved_below: float = option(0.0, "mean cost that ends the run")

    def __post_init__(self):
        check_at_least(self, 1, "rows")


@dataclass(frozen=True, kw_only=True)
class SumConfig(RunConfig):
    sum: SumSection = field(default_factory=SumSection)


class Numbers(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

    @property
    def tokens(self):
        return self.x.shape[0] * self.x.shape[1]

    @property
    def loss_terms(self):
        return self.x.shape[0] * self.x.shape[1]

    def to(self, device):
        return Numbers(*(x.to(device) for x in self))


class SumTask(Task[Numbers]):
    """The running mean of numbers; rows of 2, 3, ... numbers."""

    METRICS = ("cost", "length")

    def __init__(self, config):
        self.config = config

    @property
    def fingerprint(self):
        return "sums"

    def make_model(self, dtype):
        return Mamba3(d_model=4, d_state=4, headdim=4, dtype=dtype)

    def batches(self, step):
        chance = torch.Generator().manual_seed(self.config.seed * 1000 + step)
        x = torch.randn(self.config.sum.rows, 2 + step // 2, 4, generator=chance)
        return [Numbers(x, x.cumsum(1) / 4)]

    def loss(self, model, batch, carried, dtype):
        return (model(batch.x) - batch.y).square().sum() / 4, None

    @torch.no_grad()
    def evaluate(self, model, step, dtype):
        (batch,) = self.batches(10)
        cost = self.loss(model, batch, None, dtype)[0].item() / batch.loss_terms
        return Evaluation({"cost": cost, "length": 7.0}, f"{cost:.3f}", solved=cost < self.config.sum.solved_below)


def config(**fields):
    sections = {"schedule": {"steps": 12, "warmup": 1}, "evaluation": {"every": 4}, "checkpoints": {"every": 3}}
    return SumConfig.from_dict({**sections, "threads": 1, **fields})


def run(directory, config):
    trainer = train_or_resume(SumTask(config), directory, silent)
    assert trainer.run()
    return trainer


def test_any_model_learns_on_lengths_that_grow(tmp_path):
    trainer = run(tmp_path, config())
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row.tokens for row in rows] == torch.tensor([4 * (2 + step // 2) for step in range(12)]).cumsum(0).tolist()
    assert [row.step for row in rows if row.evaluation] == [4, 8, 12]
    assert set(rows[3].evaluation) == {"cost", "length"}
    assert rows[-1].evaluation == trainer.evaluation.values
    assert trainer.evaluation.values["cost"] < rows[3].evaluation["cost"]


def test_a_resumed_run_is_bit_equal(tmp_path):
    whole = run(tmp_path / "whole", config())
    part = train_or_resume(SumTask(config()), tmp_path / "part", silent)
    for _ in range(5):
        part._take_step()
    part.save()
    again = run(tmp_path / "part", config())
    assert (tmp_path / "part" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert again.evaluation == whole.evaluation


def test_a_solved_run_is_finished_for_good(tmp_path):
    costs = [
        row.evaluation["cost"] for row in read_metrics(run(tmp_path / "a", config()).directory / "metrics.csv")[3::4]
    ]
    assert costs[0] > costs[1]
    early = config(sum={"solved_below": (costs[0] + costs[1]) / 2})
    assert run(tmp_path / "b", early).step == 8
    weights = (tmp_path / "b" / "model.safetensors").read_bytes()
    again = run(tmp_path / "b", early)
    assert (again.step, again.solved) == (8, True)
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == weights
    assert len(read_metrics(tmp_path / "b" / "metrics.csv")) == 8


def test_another_config_or_other_data_is_rejected(tmp_path, monkeypatch):
    run(tmp_path, config())
    with pytest.raises(ValueError, match=r"changed: sum\.rows \(was 4, got 5\)"):
        train_or_resume(SumTask(config(sum={"rows": 5})), tmp_path, silent)
    monkeypatch.setattr(SumTask, "fingerprint", "others")
    with pytest.raises(ValueError, match="the run started with: expected the checksum sums, got others"):
        train_or_resume(SumTask(config()), tmp_path, silent)


def test_layers_that_are_not_there_cannot_be_recomputed(tmp_path):
    with pytest.raises(ValueError, match="needs residual layers, got Mamba3"):
        train_or_resume(SumTask(config(precision={"activation_checkpointing": True})), tmp_path, silent)
