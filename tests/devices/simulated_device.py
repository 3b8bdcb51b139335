"""An accelerator that is simulated on the CPU: it computes every value, and rejects what would stall a real one.

Torch sees a device of its own type, `DEVICE`, with tensors, autograd and factories; the numbers of a tensor are held in
an ordinary tensor of the CPU. Inside `forbid_synchronization()` an operation raises `SynchronizationError` if a real
device would make the host wait: reading a value, a size that depends on values, or a copy between host and device.
An operation on tensors of different devices always raises.

Registering a device cannot be undone, so this module is imported in a process of its own (`test_simulated_device.py`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Backend(_DummyBackendModule):
    """What `torch.simulated` offers."""

    def synchronize(self) -> None:
        """Do nothing: every operation is complete when it returns."""


_setup_privateuseone_for_python_backend("simulated", backend_module=_Backend())
DEVICE = torch.device("simulated:0")

# Operations that read values on the host, or whose result has a size that depends on values.
_READING = {"_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim"}
_READING |= {"unique_consecutive", "bincount", "equal", "is_nonzero", "histc"}
_INDEXED_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}


class SynchronizationError(RuntimeError):
    """An operation that makes the host wait for the device."""


class _State:
    """What the device forbids and counts."""

    forbids = False
    launches: ClassVar[Counter[str]] = Counter()


@contextmanager
def forbid_synchronization() -> Iterator[Counter[str]]:
    """Raise in this context for what would stall a device; yield the count of operations by name."""
    _State.forbids, _State.launches = True, Counter()
    try:
        yield _State.launches
    finally:
        _State.forbids = False


class SimulatedTensor(Tensor):
    """A tensor on `DEVICE`, whose numbers are in `on_cpu`."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> "SimulatedTensor":
        x = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=DEVICE,
        )
        x.on_cpu = on_cpu
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    if func.namespace == "anymamba":
        # A real device would run the operator's implementation on its own tensors.
        return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
    _check(name, args, kwargs)
    if _State.forbids and func is torch.ops.aten.repeat_interleave.Tensor:
        raise SynchronizationError("repeat_interleave: its size depends on values")
    _State.launches[name] += 1
    target = kwargs.get("device")
    args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
    if target is not None:
        kwargs["device"] = "cpu"
    result = func(*args, **kwargs)
    if target is not None and torch.device(target).type == "cpu":
        return result
    return pytree.tree_map(lambda x: SimulatedTensor(_resolve(x)) if isinstance(x, Tensor) else x, result)


def _resolve(x: Tensor) -> Tensor:
    """Compute a lazy conjugate or negation: its mark would be lost with the wrapper."""
    return x.resolve_conj().resolve_neg()


def _on_cpu(x: Any) -> Any:
    return x.on_cpu if isinstance(x, SimulatedTensor) else x


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    elsewhere = [x for x in tensors if not isinstance(x, SimulatedTensor) and x.ndim]
    if elsewhere and name not in ("copy_", "_to_copy"):
        raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, got one on {elsewhere[0].device}")
    if not _State.forbids:
        return
    target = kwargs.get("device")
    is_copied = elsewhere or (target is not None and torch.device(target).type != DEVICE.type)
    indices = pytree.tree_leaves(args[1]) if name in _INDEXED_BY_MASK else []
    has_mask = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices)
    if name in _READING or has_mask or is_copied:
        raise SynchronizationError(f"{name}: makes the host wait for the device")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    _State.launches["empty"] += 1
    return SimulatedTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between host and device, which waits unless the memory of the host is pinned."""
    if _State.forbids:
        raise SynchronizationError("a copy between host and device makes the host wait")
    _on_cpu(target).copy_(_on_cpu(source))
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
