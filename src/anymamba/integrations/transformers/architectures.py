"""The architectures of transformers: its mixers and how they differ, models of mixers only, and its caches.

All mixers of a kind name their sizes alike. Their differences are described here, one entry per mixer; the forwards
(`mamba_mixers.py`) are shared. The window and the state of a layer have the layout of this library's own caches.

Letters: b batch, i channels, h heads, p head width, n state, v convolved channels, w conv width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Mixer of transformers.

    Attributes:
        folder: Folder of the model in `transformers.models`.
        kind: Forward that computes it.
        inner_norms: RMS norms of dt, B and C in Mamba-1.
        scaled: Whether the input is scaled by `ssm_in_multiplier`, and its projection by `mup_vector`.
        norm_switch: Attribute that is true if there is a norm before `out_proj`; empty if there always is one.
    """

    folder: str
    kind: Literal["mamba1", "mamba2"]
    inner_norms: Literal["none", "weightless", "weighted"] = "none"
    scaled: bool = False
    norm_switch: str = ""


ARCHITECTURES = {
    "MambaMixer": Architecture(folder="mamba", kind="mamba1"),
    "FalconMambaMixer": Architecture(folder="falcon_mamba", kind="mamba1", inner_norms="weightless"),
    "JambaMambaMixer": Architecture(folder="jamba", kind="mamba1", inner_norms="weighted"),
    "Mamba2Mixer": Architecture(folder="mamba2", kind="mamba2"),
    "BambaMixer": Architecture(folder="bamba", kind="mamba2"),
    "GraniteMoeHybridMambaLayer": Architecture(folder="granitemoehybrid", kind="mamba2"),
    "NemotronHMamba2Mixer": Architecture(folder="nemotron_h", kind="mamba2"),
    "Zamba2MambaMixer": Architecture(folder="zamba2", kind="mamba2"),
    "FalconH1Mixer": Architecture(folder="falcon_h1", kind="mamba2", scaled=True, norm_switch="mamba_rms_norm"),
}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Model of transformers that consists of an embedding, mixers with a norm before each, and a last norm.

    Attributes:
        folder: Folder of the model in `transformers.models`.
        prefix: Prefix of the class names of its block, norms and output.
    """

    folder: str
    prefix: str


STACKS = {
    "MambaModel": Stack(folder="mamba", prefix="Mamba"),
    "FalconMambaModel": Stack(folder="falcon_mamba", prefix="FalconMamba"),
    "Mamba2Model": Stack(folder="mamba2", prefix="Mamba2"),
}

# Mixers that keep the forward of transformers, each with the reason.
NOT_COVERED = {
    "ZambaMambaMixer": "Zamba-1 has several heads, each with its own inner projections, which no kernel supports",
}


def original_class(name: str) -> type[Any]:
    """Return the class that transformers has for a mixer in `ARCHITECTURES` or a model in `STACKS`."""
    folder = (ARCHITECTURES[name] if name in ARCHITECTURES else STACKS[name]).folder
    return class_in_folder(folder, name)


def class_in_folder(folder: str, name: str) -> type[Any]:
    """Return a class of the model in a folder of transformers."""
    kind: type[Any] = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    return kind


def is_of_transformers(kind: type[Any]) -> bool:
    """Return whether a class belongs to a model of transformers."""
    return kind.__module__.startswith("transformers.models.")


class LayerState(NamedTuple):
    """State that a layer carries from one call to the next; read from a cache, its tensors are those of the cache.

    Attributes:
        window: Last inputs of the convolution, newest last, (b, v, w).
        state: SSM state, (b, i, n) for Mamba-1, (b, h, p, n) for Mamba-2.
    """

    window: Tensor
    state: Tensor


def uncovered_reason(cache: Any, layer: int) -> str:
    """Return why a cache cannot be read and written; empty if it can."""
    if cache is None:
        return ""
    layers = getattr(cache, "layers", ())
    entry = layers[layer] if layer < len(layers) else None
    if not all(hasattr(entry, name) for name in ("conv_states", "recurrent_states", "has_previous_state")):
        return f"its cache has a {type(entry).__name__} for layer {layer}, not a window and a state"
    return "its cache records the past" if getattr(entry, "record_past", False) else ""


def read_state(cache: Any, layer: int) -> LayerState | None:
    """Return the state of a layer; None if it has not run yet."""
    if cache is None:
        return None
    entry = cache.layers[layer]
    if not entry.has_previous_state[0] or entry.recurrent_states[0] is None:
        return None
    return LayerState(entry.conv_states[0], entry.recurrent_states[0])


def write_state(cache: Any, layer: int, layer_state: LayerState) -> None:
    """Replace the state of a layer.

    A window has as many inputs as the cache keeps, so appending it replaces them all.
    """
    cache.update_conv_state(layer_state.window, layer, conv_kernel_size=layer_state.window.shape[-1])
    cache.update_recurrent_state(layer_state.state, layer)


MIN_VERSION = (5, 16)


def require_transformers() -> None:
    """Raise `ImportError` unless a supported version of transformers is installed."""
    requirement = f"anymamba.integrations.transformers needs transformers >= {MIN_VERSION[0]}.{MIN_VERSION[1]}"
    try:
        version = str(import_module("transformers").__version__)
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        raise ImportError(f"{requirement}, which is not installed: pip install 'anymamba[interop]'") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_VERSION:
        raise ImportError(f"{requirement}, found {version}: pip install --upgrade 'anymamba[interop]'")
