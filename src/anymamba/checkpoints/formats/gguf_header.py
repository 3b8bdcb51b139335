"""Check the counts and lengths in the header of a GGUF file against the bytes there are.

The `gguf` package trusts the header: a file of 158 bytes whose array claims 2**60 elements would keep it busy forever.
So the header is walked here first, without building anything. Layout (all integers little-endian, or all big-endian):

    magic "GGUF", version u32, tensors u64, fields u64
    per field:   key string, type u32, value;   an array is: type u32, count u64, values;   a string: length u64, bytes
    per tensor:  name string, dimensions u32, sizes u64 each, type u32, offset u64
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_STRING = 8
_ARRAY = 9
# Bytes of a value by its type; strings and arrays have lengths of their own.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_DIMS = 8
_MAX_ARRAY = 2**20  # elements of one array: vocabularies and merges have some 100,000
_MAX_WEIGHTS_PER_BYTE = 8  # of any quantization


def check_header(path: Path) -> None:
    """Raise `ValueError` unless all counts and lengths in the header are within the file; check nothing else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        walk = _Walk(path, file, size)
        if walk.read_bytes(4, "the magic number") != _MAGIC:
            raise ValueError(f"{path}: not a readable GGUF file (expected it to begin with GGUF)")
        walk.read_version()
        tensors = walk.read_integer("Q", "the number of tensors")
        fields = walk.read_integer("Q", "the number of fields")
        walk.check_count(tensors, _MIN_TENSOR_BYTES, "tensors")
        walk.check_count(fields, _MIN_FIELD_BYTES, "fields")
        for _ in range(fields):
            walk.skip_string("a field's name")
            walk.skip_value(walk.read_integer("I", "a field's type"))
        for _ in range(tensors):
            walk.skip_tensor()


class _Walk:
    """A position in a header, which moves forward and never beyond the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._order = "<"

    def read_bytes(self, count: int, what: str) -> bytes:
        content = self._file.read(count)
        if len(content) != count:
            raise ValueError(f"{self._path}: not a readable GGUF file (it ends within {what})")
        return content

    def read_version(self) -> None:
        """Read the version, from which the byte order follows."""
        content = self.read_bytes(4, "the version")
        if int.from_bytes(content[:2], "little") == 0:
            self._order = ">"

    def read_integer(self, kind: str, what: str) -> int:
        """Read an unsigned integer of 4 ("I") or 8 ("Q") bytes."""
        return int(struct.unpack(self._order + kind, self.read_bytes(struct.calcsize(f"={kind}"), what))[0])

    def check_count(self, count: int, element_bytes: int, what: str) -> None:
        left = self._size - self._file.tell()
        if count * element_bytes > left:
            raise ValueError(
                f"{self._path}: not a readable GGUF file (it claims {count} {what}, and {left} bytes are left)"
            )

    def skip_string(self, what: str) -> None:
        length = self.read_integer("Q", what)
        self.check_count(length, 1, f"bytes of {what}")
        self._file.seek(length, os.SEEK_CUR)

    def skip_value(self, kind: int) -> None:
        if kind in _SCALAR_BYTES:
            self.read_bytes(_SCALAR_BYTES[kind], "a value")
        elif kind == _STRING:
            self.skip_string("a text")
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise ValueError(f"{self._path}: not a readable GGUF file (unknown type {kind} of a field)")

    def _skip_array(self) -> None:
        kind = self.read_integer("I", "an array")
        count = self.read_integer("Q", "an array")
        if kind not in _SCALAR_BYTES and kind != _STRING:
            raise ValueError(f"{self._path}: not a readable GGUF file (an array of elements of type {kind})")
        self.check_count(count, _SCALAR_BYTES.get(kind, 8), "elements of an array")
        if count > _MAX_ARRAY:
            raise ValueError(f"{self._path}: expected arrays of at most {_MAX_ARRAY:,} elements, got {count:,}")
        if kind == _STRING:
            for _ in range(count):
                self.skip_string("a text")
        else:
            self._file.seek(count * _SCALAR_BYTES[kind], os.SEEK_CUR)

    def skip_tensor(self) -> None:
        """Skip the description of a tensor, whose numbers must fit into the file."""
        self.skip_string("a tensor's name")
        dims = self.read_integer("I", "a tensor")
        if dims > _MAX_DIMS:
            raise ValueError(f"{self._path}: expected tensors of at most {_MAX_DIMS} dimensions, got {dims}")
        shape = [self.read_integer("Q", "a tensor") for _ in range(dims)]
        self.read_integer("I", "a tensor")
        offset = self.read_integer("Q", "a tensor")
        if offset > self._size or math.prod(shape) > _MAX_WEIGHTS_PER_BYTE * self._size:
            raise ValueError(
                f"{self._path}: not a readable GGUF file (a tensor of shape {shape} at offset {offset}, in a file of "
                f"{self._size} bytes)"
            )
