"""What every cache can do: a cache is an immutable named tuple of tensors, the batch first in each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from anymamba.files import open_tensors, write_tensors

_Cache = TypeVar("_Cache", bound="CacheMethods")


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

    def to(self: _Cache, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> _Cache:
        """On another device, or for activations of another dtype; states keep at least float32."""

        def move(name: str, x: Tensor) -> Tensor:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return x.to(device=device, dtype=None if dtype is None else wide if name in self.STATES else dtype)

        return self._map(move)

    def rows(self: _Cache, index: Tensor | list[int] | slice | int) -> _Cache:
        """Select rows of the batch; an index may repeat, to branch one sequence into several."""
        if isinstance(index, int):
            index = [index]
        return self._map(lambda _, x: x[index])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, under a temporary name that is renamed when complete."""
        tensors = {name: x for name, x in self._items() if isinstance(x, Tensor)}
        notes = {name: x for name, x in self._items() if not isinstance(x, Tensor)}
        write_tensors(path, tensors, {"kind": type(self).__name__, "fields": json.dumps(notes)})

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
