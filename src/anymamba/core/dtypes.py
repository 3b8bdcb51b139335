"""Dtypes and devices of computations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# Computed once, because the tracer of torch 2.10 cannot follow the call.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "ipu", torch._C._get_privateuse1_backend_name())
_WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, _DEVICES))


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and decays for activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for `device`."""
    return device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` computes in the dtypes of its inputs."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def available_devices() -> list[str]:
    """Return the kinds of devices of this machine that "auto" chooses from, best first."""
    is_available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [kind for kind, available in is_available.items() if available]


def resolve_device(device: torch.device | str) -> torch.device:
    """Return a device; "auto" is the first of cuda, mps and cpu that this machine has."""
    return torch.device(available_devices()[0] if device == "auto" else device)


def parse_device(name: str, option: str) -> torch.device:
    """Return the device of that name, or of "auto".

    Raises `ValueError`, which names the `option`, if it is not available.
    """
    if name == "auto":
        return resolve_device(name)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"{option} {name}: not available here; available are {_list_devices()}") from error
    if device.type == "meta":
        raise ValueError(f"{option} {name}: computes no values; available are {_list_devices()}")
    return device


def _list_devices() -> str:
    """Return the names of this machine's devices."""
    names = ["cpu"]
    for kind in (torch.cuda, torch.xpu):
        names += [f"{kind.__name__.rpartition('.')[2]}:{i}" for i in range(kind.device_count())]
    names += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join(names)
