"""How options read their values; each refuses in one line what it cannot read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any


def one_of(names: Sequence[str]) -> dict[str, Any]:
    """Arguments of an option that takes one of `names`."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return {"type": read, "metavar": f"{{{','.join(names)}}}"}


def number(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """A reader of numbers; `what` describes them in errors."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return read


WHOLE, REAL = number(int, "a whole number"), number(float, "a number")


def name_and_value(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON spells it, or else a word."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
