"""One case in a separate process: what it returned, or how it ended."""

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import traceback

MEMORY = 3 * 2**30  # bytes that a case may take beyond what the process has
FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect"}


class Finding(Exception):  # noqa: N818
    """An error that the fuzzer found."""


def run_in_child(function, *arguments, seconds=30.0):
    """Fork and call a function whose result JSON can hold.

    Returns:
        The result.

    Raises:
        Finding: it raised (with its last lines), died, took too long, or ran another program.
    """
    receive, send = os.pipe()
    process = os.fork()
    if not process:
        os.close(receive)
        _report(send, function, arguments)
    os.close(send)
    text, hung = _read(receive, seconds)
    os.close(receive)
    if hung:
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if hung:
        raise Finding(f"hung: it was not done after {seconds:.0f} seconds")
    if os.WIFSIGNALED(status) or not text:
        raise Finding(f"crashed: the process died of {_describe_end(status)}")
    answer = json.loads(text)
    if "finding" in answer:
        raise Finding(answer["finding"])
    return answer["result"]


def _read(descriptor, seconds):
    """Read until the writer closes, and return the bytes and whether time ran out.

    Counted in tenths of seconds of waiting: a machine that was suspended meanwhile has waited for one of them.
    """
    blocks, tenths = [], 10 * seconds
    while tenths > 0:
        if not select.select([descriptor], [], [], 0.1)[0]:
            tenths -= 1
        elif block := os.read(descriptor, 2**16):
            blocks.append(block)
        else:
            return b"".join(blocks), False
    return b"", True


def _report(send, function, arguments):
    """Call a function in the child, write its result, and exit."""
    answer = {"finding": "the child ended early"}
    try:
        _restrain()
        answer = {"result": function(*arguments)}
    except Finding as finding:
        answer = {"finding": str(finding)}
    except BaseException as error:
        where = [
            f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)
        ]
        answer = {"finding": f"{type(error).__name__}: {str(error)[:300]}\n    in {' < '.join(reversed(where[-4:]))}"}
    finally:
        with os.fdopen(send, "w") as file:
            json.dump(answer, file)
        os._exit(0)


def _restrain():
    """Limit memory, and forbid core files, output and other programs."""
    faulthandler.disable()
    with open("/proc/self/statm") as file:  # noqa: PTH123
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

    def watch(event, _):
        if event in FORBIDDEN:
            raise Finding(f"ran code: {event}")

    sys.addaudithook(watch)


def _describe_end(status):
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
