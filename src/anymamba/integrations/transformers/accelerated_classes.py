"""The classes of accelerated modules: each a subclass of the class of transformers whose name it has.

They are created on demand, by the name under which pickles find them: `classes.Mamba2Mixer`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from anymamba.integrations.transformers.architectures import ARCHITECTURES, STACKS, own_class
from anymamba.integrations.transformers.mamba1_mixer import AcceleratedMamba1
from anymamba.integrations.transformers.mamba2_mixer import AcceleratedMamba2
from anymamba.integrations.transformers.model_step import AcceleratedStack

_KINDS = {"mamba1": AcceleratedMamba1, "mamba2": AcceleratedMamba2}


def __getattr__(name: str) -> Any:
    """Make the class of that name."""
    if name in ARCHITECTURES:
        kind: type[Any] = _KINDS[ARCHITECTURES[name].kind]
        members: dict[str, Any] = {"ARCHITECTURE": ARCHITECTURES[name]}
    elif name in STACKS:
        kind, members = AcceleratedStack, {"STACK": STACKS[name]}
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = own_class(name)

    @functools.wraps(own.forward)  # its signature is inspected by others
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    members |= {"__module__": __name__, "__doc__": own.__doc__, "forward": forward}
    globals()[name] = made = type(name, (kind, own), members)
    return made


def accelerated_class(own: type[Any]) -> type[Any] | None:
    """The accelerated class of transformers' own class of a mixer or a model; None if there is none."""
    name = own.__name__
    if (name not in ARCHITECTURES and name not in STACKS) or own is not own_class(name):
        return None
    made: type[Any] = globals().get(name) or __getattr__(name)
    return made


def own_class_of(module: nn.Module) -> type[Any]:
    """transformers' own class of an accelerated module."""
    return own_class(type(module).__name__)
