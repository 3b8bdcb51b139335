"""Compile the description of a decode step to the table of phases that the C++ kernels run (`csrc/decode/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.core.registry import Implementation
from anymamba.kernels.cpu import bindings, schema
from anymamba.kernels.cpu.bindings import DTYPES, WEIGHT_FORMATS, empty
from anymamba.kernels.step_description import Phase, StepProgram

MAX_ROWS = 64  # beyond, a matrix product is no longer bound by memory
_CPU = torch.device("cpu")
_KINDS = {kind: number for number, kind in enumerate(schema.PHASE_KINDS)}


class CpuStep:
    """A compiled step: a table of C structures, one per phase, and the program, whose parameters they point to."""

    max_rows = MAX_ROWS

    def __init__(self, program: StepProgram) -> None:
        """Fill the structures."""
        self._program = program
        self._structures = [_structure(phase) for phase in program.phases]
        phase = schema.c_structure("Phase")
        entries = (
            phase(kind=_KINDS[kind], args=ctypes.addressof(structure))
            for (kind, _), structure in zip(program.phases, self._structures, strict=True)
        )
        self._table = (phase * len(self._structures))(*entries)
        self._pointers = ctypes.c_void_p * len(program.cache)
        self._calls: dict[int, tuple[list[Any], Any]] = {}
        self._run = bindings.function("decode_step")

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False) -> tuple[Tensor, list[Tensor]] | None:
        """Run one step of up to `max_rows` rows, as `kernels.compiled_step.Executable.run`."""
        program = self._program
        b = x.shape[0] if x.ndim == 2 else 0
        if not 1 <= b <= MAX_ROWS or x.shape[1] != program.input_width or x.dtype != program.input_dtype:
            return None
        expected, template = self._calls[b] if b in self._calls else self._prepare(b)
        if [(old.shape, old.dtype, old.device) for old in cache] != expected or x.device != _CPU:
            return None
        x = x if x.stride(-1) == 1 else x.contiguous()
        before = [old if old.is_contiguous() and not old.is_neg() else old.contiguous().resolve_neg() for old in cache]
        after = before if in_place else list(map(torch.empty_like, before))
        output = empty((b, program.output_width), program.dtype)
        old, new = self._pointers(*map(Tensor.data_ptr, before)), self._pointers(*map(Tensor.data_ptr, after))
        args = type(template).from_buffer_copy(template)  # of this call: other threads may run the step too
        args.threads = torch.get_num_threads()
        args.input = x.data_ptr()
        args.input_row = x.stride(0)
        args.output = output.data_ptr()
        args.old_cache = ctypes.addressof(old)
        args.new_cache = ctypes.addressof(new)
        if self._run(ctypes.byref(args)):
            raise MemoryError("decode_step: out of memory")
        del old, new  # until here: `args` holds their addresses only
        return output, after

    def _prepare(self, b: int) -> tuple[list[Any], Any]:
        """Return what all calls with b rows share: what the cache must be, and the fields of the C structure."""
        program = self._program
        expected = [(torch.Size((b, *shape)), dtype, _CPU) for shape, dtype in program.cache]
        template = schema.c_structure("StepArgs")(
            dtype=DTYPES[program.dtype],
            batch=b,
            width=program.width,
            count=len(self._table),
            phases=ctypes.addressof(self._table),
            input_dtype=DTYPES[program.input_dtype],
            output_width=program.output_width,
        )
        self._calls[b] = expected, template
        return expected, template


def _structure(phase: Phase) -> ctypes.Structure:
    """Return the C structure of a phase: parameters become addresses, and names of rotations and formats numbers."""
    structure = schema.c_structure(schema.PHASE_KINDS[phase.kind])()
    for name, value in phase.fields.items():
        if isinstance(value, Tensor):
            parameter = schema.c_structure("Parameter")
            setattr(structure, name, parameter(data=value.data_ptr(), dtype=DTYPES.get(value.dtype, 0)))
        elif name == "rotation":
            structure.rotation = schema.ROTATIONS.index(value)
        elif value is not None and name != "format":
            setattr(structure, name, value)
    if "format" in phase.fields:
        structure.weight.dtype = WEIGHT_FORMATS[phase.fields["format"]]
    return structure


def _missing(program: StepProgram) -> str:
    """Return why a program is not covered; empty if it is."""
    formats = {phase.fields["format"] for phase in program.phases if "format" in phase.fields}
    if unknown := formats - WEIGHT_FORMATS.keys():
        return f"there is none for weights in {', '.join(sorted(unknown))}"
    return bindings.missing(program.dtype) or bindings.missing(program.input_dtype)


IMPLEMENTATIONS = {"compile_step": Implementation(CpuStep, None, _missing)}
