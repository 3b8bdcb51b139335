"""Separate processes for other people's programs, with limits on time and memory.

`sandbox_worker.py` is such a process. It replies to requests with a handler: `template_handler.py` renders chat
templates, `grammar_handler.py` compiles grammars.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 2**24  # of the text that a template writes
MAX_BYTES = 2**29  # of the process's memory
MAX_SECONDS = 2.0  # of processor time
_MAX_WAIT = 60.0  # seconds of wall time, where processor time is not limited
_DIRECTORY = Path(__file__).parent
_WORKER = _DIRECTORY / "sandbox_worker.py"
# The standard library and installed packages come first: no file of the current directory can replace them.
_START_CODE = (
    "import json, runpy, sys; sys.path += [p for p in json.loads(sys.argv[2]) if p not in sys.path]; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


class Sandbox:
    """A child process that replies to requests, one at a time.

    It starts with the first request, and again after one that exceeded the limits.
    """

    def __init__(
        self, handler: str, characters: int = MAX_CHARACTERS, memory: int = MAX_BYTES, seconds: float = MAX_SECONDS
    ) -> None:
        """Set the file of the handler, next to this one, and the limits; nothing is started yet."""
        self._handler = handler
        self._limits = {"characters": characters, "bytes": memory, "seconds": seconds}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, **request: Any) -> str:
        """Return the text that the handler replies with to a request of plain data, as JSON has it.

        Raise `ValueError` if the handler finds a problem with the request, or it needs too much time or memory.
        """
        with self._lock:
            line = self._send(json.dumps(request).encode() + b"\n")
            reply: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"ended": True}
            if reply.get("ended"):
                reply.setdefault("problem", self._explain_exit(self._end(patience=5.0)))
        if "problem" in reply:
            raise ValueError(reply["problem"])
        return str(reply["text"])

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            self._end()

    def _send(self, request: bytes) -> bytes:
        """Send a request; return the line that the child replies with, or less if it ended."""
        if self._child is not None and self._child.poll() is not None:
            self._end()
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(_MAX_WAIT, child.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request)
                child.stdin.flush()
            return child.stdout.readline()
        except BaseException:  # an interrupt: the pending reply would be read as the next one
            self._end()
            raise
        finally:
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-c", _START_CODE),
                *(str(_WORKER), json.dumps(sys.path), json.dumps(self._limits), str(_DIRECTORY / self._handler)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it
        )

    def _end(self, patience: float = 0.0) -> int:
        """Wait for the child to end, or end it; return its exit code."""
        child = self._child
        self._child = None
        if child is None:
            return 0
        try:
            code = child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet
                    pipe.close()
        return code

    def _explain_exit(self, code: int) -> str:
        """Return why a child ended without a reply."""
        seconds = self._limits["seconds"]
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it needs more than {seconds:g} s"
        return f"it ended the process that it ran in (exit code {code}): too much time or memory"


_shared: dict[str, Sandbox] = {}
_shared_lock = threading.Lock()


def shared_sandbox(handler: str) -> Sandbox:
    """Return the sandbox of a handler that all threads of this process share."""
    with _shared_lock:
        return _shared.setdefault(handler, Sandbox(handler))


def _close_shared() -> None:
    for sandbox in _shared.values():
        sandbox.close()


def _forget_shared() -> None:
    global _shared, _shared_lock
    _shared = {}
    _shared_lock = threading.Lock()


atexit.register(_close_shared)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_shared)  # the processes belong to the parent
