"""Checks at the entry points of models: ids, embeddings, labels, caches and indices.

Letters: b batch, t time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.core.checks import can_read_values, check_dtype_and_device, check_shape, check_tensor
from anymamba.models.cache import LMCache


def ids_or_embeddings(where: str, name: str, ids: Any, inputs_embeds: Any, *, reads_ids: bool) -> Any:
    """Return the token ids or the embeddings; raise unless exactly one of them is given, with a valid dtype.

    `name` is the argument for ids, or for the vectors of a model that does not read ids.
    """
    if (ids is None) == (inputs_embeds is None):
        raise ValueError(f"{where}: expected {name} or inputs_embeds, got {'neither' if ids is None else 'both'}")
    if inputs_embeds is None:
        check_tensor(where, name, ids)
        if reads_ids and ids.is_floating_point():
            raise TypeError(f"{where}: {name} must be integer token ids, got {ids.dtype}")
        return ids
    check_tensor(where, "inputs_embeds", inputs_embeds)
    if not reads_ids:
        raise ValueError(f"{where}: inputs_embeds are for a model of tokens; this one reads vectors, as {name}")
    if not inputs_embeds.is_floating_point():
        raise TypeError(f"{where}: inputs_embeds must have a floating-point dtype, got {inputs_embeds.dtype}")
    return inputs_embeds


def check_classes(
    where: str,
    labels: Any,
    shape: tuple[int, ...],
    classes: int,
    ignored: int | None = None,
    counts: Tensor | None = None,
) -> None:
    """Raise for labels that are not integers of this shape, each a class or `ignored`.

    Where `counts` is False, a label may have any value.
    """
    received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if received not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: labels must be a tensor of int32 or int64, got {received}")
    if labels.shape != shape:
        raise ValueError(f"{where}: labels must have shape {tuple(shape)}, got {tuple(labels.shape)}")
    if counts is not None and can_read_values(labels):
        labels = labels[counts]
    check_label_range(where, labels, classes, ignored)


def check_label_range(where: str, labels: Tensor, classes: int, ignored: int | None) -> None:
    """Raise `ValueError` unless each label is a class or `ignored`, where reading them is cheap."""
    if not can_read_values(labels):
        return
    if ignored is not None:
        labels = labels[labels != ignored]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        except_for = "" if ignored is None else f", or {ignored} to be ignored"
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(f"{where}: labels must be 0 to {classes - 1}{except_for}, got {low} to {high}")


def normalize_indices(where: str, numbers: Sequence[int], n: int) -> list[int]:
    """Return indices from 0 to n - 1; negative ones count from the end. Raise for other numbers."""
    try:
        numbers = [operator.index(i) for i in numbers]
    except TypeError:
        raise TypeError(f"{where} must be a list of integers, {-n} to {n - 1}, got {numbers!r}") from None
    if invalid := [i for i in numbers if not -n <= i < n]:
        raise ValueError(f"{where} must be {-n} to {n - 1}, got {invalid[0]}")
    return [i % n for i in numbers]


def check_ids(input_ids: Any) -> None:
    """Raise unless `input_ids` is a tensor (b, t); the embedding checks dtype and range."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"MambaLM: input_ids must be a tensor (b, t), got {type(input_ids).__name__}; "
            "torch.tensor([ids]) makes one from a list of ids"
        )
    if input_ids.ndim != 2:
        hint = "; input_ids.unsqueeze(0) is a batch of one" if input_ids.ndim == 1 else ""
        raise ValueError(f"MambaLM: input_ids must have shape (b, t), got {tuple(input_ids.shape)}{hint}")


def check_inputs(input_ids: Any, inputs_embeds: Any, width: int, like: Tensor) -> Tensor:
    """Return token ids (b, t), or embeddings (b, t, d) in their place; raise unless exactly one is valid."""
    if inputs_embeds is None:
        check_ids(input_ids)
        ids: Tensor = input_ids
        return ids
    if input_ids is not None:
        raise ValueError("MambaLM: input_ids cannot be combined with inputs_embeds, got both")
    check_shape("MambaLM", "inputs_embeds", inputs_embeds, "b t d", {"d": width})
    check_dtype_and_device("MambaLM", "inputs_embeds", inputs_embeds, like.dtype, like.device)
    embeds: Tensor = inputs_embeds
    return embeds


def check_cache(cache: Any) -> None:
    """Raise `TypeError` unless `cache` is the cache of a language model, or None."""
    if cache is None or isinstance(cache, LMCache):
        return
    hint = ""
    if isinstance(cache, Tensor):
        hint = "; pass labels by name, labels=..."
    elif isinstance(getattr(cache, "cache", None), LMCache):
        hint = "; pass its .cache"
    raise TypeError(f"MambaLM: cache must be an LMCache, got {type(cache).__name__}{hint}")


def check_labels(name: str, labels: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless labels or targets are integers of the shape of the ids, on their device."""
    received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if received not in (torch.int32, torch.int64):
        raise TypeError(f"MambaLM: {name} must be a tensor of int32 or int64, got {received}")
    if labels.shape != shape:
        raise ValueError(f"MambaLM: {name} must have the shape of input_ids, {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.device != device:
        raise ValueError(f"MambaLM: {name} must be on {device}, got {labels.device}")
