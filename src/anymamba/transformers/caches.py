"""transformers' caches: the window and the state of a layer, which have the layout of this library's own caches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Carried(NamedTuple):
    """What a layer carries from one call to the next: the cache's own tensors.

    Attributes:
        window: the last inputs of the convolution, newest last, (b, v, w).
        state: (b, i, n) for Mamba-1, (b, h, p, n) for Mamba-2.
    """

    window: Tensor
    state: Tensor


def missing(cache: Any, layer: int) -> str:
    """Why a cache cannot be read and written; empty if it can."""
    if cache is None:
        return ""
    layers = getattr(cache, "layers", ())
    found = layers[layer] if layer < len(layers) else None
    if not all(hasattr(found, name) for name in ("conv_states", "recurrent_states", "has_previous_state")):
        return f"its cache has a {type(found).__name__} for layer {layer}, not a window and a state"
    return "its cache records the past" if getattr(found, "record_past", False) else ""


def read(cache: Any, layer: int) -> Carried | None:
    """What the layer carries; None for a fresh start."""
    if cache is None:
        return None
    found = cache.layers[layer]
    if not found.has_previous_state[0] or found.recurrent_states[0] is None:
        return None
    return Carried(found.conv_states[0], found.recurrent_states[0])


def write(cache: Any, layer: int, carried: Carried) -> None:
    """Replace what the layer carries.

    A whole window has as many inputs as the cache keeps, so adding it leaves exactly these.
    """
    cache.update_conv_state(carried.window, layer, conv_kernel_size=carried.window.shape[-1])
    cache.update_recurrent_state(carried.state, layer)
