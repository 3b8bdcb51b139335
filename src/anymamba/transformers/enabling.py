"""Let `from_pretrained` and `from_config` build accelerated models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from anymamba.transformers import probe
from anymamba.transformers.architectures import ARCHITECTURES
from anymamba.transformers.mixer import NormKind
from anymamba.transformers.swap import accelerate, mixers

_DOORS = ("from_pretrained", "_from_config")
# The original functions.
_before: dict[str, Any] = {}


def enable(*, packing: bool = True, norm: NormKind = "transformers", check: bool = True) -> None:
    """From now on, accelerate every model that transformers loads or builds from a config.

    The arguments are those of `accelerate`. Existing models, and models that are constructed directly, are left alone.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    probe.require_transformers()
    from transformers import PreTrainedModel

    disable()
    options = {"packing": packing, "norm": norm, "check": check}
    for door in _DOORS:
        _before[door] = PreTrainedModel.__dict__[door]
        setattr(PreTrainedModel, door, classmethod(_accelerating(_before[door].__func__, options)))


def disable() -> None:
    """Undo `enable`; models that were accelerated stay accelerated."""
    if not _before:
        return
    from transformers import PreTrainedModel

    for door in _DOORS:
        setattr(PreTrainedModel, door, _before.pop(door))


def _accelerating(build: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def door(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        built = build(cls, *args, **kwargs)
        model = built[0] if isinstance(built, tuple) else built
        if isinstance(model, nn.Module) and any(type(mixer).__name__ in ARCHITECTURES for _, mixer in mixers(model)):
            accelerate(model, **options)
        return built

    return door
