import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "anymamba"

# Top to bottom: a room imports only from itself and from those below it. A file beside the rooms is a room of its own.
ROOMS = [
    "cli",
    "serving",
    "training",
    "transformers",
    "compat",
    "inspect",
    "generation",
    "models",
    "blocks",
    "scan",
    "ops",
    "kernels",
    "ground",
]

# What stands outside the rooms: it is imported by everyone, or imports everything.
OUTSIDE = {"__init__", "__main__", "version"}

# `MambaLM.generate` is a door to the room above, opened when it is called.
DOORS = {("models/lm.py", "generation")}


def room_of(file):
    """The room of a file: its directory below the package, or its own name."""
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def rooms_imported(code, package):
    """The rooms that a file of `package` imports from, each with its line."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "anymamba":
                yield (rest[0] if rest else ""), f"line {node.lineno}: {name}"


FILES = sorted(file for file in SOURCE.rglob("*.py") if room_of(file) not in OUTSIDE)


def test_every_file_is_in_a_room():
    assert {room_of(file) for file in FILES} == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_a_file_imports_only_from_its_room_and_those_below(file):
    path, room = file.relative_to(SOURCE), room_of(file)
    for imported, line in rooms_imported(file.read_text(encoding="utf-8"), ["anymamba", *path.parts[:-1]]):
        if imported == "version" or (path.as_posix(), imported) in DOORS:
            continue
        assert imported in ROOMS, f"{path}, {line}: import from the room that has it"
        assert ROOMS.index(imported) >= ROOMS.index(room), f"{path}, {line}: {imported} is above {room}"


@pytest.mark.parametrize(
    ("code", "room"),
    [
        ("import anymamba.models.lm", "models"),
        ("from anymamba import models", "models"),
        ("from anymamba.models import lm", "models"),
        ("from ..models.lm import MambaLM", "models"),
        ("from .. import models", "models"),
        ("from .files import replacing", "ground"),
        ("import anymamba", ""),
    ],
)
def test_every_form_of_an_import_is_seen(code, room):
    assert [found for found, _ in rooms_imported(code, ["anymamba", "ground"])] == [room]
