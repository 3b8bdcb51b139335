"""Weights on disk: what each file holds, and every tensor straight from the file in the requested dtype.

Tensors are copied into memory, so a file may change or disappear. A view of a mapped file takes no memory, but changes
with the file; if the file was cut short, reading the view ends the process. Pickles are opened with the restricted
reader of torch, which builds tensors and runs no code.
"""

from __future__ import annotations

import json
import mmap
import pickle
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.checkpoints.formats import gguf
from anymamba.core.io import open_tensors, read_json

_BLOCK = 2**18  # values that are looked at together: they stay in a core's second-level cache
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {"I8": torch.int8, "U8": torch.uint8}  # of narrow formats
_READABLE = {**DTYPES, **_CODES}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFile:
    """One file; a context in which tensors can be read."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        self.path = path
        self._stack = ExitStack()
        self._kept: Tensor | None = None

    def __enter__(self) -> SafetensorsFile:
        """Map the file, which checks its header, and open it to read."""
        self._file = self._stack.enter_context(open_tensors(self.path))
        self._bytes = self._stack.enter_context(self.path.open("rb"))
        size = int.from_bytes(self._bytes.read(8), "little")
        self._header, self._start = json.loads(self._bytes.read(size)), 8 + size
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file. Tensors that are views of it keep it mapped."""
        del self._file
        self._kept = None
        self._stack.close()

    def entries(self) -> dict[str, StoredTensor]:
        """Shape and dtype by name, from the header alone.

        Raises:
            ValueError: a tensor is of a dtype that weights cannot have.
        """
        found = {}
        for name in self._file.keys():  # noqa: SIM118
            part = self._file.get_slice(name)
            if part.get_dtype() not in _READABLE:
                raise ValueError(f"{self.path}: {name} must be one of {list(_READABLE)}, got {part.get_dtype()}")
            found[name] = StoredTensor(tuple(part.get_shape()), _READABLE[part.get_dtype()])
        return found

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None, *, mapped: bool) -> Tensor:
        """One tensor: a copy, or if `mapped` a view of the file where it is already as asked for."""
        if mapped:
            view: Tensor = self._file.get_tensor(name).to(device, dtype)
            return view
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        stored, on_cpu = _READABLE[entry["dtype"]], device is None or device.type == "cpu"
        raw = torch.empty(end - begin, dtype=torch.uint8) if on_cpu and stored == dtype else self._scratch(end - begin)
        self._fill(raw, name, begin)
        return raw.view(stored).view(entry["shape"]).to(device, dtype)

    def parts(self, name: str, dtype: torch.dtype, device: torch.device | None, rows: int) -> Iterator[Tensor]:
        """The rows of one tensor, so many at a time; each part may lie in the memory of the one before it."""
        entry = self._header[name]
        (begin, end), shape, stored = entry["data_offsets"], entry["shape"], _READABLE[entry["dtype"]]
        row_bytes = (end - begin) // max(1, shape[0])
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            raw = self._scratch(count * row_bytes)
            self._fill(raw, name, begin + start * row_bytes)
            yield raw.view(stored).view(count, *shape[1:]).to(device, dtype)

    def _fill(self, raw: Tensor, name: str, begin: int) -> None:
        """Read bytes from `begin` on, counted from the end of the header."""
        self._bytes.seek(self._start + begin)
        found = self._bytes.readinto(raw.numpy().data)
        if found != len(raw):
            raise ValueError(f"{self.path}: {name} should have {len(raw)} bytes, got {found}: the file was cut short")

    def _scratch(self, size: int) -> Tensor:
        """One buffer for all conversions and moves, outside malloc, whose gaps would stay allocated."""
        if self._kept is None:
            offsets = [entry["data_offsets"] for name, entry in self._header.items() if name != "__metadata__"]
            pages = mmap.mmap(-1, max(1, *(end - begin for begin, end in offsets)))
            self._kept = torch.frombuffer(pages, dtype=torch.uint8)
        return self._kept[:size]


class _Copied:
    """Counts copied bytes: pages of a file that were read stay in memory until the file is closed."""

    def __init__(self, path: Path) -> None:
        self._limit = max(2**22, path.stat().st_size // 40) if path.is_file() else 0
        self._bytes = 0

    def too_many(self, more: int) -> bool:
        """Add to the count; returns whether it is time to close the file and to count again."""
        self._bytes = 0 if (over := self._bytes + more > self._limit) else self._bytes + more
        return over


class PickleFile:
    """One file of `torch.save`, read without running code."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        self.path = path
        self._copied = _Copied(path)

    def __enter__(self) -> PickleFile:
        """Read the table of tensors; their values stay in the file if its form allows it."""
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about forms of pickle, which are then refused or read
                self._tensors = self._load()
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{self.path}: refused, because it holds more than tensors and loading it could run code; "
                "convert it to safetensors where it was made"
            ) from error
        except Exception as error:  # a damaged pickle can fail in any way
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: not a readable torch file ({reason})") from error
        if not isinstance(self._tensors, dict) or not all(map(_is_named_tensor, self._tensors.items())):
            raise ValueError(f"{self.path}: expected a table of tensors by name")
        for name, x in self._tensors.items():
            if found := _odd_kind(x):
                raise ValueError(f"{self.path}: {name} must be a plain tensor, got {found}")
        return self

    def _load(self) -> Any:
        try:
            self._is_mapped = True
            return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the form before zip files cannot be mapped
            self._is_mapped = False
            return torch.load(self.path, map_location="cpu", weights_only=True)

    def __exit__(self, *error: object) -> None:
        """Drop the tensors."""
        self._tensors = {}

    def entries(self) -> dict[str, StoredTensor]:
        """Shape and dtype by name."""
        return {name: StoredTensor(tuple(x.shape), x.dtype) for name, x in self._tensors.items()}

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None, *, mapped: bool) -> Tensor:
        """One tensor: a copy, or if `mapped` a view of the file where it is already as asked for."""
        view: Tensor = self._tensors[name].detach()
        tensor = view.to(device, dtype, copy=not mapped).contiguous()
        if not self._is_mapped:
            del self._tensors[name]
        elif not mapped and self._copied.too_many(view.nbytes):
            del view
            self._map_again()
        return tensor

    def parts(self, name: str, dtype: torch.dtype, device: torch.device | None, rows: int) -> Iterator[Tensor]:
        """The rows of one tensor, so many at a time."""
        for start in range(0, self._tensors[name].shape[0], rows):
            view = self._tensors[name].detach()[start : start + rows]
            yield view.to(device, dtype).contiguous()
            if self._is_mapped and self._copied.too_many(view.nbytes):
                del view
                self._map_again()
        if not self._is_mapped:
            del self._tensors[name]

    def _map_again(self) -> None:
        """Let go of the pages that were read."""
        self.__exit__()
        self.__enter__()


def _is_named_tensor(entry: tuple[Any, Any]) -> bool:
    return isinstance(entry[0], str) and isinstance(entry[1], Tensor)


def _odd_kind(x: Tensor) -> str:
    """Why a tensor cannot be read as plain rows of numbers; empty if it can."""
    kinds = {
        "one on the meta device, without values": x.is_meta,
        "a quantized one": x.is_quantized,
        "a nested one": x.is_nested,
        f"a sparse one ({x.layout})": x.layout != torch.strided,
    }
    if found := next((name for name, is_so in kinds.items() if is_so), ""):
        return found
    return "one that repeats its values" if x.untyped_storage().nbytes() < x.numel() * x.element_size() else ""


class GgufWeights(gguf.GgufFile):
    """A GGUF file as weights."""

    def __enter__(self) -> GgufWeights:
        """Map the file and read its header."""
        super().__enter__()
        return self

    def entries(self) -> dict[str, StoredTensor]:
        """Shape and dtype by name."""
        return {name: StoredTensor(*described) for name, described in self.shapes().items()}


def open_weight_file(path: Path) -> SafetensorsFile | PickleFile | GgufWeights:
    """The reader for a file, by its suffix."""
    if path.suffix == gguf.SUFFIX:
        return GgufWeights(path)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path)


def find_weights(directory: Path, names: tuple[str, ...]) -> list[Path]:
    """The weight files of a directory: one of `names`, or the shards that `<name>.index.json` lists; may be empty.

    Raises:
        ValueError: an index is damaged, or a shard is missing.
    """
    for name in names:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    return []


def _shards(index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ValueError(f'{index}: expected a table "weight_map" of file names, got {reprlib.repr(table)}')
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: a shard must be a file beside the index, got {name!r}")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: the shard {name} is missing")
    return [index.parent / name for name in names]


def count_non_finite(x: Tensor) -> int:
    """How many values are infinite or not a number, in a fraction of the time that reading them takes.

    Their bits are above those of all finite numbers: as signed integers if they are positive, as unsigned ones if they
    are negative. numpy finds the largest of each at the speed of the memory; `torch.isfinite` takes ten times as long.
    """
    if not x.is_floating_point():
        return 0
    if x.device.type != "cpu":
        return int((~torch.isfinite(x)).sum())
    flat, infinity = x.detach().reshape(-1), torch.tensor(float("inf"), dtype=x.dtype)
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits, first = flat.view(signed).numpy(), int(infinity.view(signed))
    unsigned, sign = f"u{x.element_size()}", 1 << (8 * x.element_size() - 1)
    found = 0
    for begin in range(0, len(bits), _BLOCK):
        part = bits[begin : begin + _BLOCK]
        if part.max() >= first or part.view(unsigned).max() >= first | sign:
            found += int((~torch.isfinite(flat[begin : begin + _BLOCK])).sum())
    return found


def describe_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Which tensors hold values that are infinite or not a number; empty if none does."""
    found = [(name, count, x.numel()) for name, x in tensors if (count := count_non_finite(x))]
    if not found:
        return ""
    name, count, size = found[0]
    several = "1 tensor holds" if len(found) == 1 else f"{len(found)} tensors hold"
    return f"{several} values that are not finite, first {name} ({count:,} of {size:,})"


def read_entries(files: list[Path]) -> Iterator[tuple[Path, str, StoredTensor]]:
    """Every tensor of the files, from their headers."""
    for path in files:
        with open_weight_file(path) as file:
            for name, stored in file.entries().items():
                yield path, name, stored


def describe_mismatch(problems: dict[str, list[Any]]) -> str:
    """The kinds of problem that occurred, with up to five names each."""
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{kind}: {', '.join(map(str, names[:5]))}{more}")
    return "; ".join(parts)
