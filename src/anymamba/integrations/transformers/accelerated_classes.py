"""Classes of accelerated modules: each is a subclass of the class of transformers whose name it has.

They are created on demand, by the name under which pickles find them: `accelerated_classes.Mamba2Mixer`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from anymamba.integrations.transformers.architectures import ARCHITECTURES, STACKS, original_class
from anymamba.integrations.transformers.mamba_mixers import AcceleratedMamba1, AcceleratedMamba2
from anymamba.integrations.transformers.model_step import AcceleratedStack

_KINDS = {"mamba1": AcceleratedMamba1, "mamba2": AcceleratedMamba2}


def __getattr__(name: str) -> Any:
    """Create the class of this name."""
    if name in ARCHITECTURES:
        kind: type[Any] = _KINDS[ARCHITECTURES[name].kind]
        members: dict[str, Any] = {"ARCHITECTURE": ARCHITECTURES[name]}
    elif name in STACKS:
        kind, members = AcceleratedStack, {"STACK": STACKS[name]}
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    original = original_class(name)

    @functools.wraps(original.forward)  # its signature is inspected by others
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    members |= {"__module__": __name__, "__doc__": original.__doc__, "forward": forward}
    globals()[name] = accelerated = type(name, (kind, original), members)
    return accelerated


def accelerated_class(original: type[Any]) -> type[Any] | None:
    """Return the accelerated class for the class of a mixer or a model; None if there is none."""
    name = original.__name__
    if (name not in ARCHITECTURES and name not in STACKS) or original is not original_class(name):
        return None
    accelerated: type[Any] = globals().get(name) or __getattr__(name)
    return accelerated


def original_class_of(module: nn.Module) -> type[Any]:
    """Return the class that transformers has for an accelerated module."""
    return original_class(type(module).__name__)
