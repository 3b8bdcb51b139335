"""Weight tying: a head that is the embedding is one parameter in the model and one tensor in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
# Parts of the head, each with its counterpart in the embedding; only quantized weights have scales.
PARTS = {HEAD: EMBEDDING, "lm_head.scales": "backbone.embedding.scales"}


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are one, or hold the same numbers in the same dtype."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    alias = a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return alias or torch.equal(a, b.to(a.device))


def has_another_head(state: Mapping[str, Tensor], prefix: str = "") -> bool:
    """Return whether a state dict has a head that differs from its embedding."""
    pairs = ((state.get(prefix + head), state.get(prefix + embedding)) for head, embedding in PARTS.items())
    return any(head is not None and (table is None or not same_values(head, table)) for head, table in pairs)


def before_loading(
    model: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Let a tied model read a state dict without a head; reject two different weights for one parameter."""
    if not model.config.tie_embeddings or state.get(prefix + EMBEDDING) is None:
        return
    for head, embedding in PARTS.items():
        if (table := state.get(prefix + embedding)) is not None:
            state.setdefault(prefix + head, table)
    if model.is_tied and has_another_head(state, prefix):
        errors.append(
            f"head and embedding of the model are one (tied), but {prefix}{HEAD} and {prefix}{EMBEDDING} differ; "
            "load them into a model with tie_embeddings=False"
        )


def after_loading(model: Any, incompatible: Any) -> None:
    """Tie head and embedding again after they were moved off the meta device, or assigned."""
    if model.config.tie_embeddings and not model.is_tied:
        parts = {name: _parameter_at(model, name) for pair in PARTS.items() for name in pair}
        tensors = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
        if HEAD in tensors and EMBEDDING in tensors and not has_another_head(tensors):
            model.tie_weights()


def _parameter_at(model: Any, name: str) -> Any:
    """Return the parameter of a dotted name; None if there is none."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model
