"""Sessions: states with a name that a client chose, which no other request can displace.

Each change of a session gives it a new revision. A request takes a lease, which notes the revision that it continues
from, and its commit succeeds only if the stored session still has that revision: under a lock that all servers of a
directory share, the new state replaces the old one, or nothing changes. So a request that fails leaves the session as
it was, and of two requests on two servers one succeeds and the other gets a conflict error.

With a directory, the files are the truth, and memory only saves reading them: a session that another server has
changed is read again. Without one, sessions stay in memory until they are deleted.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from anymamba.core.io import parse_json
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.api.fields import ApiError
from anymamba.serving.state_cache import Key, StateCache, compact, digest
from anymamba.serving.state_cache_disk import StateDirectory

_FIELDS = ("fingerprint", "revision", "tokens", "texts")
_DAMAGED = "damaged"  # the revision of a file whose metadata cannot be read


class SessionError(ApiError):
    """A session that cannot be continued or changed, and why."""

    CODE: ClassVar[str]

    def __init__(self, message: str, status: int = 409, headers: dict[str, str] | None = None) -> None:
        """Create an error with this HTTP status."""
        super().__init__(status, message, param="session", code=self.CODE, headers=headers)


class SessionInUseError(SessionError):
    """Another request is using the session."""

    CODE = "session_in_use"


class SessionConflictError(SessionError):
    """The session was changed or deleted by another server during the request."""

    CODE = "session_conflict"


class SessionModelError(SessionError):
    """The session was written by a model with other weights."""

    CODE = "session_of_other_weights"


class SessionDamagedError(SessionError):
    """The file of the session is damaged."""

    CODE = "session_damaged"


class SessionLimitError(SessionError):
    """There is not enough memory for another session, and no directory to store it in."""

    CODE = "session_limit"


class Session(NamedTuple):
    """A session at the end of a request."""

    state: GenerationState  # of one row
    tokens: int  # that the state has read
    texts: tuple[Key, ...]  # keys of the conversation that it has read, as it was rendered; empty for a completion
    revision: str  # random name of this version of the session


class SessionLease:
    """The exclusive use of a session by one request of this server."""

    def __init__(self, name_digest: str) -> None:
        """Lease a session that is not loaded yet."""
        self._name_digest = name_digest
        self._revision: str | None = None  # of the stored session that a commit replaces
        self._is_void = False  # the session was deleted, or the request has ended: nothing is committed any more
        self._reserved = 0  # bytes of memory for a new session
        self.session: Session | None = None  # that the request continues; None for a new one


class SessionStore:
    """A thread-safe store of sessions, which shares its memory with the cache.

    Args:
        limit: Memory for sessions in bytes. Without a directory they stay in memory, and use all of it if necessary;
            with one, at most half of it saves reading files.
        directory: Directory for session files, which servers of any model may share, or None.
        disk_limit: Largest total size of the files in bytes; the least recently used sessions are removed first.
    """

    def __init__(
        self,
        model: MambaLM,
        cache: StateCache,
        limit: int = 2**30,
        directory: Path | None = None,
        disk_limit: int = 2**33,
    ) -> None:
        """Open the directory, if one is given."""
        self._cache = cache
        self._limit = limit
        empty = GenerationState.like(model)
        self._state_bytes = empty.nbytes
        self._bytes_per_token = empty.bytes_per_step
        self._fingerprint = model.fingerprint()
        self.files: StateDirectory | None = None
        if directory is not None:
            self.files = StateDirectory(directory / "sessions", model, disk_limit, _FIELDS, durable=True)
        self._lock = threading.RLock()  # protects the attributes below; never held while a file is read or written
        # By digest of the name, the least recently used first.
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._leases: dict[str, SessionLease] = {}
        self._commit_lock = threading.Lock()  # without a directory; its lock excludes the threads of this server too

    def __len__(self) -> int:
        """Return the number of sessions in memory."""
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Memory of the sessions in bytes."""
        with self._lock:
            return sum(session.state.nbytes for session in self._sessions.values())

    def acquire(self, name: str) -> SessionLease:
        """Lease a session for a request; `load` it before use, and `release` it afterwards."""
        lease = SessionLease(_name_digest(name))
        with self._lock:
            if lease._name_digest in self._leases:
                raise SessionInUseError("another request is using this session")
            self._leases[lease._name_digest] = lease
        return lease

    def release(self, lease: SessionLease) -> None:
        """End a lease. A commit that has not begun is void."""
        with self._lock:
            lease._is_void = True
            lease._reserved = 0
            self._leases.pop(lease._name_digest, None)

    def load(self, lease: SessionLease, *, ignore_damage: bool = False) -> None:
        """Read the stored session of a lease, and reserve memory for a new one.

        With `ignore_damage`, for requests that carry the whole conversation, a damaged session is replaced.
        """
        with self._exclude_changes():
            lease._revision = self._stored_revision(lease._name_digest)
            try:
                lease.session = self._read(lease._name_digest, lease._revision)
            except SessionDamagedError:
                if not ignore_damage:
                    raise
        if lease.session is None and self.files is None:
            with self._lock:
                self._check_memory(self._state_bytes)
                lease._reserved = self._state_bytes

    def reserve(self, lease: SessionLease, tokens: int) -> None:
        """Reserve memory for the session of a lease to grow to this many tokens, if its state grows.

        Raises:
            SessionLimitError: There is not enough memory.
        """
        if self.files is not None or not self._bytes_per_token:
            return
        with self._lock:
            stored = 0 if lease.session is None else lease.session.state.nbytes
            needed = max(0, self._state_bytes + tokens * self._bytes_per_token - stored)
            self._check_memory(needed - lease._reserved)
            lease._reserved = needed

    def find(self, name: str) -> Session | None:
        """Return a session, or None if there is no session with this name."""
        name_digest = _name_digest(name)
        with self._exclude_changes():
            return self._read(name_digest, self._stored_revision(name_digest))

    def commit(self, lease: SessionLease, state: GenerationState, tokens: int, texts: tuple[Key, ...] = ()) -> None:
        """Replace the session of a lease by a new state, which has read `tokens` tokens and the conversation `texts`.

        After an error, such as an OSError while its file is written, it is unchanged. A deleted session stays deleted.
        """
        session = Session(compact(state), tokens, texts, secrets.token_hex(16))
        with self._exclude_changes():
            if lease._is_void:
                return
            # 1) The stored session is the one that the request has continued.
            if self._stored_revision(lease._name_digest) != lease._revision:
                with self._lock:
                    self._forget(lease._name_digest)
                raise SessionConflictError(
                    "the session was changed or deleted while this request was running; nothing of this request was "
                    "added to it"
                )
            # 2) Its file is replaced, which can fail, and only then the copy in memory.
            if self.files is None:
                with self._lock:
                    previous = self._sessions.get(lease._name_digest)
                    freed = lease._reserved + (0 if previous is None else previous.state.nbytes)
                    self._check_memory(session.state.nbytes - freed)
            else:
                metadata = {
                    "fingerprint": self._fingerprint,
                    "revision": session.revision,
                    "tokens": str(tokens),
                    "texts": json.dumps([[key.length, key.digest] for key in texts], separators=(",", ":")),
                }
                self.files.write(lease._name_digest, session.state, metadata)
            self._remember(lease._name_digest, session)
            lease._reserved = 0
            lease._revision = session.revision
            lease.session = session

    def delete(self, name: str) -> bool:
        """Delete a session, including what a running request would add to it; return whether there was one.

        After an `OSError` it is unchanged, and so is the request.
        """
        name_digest = _name_digest(name)
        with self._exclude_changes():
            was_on_disk = self.files is not None and self.files.remove(name_digest)
            with self._lock:
                lease = self._leases.get(name_digest)
                if lease is not None:
                    lease._is_void = True
                was_in_memory = self._forget(name_digest)
        return was_on_disk or (was_in_memory and self.files is None) or lease is not None

    def _exclude_changes(self) -> AbstractContextManager[Any]:
        """Exclude changes of stored sessions by other threads and servers."""
        return self._commit_lock if self.files is None else self.files.lock()

    def _stored_revision(self, name_digest: str) -> str | None:
        """Return the revision of the stored session, or None if there is none."""
        if self.files is None:
            with self._lock:
                session = self._sessions.get(name_digest)
                return None if session is None else session.revision
        try:
            metadata = self.files.read_metadata(name_digest)
        except (OSError, ValueError):
            return _DAMAGED
        return None if metadata is None else metadata.get("revision", _DAMAGED)

    def _read(self, name_digest: str, revision: str | None) -> Session | None:
        """Return the session with this stored revision, from memory if it is up to date there."""
        with self._lock:
            session = self._sessions.get(name_digest)
            if session is not None and session.revision == revision:
                self._sessions.move_to_end(name_digest)
                return session
            self._forget(name_digest)
        if revision is None or self.files is None:
            return None
        session = self._read_file(name_digest)
        if session is not None:
            self._remember(name_digest, session)
        return session

    def _read_file(self, name_digest: str) -> Session | None:
        assert self.files is not None
        try:
            metadata = self.files.read_metadata(name_digest)
            if metadata is None:
                return None
            # Before the tensors are read: those of another model have other shapes.
            fingerprint = metadata["fingerprint"]
            if fingerprint != self._fingerprint:
                raise SessionModelError(
                    f"the session was written by a model with other weights (fingerprint {fingerprint}; this server's "
                    f"model has {self._fingerprint}); serve those weights, or delete the session to start over"
                )
            if (stored := self.files.read(name_digest)) is None:
                return None
            state, metadata = stored
            texts = tuple(Key("text", length, text_digest) for length, text_digest in parse_json(metadata["texts"]))
            return Session(state, int(metadata["tokens"]), texts, metadata["revision"])
        except (KeyError, TypeError, ValueError) as error:
            raise SessionDamagedError(
                "the session's file is damaged and cannot be continued; delete the session to start over"
            ) from error

    def _check_memory(self, nbytes: int) -> None:
        """Raise unless sessions that stay in memory may use `nbytes` more bytes."""
        used = self.nbytes + sum(lease._reserved for lease in self._leases.values())
        if nbytes > 0 and used + nbytes > self._limit:
            message = "there is not enough memory for another session; delete one"
            raise SessionLimitError(message, 429, {"Retry-After": "60"})

    def _remember(self, name_digest: str, session: Session) -> None:
        with self._lock:
            self._sessions[name_digest] = session
            self._sessions.move_to_end(name_digest)
            while self.files is not None and self._sessions and self.nbytes > self._limit // 2:
                self._sessions.popitem(last=False)
            nbytes = self.nbytes
        self._cache.reserve(nbytes)

    def _forget(self, name_digest: str) -> bool:
        """Drop a session from memory; return whether it was there."""
        is_forgotten = self._sessions.pop(name_digest, None) is not None
        if is_forgotten:
            self._cache.reserve(self.nbytes)
        return is_forgotten


def _name_digest(name: str) -> str:
    """Return a digest of a session's name, which is all of the name that the disk ever sees."""
    return digest(b"session:" + name.encode())
