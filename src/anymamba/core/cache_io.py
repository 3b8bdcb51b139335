"""State files: trees of tensors on disk, which are either complete and of the right kind, or rejected in one line.

A state file is a safetensors file. Its metadata names the kind of tree, the version of this format, and a checksum of
every byte of the file, computed with zeros in the place of the checksum itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from anymamba.core.cache_tree import Tree
from anymamba.core.io import DTYPE_NAMES, atomic_write, check_tensor_names, digest_rest, parse_json, save_tensors

_VERSION = "1"
_STATE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in _STATE_DTYPES}
_NO_CHECKSUM = "0" * 32
_MAX_DIM = 2**31
_Tree = TypeVar("_Tree", bound=Tree)
_Savable = TypeVar("_Savable", bound="SavableTree")


class StateFile(NamedTuple):
    """Content of a state file: tensors by name, and the further entries that its writer recorded."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write_state_file(
    path: str | os.PathLike[str],
    tree: Tree,
    metadata: dict[str, str],
    *,
    durable: bool = True,
    private: bool = False,
) -> None:
    """Write a tree and further entries to a state file, by `atomic_write`, which says what the options do.

    Growing tensors are cut to the longest row. Raises `ValueError` for values that a state cannot have.
    """
    if problem := tree.describe_problem():
        raise ValueError(f"{path}: not written, because {problem}")
    entries = {"kind": type(tree).__name__, **metadata, "version": _VERSION, "checksum": _NO_CHECKSUM}
    with atomic_write(path, durable=durable, private=private) as temporary:
        save_tensors(temporary, tree.trim().tensors(), entries)
        _sign(temporary)


def read_state_file(path: str | os.PathLike[str], kind: str, metadata: Sequence[str] = ()) -> StateFile:
    """Read a file that `write_state_file` wrote.

    Raises `ValueError` if it is missing or damaged, or holds another kind of tree or other `metadata` than these names.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    content = Path(path).read_bytes()
    try:
        entries = dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    stored: dict[str, str] = parse_json(header, path).get("__metadata__") or {}
    if stored.get("kind") != kind:
        got = repr(stored["kind"]) if "kind" in stored else "a file that names no kind"
        raise ValueError(f"{path}: expected a saved {kind}, got {got}")
    if stored.get("version") != _VERSION:
        raise ValueError(
            f"{path}: expected a state file of version {_VERSION}, got {stored.get('version', 'none')!r}: it is "
            "damaged, or was written by another version of anymamba"
        )
    _check_checksum(path, content, header, stored.get("checksum", ""))
    if set(stored) != (expected := {"kind", "version", "checksum", *metadata}):
        raise ValueError(f"{path}: expected metadata {sorted(expected)}, got {sorted(stored)}")
    tensors = {name: _to_tensor(f"{path}: {name}", **entry) for name, entry in entries.items()}
    return StateFile(tensors, {name: stored[name] for name in metadata})


def restore_tree(path: str | os.PathLike[str], like: _Tree, tensors: dict[str, Tensor]) -> _Tree:
    """Return the tensors of a file as a tree, or raise `ValueError` if they differ from the expected ones.

    `like` has the names, dtypes, devices and sizes that are expected, for any number of rows, and any length of growing
    tensors.
    """
    expected = like.tensors()
    growing = like.growing_names()
    check_tensor_names(f"{path}: the state", tensors, expected)
    rows = next(iter(tensors[name].shape[:1] for name in expected))
    for name, x in expected.items():
        stored = tensors[name]
        free = stored.shape[1:2] if name in growing else ()
        fixed = x.shape[1 + (name in growing) :]
        if not rows or stored.shape != (*rows, *free, *fixed) or stored.dtype != x.dtype:
            steps = ("steps",) if name in growing else ()
            shape = ", ".join(map(str, (*(rows or ["rows"]), *steps, *fixed)))
            raise ValueError(
                f"{path}: {name} must be {x.dtype} of shape ({shape}), "
                f"got {stored.dtype} of shape {tuple(stored.shape)}"
            )
    tree = like.with_tensors(tensors[name].to(x.device) for name, x in expected.items())
    if problem := tree.describe_problem():
        raise ValueError(f"{path}: {problem}")
    return tree


class SavableTree(Tree):
    """A tree of one level that is saved without its model, as a block's cache is."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tree to a state file, which replaces an earlier one when it is complete.

        Raises:
            OSError: The file cannot be written; an earlier one is unchanged.
            ValueError: Values that are not finite.
        """
        write_state_file(path, self, {})

    @classmethod
    def load(cls: type[_Savable], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> _Savable:
        """Read a tree that `save` wrote.

        Args:
            path: Name of the file.
            device: Device of the tensors.

        Raises:
            ValueError: The file holds another tree, or is damaged.
        """
        kind: Any = cls
        tensors = read_state_file(path, cls.__name__).tensors
        check_tensor_names(f"{path}: the state", tensors, kind._fields)
        tree: _Savable = kind(**tensors)
        # The sizes are not known without a model, but rows and dtypes must agree with each other.
        reference = next((name for name in kind._fields if cls._rule(name) == "activation"), kind._fields[0])
        dtype = tensors[reference].dtype
        like = tree.to(dtype=dtype if dtype.is_floating_point else torch.float32)
        return restore_tree(path, like, tensors).to(device)


def _sign(path: Path) -> None:
    """Write the checksum of a file into its header."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        file.seek(0)
        checksum = digest_rest(file)
        file.seek(_checksum_offset(header, _NO_CHECKSUM))
        file.write(checksum.encode())


def _check_checksum(path: str | os.PathLike[str], content: bytes, header: bytes, checksum: str) -> None:
    """Raise `ValueError` unless the bytes of a file have the checksum that its metadata states."""
    offset = _checksum_offset(header, checksum)
    digest = hashlib.blake2b(content[:offset], digest_size=16)
    digest.update(_NO_CHECKSUM.encode() if len(checksum) == len(_NO_CHECKSUM) else b"")
    digest.update(memoryview(content)[offset + len(checksum) :])
    if offset < 0 or digest.hexdigest() != checksum:
        raise ValueError(f"{path}: damaged: it does not have the checksum that it states")


def _checksum_offset(header: bytes, checksum: str) -> int:
    """Return the offset of the checksum in the file; -1 unless it is in exactly one place."""
    text = f'"checksum":"{checksum}"'.encode()
    if header.count(text) != 1:
        return -1
    return 8 + header.index(text) + len('"checksum":"')


def _to_tensor(where: str, dtype: str, shape: list[int], data: bytearray) -> Tensor:
    if dtype not in _DTYPES:
        raise ValueError(f"{where} must be one of {', '.join(_DTYPES)}, got {dtype}")
    if dtype == "BOOL" and max(data, default=0) > 1:
        raise ValueError(f"{where} must hold True and False, bytes 0 and 1, got {max(data)}")
    if not data:  # then nothing has checked the other sizes
        if max(shape, default=0) >= _MAX_DIM:
            raise ValueError(f"{where}: invalid shape {shape} (dimensions must be below 2**31)")
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
