"""One token through a block or a whole model in one call to the compiled kernels.

A program is recorded from modules once: phases over *slots*, which are columns of a matrix with one row a token. Its
phases read parameters where they lie and in the dtype they have; everything between them is float32, or float64 for
float64. It has no gradient and is not traced: where either is asked for, the modules are called as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import (
    ConvPhase,
    EdgePhase,
    GatePhase,
    LinearPhase,
    Mamba1Phase,
    Mamba2Phase,
    Mamba3Phase,
    NormPhase,
    Parameter,
    Phase,
    ProgramArgs,
)
from anymamba.kernels.watch import NotCovered, Watch
from anymamba.operators import is_plain

MAX_ROWS = 64  # beyond, a matrix product is no longer bound by memory, and torch's own is the faster one
OUTPUT = -1  # in place of a slot
_ALIGNED = 16  # elements

_CPU = torch.device("cpu")
# `PhaseKind` of csrc/decode_args.h; Mamba-3 has two phases, which share one structure.
_READ, _NORM, _GATE, _LINEAR, _CONV, _MAMBA2, _MAMBA3, _MAMBA1, _WRITE = 0, 1, 2, 3, 4, 5, (6, 7), 8, 9


class Program:
    """Phases, the slots between them, and the tensors of a cache that they read and write.

    Args:
        dtype: of the output, and of the activations that a cache holds.
        input_width: channels of the input.
        input_dtype: of the input.
    """

    def __init__(self, dtype: torch.dtype, input_width: int, input_dtype: torch.dtype) -> None:
        """Start with the input in slot 0."""
        self.dtype, self.input_width, self.input_dtype = dtype, input_width, input_dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.watch = Watch()
        self.output_width = 0
        self.covers = True  # whether there are phases for everything
        self._phases: list[tuple[int, ctypes.Structure]] = []
        self._next = self._width = 0
        self._cache: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._expected: dict[int, list[Any]] = {}
        self._table: Any = None
        self._add(_READ, EdgePhase(width=input_width, slot=self.slot(input_width)))

    @staticmethod
    def recorded(record: Callable[[Program], None], dtype: torch.dtype, x: Tensor) -> Program:
        """What `record` makes for inputs like `x`; it covers nothing if that raises `NotCovered`."""
        program = Program(dtype, x.shape[-1], x.dtype)
        try:
            record(program)
        except NotCovered:
            program.covers = False
        program.watch.close()
        phases = ((kind, ctypes.addressof(phase)) for kind, phase in program._phases)
        program._table = (Phase * len(program._phases))(*(Phase(*phase) for phase in phases))
        return program

    def serves(self, dtype: torch.dtype, x: Tensor) -> bool:
        """Whether it was recorded for inputs like `x`, from modules that are still as they were."""
        recorded, asked = (self.dtype, self.input_width, self.input_dtype), (dtype, x.shape[-1], x.dtype)
        return recorded == asked and self.watch.holds()

    # Recording

    def slot(self, width: int) -> int:
        """A new slot."""
        slot = self._next
        self._next += -(-width // _ALIGNED) * _ALIGNED
        self._width = max(self._width, self._next)
        return slot

    def release(self, slot: int) -> None:
        """Let `slot` and all slots made after it be used again."""
        self._next = slot

    def cached(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        """The next tensor of the cache, (b, *shape); of the activations' dtype if none is given."""
        self._cache.append((shape, dtype or self.dtype))
        return len(self._cache) - 1

    def parameter(self, owner: nn.Module, name: str, *shape: int, optional: bool = False) -> Parameter:
        """A parameter of a module, read where it lies; where an optional one is None, none."""
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        x = self.watch.parameter(owner, name, (self.wide,) if self.wide == torch.float64 else narrow)
        if x is None and optional:
            return Parameter()
        if x is None or x.shape != shape:
            raise NotCovered
        return Parameter(data=x.data_ptr(), dtype=library.dtype_code(x.dtype))

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
    ) -> int:
        """The submodule `name`, a projection, applied to slot `x`: in a new slot, or in `to`, or added to it.

        Args:
            x: slot of the input.
            owner: of the submodule.
            name: of the submodule.
            width: of the input.
            out: width of the output.
            to: where the output goes.
            add: add to what is there.
            kind: its type.
        """
        linear = self.watch.child(owner, name, kind)
        weight, bias = self.parameter(linear, "weight", out, width), self.parameter(linear, "bias", out, optional=True)
        if linear.weight.dtype != self.dtype:
            raise NotCovered
        to = self.slot(out) if to is None else to
        if to == OUTPUT:
            self.output_width = out
        self._add(_LINEAR, LinearPhase(in_=width, out=out, x=x, to=to, add=add, weight=weight, bias=bias))
        return to

    def norm(self, x: int, norm: nn.Module, width: int, *, z: int = -1, to: int | None = None) -> int:
        """An RMS norm over `width` channels that is watched already, with a gate if `z` is given."""
        weight = self.parameter(norm, "weight", width)
        to = self.slot(width) if to is None else to
        group_size = width if z < 0 else self.watch.value(norm, "group_size")
        order = z >= 0 and self.watch.value(norm, "norm_before_gate")
        phase = NormPhase(
            width=width,
            group_size=group_size,
            norm_before_gate=order,
            eps=self.watch.value(norm, "eps"),
            x=x,
            z=z,
            to=to,
            weight=weight,
        )
        self._add(_NORM, phase)
        return to

    def gate(self, x: int, z: int, width: int, *, to: int | None = None) -> int:
        """`x silu(z)`."""
        to = self.slot(width) if to is None else to
        self._add(_GATE, GatePhase(width=width, x=x, z=z, to=to))
        return to

    def conv(self, x: int, owner: nn.Module, name: str, kind: type, channels: int, width: int) -> int:
        """The submodule `name`, a causal convolution with SiLU of type `kind`, with the next tensor of the cache."""
        conv = self.watch.child(owner, name, kind)
        phase = ConvPhase(
            channels=channels,
            width=width,
            x=x,
            to=(to := self.slot(channels)),
            cache_window=self.cached(channels, width),
            weight=self.parameter(conv, "weight", channels, 1, width),
            bias=self.parameter(conv, "bias", channels, optional=True),
        )
        self._add(_CONV, phase)
        return to

    def mamba1(self, **fields: Any) -> None:
        """State, readout and gate (`Mamba1Phase`)."""
        self._add(_MAMBA1, Mamba1Phase(**fields))

    def mamba2(self, **fields: Any) -> None:
        """State and readout (`Mamba2Phase`)."""
        self._add(_MAMBA2, Mamba2Phase(**fields))

    def mamba3(self, **fields: Any) -> None:
        """Keys, state, readout and gate (`Mamba3Phase`)."""
        self._add(_MAMBA3[0], phase := Mamba3Phase(**fields))
        self._add(_MAMBA3[1], phase)

    def write(self, slot: int, width: int) -> None:
        """The output is a slot."""
        self.output_width = width
        self._add(_WRITE, EdgePhase(width=width, slot=slot))

    def _add(self, kind: int, phase: ctypes.Structure) -> None:
        self._phases.append((kind, phase))

    # Running

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool) -> tuple[Tensor, list[Tensor]] | None:
        """Take a step.

        Args:
            x: (b, input_width).
            cache: the tensors of the cache, in the order in which they were recorded.
            in_place: write the new cache over the old one.

        Returns:
            The output (b, output_width) and the new cache; None if something is not as it was recorded.
        """
        b = x.shape[0]
        if x.ndim != 2 or x.shape[1] != self.input_width or x.dtype != self.input_dtype or not 1 <= b <= MAX_ROWS:
            return None
        if b not in self._expected:
            self._expected[b] = [(torch.Size((b, *shape)), dtype, _CPU) for shape, dtype in self._cache]
        if [(old.shape, old.dtype, old.device) for old in cache] != self._expected[b]:
            return None
        x, before = library.dense_last_axis(x), [old.contiguous() for old in cache]
        after = before if in_place else list(map(torch.empty_like, before))
        output = library.empty((b, self.output_width), dtype=self.dtype)
        pointers = ctypes.c_void_p * len(before)
        args = ProgramArgs(
            library.dtype_code(self.dtype),
            torch.get_num_threads(),
            b,
            self._width,
            len(self._phases),
            ctypes.addressof(self._table),
            x.data_ptr(),
            library.dtype_code(x.dtype),
            x.stride(0),
            output.data_ptr(),
            self.output_width,
            ctypes.addressof(old := pointers(*(t.data_ptr() for t in before))),
            ctypes.addressof(new := pointers(*(t.data_ptr() for t in after))),
        )
        library.call("run_program", args)
        del old, new  # until here: `args` holds their addresses only
        return output, after


class Decoder:
    """Keeps the program of a module, and records it anew when the module is no longer what it was.

    A copy or a pickle of it starts without one.
    """

    def __init__(self) -> None:
        """Start without a program."""
        self._program: Program | None = None

    def __reduce__(self) -> tuple[type[Decoder], tuple[()]]:
        """Addresses are of no use to anyone else."""
        return Decoder, ()

    def run(
        self,
        dtype: torch.dtype,
        record: Callable[[Program], None],
        x: Tensor,
        cache: Sequence[Tensor],
        in_place: bool = False,
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Take a step with the program that `record` makes; None where there is none that covers it."""
        if not is_plain((x, *cache)) or library.missing(x.device, x.dtype):
            return None
        program = self._program
        if program is None or not program.serves(dtype, x):
            # Other threads may do the same at the same time: each goes on with the program that it has recorded.
            self._program = program = Program.recorded(record, dtype, x)
        if not program.covers or (torch.is_grad_enabled() and any(p.requires_grad for p in program.watch.parameters)):
            return None
        return program.run(x, cache, in_place)
