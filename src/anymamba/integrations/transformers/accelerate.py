"""Let `from_pretrained` and `from_config` build accelerated models.

§ Replace the mixers of a transformers model, and put the originals back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from anymamba.integrations.transformers import linear_layers, verify
from anymamba.integrations.transformers import packing as packed
from anymamba.integrations.transformers.accelerated_classes import accelerated_class, own_class_of
from anymamba.integrations.transformers.architectures import ARCHITECTURES, NOT_COVERED, STACKS, is_of_transformers
from anymamba.integrations.transformers.mixer import AcceleratedMixer, NormKind, Options
from anymamba.integrations.transformers.model_step import AcceleratedStack

_Model = TypeVar("_Model", bound=nn.Module)

# Why a mixer or a model was left as it is.
REFUSED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def accelerate(model: _Model, *, packing: bool = True, norm: NormKind = "transformers", check: bool = True) -> _Model:
    """Let the mixers of a model of transformers run on this library's operators, in place.

    Args:
        model: a model of transformers, or any module that holds some of its mixers.
        packing: read packed sequences (`seq_idx`, `cu_seq_lens_q`, or `position_ids` that restart where there is no
            mask) from the arguments of every call, for mixers to which transformers does not pass them.
        norm: what the norm before `out_proj` covers with several groups: "transformers" keeps what the installed
            version computes, "official" normalizes each group, as Codestral and others were trained.
        check: compare one mixer of each class with its own forward on a few tokens, and leave those that differ.

    Returns:
        The model itself. `restore` undoes it; `report` says which layer runs how.

    Raises:
        ImportError: transformers is not installed, or too old.
        TypeError: not a module.
        ValueError: the model has no mixer of transformers, or `norm` is something else.
    """
    verify.require_transformers()
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be a torch module, got {type(model).__name__}")
    if norm not in ("transformers", "official"):
        raise ValueError(f'accelerate: norm must be "transformers" or "official", got {norm!r}')
    found = list(mixers(model))
    if not found:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"accelerate: {type(model).__name__} has none of transformers' Mamba mixers ({known})")
    refused = _exchange([mixer for _, mixer in found], Options(norm=norm), check)
    for name, reason in refused.items():
        warnings.warn(f"accelerate: {name} runs transformers' own forward: {reason}", stacklevel=2)
    devices = {str(p.device.type) for _, mixer in found for p in mixer.parameters()}
    if devices - {"cpu"}:
        found_on = ", ".join(sorted(devices))
        message = (
            f"accelerate: the mixers are on {found_on}; transformers' own forward runs on every device except the CPU"
        )
        warnings.warn(message, stacklevel=2)
    for host in _hosts(model):
        packed.remove(host)
        if packing:
            packed.install(host)
        linear_layers.exchange(host, {part for _, mixer in found for part in mixer.modules()})
    _exchange_stacks(model, check)
    return model


def restore(model: _Model) -> _Model:
    """Undo `accelerate`, in place: every mixer computes the same bits as before.

    Raises:
        TypeError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore: model must be a torch module, got {type(model).__name__}")
    for module in model.modules():
        packed.remove(module)
        if isinstance(module, AcceleratedMixer | AcceleratedStack):
            _change_back(module)
    linear_layers.change_back(model)
    return model


def mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every mixer of transformers in a model, accelerated or not, with its name."""
    for name, module in model.named_modules():
        kind = type(module)
        is_known = is_of_transformers(kind) and (kind.__name__ in ARCHITECTURES or kind.__name__ in NOT_COVERED)
        if is_known or isinstance(module, AcceleratedMixer):
            yield name, module


def _exchange(found: list[nn.Module], options: Options, check: bool) -> dict[str, str]:
    """Change the classes; returns the classes that were refused, and why."""
    refused: dict[str, str] = {}
    checked: set[type[Any]] = set()
    for mixer in found:
        is_new = not isinstance(mixer, AcceleratedMixer)
        own = type(mixer) if is_new else own_class_of(mixer)
        accelerated = accelerated_class(own)
        if accelerated is None:
            reason = NOT_COVERED.get(own.__name__, "a class of another package has this name")
            refused[own.__name__] = REFUSED[mixer] = reason
            continue
        mixer.__class__ = accelerated
        assert isinstance(mixer, AcceleratedMixer)
        mixer._anymamba = options
        if check and own not in checked:
            checked.add(own)
            if reason := verify.difference(mixer):
                refused[own.__name__] = reason
    for mixer in found:
        if isinstance(mixer, AcceleratedMixer) and (name := type(mixer).__name__) in refused:
            _change_back(mixer)
            REFUSED[mixer] = refused[name]
        elif isinstance(mixer, AcceleratedMixer):
            REFUSED.pop(mixer, None)
    return refused


def _exchange_stacks(model: nn.Module, check: bool) -> None:
    """Let a token of the models that are nothing but mixers run in one call."""
    for module in model.modules():
        if type(module).__name__ not in STACKS or isinstance(module, AcceleratedStack):
            continue
        accelerated = accelerated_class(type(module))
        if accelerated is None or not all(isinstance(mixer, AcceleratedMixer) for _, mixer in mixers(module)):
            continue
        reason = verify.difference_of_stack(module, accelerated) if check else ""
        if reason:
            REFUSED[module] = reason
            message = f"accelerate: a token of {type(module).__name__} runs mixer by mixer: {reason}"
            warnings.warn(message, stacklevel=3)
        else:
            REFUSED.pop(module, None)
            module.__class__ = accelerated


def _change_back(module: Any) -> None:
    module.__dict__.pop("_anymamba", None)
    module.__class__ = own_class_of(module)


def _hosts(model: nn.Module) -> list[nn.Module]:
    """The models of transformers that hold an accelerated mixer, whose calls are read for packed sequences."""
    from transformers import PreTrainedModel

    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(isinstance(m, AcceleratedMixer) for m in module.modules())
    ]


_DOORS = ("from_pretrained", "_from_config")
# The original functions.
_before: dict[str, Any] = {}


def enable(*, packing: bool = True, norm: NormKind = "transformers", check: bool = True) -> None:
    """From now on, accelerate every model that transformers loads or builds from a config.

    The arguments are those of `accelerate`. Existing models, and models that are constructed directly, are left alone.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    verify.require_transformers()
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
