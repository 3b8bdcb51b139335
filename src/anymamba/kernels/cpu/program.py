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
from anymamba.kernels.watch import NotCovered, Watch
from anymamba.operators import is_plain

MAX_ROWS = 64  # beyond, a matrix product is no longer bound by memory, and torch's own is the faster one
OUTPUT = -1  # in place of a slot
_ALIGNED = 16  # elements

_i64, _f64, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_CPU = torch.device("cpu")


class _Parameter(ctypes.Structure):
    _fields_ = (("data", _pointer), ("dtype", _i64))


def _structure(name: str, **fields: Any) -> Any:
    """A structure of csrc/decode_args.h: for each type its fields in order, as one string."""
    types = {"i": _i64, "f": _f64, "p": _Parameter}
    pairs = tuple((field, types[kind[0]]) for kind, names in fields.items() for field in names.split())
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


# In the order of `PhaseKind`; a family's phases share one structure.
_Edge = _structure("EdgePhase", i="width slot")
_Norm = _structure("NormPhase", i="width group_size norm_before_gate", f="eps", i2="x z to", p="weight")
_Gate = _structure("GatePhase", i="width x z to")
_Linear = _structure("LinearPhase", i="in_ out x to add", p="weight bias")
_Mamba2 = _structure(
    "Mamba2Phase",
    i="heads head_width groups state conv_width skip_per_channel",
    f="dt_min dt_max",
    i2="xbc dt act to cache_window cache_state",
    p="conv_weight conv_bias dt_bias a_log skip",
)
_Mamba3 = _structure(
    "Mamba3Phase",
    i="heads head_width groups state rank pairs interleaved heavy_tail",
    f="rate_range dt_min dt_max a_floor key_eps query_eps out_eps",
    i2="z x b c dt a trap angle keys to cache_state cache_k cache_v cache_angle",
    p="key_norm query_norm key_bias query_bias dt_bias skip mimo_x mimo_z mimo_o out_norm",
)
_READ, _NORM, _GATE, _LINEAR, _MAMBA2, _MAMBA3, _WRITE = 0, 1, 2, 3, (4, 5), (6, 7), 8


class _Phase(ctypes.Structure):
    _fields_ = (("kind", _i64), ("args", _pointer))


class _ProgramArgs(ctypes.Structure):
    """`ProgramArgs` of csrc/decode_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "batch", "width", "count")),
        ("phases", _pointer),
        ("input", _pointer),
        ("input_dtype", _i64),
        ("input_row", _i64),
        ("output", _pointer),
        ("output_width", _i64),
        ("old_cache", _pointer),
        ("new_cache", _pointer),
    )


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
        self._phases: list[tuple[int, ctypes.Structure]] = []
        self._next = self._width = 0
        self._cache: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._expected: dict[int, list[Any]] = {}
        self._table: Any = None
        self._add(_READ, _Edge(width=input_width, slot=self.slot(input_width)))

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

    def parameter(self, owner: nn.Module, name: str) -> _Parameter:
        """A parameter of a module, read where it lies."""
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        x = self.watch.parameter(owner, name, (self.wide,) if self.wide == torch.float64 else narrow)
        return _Parameter() if x is None else _Parameter(data=x.data_ptr(), dtype=library.dtype_code(x.dtype))

    def linear(self, x: int, owner: nn.Module, name: str, *, to: int | None = None, add: bool = False) -> int:
        """The submodule `name`, an `nn.Linear`, applied to slot `x`: in a new slot, or in `to`, or added to it."""
        linear = self.watch.child(owner, name, nn.Linear)
        weight, bias = self.parameter(linear, "weight"), self.parameter(linear, "bias")
        out, width = linear.weight.shape
        if linear.weight.dtype != self.dtype:
            raise NotCovered
        to = self.slot(out) if to is None else to
        if to == OUTPUT:
            self.output_width = out
        self._add(_LINEAR, _Linear(in_=width, out=out, x=x, to=to, add=add, weight=weight, bias=bias))
        return to

    def norm(self, x: int, norm: nn.Module, *, z: int = -1, to: int | None = None) -> int:
        """An RMS norm that is watched already, with a gate if `z` is given."""
        weight = self.parameter(norm, "weight")
        (width,) = norm._parameters["weight"].shape  # type: ignore[union-attr]
        to = self.slot(width) if to is None else to
        group_size = width if z < 0 else self.watch.value(norm, "group_size")
        order = z >= 0 and self.watch.value(norm, "norm_before_gate")
        phase = _Norm(
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
        self._add(_GATE, _Gate(width=width, x=x, z=z, to=to))
        return to

    def mamba2(self, **fields: Any) -> None:
        """Convolution, state and readout (`Mamba2Phase`)."""
        self._add(_MAMBA2[0], phase := _Mamba2(**fields))
        self._add(_MAMBA2[1], phase)

    def mamba3(self, **fields: Any) -> None:
        """Keys, state, readout and gate (`Mamba3Phase`)."""
        self._add(_MAMBA3[0], phase := _Mamba3(**fields))
        self._add(_MAMBA3[1], phase)

    def write(self, slot: int, width: int) -> None:
        """The output is a slot."""
        self.output_width = width
        self._add(_WRITE, _Edge(width=width, slot=slot))

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
        if self._table is None:
            self._table = (_Phase * len(self._phases))(*(_Phase(k, ctypes.addressof(p)) for k, p in self._phases))
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
        pointers = _pointer * len(before)
        args = _ProgramArgs(
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
        library.call("anymamba_run_program", args)
        del old, new  # until here: `args` holds their addresses only
        return output, after


class Decoder:
    """Keeps the program of a module, and records it anew when the module is no longer what it was.

    A copy or a pickle of it starts without one.
    """

    def __init__(self) -> None:
        """Start without a program."""
        self._program: Program | None = None
        self._covers = False

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
        if (
            program is None
            or program.dtype != dtype
            or program.input_dtype != x.dtype
            or program.input_width != x.shape[-1]
            or not program.watch.holds()
        ):
            self._program = program = Program(dtype, x.shape[-1], x.dtype)
            try:
                record(program)
                self._covers = True
            except NotCovered:
                self._covers = False
            program.watch.close()
        if not self._covers or (torch.is_grad_enabled() and any(p.requires_grad for p in program.watch.parameters)):
            return None
        return program.run(x, cache, in_place)
