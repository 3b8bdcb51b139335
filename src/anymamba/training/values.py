"""Values of config fields: checked against their annotations, and read from the command line's texts."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def expect_known(name: str, names: Iterable[str], where: str, what: str = "field") -> None:
    """Refuse a name that is not among `names` of `what`, with those that are near; `where` stands before it."""
    names = list(names)
    if name not in names:
        last = name.rpartition(".")[2].lstrip("-")
        near = [x for x in names if x.rpartition(".")[2].lstrip("-") == last]
        near = near or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(names)}"
        raise ValueError(f"{where}{name}: no such {what}{hint}")


def choices(hint: Any) -> tuple[str, ...]:
    """The texts that an annotation allows, if they are named."""
    hints = [hint, *get_args(hint)]
    return next((get_args(option) for option in hints if get_origin(option) is Literal), ())


def checked(name: str, value: Any, hint: Any) -> Any:
    """A value of the type that the annotation wants; a whole number may stand for a float, a list for a tuple."""
    options = [o for o in get_args(hint) if o is not type(None)] if type(None) in get_args(hint) else [hint]
    wanted = options[0]
    if value is None and options != [hint]:
        return None
    if get_origin(wanted) is Literal:
        if value in get_args(wanted):
            return value
        raise ValueError(f"{name} must be one of {', '.join(get_args(wanted))}, got {value!r}")
    if get_origin(wanted) is tuple:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
            return tuple(value)
        raise ValueError(f"{name} must be a list of texts, got {value!r}")
    wanted = get_origin(wanted) or wanted
    if wanted is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000:
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be {wanted.__name__}, got {value!r}")
    return value


def parse(name: str, text: str, hint: Any) -> Any:
    """The value that a text on the command line spells."""
    if type(None) in get_args(hint):
        if text == "none":
            return None
        hint = next(o for o in get_args(hint) if o is not type(None))
    if hint is str or get_origin(hint) is Literal:
        return text
    if get_origin(hint) is tuple:
        return text.split(",")
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"--{name} must be true or false, got {text!r}")
        return text == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError as error:
            raise ValueError(f"--{name} must be a number ({hint.__name__}), got {text!r}") from error
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--{name} must be a TOML value such as {{key = 1}}, got {text[:80]!r}") from error
