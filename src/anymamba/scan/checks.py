"""What the scan asks of its inputs, with errors that say what was expected and what came."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from anymamba.operators import is_observed
from anymamba.scan.numerics import state_dtype


def expect_tensor(where: str, name: str, x: object) -> None:
    """Raise `TypeError` unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{where}: {name} must be a tensor, got {type(x).__name__}")


def expect_shape(where: str, name: str, x: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """Match the shape of `x` with `letters` ("b t h"), adding unseen letters to `sizes`, or raise `ValueError`."""
    expect_tensor(where, name, x)
    names, before = letters.split(), dict(sizes)
    fits = x.ndim == len(names) and all(
        sizes.setdefault(letter, size) == size for letter, size in zip(names, x.shape, strict=True)
    )
    if not fits:  # only then is a size written out: a tracer takes what is written for a constant
        known = ", ".join(f"{letter}={before[letter]}" if letter in before else letter for letter in names)
        raise ValueError(f"{where}: {name} must have shape ({known}), got {tuple(x.shape)}")


def expect_like(where: str, name: str, x: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `TypeError` unless `x` has `dtype`, `ValueError` unless it is on `device`."""
    if x.dtype != dtype:
        raise TypeError(f"{where}: {name} must be {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{where}: {name} must be on {device}, got {x.device}")


def values_are_cheap(x: Tensor) -> bool:
    """Whether looking at values costs no device synchronisation and breaks no graph: eager, on the CPU."""
    return x.device.type == "cpu" and not is_observed()


def check_cu_seqlens(where: str, cu_seqlens: Tensor, batch: int, t: int, device: torch.device) -> None:
    """Raise unless `cu_seqlens` = (0, ..., t), integer and strictly increasing, on `device`, on a batch of one."""
    expect_tensor(where, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{where}: cu_seqlens must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != device:
        raise ValueError(f"{where}: cu_seqlens must be on {device}, got {cu_seqlens.device}")
    if batch != 1:
        raise ValueError(f"{where}: packed sequences (cu_seqlens) need a batch of 1, got {batch}")
    if not values_are_cheap(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != t:
        raise ValueError(f"{where}: cu_seqlens must go from 0 to t = {t}, got {bounds[0]} to {bounds[-1]}")
    if any(stop <= start for start, stop in itertools.pairwise(bounds)):
        raise ValueError(f"{where}: cu_seqlens must be strictly increasing, got {bounds}")


def check_scan(
    v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise `ValueError` or `TypeError` unless the inputs meet the contract of `anymamba.scan.scan`."""
    sizes: dict[str, int] = {}
    expect_shape("scan", "v", v, "b t r h p", sizes)
    expect_shape("scan", "k", k, "b t r g n", sizes)
    expect_shape("scan", "q", q, "b t r g n", sizes)
    expect_shape("scan", "log_decay", log_decay, "b t h", sizes)
    if sizes["t"] < 1:
        raise ValueError("scan: the sequence must have at least one step, got t = 0")
    for letter, name in (("r", "ranks"), ("g", "groups")):
        if sizes[letter] < 1:
            raise ValueError(f"scan: there must be at least one of the {name}, got {letter} = 0")
    if sizes["h"] % sizes["g"]:
        raise ValueError(f"scan: groups must divide heads, got g = {sizes['g']} and h = {sizes['h']}")
    if not v.dtype.is_floating_point:
        raise TypeError(f"scan: v must be of a floating-point dtype, got {v.dtype}")
    wide = state_dtype(v.dtype)
    for name, x in (("k", k), ("q", q)):
        expect_like("scan", name, x, v.dtype, v.device)
    expect_like("scan", "log_decay", log_decay, wide, v.device)
    if cu_seqlens is not None:
        check_cu_seqlens("scan", cu_seqlens, sizes["b"], sizes["t"], v.device)
    if initial_state is not None:
        rows = sizes["b"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        sizes["sequences"] = rows
        expect_shape("scan", "initial_state", initial_state, "sequences h p n", sizes)
        expect_like("scan", "initial_state", initial_state, wide, v.device)
    if values_are_cheap(log_decay) and log_decay.numel():
        largest = log_decay.detach().max().item()
        if largest > 0:
            raise ValueError(f"scan: log_decay must never be positive (a decay is at most 1), got up to {largest:.6g}")
