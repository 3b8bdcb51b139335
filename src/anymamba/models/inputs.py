"""Checks of a language model's arguments, by their names.

§ Checks at the entry points of stacks and models: a batch of sequences, padded or packed into rows.

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
    """Refuse an input of another shape, or with another dtype or device than `like`."""
    sizes = {"d": width}
    check_shape(where, name, x, letters, sizes)
    check_time_steps(where, sizes.get("t", 1))
    check_dtype_and_device(where, name, x, x.dtype if is_autocast(x.device) else like.dtype, like.device)


def flatten_packed_rows(where: str, x: Any, seq_idx: Any, cu_seqlens: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Rows (b, t, ...) of packed sequences as one row (1, b t, ...), and the boundaries of its sequences."""
    check_mutually_exclusive(where, "seq_idx", cu_seqlens=cu_seqlens, mask=mask)
    check_tensor(where, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{where}: expected (b, t, ...), got {tuple(x.shape)}")
    b, t = x.shape[:2]
    return x.reshape(1, b * t, *x.shape[2:]), cu_seqlens_from_seq_idx(where, seq_idx, b, t, x.device)


def ids_or_embeddings(where: str, name: str, ids: Any, inputs_embeds: Any, *, reads_ids: bool) -> Any:
    """Whichever of the two was given, a tensor.

    Args:
        where: to name in errors.
        name: of the argument for ids.
        ids: token ids; other inputs of a model that does not read ids.
        inputs_embeds: embeddings of tokens.
        reads_ids: whether the model reads ids.

    Raises:
        TypeError: not a tensor, ids that are not whole numbers, or embeddings that are.
        ValueError: both, or neither; embeddings for a model without an embedding.
    """
    if (ids is None) == (inputs_embeds is None):
        raise ValueError(f"{where}: expected {name} or inputs_embeds, got {'neither' if ids is None else 'both'}")
    if inputs_embeds is None:
        check_tensor(where, name, ids)
        if reads_ids and ids.is_floating_point():
            raise TypeError(f"{where}: {name} must be token ids, whole numbers, got {ids.dtype}")
        return ids
    check_tensor(where, "inputs_embeds", inputs_embeds)
    if not reads_ids:
        raise ValueError(f"{where}: inputs_embeds are for a model of tokens; this one reads vectors, as {name}")
    if not inputs_embeds.is_floating_point():
        raise TypeError(f"{where}: inputs_embeds must be floating-point numbers, got {inputs_embeds.dtype}")
    return inputs_embeds


def check_batch(where: str, x: Tensor, cu_seqlens: Any, mask: Any) -> Padding | None:
    """Refuse boundaries or a mask that do not fit (b, t, ...); returns how the rows are padded."""
    b, t = x.shape[:2]
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError(f"{where}: mask and cu_seqlens exclude each other, got both")
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
    """Refuse labels that are not whole numbers of this shape, each a class or, if there is such a thing, `ignored`.

    Where `counts` is given and False, any number will do.

    Raises:
        TypeError: not a tensor of whole numbers.
        ValueError: another shape, or numbers out of range.
    """
    found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
    if found not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: labels must be a tensor of int32 or int64, got {found}")
    if labels.shape != shape:
        raise ValueError(f"{where}: labels must have shape {tuple(shape)}, got {tuple(labels.shape)}")
    if not can_read_values(labels):
        return
    counted = labels if counts is None else labels[counts]
    if ignored is not None:
        counted = counted[counted != ignored]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        other = "" if ignored is None else f", or {ignored} to be ignored"
        low, high = int(counted.min()), int(counted.max())
        raise ValueError(f"{where}: labels must be 0 to {classes - 1}{other}, got {low} to {high}")


def normalize_indices(where: str, numbers: Sequence[int], n: int) -> list[int]:
    """Numbers from 0 to n - 1; those below zero count from the end.

    Raises:
        TypeError: not a list of whole numbers.
        ValueError: one is out of range.
    """
    try:
        numbers = [operator.index(i) for i in numbers]
    except TypeError:
        raise TypeError(f"{where} must be a list of whole numbers, {-n} to {n - 1}, got {numbers!r}") from None
    if wrong := [i for i in numbers if not -n <= i < n]:
        raise ValueError(f"{where} must be {-n} to {n - 1}, got {wrong[0]}")
    return [i % n for i in numbers]


_WHOLE = (torch.int32, torch.int64)


def check_ids(input_ids: Any) -> None:
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


def check_inputs(input_ids: Any, inputs_embeds: Any, width: int, like: Tensor) -> Tensor:
    """Token ids, or embeddings in their place; returns the one that was given.

    Raises:
        TypeError: not a tensor, or embeddings of another dtype than `like`.
        ValueError: both or neither, or another shape or device.
    """
    if inputs_embeds is None:
        check_ids(input_ids)
        ids: Tensor = input_ids
        return ids
    if input_ids is not None:
        raise ValueError("MambaLM: input_ids and inputs_embeds exclude each other, got both")
    check_shape("MambaLM", "inputs_embeds", inputs_embeds, "b t d", {"d": width})
    check_dtype_and_device("MambaLM", "inputs_embeds", inputs_embeds, like.dtype, like.device)
    embeds: Tensor = inputs_embeds
    return embeds


def check_cache(cache: Any) -> None:
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


def check_labels(name: str, labels: Any, shape: tuple[int, ...], device: torch.device) -> None:
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


def check_targets(targets: Tensor, vocab: int) -> None:
    """The labels that count must be tokens. Checked only on the CPU, where that is cheap, and not in a trace.

    Raises:
        ValueError: one is not.
    """
    if targets.device.type != "cpu" or is_tracing():
        return
    counted = targets[targets != IGNORED_LABEL]
    if not counted.numel():
        return
    low, high = (int(x) for x in counted.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"MambaLM: labels must be between 0 and {vocab - 1}, or {IGNORED_LABEL} to be ignored, got {low} to {high}"
        )
