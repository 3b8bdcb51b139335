"""Caches of stacks and language models: what they carry from one token to the next, as immutable values."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from anymamba.core.cache_io import read_state_file, restore_tree, write_state_file
from anymamba.core.cache_tree import Tree

_State = TypeVar("_State", bound="ModelState")


@runtime_checkable
class Fingerprinted(Protocol):
    """A model whose states can be saved: it has a fingerprint, and an empty cache that shows their shapes."""

    def fingerprint(self) -> str:
        """Return the fingerprint of these weights in this dtype."""

    def init_cache(self, batch_size: int) -> Any:
        """Return an empty cache."""


class ModelState(Tree):
    """Tree that belongs to one model: its file holds the fingerprint of the model."""

    __slots__ = ()

    @classmethod
    def like(cls: type[_State], model: Any) -> _State:
        """Return a tree of one row with the dtypes, devices and sizes of this model."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str], model: Fingerprinted) -> None:
        """Write to a state file, together with the fingerprint of `model`.

        Args:
            path: State file.
            model: Model that the state belongs to.

        Raises:
            OSError: The file cannot be written; an earlier file is unchanged.
            ValueError: The state holds values that no state can have, such as infinities.
        """
        write_state_file(path, self, {"fingerprint": model.fingerprint()})

    @classmethod
    def load(cls: type[_State], path: str | os.PathLike[str], model: Fingerprinted) -> _State:
        """Read what `save` wrote, to continue with the same `model`, on its device.

        Args:
            path: State file.
            model: Model that the state belongs to.

        Raises:
            ValueError: The file is not a saved state, is damaged, or belongs to another model.
        """
        tensors, metadata = read_state_file(path, cls.__name__, ["fingerprint"])
        if metadata["fingerprint"] != (expected := model.fingerprint()):
            raise ValueError(
                f"{path}: this state belongs to another model, dtype or format of weights: "
                f"expected fingerprint {expected}, got {metadata['fingerprint']}"
            )
        return restore_tree(path, cls.like(model), tensors)


class _StackCacheFields(NamedTuple):
    layers: tuple[Tree, ...]
    cursors: tuple[Tensor, ...] = ()


class StackCache(_StackCacheFields, ModelState):
    """Caches of all blocks; immutable, the batch first in every tensor.

    Attributes:
        layers: One block cache per pass over a layer.
        cursors: One tensor (b, 2), int64 on the CPU, per level with class tokens: how many tokens have passed it, and
            whether the class tokens before the next one have already run.
    """

    __slots__ = ()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"cursors"})

    @classmethod
    def like(cls: type[_State], model: Fingerprinted) -> _State:
        """Return the empty cache of one row."""
        return model.init_cache(1)


class LMCache(StackCache):
    """Cache of a language model."""

    __slots__ = ()


def check_stack_cache(where: str, cache: Any, kind: type[StackCache], passes: int, cursors: int) -> StackCache:
    """Return the cache if it belongs to a stack with this many passes and cursors of class tokens.

    Raises:
        TypeError: It is not of class `kind`.
        ValueError: It has another number of layers or cursors.
    """
    if not isinstance(cache, kind):
        raise TypeError(f"{where}: cache must be a {kind.__name__}, got {type(cache).__name__}")
    if len(cache.layers) != passes:
        raise ValueError(f"{where}: the cache must have {passes} layers, got {len(cache.layers)}")
    if len(cache.cursors) != cursors:
        raise ValueError(f"{where}: the cache must have {cursors} cursors of class tokens, got {len(cache.cursors)}")
    return cache
