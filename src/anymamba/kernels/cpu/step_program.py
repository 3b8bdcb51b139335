"""One token through a block or a whole model in one call to the compiled kernels.

A program is recorded from modules: phases over *slots*, which are columns of a matrix with one row a token. Its phases
read parameters where they lie and in the dtype they have; everything between them is float32, or float64 for float64.
It has no gradient and is not traced.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.hooks import GLOBAL_HOOKS
from anymamba.core.weight_formats import QuantizedWeight, storage_layout
from anymamba.kernels.cpu import schema
from anymamba.kernels.cpu.bindings import DTYPES, WEIGHT_FORMATS, empty, missing, run

MAX_ROWS = 64  # beyond, a matrix product is no longer bound by memory, and torch's own is the faster one
OUTPUT = -1  # in place of a slot
_ALIGNED = 16  # elements
_CPU = torch.device("cpu")
_KINDS = {kind: number for number, kind in enumerate(schema.PHASE_KINDS)}
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Watched:
    """Entries of tables, modules and parameters, in flat lists: they are looked at for every token."""

    def __init__(self) -> None:
        """Watch nothing but torch's global hooks."""
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._entries: list[Any] = []
        self._modules: list[nn.Module] = []
        self._members: list[Sized] = [*GLOBAL_HOOKS]
        self._parameters: list[Tensor] = []

    def entry(self, owner: dict[str, Any], name: str) -> Any:
        """`owner[name]`, or None."""
        found = owner.get(name)
        self._owners.append(owner)
        self._names.append(name)
        self._entries.append(found)
        return found

    def module(self, module: nn.Module) -> None:
        """Its type, and how many hooks, submodules, parameters and other attributes it has."""
        self._modules.append(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        self._members += [*hooks, module._modules, module._parameters, vars(module)]

    def parameter(self, x: Tensor) -> None:
        """Its address."""
        self._parameters.append(x)

    def look(self) -> tuple[list[int], list[type], list[int]]:
        """All of it that may change."""
        return (
            list(map(len, self._members)),
            list(map(type, self._modules)),
            list(map(Tensor.data_ptr, self._parameters)),
        )

    def is_as(self, seen: tuple[list[int], list[type], list[int]]) -> bool:
        """Whether nothing has changed."""
        same = all(map(operator.is_, map(dict.get, self._owners, self._names), self._entries))
        return same and self.look() == seen


class NotCoveredError(Exception):
    """Why the kernels cannot run a module: only its own code knows how."""


class Program:
    """Phases, the slots between them, and the tensors of a cache that they read and write.

    It holds the storages of the parameters that it reads, so that nothing is used after it was freed.

    Args:
        record: adds the phases; it calls `refuse` where there are none for a module.
        dtype: of the output, and of the activations that a cache holds.
        input_width: channels of the input, which lies in slot 0.
        input_dtype: of the input.
        watched: takes what the program is recorded from.

    Raises:
        NotCoveredError: there are no phases for a module, or no kernels.
    """

    def __init__(
        self,
        record: Callable[[Program], None],
        dtype: torch.dtype,
        input_width: int,
        input_dtype: torch.dtype,
        watched: Watched | None = None,
    ) -> None:
        """Record."""
        if reason := missing(dtype) or missing(input_dtype):
            raise NotCoveredError(reason)
        self.dtype, self.input_width, self.input_dtype = dtype, input_width, input_dtype
        self.wide = state_dtype(dtype)
        self.output_width = 0
        self._phases: list[tuple[int, ctypes.Structure]] = []
        self._next = self._width = 0
        self._cache: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._calls: dict[int, tuple[list[Any], Any]] = {}
        self._storages: list[Any] = []
        self._watched = watched or Watched()
        self.phase("read", width=input_width, slot=self.slot(input_width))
        record(self)
        phase = schema.c_structure("Phase")
        entries = (phase(kind=kind, args=ctypes.addressof(args)) for kind, args in self._phases)
        self._table = (phase * len(self._phases))(*entries)
        self._pointers = ctypes.c_void_p * len(self._cache)

    # Recording

    def refuse(self, reason: str) -> NoReturn:
        """Say that the kernels cannot run a module."""
        raise NotCoveredError(reason)

    def check_plain(self, module: Any, kind: type, name: str = "", harmless: Collection[Any] = ()) -> None:
        """Refuse a module that is not exactly of `kind`, or has hooks (but `harmless` ones), or methods of its own."""
        name = name or type(module).__name__
        if isinstance(module, nn.Module):
            self._watched.module(module)
        if type(module) is not kind:
            self.refuse(f"{name} is a {type(module).__name__}, not a {kind.__name__}")
        found: Any = module  # for mypy, which takes `type(module) is not kind` for the end of it
        hooks = (*found._forward_hooks.values(), *found._forward_pre_hooks.values())
        if any(GLOBAL_HOOKS) or any(hook not in harmless for hook in hooks):
            self.refuse(f"{name} has hooks")
        if any(callable(getattr(kind, member, None)) for member in vars(module)):
            self.refuse(f"{name} has methods of its own")

    def child(self, owner: nn.Module, name: str, kind: type) -> Any:
        """A plain submodule."""
        child = self._watched.entry(owner._modules, name)
        self.check_plain(child, kind, name)
        return child

    def number(self, owner: nn.Module, name: str) -> Any:
        """A number among the attributes of a module."""
        return self._watched.entry(vars(owner), name)

    def watch(self, owner: nn.Module, *names: str) -> None:
        """Record again when one of these attributes of a module is another object."""
        for name in names:
            self._watched.entry(vars(owner), name)

    def rotation(self, kind: str) -> int:
        """The number by which the kernels know a kind of rotation."""
        return schema.ROTATIONS.index(kind)

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

    def parameter(self, owner: nn.Module, name: str, *shape: int, optional: bool = False) -> Any:
        """A parameter of a module, read in place; a null one for an optional parameter that is None."""
        x = self._watched.entry(owner._parameters, name)
        dtypes = (self.wide,) if self.wide == torch.float64 else _NARROW
        return schema.c_structure("Parameter")() if x is None and optional else self._read(x, name, shape, dtypes)

    def buffer(self, owner: nn.Module, name: str, *shape: int) -> Any:
        """A buffer of a module, read in place."""
        dtypes = (self.wide,) if self.wide == torch.float64 else _NARROW
        return self._read(self._watched.entry(owner._buffers, name), name, shape, dtypes, Tensor)

    def _read(
        self,
        x: Any,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        kind_of: type = nn.Parameter,
        number: int | None = None,
    ) -> Any:
        if isinstance(x, Tensor) and type(x) is kind_of:
            self._watched.parameter(x)
        if not isinstance(x, Tensor) or type(x) is not kind_of or x.device != _CPU or x.dtype not in dtypes:
            self.refuse(f"{name} must be a {kind_of.__name__.lower()} in memory, of one of {dtypes}")
        if x.shape != shape or not x.is_contiguous() or x.is_neg() or not x.data_ptr():
            self.refuse(f"{name} must be contiguous, of shape {shape}")
        self._storages.append(x.untyped_storage())
        return schema.c_structure("Parameter")(data=x.data_ptr(), dtype=DTYPES[x.dtype] if number is None else number)

    def phase(self, kind: str, **fields: Any) -> None:
        """Add a phase of a kind, with the fields of its structure (`arguments.PHASE_KINDS`)."""
        structure = schema.c_structure(schema.PHASE_KINDS[kind])(**fields)
        self._phases.append((_KINDS[kind], structure))

    def linear(
        self,
        x: int,
        owner: nn.Module,
        name: str,
        width: int,
        out: int,
        *,
        to: int | None = None,
        add: bool = False,
        kind: type[nn.Linear] = nn.Linear,
    ) -> int:
        """The submodule `name`, a projection, applied to slot `x`: in a new slot, or in `to`, or added to it."""
        if isinstance(narrow := owner._modules.get(name), QuantizedWeight):
            fields = self._narrow_weight(owner, name, type(narrow), out, width)
        else:
            fields = self.plain_weight(self.child(owner, name, kind), out, width, name)
        to = self.slot(out) if to is None else to
        self.project(x, width, out, fields, to=to, add=add)
        return to

    def plain_weight(self, linear: nn.Linear, out: int, width: int, name: str = "weight") -> dict[str, Any]:
        """The fields of a projection with a weight in the dtype of the activations."""
        fields = {"weight": self.parameter(linear, "weight", out, width)}
        fields["bias"] = self.parameter(linear, "bias", out, optional=True)
        if linear.weight.dtype != self.dtype:
            self.refuse(f"{name} is {linear.weight.dtype}, not {self.dtype}")
        return fields

    def project(self, x: int, width: int, out: int, fields: dict[str, Any], *, to: int, add: bool = False) -> None:
        """A matrix, which is in `fields`, times slot `x`: in slot `to`, or added to it."""
        if to == OUTPUT:
            self.output_width = out
        self.phase("linear", **{"in": width}, out=out, x=x, to=to, add=add, **fields)

    def _narrow_weight(
        self, owner: nn.Module, name: str, kind: type[QuantizedWeight], out: int, width: int
    ) -> dict[str, Any]:
        """The fields of a projection with a weight in a narrow format."""
        linear = self.child(owner, name, kind)
        is_covered = "HAS_COMPILED_FORWARD" in vars(kind) and linear.format in WEIGHT_FORMATS
        if not is_covered or self.wide == torch.float64:
            self.refuse(f"{name} is a {kind.__name__} in {linear.format}, for activations of {self.dtype}")
        fields = {"bias": self.parameter(linear, "bias", out, optional=True)}
        for part, (shape, dtype) in storage_layout(linear.format, out, width).items():
            x = self._watched.entry(linear._parameters, part)
            number = WEIGHT_FORMATS[linear.format] if part == "weight" else None
            field = "scale" if part == "scales" else part
            fields[field] = self._read(x, f"{name}.{part}", shape, (dtype,), number=number)
        return fields

    def norm(
        self,
        x: int,
        norm: Any,
        width: int,
        *,
        z: int = -1,
        to: int | None = None,
        eps: float | None = None,
        group_size: int | None = None,
        norm_before_gate: bool | None = None,
    ) -> int:
        """An RMS norm over `width` channels, with a gate if `z` is given.

        Args:
            x: slot of what is normed.
            norm: the module whose weight it takes; None for a norm without weights.
            width: channels.
            z: slot of the gates; none if negative.
            to: slot of the result, which may be `x`; a new one if not given.
            eps: added to the mean square; the module's `eps` if not given, like the next two for a gated norm.
            group_size: channels that are normed together; without a gate, all if not given.
            norm_before_gate: the order of the two.
        """
        to = self.slot(width) if to is None else to
        gated = z >= 0
        if group_size is None:
            group_size = self.number(norm, "group_size") if gated else width
        if norm_before_gate is None:
            norm_before_gate = gated and self.number(norm, "norm_before_gate")
        if group_size < 1 or width % group_size:
            self.refuse(f"groups of {group_size} do not divide the {width} channels")
        self.phase(
            "norm",
            width=width,
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            eps=self.number(norm, "eps") if eps is None else eps,
            x=x,
            z=z,
            to=to,
            weight=schema.c_structure("Parameter")() if norm is None else self.parameter(norm, "weight", width),
        )
        return to

    def scale(self, x: int, width: int, *, factor: int | float = 1.0, weight: Any = None, to: int | None = None) -> int:
        """`factor x`, times a `weight` for each channel if there is one (from `parameter` or `buffer`)."""
        to = self.slot(width) if to is None else to
        weight = schema.c_structure("Parameter")() if weight is None else weight
        self.phase("scale", width=width, x=x, to=to, factor=factor, weight=weight)
        return to

    def gate(self, x: int, z: int, width: int, *, to: int | None = None) -> int:
        """`x silu(z)`."""
        to = self.slot(width) if to is None else to
        self.phase("gate", width=width, x=x, z=z, to=to)
        return to

    def conv(self, x: int, conv: nn.Module, channels: int, width: int) -> int:
        """A causal convolution with SiLU, with the next tensor of the cache."""
        to = self.slot(channels)
        self.phase(
            "conv",
            channels=channels,
            width=width,
            x=x,
            to=to,
            cache_window=self.cached(channels, width),
            weight=self.parameter(conv, "weight", channels, 1, width),
            bias=self.parameter(conv, "bias", channels, optional=True),
        )
        return to

    def write(self, slot: int, width: int) -> None:
        """The output is a slot."""
        self.output_width = width
        self.phase("write", width=width, slot=slot)

    # Running

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False) -> tuple[Tensor, list[Tensor]] | None:
        """Take a step.

        Args:
            x: (b, input_width), with up to `MAX_ROWS` rows.
            cache: the tensors of the cache, in the order in which they were recorded.
            in_place: write the new cache over the old one.

        Returns:
            The output (b, output_width) and the new cache; None where the kernels do not cover them.
        """
        b = x.shape[0] if x.ndim == 2 else 0
        if not 1 <= b <= MAX_ROWS or x.shape[1] != self.input_width or x.dtype != self.input_dtype:
            return None
        expected, template = self._calls[b] if b in self._calls else self._prepare(b)
        if [(old.shape, old.dtype, old.device) for old in cache] != expected or x.device != _CPU:
            return None
        x = x if x.stride(-1) == 1 else x.contiguous()
        before = [old if old.is_contiguous() and not old.is_neg() else old.contiguous().resolve_neg() for old in cache]
        after = before if in_place else list(map(torch.empty_like, before))
        output = empty((b, self.output_width), self.dtype)
        old, new = self._pointers(*map(Tensor.data_ptr, before)), self._pointers(*map(Tensor.data_ptr, after))
        args = type(template).from_buffer_copy(template)  # of this call: other threads may run the program too
        args.threads = torch.get_num_threads()
        args.input, args.input_row, args.output = x.data_ptr(), x.stride(0), output.data_ptr()
        args.old_cache, args.new_cache = ctypes.addressof(old), ctypes.addressof(new)
        run("run_program", args)
        del old, new  # until here: `args` holds their addresses only
        return output, after

    def _prepare(self, b: int) -> tuple[list[Any], Any]:
        """What every call with b rows has in common: what its cache must be, and the fields of its structure."""
        expected = [(torch.Size((b, *shape)), dtype, _CPU) for shape, dtype in self._cache]
        template = schema.c_structure("ProgramArgs")(
            dtype=DTYPES[self.dtype],
            batch=b,
            width=self._width,
            count=len(self._phases),
            phases=ctypes.addressof(self._table),
            input_dtype=DTYPES[self.input_dtype],
            output_width=self.output_width,
        )
        self._calls[b] = expected, template
        return expected, template
