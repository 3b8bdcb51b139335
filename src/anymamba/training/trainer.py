"""The loop: read, differentiate, step, evaluate, save. It can be stopped at any point and loses nothing."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from anymamba.core.dtypes import parse_device
from anymamba.core.io import run_lock
from anymamba.core.process import catch_signals
from anymamba.training.checkpoint.async_save import Part, Saver, Tensors, copy_to_host, rank_file
from anymamba.training.checkpoint.resume import Reopened, check_no_run
from anymamba.training.checkpoint.run_state import Manifest, RunState, replace_config
from anymamba.training.compile import compile_layers, recompute_layers
from anymamba.training.distributed.fsdp import (
    all_reduce_grads,
    full_state_dict,
    load_local,
    local_state_dict,
    meta_copy,
    reshard,
    set_last_microbatch,
    shard_model,
    with_state,
)
from anymamba.training.distributed.process_group import World
from anymamba.training.metrics.loggers import Log, MetricsTable, StepMetrics, can_plot, open_logs
from anymamba.training.metrics.progress import ProgressDisplay
from anymamba.training.optim.optimizer import Optimizer, clip_gradients, learning_rate
from anymamba.training.tasks.task import Evaluation, Task, first_non_finite

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Callback = Callable[[StepMetrics], object]
T = TypeVar("T", bound=Task[Any])


class Trainer(Generic[T]):
    """A run: everything that a checkpoint holds, and the loop over it.

    Attributes:
        task: what the run learns.
        step: how many steps have been taken.
        tokens: how many were read so far.
        solved: whether the task was found to be solved, which finishes the run before its last step.
        evaluated: what the last evaluation found, if there was one.
        changes: of the config since the run began.
    """

    def __init__(
        self,
        task: T,
        directory: Path,
        reopened: Reopened[Any] | None,
        report: Callable[[str], None],
        world: World | None = None,
    ) -> None:
        """Build a new model, or that of a checkpoint; `workers` have taken their places, and the task knows them."""
        self.task, self.directory, self._report = task, directory, report
        self._world = world = world or World()
        self.config = config = task.config
        checkpoint = reopened.checkpoint if reopened is not None else None
        if checkpoint is not None and checkpoint.data != task.fingerprint:
            raise ValueError(
                f"{directory}: not the data that the run started with: "
                f"expected the checksum {checkpoint.data}, got {task.fingerprint}"
            )
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._dtype = _DTYPES[config.precision.dtype]
        self._device = parse_device(world.local_device(config.device), "device =")
        self.step, self.tokens, self.solved = 0, 0, False
        self.evaluated: Evaluation | None = None
        self._carried: list[Any] = []
        torch.manual_seed(config.seed)
        self.model = task.make_model(torch.float64 if self._dtype == torch.float64 else torch.float32)
        self.model.to(self._device)
        self._saved, self.changes = -1, list[dict[str, Any]]()
        self._amended: Path | None = None  # a checkpoint whose config is to be replaced
        self._saver = Saver(directory / "checkpoints", world, float(config.parallel.timeout))
        self._plain = self.model if world.size == 1 else meta_copy(self.model)  # as files have it
        if world.shard_size > 1:
            shard_model(self.model, world, config.parallel.reduce)
        self.optimizer = Optimizer(self.model, config.optimizer, world)
        if reopened is not None:
            self._restore(reopened)
        if config.precision.compile:
            compile_layers(self.model, self._device)
        if config.precision.activation_checkpointing:
            recompute_layers(self.model)

    @property
    def finished(self) -> bool:
        """Whether there is no step left to take."""
        return self.solved or self.step >= self.config.schedule.steps

    def run(self, callbacks: Iterable[Callback] = (), *, shown: bool = True) -> bool:
        """Train to the end, or until the task is solved or a signal arrives.

        Args:
            callbacks: called after every step; one that returns True ends the run there. An exception of a callback
                passes through and leaves the run as it was at its last checkpoint.
            shown: whether progress is shown on stderr.

        Returns:
            Whether the run is finished.

        Raises:
            FloatingPointError: the loss or gradient is not finite; the state before that step is saved.
            ValueError: another process is using the run, or a new run would replace what is there.
        """
        world, lock = self._world, ExitStack()
        # The saver waits for its thread after the other workers have been told what happened.
        with (
            lock,
            catch_signals(signal.SIGINT, signal.SIGTERM) as interrupted,
            self._saver,
            world.translate_comm_errors(),
        ):
            world.run_checked(lambda: self._enter(lock))
            self._train(lambda: world.any_rank(interrupted()), list(callbacks), shown)
            self.save()
            self._write_model(self.directory)
        return self.finished

    def _enter(self, lock: ExitStack) -> None:
        """Keep other processes out of the directory, and check that the run may write to it."""
        if not self._world.is_main:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        lock.enter_context(run_lock(self.directory))
        if self._saved < 0:
            check_no_run(self.directory)
        if self._amended is not None:
            replace_config(self._amended, self.config.to_dict(), self.changes)

    def _train(self, interrupted: Callable[[], bool], callbacks: list[Callback], shown: bool) -> None:
        c, leads = self.config, self._world.is_main
        display = ProgressDisplay(c.schedule.steps, self.step, c.evaluation.log_every, shown and leads)
        logs: list[Log] = self._world.run_checked(lambda: open_logs(c, self.directory, self.step) if leads else [])
        if self._saved < 0:
            self.save()  # before there are metrics, so that a run with metrics can be resumed
        self._world.run_checked(lambda: logs.insert(0, self._table()) if leads else None)
        if not can_plot():
            display.report("no plots: matplotlib is not installed (pip install 'anymamba[train]')")
        try:
            stopped = False
            while not self.finished and not stopped and not interrupted():
                self._world.check_launcher()
                row, tokens = self._take_step()
                display.at(row, tokens)
                if self._due(c.evaluation.every):
                    row = row._replace(evaluated=self._evaluate(display))
                for log in logs:
                    log.add(row)
                if row.evaluated and can_plot() and leads:
                    self.task.plot(self.directory)
                if self._due(c.checkpoints.every):
                    self.save(wait=False)
                for callback in callbacks if leads else ():
                    stopped |= callback(row) is True
                stopped = self._world.any_rank(stopped or self._saver.failed)
        except FloatingPointError:
            self.save()
            raise
        finally:
            display.close()
            for log in logs:
                log.close()

    def _table(self) -> MetricsTable:
        return MetricsTable(self.directory / "metrics.csv", self.step, self.task.METRICS)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of the current state, unless it has been written.

        Several workers `wait` until it is complete, or write it in the background.

        Raises:
            OSError: it cannot be written, or the one before it could not; in a single process.
            SharedError: the same on some worker; the message names the worker and the file.
        """
        if self._saved != self.step:
            self._finish_saving()  # before the copies of the next one are made
            c = self.config
            facts = Manifest(
                self.step, self.tokens, self.task.fingerprint, self.solved, c.to_dict(), list(self.changes)
            )
            self._saver.start(self._part(), facts, before=self._saved, keep=c.checkpoints.keep)
            self._saved_before, self._saved = self._saved, self.step
        if wait:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that was started; one that could not be written does not count as saved."""
        try:
            self._saver.finish()
        except Exception:
            self._saved = self._saved_before
            raise

    def _part(self) -> Part:
        """What this worker writes of a checkpoint; a copy if steps are taken meanwhile."""
        world, task, files = self._world, self.task, dict[str, Tensors]()
        kept: Callable[[Tensors], Tensors] = copy_to_host if world.size > 1 else lambda tensors: tensors
        model = self._plain
        if world.is_writer:
            state: Tensors = {**self.optimizer.tensors(), "rng": torch.get_rng_state()}
            files |= rank_file("optimizer", world.shard_rank, world.shard_size, kept(state))
            if world.shard_size > 1:
                files |= rank_file("model", world.shard_rank, world.shard_size, kept(local_state_dict(self.model)))
            elif world.size > 1:
                model = with_state(model, kept(local_state_dict(self.model)))
        if self._carried and world.rank % world.context_size == 0:
            files |= rank_file("carried", world.dp_rank, world.dp_size, kept(task.carried_tensors(self._carried)))
        write = task.write_model if world.shard_size == 1 else task.write_description
        return Part(files, lambda directory: write(model, directory) if world.is_main else None)

    def _write_model(self, directory: Path) -> None:
        """Write the whole model; if workers have divided it between them, the first one gathers it."""
        world, model = self._world, self.model
        if world.shard_size > 1:
            tensors = full_state_dict(self.model, world.is_main)
            model = with_state(self._plain, tensors) if world.is_main else model
        world.run_checked(lambda: self.task.write_model(model, directory) if world.is_main else None)

    def _take_step(self) -> tuple[StepMetrics, int]:
        """Take a step; returns its metrics and the number of tokens that it read."""
        began, c = perf_counter(), self.config
        if self._world.size > 1:  # a checkpoint has the state of one generator only
            torch.manual_seed((c.seed * 1_000_003 + self.step * 65_537 + self._world.rank) % 2**63)
        batches = [batch.to(self._device) for batch in self.task.batches(self.step)]
        loss, norm, carried = self._differentiate(batches)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FloatingPointError(self._diagnose(batches, loss, norm))
        share = learning_rate(self.step, 1.0, c.schedule)
        self.optimizer.step(share)
        self._carried = carried
        tokens = self._total(sum(batch.tokens for batch in batches))
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        return StepMetrics(
            self.step, self.tokens, loss, share * c.optimizer.lr, norm, perf_counter() - began, {}
        ), tokens

    def _differentiate(self, batches: list[Any]) -> tuple[float, float, list[Any]]:
        """The mean cost, the norm of its gradient (before clipping), and the states for the next step."""
        self.optimizer.zero_grad()
        total, count, states, world = 0.0, self._count(batches), [], self._world
        for number, (cost, state) in enumerate(self._costs(batches), 1):
            set_last_microbatch(self.model, number == len(batches))
            world.set_activity("to add up gradients")
            (cost / count).backward()
            total += cost.item()
            states.append(state)
        if world.size > 1 and world.shard_size == 1:
            all_reduce_grads(self.model.parameters(), world, self.config.parallel.reduce)
        norm = clip_gradients(self.model, self.config.optimizer.clip, world)
        total = world.all_reduce_sum(torch.tensor(total, dtype=torch.float64)).item() if world.size > 1 else total
        return total / count, norm, [] if all(state is None for state in states) else states

    def _costs(self, batches: list[Any]) -> Iterator[tuple[Tensor, Any]]:
        carried = self._carried or [None] * len(batches)
        for batch, state in zip(batches, carried, strict=True):
            yield self.task.loss(self.model, batch, state, self._dtype)

    def _count(self, batches: list[Any]) -> int:
        """The number of terms in the cost, over all workers."""
        return max(1, self._total(sum(batch.loss_terms for batch in batches)))

    def _total(self, here: int) -> int:
        if self._world.size == 1:
            return here
        return int(self._world.all_reduce_sum(torch.tensor(here), "to count what a step reads").item())

    def _diagnose(self, batches: list[Any], loss: float, norm: float) -> str:
        def compute() -> Tensor:
            return torch.stack([cost for cost, _ in self._costs(batches)]).sum() / self._count(batches)

        self.optimizer.zero_grad()
        where = self._world.first_message(first_non_finite(self.model, compute, self._world.any_rank))
        return (
            f"step {self.step + 1}: the loss is {loss} and the norm of its gradient {norm}; not finite first: {where}. "
            f"The state after step {self.step} is kept in {self.directory / 'checkpoints'}"
        )

    def _evaluate(self, display: ProgressDisplay) -> dict[str, float]:
        display.evaluating()
        self.model.eval()  # without dropout
        self.evaluated = found = self.task.evaluate(self.model, self.step, self._dtype)
        self.model.train()
        reshard(self.model)
        self.solved = found.solved
        display.report(found.text)
        display.score(found.values)
        return found.values

    def _due(self, every: int) -> bool:
        return self.finished or bool(every and self.step % every == 0)

    def _restore(self, reopened: Reopened[Any]) -> None:
        checkpoint = reopened.checkpoint
        self.changes = list(checkpoint.changes)
        if reopened.changes:
            values = {name: list(pair) for name, pair in reopened.changes.items()}
            self.changes.append({"step": checkpoint.step, **values})
            self._amended = checkpoint.path
        with _naming(checkpoint):
            if self._world.shard_size == 1:
                self.task.read_model(self.model, checkpoint.model.whole())
            else:
                load_local(self.model, checkpoint.model)
            self.optimizer.restore(checkpoint.optimizer)
            if checkpoint.carried is not None:
                self._carried = self.task.carried_from(self.model, checkpoint.carried)
        checkpoint.close()
        torch.set_rng_state(checkpoint.rng)
        self.step, self.tokens, self._saved = checkpoint.step, checkpoint.tokens, checkpoint.step
        self.solved = checkpoint.solved


@contextmanager
def _naming(checkpoint: RunState) -> Iterator[None]:
    """Name the checkpoint in errors about tensors that do not fit."""
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{checkpoint.path}: its tensors are not those of its config ({reason})") from error
