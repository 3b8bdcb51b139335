"""The loop: read, differentiate, step, look, save; to be stopped at any point and lose nothing."""

from __future__ import annotations

import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from anymamba.files import replacing
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.pretrained import copy_companions
from anymamba.training.checkpoint import Checkpoint, checkpoints, load_latest, save_checkpoint
from anymamba.training.config import TrainingConfig
from anymamba.training.data import Batch, Batches
from anymamba.training.evaluation import HeldOut, evaluate, sample
from anymamba.training.optim import Optimiser, clip_gradients, learning_rate
from anymamba.training.report import Display, MetricsTable, Row, TensorBoard, can_plot, plot_losses
from anymamba.training.shards import open_corpus, prepare
from anymamba.training.step import batch_nats, carried_from, first_non_finite, recompute_layers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def train(config: TrainingConfig, directory: Path, tell: Callable[[str], None]) -> Trainer:
    """Begin a run in a directory.

    Raises:
        ValueError: the directory has a run already, or the config or the text cannot work.
    """
    if checkpoints(directory / "checkpoints"):
        raise ValueError(f"{directory}: there is a run already; go on with --resume {directory}, or name another")
    return Trainer(config, directory, None, tell)


def resume(directory: Path, overrides: dict[str, str], tell: Callable[[str], None]) -> Trainer:
    """Go on with a run from its latest good checkpoint.

    Raises:
        ValueError: there is none, or `overrides` change what the run is.
    """
    checkpoint = load_latest(directory / "checkpoints", tell)
    config = checkpoint.config.replaced(overrides)
    if changed := checkpoint.config.changed(config):
        was, new = checkpoint.config.flat(), config.flat()
        raise ValueError(
            f"{directory}: a run goes on with the config it began with; changed: "
            + ", ".join(f"{name} (was {was[name]!r}, got {new[name]!r})" for name in changed)
        )
    return Trainer(config, directory, checkpoint, tell)


class Trainer:
    """A run: everything that a checkpoint holds, and the loop over it.

    Attributes:
        step: steps taken.
        held_out: of the last evaluation, if there was one.
    """

    def __init__(
        self, config: TrainingConfig, directory: Path, checkpoint: Checkpoint | None, tell: Callable[[str], None]
    ) -> None:
        """Prepare the text, and build the model anew or from a checkpoint."""
        self.config, self.directory, self._tell = config, directory, tell
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._dtype = _DTYPES[config.precision.dtype]
        self._device = _device(config.device)
        self._tokenizer = self._make_tokenizer(checkpoint)
        shards = Path(config.data.shards) if config.data.shards else directory / "data"
        if checkpoint is None:
            self._corpus = prepare(config.data, shards, self._tokenizer, tell)
        else:
            self._corpus = open_corpus(shards)
            if self._corpus.checksum != checkpoint.data:
                raise ValueError(
                    f"{shards}: not the text that the run began with: "
                    f"expected the checksum {checkpoint.data}, got {self._corpus.checksum}"
                )
        self._batches = Batches(
            self._corpus.train,
            mode=config.data.mode,
            length=config.batch.length,
            rows=config.batch.rows,
            accumulation=config.batch.accumulation,
            seed=config.seed,
        )
        self.step, self.tokens = 0, 0
        self.held_out: HeldOut | None = None
        self._carried: list[LMCache | None] = [None] * config.batch.accumulation
        torch.manual_seed(config.seed)
        weights = torch.float64 if self._dtype == torch.float64 else torch.float32
        self.model = MambaLM(config.model.lm_config(self._tokenizer.vocab_size), dtype=weights).to(self._device)
        self.optimiser = Optimiser(self.model, config.optimiser)
        self._saved = -1
        if checkpoint is not None:
            self._restore(checkpoint)
        if config.precision.activation_checkpointing:
            recompute_layers(self.model)

    def run(self) -> bool:
        """Train to the end, or until an interrupt.

        Returns:
            Whether the run is finished.

        Raises:
            FloatingPointError: the loss or gradient is not finite; the state before that step is saved.
        """
        c, logs = self.config, self.directory / "tensorboard"
        display = Display(c.schedule.steps, self.step, c.evaluation.log_every)
        board = TensorBoard(logs, self.step) if c.evaluation.tensorboard else None
        table = MetricsTable(self.directory / "metrics.csv", self.step)
        if not can_plot():
            display.tell("no loss.png: matplotlib is not installed (pip install 'anymamba[train]')")
        try:
            with _interrupts() as interrupted:
                if self._saved < 0:
                    self.save()
                while self.step < c.schedule.steps and not interrupted():
                    row = self._take_step()
                    display.at(row, c.batch.tokens)
                    if self._due(c.evaluation.every):
                        row = row._replace(held_out_bits_per_byte=self._evaluate(display).bits_per_byte)
                    table.add(row)
                    if board is not None:
                        board.add(row)
                    if row.held_out_bits_per_byte is not None and can_plot():
                        self._plot()
                    if self._due(c.checkpoints.every):
                        self.save()
        except FloatingPointError:
            self.save()
            raise
        finally:
            table.close()
            if board is not None:
                board.close()
        self.save()
        self.model.save_pretrained(self.directory)
        return self.step == c.schedule.steps

    def save(self) -> None:
        """Write a checkpoint of the state as it is, if it has not been written."""
        if self._saved == self.step:
            return
        parts = [part for part in self._carried if part is not None]
        save_checkpoint(
            self.directory / "checkpoints",
            self.model,
            self.optimiser.tensors(),
            LMCache.cat(parts) if parts else None,
            step=self.step,
            tokens=self.tokens,
            config=self.config,
            data=self._corpus.checksum,
        )
        self._saved = self.step

    def _take_step(self) -> Row:
        began, c = perf_counter(), self.config
        batches = [batch.to(self._device) for batch in self._batches.step(self.step)]
        loss, norm, carried = self._differentiate(batches)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FloatingPointError(self._diagnose(batches, loss, norm))
        share = learning_rate(self.step, 1.0, c.schedule)
        self.optimiser.step(share)
        if c.data.mode == "stream":
            self._carried = carried
        self.step, self.tokens = self.step + 1, self.tokens + c.batch.tokens
        return Row(self.step, self.tokens, loss, share * c.optimiser.lr, norm, None, perf_counter() - began)

    def _differentiate(self, batches: list[Batch]) -> tuple[float, float, list[LMCache | None]]:
        """Mean loss, norm of its gradient (which is then clipped), and the states behind the rows."""
        count = max(1, sum(batch.predicted for batch in batches))
        self.optimiser.zero_grad()
        total, states = 0.0, []
        for batch, carried in zip(batches, self._carried, strict=True):
            nats, state = batch_nats(self.model, batch, carried, self._dtype)
            (nats / count).backward()
            total += nats.item()
            states.append(state)
        norm = clip_gradients(self.model, self.config.optimiser.clip)
        return total / count, norm, [*states]

    def _diagnose(self, batches: list[Batch], loss: float, norm: float) -> str:
        def compute() -> Tensor:
            parts = zip(batches, self._carried, strict=True)
            costs = [batch_nats(self.model, batch, carried, self._dtype)[0] for batch, carried in parts]
            return torch.stack(costs).sum() / max(1, sum(batch.predicted for batch in batches))

        self.optimiser.zero_grad()
        where = first_non_finite(self.model, compute)
        return (
            f"step {self.step + 1}: the loss is {loss} and the norm of its gradient {norm}; not finite first: {where}. "
            f"The state behind step {self.step} is kept in {self.directory / 'checkpoints'}"
        )

    def _evaluate(self, display: Display) -> HeldOut:
        self.held_out = evaluate(self.model, self._corpus, self._dtype)
        text = sample(self.model, self._tokenizer, self.config.evaluation, self.config.seed)
        display.tell(
            f"step {self.step}: held out {self.held_out.bits_per_byte:.4f} bits per byte "
            f"(xz -9: {self.held_out.xz_bits_per_byte:.4f})"
        )
        if text:
            samples = self.directory / "samples"
            samples.mkdir(exist_ok=True)
            with replacing(samples / f"step-{self.step:08d}.txt") as temporary:
                temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
            display.tell("\n".join(f"  | {line}" for line in text.splitlines()))
        return self.held_out

    def _plot(self) -> None:
        assert self.held_out is not None
        train = self._corpus.train
        plot_losses(
            self.directory / "metrics.csv",
            self.directory / "loss.png",
            self.held_out.xz_bits_per_byte,
            int(train.sizes.sum()) / train.total,
        )

    def _due(self, every: int) -> bool:
        return self.step == self.config.schedule.steps or bool(every and self.step % every == 0)

    def _make_tokenizer(self, checkpoint: Checkpoint | None) -> Tokenizer:
        """The tokenizer, from the copy of its file that belongs to the run."""
        name, copy = self.config.data.tokenizer, self.directory / "tokenizer.json"
        if name == "bytes":
            return ByteTokenizer()
        if checkpoint is None:
            FileTokenizer(Path(name))
            self.directory.mkdir(parents=True, exist_ok=True)
            copy_companions(Path(name).parent, self.directory)
            with replacing(copy) as temporary:
                shutil.copyfile(name, temporary)
        return FileTokenizer(copy)

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = dict(checkpoint.model)
        if self.model.config.tie_embeddings:
            state["lm_head.weight"] = state["backbone.embedding.weight"]
        self.model.load_state_dict(state)
        self.optimiser.restore(checkpoint.optimiser)
        torch.set_rng_state(checkpoint.rng)
        self.step, self.tokens, self._saved = checkpoint.step, checkpoint.tokens, checkpoint.step
        if checkpoint.carried is not None:
            whole, parts = carried_from(self.model, checkpoint.carried), self.config.batch.accumulation
            size = whole.batch_size // parts
            self._carried = [whole.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device = {name}: not available here ({str(error).splitlines()[0]})") from error
    return device


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come; a second one stops at once."""
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
