"""Contenders, cases, the check that contenders agree, and interleaved timing.

A case is measured in one process. Each contender is set up and called once, and the results of those that claim to
compute the same function are compared: a case whose contenders disagree is rejected, and none of its figures is
reported. Then come a warm-up and the timed rounds, A B C A B C ..., so that a slow minute of the machine affects
all of them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.device import CPU, Clock, OnDevice, seconds
from benchmarks.machine import OtherPrograms

Call = Callable[[], Mapping[str, Tensor]]

MIN_SAMPLE_SECONDS = 0.2
HEAVY_REPEATS = 2
MAX_CORES_USED_BY_OTHERS = 0.1

# Ten times the largest difference measured between float32 implementations of Mamba-2, t = 256 to 8192: 2.3e-6 of the
# tensor's largest magnitude, in the gradient of the conv's bias.
FLOAT32_TOLERANCE = 2.3e-5


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute something.

    Attributes:
        name: Unique name in the case, without "/".
        setup: Allocates parameters and inputs and returns the call to be timed. The call returns its results by name;
            the results of the first call after a set-up are compared.
        tiny: The same as `setup` at a very small size. It loads library code and starts thread pools before memory is
            measured.
        computes: Function that is computed. Contenders of a case that compute the same one must agree.
        library: Package that must be installed.
        heavy: Whether it is so slow that it gets `HEAVY_REPEATS` samples at most, and can be left out of a run.
        optional: Whether it is left out where its library is not installed, and on a CPU.
    """

    name: str
    setup: Callable[[], Call]
    tiny: Callable[[], Call]
    computes: str
    library: str = "anymamba"
    heavy: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders that are timed side by side.

    Attributes:
        name: Name, whose parts are separated by "/".
        contenders: Contenders in the order in which they run.
        baseline: Name of the contender that the ratios are relative to.
        tolerance: Largest accepted difference between two results, relative to the largest magnitude in the tensor.
        on_request: Whether it takes so long that it only runs when it is named.
    """

    name: str
    contenders: tuple[Contender, ...]
    baseline: str
    tolerance: float = FLOAT32_TOLERANCE
    on_request: bool = False

    def __post_init__(self) -> None:
        """Raise for a baseline that is no contender, and for ambiguous names."""
        names = [contender.name for contender in self.contenders]
        if len(set(names)) != len(names) or any("/" in name for name in names):
            raise ValueError(f'{self.name}: contender names must be unique and without "/", got {names}')
        if self.baseline not in names:
            raise ValueError(f"{self.name}: baseline must be one of {names}, got {self.baseline!r}")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The samples of one contender, each the mean over `calls_per_sample` calls, in milliseconds a call."""

    contender: str
    samples_ms: tuple[float, ...]
    calls_per_sample: int

    @property
    def median_ms(self) -> float:
        """Return the median sample."""
        return statistics.median(self.samples_ms)

    @property
    def is_noisy(self) -> bool:
        """Return whether the median is so far above the fastest sample that other programs must have run."""
        return self.median_ms > 1.25 * min(self.samples_ms)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The measurements of one case.

    Attributes:
        case: Case that was measured.
        timings: Timing of each contender, in the order of the case.
        cores_used_by_others: Mean number of cores that other programs kept busy during the timed rounds, if known.
        peak_bytes: Bytes that a call needs above its parameters and inputs, by contender; None if not measured.
    """

    case: Case
    timings: list[Timing]
    cores_used_by_others: float | None
    peak_bytes: dict[str, int] | None = None

    @property
    def doubt(self) -> str | None:
        """Return why the timings cannot be trusted, None if they can.

        The threads of torch wait for each other in busy loops after every operation. When another program takes one of
        their cores, a call may take a hundred times longer, and the one with the most operations suffers the most.
        """
        if self.cores_used_by_others is not None and self.cores_used_by_others > MAX_CORES_USED_BY_OTHERS:
            return f"other programs used {self.cores_used_by_others:.2f} cores"
        noisy = [timing.contender for timing in self.timings if timing.is_noisy]
        return f"the samples of {', '.join(noisy)} scatter" if noisy else None


class DisagreementError(Exception):
    """An error about contenders that should compute the same function and do not, one line per difference."""

    def __init__(self, case: str, differences: list[str]) -> None:
        """Keep the case's name and the differences."""
        super().__init__(f"{case} is rejected, its contenders disagree:\n" + "\n".join(f"  {d}" for d in differences))
        self.case = case
        self.differences = differences


def compare(reference: Mapping[str, Tensor], results: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """Describe each of `results` that differs from that of `reference`.

    Args:
        reference: Expected results by name.
        results: Results by name; the names and shapes must be those of `reference`.
        tolerance: Largest accepted |result - reference|, relative to max |reference| of that tensor. NaN differs.

    Returns:
        One line for each difference, empty if all agree.
    """
    differences = [f"{name}: missing from one side" for name in sorted(reference.keys() ^ results.keys())]
    for name in reference.keys() & results.keys():
        expected, actual = reference[name].cpu().double(), results[name].cpu().double()
        if expected.shape != actual.shape:
            differences.append(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
            continue
        difference = (actual - expected).abs().max().item()
        scale = expected.abs().max().item()
        if not (math.isfinite(scale) and difference <= tolerance * scale):
            differences.append(
                f"{name}: differs by {difference:.3g} where the largest magnitude is {scale:.3g} "
                f"(tolerance {tolerance * scale:.3g})"
            )
    return sorted(differences)


def check_agreement(case: Case, results: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Compare the results of each contender with those of the first that computes the same function.

    Args:
        case: Case whose contenders are compared.
        results: Results by contender, then by name.

    Raises:
        DisagreementError: if any differs.
    """
    first: dict[str, str] = {}
    differences = []
    for contender in case.contenders:
        reference = first.setdefault(contender.computes, contender.name)
        differences += [
            f"{contender.name} against {reference}: {difference}"
            for difference in compare(results[reference], results[contender.name], case.tolerance)
        ]
    if differences:
        raise DisagreementError(case.name, differences)


def time_case(
    case: Case,
    repeats: int,
    progress: Callable[[str], None],
    clock: Clock = time.perf_counter,
    device: torch.device = CPU,
) -> CaseResult:
    """Check that the contenders of `case` agree, then time them in interleaved rounds.

    A sample is as many calls as fill `MIN_SAMPLE_SECONDS`. A heavy contender takes part in the first rounds only, and
    its call for the agreement check is its warm-up.

    Args:
        case: Case to measure.
        repeats: Number of rounds.
        progress: Function that receives lines of progress.
        clock: Clock in seconds; one of processor time does not count what other programs use.
        device: Device that all contenders are set up on.

    Returns:
        The timings; memory is not measured here.

    Raises:
        DisagreementError: before anything is timed.
    """
    progress(f"{case.name}: agreement")
    with OnDevice(device) if device.type != "cpu" else nullcontext():
        calls = {contender.name: contender.setup() for contender in case.contenders}
    check_agreement(case, {name: call() for name, call in calls.items()})

    progress(f"{case.name}: warm-up")
    counts = {
        contender.name: 1
        if contender.heavy
        else math.ceil(MIN_SAMPLE_SECONDS / min(seconds(calls[contender.name], 1, clock, device) for _ in range(2)))
        for contender in case.contenders
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # What the set-up left stays out of the collections between the samples, which are then short.
    gc.collect()
    gc.freeze()
    other_programs = OtherPrograms()
    for turn in range(repeats):
        progress(f"{case.name}: round {turn + 1} of {repeats}")
        for contender in case.contenders:
            if contender.heavy and turn >= HEAVY_REPEATS:
                continue
            gc.collect()
            samples[contender.name].append(1e3 * seconds(calls[contender.name], counts[contender.name], clock, device))
    cores_used_by_others = other_programs.cores_used() if clock is time.perf_counter else None
    gc.unfreeze()
    timings = [Timing(contender=name, samples_ms=tuple(samples[name]), calls_per_sample=counts[name]) for name in calls]
    return CaseResult(case=case, timings=timings, cores_used_by_others=cores_used_by_others)


def forward(function: Callable[[], Mapping[str, Tensor]]) -> Call:
    """Return a call of `function` without gradients."""

    def call() -> Mapping[str, Tensor]:
        with torch.no_grad():
            return function()

    return call


def forward_backward(function: Callable[[], Tensor], head: Tensor, inputs: Mapping[str, Tensor]) -> Call:
    """Return a call of `y = function()` and its gradients, where `head` is the gradient of y.

    Args:
        function: Function that returns y.
        head: Gradient of y.
        inputs: Tensors whose gradients are computed, by name.

    Returns:
        A call with the results `y` and `grad <name>`.
    """

    def call() -> Mapping[str, Tensor]:
        y = function()
        gradients = torch.autograd.grad(y, list(inputs.values()), head)
        named = {f"grad {name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
        return {"y": y.detach(), **named}

    return call
