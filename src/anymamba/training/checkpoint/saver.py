"""Saving: what each rank writes of a checkpoint, and how all of them complete it together.

A save goes one way, from the trainer down to the disk:

    Trainer.save           collects this rank's part: tensors by file, and a function for the task's other files
    Saver.start            waits for the save before, makes a temporary directory, and starts to write
    Part.write             writes this rank's files (`sharded_tensors.write_shards`)
    Saver._lead, _follow   the main rank waits until every other rank has reported its checksums
    _complete              manifest, sync, rename, sync; then older checkpoints are removed

A single process writes in the foreground. Several ranks copy their part to host memory, which takes a moment, and write
it in a thread while the next steps are taken. The thread calls no collective: ranks report through the key-value store,
and an error is noted and raised on all ranks when their main threads meet.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

from torch import Tensor

from anymamba.core.io import digest_file, fsync
from anymamba.training.checkpoint.manifest import (
    Manifest,
    checkpoint_path,
    checkpoint_step,
    checkpoint_write_errors,
    list_checkpoints,
    make_directory,
)
from anymamba.training.checkpoint.sharded_tensors import TensorShard, shard_file_name, write_shards
from anymamba.training.distributed.process_group import World

Tensors = dict[str, Tensor | TensorShard]
_PATIENCE_S = 20.0  # how long a run that has failed waits for what is being written; torchrun kills it after 30 s
_SAVE_NUMBERS = itertools.count()  # of this process, for names of temporary directories


class Part(NamedTuple):
    """Files of a checkpoint that one rank writes."""

    tensors: dict[str, Tensors]  # tensors by name, for each file name
    write_others: Callable[[Path], object]  # writes all other files into a directory

    def write(self, directory: Path, check_time: Callable[[], None] = lambda: None) -> None:
        """Write everything; `check_time` is called before each file of tensors, and may raise."""
        self.write_others(directory)
        for name, tensors in self.tensors.items():
            check_time()
            write_shards(directory / name, tensors)


def rank_file(kind: str, rank: int, size: int, tensors: Tensors) -> dict[str, Tensors]:
    """Return one rank's file of a kind of tensors, which `size` ranks divide between them.

    Tensors that are not divided are the same on all of these ranks, and the first one writes them.
    """
    local = {name: x for name, x in tensors.items() if (len(x.rows) if isinstance(x, TensorShard) else rank == 0)}
    return {shard_file_name(kind, rank, size): local}


def copy_to_host(tensors: Tensors) -> Tensors:
    """Copy tensors to host memory, where no step changes them."""

    def copy(x: Tensor) -> Tensor:
        return x.detach().to("cpu", copy=True)

    return {
        name: x._replace(rows=copy(x.rows)) if isinstance(x, TensorShard) else copy(x) for name, x in tensors.items()
    }


@dataclass
class _Save:
    """A checkpoint that is being written."""

    temporary: Path  # the directory that it is written to
    manifest: Manifest  # without checksums
    previous: int  # step of the checkpoint before it, see `_complete`
    keep: int  # number of checkpoints to keep
    deadline: float = math.inf  # when it is given up, on the clock of `monotonic`
    error: Exception | None = None  # why it cannot be written, once that is known

    @property
    def target(self) -> Path:
        """Path of the complete checkpoint."""
        return checkpoint_path(self.temporary.parent, self.manifest.step)

    def check_time(self) -> None:
        """Raise `OSError` if the deadline has passed."""
        if monotonic() >= self.deadline:
            raise OSError("the run has ended")


class Saver:
    """Writes the checkpoints of a run, one after another."""

    def __init__(self, directory: Path, world: World, timeout_s: float) -> None:
        """Prepare to save; the other ranks may write for `timeout_s` after the main rank has finished its part."""
        self._directory = directory
        self._world = world
        self._timeout_s = timeout_s
        self._thread: Thread | None = None
        self._save: _Save | None = None

    @property
    def failed(self) -> bool:
        """Return whether this rank knows that a checkpoint cannot be written; `finish` raises the error."""
        return self._thread is not None and self._save is not None and self._save.error is not None

    def start(self, part: Part, manifest: Manifest, *, previous: int, keep: int) -> None:
        """Start to write a checkpoint once the one before it is complete; a single process also completes it.

        `previous` is the step of the checkpoint that the run wrote, or was resumed from, last; -1 if there is none.
        Raise `OSError` if this checkpoint, or the one before it, cannot be written; earlier ones are kept.
        """
        # 1) Wait for the save before, whose checkpoint this one may replace.
        self.finish()
        # 2) The main rank makes a temporary directory, in which all ranks write.
        temporary = Path(self._world.run_on_main(lambda: str(_make_temporary(self._directory, manifest.step))))
        save = self._save = _Save(temporary, manifest, previous, keep)
        # 3) Write: here if there is one process, else in a thread that reports to the main rank.
        if self._world.size == 1:
            self._lead(part, save, iter(()))
            return
        store, key = self._world.store_channel()
        keys = [f"{key}/{rank}" for rank in range(self._world.size)]

        def work() -> None:
            try:
                if self._world.is_main:
                    self._lead(part, save, self._reports(store, keys, save))
                else:
                    self._follow(part, save, lambda report: store.set(keys[self._world.rank], report))
            except Exception as error:
                known = isinstance(error, OSError | ValueError | TypeError)
                save.error = error if known else OSError(f"{type(error).__name__}: {error}")

        self._thread = Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint that was started is complete; all ranks take part.

        If it could not be written, all raise `AllRanksError`, whose message names the rank and the file.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._world.run_on_main(str)  # in the store, where the others can wait for as long as the main rank writes
        self._world.run_checked(self._raise_error)

    def _raise_error(self) -> None:
        if self._save is not None and self._save.error is not None:
            raise self._save.error

    def __enter__(self) -> Saver:
        """Begin the block whose end waits for what is being written."""
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Wait for a limited time for what is being written, after an error that other ranks may not know of.

        Then the thread gives up between two files. If it is busy with a file, it ends with the process or after that
        file; what it has written does not become a checkpoint.
        """
        if self._thread is not None and self._save is not None and kind is not KeyboardInterrupt:
            self._save.deadline = monotonic() + _PATIENCE_S
            self._thread.join(1.25 * _PATIENCE_S)
            self._thread = None

    def _lead(self, part: Part, save: _Save, reports: Iterator[tuple[int, str]]) -> None:
        """Write the main rank's part, wait for those of the others, and complete the checkpoint."""
        error: Exception | None = None
        digests: dict[str, str] = {}
        try:
            # 1) Write this rank's part.
            try:
                with checkpoint_write_errors(save.target):
                    part.write(save.temporary, save.check_time)
            except OSError as failure:
                error = OSError(f"rank 0 of {self._world.size}: {failure}") if self._world.size > 1 else failure
            except Exception as failure:
                error = failure
            # 2) Collect the reports of the others, even after an error: they may still be writing.
            for rank, report in reports:
                if report[0] == "-":
                    error = error or OSError(f"rank {rank} of {self._world.size}: {report[1:]}")
                else:
                    digests |= json.loads(report[1:])
            if error is not None:
                raise error
            # 3) Turn the directory into a checkpoint.
            save.check_time()
            _complete(save, digests)
        finally:
            shutil.rmtree(save.temporary, ignore_errors=True)

    def _follow(self, part: Part, save: _Save, report: Callable[[str], object]) -> None:
        """Write another rank's part, sync it, and report its checksums."""
        try:
            with checkpoint_write_errors(save.target):
                part.write(save.temporary, save.check_time)
                for name in part.tensors:
                    fsync(save.temporary / name)
                digests = {name: digest_file(save.temporary / name) for name in part.tensors}
        except Exception as error:
            report(f"-{error}")
            raise
        report(f"+{json.dumps(digests)}")

    def _reports(self, store: Any, keys: list[str], save: _Save) -> Iterator[tuple[int, str]]:
        """Yield the other ranks with their reports; a rank that does not report in time has failed."""
        end = monotonic() + self._timeout_s
        while not store.check(keys[1:]) and monotonic() < min(end, save.deadline):
            sleep(0.02)
        for rank, key in enumerate(keys[1:], 1):
            if store.check([key]):
                yield rank, store.get(key).decode()
                store.delete_key(key)
            else:
                yield rank, f"-{save.target}: cannot be written; earlier ones are kept (no answer from this rank)"


def prune_checkpoints(directory: Path, step: int, keep: int) -> None:
    """Remove what interrupted saves have left, and all but the latest `keep` checkpoints up to a step."""
    _remove_temporary(directory)
    for path in [path for path in list_checkpoints(directory) if checkpoint_step(path) <= step][keep:]:
        _remove(path)


def _remove_temporary(directory: Path) -> None:
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _make_temporary(directory: Path, step: int) -> Path:
    """Make a temporary directory for the files of a checkpoint."""
    target = checkpoint_path(directory, step)
    with checkpoint_write_errors(target):
        make_directory(directory)
        _remove_temporary(directory)
        # The number tells it from one that was given up and may still be written to.
        temporary = directory / f".{target.name}.{os.getpid()}-{next(_SAVE_NUMBERS)}.tmp"
        temporary.mkdir()
    return temporary


def _complete(save: _Save, digests: dict[str, str]) -> None:
    """Turn a directory with all files but the manifest into a checkpoint, and remove those that no longer count.

    Checkpoints of steps after `save.previous` do not count: they are damaged, or the run would have resumed from them.
    `digests` are the checksums of the files that other ranks wrote and synced.
    """
    temporary, directory, target = save.temporary, save.temporary.parent, save.target
    with checkpoint_write_errors(target):
        # 1) The manifest, with a checksum of every other file.
        names = sorted(path.name for path in temporary.iterdir())
        if missing := sorted(digests.keys() - set(names)):
            raise FileNotFoundError(f"{', '.join(missing)}, which other ranks wrote, cannot be found")
        files = {name: digests.get(name) or digest_file(temporary / name) for name in names}
        save.manifest._replace(files=files).write(temporary)
        # 2) Sync the data, then rename, then sync the directory: a power cut leaves a complete checkpoint or none.
        for path in temporary.iterdir():
            fsync(path)
        fsync(temporary)
        if target.exists():  # a damaged one, or the same
            _remove(target)
        temporary.rename(target)
    try:
        fsync(directory)
    except OSError as error:
        raise OSError(f"{target}: complete, but it may not survive a power cut ({error})") from error
    # 3) Remove damaged and old checkpoints.
    for path in list_checkpoints(directory):
        if path != target and checkpoint_step(path) > save.previous:
            _remove(path)
    others = [path for path in list_checkpoints(directory) if path != target]
    for path in others[save.keep - 1 :]:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint; if that is interrupted, nothing is left that looks like one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_SAVE_NUMBERS)}.tmp")
    path.rename(temporary)
    shutil.rmtree(temporary)
