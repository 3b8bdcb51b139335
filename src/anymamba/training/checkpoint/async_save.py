"""Saving: what each worker writes of a checkpoint, and how all of them complete it together.

A single process writes in the foreground. Several workers copy what they have to write, which takes a moment, and write
it in a thread while the next steps are taken. Each reports through the store that its files are on the disk; then the
first one gives the checkpoint its name. No thread calls a collective: an error is noted, and raised on all workers when
the main threads meet.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

from torch import Tensor

from anymamba.core.io import digest_file, fsync
from anymamba.training.checkpoint.run_state import (
    Manifest,
    begin_checkpoint,
    checkpoint_path,
    checkpoint_write_errors,
    finish_checkpoint,
)
from anymamba.training.checkpoint.sharded_tensors import TensorShard, file_name, write_shards
from anymamba.training.distributed.process_group import World

Tensors = dict[str, Tensor | TensorShard]
_PATIENCE = 20.0  # seconds that a run which has failed waits for what is being written; torchrun kills it after 30


class Part(NamedTuple):
    """What a worker writes of a checkpoint.

    Attributes:
        tensors: by file name, and in each file by name.
        others: writes all other files into a directory.
    """

    tensors: dict[str, Tensors]
    others: Callable[[Path], object]

    def write(self, directory: Path, check_time: Callable[[], None] = lambda: None) -> None:
        """Write everything; `check_time` is called before each file of tensors, and may raise.

        Raises:
            OSError: it cannot be written.
        """
        self.others(directory)
        for name, tensors in self.tensors.items():
            check_time()
            write_shards(directory / name, tensors)


def rank_file(kind: str, place: int, places: int, tensors: Tensors) -> dict[str, Tensors]:
    """The file of a kind that the worker at one of several places writes.

    Tensors that are not divided are the same at all places, and the first one writes them.
    """
    own = {name: x for name, x in tensors.items() if (len(x.rows) if isinstance(x, TensorShard) else place == 0)}
    return {file_name(kind, place, places): own}


def copy_to_host(tensors: Tensors) -> Tensors:
    """Copies in the memory of the host, which no step changes."""
    return {
        name: x._replace(rows=_to_host(x.rows)) if isinstance(x, TensorShard) else _to_host(x)
        for name, x in tensors.items()
    }


def _to_host(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


class _Save:
    """A checkpoint that is being written.

    Attributes:
        end: when it is given up, on the clock of `monotonic`.
        error: why it cannot be written, once that is known.
    """

    def __init__(self) -> None:
        self.end = math.inf
        self.error: Exception | None = None

    def check_time(self) -> None:
        """Refuse to continue after the end.

        Raises:
            OSError: it has passed.
        """
        if monotonic() >= self.end:
            raise OSError("the run has ended")


class Saver:
    """Writes the checkpoints of a run, one after another."""

    def __init__(self, directory: Path, world: World, seconds: float) -> None:
        """`directory` is for the checkpoints; a worker may finish at most `seconds` after the first."""
        self._directory, self._world, self._seconds = directory, world, seconds
        self._thread: Thread | None = None
        self._save = _Save()

    @property
    def failed(self) -> bool:
        """Whether this worker knows that a checkpoint cannot be written; `finish` raises the error."""
        return self._thread is not None and self._save.error is not None

    def start(self, part: Part, facts: Manifest, *, before: int, keep: int) -> None:
        """Start to write a checkpoint once the one before it is written; a single process also finishes it.

        Args:
            part: what this worker writes.
            facts: for the manifest.
            before: as for `finish_checkpoint`.
            keep: how many of the latest to keep.

        Raises:
            OSError: it cannot be written, or the one before it could not; earlier ones are kept.
        """
        self.finish()
        temporary = Path(self._world.run_on_main(lambda: str(begin_checkpoint(self._directory, facts.step))))

        def name(digests: dict[str, str]) -> None:
            finish_checkpoint(temporary, facts, digests, before=before, keep=keep)

        save = self._save = _Save()
        if self._world.size == 1:
            self._lead(part, temporary, facts.step, [], name, save)
            return
        store, key = self._world.store_channel()
        keys = [f"{key}/{rank}" for rank in range(self._world.size)]

        def work() -> None:
            try:
                if self._world.is_main:
                    self._lead(part, temporary, facts.step, self._answers(store, keys, facts.step, save), name, save)
                else:
                    self._follow(part, temporary, facts.step, partial(store.set, keys[self._world.rank]), save)
            except Exception as error:
                known = isinstance(error, OSError | ValueError | TypeError)
                save.error = error if known else OSError(f"{type(error).__name__}: {error}")

        self._thread = Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint that was started is complete; all workers take part.

        Raises:
            SharedError: it could not be written; the message names the worker and the file.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._world.run_on_main(str)  # in the store, where others can wait for as long as the first one writes
        self._world.run_checked(self._raise)

    def _raise(self) -> None:
        if self._save.error is not None:
            raise self._save.error

    def __enter__(self) -> Saver:
        """There is nothing to wait for yet."""
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """After an error, which other workers may not know of, wait for what has been started, for a limited time.

        Then the thread gives up between two files. If it is busy with a file, it ends with the process or after that
        file; what it has written does not become a checkpoint.
        """
        if self._thread is not None and kind is not KeyboardInterrupt:
            self._save.end = monotonic() + _PATIENCE
            self._thread.join(1.25 * _PATIENCE)
            self._thread = None

    def _lead(
        self,
        part: Part,
        temporary: Path,
        step: int,
        answers: Iterable[tuple[int, str]],
        name: Callable[[dict[str, str]], None],
        save: _Save,
    ) -> None:
        """Write this worker's part, wait for those of the others, and give the checkpoint its name.

        Raises:
            OSError: a worker cannot write its part, or does not answer.
        """
        mistake: Exception | None = None
        digests: dict[str, str] = {}
        try:
            try:
                with checkpoint_write_errors(checkpoint_path(self._directory, step)):
                    part.write(temporary, save.check_time)
            except OSError as error:
                mistake = OSError(f"rank 0 of {self._world.size}: {error}") if self._world.size > 1 else error
            except Exception as error:
                mistake = error
            for rank, said in answers:  # even if this worker has failed, as they may still be writing
                if said[0] == "-":
                    mistake = mistake or OSError(f"rank {rank} of {self._world.size}: {said[1:]}")
                else:
                    digests |= json.loads(said[1:])
            if mistake is not None:
                raise mistake
            save.check_time()
            name(digests)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _follow(self, part: Part, temporary: Path, step: int, say: Callable[[str], object], save: _Save) -> None:
        """Write this worker's part, and report it."""
        try:
            with checkpoint_write_errors(checkpoint_path(self._directory, step)):
                part.write(temporary, save.check_time)
                for file in part.tensors:
                    fsync(temporary / file)
                digests = {file: digest_file(temporary / file) for file in part.tensors}
        except Exception as error:
            say(f"-{error}")
            raise
        say(f"+{json.dumps(digests)}")

    def _answers(self, store: Any, keys: list[str], step: int, save: _Save) -> Iterable[tuple[int, str]]:
        """What the other workers report of their parts; one that does not answer in time has failed."""
        end = monotonic() + self._seconds
        while not store.check(keys[1:]) and monotonic() < min(end, save.end):
            sleep(0.02)
        target = checkpoint_path(self._directory, step)
        for rank, key in enumerate(keys[1:], 1):
            if store.check([key]):
                yield rank, store.get(key).decode()
                store.delete_key(key)
            else:
                yield rank, f"-{target}: cannot be written; earlier ones are kept (no answer from this rank)"
