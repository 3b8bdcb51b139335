"""Code with hard-coded CUDA devices on the CPU: wherever a device is named, `cuda` means `cpu`.

`redirect()` replaces three groups of torch's names, and `restore()` puts the former ones back:

- what takes a device: functions that create tensors, `to`, `cuda`, `load`, generators, autocast, `GradScaler`;
- `torch.cuda`: one device, on which nothing has to be waited for;
- what tells one device from another: `is_cuda`, `is_available` and others answer like a GPU when code outside torch and
  this library asks, so that its assertions hold. Torch itself gets the truth.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import _builtins as jit_builtins
from torch.utils import _device as default_device

_KEEPS_TRUTH = ("torch", "anymamba")  # packages that are told which device a tensor is on
_NEW_TENSORS = ("new_tensor", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_NO_EFFECT = (
    *("empty_cache", "init", "ipc_collect", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction"),
    *("set_stream", "set_sync_debug_mode", "synchronize"),
)
_NO_MEMORY = (
    *("max_memory_allocated", "max_memory_cached", "max_memory_reserved"),
    *("memory_allocated", "memory_cached", "memory_reserved"),
)
_MISSING = object()
_replaced: list[tuple[Any, str, Any]] = []


def redirect() -> None:
    """Make `cuda` mean `cpu`, until `restore`.

    Raises:
        RuntimeError: There is a CUDA device.
    """
    if _replaced:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "anymamba.compat.install: cuda_as_cpu is for machines without a CUDA device, and this one has "
            f"{torch.cuda.device_count()}; CUDA_VISIBLE_DEVICES= hides them"
        )
    _redirect_devices()
    _redirect_autocast()
    _replace_cuda_module()
    _answer_like_a_gpu()
    print('anymamba.compat: cuda means cpu in this process: .cuda(), device="cuda", torch.cuda', file=sys.stderr)


def restore() -> None:
    """Put back what `redirect` replaced."""
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def _as_cpu(device: Any) -> Any:
    """Return "cpu" for a CUDA device, also one that is named by its number; anything else as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _redirect_keywords(function: Callable[..., Any], positional: bool = False) -> Callable[..., Any]:
    """Wrap a function whose keyword, or also first positional argument after `self`, is a device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if positional and len(args) > 1:
            args = (args[0], _as_cpu(args[1]), *args[2:])
        return function(*args, **kwargs)

    return call


def _redirect_devices() -> None:
    # 1) Functions that create tensors. torch.jit knows functions by their identity.
    constructors = default_device._device_constructors()
    for owner in (torch, torch.fft):
        for name, function in list(vars(owner).items()):
            if callable(function) and (name.endswith("_like") or _is_in(function, constructors)):
                redirected = _redirect_keywords(function)
                if builtin := jit_builtins._find_builtin(function):
                    jit_builtins._register_builtin(redirected, builtin)
                _replace(owner, name, redirected)
    for name in _NEW_TENSORS:
        _replace(Tensor, name, _redirect_keywords(getattr(Tensor, name)))
    # 2) Moves.
    _replace(Tensor, "to", _redirect_keywords(Tensor.to, positional=True))
    _replace(nn.Module, "to", _redirect_keywords(nn.Module.to, positional=True))
    for name in ("cuda", "pin_memory"):
        _replace(Tensor, name, lambda self, *args, **kwargs: self)
    _replace(Tensor, "record_stream", _constant(None))
    tensor_type = Tensor.type
    _replace(
        Tensor, "type", lambda self, dtype=None, *args, **kwargs: tensor_type(self, _cpu_type(dtype), *args, **kwargs)
    )
    # 3) Default devices, generators and files.
    context = default_device.DeviceContext
    _replace(context, "__init__", _redirect_keywords(context.__init__, positional=True))
    set_type = torch.set_default_tensor_type
    _replace(torch, "set_default_tensor_type", lambda kind: set_type(_cpu_type(kind)))
    _replace(torch, "Generator", _redirected_generator(torch.Generator))
    for owner in (torch, torch.serialization, torch.jit):
        _replace(owner, "load", _load_to_cpu(owner.load))


def _is_in(function: Any, functions: Any) -> bool:
    try:
        return function in functions
    except TypeError:  # an object that has no hash
        return False


def _constant(value: Any) -> Callable[..., Any]:
    """Return a new function that returns `value`. torch.compile wants one for each name."""
    return lambda *args, **kwargs: value


def _cpu_type(kind: Any) -> Any:
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def _redirected_generator(generator: Any) -> Any:
    class Kind(type(generator)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, generator)

    class Generator(generator, metaclass=Kind):  # type: ignore[misc]
        """torch.Generator, on the CPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(_as_cpu(device))

    return Generator


def _load_to_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_device = isinstance(map_location, str | torch.device)  # not a function or a table, which lead to CUDA
        return load(f, _as_cpu(map_location) if is_device else "cpu", *args, **kwargs)

    return call


def _redirect_autocast() -> None:
    autocast = torch.amp.autocast_mode.autocast
    initialize, initialize_scaler = autocast.__init__, torch.amp.GradScaler.__init__
    default_dtype = torch.get_autocast_dtype("cuda")

    def initialize_autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", default_dtype if dtype is None else dtype
        initialize(self, device_type, dtype, *args, **kwargs)

    def initialize_grad_scaler(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        initialize_scaler(self, _as_cpu(device), *args, **kwargs)

    _replace(autocast, "__init__", initialize_autocast)
    _replace(torch.amp.GradScaler, "__init__", initialize_grad_scaler)
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    _replace(torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(_as_cpu(device_type)))
    _replace(torch, "get_autocast_dtype", lambda device_type: get_dtype(_as_cpu(device_type)))
    _replace(torch, "get_autocast_gpu_dtype", lambda: get_dtype("cpu"))


def _seeder(generator: torch.Generator) -> Callable[[int], None]:
    def seed_cpu(seed: int) -> None:
        generator.manual_seed(int(seed))

    return seed_cpu


class _Event:
    """A point in time, in place of torch.cuda.Event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the present time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: _Event) -> float:
        """Return the milliseconds until the other event."""
        return (end_event._time - self._time) * 1000

    def query(self) -> bool:
        """Return that the work before the event is done."""
        return True

    wait = synchronize = _constant(None)


class _Stream:
    """The order in which the CPU computes anyway, in place of torch.cuda.Stream."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: _Event | None = None) -> _Event:
        """Record an event, a new one if none is given."""
        event = _Event() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    wait_event = wait_stream = synchronize = _constant(None)


class _Device:
    """A context without effect, in place of torch.cuda.device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _replace_cuda_module() -> None:
    generator, total = torch.default_generator, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=total, multi_processor_count=os.cpu_count() or 1
    )
    stream = _Stream()
    names: dict[str, Any] = {
        **{name: _constant(None) for name in _NO_EFFECT},
        **{name: _constant(0) for name in _NO_MEMORY},
        **{name: getattr(torch, name) for name in dir(torch.cuda) if name.endswith("Tensor")},
        "Event": _Event,
        "Stream": _Stream,
        "current_device": _constant(0),
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "device": _Device,
        "device_of": _Device,
        "get_device_capability": _constant((0, 0)),
        "get_device_name": _constant("CPU"),
        "get_device_properties": _constant(properties),
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "initial_seed": generator.initial_seed,
        "is_bf16_supported": _constant(True),
        "manual_seed": _seeder(generator),
        "manual_seed_all": _seeder(generator),
        "mem_get_info": _constant((total, total)),
        "memory_stats": lambda device=None: {},
        "memory_summary": _constant(""),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]) if states else None,
        "stream": lambda stream: nullcontext(),
    }
    for name, value in names.items():
        _replace(torch.cuda, name, value)
    for name in ("mark", "range_pop", "range_push"):
        _replace(torch.cuda.nvtx, name, _constant(None))
    _replace(torch.cuda.nvtx, "range", lambda *args, **kwargs: nullcontext())


def _answer_like_a_gpu() -> None:
    """Replace what asks for a device by functions whose answer depends on who asks."""
    is_cuda, get_device = inspect.getattr_static(Tensor, "is_cuda").__get__, Tensor.get_device
    _replace(Tensor, "is_cuda", property(lambda self: is_cuda(self) if _is_asked_by_torch() else True))
    _replace(Tensor, "get_device", lambda self: get_device(self) if _is_asked_by_torch() else 0)
    for name, answer in (("is_available", True), ("device_count", 1), ("is_initialized", True)):
        _replace(torch.cuda, name, _answering(getattr(torch.cuda, name), answer))


def _answering(function: Callable[[], Any], answer: Any) -> Callable[[], Any]:
    return lambda: function() if _is_asked_by_torch() else answer


def _is_asked_by_torch() -> bool:
    """Return whether the caller of the caller belongs to torch or to this library."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in _KEEPS_TRUTH
