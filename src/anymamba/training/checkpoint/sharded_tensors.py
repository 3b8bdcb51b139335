"""Tensors of a checkpoint: written whole by one worker or in pieces by several, and read by any number of them.

A kind of tensors (model, optimizer, carried) is one file, `model.safetensors`, or a numbered file from each worker that
has rows of them, `model-00001-of-00002.safetensors`. The header of a numbered file says, as JSON under "pieces", how
many rows each of its divided tensors has in all, and which of them are here, in the order of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.io import open_tensors, parse_json, write_tensors

_NUMBERED = re.compile(r"(\w+)-(\d{5})-of-(\d{5})\.safetensors")


class TensorShard(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        rows: the rows, one after another.
        spans: which rows they are: the first of each run, and the one after its last.
        total: how many rows the whole tensor has.
    """

    rows: Tensor
    spans: tuple[tuple[int, int], ...]
    total: int


def file_name(kind: str, place: int, places: int) -> str:
    """The name of the file with the tensors of a kind that the worker at a place writes."""
    return f"{kind}.safetensors" if places == 1 else f"{kind}-{place + 1:05d}-of-{places:05d}.safetensors"


def list_files(kind: str, names: list[str]) -> list[str]:
    """The files of a kind among the names in a checkpoint, in the order of their numbers.

    Raises:
        ValueError: some of them are missing.
    """
    whole = file_name(kind, 0, 1)
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match is not None and match[1] == kind]
    if not numbered:
        return [whole] if whole in names else []
    expected = [file_name(kind, place, int(numbered[0][3])) for place in range(int(numbered[0][3]))]
    if len(expected) < 2 or whole in names or sorted(match[0] for match in numbered) != expected:
        found = ", ".join(sorted([match[0] for match in numbered] + [whole] * (whole in names)))
        raise ValueError(f"{kind} should be one file, or all of those that workers wrote, got {found}")
    return expected


def is_divided(names: list[str]) -> bool:
    """Whether some files of a checkpoint have pieces of tensors."""
    return any(_NUMBERED.fullmatch(name) for name in names)


def write_shards(path: Path, tensors: Mapping[str, Tensor | TensorShard]) -> None:
    """Write what one worker has of the tensors of a kind.

    Raises:
        OSError: it cannot be written.
    """
    pieces = {name: x for name, x in tensors.items() if isinstance(x, TensorShard)}
    table = {name: {"rows": x.total, "spans": x.spans} for name, x in pieces.items()}
    content = {name: x.rows if isinstance(x, TensorShard) else x for name, x in tensors.items()}
    # Without metadata, a file without tensors could not be read, as that of an optimizer before its first step.
    write_tensors(path, content, {"pieces": json.dumps(table)} if _NUMBERED.fullmatch(path.name) else {})


class StoredTensor:
    """A tensor of a checkpoint, wherever its rows lie; they are read on demand.

    Attributes:
        shape: of all rows.
        dtype: as in the files.
    """

    def __init__(self, owner: StoredTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Nothing is read yet."""
        self.shape, self.dtype, self._owner, self._name = shape, dtype, owner, name
        self._runs: list[tuple[int, int, Path, int]] = []  # first row, end, the file, and the first row's place in it

    def add(self, path: Path, spans: tuple[tuple[int, int], ...]) -> None:
        """Note which rows a file has."""
        first = 0
        for begin, end in spans:
            self._runs.append((begin, end, path, first))
            first += end - begin
        self._runs.sort()

    def check_all_rows(self) -> None:
        """Refuse rows that no file or more than one has.

        Raises:
            ValueError: there are such rows.
        """
        if not self.shape:
            if len(self._runs) > 1:
                raise ValueError(f"{self._name} should be in one file, got {len(self._runs)} with it")
            return
        ends = [0, *(end for _, end, _, _ in self._runs)]
        begins = [*(begin for begin, _, _, _ in self._runs), self.shape[0]]
        if ends != begins:
            found = ", ".join(f"{begin} to {end} in {path.name}" for begin, end, path, _ in self._runs)
            raise ValueError(f"each of the {self.shape[0]} rows of {self._name} should be in one file, got {found}")

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Consecutive rows, or all, in new memory."""
        if not self.shape:
            return self._owner.file(self._runs[0][2]).get_tensor(self._name).clone()
        begin, end = (0, self.shape[0]) if isinstance(rows, EllipsisType) else rows.indices(self.shape[0])[:2]
        found = []
        for first, last, path, place in self._runs:
            low, high = max(begin, first), min(end, last)
            if low < high:
                found.append(self._owner.file(path).get_slice(self._name)[place + low - first : place + high - first])
        if not found:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return found[0].clone() if len(found) == 1 else torch.cat(found)


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of a kind in a checkpoint, by name; each worker reads the rows that it needs."""

    def __init__(self, files: list[Path]) -> None:
        """Read the headers.

        Raises:
            ValueError: a file is not readable, or the files do not have every row of every tensor once.
        """
        self._stack, self._open = ExitStack(), dict[Path, Any]()
        self._tensors: dict[str, StoredTensor] = {}
        for path in files:
            with open_tensors(path) as file:
                self._add(path, file)
        for tensor in self._tensors.values():
            tensor.check_all_rows()

    def _add(self, path: Path, file: Any) -> None:
        table = parse_json((file.metadata() or {}).get("pieces", "{}"), path)
        if not isinstance(table, dict):
            raise ValueError(f"{path.name} should say which rows it has as a JSON object, got {type(table).__name__}")
        for name in file.keys():  # noqa: SIM118
            x = file.get_tensor(name)  # a view of the file
            shape = tuple(x.shape)
            spans: tuple[tuple[int, int], ...] = ((0, shape[0] if shape else 1),)
            if name in table:
                total, spans = _check_piece(path, name, table[name], shape)
                shape = (total, *shape[1:])
            known = self._tensors.setdefault(name, StoredTensor(self, name, shape, x.dtype))
            if (known.shape, known.dtype) != (shape, x.dtype):
                raise ValueError(
                    f"{path.name} should have rows of {name} as {known.dtype} of shape {known.shape}, "
                    f"got {x.dtype} of shape {shape}"
                )
            known.add(path, spans)

    def file(self, path: Path) -> Any:
        """One of the files, which stays open until `close`."""
        if path not in self._open:
            self._open[path] = self._stack.enter_context(open_tensors(path))
        return self._open[path]

    def close(self) -> None:
        """Close the files."""
        self._open.clear()
        self._stack.close()

    def pop(self, name: str) -> StoredTensor | None:
        """Remove and return a tensor, if it is there."""
        return self._tensors.pop(name, None)

    def whole(self) -> dict[str, Tensor]:
        """All tensors, in new memory."""
        return {name: x[...] for name, x in self.items()}

    def __getitem__(self, name: str) -> StoredTensor:
        """A tensor."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tensors)


def _check_piece(path: Path, name: str, entry: Any, shape: tuple[int, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many rows a tensor has in all, and which of them a file has.

    Raises:
        ValueError: the file does not say so, or has other rows.
    """
    match entry:
        case {"rows": int(total), "spans": [*found]} if shape and all(map(_is_span, found)):
            spans = tuple((begin, end) for begin, end in found)
            if sum(end - begin for begin, end in spans) == shape[0] and all(end <= total for _, end in spans):
                return total, spans
    raise ValueError(f"{path.name} should say which rows of {name} its {shape} are, got {entry!r:.60}")


def _is_span(found: Any) -> bool:
    """Whether this is the first of some rows, and the row after the last."""
    return (
        isinstance(found, list) and len(found) == 2 and all(type(x) is int for x in found) and 0 <= found[0] < found[1]
    )
