"""The device-neutral description of one decode step: one token of each row through a block or a model.

A module describes its step to a `StepBuilder` (its method `describe_step`), which collects *phases* over *slots*. Slots
are columns of a matrix with one row per token; a phase reads some slots and writes others. Parameters are
read in place, in the dtype they have; everything in between is `acc_dtype`: float32, or float64 for float64. The
result, a `StepProgram`, is plain data: a device's compiler (`kernels/<device>/`) makes it executable, and
`kernels/compiled_step.py` decides when it runs.

A step may take a *window*, several consecutive tokens of each sequence, bit for bit as one at a time: phases of
`ROW_KINDS` take each row on its own, those of `SEQUENCE_KINDS` carry something in the cache from row to row. A window
whose accepted length is decided later leaves the cache as it is; then the phases of `SEQUENCE_KINDS` run again over the
accepted rows. For this, a program that `keeps_slots` never uses a slot twice, so that these phases find what they read.
A step with a phase of any other kind takes one token at a time. `kernels/cpu/__init__.py` says how to add a phase.

The kinds of phases and their fields (slots are integers, -1 for none; parameters are tensors, None for none):

| kind | fields |
|---|---|
| read, write | width slot: slot = input; output = slot |
| norm | width group_size norm_before_gate eps x z to weight: RMS norm, with a gate if z is a slot |
| gate | width x z to: to = x silu(z) |
| scale | width x to factor weight: to = factor x, times `weight` per channel |
| linear | in out x to add weight format scale bias: to = x weightᵀ + bias, or added to `to` |
| conv | channels width x to cache_window weight bias: causal convolution with SiLU |
| mamba1 | channels state x dt z b c to cache_state a_log skip |
| mamba2 | heads head_width groups state skip_per_channel dt_min dt_max dt act to cache_state dt_bias a_log skip |
| attention | heads groups head_width rotated interleaved window scale softcap x to cache_kv cache_lengths frequencies |
| mamba3_tokens, mamba3_heads | see `Mamba3.describe_core` |
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import GLOBAL_HOOKS
from anymamba.core.weight_formats import QuantizedWeight, storage_layout

OUTPUT = -1  # in place of a slot
ROW_KINDS = frozenset({"read", "write", "norm", "gate", "scale", "linear", "mamba3_tokens"})
SEQUENCE_KINDS = frozenset({"conv", "mamba1", "mamba2", "mamba3_heads"})
_ALIGNMENT = 16  # elements between the beginnings of slots: a cache line of float32
_PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NotCoveredError(Exception):
    """Why a step cannot be compiled: only the module's own code knows how to run."""


class Phase(NamedTuple):
    """One computation of a step."""

    kind: str  # from the table at the top of this file
    fields: dict[str, Any]  # slots, sizes, numbers, names of options, and parameters as tensors, None for an absent one


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A described step."""

    phases: tuple[Phase, ...]  # in the order in which they run
    cache: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of each tensor: shape without the batch, and dtype
    width: int  # of all slots together
    input_width: int  # channels that the first phase reads into slot 0
    output_width: int
    dtype: torch.dtype  # of the output, and of the activations that a cache holds
    input_dtype: torch.dtype
    device: torch.device  # of the parameters
    storages: tuple[Any, ...]  # of the parameters, whose memory must not be reused while the program lives
    keeps_slots: bool = False  # whether each slot is used once
    growing: tuple[tuple[int, int], ...] = ()  # tensors of the cache that grow, each with that of its rows' lengths

    @property
    def takes_windows(self) -> bool:
        """Return whether every phase is of a kind that takes windows."""
        return not self.single_token_kinds()

    def single_token_kinds(self) -> list[str]:
        """Return the kinds of phases that take one token at a time."""
        return sorted({phase.kind for phase in self.phases} - ROW_KINDS - SEQUENCE_KINDS)


class ModuleWatcher:
    """Detects changes of the modules that a step was described from.

    It watches types, hooks, submodules, parameters and their addresses, attributes that were read, and the number of
    all attributes. Values of parameters are not watched: they are read in place. Everything is kept in flat lists,
    because it is compared for every token.

    Args:
        root: The module whose step is described. Only weakly referenced, so that steps may be stored by module.
    """

    def __init__(self, root: nn.Module) -> None:
        """Watch the type of the root, and torch's global hooks."""
        self._root = weakref.ref(root)
        self._root_type = type(root)
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._entries: list[Any] = []
        self._modules: list[nn.Module] = []
        self._members: list[Sized] = [*GLOBAL_HOOKS]
        self._parameters: list[Tensor] = []
        self._seen = self._look()

    def entry(self, owner: dict[str, Any], name: str) -> Any:
        """Return `owner[name]`, or None, and watch it."""
        value = owner.get(name)
        self._owners.append(owner)
        self._names.append(name)
        self._entries.append(value)
        return value

    def module(self, module: nn.Module) -> None:
        """Watch a module's type, and how many hooks, submodules, parameters and other attributes it has."""
        if module is not self._root():
            self._modules.append(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        self._members += [*hooks, module._modules, module._parameters, vars(module)]

    def parameter(self, x: Tensor) -> None:
        """Watch the address of a parameter."""
        self._parameters.append(x)

    def take_snapshot(self) -> None:
        """Remember the present state as the one to compare with."""
        self._seen = self._look()

    def is_unchanged(self) -> bool:
        """Return whether everything watched is as it was at the snapshot."""
        return (
            all(map(operator.is_, map(dict.get, self._owners, self._names), self._entries))
            and type(self._root()) is self._root_type
            and self._look() == self._seen
        )

    def _look(self) -> tuple[list[int], list[type], list[int]]:
        return (
            list(map(len, self._members)),
            list(map(type, self._modules)),
            list(map(Tensor.data_ptr, self._parameters)),
        )


class StepBuilder:
    """Collects the phases of a step, its slots, its parameters, and the tensors of the cache.

    The watcher watches what the description depends on; the other arguments are those of `StepProgram`.

    Attributes:
        acc_dtype: Dtype of slots and states: float32, or float64 for float64.
    """

    def __init__(
        self,
        watcher: ModuleWatcher,
        dtype: torch.dtype,
        input_width: int,
        input_dtype: torch.dtype,
        device: torch.device,
        keeps_slots: bool = False,
    ) -> None:
        """Begin with the phase that reads the input."""
        self.dtype = dtype
        self.acc_dtype = state_dtype(dtype)
        self.input_width = input_width
        self.output_width = 0
        self._input_dtype = input_dtype
        self._device = device
        self._watcher = watcher
        self._phases: list[Phase] = []
        self._cache: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._storages: list[Any] = []
        self._growing: list[tuple[int, int]] = []
        self._keeps_slots = keeps_slots
        self._next_slot = 0
        self._width = 0
        is_double = self.acc_dtype == torch.float64
        self._parameter_dtypes = (torch.float64,) if is_double else _PARAMETER_DTYPES
        self.phase("read", width=input_width, slot=self.slot(input_width))

    def build(self) -> StepProgram:
        """Return the program."""
        return StepProgram(
            phases=tuple(self._phases),
            cache=tuple(self._cache),
            width=self._width,
            input_width=self.input_width,
            output_width=self.output_width,
            dtype=self.dtype,
            input_dtype=self._input_dtype,
            device=self._device,
            storages=tuple(self._storages),
            keeps_slots=self._keeps_slots,
            growing=tuple(self._growing),
        )

    # Validating modules

    def reject(self, reason: str) -> NoReturn:
        """Raise `NotCoveredError`: the step cannot be compiled, for this reason."""
        raise NotCoveredError(reason)

    def check_unmodified(self, module: Any, kind: type, name: str = "", allowed_hooks: Collection[Any] = ()) -> None:
        """Reject a module that is not exactly a `kind`, or has hooks (but `allowed_hooks`) or patched methods."""
        name = name or type(module).__name__
        if isinstance(module, nn.Module):
            self._watcher.module(module)
        if type(module) is not kind:
            self.reject(f"{name} is a {type(module).__name__}, not a {kind.__name__}")
        checked: Any = module  # for mypy, which takes `type(module) is not kind` for the end of it
        hooks = (*checked._forward_hooks.values(), *checked._forward_pre_hooks.values())
        if any(GLOBAL_HOOKS) or any(hook not in allowed_hooks for hook in hooks):
            self.reject(f"{name} has hooks")
        if any(callable(getattr(kind, member, None)) for member in vars(module)):
            self.reject(f"{name} has methods of its own")

    def submodule(self, owner: nn.Module, name: str, kind: type) -> Any:
        """Return an unmodified submodule."""
        module = self._watcher.entry(owner._modules, name)
        self.check_unmodified(module, kind, name)
        return module

    def attribute(self, owner: nn.Module, name: str) -> Any:
        """Return an attribute of a module, such as an epsilon, and watch it."""
        return self._watcher.entry(vars(owner), name)

    def watch(self, owner: nn.Module, *names: str) -> None:
        """Describe the step again when one of these attributes of a module is another object."""
        for name in names:
            self._watcher.entry(vars(owner), name)

    # Slots, caches and parameters

    def slot(self, width: int) -> int:
        """Return a new slot."""
        slot = self._next_slot
        self._next_slot += -(-width // _ALIGNMENT) * _ALIGNMENT
        self._width = max(self._width, self._next_slot)
        return slot

    def release(self, slot: int) -> None:
        """Let `slot` and all slots created after it be used again, unless the program keeps them."""
        if not self._keeps_slots:
            self._next_slot = slot

    def cache_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        """Return the number of the next tensor of the cache, (b, *shape), in the dtype of activations by default."""
        self._cache.append((shape, dtype or self.dtype))
        return len(self._cache) - 1

    def mark_growing(self, tensor: int, lengths: int) -> None:
        """Let a tensor of the cache grow with the sequence: it is (b, steps, *shape), as far as `lengths` (b,) says."""
        self._growing.append((tensor, lengths))

    def parameter(self, owner: nn.Module, name: str, *shape: int, optional: bool = False) -> Tensor | None:
        """Return a parameter of a module, to be read in place; None for an optional parameter that is absent."""
        x = self._watcher.entry(owner._parameters, name)
        if x is None and optional:
            return None
        return self._read_in_place(x, name, shape, self._parameter_dtypes)

    def buffer(self, owner: nn.Module, name: str, *shape: int) -> Tensor:
        """Return a buffer of a module, to be read in place."""
        x = self._watcher.entry(owner._buffers, name)
        return self._read_in_place(x, name, shape, self._parameter_dtypes, Tensor)

    def _read_in_place(
        self, x: Any, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], kind: type = nn.Parameter
    ) -> Tensor:
        """Check that a tensor can be read where it is stored."""
        if isinstance(x, Tensor) and type(x) is kind:
            self._watcher.parameter(x)
        if not isinstance(x, Tensor) or type(x) is not kind or x.device != self._device or x.dtype not in dtypes:
            self.reject(f"{name} must be a {kind.__name__.lower()} on {self._device}, of one of {dtypes}")
        if x.shape != shape or not x.is_contiguous() or x.is_neg() or not x.data_ptr():
            self.reject(f"{name} must be contiguous, of shape {shape}")
        self._storages.append(x.untyped_storage())
        return x.detach()

    # Phases

    def phase(self, kind: str, **fields: Any) -> None:
        """Add a phase."""
        self._phases.append(Phase(kind, fields))

    def linear(
        self,
        x: int,
        owner: nn.Module,
        name: str,
        width: int,
        out: int,
        *,
        to: int | None = None,
        add: bool = False,
        kind: type[nn.Linear] = nn.Linear,
        factor: float = 1.0,
    ) -> int:
        """Apply a submodule, a projection from `width` to `out` channels, to slot `x`; return the slot of the result.

        The result replaces what is in slot `to` (a new one by default) or `OUTPUT`, or is added to it. The projection
        must be a `kind`, unless it is quantized. A `factor` multiplies the result, by scaling slot `x` in place.
        """
        if isinstance(quantized := owner._modules.get(name), QuantizedWeight):
            fields = self._quantized_weight(owner, name, type(quantized), out, width)
        else:
            fields = self.dense_weight(self.submodule(owner, name, kind), out, width, name)
        to = self.slot(out) if to is None else to
        if factor != 1:
            if fields["bias"] is not None:
                self.reject(f"{name} has a bias, and its result is multiplied by {factor}")
            self.scale(x, width, factor=factor, to=x)
        self.matmul(x, width, out, fields, to=to, add=add)
        return to

    def dense_weight(self, linear: nn.Linear, out: int, width: int, name: str = "weight") -> dict[str, Any]:
        """Return the fields of a projection whose weight has the dtype of the activations."""
        fields = {"weight": self.parameter(linear, "weight", out, width)}
        fields["bias"] = self.parameter(linear, "bias", out, optional=True)
        if linear.weight.dtype != self.dtype:
            self.reject(f"{name} is {linear.weight.dtype}, not {self.dtype}")
        return fields

    def matmul(self, x: int, width: int, out: int, fields: dict[str, Any], *, to: int, add: bool = False) -> None:
        """Multiply slot `x` by the weight in `fields`, into slot `to` or added to it."""
        if to == OUTPUT:
            self.output_width = out
        self.phase("linear", **{"in": width}, out=out, x=x, to=to, add=add, **fields)

    def _quantized_weight(
        self, owner: nn.Module, name: str, kind: type[QuantizedWeight], out: int, width: int
    ) -> dict[str, Any]:
        """Return the fields of a projection whose weight is quantized."""
        linear = self.submodule(owner, name, kind)
        if "HAS_COMPILED_FORWARD" not in vars(kind) or self.acc_dtype == torch.float64:
            self.reject(f"{name} is a {kind.__name__} in {linear.format}, for activations of {self.dtype}")
        fields: dict[str, Any] = {"bias": self.parameter(linear, "bias", out, optional=True), "format": linear.format}
        for part, (shape, dtype) in storage_layout(linear.format, out, width).items():
            x = self._watcher.entry(linear._parameters, part)
            field = "scale" if part == "scales" else part
            fields[field] = self._read_in_place(x, f"{name}.{part}", shape, (dtype,))
        return fields

    def norm(
        self,
        x: int,
        norm: Any,
        width: int,
        *,
        z: int = -1,
        to: int | None = None,
        eps: float | None = None,
        group_size: int | None = None,
        norm_before_gate: bool | None = None,
    ) -> int:
        """Apply an RMS norm, gated if `z` is a slot; return the slot of the result, which may be `x`.

        Args:
            x: Slot of the input.
            norm: Module whose weight is used; None for a norm without weights.
            width: Channels.
            z: Slot of the gates; negative for none.
            to: Slot of the result; a new one by default.
            eps: The module's by default, like the next two for a gated norm.
            group_size: Channels that are normalized together; without a gate, all by default.
            norm_before_gate: Whether the norm comes before the gate.
        """
        to = self.slot(width) if to is None else to
        is_gated = z >= 0
        if group_size is None:
            group_size = self.attribute(norm, "group_size") if is_gated else width
        if norm_before_gate is None:
            norm_before_gate = is_gated and self.attribute(norm, "norm_before_gate")
        if group_size < 1 or width % group_size:
            self.reject(f"groups of {group_size} do not divide the {width} channels")
        self.phase(
            "norm",
            width=width,
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            eps=self.attribute(norm, "eps") if eps is None else eps,
            x=x,
            z=z,
            to=to,
            weight=None if norm is None else self.parameter(norm, "weight", width),
        )
        return to

    def scale(self, x: int, width: int, *, factor: int | float = 1.0, weight: Any = None, to: int | None = None) -> int:
        """Multiply by `factor`, and per channel by `weight` (from `parameter` or `buffer`) if it is given."""
        to = self.slot(width) if to is None else to
        self.phase("scale", width=width, x=x, to=to, factor=factor, weight=weight)
        return to

    def gate(self, x: int, z: int, width: int, *, to: int | None = None) -> int:
        """Compute `x silu(z)`."""
        to = self.slot(width) if to is None else to
        self.phase("gate", width=width, x=x, z=z, to=to)
        return to

    def conv(self, x: int, conv: nn.Module, channels: int, width: int) -> int:
        """Apply a causal convolution with SiLU, whose window is the next tensor of the cache."""
        to = self.slot(channels)
        self.phase(
            "conv",
            channels=channels,
            width=width,
            x=x,
            to=to,
            cache_window=self.cache_tensor(channels, width),
            weight=self.parameter(conv, "weight", channels, 1, width),
            bias=self.parameter(conv, "bias", channels, optional=True),
        )
        return to

    def write(self, slot: int, width: int) -> None:
        """Return a slot as the output."""
        self.output_width = width
        self.phase("write", width=width, slot=slot)
