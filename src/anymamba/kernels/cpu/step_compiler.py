"""Compile the description of a decode step to the table of phases that the C++ kernels run (`csrc/decode/`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.growing_buffer import reserve_steps
from anymamba.core.registry import Implementation
from anymamba.kernels.cpu import bindings, schema
from anymamba.kernels.cpu.bindings import DTYPES, WEIGHT_FORMATS, empty
from anymamba.kernels.step_description import SEQUENCE_KINDS, Phase, StepProgram

MAX_ROWS = 64  # beyond, a matrix product is no longer bound by memory
_TEAM_BYTES = 1 << 20  # a replay over less is not worth waking threads
_CPU = torch.device("cpu")
_KINDS = {kind: number for number, kind in enumerate(schema.PHASE_KINDS)}


class CpuStep:
    """A compiled step: a table of C structures, one per phase, and the program, whose parameters they point to."""

    max_rows = MAX_ROWS

    def __init__(self, program: StepProgram) -> None:
        """Fill the structures."""
        self.takes_windows = program.takes_windows
        self.grows = bool(program.growing)
        self._program = program
        self._structures = [_structure(phase) for phase in program.phases]
        self._table = self._make_table(range(len(program.phases)))
        self._replayed = self._make_table(i for i, phase in enumerate(program.phases) if phase.kind in SEQUENCE_KINDS)
        self._pointers = ctypes.c_void_p * len(program.cache)
        self._calls: dict[tuple[int, int], tuple[list[Any], Any]] = {}
        self._run = bindings.function("decode_step")

    def run(
        self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False, window: int = 1
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Run up to `max_rows` rows, as `kernels.compiled_step.Executable.run`."""
        if (before := self._check(x, cache, window)) is None:
            return None
        if self.grows:
            return self._run_growing(x, before, in_place)
        after = before if in_place else list(map(torch.empty_like, before))
        return self._forward(x, before, after, window, None), after

    def _run_growing(self, x: Tensor, cache: list[Tensor], in_place: bool) -> tuple[Tensor, list[Tensor]] | None:
        """Run a step whose cache grows: the kernel writes the new steps of each row to its buffer."""
        before, capacities = list(cache), (ctypes.c_int64 * len(cache))()
        growing = {index for pair in self._program.growing for index in pair}
        written = [old if in_place or i in growing else torch.empty_like(old) for i, old in enumerate(before)]
        after = list(written)
        for index, lengths_index in self._program.growing:
            lengths, old = cache[lengths_index], cache[index]
            begins = lengths.tolist()
            if min(begins) < 0 or max(begins) > old.shape[1]:
                return None
            ends = [begin + 1 for begin in begins]
            buffer = reserve_steps(old, begins, ends, max(ends))
            capacities[index] = buffer.shape[1]
            before[index] = written[index] = buffer
            after[index] = buffer[:, : max(ends)]
            after[lengths_index] = lengths + 1
        return self._forward(x, before, written, 1, None, capacities), after

    def look_ahead(self, x: Tensor, cache: Sequence[Tensor], window: int) -> tuple[Tensor, CpuReplay] | None:
        """Run up to `max_rows` rows, as `kernels.compiled_step.Executable.look_ahead`."""
        program = self._program
        if not program.keeps_slots or (before := self._check(x, cache, window)) is None:
            return None
        slots = empty((x.shape[0], program.width), state_dtype(program.dtype))
        return self._forward(x, before, None, window, slots), CpuReplay(self, before, slots, window)

    def replay(self, cache: list[Tensor], slots: Tensor, window: int, counts: Sequence[int]) -> None:
        """Advance a cache in place by the first tokens of each window, whose slots are those of `look_ahead`."""
        replayed = (ctypes.c_int64 * len(counts))(*counts)
        args = self._arguments(slots.shape[0], window)
        args.count = len(self._replayed)
        args.phases = ctypes.addressof(self._replayed)
        args.replayed = ctypes.addressof(replayed)
        if sum(x.nbytes for x in cache) < _TEAM_BYTES:
            args.threads = 1
        self._call(args, cache, cache, slots)
        del replayed  # until here: `args` holds its address only

    def _make_table(self, indices: Iterable[int]) -> Any:
        """Return the table of some of the phases."""
        phase, kinds = schema.c_structure("Phase"), [_KINDS[kind] for kind, _ in self._program.phases]
        entries = [phase(kind=kinds[i], args=ctypes.addressof(self._structures[i])) for i in indices]
        return (phase * len(entries))(*entries)

    def _check(self, x: Tensor, cache: Sequence[Tensor], window: int) -> list[Tensor] | None:
        """Return the tensors of the cache as the kernel reads them; None if it does not cover the arguments."""
        program = self._program
        rows = x.shape[0] if x.ndim == 2 else 0
        if not 1 <= rows <= MAX_ROWS or x.shape[1] != program.input_width or x.dtype != program.input_dtype:
            return None
        if window != 1 and (not self.takes_windows or rows % window):
            return None
        expected = self._calls[rows, window][0] if (rows, window) in self._calls else self._prepare(rows, window)[0]
        growing = {index for index, _ in program.growing}
        shapes = [old.shape if i not in growing else old.shape[:1] + old.shape[2:] for i, old in enumerate(cache)]
        actual = [(shape, old.dtype, old.device) for shape, old in zip(shapes, cache, strict=True)]
        if actual != expected or x.device != _CPU:
            return None
        # What grows is a view of its buffer, which `reserve_steps` finds or makes.
        return [
            old if i in growing or (old.is_contiguous() and not old.is_neg()) else old.contiguous().resolve_neg()
            for i, old in enumerate(cache)
        ]

    def _forward(
        self,
        x: Tensor,
        before: list[Tensor],
        after: list[Tensor] | None,
        window: int,
        slots: Tensor | None,
        capacities: Any = None,
    ) -> Tensor:
        """Return the output, and write the new cache to `after`, if there is one, and slots to `slots`.

        `capacities` has the steps that a row of each growing tensor has memory for.
        """
        program = self._program
        x = x if x.stride(-1) == 1 else x.contiguous()
        output = empty((x.shape[0], program.output_width), program.dtype)
        args = self._arguments(x.shape[0], window)
        args.input = x.data_ptr()
        args.input_row = x.stride(0)
        args.output = output.data_ptr()
        if capacities is not None:
            args.capacities = ctypes.addressof(capacities)
        self._call(args, before, after, slots)
        return output

    def _call(self, args: Any, before: list[Tensor], after: list[Tensor] | None, slots: Tensor | None) -> None:
        """Call the kernel."""
        old = self._pointers(*map(Tensor.data_ptr, before))
        args.old_cache = ctypes.addressof(old)
        if after is not None:
            new = self._pointers(*map(Tensor.data_ptr, after))
            args.new_cache = ctypes.addressof(new)
        if slots is not None:
            args.slots = slots.data_ptr()
        if self._run(ctypes.byref(args)):
            raise MemoryError("decode_step: out of memory")

    def _arguments(self, rows: int, window: int) -> Any:
        """Return the C structure of a call of its own: other threads may run the step too."""
        template = self._calls[rows, window][1]
        args = type(template).from_buffer_copy(template)
        args.threads = torch.get_num_threads()
        return args

    def _prepare(self, rows: int, window: int) -> tuple[list[Any], Any]:
        """Return what all calls of one size share: what the cache must be, and the fields of the C structure."""
        program = self._program
        expected = [(torch.Size((rows // window, *shape)), dtype, _CPU) for shape, dtype in program.cache]
        template = schema.c_structure("StepArgs")(
            dtype=DTYPES[program.dtype],
            batch=rows,
            window=window,
            width=program.width,
            count=len(self._table),
            phases=ctypes.addressof(self._table),
            input_dtype=DTYPES[program.input_dtype],
            output_width=program.output_width,
        )
        self._calls[rows, window] = expected, template
        return expected, template


class CpuReplay:
    """What advances a cache by some tokens of a window: `kernels.compiled_step.Replay`."""

    def __init__(self, step: CpuStep, cache: list[Tensor], slots: Tensor, window: int) -> None:
        """Keep the cache before the window, and the slots of all its rows."""
        self._step = step
        self._cache = cache
        self._slots = slots
        self._window = window

    def advance(self, counts: Sequence[int], in_place: bool = False) -> list[Tensor]:
        """Return the cache after the tokens that count."""
        cache = self._cache if in_place else [x.clone() for x in self._cache]
        if len(counts) * self._window != self._slots.shape[0] or not all(0 <= n <= self._window for n in counts):
            raise ValueError(f"counts must be {len(cache[0])} numbers from 0 to {self._window}, got {list(counts)}")
        if any(counts):
            self._step.replay(cache, self._slots, self._window, counts)
        return cache


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
