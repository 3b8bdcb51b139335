"""The process in which chat templates run: a line of JSON in, a line of JSON out, until the input ends.

`template_sandbox.py` starts it as a script. It imports only jinja2 and the standard library.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusedError(Exception):
    """A template that calls `raise_exception`."""


class TooLongError(Exception):
    """A template writes more than it may."""


class Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, which changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements between the tags, as they are."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def refuse(message: str) -> NoReturn:
    """Templates call this for messages that they cannot write."""
    raise RefusedError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def now(format: str) -> str:
    """The date and time, in the format that the template asks for."""
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> Any:
    """A template, with everything that templates of transformers expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    environment.globals.pop("lipsum")  # text of any length
    return environment.from_string(template)


def render(template: str, values: dict[str, Any], most: int) -> str:
    """The text of a template.

    Raises:
        TooLongError: it is longer than `most` characters.
    """
    pieces, length = [], 0
    for piece in compiled(template).generate(values):
        length += len(piece)
        if length > most:
            raise TooLongError
        pieces.append(piece)
    return "".join(pieces)


def reply(request: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The text, or what is wrong with the template; `ended` if this process should not continue."""
    try:
        return {"text": render(request["template"], request["values"], limits["characters"])}
    except TooLongError:
        return {"problem": f"it writes more than {limits['characters']:,} characters"}
    except MemoryError:
        return {"problem": f"it takes more than {limits['bytes'] // 2**20:,} MiB of memory", "ended": True}
    except RefusedError as error:
        return {"problem": f"it refuses these messages: {error}"}
    except TemplateSyntaxError as error:
        return {"problem": f"not a readable template (line {error.lineno}: {error.message})"}
    except SecurityError as error:
        return {"problem": f"it does something that a template may not do: {error}"}
    except RecursionError:
        return {"problem": "it calls itself too often"}
    except Exception as error:  # whatever a program can do wrong
        return {"problem": f"it fails on these messages ({type(error).__name__}: {error})"}


def limit_memory(most: int) -> None:
    """Have allocations beyond `most` bytes fail, where the system can."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def limit_time(seconds: float) -> None:
    """Have the system end this process after some more seconds of processor time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Reply to requests until there are no more."""
    limits = json.loads(sys.argv[3])
    limit_memory(limits["bytes"])
    for line in sys.stdin.buffer:
        limit_time(limits["seconds"])
        answer = reply(json.loads(line), limits)
        limit_time(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if answer.get("ended"):
            return


if __name__ == "__main__":
    main()
