"""The cases of training: a step of the mamba2-130m shape compared with transformers, and the trainer's overhead.

A step is forward, backward and torch's fused AdamW. The contenders have the same weights and read the same random
tokens; their losses and the gradients of the first layer's projection must agree. Memory is what a step needs above
weights, gradients and optimizer state, all of which are there before it is measured.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.core.linear import apply_linear
from anymamba.models.loss import chunked_cross_entropy
from anymamba.training.api import create_run
from anymamba.training.config.run_config import TrainingConfig
from anymamba.training.metrics.loggers import MetricsTable
from anymamba.training.metrics.progress import ProgressDisplay
from anymamba.training.tasks.language_model import LanguageTask
from anymamba.training.trainer import Trainer
from benchmarks.generation import our_model, prompt, transformers_model
from benchmarks.harness import Call, Case, Contender

CONFIG = "mamba2-130m"
LENGTHS = (512, 2048)

# Of the documents' text, as many bytes as the steps of a measurement never read twice.
_CORPUS_BYTES = 2**20


class Matrices(nn.Module):
    """The projections, embedding and head of a model with nothing between them: what no implementation can avoid."""

    def __init__(self, small: bool) -> None:
        """Keep the parameters of our model."""
        super().__init__()
        model: Any = our_model.__wrapped__(CONFIG, small)
        self.embedding = model.backbone.embedding
        self.head = model.lm_head
        self.layers = nn.ModuleList(
            nn.ModuleDict({"in_proj": layer.mixer.in_proj, "out_proj": layer.mixer.out_proj})
            for layer in model.backbone.layers
        )

    def loss(self, ids_bt: Tensor) -> Tensor:
        """Return the mean loss of the next token under a stack of projections."""
        hidden_btd = self.embedding(ids_bt)
        for layer in self.layers:
            projections: Any = layer
            inner_bti = apply_linear(projections["in_proj"], hidden_btd)[..., : projections["out_proj"].in_features]
            hidden_btd = hidden_btd + apply_linear(projections["out_proj"], inner_bti)
        return chunked_cross_entropy(self.head, hidden_btd[0, :-1], ids_bt[0, 1:]) / (ids_bt.shape[1] - 1)


def build(name: str, small: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a model and the function that computes its mean loss."""
    if name == "matrices alone":
        matrices = Matrices(small)
        return matrices, matrices.loss
    if name == "transformers":
        theirs = transformers_model.__wrapped__(CONFIG, small)
        return theirs, lambda ids_bt: theirs(ids_bt, labels=ids_bt, use_cache=False).loss
    ours = our_model.__wrapped__(CONFIG, small)
    return ours, lambda ids_bt: ours(ids_bt, labels=ids_bt, logits="none").loss


def set_up_step(name: str, t: int, small: bool = False) -> Call:
    """Return a call of training steps on one row; gradients and optimizer state exist before the first."""
    ids_bt = prompt(1, t)
    model, loss_of = build(name, small)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for p in model.parameters():  # zero gradients without decay leave the weights unchanged
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    watched = next(p for name, p in model.named_parameters() if name.endswith("in_proj.weight"))

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(ids_bt)
        loss.backward()
        optimizer.step()
        assert watched.grad is not None
        return {"loss": loss.detach(), "grad in_proj": watched.grad}

    return step


def step_case(t: int) -> Case:
    """Return the cases of whole training steps: ours, transformers', and those of the matrix products alone."""
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_step, name, t),
            tiny=partial(set_up_step, name, 32, True),
            computes="matrices" if name == "matrices alone" else "model",
            library="transformers" if name == "transformers" else "anymamba",
            heavy=t > 512,
        )
        for name in ("anymamba", "transformers", "matrices alone")
    )
    return Case(name=f"training/{CONFIG}/t{t}", contenders=contenders, baseline="anymamba", tolerance=1e-3)


def start_run(**sections: Any) -> Trainer[LanguageTask]:
    """Return a run on random words, in a directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="anymamba-benchmark-"))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (_CORPUS_BYTES,), generator=generator, dtype=torch.uint8)
    (directory / "words.txt").write_bytes(text.numpy().tobytes())
    values = {
        "data": {"sources": [str(directory / "words.txt")]},
        "schedule": {"kind": "constant", "warmup": 0, "steps": 10**6},
        "threads": torch.get_num_threads(),
        **sections,
    }
    return create_run(TrainingConfig.from_dict(values), directory / "run", lambda _: None)


def set_up_trainer(bare: bool, small: bool = False) -> Call:
    """Return a call of steps of a run; `bare`: forward, backward and optimizer alone, on existing batches."""
    trainer = start_run(model={"depth": 1 if small else 4})
    trainer.save()
    if bare:
        batches, optimizer = trainer.task.batches(0), trainer.optimizer
        model: Any = trainer.model

        def step() -> dict[str, Tensor]:
            optimizer.zero_grad()
            cost, _ = trainer.task.loss(model, batches[0], None, torch.float32)
            (cost / batches[0].loss_terms).backward()
            optimizer.step(1.0)
            return {"loss": cost.detach() / batches[0].loss_terms}

        return step
    table = MetricsTable(trainer.directory / "metrics.csv", 0, trainer.task.METRICS)
    with redirect_stderr(io.StringIO()):
        display = ProgressDisplay(trainer.config.schedule.steps, 0, 1)

    def whole() -> dict[str, Tensor]:
        with redirect_stderr(io.StringIO()):
            row, tokens = trainer._take_step()
            display.at(row, tokens)
            table.add(row)
        return {"loss": torch.tensor(row.loss)}

    return whole


def trainer_case() -> Case:
    """Return the case of the trainer's overhead: batches, clipping, checks, metrics, display."""
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_trainer, bare),
            tiny=partial(set_up_trainer, bare, True),
            computes="step",
        )
        for name, bare in (("forward, backward and optimizer", True), ("trainer", False))
    )
    return Case(name="training/overhead", contenders=contenders, baseline=contenders[0].name)


CASES: tuple[Case, ...] = (*(step_case(t) for t in LENGTHS), trainer_case())
