"""Cached states in a directory: one file each, complete or refused; the oldest are removed to stay within a limit."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from anymamba.core.cache_io import read_state_file, restore_tree, write_state_file
from anymamba.core.io import parse_json
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM

_FACTS = ["fingerprint", "tokens", "keys"]
_PREFERRED = ("session", "text", "cut", "end")  # whose name a file has
_SPARE = 0.1  # share of the limit that is freed beyond what is needed, so that not every write searches the directory
_NAME = re.compile(r"(cut|end|text|session)-(\d+)-([0-9a-f]{32})\.safetensors")


class DiskStateCache:
    """States by their keys. A file is named after one key; its other keys are known once it was read.

    Args:
        directory: made if it is not there.
        model: whose states they are; those of other models in the directory are ignored.
        limit: bytes for states, and as many more for sessions.
    """

    def __init__(self, directory: Path, model: MambaLM, limit: int) -> None:
        """List the files that are there."""
        self._model, self._limit, self._lock = model, limit, threading.Lock()
        self._fingerprint = model.fingerprint()
        # A directory for each model, so that one server's states are not another's.
        self._directory = directory / self._fingerprint.replace(":", "-")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lengths: dict[str, set[int]] = {}
        # Upper bounds, of sessions and of other states: a file that is written again counts twice.
        self._bytes = {True: 0, False: 0}
        for file in self._directory.iterdir():
            self._note(file)

    def lengths(self, kind: str) -> set[int]:
        """The lengths of the keys of this kind for which there may be files."""
        return self._lengths.get(kind, set())

    def write(self, state: GenerationState, tokens: int, keys: tuple[Any, ...], *, used: float | None = None) -> None:
        """Write a state. Only for a session is it an error if that fails: other prompts can be read again.

        Args:
            state: of one row.
            tokens: how many it has read.
            keys: the keys under which it is found.
            used: when it was used last, on the clock of `time.time`; now if not given.

        Raises:
            OSError: the state of a session cannot be written.
        """
        keys = tuple(sorted(keys, key=lambda key: _PREFERRED.index(key.kind)))
        file = self._file(keys[0])
        facts = {
            "fingerprint": self._fingerprint,
            "tokens": str(tokens),
            "keys": "[" + ",".join(f'["{k.kind}",{k.length},"{k.digest}"]' for k in keys) + "]",
        }
        try:
            with self._lock:
                write_state_file(file, state, facts)
                file.chmod(0o600)
                if used is not None:
                    os.utime(file, (used, used))
                self._note(file)
                self._shrink(keys[0].kind == "session")
        except (OSError, ValueError):
            if keys[0].kind == "session":
                raise

    def read(self, key: Any) -> tuple[GenerationState, int, tuple[Any, ...]] | None:
        """The state, tokens and keys of the file with this name; None if there is none that can be read.

        Raises:
            ValueError: the state of a session is damaged.
        """
        file = self._file(key)
        if not file.is_file():
            return None
        try:
            tensors, facts, _ = read_state_file(file, GenerationState.__name__, _FACTS)
            if facts["fingerprint"] != self._fingerprint:
                return None
            state = restore_tree(file, GenerationState.like(self._model), tensors)
            if state.batch_size != 1:
                raise ValueError(f"{file}: expected the state of one row, got {state.batch_size}")
            keys = tuple(type(key)(*entry) for entry in parse_json(facts["keys"]))
            os.utime(file)
            return state, int(facts["tokens"]), keys
        except (OSError, ValueError, TypeError):
            if key.kind == "session":
                raise
            return None

    def remove(self, key: Any) -> bool:
        """Remove the file with this name; returns whether there was one."""
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def _file(self, key: Any) -> Path:
        return self._directory / f"{key.kind}-{key.length}-{key.digest}.safetensors"

    def _note(self, file: Path) -> None:
        if found := _NAME.fullmatch(file.name):
            self._lengths.setdefault(found[1], set()).add(int(found[2]))
            with suppress(OSError):  # another server has removed it
                self._bytes[found[1] == "session"] += file.stat().st_size

    def _shrink(self, sessions: bool) -> None:
        """Remove the least recently used files if they exceed the limit."""
        if self._bytes[sessions] <= self._limit:
            return
        found = []
        for file in self._directory.iterdir():
            with suppress(OSError):
                if (name := _NAME.fullmatch(file.name)) and (name[1] == "session") == sessions:
                    found.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        total = sum(size for _, size, _ in found)
        enough = self._limit if total <= self._limit else (1 - _SPARE) * self._limit
        found.sort(reverse=True)
        while found and total > (enough if len(found) > 1 else self._limit):
            _, size, file = found.pop()
            with suppress(OSError):
                file.unlink()
            total -= size
        self._bytes[sessions] = total
