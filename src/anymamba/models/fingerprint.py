"""A name for a model's weights and for what it computes with them, so that a state is not fed to another model.

It covers what changes the result: facts of the config that are not the defaults, and of every parameter and buffer its
name, shape, dtype and up to 256 of its values, evenly spaced. It does not cover how parameters were initialized, nor
the size of the vocabulary after padding, which differs between formats of the same model.
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

from anymamba.models.config import INITIALIZATION_FIELDS, MambaLMConfig

_VERSION = "2:"
# Fields that do not change results, or that follow from the shapes of the parameters.
_NO_FACTS = INITIALIZATION_FIELDS | {
    "chunk_size",
    "fused_add_norm",
    "vocab_size",
    "pad_vocab_size_multiple",
    "d_intermediate",
}
_NO_FACTS |= {"ssm_cfg", "attn_layer_idx", "attn_cfg", "extra"}  # the first is the block's config, the others unused
_NO_FACTS |= {"stack", "dropout", "grad_horizon", "checkpointing", "gate_bias", "gate_bias_step"}  # or initial values
# Version 1 hashed the block's config as it was printed then, with these fields in this order.
_FORMER_FIELDS = {
    "Mamba1": "d_model d_state d_conv expand dt_rank dt_min dt_max dt_init dt_scale dt_init_floor conv_bias bias",
    "Mamba2": "d_model d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim rmsnorm "
    "norm_before_gate dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size learnable_init_states",
    "Mamba3": "d_model d_state expand headdim ngroups rope_fraction dt_min dt_max dt_init_floor A_floor "
    "is_outproj_norm is_mimo mimo_rank bias chunk_size a_activation rotation rotation_range dt_limit "
    "learnable_init_states",
}


class HasFingerprint(nn.Module):
    """A module whose caches are saved with a name for its weights, by which they find it again."""

    config: Any

    def fingerprint(self) -> str:
        """A name for these weights in this dtype, which state files record."""
        return fingerprint(self, self.config)

    def has_fingerprint(self, name: str) -> bool:
        """Whether `name` is this module's fingerprint."""
        return name == self.fingerprint()


def fingerprint(model: nn.Module, config: Any) -> str:
    """The name of a model with this config: a language model's, a stack's, or that of a model around a stack."""
    stack = [config.stack_config()] if getattr(config, "stack", None) else []  # else the other parts say everything
    blocks = config if hasattr(config, "block_config") else stack[0]
    parts = [config, blocks.block_config(), *stack]
    facts = [
        {name: value for name, value in sorted(_not_default(part).items()) if name not in _NO_FACTS} for part in parts
    ]
    tensors = chain(model.named_parameters(), model.named_buffers())
    return _VERSION + _digest([blocks.layer, *facts], tensors)


def has_fingerprint(model: nn.Module, config: MambaLMConfig, name: str) -> bool:
    """Whether `name` is the model's fingerprint, as this or a former version computes it."""
    if name.startswith(_VERSION) or config.stack:
        return name == fingerprint(model, config)
    fields, block = _FORMER_FIELDS.get(config.layer, "").split(), config.block_config()
    if not _not_default(block).keys() <= set(fields):
        return False  # a model that could not exist then
    printed = ", ".join(f"{field}={getattr(block, field)!r}" for field in fields)
    return name == _digest([config.layer, f"{config.layer}Config({printed})"], model.named_parameters())


def _not_default(config: Any) -> dict[str, Any]:
    """The fields of a config that are not the defaults, numbers as float: 1 and 1.0 are the same."""
    values = {f.name: (getattr(config, f.name), _default(f)) for f in dataclasses.fields(config)}
    return {name: _plain(value) for name, (value, default) in values.items() if value != default}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value) if abs(value) < 1e300 else hex(value) if isinstance(value, int) else value


def _digest(facts: list[Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for name, x in tensors:
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        flat, count = x.detach().reshape(-1), min(256, x.numel())
        index = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
        digest.update(flat[index].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
