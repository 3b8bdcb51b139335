"""Directories of state files: bounded in size, shared by several servers, and intact after a crash."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from anymamba.core.cache_io import read_state_file, restore_tree, write_state_file
from anymamba.core.io import fsync, open_tensors
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM

_SUFFIX = ".safetensors"
_SPARE = 0.1  # fraction of the limit that is freed in addition, so that not every write lists the directory


class StateDirectory:
    """A directory with one file per state.

    Several servers may use the directory: every change holds a lock on the file `.lock`. While it is
    held, all temporary files are those of servers that were killed, and are removed.

    Args:
        directory: Directory, which is created if needed, for files that only their owner can read.
        model: Model whose states are stored.
        limit: Largest total size of the files in bytes; the least recently used are removed first.
        fields: Names of the metadata fields of each file.
        durable: True if a change survives a power cut once it is made; False saves time for files that can be lost.
    """

    def __init__(
        self, directory: Path, model: MambaLM, limit: int, fields: Sequence[str], *, durable: bool = False
    ) -> None:
        """Create the directory, and remove what killed servers left in it."""
        self._directory = directory
        self._model = model
        self._limit = limit
        self._fields = fields
        self._durable = durable
        self._thread_lock = threading.RLock()
        self._lock_depth = 0
        self.unfinished_files = 0  # temporary files of killed servers that were removed
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if durable:
            fsync(directory.parent)
        with self.lock():
            self._remove_unfinished()
        files = self._list_files()
        self._bytes = sum(size for _, size, _ in files)  # an upper bound: a replaced file counts twice
        self._last_use_ns = files[0][0] if files else 0  # the latest that is known, on the clock of `time.time_ns`

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other threads and other servers from changes; a thread that holds the lock may take it again.

        Without file locks (Windows, some network file systems), only other threads are excluded.
        """
        with self._thread_lock:
            descriptor = self._lock_file() if self._lock_depth == 0 else None
            self._lock_depth += 1
            try:
                yield
            finally:
                self._lock_depth -= 1
                if descriptor is not None:
                    os.close(descriptor)

    def _lock_file(self) -> int | None:
        try:
            import fcntl
        except ImportError:
            return None
        descriptor = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def names(self) -> list[str]:
        """Return the names of the stored states."""
        return [file.name.removesuffix(_SUFFIX) for file in self._directory.iterdir() if file.suffix == _SUFFIX]

    def write(self, name: str, state: GenerationState, metadata: dict[str, str], *, idle: float = 0.0) -> None:
        """Write a state of one row, in place of the one with this name; after an OSError that one is unchanged.

        `idle` is the time since its last use in seconds.
        """
        file = self._file(name)
        with self.lock():
            with self._restore_on_error(file):
                write_state_file(file, state, metadata, durable=self._durable, private=True)
            with suppress(OSError):  # it is written; nothing below may say that it was not
                self._note_use(file, idle)
                self._bytes += file.stat().st_size
                if self._bytes > self._limit:
                    self._evict(None if idle else file)

    def read(self, name: str) -> tuple[GenerationState, dict[str, str]] | None:
        """Return a state and its metadata, or None if there is no file with this name.

        Raise ValueError if the file is damaged, or the state does not fit the model.
        """
        file = self._file(name)
        if not file.is_file():
            return None
        tensors, metadata = read_state_file(file, GenerationState.__name__, self._fields)
        state = restore_tree(file, GenerationState.like(self._model), tensors)
        if state.batch_size != 1:
            raise ValueError(f"{file}: expected the state of one row, got {state.batch_size}")
        with suppress(OSError):  # another server has removed it
            self._note_use(file)
        return state, metadata

    def read_metadata(self, name: str) -> dict[str, str] | None:
        """Return the metadata of a state without reading its tensors, or None if there is no file with this name."""
        file = self._file(name)
        if not file.is_file():
            return None
        with open_tensors(file) as tensors:
            return tensors.metadata() or {}

    def remove(self, name: str) -> bool:
        """Remove a state; return whether there was one. After an OSError it is still there."""
        file = self._file(name)
        with self.lock():
            if not file.is_file():
                return False
            with self._restore_on_error(file):
                file.unlink()
                if self._durable:
                    fsync(self._directory)
            return True

    @contextmanager
    def _restore_on_error(self, file: Path) -> Iterator[None]:
        """Put a file back, or remove a new one, if the block has changed it and then raises an OSError.

        Only durable changes can fail after they are made: when the disk fails to sync the directory.
        """
        if not self._durable:
            yield
            return
        earlier, existed = file.with_name(f".{file.name}.earlier.tmp"), file.exists()
        earlier.unlink(missing_ok=True)
        if existed:
            try:
                os.link(file, earlier)
            except OSError:  # a file system without hard links
                shutil.copy2(file, earlier)
        try:
            yield
        except OSError:
            if existed:
                earlier.replace(file)
            else:
                file.unlink(missing_ok=True)
            raise
        finally:
            with suppress(OSError):
                earlier.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}{_SUFFIX}"

    def _note_use(self, file: Path, idle: float = 0.0) -> None:
        """Record when a file was last used: after all that is known, even if the clock was set back."""
        self._last_use_ns = max(time.time_ns(), self._last_use_ns + 1000)
        used_ns = self._last_use_ns - int(1e9 * idle)
        os.utime(file, ns=(used_ns, used_ns))

    def _remove_unfinished(self) -> None:
        for file in self._directory.iterdir():
            if file.name.startswith(".") and file.suffix == ".tmp":
                with suppress(OSError):
                    file.unlink()
                    self.unfinished_files += 1

    def _list_files(self) -> list[tuple[int, int, Path]]:
        """Return the time of the last use, the size and the path of each file, the most recently used first."""
        files = []
        for file in self._directory.iterdir():
            with suppress(OSError):
                if file.suffix == _SUFFIX:
                    files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        return sorted(files, reverse=True)

    def _evict(self, newest: Path | None) -> None:
        """Remove the least recently used files if all together exceed the limit; `newest` goes last."""
        self._remove_unfinished()
        files = self._list_files()
        self._last_use_ns = max([self._last_use_ns, *(used_ns for used_ns, _, _ in files)])
        files.sort(key=lambda entry: entry[2] != newest)
        total = sum(size for _, size, _ in files)
        target = self._limit if total <= self._limit else (1 - _SPARE) * self._limit
        while files and total > (target if len(files) > 1 else self._limit):
            _, size, file = files.pop()
            with suppress(OSError):
                file.unlink()
            total -= size
        self._bytes = total
