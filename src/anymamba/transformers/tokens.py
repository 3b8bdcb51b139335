"""One token a row through a mixer in one call to the compiled kernels, in place on transformers' cache.

A program is recorded from a mixer when it is first needed, and again when anything it was recorded from has changed:
a submodule, its hooks, a parameter or where it lies, a number. Where only the outer projections are not plain, as with
adapters, they are called as modules, and the program runs what lies between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from anymamba.ground.numerics import is_autocast
from anymamba.ground.operators import is_plain, kernels_are_off
from anymamba.kernels.cpu.program import OUTPUT as OUTPUT
from anymamba.kernels.cpu.program import NotCovered, Program
from anymamba.transformers.caches import Carried

if TYPE_CHECKING:
    from anymamba.transformers.mixer import AcceleratedMixer


class _Child(NamedTuple):
    """A submodule as it was recorded."""

    name: str
    module: nn.Module
    kind: type[nn.Module]
    is_called: bool  # it runs as a module, and may have hooks

    def is_current(self, modules: dict[str, Any]) -> bool:
        found = self.module
        if modules.get(self.name) is not found or type(found) is not self.kind:
            return False
        return self.is_called or not (found._forward_hooks or found._forward_pre_hooks or "forward" in found.__dict__)


class _Value(NamedTuple):
    """A parameter or buffer as it was recorded."""

    owner: dict[str, Any]
    name: str
    tensor: Tensor
    address: int

    def is_current(self) -> bool:
        return self.owner.get(self.name) is self.tensor and self.tensor.data_ptr() == self.address


class Recorded(NamedTuple):
    """What was recorded of a mixer.

    Attributes:
        program: None if there is none.
        is_whole: whether it has the outer projections too.
        reason: why there is no program, or why it is not whole.
    """

    program: Program | None
    is_whole: bool
    reason: str
    children: tuple[_Child, ...]
    values: tuple[_Value, ...]
    constants: tuple[Any, ...]

    def is_current(self, mixer: AcceleratedMixer) -> bool:
        """Whether the mixer is as it was."""
        modules = mixer._modules
        return (
            all(child.is_current(modules) for child in self.children)
            and all(value.is_current() for value in self.values)
            and self.constants == mixer.constants()
        )


_RECORDED: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()


def recorded(mixer: AcceleratedMixer) -> Recorded:
    """The program of a mixer as it is now."""
    found = _RECORDED.get(mixer)
    if found is None or not found.is_current(mixer):
        found = _RECORDED[mixer] = _record(mixer)
    return found


def _record(mixer: AcceleratedMixer) -> Recorded:
    dtype, program, is_whole, reason = mixer.conv1d.weight.dtype, None, False, ""
    weight = getattr(mixer.in_proj, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype

    def core(program: Program) -> None:
        program.write(mixer.record_core(program, 0), mixer.intermediate_size)

    try:
        program = Program(lambda program: mixer.record(program, 0), dtype, mixer.hidden_size, dtype)
        is_whole = True
    except NotCovered as why:
        reason = str(why)
        try:
            program = Program(core, dtype, mixer.projected_width(), dtype)
        except NotCovered as why_not:
            reason = str(why_not)
    called = mixer.PROJECTIONS if not is_whole else ()
    children = tuple(
        _Child(name, child, type(child), name in called) for name, child in mixer._modules.items() if child is not None
    )
    values = tuple(
        _Value(owner, name, tensor, tensor.data_ptr())
        for module in (mixer, *(child.module for child in children if not child.is_called))
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    )
    return Recorded(program, is_whole, reason, children, values, mixer.constants())


def step(mixer: AcceleratedMixer, x: Tensor, before: Carried) -> Tensor | None:
    """One token (b, 1, d) -> (b, 1, d); the cache's tensors advance. None where the operators must run."""
    if kernels_are_off() or is_autocast(x.device) or not is_plain((x, *before)):
        return None
    found = recorded(mixer)
    if found.program is None or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in mixer.parameters()):
        return None
    if found.is_whole:
        done = found.program.run(x[:, 0], before, in_place=True)
        y = None if done is None else done[0]
    else:
        done = found.program.run(mixer.project(x)[:, 0], before, in_place=True)
        y = None if done is None else mixer.out_proj(done[0])
    if done is None or y is None:
        return None
    for old, new in zip(before, done[1], strict=True):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return y.unsqueeze(1)
