"""One token per row through a mixer in one call to the compiled kernels, in place on transformers' cache.

A program is recorded from a mixer when it is first needed, and again when anything it was recorded from has changed:
a submodule, its hooks, a parameter or its address, a number. If only the outer projections are not plain, as with
adapters, they are called as modules, and the program runs what lies between them.

§ transformers' caches: the window and the state of a layer, which have the layout of this library's own caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.core import anomaly
from anymamba.core.dtypes import is_autocast
from anymamba.core.hooks import GLOBAL_HOOKS
from anymamba.core.operators import is_eager_no_grad
from anymamba.core.registry import are_kernels_off
from anymamba.kernels.cpu.compiled_step import Recording
from anymamba.kernels.cpu.step_program import Program

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


class Recorded(NamedTuple):
    """What was recorded of a mixer.

    Attributes:
        whole: with the outer projections.
        core: without them, where there is no whole program.
    """

    whole: Recording
    core: Recording | None

    @property
    def program(self) -> Program | None:
        """The one that runs; None if there is none."""
        return self.whole.program if self.core is None else self.core.program

    @property
    def is_whole(self) -> bool:
        """Whether it has the outer projections too."""
        return self.core is None

    @property
    def reason(self) -> str:
        """Why there is no program, or why it is not whole."""
        return self.whole.reason if self.core is None or self.core.program is not None else self.core.reason

    def is_current(self) -> bool:
        """Whether the mixer is as it was."""
        return self.whole.is_current() and (self.core is None or self.core.is_current())


_RECORDED: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def recorded(mixer: AcceleratedMixer) -> Recorded:
    """The program of a mixer as it is now."""
    found = _RECORDED.get(mixer)
    if found is None or not found.is_current():
        found = _RECORDED[mixer] = _record(mixer)
    return found


def _record(mixer: AcceleratedMixer) -> Recorded:
    dtype = mixer.conv1d.weight.dtype
    weight = getattr(mixer.in_proj, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype

    def core(program: Program) -> None:
        program.write(mixer.describe_core(program, 0), mixer.intermediate_size)

    whole = Recording(lambda program: mixer.record(program, 0), dtype, mixer.hidden_size, dtype)
    if whole.program is not None:
        return Recorded(whole, None)
    return Recorded(whole, Recording(core, dtype, mixer.projected_width(), dtype))


def may_run(inputs: tuple[Tensor, ...]) -> bool:
    """Whether programs may run on these: nothing traces, casts, differentiates, checks or hooks the call."""
    if are_kernels_off() or is_autocast(inputs[0].device) or anomaly.is_check_finite_on() or any(GLOBAL_HOOKS):
        return False
    return is_eager_no_grad(inputs)


def advance(program: Program, x: Tensor, before: Sequence[Tensor]) -> Tensor | None:
    """Run over one token (b, d); the cache's own tensors advance. None if the program does not cover them."""
    done = program.run(x, before, in_place=True)
    if done is None:
        return None
    for old, new in zip(before, done[1], strict=True):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return done[0]


def step(mixer: AcceleratedMixer, x: Tensor, before: Carried) -> Tensor | None:
    """One token (b, 1, d) -> (b, 1, d); the cache's tensors advance. None if the operators must run."""
    if not may_run((x, *before)):
        return None
    found = recorded(mixer)
    if found.program is None:
        return None
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in mixer.parameters()):
        return None
    if found.is_whole:
        y = advance(found.program, x[:, 0], before)
        return None if y is None else y.unsqueeze(1)
    y = advance(found.program, mixer.project(x)[:, 0], before)
    return None if y is None else mixer.out_proj(y.unsqueeze(1))
