"""Checks of a language model's arguments, by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymamba.ground.checks import expect_like, expect_shape
from anymamba.ground.operators import is_observed
from anymamba.models.cache import LMCache
from anymamba.models.loss import IGNORED_LABEL

_WHOLE = (torch.int32, torch.int64)


def expect_ids(input_ids: Any) -> None:
    """Token ids of a batch; the embedding checks their dtype and range.

    Raises:
        TypeError: not a tensor.
        ValueError: not (b, t).
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"MambaLM: input_ids must be a tensor (b, t), got {type(input_ids).__name__}; "
            "torch.tensor([ids]) makes one from a list of ids"
        )
    if input_ids.ndim != 2:
        hint = "; input_ids.unsqueeze(0) is a batch of one" if input_ids.ndim == 1 else ""
        raise ValueError(f"MambaLM: input_ids must have shape (b, t), got {tuple(input_ids.shape)}{hint}")


def expect_inputs(input_ids: Any, inputs_embeds: Any, width: int, like: Tensor) -> Tensor:
    """Token ids, or embeddings in their place; returns the one that was given.

    Raises:
        TypeError: not a tensor, or embeddings of another dtype than `like`.
        ValueError: both or neither, or another shape or device.
    """
    if inputs_embeds is None:
        expect_ids(input_ids)
        ids: Tensor = input_ids
        return ids
    if input_ids is not None:
        raise ValueError("MambaLM: input_ids and inputs_embeds exclude each other, got both")
    expect_shape("MambaLM", "inputs_embeds", inputs_embeds, "b t d", {"d": width})
    expect_like("MambaLM", "inputs_embeds", inputs_embeds, like.dtype, like.device)
    embeds: Tensor = inputs_embeds
    return embeds


def expect_cache(cache: Any) -> None:
    """A cache of a language model, or None.

    Raises:
        TypeError: something else.
    """
    if cache is None or isinstance(cache, LMCache):
        return
    hint = ""
    if isinstance(cache, Tensor):
        hint = "; pass labels by name, labels=..."
    elif isinstance(getattr(cache, "cache", None), LMCache):
        hint = "; pass its .cache"
    raise TypeError(f"MambaLM: cache must be an LMCache, got {type(cache).__name__}{hint}")


def expect_labels(name: str, labels: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Labels or targets: whole numbers of the shape of the ids, on their device.

    Raises:
        TypeError: another dtype, or not a tensor.
        ValueError: another shape or device.
    """
    found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if found not in _WHOLE:
        raise TypeError(f"MambaLM: {name} must be a tensor of int32 or int64, got {found}")
    if labels.shape != shape:
        raise ValueError(f"MambaLM: {name} must have the shape of input_ids, {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.device != device:
        raise ValueError(f"MambaLM: {name} must be on {device}, got {labels.device}")


def expect_targets(targets: Tensor, vocab: int) -> None:
    """The labels that count must be tokens. Checked only on the CPU, where that is cheap, and not in a trace.

    Raises:
        ValueError: one is not.
    """
    if targets.device.type != "cpu" or is_observed():
        return
    counted = targets[targets != IGNORED_LABEL]
    if not counted.numel():
        return
    low, high = (int(x) for x in counted.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"MambaLM: labels must be between 0 and {vocab - 1}, or {IGNORED_LABEL} to be ignored, got {low} to {high}"
        )
