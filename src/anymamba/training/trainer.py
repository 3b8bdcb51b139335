"""The training loop: read, differentiate, step, evaluate, save. It can be stopped at any point and loses nothing."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from anymamba.core.dtypes import parse_device
from anymamba.core.io import fsync, run_lock
from anymamba.core.process import catch_signals
from anymamba.training.checkpoint.manifest import Manifest, make_directory, read_manifest, remove_temporary_files
from anymamba.training.checkpoint.resume import Reopened, check_no_run, check_unchanged, snapshot_checkpoints
from anymamba.training.checkpoint.saver import Part, Saver, Tensors, copy_to_host, prune_checkpoints, rank_file
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
from anymamba.training.layer_execution import compile_layers, recompute_layers
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
        task: What the run learns.
        directory: Directory of the run.
        config: Config of the run.
        model: The model that is trained.
        optimizer: Its optimizer.
        step: Number of steps taken.
        tokens: Number of tokens read so far.
        solved: Whether the task was found to be solved, which finishes the run before its last step.
        evaluation: Result of the last evaluation; None before the first.
        changes: Changes of the config since the run began.
    """

    def __init__(
        self,
        task: T,
        directory: Path,
        reopened: Reopened[Any] | None,
        report: Callable[[str], None],
        world: World | None = None,
    ) -> None:
        """Build a new model, or that of a checkpoint.

        Args:
            task: What to learn.
            directory: Directory of the run.
            reopened: The checkpoint to continue from; None for a new run.
            report: Receives lines about what happens.
            world: All ranks, in the mesh that the task was made for.

        Raises:
            ValueError: The checkpoint belongs to other data or to another model.
        """
        self.task = task
        self.directory = directory
        self.config = config = task.config
        self.step = 0
        self.tokens = 0
        self.solved = False
        self.evaluation: Evaluation | None = None
        self.changes = list[dict[str, Any]]()
        self._report = report
        self._world = world = world or World()
        self._carried: list[Any] = []  # for each microbatch, what the next step continues from
        self._saved_step = -1  # of the latest checkpoint
        self._saved_before = -1
        self._snapshot: dict[str, int] | None = None  # of the run's checkpoints when it was last unlocked
        self._checkpoint_to_amend: Path | None = None  # whose config is to be replaced
        self._saver = Saver(directory / "checkpoints", world, float(config.parallel.timeout))
        self._dtype = _DTYPES[config.precision.dtype]
        # 1) Check what is cheap to check.
        if reopened is not None and reopened.checkpoint.manifest.data != task.fingerprint:
            raise ValueError(
                f"{directory}: not the data that the run started with: "
                f"expected the checksum {reopened.checkpoint.manifest.data}, got {task.fingerprint}"
            )
        # 2) Build the model, with the same weights on every rank, and shard it.
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._device = parse_device(world.local_device(config.device), "device =")
        torch.manual_seed(config.seed)
        self.model = task.make_model(torch.float64 if self._dtype == torch.float64 else torch.float32)
        self.model.to(self._device)
        # The unsharded model without values, for checkpoints that are written from copies or from all ranks.
        self._meta_model = self.model if world.size == 1 else meta_copy(self.model)
        if world.shard_size > 1:
            shard_model(self.model, world, config.parallel.reduce)
        # 3) The optimizer takes views of the parameters where they will stay.
        self.optimizer = Optimizer(self.model, config.optimizer, world)
        if reopened is not None:
            self._restore(reopened)
        # 4) Change how layers run, once their parameters have their values.
        if config.precision.compile:
            compile_layers(self.model, self._device)
        if config.precision.activation_checkpointing:
            recompute_layers(self.model)

    @property
    def finished(self) -> bool:
        """Return whether there is no step left to take."""
        return self.solved or self.step >= self.config.schedule.steps

    def run(self, callbacks: Iterable[Callback] = (), *, shown: bool = True) -> bool:
        """Train to the end, or until the task is solved or a signal arrives.

        Args:
            callbacks: Functions called after every step; one that returns True ends the run there. An exception of a
                callback passes through and leaves the run as it was at its last checkpoint.
            shown: Whether to show progress on stderr.

        Returns:
            True if the run is finished.

        Raises:
            FloatingPointError: The loss or the gradient is not finite; the state before that step is saved.
            ValueError: Another process is using the run or has continued it, or a new run would replace what is there.
        """
        world, lock = self._world, ExitStack()
        stop_signals = catch_signals(signal.SIGINT, signal.SIGTERM)
        # The saver waits for its thread after the error has been sent to the other ranks.
        with lock, stop_signals as interrupted, self._saver, world.translate_comm_errors():
            world.run_checked(lambda: self._enter(lock))
            self._train(lambda: world.any_rank(interrupted()), list(callbacks), shown)
            self.save()
            self._write_model(self.directory)
        return self.finished

    def _enter(self, lock: ExitStack) -> None:
        """Lock the directory, and check that the run may write to it."""
        if not self._world.is_main:
            return
        make_directory(self.directory)
        lock.enter_context(run_lock(self.directory))
        if self._snapshot is not None:
            check_unchanged(self.directory, self._snapshot)
        elif self._saved_step < 0:
            check_no_run(self.directory)
        if self._checkpoint_to_amend is not None:
            manifest = read_manifest(self._checkpoint_to_amend)
            manifest = manifest._replace(config=self.config.to_dict(), changes=self.changes)
            manifest.write(self._checkpoint_to_amend, durable=True)
            self._checkpoint_to_amend = None
        prune_checkpoints(self.directory / "checkpoints", self._saved_step, self.config.checkpoints.keep)
        for directory in (self.directory, self.directory / "samples"):
            remove_temporary_files(directory)
        lock.callback(self._take_snapshot)  # before the directory is unlocked

    def _take_snapshot(self) -> None:
        self._snapshot = snapshot_checkpoints(self.directory)

    def _train(self, interrupted: Callable[[], bool], callbacks: list[Callback], shown: bool) -> None:
        """Take steps until the run is finished, `interrupted()`, or stopped by a callback."""
        c, is_main = self.config, self._world.is_main
        # 1) Open the logs. The first checkpoint comes before metrics.csv: a run with metrics can be resumed.
        display = ProgressDisplay(c.schedule.steps, self.step, c.evaluation.log_every, shown and is_main)
        logs: list[Log] = self._world.run_checked(lambda: open_logs(c, self.directory, self.step) if is_main else [])
        if self._saved_step < 0:
            self.save()
        self._world.run_checked(lambda: logs.insert(0, self._open_table(display)) if is_main else None)
        if not can_plot():
            display.report("no plots: matplotlib is not installed (pip install 'anymamba[train]')")
        try:
            stopped = False
            while not self.finished and not stopped and not interrupted():
                self._world.check_launcher()
                # 2) Read, differentiate, step.
                metrics, tokens = self._take_step()
                display.at(metrics, tokens)
                # 3) Evaluate, if it is time.
                if self._is_due(c.evaluation.every):
                    metrics = metrics._replace(evaluation=self._evaluate(display))
                # 4) Log, and plot what was evaluated.
                for log in logs:
                    log.add(metrics)
                if metrics.evaluation and can_plot() and is_main:
                    self.task.plot(self.directory)
                # 5) Save, if it is time; several ranks write while the next steps are taken.
                if self._is_due(c.checkpoints.every):
                    self.save(wait=False)
                # 6) Agree whether to stop: a callback of the main rank asked for it, or a rank could not save.
                for callback in callbacks if is_main else ():
                    stopped |= callback(metrics) is True
                stopped = self._world.any_rank(stopped or self._saver.failed)
        except FloatingPointError:
            self.save()
            raise
        finally:
            display.close()
            for log in logs:
                log.close()

    @property
    def _metrics_file(self) -> Path:
        return self.directory / "metrics.csv"

    def _open_table(self, display: ProgressDisplay) -> MetricsTable:
        table = MetricsTable(self._metrics_file, self.step, self.task.METRICS)
        if table.missing:
            display.report(f"{self._metrics_file}: no rows of {table.missing} of the {self.step} steps taken")
        return table

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of the current state, unless it has been written.

        Args:
            wait: Whether several ranks wait until it is complete; otherwise they write it in the background.

        Raises:
            OSError: A single process cannot write it, or could not write the one before it.
            AllRanksError: The same on some rank; the message names the rank and the file.
        """
        if self._saved_step != self.step:
            self._finish_saving()  # before the copies of the next one are made
            manifest = Manifest(
                self.step, self.tokens, self.task.fingerprint, self.solved, self.config.to_dict(), list(self.changes)
            )
            keep = self.config.checkpoints.keep
            self._saver.start(self._collect_part(), manifest, previous=self._saved_step, keep=keep)
            self._saved_before = self._saved_step
            self._saved_step = self.step
        if wait:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that was started; one that could not be written does not count as saved."""
        try:
            self._saver.finish()
        except Exception:
            self._saved_step = self._saved_before
            raise

    def _collect_part(self) -> Part:
        """Return what this rank writes of a checkpoint, as a copy if steps are taken meanwhile."""
        world, task, files = self._world, self.task, dict[str, Tensors]()
        freeze: Callable[[Tensors], Tensors] = copy_to_host if world.size > 1 else lambda tensors: tensors
        model = self._meta_model
        if world.is_writer:
            state: Tensors = {**self.optimizer.tensors(), "rng": torch.get_rng_state()}
            files |= rank_file("optimizer", world.shard_rank, world.shard_size, freeze(state))
            if world.shard_size > 1:
                weights = freeze(local_state_dict(self.model))
                files |= rank_file("model", world.shard_rank, world.shard_size, weights)
            elif world.size > 1:
                model = with_state(model, freeze(local_state_dict(self.model)))
        if self._carried and world.rank % world.context_size == 0:
            carried = freeze(task.carried_tensors(self._carried))
            files |= rank_file("carried", world.dp_rank, world.dp_size, carried)
        write = task.write_model if world.shard_size == 1 else task.write_description

        def write_rest(directory: Path) -> None:
            if world.is_main:
                if self._metrics_file.is_file():  # the rows of steps that no resumed run takes again
                    fsync(self._metrics_file)
                write(model, directory)

        return Part(files, write_rest)

    def _write_model(self, directory: Path) -> None:
        """Write the whole model; a sharded one is gathered by the main rank."""
        world, model = self._world, self.model
        if world.shard_size > 1:
            tensors = full_state_dict(self.model, world.is_main)
            model = with_state(self._meta_model, tensors) if world.is_main else model
        world.run_checked(lambda: self.task.write_model(model, directory) if world.is_main else None)

    def _take_step(self) -> tuple[StepMetrics, int]:
        """Take a step; return its metrics and the number of tokens that it read."""
        began, c = perf_counter(), self.config
        if self._world.size > 1:  # a checkpoint has the state of one generator only
            torch.manual_seed((c.seed * 1_000_003 + self.step * 65_537 + self._world.rank) % 2**63)
        # 1) Read this rank's microbatches.
        batches = [batch.to(self._device) for batch in self.task.batches(self.step)]
        # 2) Compute the loss and its gradient, over all ranks.
        loss, norm, carried = self._differentiate(batches)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise FloatingPointError(self._diagnose(batches, loss, norm))
        # 3) Update the parameters.
        lr_scale = learning_rate(self.step, 1.0, c.schedule)
        self.optimizer.step(lr_scale)
        # 4) Only now is the step taken: an error before leaves the state before it.
        self._carried = carried
        tokens = self._sum_over_ranks(sum(batch.tokens for batch in batches))
        self.step += 1
        self.tokens += tokens
        seconds = perf_counter() - began
        return StepMetrics(self.step, self.tokens, loss, lr_scale * c.optimizer.lr, norm, seconds, {}), tokens

    def _differentiate(self, batches: list[Any]) -> tuple[float, float, list[Any]]:
        """Run the backward passes of a step, sum gradients over ranks, and clip them.

        Return the mean loss, the norm of its gradient before clipping, and each microbatch's state for the next step
        (empty if the task carries none).
        """
        self.optimizer.zero_grad()
        total, count, carried, world = 0.0, self._count_loss_terms(batches), [], self._world
        for number, (loss, state) in enumerate(self._losses(batches), 1):
            set_last_microbatch(self.model, number == len(batches))
            world.set_activity("to sum gradients")
            (loss / count).backward()
            total += loss.item()
            carried.append(state)
        # Each loss was divided by the terms of all ranks, so that gradients are summed; a sharded model does it
        # in its backward pass.
        if world.size > 1 and world.shard_size == 1:
            all_reduce_grads(self.model.parameters(), world, self.config.parallel.reduce)
        norm = clip_gradients(self.model, self.config.optimizer.clip, world)
        if world.size > 1:
            total = world.all_reduce_sum(torch.tensor(total, dtype=torch.float64)).item()
        return total / count, norm, ([] if all(state is None for state in carried) else carried)

    def _losses(self, batches: list[Any]) -> Iterator[tuple[Tensor, Any]]:
        """Yield the summed loss of each microbatch, and the state for the next step."""
        carried = self._carried or [None] * len(batches)
        for batch, state in zip(batches, carried, strict=True):
            yield self.task.loss(self.model, batch, state, self._dtype)

    def _count_loss_terms(self, batches: list[Any]) -> int:
        return max(1, self._sum_over_ranks(sum(batch.loss_terms for batch in batches)))

    def _sum_over_ranks(self, count: int) -> int:
        if self._world.size == 1:
            return count
        return int(self._world.all_reduce_sum(torch.tensor(count), "to count what a step reads").item())

    def _diagnose(self, batches: list[Any], loss: float, norm: float) -> str:
        """Return the error message for a loss or gradient that is not finite, after computing it again."""

        def compute() -> Tensor:
            return torch.stack([loss for loss, _ in self._losses(batches)]).sum() / self._count_loss_terms(batches)

        self.optimizer.zero_grad()
        place = self._world.first_message(first_non_finite(self.model, compute, self._world.any_rank))
        return (
            f"step {self.step + 1}: the loss is {loss} and the norm of its gradient {norm}; not finite first: {place}. "
            f"The state after step {self.step} is kept in {self.directory / 'checkpoints'}"
        )

    def _evaluate(self, display: ProgressDisplay) -> dict[str, float]:
        """Evaluate the model, show the result, and return its values by name."""
        display.begin_evaluation()
        self.model.eval()  # without dropout
        self.evaluation = evaluation = self.task.evaluate(self.model, self.step, self._dtype)
        self.model.train()
        reshard(self.model)
        self.solved = evaluation.solved
        display.report(evaluation.text)
        display.score(evaluation.values)
        return evaluation.values

    def _is_due(self, every: int) -> bool:
        return self.finished or bool(every and self.step % every == 0)

    def _restore(self, reopened: Reopened[Any]) -> None:
        """Set the state of the run to that of a checkpoint."""
        checkpoint, manifest = reopened.checkpoint, reopened.checkpoint.manifest
        # 1) Note changes of the config; the checkpoint gets them once the run is locked.
        self.changes = list(manifest.changes)
        if reopened.changes:
            values = {name: list(pair) for name, pair in reopened.changes.items()}
            self.changes.append({"step": manifest.step, **values})
            self._checkpoint_to_amend = checkpoint.path
        # 2) Read the tensors: each rank reads the rows that it needs.
        try:
            if self._world.shard_size == 1:
                self.task.read_model(self.model, checkpoint.model.whole())
            else:
                load_local(self.model, checkpoint.model)
            self.optimizer.restore(checkpoint.optimizer)
            if checkpoint.carried is not None:
                self._carried = self.task.carried_from(self.model, checkpoint.carried)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{checkpoint.path}: its tensors are not those of its config ({reason})") from error
        checkpoint.close()
        # 3) Set the rest.
        torch.set_rng_state(checkpoint.rng)
        self.step = manifest.step
        self.tokens = manifest.tokens
        self.solved = manifest.solved
        self._saved_step = manifest.step
        self._snapshot = reopened.snapshot
