"""The classes of accelerated mixers: each a subclass of the mixer of transformers whose name it has.

They are made when they are asked for, by the name under which pickles find them: `classes.Mamba2Mixer`.
"""

from __future__ import annotations

from typing import Any

from anymamba.transformers.architectures import ARCHITECTURES, own_class
from anymamba.transformers.mamba1 import AcceleratedMamba1
from anymamba.transformers.mamba2 import AcceleratedMamba2
from anymamba.transformers.mixer import AcceleratedMixer

_KINDS = {"mamba1": AcceleratedMamba1, "mamba2": AcceleratedMamba2}


def __getattr__(name: str) -> Any:
    """Make the class of that name."""
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    architecture, own = ARCHITECTURES[name], own_class(name)
    members = {"ARCHITECTURE": architecture, "__module__": __name__, "__doc__": own.__doc__}
    globals()[name] = made = type(name, (_KINDS[architecture.kind], own), members)
    return made


def accelerated_class(own: type[Any]) -> type[AcceleratedMixer] | None:
    """The accelerated class of transformers' own class of a mixer; None if there is none."""
    name = own.__name__
    if name not in ARCHITECTURES or own is not own_class(name):
        return None
    made: type[AcceleratedMixer] = globals().get(name) or __getattr__(name)
    return made


def own_class_of(mixer: AcceleratedMixer) -> type[Any]:
    """transformers' own class of an accelerated mixer."""
    return own_class(type(mixer).__name__)
