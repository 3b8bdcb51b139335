"""Set-ups, clocks and memory on a device other than the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

Clock = Callable[[], float]
CPU = torch.device("cpu")


class OnDevice(TorchFunctionMode):
    """A context in which tensors are created on a device, with the same random numbers as on the CPU.

    What is drawn from a generator of the CPU is drawn on the CPU and copied.
    """

    def __init__(self, device: torch.device) -> None:
        """Keep the device."""
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        is_drawn_elsewhere = generator is not None and generator.device.type != self._device.type
        if func in _device_constructors() and kwargs.get("device") is None:
            if is_drawn_elsewhere:
                return func(*args, **{**kwargs, "device": generator.device}).to(self._device)
            return func(*args, **{**kwargs, "device": self._device})
        if is_drawn_elsewhere and args and isinstance(args[0], Tensor) and func.__name__.endswith("_"):
            drawn = torch.empty(args[0].shape, dtype=args[0].dtype, device=generator.device)
            return args[0].copy_(func(drawn, *args[1:], **kwargs))
        return func(*args, **kwargs)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type not in ("cpu", "meta"):
        getattr(torch, device.type).synchronize()


def seconds(call: Callable[[], Any], calls: int, clock: Clock = time.perf_counter, device: torch.device = CPU) -> float:
    """Return the seconds per call, over `calls` calls: by CUDA's events on a GPU, elsewhere by the clock."""
    if device.type == "cuda":
        start_event, stop_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        for _ in range(calls):
            call()
        stop_event.record()
        stop_event.synchronize()
        return 1e-3 * float(start_event.elapsed_time(stop_event)) / calls
    synchronize(device)
    start = clock()
    for _ in range(calls):
        call()
    synchronize(device)
    return (clock() - start) / calls


def measure_peak_bytes(setup: Callable[[], Callable[[], Any]], device: torch.device) -> int | None:
    """Return the most memory of a GPU that a call needs above its parameters and inputs; None on other devices."""
    if device.type != "cuda":
        return None
    with OnDevice(device):
        call = setup()
    call()  # what libraries allocate once is not counted
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def describe_accelerator(device: torch.device) -> str:
    """Return the name of a device, and the version of its platform."""
    if device.type != "cuda":
        return str(device)
    platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)}, {platform}"
