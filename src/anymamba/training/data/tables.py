"""Sequences and their targets, read from CSV, JSON lines and .npy files.

A sequence is an array of numbers (t, c) or of bytes (t,), the UTF-8 of a text. An error names the file and the line
that cannot be used, what was expected, and what is there.
"""

from __future__ import annotations

import csv
import json
import math
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anymamba.training.data.sources import check_not_utf16

SUFFIXES = (".csv", ".jsonl", ".ndjson", ".npy")
# What numpy raises for a damaged .npy file; its parser of headers the last two.
_UNREADABLE = (ValueError, OSError, EOFError, MemoryError, tokenize.TokenError)
_TEXT_HINT = "; texts are read from .jsonl"
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}


class Table(NamedTuple):
    """Sequences in the order of their files."""

    sequences: list[np.ndarray]  # arrays (t, c) of float64, or (t,) of uint8 for texts
    targets: list[Any]  # target of each sequence, as written: a text or numbers; empty if none were asked for
    origins: list[str]  # origin of each sequence, for errors: "file.csv, line 3"
    channels: list[str]  # names of the numbers of a step
    columns: list[str]  # columns of a table, or field of JSON lines, that were read
    names: tuple[str, ...] = ()  # names of the sequences, if a column of a table names them; else empty

    @property
    def is_text(self) -> bool:
        """Return whether the sequences are texts."""
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
        targets: Columns or fields to predict; for .npy, one file with the targets of each sequence.
        inputs: Columns or the field to read; if omitted, all other columns, or the only other field.
        sequence: Column of a table that names the sequence of which a row is a step.
        steps: Whether a row of a table without such a column is a step of one sequence rather than a sequence.
    """
    if not sources:
        raise ValueError(f"data.sources must name files ({', '.join(SUFFIXES)}), got none")
    targets, inputs, parts = list(targets), list(inputs), []
    for source in sources:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{source}: {'expected a file, got a directory' if path.is_dir() else 'no such file'}")
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{source}: expected a file named {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'}")
        if path.suffix == ".npy":
            parts.append(_read_array(path, targets, steps))
            continue
        with path.open("rb") as file:
            check_not_utf16(file.read(4), f"{path}: ")
        if path.suffix == ".csv":
            parts.append(_read_csv(path, targets, inputs, sequence, steps))
        else:
            parts.append(_read_lines(path, targets, inputs))
    return _concatenate(parts, sources)


def _concatenate(parts: list[Table], sources: Sequence[str]) -> Table:
    first = parts[0]
    for part, source in zip(parts, sources, strict=True):
        if not part.sequences:
            raise ValueError(f"{source}: expected sequences, got none")
        if part.channels != first.channels or part.is_text != first.is_text:
            expected, actual = " ".join(first.channels), " ".join(part.channels)
            raise ValueError(f"{source}: expected the inputs of {sources[0]}, {expected}, got {actual}")
    return Table(
        [x for part in parts for x in part.sequences],
        [x for part in parts for x in part.targets],
        [x for part in parts for x in part.origins],
        first.channels,
        first.columns,
        tuple(x for part in parts for x in part.names),
    )


def parse_number(origin: str, name: str, text: Any, hint: str = "", *, allow_bool: bool = False) -> float:
    """Return a finite number; with `allow_bool`, True is 1 and False is 0."""
    try:
        if isinstance(text, bool) and not allow_bool:
            raise ValueError
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{origin}: {name} must be a number, got {text!r:.60}{hint if text else ''}") from None
    if not math.isfinite(value):
        raise ValueError(f"{origin}: {name} must be a finite number, got {text!r:.60}")
    return value


def _read_csv(path: Path, targets: list[str], inputs: list[str], sequence: str | None, steps: bool) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = _csv_rows(path, csv.reader(file, strict=True))
        header = next(rows, (0, []))[1]
        if not header:
            raise ValueError(f"{path}: expected a first line with the names of the columns, got an empty file")
        if len(header) == 1 and (
            separators := [name for separator, name in _OTHER_SEPARATORS.items() if separator in header[0]]
        ):
            raise ValueError(
                f"{path}, line 1: expected names separated by commas, got {separators[0]}: {header[0]!r:.60}"
            )
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: columns must have different names, got {twice!r} twice")
        for name in [*targets, *inputs, *([sequence] if sequence else [])]:
            if name not in header:
                raise ValueError(f"{path}, line 1: no column {name!r}; there are {', '.join(header)}")
        inputs = inputs or [name for name in header if name not in {*targets, sequence}]
        if not inputs:
            raise ValueError(f"{path}, line 1: no column is left to read next to {', '.join(targets)}")
        return _csv_table(path, header, list(rows), targets, inputs, sequence, steps)


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of equal length with their line numbers; empty lines are skipped."""
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
    table = Table([], [], [], inputs if sequence or steps else ["value"], inputs, names)
    for members in groups.values():
        origins = [f"{path}, line {rows[r][0]}" for r in members]
        numbers = [
            [parse_number(origin, f"column {name!r}", rows[r][1][column[name]], _TEXT_HINT) for name in inputs]
            for origin, r in zip(origins, members, strict=True)
        ]
        row_targets = [[rows[r][1][column[name]] for name in targets] for r in members]
        if wrong := [k for k, other in enumerate(row_targets) if other != row_targets[0]]:
            one, other = ", ".join(row_targets[0]), ", ".join(row_targets[wrong[0]])
            raise ValueError(f"{origins[wrong[0]]}: a sequence has one target, expected {one}, got {other}")
        array = np.array(numbers, dtype=np.float64)
        table.sequences.append(array if sequence or steps else array.reshape(-1, 1))
        table.targets.append(row_targets[0])
        table.origins.append(origins[0])
    return table


def _read_lines(path: Path, targets: list[str], inputs: list[str]) -> Table:
    if len(inputs) > 1:
        raise ValueError(f"{path}: data.inputs must name one field of JSON lines, got {' '.join(inputs)}")
    sequences, target_values = list[np.ndarray](), list[Any]()
    origins, read_fields = list[str](), list[str]()
    content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{origin}: not readable JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"{origin}: expected an object, got {type(value).__name__}")
        for name in [*targets, *inputs]:
            if name not in value:
                raise ValueError(f"{origin}: no field {name!r}; there are {', '.join(value)}")
        read_fields = inputs or [name for name in value if name not in targets]
        if len(read_fields) != 1:
            raise ValueError(
                f"{origin}: data.inputs must name the field to read: {', '.join(read_fields) or 'there is none'}"
            )
        sequences.append(_sequence(origin, read_fields[0], value[read_fields[0]]))
        target_values.append([x for name in targets for x in _as_list(value[name])])
        origins.append(origin)
        if sequences[-1].shape[1:] != sequences[0].shape[1:]:
            expected, got = _describe(sequences[0]), _describe(sequences[-1])
            raise ValueError(f"{origin}: expected {expected}, as {origins[0].rpartition(', ')[2]} has, got {got}")
    width = sequences[0].shape[1] if sequences and sequences[0].ndim > 1 else 0
    return Table(
        sequences,
        target_values,
        origins,
        [f"channel {i}" for i in range(width)] or ["text"],
        read_fields if sequences else [],
    )


def _describe(x: np.ndarray) -> str:
    return f"{x.shape[1]} numbers per step" if x.ndim > 1 else "a text"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sequence(origin: str, name: str, value: Any) -> np.ndarray:
    """Return a text as its bytes, a list of numbers as (t, 1), or a list of lists of numbers as (t, c)."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{origin}: {name!r} must have text, got none")
        return np.frombuffer(value.encode("utf-8", "surrogatepass"), dtype=np.uint8).copy()
    if not isinstance(value, list) or not value:
        raise ValueError(f"{origin}: {name!r} must be a text, or a list of numbers or of lists, got {value!r:.60}")
    steps = [x if isinstance(x, list) else [x] for x in value]
    for t, step in enumerate(steps):
        if len(step) != len(steps[0]) or not step:
            raise ValueError(f"{origin}: step {t} of {name!r} must have {len(steps[0])} numbers, got {len(step)}")
    return np.array([[parse_number(origin, f"{name!r}[{t}]", x) for x in step] for t, step in enumerate(steps)])


def load_array(path: Path) -> np.ndarray:
    """Load the finite numbers, or the texts, of a .npy file; a pickle is rejected."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with np.errstate(over="ignore"):
            np.lib.format.open_memmap(path, mode="r")  # compares what the header claims with the bytes there are
        array = np.load(path, allow_pickle=False)
    except _UNREADABLE as error:
        reason = str(error)[:200] or "a damaged header"
        raise ValueError(f"{path}: not a readable .npy file of numbers ({reason})") from error
    if array.dtype.kind in "US":
        return array
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path}: expected numbers, got {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{path}: expected finite numbers, got {array[index]} at {list(index)}")
    return array


def _read_array(path: Path, targets: list[str], steps: bool) -> Table:
    array = load_array(path)
    if array.dtype.kind in "US":
        raise ValueError(f"{path}: expected numbers, got texts")
    shape = array.shape
    if array.size:
        array = array.astype(np.float64)
        if steps and array.ndim in (1, 2):
            array = array.reshape(1, len(array), -1)
        if array.ndim == 2:
            array = array[:, :, None]
    if array.ndim != 3 or not array.size:
        shapes = "(t,), (t, c) or (n, t, c)" if steps else "(n, t) or (n, t, c)"
        raise ValueError(f"{path}: expected an array {shapes}, got {shape}")
    target_values: list[Any] = [[] for _ in array]
    if targets:
        if len(targets) > 1 or not targets[0].endswith(".npy"):
            raise ValueError(f"{path}: data.targets must be one .npy file, got {' '.join(targets)}")
        loaded = load_array(Path(targets[0]))
        if loaded.ndim not in (1, 2) or len(loaded) != len(array):
            raise ValueError(f"{targets[0]}: expected {len(array)} rows, as {path} has sequences, got {loaded.shape}")
        target_values = [_as_list(x) for x in loaded.tolist()]
    origins = [f"{path}, row {i}" for i in range(len(array))]
    return Table(list(array), target_values, origins, [f"channel {i}" for i in range(array.shape[2])], [])
