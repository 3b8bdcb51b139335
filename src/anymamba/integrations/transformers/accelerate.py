"""Replace the mixers of a transformers model, check them against the originals, and restore the originals.

`enable` does so for every model that transformers loads or builds from a config.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.integrations.transformers import linear_layers
from anymamba.integrations.transformers import packing as packing_hooks
from anymamba.integrations.transformers.accelerated_classes import accelerated_class, original_class_of
from anymamba.integrations.transformers.architectures import (
    ARCHITECTURES,
    NOT_COVERED,
    STACKS,
    is_of_transformers,
    require_transformers,
)
from anymamba.integrations.transformers.mixer import AcceleratedMixer, NormKind, Options
from anymamba.integrations.transformers.model_step import AcceleratedStack, compiled_stack

_Model = TypeVar("_Model", bound=nn.Module)

_CHECKED_TOKENS = 7
# Largest difference from the forward of transformers, relative to its largest output.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

# Why a mixer or a model was left as it is.
REJECTED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def accelerate(model: _Model, *, packing: bool = True, norm: NormKind = "transformers", check: bool = True) -> _Model:
    """Let the mixers of a model of transformers run on this library's operators, in place.

    Args:
        model: Model of transformers, or any module that holds some of its mixers.
        packing: Whether to read packed sequences (`seq_idx`, `cu_seq_lens_q`, or `position_ids` that restart where
            there is no mask) from the arguments of every call, for mixers to which transformers does not pass them.
        norm: Scope of the norm before `out_proj` with several groups: "transformers" keeps that of the installed
            version, "official" normalizes each group, as in the training of Codestral and others.
        check: Whether to compare one mixer of each class with its own forward on a few tokens, and to leave classes
            that differ.

    Returns:
        The model itself. `restore` undoes it; `report` describes how each layer runs.

    Raises:
        ImportError: transformers is not installed, or too old.
        TypeError: The argument is not a module.
        ValueError: The model has no mixer of transformers, or `norm` is invalid.
    """
    require_transformers()
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be a torch module, got {type(model).__name__}")
    if norm not in ("transformers", "official"):
        raise ValueError(f'accelerate: norm must be "transformers" or "official", got {norm!r}')
    # 1) The mixers.
    own_mixers = [mixer for _, mixer in mixers(model)]
    if not own_mixers:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"accelerate: {type(model).__name__} has none of transformers' Mamba mixers ({known})")
    rejected = _replace_mixers(own_mixers, Options(norm=norm), check)
    for name, reason in rejected.items():
        warnings.warn(f"accelerate: {name} runs transformers' own forward: {reason}", stacklevel=2)
    devices = {str(parameter.device.type) for mixer in own_mixers for parameter in mixer.parameters()}
    if devices - {"cpu"}:
        message = (
            f"accelerate: the mixers are on {', '.join(sorted(devices))}; transformers' own forward runs on every "
            "device except the CPU"
        )
        warnings.warn(message, stacklevel=2)
    # 2) Packed sequences and large projections of the models that hold them.
    for host in _models_with_mixers(model):
        packing_hooks.remove(host)
        if packing:
            packing_hooks.install(host)
        linear_layers.replace_linears(host, {part for mixer in own_mixers for part in mixer.modules()})
    # 3) Models that consist of mixers only.
    _replace_stacks(model, check)
    return model


def restore(model: _Model) -> _Model:
    """Undo `accelerate`, in place: every mixer computes the same bits as before.

    Raises:
        TypeError: The argument is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore: model must be a torch module, got {type(model).__name__}")
    for module in model.modules():
        packing_hooks.remove(module)
        if isinstance(module, AcceleratedMixer | AcceleratedStack):
            _restore_class(module)
    linear_layers.restore_linears(model)
    return model


def mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every mixer of transformers in a model, accelerated or not, with its name."""
    for name, module in model.named_modules():
        kind = type(module)
        is_known = is_of_transformers(kind) and (kind.__name__ in ARCHITECTURES or kind.__name__ in NOT_COVERED)
        if is_known or isinstance(module, AcceleratedMixer):
            yield name, module


def _replace_mixers(own_mixers: list[nn.Module], options: Options, check: bool) -> dict[str, str]:
    """Change the classes of mixers; return the classes that were left as they are, each with the reason."""
    rejected: dict[str, str] = {}
    checked: set[type[Any]] = set()
    for mixer in own_mixers:
        original = original_class_of(mixer) if isinstance(mixer, AcceleratedMixer) else type(mixer)
        accelerated = accelerated_class(original)
        if accelerated is None:
            reason = NOT_COVERED.get(original.__name__, "a class of another package has this name")
            rejected[original.__name__] = reason
            REJECTED[mixer] = reason
            continue
        mixer.__class__ = accelerated
        assert isinstance(mixer, AcceleratedMixer)
        mixer._anymamba = options
        if check and original not in checked:
            checked.add(original)
            if reason := compare_mixer(mixer):
                rejected[original.__name__] = reason
    for mixer in own_mixers:
        if isinstance(mixer, AcceleratedMixer) and (name := type(mixer).__name__) in rejected:
            _restore_class(mixer)
            REJECTED[mixer] = rejected[name]
        elif isinstance(mixer, AcceleratedMixer):
            REJECTED.pop(mixer, None)
    return rejected


def _replace_stacks(model: nn.Module, check: bool) -> None:
    """Change the classes of models that consist of mixers only, so that a token runs in one call."""
    for module in model.modules():
        if type(module).__name__ not in STACKS or isinstance(module, AcceleratedStack):
            continue
        accelerated = accelerated_class(type(module))
        if accelerated is None or not all(isinstance(mixer, AcceleratedMixer) for _, mixer in mixers(module)):
            continue
        reason = compare_stack(module, accelerated) if check else ""
        if reason:
            REJECTED[module] = reason
            message = f"accelerate: a token of {type(module).__name__} runs mixer by mixer: {reason}"
            warnings.warn(message, stacklevel=3)
        else:
            REJECTED.pop(module, None)
            module.__class__ = accelerated


def _restore_class(module: Any) -> None:
    module.__dict__.pop("_anymamba", None)
    module.__class__ = original_class_of(module)


def _models_with_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the models of transformers that hold an accelerated mixer."""
    from transformers import PreTrainedModel

    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(isinstance(m, AcceleratedMixer) for m in module.modules())
    ]


_PATCHED = ("from_pretrained", "_from_config")
_ORIGINALS: dict[str, Any] = {}  # the methods of `PreTrainedModel` that `enable` replaced


def enable(*, packing: bool = True, norm: NormKind = "transformers", check: bool = True) -> None:
    """From now on, accelerate every model that transformers loads or builds from a config.

    The arguments are those of `accelerate`. Existing models, and models that are constructed directly, do not change.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    require_transformers()
    from transformers import PreTrainedModel

    disable()
    options = {"packing": packing, "norm": norm, "check": check}
    for name in _PATCHED:
        _ORIGINALS[name] = PreTrainedModel.__dict__[name]
        setattr(PreTrainedModel, name, classmethod(_accelerate_result(_ORIGINALS[name].__func__, options)))


def disable() -> None:
    """Undo `enable`; models that were accelerated stay accelerated."""
    if not _ORIGINALS:
        return
    from transformers import PreTrainedModel

    for name in _PATCHED:
        setattr(PreTrainedModel, name, _ORIGINALS.pop(name))


def _accelerate_result(build: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_accelerated(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        result = build(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, nn.Module) and any(type(mixer).__name__ in ARCHITECTURES for _, mixer in mixers(model)):
            accelerate(model, **options)
        return result

    return build_accelerated


@torch.no_grad()
def compare_mixer(mixer: AcceleratedMixer) -> str:
    """Return how a mixer differs from the forward of transformers on a few tokens; empty if it agrees."""
    weight = mixer.conv1d.weight
    if weight.device.type != "cpu":
        return ""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, _CHECKED_TOKENS, mixer.hidden_size, generator=generator).to(weight.dtype)
    if mixer.reason_for_fallback(x):
        return ""
    try:
        expected = original_class_of(mixer).forward(mixer, x)
        options = mixer._anymamba
        mixer._anymamba = Options()
        try:
            actual = type(mixer).forward(mixer, x)
        finally:
            mixer._anymamba = options
    except Exception as error:
        return f"the comparison with transformers' own forward failed: {_first_line(error)}"
    return _compare(actual, expected, weight.dtype)


@torch.no_grad()
def compare_stack(stack: Any, accelerated: type[Any]) -> str:
    """Return how one token of a model in one call differs from its own forward, with two layers; empty if it agrees."""
    shortened, original, weight = copy.copy(stack), type(stack), stack.norm_f.weight
    two_layers = {**stack._modules, "layers": nn.ModuleList(stack.layers[:2])}
    shortened.__dict__ |= {"_modules": two_layers, "training": False}
    x = torch.tensor([[1], [2], [0]]) % stack.config.vocab_size
    if weight.device.type != "cpu":
        return ""
    try:
        cache = original.forward(shortened, x.repeat(1, 3), use_cache=True, return_dict=True).cache_params
        branch = copy.deepcopy(cache)
        expected = original.forward(shortened, x, cache_params=cache, return_dict=True)
        shortened.__class__ = accelerated
        if compiled_stack(shortened).executable is None:
            return ""
        actual = accelerated.forward(shortened, x, cache_params=branch, return_dict=True)
    except Exception as error:
        return f"the comparison with transformers' own forward failed: {_first_line(error)}"
    return _compare(actual.last_hidden_state, expected.last_hidden_state, weight.dtype)


def _compare(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    if actual.shape != expected.shape:
        return f"its output has shape {tuple(actual.shape)}, transformers' own {tuple(expected.shape)}"
    is_finite = torch.isfinite(actual)
    if not (is_finite.all() and torch.isfinite(expected).all()):
        return "" if bool((is_finite == torch.isfinite(expected)).all()) else "its outputs are not finite"
    gap = (actual.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    if gap <= _TOLERANCE.get(dtype, 5e-2) * size:
        return ""
    return f"its outputs differ from transformers' own by {gap:.2g}, where the largest is {size:.2g}"


def _first_line(error: Any) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
