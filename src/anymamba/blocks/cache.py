"""What every cache can do: a cache is an immutable named tuple of tensors, the batch first in each."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from anymamba.ground.files import open_tensors, write_tensors

_Cache = TypeVar("_Cache", bound="CacheMethods")
Rows = Tensor | Sequence[int] | slice | int


class CacheMethods:
    """Methods for a named tuple whose fields are tensors, or strings that describe them.

    `STATES` names the fields that stay float32 or wider whatever the activations are.
    """

    __slots__ = ()
    STATES: ClassVar[frozenset[str]] = frozenset()

    @property
    def batch_size(self) -> int:
        """Rows (or packed sequences) in this cache."""
        return next(x.shape[0] for _, x in self._items() if isinstance(x, Tensor))

    def _items(self) -> list[tuple[str, Any]]:
        fields: Any = self
        return list(zip(fields._fields, fields, strict=True))

    def _map(self: _Cache, function: Callable[[str, Tensor], Tensor]) -> _Cache:
        return type(self)(*(function(name, x) if isinstance(x, Tensor) else x for name, x in self._items()))

    def tensors(self) -> list[Tensor]:
        """The fields that are tensors; they come before the others."""
        fields: Any = self
        return [x for x in fields if isinstance(x, Tensor)]

    def notes(self) -> dict[str, Any]:
        """The fields that are not tensors, by their names."""
        return {name: x for name, x in self._items() if not isinstance(x, Tensor)}

    def with_tensors(self: _Cache, tensors: list[Tensor]) -> _Cache:
        """The same cache with other tensors."""
        fields: Any = self
        return type(self)(*tensors, *fields[len(tensors) :])

    def clone(self: _Cache) -> _Cache:
        """A copy that shares no memory with this cache."""
        return self._map(lambda _, x: x.clone())

    def detach(self: _Cache) -> _Cache:
        """The same values without their autograd history."""
        return self._map(lambda _, x: x.detach())

    def to(
        self: _Cache, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> _Cache:
        """On another device, or for activations of another dtype; states keep at least float32."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def move(name: str, x: Tensor) -> Tensor:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return x.to(device=device, dtype=None if dtype is None else wide if name in self.STATES else dtype)

        return self._map(move)

    def rows(self: _Cache, index: Rows) -> _Cache:
        """Select rows of the batch; an index may repeat, to branch one sequence into several.

        Raises:
            IndexError: there is no such row.
            TypeError: `index` is not a whole number, some of them, or a slice.
        """
        chosen = row_index(index, self.batch_size)
        return self._map(lambda _, x: x[chosen])

    @classmethod
    def cat(cls: type[_Cache], caches: Iterable[_Cache]) -> _Cache:
        """The rows of several caches, one after another.

        Raises:
            ValueError: there are none, or they describe themselves differently.
        """
        parts = list(caches)
        if not parts or any(part.notes() != parts[0].notes() for part in parts):
            raise ValueError(f"{cls.__name__}.cat: expected caches of one kind, got {[part.notes() for part in parts]}")
        return parts[0].with_tensors([torch.cat(x) for x in zip(*(part.tensors() for part in parts), strict=True)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, under a temporary name that is renamed when complete."""
        tensors = {name: x for name, x in self._items() if isinstance(x, Tensor)}
        write_tensors(path, tensors, {"kind": type(self).__name__, "fields": json.dumps(self.notes())})

    @classmethod
    def load(cls: type[_Cache], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> _Cache:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not such a cache, or is damaged.
        """
        kind: Any = cls
        with open_tensors(path, device) as file:
            metadata = file.metadata() or {}
            found = metadata.get("kind", "a file of no kind")
            if found != cls.__name__:
                raise ValueError(f"{path}: expected a saved {cls.__name__}, got {found}")
            names = list(file.keys())
            values = {**json.loads(metadata["fields"]), **{name: file.get_tensor(name).clone() for name in names}}
        if set(values) != set(kind._fields):
            raise ValueError(f"{path}: expected the fields {sorted(kind._fields)}, got {sorted(values)}")
        loaded: _Cache = kind(**values)
        return loaded


def row_index(index: Rows, size: int) -> Tensor | list[int] | slice:
    """An index of rows that keeps the batch dimension, checked against the `size` of the batch."""
    if isinstance(index, slice):
        return index
    if isinstance(index, Tensor) and index.ndim == 1 and index.dtype in (torch.int32, torch.int64):
        chosen: Tensor | list[int] = index
        # Elsewhere than on the CPU the numbers would have to be waited for; torch checks them there.
        known = [] if torch.compiler.is_compiling() or index.device.type != "cpu" else index.tolist()
    else:
        if isinstance(index, Tensor) and index.ndim == 1:
            index = index.tolist()
        try:
            chosen = known = [_whole(i) for i in (index if isinstance(index, Sequence) else [index])]
        except TypeError:
            raise TypeError(
                f"rows: expected a row's number, several in a list or a tensor (n,), or a slice, got {index!r}"
            ) from None
    if wrong := [i for i in known if not -size <= i < size]:
        raise IndexError(f"rows: there are {size} rows, 0 to {size - 1}, got {wrong[0]}")
    return chosen


def _whole(value: object) -> int:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.ndim):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]
