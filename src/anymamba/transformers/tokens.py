"""One token per row through a mixer in one call to the compiled kernels, in place on transformers' cache.

A program is recorded from a mixer when it is first needed, and again when anything it was recorded from has changed:
a submodule, its hooks, a parameter or its address, a number. If only the outer projections are not plain, as with
adapters, they are called as modules, and the program runs what lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.ground import finite
from anymamba.ground.modules import GLOBAL_HOOKS
from anymamba.ground.numerics import is_autocast
from anymamba.ground.operators import is_plain, kernels_are_off
from anymamba.kernels.cpu.program import Program
from anymamba.kernels.cpu.recording import Recording
from anymamba.transformers.caches import Carried

if TYPE_CHECKING:
    from anymamba.transformers.mixer import AcceleratedMixer


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
        program.write(mixer.record_core(program, 0), mixer.intermediate_size)

    whole = Recording(lambda program: mixer.record(program, 0), dtype, mixer.hidden_size, dtype)
    if whole.program is not None:
        return Recorded(whole, None)
    return Recorded(whole, Recording(core, dtype, mixer.projected_width(), dtype))


def may_run(inputs: tuple[Tensor, ...]) -> bool:
    """Whether programs may run on these: nothing traces, casts, differentiates, checks or hooks the call."""
    if kernels_are_off() or is_autocast(inputs[0].device) or finite.is_checked() or any(GLOBAL_HOOKS):
        return False
    return is_plain(inputs)


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
