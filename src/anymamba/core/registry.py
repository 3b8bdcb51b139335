"""Which implementation computes an operator: several may be registered for a device type, in order of preference.

A package of kernels (`kernels/cpu`, `kernels/triton`) registers what it implements when it is imported:

    register_library("cpu", describe)                    # its name, and a line about its state on this machine
    register("causal_conv", "cpu", Implementation(forward, backward, missing), library="cpu")

`missing` says why an implementation does not cover a call, or returns an empty string. The first registered
implementation that covers the call runs; if none does, the operator runs its portable implementation. Switches:

- inside `kernels_off()`, or with ANYMAMBA_KERNELS=off in the environment, the portable implementations run;
- inside `portable()` operators are not called at all, and their definitions run in torch's own operators;
- ANYMAMBA_KERNELS=<library> puts the implementations of one library first. A library that does not exist is an error,
  and one line per operator says where it does not cover a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_OFF = "switched off by ANYMAMBA_KERNELS=off"


class Implementation(NamedTuple):
    """One way to compute an operator.

    Attributes:
        forward: Maps the inputs to the outputs.
        backward: Maps the gradients of the outputs, followed by the inputs, to one gradient per differentiable input
            (any tensor for an input that is None). If None, `forward` is plain torch code that autograd differentiates.
        missing: Returns why these inputs are not covered; empty if they are.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    missing: Callable[..., str] = lambda *_: ""


class _Registered(NamedTuple):
    library: str
    implementation: Implementation


class _Switches:
    """Process-wide switches."""

    kernels_off = False
    portable = False
    requested = os.environ.get("ANYMAMBA_KERNELS", "")
    is_checked = False  # whether `requested` is known to be a valid value


_IMPLEMENTATIONS: dict[tuple[str, str], list[_Registered]] = {}
_LIBRARIES: dict[str, Callable[[], str]] = {}
_REPORTED: set[tuple[str, str]] = set()  # what the requested library does not cover: operators and reasons


def register_library(name: str, describe: Callable[[], str]) -> None:
    """Register a library of kernels, and what tells its state in one line: "built, using avx2", or "none: why"."""
    _LIBRARIES[name] = describe


def register(operator: str, device: str, implementation: Implementation, *, library: str) -> None:
    """Register an implementation for a device type, after earlier ones unless ANYMAMBA_KERNELS names its library.

    `operator` may also be the name of a plain function that asks `find_kernel`.
    """
    entries = _IMPLEMENTATIONS.setdefault((operator, device), [])
    entries[:] = [entry for entry in entries if entry.library != library]
    position = 0 if library == _Switches.requested else len(entries)
    entries.insert(position, _Registered(library, implementation))


def describe_kernels() -> dict[str, str]:
    """Return one line per library of kernels about its state on this machine."""
    check_kernels_variable()
    return {name: describe() for name, describe in _LIBRARIES.items()}


def check_kernels_variable() -> None:
    """Raise `ValueError` if ANYMAMBA_KERNELS names a library that does not exist."""
    if (requested := _Switches.requested) not in ("", "on", "off", *_LIBRARIES):
        raise ValueError(f"ANYMAMBA_KERNELS must be one of on, off, {', '.join(_LIBRARIES)}, got {requested!r}")
    _Switches.is_checked = True


def requested_library() -> str:
    """Return the value of ANYMAMBA_KERNELS: the name of a library, on, off, or nothing."""
    return _Switches.requested


def describe_device(device: torch.device) -> str:
    """Return a device's name and, on an accelerator without kernels, why portable code computes on it."""
    if device.type == "cpu":
        return "cpu"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    reason = missing_kernel("scan", torch.empty(0, device=device))
    return f"{name}, in portable code: {reason}" if reason else name


def reason_off() -> str:
    """Return why no kernel may be loaded in this process; empty if they may."""
    return _OFF if _Switches.requested == "off" else ""


def find_kernel(operator: str, *inputs: Any) -> Implementation | None:
    """Return the registered implementation that covers a call; None if no kernel does."""
    return None if _Switches.kernels_off else select_kernel(operator, *inputs)[0]


def missing_kernel(operator: str, *inputs: Any) -> str:
    """Return why no kernel covers a call of an operator; empty if one does."""
    return "the kernels are switched off" if _Switches.kernels_off else select_kernel(operator, *inputs)[1]


def select_kernel(operator: str, *inputs: Any) -> tuple[Implementation | None, str]:
    """Return the first implementation that covers a call, or None and the reasons, even inside `kernels_off()`.

    For what is kept and used later, when the switch may have changed.
    """
    if _Switches.requested == "off":
        return None, _OFF
    if not _Switches.is_checked:
        check_kernels_variable()
    device = inputs[0].device.type
    reasons = []
    for library, implementation in _IMPLEMENTATIONS.get((operator, device), ()):
        if not (reason := implementation.missing(*inputs)):
            return implementation, ""
        reasons.append(reason)
        if library == _Switches.requested and (operator, reason) not in _REPORTED:
            _REPORTED.add((operator, reason))
            print(f"anymamba: ANYMAMBA_KERNELS={library}: {operator}: {reason}", file=sys.stderr)
    return None, "; ".join(reasons) or f"there is none for device {device}"


@contextmanager
def kernels_off() -> Iterator[None]:
    """Run the portable implementations in this context, as on a machine without compiled kernels."""
    with _switch_on("kernels_off"):
        yield


@contextmanager
def portable() -> Iterator[None]:
    """Run and trace nothing but torch's own operators in this context.

    For tracers and transforms that know no others: `torch.onnx.export`, `torch.func`, forward-mode and second
    derivatives. It is a process-wide switch, and slower and larger than what it replaces.
    """
    with _switch_on("portable"):
        yield


@contextmanager
def _switch_on(name: str) -> Iterator[None]:
    before = getattr(_Switches, name)
    setattr(_Switches, name, True)
    try:
        yield
    finally:
        setattr(_Switches, name, before)


def are_kernels_off() -> bool:
    """Return whether `kernels_off()` or `portable()` is on."""
    return _Switches.kernels_off or _Switches.portable


def is_portable() -> bool:
    """Return whether `portable()` is on."""
    return _Switches.portable
