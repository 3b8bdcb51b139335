"""Chat templates as text, in the process of `sandbox_worker.py`: jinja2's sandbox, with a limit on the length.

This file runs as a script. It imports only jinja2 and the standard library.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RejectedError(Exception):
    """A template called `raise_exception`."""


class TooLongError(Exception):
    """A template wrote more than the limit."""


class Generation(Extension):
    """The tag `{% generation %}`, which marks what an assistant wrote and does not change the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements between the tags, as they are."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def reject(message: str) -> NoReturn:
    """Raise the error with which a template rejects messages."""
    raise RejectedError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def compile_template(template: str) -> Any:
    """Return a compiled template, with everything that templates of transformers expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = reject
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.globals.pop("lipsum")  # text of any length
    return environment.from_string(template)


def render(template: str, values: dict[str, Any], max_characters: int) -> str:
    """Return the text of a template; raise `TooLongError` if it is longer than `max_characters`."""
    parts = []
    length = 0
    for part in compile_template(template).generate(values):
        length += len(part)
        if length > max_characters:
            raise TooLongError
        parts.append(part)
    return "".join(parts)


def reply(request: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Return the text, or what is wrong with the template."""
    try:
        return {"text": render(request["template"], request["values"], limits["characters"])}
    except TooLongError:
        return {"problem": f"it writes more than {limits['characters']:,} characters"}
    except MemoryError:  # the process itself replies
        raise
    except RejectedError as error:
        return {"problem": f"it rejects these messages: {error}"}
    except TemplateSyntaxError as error:
        return {"problem": f"not a readable template (line {error.lineno}: {error.message})"}
    except SecurityError as error:
        return {"problem": f"it does something that a template may not do: {error}"}
    except RecursionError:
        return {"problem": "it calls itself too often"}
    except Exception as error:  # anything that a program can do wrong
        return {"problem": f"it fails on these messages ({type(error).__name__}: {error})"}
