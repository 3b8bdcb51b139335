"""The architectures of transformers: its mixers and how they differ, and models that are nothing but mixers.

All mixers of a kind name their sizes alike. What differs is described here, one entry for each mixer; the forwards
(`mamba1.py`, `mamba2.py`) are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A mixer of transformers.

    Attributes:
        folder: of the model below `transformers.models`.
        kind: the forward that computes it.
        inner_norms: Mamba-1's RMS norms of dt, B and C.
        scaled: the input is scaled by `ssm_in_multiplier`, and its projection by `mup_vector`.
        norm_switch: the attribute that says whether there is a norm before `out_proj`; empty if there always is.
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
    """A model of transformers that is nothing but an embedding, mixers with a norm before each, and a last norm.

    Attributes:
        folder: of the model below `transformers.models`.
        prefix: of the names of its block, its norms and its output.
    """

    folder: str
    prefix: str


STACKS = {
    "MambaModel": Stack(folder="mamba", prefix="Mamba"),
    "FalconMambaModel": Stack(folder="falcon_mamba", prefix="FalconMamba"),
    "Mamba2Model": Stack(folder="mamba2", prefix="Mamba2"),
}

# Mixers that keep transformers' own forward, with the reason.
NOT_COVERED = {
    "ZambaMambaMixer": "Zamba-1 has several heads, each with its own inner projections, which no kernel supports",
}


def own_class(name: str) -> type[Any]:
    """transformers' own class of a mixer in `ARCHITECTURES` or a model in `STACKS`."""
    folder = (ARCHITECTURES[name] if name in ARCHITECTURES else STACKS[name]).folder
    return of_folder(folder, name)


def of_folder(folder: str, name: str) -> type[Any]:
    """A class of the model in a folder of transformers."""
    found: type[Any] = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    return found


def is_of_transformers(kind: type[Any]) -> bool:
    """Whether a class is one of transformers' models."""
    return kind.__module__.startswith("transformers.models.")
