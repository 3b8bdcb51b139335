"""Names and values of config fields."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from anymamba.core.config_fields import (
    check_known,
    coerce_value,
    field_types,
    literal_choices,
    parse_text,
    suggest,
    takes_list,
)

KNOWN = ["seed", "data.sources", "data.format", "optimizer.lr", "model.depth"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("sead", "; did you mean seed?"),
        ("data.source", "; did you mean data.sources?"),
        ("lr", "; did you mean optimizer.lr?"),
        ("--Model-Depth", ""),
        ("optimiser.lr", "; did you mean optimizer.lr?"),
        ("DATA.FORMAT", "; did you mean data.format?"),
        ("xyz", ""),
    ],
)
def test_similar_names_are_suggested(name, suggestion):
    assert suggest(name, KNOWN) == suggestion


def test_unknown_names_raise_with_the_known_ones_of_their_section():
    check_known("seed", KNOWN, "run.toml: ")
    with pytest.raises(ValueError, match=r"run.toml: data.zzz: no such field; known are data.sources, data.format"):
        check_known("data.zzz", KNOWN, "run.toml: ")


@pytest.mark.parametrize(
    ("value", "annotation", "coerced"),
    [
        (3, float, 3.0),
        (3, int | float, 3),
        (None, int | None, None),
        ("auto", int | Literal["auto"], "auto"),
        ("a", tuple[str, ...], ("a",)),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([0, math.inf], tuple[int | float, int | float], (0, math.inf)),
        ({"a": 1}, dict[str, Any], {"a": 1}),
    ],
)
def test_values_take_the_type_of_their_annotation(value, annotation, coerced):
    result = coerce_value("x", value, annotation, max_number=100)
    assert result == coerced
    assert type(result) is type(coerced)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "x must be int, got True"),
        (1, bool, "x must be bool, got 1"),
        (1.5, int | Literal["auto"], "x must be int or auto, got 1.5"),
        ("c", Literal["a", "b"], "x must be one of a, b, got 'c'"),
        ([1], tuple[str, ...], r"x must be a list of strings, got \[1\]"),
        ([0.0], tuple[int | float, int | float], "x must be a list of 2 numbers"),
        (3, dict[str, Any], "x must be a table, got 3"),
        (101, int, "x must be a number of at most 100, got 101"),
        (10**400, float, "x must be float, got 1000"),
        (math.nan, float, "x must be a number of at most 100, got nan"),
        ([0, math.nan], tuple[int | float, int | float], "x must be a number of at most 100, got nan"),
    ],
)
def test_other_values_raise_with_what_was_expected(value, annotation, message):
    with pytest.raises(ValueError, match=message):
        coerce_value("x", value, annotation, max_number=100)


def test_types_of_fields_are_resolved():
    @dataclass
    class Config:
        width: int = 3
        kind: Literal["a", "b"] = "a"
        files: tuple[str, ...] = ()

    types = field_types(Config)
    assert list(types) == ["width", "kind", "files"]
    assert literal_choices(types["kind"]) == ("a", "b")
    assert [takes_list(kind) for kind in types.values()] == [False, False, True]
    assert parse_text("files", "a,b", types["files"]) == ["a", "b"]
    assert parse_text("width", "4", types["width"]) == 4
