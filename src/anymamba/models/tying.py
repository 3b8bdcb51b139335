"""A head that is the embedding: one parameter in the model, and one tensor in a file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or hold the same numbers in the same dtype."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    alias = a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return alias or torch.equal(a, b.to(a.device))


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
    head, embedding = state.get(prefix + HEAD), state.get(prefix + EMBEDDING)
    if not model.config.tie_embeddings or embedding is None:
        return
    if head is None:
        state[prefix + HEAD] = embedding
        if (scales := state.get(f"{prefix}backbone.embedding.scales")) is not None:
            state[f"{prefix}lm_head.scales"] = scales
    elif model.is_tied and not same_values(head, embedding):
        errors.append(
            f"head and embedding of the model are one (tied), but {prefix}{HEAD} and {prefix}{EMBEDDING} differ; "
            "load them into a model with tie_embeddings=False"
        )


def after_loading(model: Any, incompatible: Any) -> None:
    """Tie again what was tied before it was moved off the meta device, or assigned."""
    if model.config.tie_embeddings and not model.is_tied:
        head, embedding = getattr(model.lm_head, "weight", None), getattr(model.backbone.embedding, "weight", None)
        if isinstance(head, Tensor) and isinstance(embedding, Tensor) and same_values(head, embedding):
            model.tie_weights()
