"""Weight files: the tensors that each holds, and every tensor straight from the file in the requested dtype.

Tensors are copied into memory, so a file may change or disappear afterwards. A view of a mapped file takes no memory,
but changes with the file. Pickles are opened with the restricted reader of torch, which builds tensors and runs no
code.
"""

from __future__ import annotations

import mmap
import pickle
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.checkpoints.formats import gguf
from anymamba.checkpoints.formats.base import StoredTensor
from anymamba.core.io import TensorFileReader, check_size, open_tensors, read_json

_BLOCK = 2**18  # values that are examined together: they fit in a core's second-level cache
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODE_DTYPES = {"I8": torch.int8, "U8": torch.uint8}  # of quantized weights
_DTYPES = {**FLOAT_DTYPES, **_CODE_DTYPES}


class SafetensorsFile:
    """A safetensors file; a context in which tensors can be read."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        self.path = path
        self._stack = ExitStack()
        self._scratch_bytes: Tensor | None = None

    def __enter__(self) -> SafetensorsFile:
        """Map the file, which checks its header, and open it to read."""
        self._mapped = self._stack.enter_context(open_tensors(self.path))
        self._reader = self._stack.enter_context(closing(TensorFileReader(self.path)))
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file. Tensors that are views of it keep it mapped."""
        del self._mapped
        self._scratch_bytes = None
        self._stack.close()

    def entries(self) -> dict[str, StoredTensor]:
        """Return shape and dtype of each tensor by name; raise `ValueError` for a dtype that weights cannot have."""
        entries = {}
        for name, entry in self._reader.entries.items():
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{self.path}: {name} must be one of {list(_DTYPES)}, got {entry['dtype']}")
            entries[name] = StoredTensor(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        return entries

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None, *, mapped: bool) -> Tensor:
        """Return a tensor: a copy, or if `mapped` a view of the file where it has that dtype and device already."""
        if mapped:
            self._reader.check_complete()
            view: Tensor = self._mapped.get_tensor(name).to(device, dtype)
            return view
        entry = self._reader.entries[name]
        begin, end = entry["data_offsets"]
        stored, on_cpu = _DTYPES[entry["dtype"]], device is None or device.type == "cpu"
        raw = torch.empty(end - begin, dtype=torch.uint8) if on_cpu and stored == dtype else self._scratch(end - begin)
        self._reader.read_into(raw, name)
        return raw.view(stored).view(entry["shape"]).to(device, dtype)

    def read_rows(self, name: str, dtype: torch.dtype, device: torch.device | None, rows: int) -> Iterator[Tensor]:
        """Yield a tensor some rows at a time; each chunk may reuse the memory of the one before."""
        entry = self._reader.entries[name]
        (begin, end), shape, stored = entry["data_offsets"], entry["shape"], _DTYPES[entry["dtype"]]
        row_bytes = (end - begin) // max(1, shape[0])
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            raw = self._scratch(count * row_bytes)
            self._reader.read_into(raw, name, start * row_bytes)
            yield raw.view(stored).view(count, *shape[1:]).to(device, dtype)

    def _scratch(self, size: int) -> Tensor:
        """Return one buffer for all conversions and moves, outside malloc, whose gaps would stay allocated."""
        if self._scratch_bytes is None:
            offsets = [entry["data_offsets"] for entry in self._reader.entries.values()]
            pages = mmap.mmap(-1, max(1, *(end - begin for begin, end in offsets)))
            self._scratch_bytes = torch.frombuffer(pages, dtype=torch.uint8)
        return self._scratch_bytes[:size]


class PickleFile:
    """A file of `torch.save`, read without running code."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        self.path = path
        self._bytes_read = 0

    def __enter__(self) -> PickleFile:
        """Read the table of tensors; their values stay in the file if its form allows that."""
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file")
        self._size = self.path.stat().st_size
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about forms of pickle, which are rejected or read anyway
                self._tensors = self._load()
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{self.path}: rejected, because it holds more than tensors and loading it could run code; "
                "convert it to safetensors where it was made"
            ) from error
        except Exception as error:  # a damaged pickle can fail in any way
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: not a readable torch file ({reason})") from error
        if not isinstance(self._tensors, dict) or not all(
            isinstance(name, str) and isinstance(x, Tensor) for name, x in self._tensors.items()
        ):
            raise ValueError(f"{self.path}: expected a table of tensors by name")
        for name, x in self._tensors.items():
            if kind := _describe_unreadable(x):
                raise ValueError(f"{self.path}: {name} must be a plain tensor, got {kind}")
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
        """Return shape and dtype of each tensor by name."""
        return {name: StoredTensor(tuple(x.shape), x.dtype) for name, x in self._tensors.items()}

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None, *, mapped: bool) -> Tensor:
        """Return a tensor: a copy, or if `mapped` a view of the file where it has that dtype and device already."""
        self._check_complete()
        tensor: Tensor = self._tensors[name].detach().to(device, dtype, copy=not mapped).contiguous()
        if not self._is_mapped:
            del self._tensors[name]
        elif not mapped:
            self._release_pages(self._tensors[name].nbytes)
        return tensor

    def read_rows(self, name: str, dtype: torch.dtype, device: torch.device | None, rows: int) -> Iterator[Tensor]:
        """Yield a tensor some rows at a time."""
        for start in range(0, self._tensors[name].shape[0], rows):
            self._check_complete()
            view = self._tensors[name].detach()[start : start + rows]
            yield view.to(device, dtype).contiguous()
            if self._is_mapped:
                size = view.nbytes
                del view
                self._release_pages(size)
        if not self._is_mapped:
            del self._tensors[name]

    def _check_complete(self) -> None:
        """Raise `ValueError` if a mapped file was cut short since it was opened."""
        if self._is_mapped:
            check_size(self.path, self.path.stat().st_size, self._size)

    def _release_pages(self, size: int) -> None:
        """Count the bytes read, and map the file again after a fortieth of it, which releases the pages read so far."""
        self._bytes_read += size
        if self._bytes_read > max(2**22, self._size // 40):
            self._bytes_read = 0
            self.__exit__()
            self.__enter__()


def _describe_unreadable(x: Tensor) -> str:
    """Return why a tensor cannot be read as plain rows of numbers; empty if it can."""
    if x.is_meta:
        return "one on the meta device, without values"
    if x.is_quantized:
        return "a quantized one"
    if x.is_nested:
        return "a nested one"
    if x.layout != torch.strided:
        return f"a sparse one ({x.layout})"
    return "one that repeats its values" if x.untyped_storage().nbytes() < x.numel() * x.element_size() else ""


def open_weight_file(path: Path) -> SafetensorsFile | PickleFile | gguf.GgufFile:
    """Return the reader for a file, by its suffix."""
    if path.suffix == gguf.SUFFIX:
        return gguf.GgufFile(path)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickleFile(path)


def find_weights(directory: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the weight files of a directory: one of `names`, or the shards that `<name>.index.json` lists, or none."""
    for name in names:
        if (directory / name).is_file():
            return [directory / name]
        if (index := directory / f"{name}.index.json").is_file():
            return _list_shards(index)
    return []


def _list_shards(index: Path) -> list[Path]:
    """Return the shards of an index; raise `ValueError` if it is damaged, or a shard is missing."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ValueError(f'{index}: expected a table "weight_map" of file names, got {reprlib.repr(table)}')
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: a shard must be a file next to the index, got {name!r}")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index}: the shard {name} is missing")
    return [index.parent / name for name in names]


def count_non_finite(x: Tensor) -> int:
    """Count the values that are infinite or not a number, in a fraction of the time that reading them takes.

    Their bits are above those of all finite numbers: as signed integers if they are positive, as unsigned ones if they
    are negative. numpy finds the largest of each at memory speed; `torch.isfinite` takes ten times as long.
    """
    if not x.is_floating_point():
        return 0
    if x.device.type != "cpu":
        return int((~torch.isfinite(x)).sum())
    flat = x.detach().reshape(-1)
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    unsigned = f"u{x.element_size()}"
    bits = flat.view(signed).numpy()
    infinity_bits = int(torch.tensor(float("inf"), dtype=x.dtype).view(signed))
    sign_bit = 1 << (8 * x.element_size() - 1)
    count = 0
    for begin in range(0, len(bits), _BLOCK):
        block = bits[begin : begin + _BLOCK]
        if block.max() >= infinity_bits or block.view(unsigned).max() >= infinity_bits | sign_bit:
            count += int((~torch.isfinite(flat[begin : begin + _BLOCK])).sum())
    return count


def describe_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return which tensors hold values that are infinite or not a number; empty if none does."""
    affected = [(name, count, x.numel()) for name, x in tensors if (count := count_non_finite(x))]
    if not affected:
        return ""
    name, count, size = affected[0]
    subject = "1 tensor holds" if len(affected) == 1 else f"{len(affected)} tensors hold"
    return f"{subject} values that are not finite, first {name} ({count:,} of {size:,})"


def list_tensors(files: list[Path]) -> Iterator[tuple[Path, str, StoredTensor]]:
    """Yield every tensor of the files, from their headers: file, name, shape and dtype."""
    for path in files:
        with open_weight_file(path) as file:
            for name, stored in file.entries().items():
                yield path, name, stored


def describe_mismatch(problems: dict[str, list[Any]]) -> str:
    """Return the kinds of problem that occurred, with up to five names each."""
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{kind}: {', '.join(map(str, names[:5]))}{more}")
    return "; ".join(parts)
