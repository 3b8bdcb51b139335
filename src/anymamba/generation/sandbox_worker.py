"""The process of a sandbox: it replies to each line of JSON with another, until the input ends.

`sandbox.py` starts it as a script, with the limits and the file of a handler as arguments. The handler's function
`reply` takes a request and the limits, and returns a "text" or a "problem".
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from contextlib import suppress


def limit_memory(max_bytes: int) -> None:
    """Make allocations beyond `max_bytes` fail, where the system supports it."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_time(seconds: float) -> None:
    """Let the system end this process after more than `seconds` of processor time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Reply to requests until there are no more."""
    limits = json.loads(sys.argv[3])
    reply = runpy.run_path(sys.argv[4])["reply"]
    limit_memory(limits["bytes"])
    for line in sys.stdin.buffer:
        limit_time(limits["seconds"])
        try:
            answer = reply(json.loads(line), limits)
        except MemoryError:  # this process must not continue
            answer = {"problem": f"it needs more than {limits['bytes'] // 2**20:,} MiB of memory", "ended": True}
        limit_time(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if answer.get("ended"):
            return


if __name__ == "__main__":
    main()
