"""Trees of tensors: named tuples whose fields are tensors, trees or tuples of trees, and their operations.

The batch is the first dimension of every tensor. A tree is a value: nothing here changes one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

Rows = Tensor | Sequence[int] | slice | int
Rule = Literal["activation", "state", "kept"]
_Tree = TypeVar("_Tree", bound="Tree")


class Tree:
    """Methods for a named tuple; torch's own trees see the tuple.

    `FP32_FIELDS` names the fields that stay float32 or wider whatever the dtype of the activations, `CPU_FIELDS` those
    that keep their dtype and stay on the CPU.
    """

    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @property
    def batch_size(self) -> int:
        """Rows (or packed sequences)."""
        return self.leaves()[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(x.nbytes for x in self.leaves())

    def leaves(self) -> list[Tensor]:
        """Every tensor, in the order of the fields."""
        return _leaves(self)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name, "layers.0.ssm", in the order of the fields."""
        return dict(_named(self, ""))

    def with_tensors(self: _Tree, tensors: Iterable[Tensor]) -> _Tree:
        """The same tree with other tensors, which come in the order of `leaves`.

        Raises:
            ValueError: there are more or fewer of them.
        """
        others = list(tensors)
        if len(others) != (count := len(self.leaves())):
            raise ValueError(f"{type(self).__name__}: expected {count} tensors, got {len(others)}")
        made: _Tree = _filled(self, iter(others))
        return made

    def clone(self: _Tree) -> _Tree:
        """A copy that shares no memory with this one."""
        return self._map(lambda x, _: x.clone())

    def detach(self: _Tree) -> _Tree:
        """The same values without their autograd history."""
        return self._map(lambda x, _: x.detach())

    def to(
        self: _Tree, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> _Tree:
        """On another device, or for activations of another dtype; states keep at least float32."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def move(x: Tensor, rule: Rule) -> Tensor:
            if rule == "kept":
                return x
            return x.to(device=device, dtype=wide if dtype is not None and rule == "state" else dtype)

        return self._map(move)

    def rows(self: _Tree, index: Rows) -> _Tree:
        """Select rows of the batch; an index may repeat, to branch one sequence into several.

        Raises:
            IndexError: there is no such row.
            TypeError: `index` is not a whole number, a list or tensor of them, or a slice.
        """
        size = self.leaves()[0].shape[0]  # torch 2.10 traces no property of a named tuple
        chosen = _row_index(index, size)

        def select(x: Tensor, rule: Rule) -> Tensor:
            return x[chosen.cpu() if rule == "kept" and isinstance(chosen, Tensor) else chosen]

        return self._map(select)

    @classmethod
    def cat(cls: type[_Tree], trees: Iterable[_Tree]) -> _Tree:
        """The rows of several, one after another.

        Raises:
            ValueError: there are none, or their tensors differ in more than the number of rows.
        """
        parts = list(trees)
        if not parts:
            raise ValueError(f"{cls.__name__}.cat: expected at least one, got none")
        first, *others = [{name: (x.dtype, tuple(x.shape[1:])) for name, x in part.tensors().items()} for part in parts]
        for other in others:
            if wrong := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
                found = f"{wrong[0]} as {first.get(wrong[0])} and as {other.get(wrong[0])}"
                raise ValueError(f"{cls.__name__}.cat: expected trees that differ in their rows alone, got {found}")
        return parts[0].with_tensors(torch.cat(x) for x in zip(*(part.leaves() for part in parts), strict=True))

    def problem(self) -> str:
        """What is wrong with its values, in words; empty if nothing is."""
        return next((text for name, x in self.tensors().items() if (text := _not_finite(name, x))), "")

    def _map(self: _Tree, function: Callable[[Tensor, Rule], Tensor]) -> _Tree:
        """A tree of the results of `function` on each tensor and its rule."""
        fields: Any = self
        rules = [self._rule(name) for name in fields._fields]
        return type(self)(*[_mapped(x, function, rule) for x, rule in zip(fields, rules, strict=True)])

    @classmethod
    def _rule(cls, field: str) -> Rule:
        return "state" if field in cls.FP32_FIELDS else "kept" if field in cls.CPU_FIELDS else "activation"


# Whether a node is a tuple is asked, not whether it is a tensor, which takes torch several times as long.


def _mapped(node: Any, function: Callable[[Tensor, Rule], Tensor], rule: Rule) -> Any:
    if isinstance(node, Tree):
        return node._map(function)
    if isinstance(node, tuple):
        return tuple([_mapped(x, function, rule) for x in node])
    return function(node, rule)


def _leaves(node: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in node:
        if isinstance(x, tuple):
            found += _leaves(x)
        else:
            found.append(x)
    return found


def _filled(node: Any, leaves: Iterator[Tensor]) -> Any:
    children = [_filled(x, leaves) if isinstance(x, tuple) else next(leaves) for x in node]
    return type(node)(*children) if isinstance(node, Tree) else tuple(children)


def _named(node: Any, prefix: str) -> list[tuple[str, Tensor]]:
    names = node._fields if isinstance(node, Tree) else range(len(node))  # type: ignore[attr-defined]
    found: list[tuple[str, Tensor]] = []
    for key, x in zip(names, node, strict=True):
        found += _named(x, f"{prefix}{key}.") if isinstance(x, tuple) else [(f"{prefix}{key}", x)]
    return found


def _not_finite(name: str, x: Tensor) -> str:
    wrong = int((~torch.isfinite(x)).sum())
    return f"{name} holds {wrong} values that are not finite" if wrong else ""


def _row_index(index: Rows, size: int) -> Tensor | list[int] | slice:
    """An index of rows that keeps the batch dimension, checked against the `size` of the batch."""
    if isinstance(index, slice):
        return index
    if isinstance(index, Tensor) and index.ndim == 1 and index.dtype in (torch.int32, torch.int64):
        chosen: Tensor | list[int] = index
        # On other devices this would have to wait for the numbers; torch checks them there.
        known = [] if torch.compiler.is_compiling() or index.device.type != "cpu" else index.tolist()
    else:
        if isinstance(index, Tensor) and index.ndim == 1:
            index = index.tolist()
        try:
            chosen = known = [_integer(i) for i in (index if isinstance(index, Sequence) else [index])]
        except TypeError:
            raise TypeError(
                f"rows: expected a row's number, several in a list or a tensor (n,), or a slice, got {index!r}"
            ) from None
    if wrong := [i for i in known if not -size <= i < size]:
        raise IndexError(f"rows: there are {size} rows, 0 to {size - 1}, got {wrong[0]}")
    return chosen


def _integer(value: object) -> int:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.ndim):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]
