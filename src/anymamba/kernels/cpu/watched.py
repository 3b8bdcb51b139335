"""What a program was recorded from, and whether it is still so."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

from torch import Tensor, nn

from anymamba.ground.modules import GLOBAL_HOOKS


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
