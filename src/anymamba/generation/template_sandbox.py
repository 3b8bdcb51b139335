"""A separate process for chat templates, which are other people's programs.

`template_sandbox_worker.py` is that process: jinja2's sandbox, with limits on time, memory and length.
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

MAX_CHARACTERS = 2**24  # of a template's text
MAX_BYTES = 2**29  # of the process's memory
MAX_SECONDS = 2.0  # of processor time
_MAX_WAIT = 60.0  # seconds of wall time, where processor time is not limited
_WORKER = Path(__file__).with_name("template_sandbox_worker.py")
# The standard library and installed packages come first: no file of the current directory can replace them.
_START_CODE = (
    "import json, runpy, sys; sys.path += [p for p in json.loads(sys.argv[2]) if p not in sys.path]; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


class TemplateRenderer:
    """A child process that renders templates, one at a time.

    It starts with the first template, and again after one that exceeded the limits.
    """

    def __init__(self, characters: int = MAX_CHARACTERS, memory: int = MAX_BYTES, seconds: float = MAX_SECONDS) -> None:
        """Set the limits; nothing is started yet."""
        self._limits = {"characters": characters, "bytes": memory, "seconds": seconds}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, template: str, values: dict[str, Any]) -> str:
        """Return the text of a template for variables of plain data, as JSON has it.

        Raise `ValueError` if it is not a template, rejects the values, fails, or needs too much time or memory.
        """
        request = json.dumps({"template": template, "values": values}).encode() + b"\n"
        with self._lock:
            line = self._send(request)
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
            [sys.executable, "-I", "-c", _START_CODE, str(_WORKER), json.dumps(sys.path), json.dumps(self._limits)],
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


_process_renderer = TemplateRenderer()


def shared_renderer() -> TemplateRenderer:
    """Return the renderer that all threads of this process share."""
    return _process_renderer


def _replace_renderer() -> None:
    global _process_renderer
    _process_renderer = TemplateRenderer()


atexit.register(lambda: _process_renderer.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_renderer)  # the renderer belongs to the parent
