"""Cached states: what was read once is not read again.

A state is kept under what it has read, by digest, so that its size does not depend on the length:

- *cut*: the tokens of a prompt up to a multiple of the segment length. A longer prompt that continues from there is
  read in the same segments as from the start, so it gives the same bits.
- *end*: all tokens of a prompt, for the same prompt again: `n` samples, another try, a branch.
- *text*: a conversation as the chat template renders it, up to the end of a prompt or of a reply. The state has read
  the tokens that were fed; a reply that is rendered again may consist of other tokens.
- *session*: a name that a client chose.

When memory runs out, the least recently used states leave first. With a directory, states that leave memory are
written to files there, and sessions are written at the end of every turn, so both survive a restart.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.state_cache_disk import DiskStateCache

Kind = Literal["cut", "end", "text", "session"]

_LEAVING = 8  # states that may wait to be written


class Key(NamedTuple):
    """Names what a state has read.

    Attributes:
        kind: of the name.
        length: of what was read, in bytes.
        digest: of it.
    """

    kind: Kind
    length: int
    digest: str


class CachedState(NamedTuple):
    """A state that was kept.

    Attributes:
        state: of one row.
        tokens: how many it has read.
        keys: the keys under which it is found.
    """

    state: GenerationState
    tokens: int
    keys: tuple[Key, ...]


class SessionLimitError(Exception):
    """There is no room for another session, and no directory to put one in."""


def ids_key(kind: Kind, ids: Sequence[int]) -> Key:
    """The key of tokens."""
    content = array("i", ids).tobytes()
    return Key(kind, len(content), _digest(content))


def text_key(text: str) -> Key:
    """The key of a rendered conversation."""
    content = text.encode()
    return Key("text", len(content), _digest(content))


def session_key(name: str) -> Key:
    """The key of a session: a hash, which is all of the name that the disk ever sees."""
    return Key("session", 0, _digest(b"session:" + name.encode()))


class StateCache:
    """Keeps states, from any thread.

    Args:
        model: whose states they are.
        limit: bytes of memory for them.
        directory: for files that only their owner can read; if not given, states are kept in memory only.
        disk_limit: bytes of files for states that left memory, and as many more for sessions.
    """

    def __init__(
        self, model: MambaLM, limit: int = 2**30, directory: Path | None = None, disk_limit: int = 2**33
    ) -> None:
        """Open the directory, if one is given; files of other models in it are ignored."""
        self.limit, self.nbytes = limit, 0
        self.files = None if directory is None else DiskStateCache(directory, model, disk_limit)
        self._lock = threading.RLock()
        self._kept: OrderedDict[int, CachedState] = OrderedDict()  # by identity, the least recently used first
        self._by_key: dict[Key, CachedState] = {}
        self._lengths: dict[Kind, Counter[int]] = {"cut": Counter(), "text": Counter()}
        self._writer = ThreadPoolExecutor(1, "states")
        self._leaving: dict[Key, CachedState] = {}  # left memory and not yet in files
        self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._kept)

    def put(self, state: GenerationState, tokens: int, *keys: Key) -> CachedState:
        """Keep a state of one row, in place of the states that had these keys.

        Raises:
            SessionLimitError: it is the state of a session, and sessions alone would exceed the limit.
        """
        kept = CachedState(_compact(state), tokens, keys)
        with self._lock:
            former = [self._by_key[key] for key in keys if key in self._by_key]
            freed = {id(other): other.state.nbytes for other in former}
            if self.files is None and _is_session(kept):
                pinned = sum(k.state.nbytes for k in self._kept.values() if _is_session(k) and id(k) not in freed)
                if pinned + kept.state.nbytes > self.limit:
                    raise SessionLimitError(f"sessions have {pinned} of {self.limit} bytes")
            for other in former:
                self._drop(other)
            self._add(kept)
            pushed = self._shrink()
        self._write(pushed)
        return kept

    def get(self, key: Key) -> CachedState | None:
        """What is kept under a key, in memory or in a file."""
        with self._lock:
            if (found := self._by_key.get(key)) is not None:
                self._kept.move_to_end(id(found))
                return found
            if (found := self._leaving.get(key)) is not None:
                return found
        return self._from_file(key)

    def longest(self, kind: Literal["cut", "text"], content: bytes) -> tuple[CachedState, int] | None:
        """The state that has read the longest beginning of `content`, and how many bytes that is."""
        with self._lock:
            lengths = {*self._lengths[kind], *(key.length for key in self._leaving if key.kind == kind)}
            lengths |= set() if self.files is None else self.files.lengths(kind)
        keys, digest, begin = [], hashlib.blake2b(digest_size=16), 0
        for length in sorted(n for n in lengths if n <= len(content)):
            digest.update(content[begin:length])
            begin = length
            keys.append(Key(kind, length, digest.copy().hexdigest()))
        for key in reversed(keys):
            if (found := self.get(key)) is not None:
                return found, key.length
        return None

    def save(self, kept: CachedState) -> None:
        """Write a session's state to its file, if there is a directory."""
        if self.files is not None:
            self.files.write(kept.state, kept.tokens, kept.keys)

    def remove(self, key: Key) -> bool:
        """Forget what is kept under a key; returns whether there was anything."""
        with self._lock:
            found = self._by_key.get(key)
            if found is not None:
                self._drop(found)
        on_disk = self.files is not None and self.files.remove(key)
        return found is not None or on_disk

    def close(self, seconds: float = float("inf")) -> None:
        """Write what is in memory to files, if there is a directory: the most recently used first.

        Args:
            seconds: the time after which the rest is dropped. Sessions were written at the end of every turn, and the
                other states can be read again.
        """
        now, until = time.time(), time.monotonic() + seconds
        self._writer.shutdown()
        if self.files is None:
            return
        with self._lock:
            rest = [kept for kept in reversed(self._kept.values()) if not _is_session(kept)]
        for i, kept in enumerate(rest):
            if time.monotonic() >= until:
                return
            self.files.write(kept.state, kept.tokens, kept.keys, used=now - 1e-3 * i)

    def _from_file(self, key: Key) -> CachedState | None:
        if self.files is None or (found := self.files.read(key)) is None:
            return None
        kept = CachedState(*found)
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            if any(k in self._by_key for k in kept.keys):  # a session whose text is also kept by itself
                kept = CachedState(kept.state, kept.tokens, tuple(k for k in kept.keys if k not in self._by_key))
            self._add(kept)
            pushed = self._shrink()
        self._write(pushed)
        return kept

    def _add(self, kept: CachedState) -> None:
        self._kept[id(kept)] = kept
        self.nbytes += kept.state.nbytes
        for key in kept.keys:
            self._by_key[key] = kept
            if key.kind in self._lengths:
                self._lengths[key.kind][key.length] += 1

    def _drop(self, kept: CachedState) -> None:
        if self._kept.pop(id(kept), None) is None:
            return
        self.nbytes -= kept.state.nbytes
        for key in kept.keys:
            del self._by_key[key]
            if key.kind in self._lengths:
                self._lengths[key.kind] -= Counter({key.length: 1})

    def _shrink(self) -> list[CachedState]:
        """Drop the least recently used until the rest fits; returns what was dropped. Without files, sessions stay."""
        pushed = []
        for kept in list(self._kept.values()):
            if self.nbytes <= self.limit:
                break
            if self.files is None and _is_session(kept):
                continue
            self._drop(kept)
            self.evictions += 1
            pushed.append(kept)
        return pushed

    def _write(self, pushed: list[CachedState]) -> None:
        """Let a thread write states to files; if it falls behind, some are dropped."""
        for kept in pushed:
            if self.files is None or _is_session(kept):  # which has been written
                continue
            with self._lock:
                if len({id(other) for other in self._leaving.values()}) >= _LEAVING:
                    continue
                self._leaving.update(dict.fromkeys(kept.keys, kept))
            self._writer.submit(self._write_one, kept)

    def _write_one(self, kept: CachedState) -> None:
        try:
            if self.files is not None:
                self.files.write(kept.state, kept.tokens, kept.keys)
        finally:
            with self._lock:
                for key in kept.keys:
                    if self._leaving.get(key) is kept:
                        del self._leaving[key]


def _is_session(kept: CachedState) -> bool:
    return any(key.kind == "session" for key in kept.keys)


def _compact(state: GenerationState) -> GenerationState:
    """The same values in memory of their own: a tensor may be a small part of a large one."""
    return state.with_tensors(
        x.clone() if x.untyped_storage().nbytes() > x.nbytes else x.detach() for x in state.leaves()
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
