"""Tensors of a checkpoint: written whole by one rank or in shards by several, and read by any number of ranks.

A kind of tensors (model, optimizer, carried) is one file, `model.safetensors`, or a numbered file from each rank that
has rows of them, `model-00001-of-00002.safetensors`. The header of a numbered file has, as JSON under "shards", how
many rows each of its divided tensors has in all, and which of them the file has, in their order in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.io import open_tensors, parse_json, write_tensors

_NUMBERED = re.compile(r"(\w+)-(\d{5})-of-(\d{5})\.safetensors")
_HEADER_KEY = "shards"

Spans = tuple[tuple[int, int], ...]  # ranges of rows: the first of each, and the one after its last


class TensorShard(NamedTuple):
    """Some rows of a tensor."""

    rows: Tensor  # the rows, one after another
    spans: Spans  # which rows of the whole tensor they are
    total: int  # number of rows of the whole tensor


def shard_file_name(kind: str, rank: int, size: int) -> str:
    """Return the name of one rank's file of a kind of tensors, which `size` ranks divide between them."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


def list_shard_files(kind: str, names: list[str]) -> list[str]:
    """Return the files of a kind of tensors among the names in a checkpoint, in the order of their ranks.

    Raise `ValueError` if some of them are missing.
    """
    whole = shard_file_name(kind, 0, 1)
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match is not None and match[1] == kind]
    if not numbered:
        return [whole] if whole in names else []
    size = int(numbered[0][3])
    expected = [shard_file_name(kind, rank, size) for rank in range(size)]
    if len(expected) < 2 or whole in names or sorted(match[0] for match in numbered) != expected:
        files = ", ".join(sorted([match[0] for match in numbered] + [whole] * (whole in names)))
        raise ValueError(f"{kind} must be one file, or the files of all ranks that wrote it, got {files}")
    return expected


def write_shards(path: Path, tensors: Mapping[str, Tensor | TensorShard]) -> None:
    """Write one rank's file of a kind of tensors."""
    shards = {name: x for name, x in tensors.items() if isinstance(x, TensorShard)}
    table = {name: {"rows": x.total, "spans": x.spans} for name, x in shards.items()}
    content = {name: x.rows if isinstance(x, TensorShard) else x for name, x in tensors.items()}
    # Without metadata, a file without tensors (an optimizer's before its first step) could not be read.
    metadata = {_HEADER_KEY: json.dumps(table)} if _NUMBERED.fullmatch(path.name) else {}
    write_tensors(path, content, metadata, durable=False)  # the whole checkpoint is synced together


class _Run(NamedTuple):
    """Consecutive rows of a tensor in one file."""

    begin: int
    end: int  # the row after the last
    path: Path
    offset: int  # of the first row, within the file's tensor


class StoredTensor:
    """A tensor of a checkpoint, whose rows may be in several files; they are read on demand."""

    def __init__(self, owner: StoredTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Describe a tensor of which no file is known yet."""
        self.shape = shape  # of the whole tensor
        self.dtype = dtype
        self._owner = owner
        self._name = name
        self._runs: list[_Run] = []

    def add_file(self, path: Path, spans: Spans) -> None:
        """Note which rows a file has."""
        offset = 0
        for begin, end in spans:
            self._runs.append(_Run(begin, end, path, offset))
            offset += end - begin
        self._runs.sort()

    def check_all_rows(self) -> None:
        """Raise `ValueError` unless every row is in exactly one file."""
        if not self.shape:
            if len(self._runs) > 1:
                raise ValueError(f"{self._name} must be in one file, got {len(self._runs)} with it")
            return
        ends = [0, *(run.end for run in self._runs)]
        begins = [*(run.begin for run in self._runs), self.shape[0]]
        if ends != begins:
            rows = ", ".join(f"{run.begin} to {run.end} in {run.path.name}" for run in self._runs)
            raise ValueError(f"each of the {self.shape[0]} rows of {self._name} must be in one file, got {rows}")

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read consecutive rows, or all, into new memory."""
        if not self.shape:
            return self._owner.open_file(self._runs[0].path).get_tensor(self._name).clone()
        begin, end = (0, self.shape[0]) if isinstance(rows, EllipsisType) else rows.indices(self.shape[0])[:2]
        parts = []
        for run in self._runs:
            low, high = max(begin, run.begin), min(end, run.end)
            if low < high:
                stored = self._owner.open_file(run.path).get_slice(self._name)
                parts.append(stored[run.offset + low - run.begin : run.offset + high - run.begin])
        if not parts:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts)


class StoredTensors(dict[str, StoredTensor]):
    """The tensors of a kind in a checkpoint, by name; each rank reads the rows that it needs."""

    def __init__(self, files: list[Path]) -> None:
        """Read the headers; raise `ValueError` unless the files have every row of every tensor once."""
        self._stack = ExitStack()
        self._open_files = dict[Path, Any]()
        for path in files:
            with open_tensors(path) as file:
                self._add_file(path, file)
        for tensor in self.values():
            tensor.check_all_rows()

    def _add_file(self, path: Path, file: Any) -> None:
        table = parse_json((file.metadata() or {}).get(_HEADER_KEY, "{}"), path)
        if not isinstance(table, dict):
            raise ValueError(f"{path.name} must list its rows as a JSON object, got {type(table).__name__}")
        for name in file.keys():  # noqa: SIM118
            x = file.get_tensor(name)  # a view of the file
            shape = tuple(x.shape)
            spans: Spans = ((0, shape[0] if shape else 1),)
            if name in table:
                total, spans = _parse_entry(path, name, table[name], shape)
                shape = (total, *shape[1:])
            known = self.setdefault(name, StoredTensor(self, name, shape, x.dtype))
            if (known.shape, known.dtype) != (shape, x.dtype):
                raise ValueError(
                    f"{path.name} must have rows of {name} as {known.dtype} of shape {known.shape}, "
                    f"got {x.dtype} of shape {shape}"
                )
            known.add_file(path, spans)

    def open_file(self, path: Path) -> Any:
        """Return one of the files, which stays open until `close`."""
        if path not in self._open_files:
            self._open_files[path] = self._stack.enter_context(open_tensors(path))
        return self._open_files[path]

    def close(self) -> None:
        """Close the files."""
        self._open_files.clear()
        self._stack.close()

    def whole(self) -> dict[str, Tensor]:
        """Read all tensors into new memory."""
        return {name: x[...] for name, x in self.items()}


def _parse_entry(path: Path, name: str, entry: Any, shape: tuple[int, ...]) -> tuple[int, Spans]:
    """Return the number of rows of the whole tensor, and which of them a file has, by the entry in its header."""
    match entry:
        case {"rows": int(total), "spans": [*pairs]} if shape and all(map(_is_span, pairs)):
            spans = tuple((begin, end) for begin, end in pairs)
            if sum(end - begin for begin, end in spans) == shape[0] and all(end <= total for _, end in spans):
                return total, spans
    raise ValueError(f"{path.name} must list which rows of {name} its {shape} are, got {entry!r:.60}")


def _is_span(pair: Any) -> bool:
    """Return whether a value is the first of some rows, and the row after the last."""
    return isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair) and 0 <= pair[0] < pair[1]
