"""Caches of stacks and language models: what they carry from one token to the next, as immutable values.

The file of a cache holds a fingerprint of the model's weights and of what it computes with them, so that a state is not
fed to another model. It covers what changes the result: fields of the config that differ from their defaults, and of
every parameter and buffer its name, shape, dtype and up to 256 of its values, evenly spaced. It does not cover how
parameters were initialized, nor the size of the vocabulary after padding, which differs between formats of the same
model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from anymamba.core.cache_io import read_state_file, restore_tree, write_state_file
from anymamba.core.cache_tree import Tree
from anymamba.models.config import INITIALIZATION_FIELDS

_SAMPLED_VALUES = 256
_EXCLUDED_FIELDS = INITIALIZATION_FIELDS | {
    # Fields that change no result, or that follow from the shapes of the parameters.
    *("chunk_size", "fused_add_norm", "vocab_size", "pad_vocab_size_multiple", "d_intermediate"),
    *("dropout", "grad_horizon", "checkpointing", "gate_bias", "gate_bias_step"),
    # The configs of block and stack are covered on their own; the others are unused.
    *("ssm_cfg", "stack", "attn_layer_idx", "attn_cfg", "extra"),
}

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
    """Return the cache; raise unless it is of class `kind`, with this many passes and cursors of class tokens."""
    if not isinstance(cache, kind):
        raise TypeError(f"{where}: cache must be a {kind.__name__}, got {type(cache).__name__}")
    if len(cache.layers) != passes:
        raise ValueError(f"{where}: the cache must have {passes} layers, got {len(cache.layers)}")
    if len(cache.cursors) != cursors:
        raise ValueError(f"{where}: the cache must have {cursors} cursors of class tokens, got {len(cache.cursors)}")
    return cache


class HasFingerprint(nn.Module):
    """A module whose saved caches are tied to its weights by a fingerprint."""

    config: Any

    def fingerprint(self) -> str:
        """Return a name for these weights, their dtype and what is computed with them.

        State files record it, so that a state is not used with another model.
        """
        return fingerprint(self, self.config)


def fingerprint(model: nn.Module, config: Any) -> str:
    """Return the fingerprint of a language model, a stack, or a model around a stack."""
    # 1) The fields that change the result. An official stack is described by the other configs.
    stack_configs = [config.stack_config()] if getattr(config, "stack", None) else []
    block_owner = config if hasattr(config, "block_config") else stack_configs[0]
    fields = [
        {name: value for name, value in sorted(_changed_fields(part).items()) if name not in _EXCLUDED_FIELDS}
        for part in (config, block_owner.block_config(), *stack_configs)
    ]
    if attention_layers := getattr(config, "attn_layer_idx", None):
        fields.append({"attn_layer_idx": sorted(attention_layers), **_changed_fields(config.attention_config())})
    # 2) Samples of the tensors.
    digest = hashlib.blake2b(json.dumps([block_owner.layer, *fields]).encode(), digest_size=16)
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        flat, count = x.detach().reshape(-1), min(_SAMPLED_VALUES, x.numel())
        index = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
        digest.update(flat[index].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config that differ from their defaults, numbers as float: 1 and 1.0 are the same."""
    changed = {}
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (value := getattr(config, field.name)) != default:
            changed[field.name] = _normalize(value)
    return changed


def _normalize(value: Any) -> Any:
    """Return a value as JSON can hold it, in one spelling for equal values."""
    if isinstance(value, tuple | list):
        return [_normalize(x) for x in value]
    if isinstance(value, dict):
        return {key: _normalize(value[key]) for key in sorted(value)}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value) if abs(value) < 1e300 else hex(value) if isinstance(value, int) else value
