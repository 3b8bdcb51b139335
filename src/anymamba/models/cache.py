"""What a language model carries from one token to the next, as a value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from anymamba.blocks.cache import CacheMethods, Rows, row_index
from anymamba.ground.files import open_tensors, write_tensors


@runtime_checkable
class Fingerprinted(Protocol):
    """What a state file asks of a model: a name for its weights, and the shape of its cache."""

    def fingerprint(self) -> str:
        """Names these weights in this dtype."""

    def init_cache(self, batch_size: int) -> LMCache:
        """The cache of a fresh start."""


class LMCache(NamedTuple):
    """The caches of all blocks; immutable, the batch first in every tensor.

    Attributes:
        layers: one block cache a layer.
    """

    layers: tuple[CacheMethods, ...]

    @property
    def batch_size(self) -> int:
        """Rows (or packed sequences) in this cache."""
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(x.nbytes for x in self.tensors().values())

    def clone(self) -> LMCache:
        """A copy that shares no memory with this cache."""
        return LMCache(tuple(layer.clone() for layer in self.layers))

    def detach(self) -> LMCache:
        """The same values without their autograd history."""
        return LMCache(tuple(layer.detach() for layer in self.layers))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> LMCache:
        """On another device, or for activations of another dtype; states keep at least float32."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        return LMCache(tuple(layer.to(device, dtype) for layer in self.layers))

    def rows(self, index: Rows) -> LMCache:
        """Select rows of the batch; an index may repeat, to branch one sequence into several.

        Raises:
            IndexError: there is no such row.
            TypeError: `index` is not a whole number, some of them, or a slice.
        """
        chosen = row_index(index, self.batch_size)
        return LMCache(tuple(layer.rows(chosen) for layer in self.layers))

    @staticmethod
    def cat(caches: Iterable[LMCache]) -> LMCache:
        """The rows of several caches, one after another."""
        by_layer = zip(*(cache.layers for cache in caches), strict=True)
        return LMCache(tuple(type(layers[0]).cat(layers) for layers in by_layer))

    def with_tensors(self, tensors: list[Tensor]) -> LMCache:
        """The same cache with other tensors, layer after layer."""
        layers, start = [], 0
        for layer in self.layers:
            stop = start + len(layer.tensors())
            layers.append(layer.with_tensors(tensors[start:stop]))
            start = stop
        return LMCache(tuple(layers))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in a file: "layers.0.ssm"."""
        return {name: x for name, x in self._items() if isinstance(x, Tensor)}

    def notes(self) -> dict[str, Any]:
        """Every field that is not a tensor, by its name in a file."""
        return {name: x for name, x in self._items() if not isinstance(x, Tensor)}

    def _items(self) -> list[tuple[str, Any]]:
        layers: Any = self.layers
        return [
            (f"layers.{i}.{name}", x)
            for i, layer in enumerate(layers)
            for name, x in zip(layer._fields, layer, strict=True)
        ]

    def save(self, path: str | os.PathLike[str], model: Fingerprinted) -> None:
        """Write to a safetensors file together with the fingerprint of `model`."""
        save_state(path, "LMCache", model, self.tensors(), self.notes())

    @staticmethod
    def load(path: str | os.PathLike[str], model: Fingerprinted) -> LMCache:
        """Read what `save` wrote, to go on with the same `model`, on its device.

        Raises:
            ValueError: the file is not a saved cache, is damaged, or is of another model.
        """
        tensors, notes = load_state(path, "LMCache", model)
        return cache_from(path, model, tensors, notes)


def save_state(
    path: str | os.PathLike[str], kind: str, model: Fingerprinted, tensors: dict[str, Tensor], notes: dict[str, Any]
) -> None:
    """Write a state file of `kind` that only `model` opens."""
    metadata = {"kind": kind, "fingerprint": model.fingerprint(), "fields": json.dumps(notes)}
    write_tensors(path, tensors, metadata)


def load_state(
    path: str | os.PathLike[str], kind: str, model: Fingerprinted
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_state` wrote: tensors and notes.

    Raises:
        ValueError: the file is not of this `kind`, is damaged, or is of another model.
    """
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("kind") != kind:
            raise ValueError(f"{path}: expected a saved {kind}, got {metadata.get('kind', 'no kind')!r}")
        if metadata.get("fingerprint") != (expected := model.fingerprint()):
            raise ValueError(
                f"{path}: this state belongs to another model or dtype: "
                f"expected fingerprint {expected}, got {metadata.get('fingerprint')}"
            )
        # Copied, so that the file may be replaced while the state lives.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return tensors, json.loads(metadata.get("fields", "{}"))


def cache_from(
    path: str | os.PathLike[str], model: Fingerprinted, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]
) -> LMCache:
    """Build the cache of `model` from the tensors and notes of a file, checking each against a fresh cache."""
    fresh = model.init_cache(1)
    values: dict[str, Any] = {}
    for name, like in fresh.tensors().items():
        if name not in tensors:
            raise ValueError(f"{path}: the state lacks {name}")
        x = tensors[name]
        if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
            raise ValueError(
                f"{path}: {name} must be {like.dtype} of shape (b, {', '.join(map(str, like.shape[1:]))}), "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        values[name] = x.to(like.device)
    values.update({name: notes.get(name, default) for name, default in fresh.notes().items()})
    layers: Any = fresh.layers
    return LMCache(
        tuple(
            type(layer)(**{name: values[f"layers.{i}.{name}"] for name in layer._fields})
            for i, layer in enumerate(layers)
        )
    )
