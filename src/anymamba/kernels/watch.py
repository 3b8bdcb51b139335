"""What was read from modules when something was recorded from them, and whether it still stands there.

A program holds addresses of parameters. Parameters may be replaced, moved or cast, modules exchanged, wrapped, patched
or hooked between two tokens: then the program is recorded anew, or the modules are called as they are.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class NotCovered(Exception):  # noqa: N818
    """A module that only its own code knows how to run."""


class Watch:
    """Remembers members, types, hooks and memory."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._members: list[Any] = []
        self._modules: list[weakref.ref[nn.Module]] = []  # a watch lives in a module, which must be let go of
        self._values: list[tuple[weakref.ref[nn.Module], str, Any]] = []
        self._kinds: list[type] = []
        self._sizes: list[int] = []
        self._hooks: list[Any] = []
        self.parameters: list[Tensor] = []
        self._memory: list[Any] | None = None

    def module(self, module: nn.Module, kind: type) -> None:
        """A module that must be exactly of `kind`, with no hooks on it and none of its methods replaced.

        What is replaced in a class itself, for all modules of it, is not seen.
        """
        self._modules.append(weakref.ref(module))
        self._kinds.append(type(module))
        self._sizes.append(_size(module))
        self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        patched = any(callable(getattr(type(module), name, None)) for name in vars(module))
        if type(module) is not kind or patched or any(self._hooks) or _any_global_hooks():
            raise NotCovered

    def child(self, owner: nn.Module, name: str, kind: type) -> Any:
        """A submodule."""
        child = owner._modules.get(name)
        self._member(owner._modules, name, child)
        if child is None:
            raise NotCovered
        self.module(child, kind)
        return child

    def value(self, owner: nn.Module, name: str) -> Any:
        """A plain attribute: a number, or a config."""
        value = owner.__dict__[name]
        self._values.append((weakref.ref(owner), name, value))
        return value

    def parameter(self, owner: nn.Module, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
        """A parameter (None where the module has none of the name): contiguous, in memory, of one of `dtypes`."""
        x = owner._parameters.get(name)
        self._member(owner._parameters, name, x)
        if x is None:
            return None
        self.parameters.append(x)
        if type(x) is not nn.Parameter or x.device.type != "cpu" or x.dtype not in dtypes or not x.is_contiguous():
            raise NotCovered
        return x

    def close(self) -> None:
        """End of recording: remember where the parameters lie."""
        self._memory = _memory(self.parameters)

    def _member(self, owner: dict[str, Any], name: str, member: Any) -> None:
        self._owners.append(owner)
        self._names.append(name)
        self._members.append(member)

    def holds(self) -> bool:
        """Whether everything is as it was. A model has hundreds of members: these loops run outside of Python."""
        modules = [module() for module in self._modules]
        return (
            not any(self._hooks)
            and not _any_global_hooks()
            and list(map(type, modules)) == self._kinds
            and list(map(_size, modules)) == self._sizes
            and all(map(is_, map(dict.get, self._owners, self._names), self._members))
            and all(vars(owner()).get(name) is value for owner, name, value in self._values)
            and _memory(self.parameters) == self._memory
        )


def _any_global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _size(module: nn.Module | None) -> int:
    """How many members a module has: whatever is patched in is one more."""
    members = vars(module)
    return len(members) + len(members["_modules"]) + len(members["_parameters"])


def _memory(parameters: list[Tensor]) -> list[Any]:
    """Where the numbers of each parameter lie, and how."""
    return [list(map(read, parameters)) for read in (Tensor.data_ptr, _DTYPE, _SHAPE, Tensor.stride)]


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
