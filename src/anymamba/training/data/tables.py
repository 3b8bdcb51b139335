"""Sequences and their targets, read from CSV, JSON lines and .npy files.

A sequence is an array of numbers (t, c) or of bytes (t,), the UTF-8 of a text. An error about what cannot be used names
the file and line, and what was expected.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SUFFIXES = (".csv", ".jsonl", ".ndjson", ".npy")
_NO_TEXTS = "; texts are read from .jsonl"
_OTHER_MARKS = {";": "semicolons", "\t": "tabs"}  # which other programs separate cells with


class Table(NamedTuple):
    """Sequences in the order of their files.

    Attributes:
        sequences: arrays (t, c) of float64, or (t,) of uint8 for texts.
        targets: of each sequence, as written: a text or numbers; empty if none were asked for.
        places: of each sequence, for errors: "file.csv, line 3".
        channels: names of the numbers of a step.
        columns: the columns of a table, or the field of JSON lines, that were read.
        names: the names of the sequences, if a column of a table names them; else empty.
    """

    sequences: list[np.ndarray]
    targets: list[Any]
    places: list[str]
    channels: list[str]
    columns: list[str]
    names: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the sequences are texts."""
        return bool(self.sequences) and self.sequences[0].ndim == 1


def read_tables(
    sources: Sequence[str],
    *,
    targets: Sequence[str] = (),
    inputs: Sequence[str] = (),
    sequence: str | None = None,
    steps: bool = False,
) -> Table:
    """Read files, one after another.

    Args:
        sources: .csv, .jsonl (or .ndjson) and .npy files.
        targets: columns or fields to predict; for .npy, one file with the targets of each sequence.
        inputs: columns or the field to read; if not given, all other columns, or the only other field.
        sequence: column of a table that names the sequence to which a row belongs as a step.
        steps: whether a row of a table without such a column is a step of one sequence rather than a sequence.

    Raises:
        ValueError: a file is missing or of another kind, or something in it cannot be used.
    """
    if not sources:
        raise ValueError(f"data.sources must name files ({', '.join(SUFFIXES)}), got none")
    parts = []
    for source in sources:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{source}: {'expected a file, got a directory' if path.is_dir() else 'no such file'}")
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{source}: expected a file named {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
        if path.suffix == ".npy":
            parts.append(_read_array(path, list(targets), steps))
        elif path.suffix == ".csv":
            parts.append(_read_csv(path, list(targets), list(inputs), sequence, steps))
        else:
            parts.append(_read_lines(path, list(targets), list(inputs)))
    return _joined(parts, sources)


def _joined(parts: list[Table], sources: Sequence[str]) -> Table:
    first = parts[0]
    for part, source in zip(parts, sources, strict=True):
        if not part.sequences:
            raise ValueError(f"{source}: expected sequences, got none")
        if part.channels != first.channels or part.is_text != first.is_text:
            found, expected = " ".join(part.channels), " ".join(first.channels)
            raise ValueError(f"{source}: expected the inputs of {sources[0]}, {expected}, got {found}")
    return Table(
        [x for part in parts for x in part.sequences],
        [x for part in parts for x in part.targets],
        [x for part in parts for x in part.places],
        first.channels,
        first.columns,
        tuple(x for part in parts for x in part.names),
    )


def _number(place: str, name: str, text: Any, hint: str = "") -> float:
    """A finite number."""
    try:
        if isinstance(text, bool):
            raise ValueError
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {name} must be a number, got {text!r:.60}{hint if text else ''}") from None
    if not math.isfinite(value):
        raise ValueError(f"{place}: {name} must be a finite number, got {text!r:.60}")
    return value


def _read_csv(path: Path, targets: list[str], inputs: list[str], sequence: str | None, steps: bool) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = _csv_rows(path, csv.reader(file, strict=True))
        header = next(rows, (0, []))[1]
        if not header:
            raise ValueError(f"{path}: expected a first line with the names of the columns, got an empty file")
        if len(header) == 1 and (marks := [name for mark, name in _OTHER_MARKS.items() if mark in header[0]]):
            raise ValueError(f"{path}, line 1: expected names separated by commas, got {marks[0]}: {header[0]!r:.60}")
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: columns must have different names, got {twice!r} twice")
        for name in [*targets, *inputs, *([sequence] if sequence else [])]:
            if name not in header:
                raise ValueError(f"{path}, line 1: no column {name!r}; there are {', '.join(header)}")
        inputs = inputs or [name for name in header if name not in {*targets, sequence}]
        if not inputs:
            raise ValueError(f"{path}, line 1: no column is left to read beside {', '.join(targets)}")
        return _csv_table(path, header, list(rows), targets, inputs, sequence, steps)


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Rows with their line numbers, all of one length; empty lines are skipped."""
    width = None
    try:
        for row in reader:
            if not row:
                continue
            width = len(row) if width is None else width
            if len(row) != width:
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected {width} cells, as line 1 has, got {len(row)}"
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not readable CSV ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _csv_table(
    path: Path,
    header: list[str],
    rows: list[tuple[int, list[str]]],
    targets: list[str],
    inputs: list[str],
    sequence: str | None,
    steps: bool,
) -> Table:
    column = {name: i for i, name in enumerate(header)}
    groups: dict[str, list[int]] = {}
    for r, (line, row) in enumerate(rows):
        key = row[column[sequence]] if sequence else "" if steps else str(line)
        groups.setdefault(key, []).append(r)
    names = tuple(groups) if sequence else ()
    found = Table([], [], [], inputs if sequence or steps else ["value"], inputs, names)
    for members in groups.values():
        places = [f"{path}, line {rows[r][0]}" for r in members]
        numbers = [
            [_number(place, f"column {name!r}", rows[r][1][column[name]], _NO_TEXTS) for name in inputs]
            for place, r in zip(places, members, strict=True)
        ]
        said = [[rows[r][1][column[name]] for name in targets] for r in members]
        if wrong := [k for k, other in enumerate(said) if other != said[0]]:
            one, other = ", ".join(said[0]), ", ".join(said[wrong[0]])
            raise ValueError(f"{places[wrong[0]]}: a sequence has one target, expected {one}, got {other}")
        array = np.array(numbers, dtype=np.float64)
        found.sequences.append(array if sequence or steps else array.reshape(-1, 1))
        found.targets.append(said[0])
        found.places.append(places[0])
    return found


def _read_lines(path: Path, targets: list[str], inputs: list[str]) -> Table:
    if len(inputs) > 1:
        raise ValueError(f"{path}: data.inputs must name one field of JSON lines, got {' '.join(inputs)}")
    sequences, said, places, rest = list[np.ndarray](), list[Any](), list[str](), list[str]()
    content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not readable JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"{place}: expected an object, got {type(value).__name__}")
        for name in [*targets, *inputs]:
            if name not in value:
                raise ValueError(f"{place}: no field {name!r}; there are {', '.join(value)}")
        rest = inputs or [name for name in value if name not in targets]
        if len(rest) != 1:
            raise ValueError(f"{place}: data.inputs must say which field is read: {', '.join(rest) or 'there is none'}")
        sequences.append(_sequence(place, rest[0], value[rest[0]]))
        said.append([x for name in targets for x in _listed(value[name])])
        places.append(place)
        if sequences[-1].shape[1:] != sequences[0].shape[1:]:
            expected, got = _described(sequences[0]), _described(sequences[-1])
            raise ValueError(f"{place}: expected {expected}, as {places[0].rpartition(', ')[2]} has, got {got}")
    width = sequences[0].shape[1] if sequences and sequences[0].ndim > 1 else 0
    return Table(sequences, said, places, [f"channel {i}" for i in range(width)] or ["text"], rest if sequences else [])


def _described(x: np.ndarray) -> str:
    return f"{x.shape[1]} numbers per step" if x.ndim > 1 else "a text"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sequence(place: str, name: str, value: Any) -> np.ndarray:
    """A text as its bytes, a list of numbers (t, 1), or a list of lists of numbers (t, c)."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{place}: {name!r} must have text, got none")
        return np.frombuffer(value.encode("utf-8", "surrogatepass"), dtype=np.uint8).copy()
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: {name!r} must be a text, or a list of numbers or of lists, got {value!r:.60}")
    steps = [x if isinstance(x, list) else [x] for x in value]
    for t, step in enumerate(steps):
        if len(step) != len(steps[0]) or not step:
            raise ValueError(f"{place}: step {t} of {name!r} must have {len(steps[0])} numbers, got {len(step)}")
    return np.array([[_number(place, f"{name!r}[{t}]", x) for x in step] for t, step in enumerate(steps)])


def load_array(path: Path) -> np.ndarray:
    """The numbers of a .npy file; a pickle is refused.

    Raises:
        ValueError: it is not such a file, or has numbers that are not finite.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a readable .npy file of numbers ({error})") from error
    if found.dtype.kind in "US":
        return found
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{path}: expected numbers, got {found.dtype}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(found))[0])
        raise ValueError(f"{path}: expected finite numbers, got {found[place]} at {list(place)}")
    return found


def _read_array(path: Path, targets: list[str], steps: bool) -> Table:
    array = load_array(path)
    if array.dtype.kind in "US":
        raise ValueError(f"{path}: expected numbers, got texts")
    array = array.astype(np.float64)
    if steps and array.ndim < 3:
        array = array.reshape(1, len(array), -1)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not array.size:
        shapes = "(t,), (t, c) or (n, t, c)" if steps else "(n, t) or (n, t, c)"
        raise ValueError(f"{path}: expected an array {shapes}, got {array.shape}")
    said: list[Any] = [[] for _ in array]
    if targets:
        if len(targets) > 1 or not targets[0].endswith(".npy"):
            raise ValueError(f"{path}: data.targets must be one .npy file, got {' '.join(targets)}")
        answers = load_array(Path(targets[0]))
        if answers.ndim not in (1, 2) or len(answers) != len(array):
            raise ValueError(f"{targets[0]}: expected {len(array)} rows, as {path} has sequences, got {answers.shape}")
        said = [_listed(x) for x in answers.tolist()]
    places = [f"{path}, row {i}" for i in range(len(array))]
    return Table(list(array), said, places, [f"channel {i}" for i in range(array.shape[2])], [])
