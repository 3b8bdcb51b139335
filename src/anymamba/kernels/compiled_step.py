"""When a compiled step runs: one question, and one table of the compiled steps (`step_description.py` describes them).

A module that has a compiled step asks for it before it computes:

    step = usable_step(module, (x, *cache), source)      # None: run the module's own code
    result = None if step is None else step.run(x, cache)

It may give a window of several tokens of each sequence to one call: `step.run(x, cache, window=k)` is k steps, and
`step.look_ahead(x, cache, k)` leaves open how many of them count.

A step is described and compiled when it is first needed, and again after anything that it was described from has
changed: a submodule, its hooks, a parameter or its address, a number.

To add a phase, follow the recipe in `kernels/cpu/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.core import anomaly
from anymamba.core.dtypes import is_autocast
from anymamba.core.operators import are_dense_tensors, is_tracing
from anymamba.core.registry import are_kernels_off, select_kernel
from anymamba.kernels.step_description import ModuleWatcher, NotCoveredError, StepBuilder

StepResult = tuple[Tensor, list[Tensor]]


@runtime_checkable
class Executable(Protocol):
    """A `StepProgram` as compiled for a device.

    Attributes:
        max_rows: The most rows that `run` takes.
        takes_windows: Whether it takes more than one token of a sequence at a time.
        grows: Whether the cache grows, so that it cannot be written over group by group.
    """

    max_rows: int
    takes_windows: bool
    grows: bool

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False, window: int = 1) -> StepResult | None:
        """Run one step, or as many as there are tokens in a window, with the same bits.

        Args:
            x: Input (b * window, input_width), the tokens of a sequence one after the other.
            cache: Tensors of the cache, in the order in which they were described.
            in_place: Write the new cache over the old one.
            window: Number of tokens of each sequence.

        Returns:
            The output (b * window, output_width) and the new cache; None if shapes, dtypes or devices are not covered,
            among them more than `max_rows` rows.
        """
        ...

    def look_ahead(self, x: Tensor, cache: Sequence[Tensor], window: int) -> tuple[Tensor, Replay] | None:
        """Run over windows, with the same arguments, and leave the cache as it is.

        Returns:
            The output, and what advances the cache by the tokens that turn out to count; None where `run` returns it,
            and if the program does not keep its slots.
        """
        ...


@runtime_checkable
class Replay(Protocol):
    """What turns the cache before a window into the cache after some of its tokens, without reading weights again."""

    def advance(self, counts: Sequence[int], in_place: bool = False) -> list[Tensor]:
        """Return the cache after the first tokens of each sequence, as many as `counts` says.

        Bits are those of as many steps. With `in_place`, the old cache is overwritten, and this is the last call.
        """
        ...


class StepSource(NamedTuple):
    """Source of a compiled step: a function that describes it, and fields of `StepProgram`."""

    describe: Callable[[StepBuilder], None]  # adds the phases to a builder, or rejects the module
    input_width: int
    dtype: torch.dtype
    input_dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    keeps_slots: bool = False


class CompiledStep:
    """A step of a module, compiled for the device of its parameters.

    The module is only weakly referenced.

    Attributes:
        executable: The compiled step; None if it cannot be compiled.
        reason: Why it cannot be compiled; empty if it can.
    """

    def __init__(self, module: nn.Module, source: StepSource) -> None:
        """Describe and compile the step."""
        self.executable: Executable | None = None
        self.reason = ""
        self._watcher = ModuleWatcher(module)
        describe, input_width, dtype, input_dtype, device, keeps_slots = source
        builder = StepBuilder(self._watcher, dtype, input_width, input_dtype, device, keeps_slots)
        try:
            describe(builder)
        except NotCoveredError as error:
            self.reason = str(error)
        else:
            program = builder.build()
            # A device registers its compiler as the implementation of an operator of this name.
            compiler, self.reason = select_kernel("compile_step", program)
            if keeps_slots and (kinds := program.single_token_kinds()):
                compiler, self.reason = None, f"{', '.join(kinds)} takes one token at a time"
            self.executable = None if compiler is None else compiler.forward(program)
        self._watcher.take_snapshot()
        self.is_current = self._watcher.is_unchanged

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False, window: int = 1) -> StepResult | None:
        """Run the step, as `Executable.run`, for any number of rows."""
        executable = self.executable
        if executable is None:
            return None
        result = executable.run(x, cache, in_place, window)
        if result is None and (groups := _split_into_groups(executable, x, cache, window)):
            after = [
                tensor.resolve_neg().contiguous() if in_place else tensor.clone(memory_format=torch.contiguous_format)
                for tensor in cache
            ]
            outputs = []
            for rows, sequences in groups:
                part = [tensor[sequences] for tensor in after]
                if (result := executable.run(x[rows], part, True, window)) is None:
                    return None  # shapes and dtypes are those of the first group, so nothing has been written yet
                outputs.append(result[0])
            return torch.cat(outputs), after
        return result

    def look_ahead(self, x: Tensor, cache: Sequence[Tensor], window: int) -> tuple[Tensor, Replay] | None:
        """Run over windows, as `Executable.look_ahead`, for any number of rows."""
        executable = self.executable
        if executable is None:
            return None
        result = executable.look_ahead(x, cache, window)
        if result is None and (groups := _split_into_groups(executable, x, cache, window)):
            before = [tensor.resolve_neg().contiguous() for tensor in cache]
            outputs, replays = [], []
            for rows, sequences in groups:
                part = [tensor[sequences] for tensor in before]
                if (result := executable.look_ahead(x[rows], part, window)) is None:
                    return None
                outputs.append(result[0])
                replays.append((sequences, result[1]))
            return torch.cat(outputs), _GroupReplay(before, replays)
        return result


class _GroupReplay:
    """`Replay` of windows that ran in several groups."""

    def __init__(self, cache: list[Tensor], groups: list[tuple[slice, Replay]]) -> None:
        """Join the groups, whose caches are rows of `cache`."""
        self._cache = cache
        self._groups = groups

    def advance(self, counts: Sequence[int], in_place: bool = False) -> list[Tensor]:
        """Return the cache after the tokens that count."""
        parts = [replay.advance(counts[sequences], in_place) for sequences, replay in self._groups]
        return self._cache if in_place else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def _split_into_groups(
    executable: Executable, x: Tensor, cache: Sequence[Tensor], window: int
) -> list[tuple[slice, slice]]:
    """Return rows and sequences of groups that an executable takes, so that a row has the same bits in any batch.

    Empty if no split makes a call possible.
    """
    size = executable.max_rows // window
    if executable.grows or x.ndim != 2 or x.shape[0] <= executable.max_rows or x.shape[0] % window or not size:
        return []
    b = x.shape[0] // window
    if any(tensor.ndim == 0 or tensor.shape[0] != b for tensor in cache):
        return []
    begins = range(0, b, size)
    return [(slice(i * window, (i + size) * window), slice(i, i + size)) for i in begins]


# Not attributes of the modules: a compiled step is neither copied nor saved with its module.
_STEPS: WeakKeyDictionary[nn.Module, dict[str, CompiledStep]] = WeakKeyDictionary()


def compiled_step(module: nn.Module, source: Callable[[], StepSource], part: str = "") -> CompiledStep:
    """Return the step of a module as it is now, which may be one that cannot be compiled.

    `source` returns what to compile, if it must be compiled (again); `part` tells several steps of one module apart.
    """
    steps = _STEPS.get(module)
    if steps is None:
        steps = _STEPS[module] = {}
    step = steps.get(part)
    if step is None or not step.is_current():
        step = steps[part] = CompiledStep(module, source())
    return step


def forget_steps(module: nn.Module) -> None:
    """Compile the steps of a module again when they are next needed."""
    _STEPS.pop(module, None)


def may_run(module: nn.Module, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether compiled steps of a module may run on these tensors.

    They may if nothing switches kernels off, checks for anomalies, casts, traces or transforms the call, or needs
    gradients of it, and if all tensors are plain memory.
    """
    if are_kernels_off() or anomaly.is_check_finite_on() or is_tracing() or not are_dense_tensors(tensors):
        return False
    # One call for all device types first: this is asked for every token.
    if torch._C._is_any_autocast_enabled() and is_autocast(tensors[0].device):
        return False
    return not torch.is_grad_enabled() or not (
        any(x.requires_grad for x in tensors) or any(p.requires_grad for p in module.parameters())
    )


def usable_step(
    module: nn.Module, tensors: tuple[Tensor, ...], source: Callable[[], StepSource] | None = None, part: str = ""
) -> CompiledStep | None:
    """Return the step of a module if it may run on these tensors; None if the module's own code must run.

    Input and cache are checked for their shapes and dtypes when the step runs. Without a `source`, as in
    `compiled_step`, only an existing step is returned.
    """
    steps = _STEPS.get(module)
    step = None if steps is None else steps.get(part)
    if (step is None and source is None) or not may_run(module, tensors):
        return None
    if step is None or not step.is_current():
        if source is None:
            return None
        step = compiled_step(module, source, part)
    return step if step.executable is not None else None
