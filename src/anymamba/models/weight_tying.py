"""A head that is the embedding: one parameter in the model, and one tensor in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
# What a head shares with its embedding, each with its counterpart; scales only where the weight is in fewer bits.
PARTS = {HEAD: EMBEDDING, "lm_head.scales": "backbone.embedding.scales"}


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or hold the same numbers in the same dtype."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    alias = a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return alias or torch.equal(a, b.to(a.device))


def has_another_head(state: Mapping[str, Tensor], prefix: str = "") -> bool:
    """Whether the head of a state dict, as far as it has one, differs from its embedding."""
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
    """Let a tied model read a state dict without a head; refuse one with two different weights for one parameter."""
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
    """Tie again what was tied before it was moved off the meta device, or assigned."""
    if model.config.tie_embeddings and not model.is_tied:
        parts = {name: _at(model, name) for pair in PARTS.items() for name in pair}
        found = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
        if HEAD in found and EMBEDDING in found and not has_another_head(found):
            model.tie_weights()


def _at(model: Any, name: str) -> Any:
    """The parameter of a dotted name; None if there is none."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model
