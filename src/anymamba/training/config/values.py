"""Values of config fields: checked against their annotations, and read from the command line's texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

from anymamba.core.config_fields import split_section, suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def check_known(name: str, names: Iterable[str], where: str, what: str = "field", otherwise: str = "") -> None:
    """Refuse a name that is not among `names`; the other arguments are those of `unknown`.

    Raises:
        ValueError: it is not among them.
    """
    names = list(names)
    if name not in names:
        raise ValueError(unknown(name, names, where, what, otherwise))


def unknown(name: str, names: Iterable[str], where: str, what: str = "field", otherwise: str = "") -> str:
    """An error message for a name that does not exist.

    Args:
        name: the given name.
        names: the names that exist.
        where: text before the name.
        what: what the names stand for.
        otherwise: the end of the message if no name is similar; if not given, it lists the names that exist.

    Returns:
        A sentence, with the names that the user probably meant.
    """
    names = list(names)
    return f"{where}{name}: no such {what}{suggest(name, names) or f'; {otherwise or _known(name, names)}'}"


def _known(name: str, names: list[str]) -> str:
    section = split_section(name)[0]
    beside = [x for x in names if split_section(x)[0] == section]
    return f"known are {', '.join(beside or names)}"


def choices(annotation: Any) -> tuple[str, ...]:
    """The texts that an annotation allows, if it lists them."""
    found = [annotation, *get_args(annotation)]
    return next((get_args(option) for option in found if get_origin(option) is Literal), ())


def is_list(annotation: Any) -> bool:
    """Whether a field takes several values."""
    return get_origin(annotation) is tuple


def checked(name: str, value: Any, annotation: Any) -> Any:
    """A value of the annotation's type; a whole number may stand for a float, and a list for a tuple."""
    arguments = get_args(annotation)
    options = [o for o in arguments if o is not type(None)] if type(None) in arguments else [annotation]
    wanted = options[0]
    if value is None and options != [annotation]:
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


def parse(name: str, given: str | Sequence[str], annotation: Any) -> Any:
    """The value of a text from the command line, or the values of a list."""
    if is_list(annotation):
        return [x for text in ([given] if isinstance(given, str) else given) for x in _listed(text)]
    if not isinstance(given, str):
        raise ValueError(f"--{name} takes one value, got {' '.join(given)}")
    text = given
    if type(None) in get_args(annotation):
        if text == "none":
            return None
        annotation = next(o for o in get_args(annotation) if o is not type(None))
    if annotation is str or get_origin(annotation) is Literal:
        return text
    if annotation is bool:
        if text not in ("true", "false"):
            raise ValueError(f"--{name} must be true or false, got {text!r}")
        return text == "true"
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError as error:
            raise ValueError(f"--{name} must be a number ({annotation.__name__}), got {text!r}") from error
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--{name} must be a TOML value such as {{key = 1}}, got {text[:80]!r}") from error


def _listed(text: str) -> list[str]:
    """The entries of one value of a list: itself, those of a list in TOML or JSON, or those between commas."""
    if os.path.exists(text):  # noqa: PTH110 (a Path raises for names that are too long)
        return [text]
    if text.startswith("["):
        try:
            entries = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return [text]  # a pattern such as [ab]*.txt
        return entries if all(isinstance(entry, str) for entry in entries) else [text]
    return [part for part in text.split(",") if part]
