"""Checks at the entry points of stacks and models: a batch of sequences, padded or packed; ids, caches, labels.

Letters: b batch, t time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.core.checks import (
    can_read_values,
    check_cu_seqlens,
    check_dtype_and_device,
    check_mutually_exclusive,
    check_shape,
    check_tensor,
    check_time_steps,
)
from anymamba.core.dtypes import is_autocast
from anymamba.core.layout import Padding, cu_seqlens_from_seq_idx
from anymamba.core.operators import is_tracing
from anymamba.models.cache import LMCache
from anymamba.models.loss import IGNORED_LABEL


def check_input(where: str, x: Any, letters: str, width: int, like: Tensor, name: str = "x") -> None:
    """Raise for an input of another shape, or with another dtype or device than `like`."""
    sizes = {"d": width}
    check_shape(where, name, x, letters, sizes)
    check_time_steps(where, sizes.get("t", 1))
    check_dtype_and_device(where, name, x, x.dtype if is_autocast(x.device) else like.dtype, like.device)


def flatten_packed_rows(where: str, x: Any, seq_idx: Any, cu_seqlens: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Return rows (b, t, ...) of packed sequences as one row (1, b t, ...), and the boundaries of its sequences."""
    check_mutually_exclusive(where, "seq_idx", cu_seqlens=cu_seqlens, mask=mask)
    check_tensor(where, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{where}: expected (b, t, ...), got {tuple(x.shape)}")
    b, t = x.shape[:2]
    return x.reshape(1, b * t, *x.shape[2:]), cu_seqlens_from_seq_idx(where, seq_idx, b, t, x.device)


def ids_or_embeddings(where: str, name: str, ids: Any, inputs_embeds: Any, *, reads_ids: bool) -> Any:
    """Return whichever of the two was given, a tensor.

    Args:
        where: Name of the model, for errors.
        name: Name of the argument for ids.
        ids: Token ids; other inputs for a model that does not read ids.
        inputs_embeds: Embeddings of tokens.
        reads_ids: Whether the model reads ids.

    Raises:
        TypeError: Not a tensor, ids that are not integers, or embeddings that are not floating-point.
        ValueError: Both or neither were given, or embeddings for a model without an embedding.
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


def check_batch(where: str, x: Tensor, cu_seqlens: Any, mask: Any) -> Padding | None:
    """Raise for boundaries or a mask that do not match (b, t, ...); return how the rows are padded."""
    b, t = x.shape[:2]
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError(f"{where}: mask cannot be combined with cu_seqlens, got both")
        check_cu_seqlens(where, cu_seqlens, b, t, x.device)
        return None
    return None if mask is None else Padding.from_mask(where, mask, b, t, x.device)


def check_classes(
    where: str,
    labels: Any,
    shape: tuple[int, ...],
    classes: int,
    ignored: int | None = None,
    counts: Tensor | None = None,
) -> None:
    """Raise for labels that are not integers of this shape, each a class or `ignored`.

    Args:
        where: Name of the model, for errors.
        labels: Labels.
        shape: Shape that they must have.
        classes: Number of classes.
        ignored: Label that is ignored, if there is one.
        counts: Where it is False, a label may have any value.

    Raises:
        TypeError: Not a tensor of integers.
        ValueError: Another shape, or a label out of range.
    """
    received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if received not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: labels must be a tensor of int32 or int64, got {received}")
    if labels.shape != shape:
        raise ValueError(f"{where}: labels must have shape {tuple(shape)}, got {tuple(labels.shape)}")
    if not can_read_values(labels):
        return
    labels = labels if counts is None else labels[counts]
    if ignored is not None:
        labels = labels[labels != ignored]
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        except_for = "" if ignored is None else f", or {ignored} to be ignored"
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(f"{where}: labels must be 0 to {classes - 1}{except_for}, got {low} to {high}")


def normalize_indices(where: str, numbers: Sequence[int], n: int) -> list[int]:
    """Return indices from 0 to n - 1; negative ones count from the end.

    Raises:
        TypeError: Not a list of integers.
        ValueError: An index is out of range.
    """
    try:
        numbers = [operator.index(i) for i in numbers]
    except TypeError:
        raise TypeError(f"{where} must be a list of integers, {-n} to {n - 1}, got {numbers!r}") from None
    if invalid := [i for i in numbers if not -n <= i < n]:
        raise ValueError(f"{where} must be {-n} to {n - 1}, got {invalid[0]}")
    return [i % n for i in numbers]


def check_ids(input_ids: Any) -> None:
    """Raise unless `input_ids` is a tensor (b, t); the embedding checks dtype and range.

    Raises:
        TypeError: Not a tensor.
        ValueError: Not (b, t).
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"MambaLM: input_ids must be a tensor (b, t), got {type(input_ids).__name__}; "
            "torch.tensor([ids]) makes one from a list of ids"
        )
    if input_ids.ndim != 2:
        hint = "; input_ids.unsqueeze(0) is a batch of one" if input_ids.ndim == 1 else ""
        raise ValueError(f"MambaLM: input_ids must have shape (b, t), got {tuple(input_ids.shape)}{hint}")


def check_inputs(input_ids: Any, inputs_embeds: Any, width: int, like: Tensor) -> Tensor:
    """Check token ids, or embeddings in their place; return the one that was given.

    Raises:
        TypeError: Not a tensor, or embeddings of another dtype than `like`.
        ValueError: Both or neither were given, or another shape or device.
    """
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
    """Raise unless `cache` is the cache of a language model, or None.

    Raises:
        TypeError: It is something else.
    """
    if cache is None or isinstance(cache, LMCache):
        return
    hint = ""
    if isinstance(cache, Tensor):
        hint = "; pass labels by name, labels=..."
    elif isinstance(getattr(cache, "cache", None), LMCache):
        hint = "; pass its .cache"
    raise TypeError(f"MambaLM: cache must be an LMCache, got {type(cache).__name__}{hint}")


def check_labels(name: str, labels: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless labels or targets are integers of the shape of the ids, on their device.

    Raises:
        TypeError: Another dtype, or not a tensor.
        ValueError: Another shape or device.
    """
    received = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if received not in (torch.int32, torch.int64):
        raise TypeError(f"MambaLM: {name} must be a tensor of int32 or int64, got {received}")
    if labels.shape != shape:
        raise ValueError(f"MambaLM: {name} must have the shape of input_ids, {tuple(shape)}, got {tuple(labels.shape)}")
    if labels.device != device:
        raise ValueError(f"MambaLM: {name} must be on {device}, got {labels.device}")


def check_targets(targets: Tensor, vocab: int) -> None:
    """Raise unless all targets but ignored ones are tokens. Checked only on the CPU, and not while tracing.

    Raises:
        ValueError: One is not a token.
    """
    if targets.device.type != "cpu" or is_tracing():
        return
    token_targets = targets[targets != IGNORED_LABEL]
    if not token_targets.numel():
        return
    low, high = (int(x) for x in token_targets.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"MambaLM: labels must be between 0 and {vocab - 1}, or {IGNORED_LABEL} to be ignored, got {low} to {high}"
        )
