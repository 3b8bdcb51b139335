"""A fingerprint of a model's weights and of what it computes with them, so that a state is not fed to another model.

It covers what changes the result: fields of the config that differ from their defaults, and of every parameter and
buffer its name, shape, dtype and up to 256 of its values, evenly spaced. It does not cover how parameters were
initialized, nor the size of the vocabulary after padding, which differs between formats of the same model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.models.config import INITIALIZATION_FIELDS

_SAMPLED_VALUES = 256
_EXCLUDED_FIELDS = INITIALIZATION_FIELDS | {
    # Fields that change no result, or that follow from the shapes of the parameters.
    *("chunk_size", "fused_add_norm", "vocab_size", "pad_vocab_size_multiple", "d_intermediate"),
    *("dropout", "grad_horizon", "checkpointing", "gate_bias", "gate_bias_step"),
    # The configs of block and stack are covered on their own; the others are unused.
    *("ssm_cfg", "stack", "attn_layer_idx", "attn_cfg", "extra"),
}


class HasFingerprint(nn.Module):
    """A module whose saved caches are tied to its weights by a fingerprint."""

    config: Any

    def fingerprint(self) -> str:
        """Return the fingerprint of these weights in this dtype, which state files record."""
        return fingerprint(self, self.config)


def fingerprint(model: nn.Module, config: Any) -> str:
    """Return the fingerprint of a language model, a stack, or a model around a stack.

    Args:
        model: Module whose parameters and buffers are covered.
        config: Config of the module.
    """
    # 1) The fields that change the result. An official stack is described by the other configs.
    stack_configs = [config.stack_config()] if getattr(config, "stack", None) else []
    block_owner = config if hasattr(config, "block_config") else stack_configs[0]
    fields = [
        {name: value for name, value in sorted(_changed_fields(part).items()) if name not in _EXCLUDED_FIELDS}
        for part in (config, block_owner.block_config(), *stack_configs)
    ]
    # 2) Samples of the tensors.
    tensors = chain(model.named_parameters(), model.named_buffers())
    return _digest([block_owner.layer, *fields], tensors)


def _changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config that differ from their defaults, numbers as float: 1 and 1.0 are the same."""
    values = {field.name: (getattr(config, field.name), _default(field)) for field in dataclasses.fields(config)}
    return {name: _normalize(value) for name, (value, default) in values.items() if value != default}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _normalize(value: Any) -> Any:
    """Return a value as JSON can hold it, in one spelling for equal values."""
    if isinstance(value, tuple | list):
        return [_normalize(x) for x in value]
    if isinstance(value, dict):
        return {key: _normalize(value[key]) for key in sorted(value)}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value) if abs(value) < 1e300 else hex(value) if isinstance(value, int) else value


def _digest(fields: list[Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=16)
    for name, x in tensors:
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        flat, count = x.detach().reshape(-1), min(_SAMPLED_VALUES, x.numel())
        index = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
        digest.update(flat[index].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
