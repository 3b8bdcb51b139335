"""State files: trees of tensors on disk, which are complete and of the right kind, or refused in one line.

A state file is a safetensors file. Its metadata names the kind of tree, the version of this format, and a checksum of
every byte of the file, taken with zeros in the checksum's own place. Files of version 1 have neither of the last two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from anymamba.core.cache_tree import Tree
from anymamba.core.io import atomic_write, parse_json, save_tensors

_VERSION = 2
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_NO_CHECKSUM = "0" * 32
_Tree = TypeVar("_Tree", bound=Tree)
_Saved = TypeVar("_Saved", bound="SavableTree")


class StateFile(NamedTuple):
    """What a state file holds.

    Attributes:
        tensors: by name.
        facts: what else its writer recorded, by name.
        version: of the format.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, str]
    version: int


def write_state_file(path: str | os.PathLike[str], tree: Tree, facts: dict[str, str]) -> None:
    """Write a state file, under a temporary name that is renamed when complete.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        ValueError: the tree has values that a state cannot have.
    """
    if problem := tree.problem():
        raise ValueError(f"{path}: not written, because {problem}")
    metadata = {"kind": type(tree).__name__, **facts, "version": str(_VERSION), "checksum": _NO_CHECKSUM}
    with atomic_write(path) as temporary:
        save_tensors(temporary, tree.tensors(), metadata)
        _sign(temporary)


def _sign(path: Path) -> None:
    """Order the header, which the library does not, so that the same state gives the same bytes; write the checksum."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        ordered = json.dumps(json.loads(header), sort_keys=True, separators=(",", ":")).encode().ljust(len(header))
        assert len(ordered) == len(header)
        file.seek(8)
        file.write(ordered)
        file.seek(0)
        digest = hashlib.blake2b(digest_size=16)
        while block := file.read(2**20):
            digest.update(block)
        file.seek(_place(ordered, _NO_CHECKSUM))
        file.write(digest.hexdigest().encode())


def read_state_file(path: str | os.PathLike[str], kind: str, facts: Sequence[str] = ()) -> StateFile:
    """Read what `write_state_file` wrote.

    Args:
        path: the file.
        kind: of the tree.
        facts: names of the facts that it must have.

    Raises:
        ValueError: the file is missing or damaged, or not of this kind.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    content = Path(path).read_bytes()
    try:
        entries = dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    metadata: dict[str, str] = parse_json(header, path).get("__metadata__") or {}
    version = _check_whole(path, content, header, metadata)
    if metadata.get("kind") != kind:
        found = repr(metadata["kind"]) if "kind" in metadata else "a file of no kind"
        raise ValueError(f"{path}: expected a saved {kind}, got {found}")
    own = {"fields"} if version == 1 else {"version", "checksum"}
    if set(metadata) != {"kind", *facts, *own}:
        raise ValueError(f"{path}: expected metadata {sorted({'kind', *facts, *own})}, got {sorted(metadata)}")
    tensors = {name: _tensor(f"{path}: {name}", **entry) for name, entry in entries.items()}
    return StateFile(tensors, {name: metadata[name] for name in facts}, version)


def restore_tree(path: str | os.PathLike[str], like: _Tree, tensors: dict[str, Tensor]) -> _Tree:
    """The tensors of a file as a tree: each as in `like`, with its name, dtype, device and sizes except the rows.

    Raises:
        ValueError: they differ.
    """
    expected = like.tensors()
    check_tensor_names(path, tensors, expected)
    rows = next(iter(tensors[name].shape[:1] for name in expected))
    for name, x in expected.items():
        if not rows or tensors[name].shape != (*rows, *x.shape[1:]) or tensors[name].dtype != x.dtype:
            shape = ", ".join(map(str, (*(rows or ["rows"]), *x.shape[1:])))
            raise ValueError(
                f"{path}: {name} must be {x.dtype} of shape ({shape}), "
                f"got {tensors[name].dtype} of shape {tuple(tensors[name].shape)}"
            )
    tree = like.with_tensors(tensors[name].to(x.device) for name, x in expected.items())
    if problem := tree.problem():
        raise ValueError(f"{path}: {problem}")
    return tree


def check_tensor_names(path: str | os.PathLike[str], found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse tensors that are missing from a file, and those that should not be there.

    Raises:
        ValueError: there are some.
    """
    found, expected = dict.fromkeys(found), dict.fromkeys(expected)
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{path}: the state lacks {', '.join(missing[:5])}")
    if unknown := [name for name in found if name not in expected]:
        raise ValueError(f"{path}: the state holds more than it should: {', '.join(map(repr, unknown[:5]))}")


class SavableTree(Tree):
    """A tree of one level that is saved without its model, as a block's cache is."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a state file, under a temporary name that is renamed when complete.

        Raises:
            OSError: it cannot be written; what was there before is as it was.
            ValueError: it holds values that are not finite.
        """
        write_state_file(path, self, {})

    @classmethod
    def load(cls: type[_Saved], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> _Saved:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not such a tree, or is damaged.
        """
        kind: Any = cls
        tensors = read_state_file(path, cls.__name__).tensors
        check_tensor_names(path, tensors, kind._fields)
        found: _Saved = kind(**tensors)
        # Its sizes are not known, but its rows and dtypes must agree with each other.
        first = next((name for name in kind._fields if name not in cls.FP32_FIELDS), kind._fields[0])
        dtype = tensors[first].dtype
        like = found.to(dtype=dtype if dtype.is_floating_point else torch.float32)
        return restore_tree(path, like, tensors).to(device)


def _check_whole(path: str | os.PathLike[str], content: bytes, header: bytes, metadata: dict[str, str]) -> int:
    """Refuse a file that is not as it was written; returns the version of its format."""
    if set(metadata) <= {"kind", "fingerprint", "fields"}:
        _check_former_notes(path, metadata.get("fields", "{}"))
        return 1
    if metadata.get("version") != str(_VERSION):
        raise ValueError(
            f"{path}: expected a state file of version {_VERSION} or before, got {metadata.get('version', 'none')!r}: "
            "it is damaged, or was written by a later anymamba"
        )
    stated = metadata.get("checksum", "")
    place = _place(header, stated)
    digest = hashlib.blake2b(content[:place], digest_size=16)
    digest.update(_NO_CHECKSUM.encode() if len(stated) == len(_NO_CHECKSUM) else b"")
    digest.update(memoryview(content)[place + len(stated) :])
    if place < 0 or digest.hexdigest() != stated:
        raise ValueError(f"{path}: damaged: it does not have the checksum that it states")
    return _VERSION


def _place(header: bytes, checksum: str) -> int:
    """Where in the file the checksum is written; -1 if not in one place."""
    text = f'"checksum":"{checksum}"'.encode()
    if header.count(text) != 1:
        return -1
    return 8 + header.index(text) + len('"checksum":"')


def _check_former_notes(path: str | os.PathLike[str], fields: str) -> None:
    """Version 1 recorded the pathway of each Mamba-3 cache, which any call may choose now."""
    notes = parse_json(fields, f"{path}: fields")
    fine = isinstance(notes, dict) and all(
        name.rpartition(".")[2] == "pathway" and value in ("single", "double") for name, value in notes.items()
    )
    if not fine:
        raise ValueError(f"{path}: expected fields that name pathways, got {fields[:80]}")


def _tensor(where: str, dtype: str, shape: list[int], data: bytearray) -> Tensor:
    if dtype not in _DTYPES:
        raise ValueError(f"{where} must be one of {', '.join(_DTYPES)}, got {dtype}")
    if dtype == "BOOL" and max(data, default=0) > 1:
        raise ValueError(f"{where} must hold True and False, bytes 0 and 1, got {max(data)}")
    if not data:  # then nothing has checked the other sizes
        if max(shape, default=0) >= 2**31:
            raise ValueError(f"{where} must have a shape that can be, got {shape}")
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
