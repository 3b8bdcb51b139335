"""`anymamba`: parse the arguments, run a command, turn a user's mistake into one line and exit code 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from anymamba.cli.options import parse
from anymamba.core.process import keep_freed_memory

# Each module has a function `run`, and is imported only when its command runs: torch takes seconds.
_MODULES = {"eval": "evaluate", "bench-serve": "bench_serve"}
_AMPLE = 2**32  # bytes of address space that surely suffice to import torch
_OUT_OF_MEMORY = (  # in messages of torch's allocators, of the system, of its loader, and of oneDNN
    "out of memory",
    "not enough memory",
    "allocate memory",
    "bad_alloc",
    "failed to map segment",
    "could not create a memory",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process if not given.

    Returns:
        The exit code: 0, 1 when numbers overflowed in training, 2 for a user's mistake or too little memory, 130 when
        interrupted.
    """
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            args = parse(sys.argv[1:] if arguments is None else arguments)
            _check_room_for_torch()
            import_module(f"anymamba.cli.{_MODULES.get(args.command, args.command)}").run(args)
        except BrokenPipeError:
            # The reader of our output has gone. The interpreter must not fail when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            return 130
        except FloatingPointError as error:
            if os.environ.get("RANK", "0") == "0":  # all workers of a run raise it
                _say(str(error))
            return 1
        except Exception as error:
            if _is_out_of_memory(error):
                _say(f"out of memory: {str(error) or type(error).__name__}")
            elif isinstance(error, ValueError | TypeError | OSError):
                told = getattr(error, "is_shared", False) and os.environ.get("RANK", "0") != "0"
                for line in [] if told else getattr(error, "lines", [str(error)]):  # several mistakes, one line each
                    _say(line)
            else:
                raise
            return 2
    return 0


def _check_room_for_torch() -> None:
    """Refuse to import torch under a limit that is too low: numpy and torch would end the process instead of raising.

    Raises:
        MemoryError: it is.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if "torch" in sys.modules or limit == resource.RLIM_INFINITY or limit >= _AMPLE:
        return
    if subprocess.run([sys.executable, "-c", "import numpy, torch"], capture_output=True).returncode:
        raise MemoryError(f"torch cannot be loaded within {limit / 2**20:,.0f} MiB (ulimit -v)")


def _say(message: str) -> None:
    """One line on stderr."""
    print(f"anymamba: {' '.join(message.split())}", file=sys.stderr)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory ran out."""
    if error is None:
        return False
    known = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    known = known or any(text in str(error).lower() for text in _OUT_OF_MEMORY)
    return known or _is_out_of_memory(error.__cause__ or error.__context__)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"anymamba: warning: {message}", file=sys.stderr)
