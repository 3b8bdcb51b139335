"""One token per row through a mixer in one call to the compiled kernels, in place on transformers' cache.

If only the outer projections cannot be compiled, as with adapters, they are called as modules, and the compiled step
runs what is between them.

§ transformers' caches: the window and the state of a layer, which have the layout of this library's own caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from anymamba.kernels.compiled_step import CompiledStep, StepSource, compiled_step, may_run
from anymamba.kernels.step import StepBuilder

if TYPE_CHECKING:
    from anymamba.integrations.transformers.mixer import AcceleratedMixer


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


class MixerStep(NamedTuple):
    """The compiled step of a mixer.

    Attributes:
        step: The step, which may be one that cannot be compiled.
        is_whole: Whether it includes the outer projections.
        reason: Why there is no compiled step, or why it is not whole.
    """

    step: CompiledStep
    is_whole: bool
    reason: str


def compiled_mixer(mixer: AcceleratedMixer) -> MixerStep:
    """Return the step of a mixer as it is now."""
    dtype = mixer.conv1d.weight.dtype
    weight = getattr(mixer.in_proj, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype

    def core(builder: StepBuilder) -> None:
        builder.write(mixer.describe_core(builder, 0), mixer.intermediate_size)

    def whole(builder: StepBuilder) -> None:
        mixer.describe_step(builder, 0)

    step = compiled_step(mixer, lambda: StepSource(whole, mixer.hidden_size, dtype, dtype))
    if not step.reason:
        return MixerStep(step, True, "")
    inner = compiled_step(mixer, lambda: StepSource(core, mixer.projected_width(), dtype, dtype), part="core")
    return MixerStep(inner, False, inner.reason or step.reason)


def advance(step: CompiledStep, x: Tensor, before: Sequence[Tensor]) -> Tensor | None:
    """Run over one token (b, d); the cache's own tensors advance. None if the step does not cover them."""
    result = step.run(x, before, in_place=True)
    if result is None:
        return None
    y, after = result
    for old, new in zip(before, after, strict=True):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return y


def run_step(mixer: AcceleratedMixer, x: Tensor, before: Carried) -> Tensor | None:
    """Run over one token, (b, 1, d) to (b, 1, d); the cache's tensors advance. None if the operators must run."""
    if not may_run(mixer, (x, *before)):
        return None
    step, is_whole, _ = compiled_mixer(mixer)
    if step.executable is None:
        return None
    y = advance(step, x[:, 0] if is_whole else mixer.project(x)[:, 0], before)
    if y is None:
        return None
    return y.unsqueeze(1) if is_whole else mixer.out_proj(y.unsqueeze(1))
