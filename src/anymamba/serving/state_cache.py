"""Cached states of prompts, shared by all requests: what was read once is not read again.

A state is cached under a digest of what it has read, so that the size of a key does not depend on the length:

- *cut*: the tokens of a prompt up to a multiple of the segment length. A longer prompt that continues from there is
  read in the same segments as from the beginning, so it gives the same bits.
- *end*: all tokens of a prompt, for the same prompt again: `n` samples, a retry, a branch.
- *text*: a conversation as the chat template renders it, up to the end of a prompt or of a reply. The state has read
  the tokens that were fed; a reply that is rendered again may consist of other tokens.

When memory runs out, the least recently used states are dropped first. With a directory they are written to files,
so that they survive a restart. Sessions are stored separately, in `sessions.py`: nothing here can displace them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from anymamba.core.io import parse_json
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.state_cache_disk import StateDirectory

Kind = Literal["cut", "end", "text"]

_FIELDS = ("tokens", "keys")
_FILE_NAME = re.compile(r"(cut|end|text)-(\d+)-([0-9a-f]{32})")
_NAMING_ORDER = ("text", "cut", "end")  # a file is named after the first of its keys in this order
_MAX_WRITES = 8  # states that may wait to be written; further ones are dropped


class Key(NamedTuple):
    """A digest of what a state has read."""

    kind: Kind
    length: int  # in bytes, of what was read
    digest: str  # hexadecimal


class CachedState(NamedTuple):
    """A state in the cache."""

    state: GenerationState  # of one row
    tokens: int  # that the state has read
    keys: tuple[Key, ...]  # under which it is found


def ids_key(kind: Kind, ids: Sequence[int]) -> Key:
    """Return the key of token ids."""
    content = array("i", ids).tobytes()
    return Key(kind, len(content), digest(content))


def text_key(text: str) -> Key:
    """Return the key of a rendered conversation."""
    content = text.encode()
    return Key("text", len(content), digest(content))


def digest(content: bytes) -> str:
    """Return the digest of bytes for a key."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class StateCache:
    """A thread-safe cache of states.

    Args:
        model: Model whose states are cached.
        limit: Memory for states in bytes.
        directory: Directory for states that leave memory, or None to drop them. Each model has its own in it.
        disk_limit: Largest total size of the files in bytes.
    """

    def __init__(
        self, model: MambaLM, limit: int = 2**30, directory: Path | None = None, disk_limit: int = 2**33
    ) -> None:
        """Open the directory, if one is given."""
        self._limit = limit
        self._reserved = 0
        self.nbytes = 0  # of the cached states
        self.hits = 0  # prompts that began with a cached state
        self.misses = 0  # prompts that were read from the beginning
        self.evictions = 0  # states that left memory
        self._lock = threading.RLock()
        self._entries: OrderedDict[int, CachedState] = OrderedDict()  # by identity, the least recently used first
        self._by_key: dict[Key, CachedState] = {}
        self._lengths: dict[Kind, Counter[int]] = {"cut": Counter(), "text": Counter()}
        self._executor = ThreadPoolExecutor(1, "states")
        self._being_written: dict[Key, CachedState] = {}  # no longer in memory, and not yet in a file
        self.files: StateDirectory | None = None
        self._file_lengths: dict[str, set[int]] = {"cut": set(), "text": set()}
        if directory is not None:
            name = model.fingerprint().replace(":", "-")
            self.files = StateDirectory(directory / name, model, disk_limit, _FIELDS)
            for name in self.files.names():
                self._note_file(name)

    def __len__(self) -> int:
        """Return the number of states in memory."""
        return len(self._entries)

    def put(self, state: GenerationState, tokens: int, *keys: Key) -> CachedState:
        """Cache a state of one row, in place of the states that had these keys."""
        cached = CachedState(compact(state), tokens, keys)
        with self._lock:
            for previous in [self._by_key[key] for key in keys if key in self._by_key]:
                self._drop(previous)
            self._add(cached)
        return cached

    def get(self, key: Key) -> CachedState | None:
        """Return the state with this key, from memory or from a file."""
        with self._lock:
            if (cached := self._by_key.get(key)) is not None:
                self._entries.move_to_end(id(cached))
                return cached
            if (cached := self._being_written.get(key)) is not None:
                return cached
        return self._load(key)

    def find_longest(self, kind: Literal["cut", "text"], content: bytes) -> tuple[CachedState, int] | None:
        """Return the state that has read the longest prefix of `content`, and the prefix's length in bytes."""
        # 1) Collect the lengths of all keys of this kind, in memory and in files.
        with self._lock:
            lengths = {*self._lengths[kind], *(key.length for key in self._being_written if key.kind == kind)}
            lengths |= self._file_lengths[kind]
        # 2) Digest each prefix of such a length, in one pass over the content.
        keys = []
        hasher = hashlib.blake2b(digest_size=16)
        begin = 0
        for length in sorted(n for n in lengths if n <= len(content)):
            hasher.update(content[begin:length])
            begin = length
            keys.append(Key(kind, length, hasher.copy().hexdigest()))
        # 3) Return the longest one that exists.
        for key in reversed(keys):
            if (cached := self.get(key)) is not None:
                return cached, key.length
        return None

    def reserve(self, nbytes: int) -> None:
        """Leave this much of the memory to the sessions."""
        with self._lock:
            self._reserved = nbytes
            self._evict()

    def close(self, seconds: float = float("inf")) -> None:
        """Write the states in memory to files, if there is a directory: the most recently used first.

        States that are not written within `seconds` are lost; their prompts can be read again.
        """
        start = time.monotonic()
        self._executor.shutdown()
        if self.files is None:
            return
        with self._lock:
            remaining = list(reversed(self._entries.values()))
        for i, cached in enumerate(remaining):
            elapsed = time.monotonic() - start
            if elapsed >= seconds:
                return
            self._write(cached, idle=elapsed + 1e-3 * i)

    def _load(self, key: Key) -> CachedState | None:
        """Return a state from its file, or None if there is no file that can be read."""
        if self.files is None:
            return None
        try:
            if (stored := self.files.read(_file_name(key))) is None:
                return None
            state, metadata = stored
            keys = tuple(Key(*fields) for fields in parse_json(metadata["keys"]))
            cached = CachedState(state, int(metadata["tokens"]), keys)
        except (OSError, ValueError, TypeError):  # the prompt can be read again
            return None
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            cached = cached._replace(keys=tuple(other for other in keys if other not in self._by_key))
            self._add(cached)
        return cached

    def _add(self, cached: CachedState) -> None:
        """Add a state; the least recently used ones, which may include it, leave memory."""
        self._entries[id(cached)] = cached
        self.nbytes += cached.state.nbytes
        for key in cached.keys:
            self._by_key[key] = cached
            if key.kind in self._lengths:
                self._lengths[key.kind][key.length] += 1
        self._evict()

    def _drop(self, cached: CachedState) -> None:
        if self._entries.pop(id(cached), None) is None:
            return
        self.nbytes -= cached.state.nbytes
        for key in cached.keys:
            del self._by_key[key]
            if key.kind in self._lengths:
                self._lengths[key.kind] -= Counter({key.length: 1})

    def _evict(self) -> None:
        """Drop the least recently used states until the rest fits, and write them to files in a thread."""
        while self._entries and self.nbytes > max(0, self._limit - self._reserved):
            cached = next(iter(self._entries.values()))
            self._drop(cached)
            self.evictions += 1
            # If the thread falls behind, some states are lost: their prompts can be read again.
            if self.files is not None and len({id(x) for x in self._being_written.values()}) < _MAX_WRITES:
                self._being_written.update(dict.fromkeys(cached.keys, cached))
                self._executor.submit(self._write_evicted, cached)

    def _write_evicted(self, cached: CachedState) -> None:
        try:
            self._write(cached)
        finally:
            with self._lock:
                for key in cached.keys:
                    if self._being_written.get(key) is cached:
                        del self._being_written[key]

    def _write(self, cached: CachedState, *, idle: float = 0.0) -> None:
        assert self.files is not None
        keys = sorted(cached.keys, key=lambda key: _NAMING_ORDER.index(key.kind))
        metadata = {"tokens": str(cached.tokens), "keys": json.dumps(keys, separators=(",", ":"))}
        name = _file_name(keys[0])
        try:
            self.files.write(name, cached.state, metadata, idle=idle)
        except (OSError, ValueError):  # the prompt can be read again
            return
        self._note_file(name)

    def _note_file(self, name: str) -> None:
        match = _FILE_NAME.fullmatch(name)
        if match is not None and match[1] in self._file_lengths:
            with self._lock:
                self._file_lengths[match[1]].add(int(match[2]))


def _file_name(key: Key) -> str:
    return f"{key.kind}-{key.length}-{key.digest}"


def compact(state: GenerationState) -> GenerationState:
    """Return the state with tensors that own their memory: a view may keep a much larger tensor alive."""
    return state.with_tensors(
        x.clone() if x.untyped_storage().nbytes() > x.nbytes else x.detach() for x in state.leaves()
    )
