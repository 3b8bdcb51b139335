"""Names and values of config fields: one validator for keywords, tables of JSON and TOML files, and command lines.

`check_known` and `suggest` check names, `coerce_value` a value against the annotation of its field, and `parse_text`
turns a text of the command line into a value. All raise `ValueError` with the field's name, what was expected and what
came. Nothing here imports torch, so the command line can validate before it loads anything.

The callers, which raise for the user: `blocks/block_config.py`, `models/config.py`, `models/families.py` and
`models/stack/stack_config.py` (configs of models), `training/config/run_config.py` and `sections.py` (TOML files and
options of a run), `cli/main.py` (commands and options), `generation/sampling.py` (keywords), and
`serving/api/requests.py` (fields of requests).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NO_MATCH = object()
_FIELD_TYPES: dict[type[Any], dict[str, Any]] = {}  # resolving annotations is slow
_MAX_FLOAT = 2**1000  # integers below this convert to float


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean data.sources?" if names among `known` are similar to `name`, else an empty string.

    A dotted name has a section. Names with the same last part come first, then similar names of the same section, then
    names that are similar as a whole. Letter case, leading dashes, and dashes for underscores are ignored.
    """
    similar = _similar_names(name, list(known))
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def check_known(name: str, known: Iterable[str], where: str, what: str = "field", otherwise: str = "") -> None:
    """Raise `ValueError` if a name does not exist (arguments as for `describe_unknown`)."""
    known = list(known)
    if name not in known:
        raise ValueError(describe_unknown(name, known, where, what, otherwise))


def describe_unknown(name: str, known: Iterable[str], where: str, what: str = "field", otherwise: str = "") -> str:
    """Return the error message for a name, of a kind of thing (`what`), that does not exist, after the text `where`.

    `otherwise` is its end if no name is similar; by default it lists the known names of the section.
    """
    known = list(known)
    section = _split_section(name)[0]
    siblings = [other for other in known if _split_section(other)[0] == section]
    otherwise = otherwise or f"known are {', '.join(siblings or known)}"
    return f"{where}{name}: no such {what}{suggest(name, known) or f'; {otherwise}'}"


def field_types(config: type[Any]) -> dict[str, Any]:
    """Return the annotation of every field of a dataclass by its name."""
    if config not in _FIELD_TYPES:
        hints = typing.get_type_hints(config)
        _FIELD_TYPES[config] = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    return _FIELD_TYPES[config]


def coerce_value(name: str, value: Any, annotation: Any, *, max_number: int | float | None = None) -> Any:
    """Return a value in the type of an annotation: an integer may stand for a float, and a list for a tuple.

    The first member of a union that matches decides. Raises `ValueError` for a value of another type, and for numbers
    that are NaN or above `max_number` in absolute value; infinities may stand in tuples, as in (0.0, inf).
    """
    for option in _union_members(annotation):
        if (coerced := _match_type(value, option)) is not _NO_MATCH:
            break
    else:
        raise ValueError(f"{name} must be {_describe_type(annotation)}, got {reprlib.repr(value)}")
    for number in coerced if isinstance(coerced, tuple) else (coerced,):
        if max_number is None or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        is_open_bound = isinstance(coerced, tuple) and number == float("inf")
        if not (abs(number) <= max_number or is_open_bound):
            raise ValueError(f"{name} must be a number of at most {max_number:,}, got {reprlib.repr(number)}")
    return coerced


def literal_choices(annotation: Any) -> tuple[str, ...]:
    """Return the texts that an annotation lists; empty if it lists none."""
    options = [annotation, *get_args(annotation)]
    return next((get_args(option) for option in options if get_origin(option) is Literal), ())


def takes_list(annotation: Any) -> bool:
    """Return whether a field takes several values."""
    return get_origin(annotation) is tuple


def parse_text(name: str, text: str | Sequence[str], annotation: Any) -> Any:
    """Return the value of a text from the command line, or the values of several texts for a field with a list."""
    if takes_list(annotation):
        return [entry for part in ([text] if isinstance(text, str) else text) for entry in _parse_list(part)]
    if not isinstance(text, str):
        raise ValueError(f"--{name} takes one value, got {' '.join(text)}")
    if type(None) in get_args(annotation):
        if text == "none":
            return None
        annotation = next(option for option in get_args(annotation) if option is not type(None))
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


def _similar_names(name: str, known: list[str]) -> list[str]:
    section, last = _split_section(name)
    if same_last := [other for other in known if _split_section(other)[1] == last]:
        return same_last
    siblings = {_split_section(other)[1]: other for other in known if _split_section(other)[0] == section}
    if siblings:  # compared as a whole, all names of the section would be similar
        return [siblings[other] for other in difflib.get_close_matches(last, siblings, n=3, cutoff=0.6)]
    wholes = {".".join(_split_section(other)): other for other in known}
    return [wholes[other] for other in difflib.get_close_matches(f"{section}.{last}", wholes, n=3, cutoff=0.75)]


def _split_section(name: str) -> tuple[str, str]:
    """Return the section of a name and its last part, in one spelling for files and the command line."""
    section, _, last = name.lstrip("-").lower().replace("-", "_").rpartition(".")
    return section, last


def _union_members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)


def _match_type(value: Any, kind: Any) -> Any:
    """Return the value in the type of one member of an annotation, or `_NO_MATCH`."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return value
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else _NO_MATCH
    if origin is tuple:
        return _match_tuple(value, get_args(kind))
    if origin is float and type(value) is int and abs(value) < _MAX_FLOAT:
        return float(value)
    if isinstance(value, bool) and origin is not bool:
        return _NO_MATCH
    return value if isinstance(value, origin) else _NO_MATCH


def _match_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    if kinds[-1] is Ellipsis:
        value = [value] if isinstance(value, str) else value
        kinds = kinds[:1] * (len(value) if isinstance(value, list | tuple) else 0)
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        return _NO_MATCH
    entries = []
    for entry, kind in zip(value, kinds, strict=True):
        matches = (_match_type(entry, option) for option in _union_members(kind))
        if (match := next((match for match in matches if match is not _NO_MATCH), _NO_MATCH)) is _NO_MATCH:
            return _NO_MATCH
        entries.append(match)
    return tuple(entries)


def _describe_type(annotation: Any) -> str:
    """Return what an annotation accepts, in words: "int or None", "one of cosine, wsd", "a list of 2 numbers"."""
    members = _union_members(annotation)
    if len(members) > 1:
        return " or ".join(", ".join(get_args(m)) if get_origin(m) is Literal else _describe_type(m) for m in members)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if get_origin(annotation) is tuple:
        kinds = get_args(annotation)
        return "a list of strings" if kinds[-1] is Ellipsis else f"a list of {len(kinds)} numbers"
    kind = get_origin(annotation) or annotation
    return {dict: "a table", list: "a list", type(None): "None"}.get(kind, kind.__name__)


def _parse_list(text: str) -> list[str]:
    """Return the entries of one text: itself, those of a list in TOML or JSON, or those between commas."""
    if os.path.exists(text):  # noqa: PTH110 (a Path raises for names that are too long)
        return [text]
    if text.startswith("["):
        try:
            entries = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return [text]  # a pattern such as [ab]*.txt
        return entries if all(isinstance(entry, str) for entry in entries) else [text]
    return [part for part in text.split(",") if part]
