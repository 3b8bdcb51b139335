"""Trees of tensors: named tuples whose fields are tensors, trees or tuples of trees, and their operations.

The batch is the first dimension of every tensor. A tree is a value: nothing here changes one.

Most caches have a fixed size. A cache that grows with the sequence, as the keys of attention do, names the tensors that
grow in `GROWING_FIELDS`: their second dimension is time, and the field `lengths` (b,) says how many steps of each row
are filled. What follows the filled steps of a row is padding, which every operation may add or remove:

- `cat` pads the growing tensors of shorter trees with zeros, so that rows of any lengths can share a batch;
- `rows` and `trim` cut them to the longest row that is left, so that a short row does not carry a long one's padding;
- `nbytes` counts what is stored, padding included; state files hold a trimmed tree, and any length is accepted there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype

Rows = Tensor | Sequence[int] | slice | int
Rule = Literal["activation", "state", "cpu"]
_Tree = TypeVar("_Tree", bound="Tree")


class Tree:
    """Methods for a named tuple; torch's own trees see the tuple.

    Attributes:
        FP32_FIELDS: Fields that stay float32 or float64 whatever the dtype of the activations.
        CPU_FIELDS: Fields that keep their dtype and stay on the CPU.
        GROWING_FIELDS: Fields (b, t, ...) whose second dimension is time; the tree then has a field `lengths` (b,),
            int64, which is one of `CPU_FIELDS`.
    """

    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset()
    GROWING_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @property
    def batch_size(self) -> int:
        """Number of rows (or packed sequences)."""
        return self.leaves()[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in memory."""
        return sum(x.nbytes for x in self.leaves())

    @property
    def bytes_per_step(self) -> int:
        """Size of what each further step adds to a row; 0 if nothing grows."""
        growing = self.growing_names()
        return sum(x.element_size() * math.prod(x.shape[2:]) for name, x in self.tensors().items() if name in growing)

    def leaves(self) -> list[Tensor]:
        """Return every tensor, in the order of the fields."""
        return _leaves(self)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name, such as "layers.0.ssm", in the order of the fields."""
        return dict(_named_leaves(self, ""))

    def growing_names(self) -> frozenset[str]:
        """Return the names of the tensors that grow with the sequence."""
        return frozenset(_growing_names(self, ""))

    def with_tensors(self: _Tree, tensors: Iterable[Tensor]) -> _Tree:
        """Return the same tree with other tensors, which are in the order of `leaves`.

        Raises:
            ValueError: More or fewer tensors than the tree has.
        """
        others = list(tensors)
        if len(others) != (count := len(self.leaves())):
            raise ValueError(f"{type(self).__name__}: expected {count} tensors, got {len(others)}")
        tree: _Tree = _fill_leaves(self, iter(others))
        return tree

    def clone(self: _Tree) -> _Tree:
        """Return a copy that shares no memory with this tree."""
        return self._map(lambda x, _: x.clone())

    def detach(self: _Tree) -> _Tree:
        """Return the same values without their autograd history."""
        return self._map(lambda x, _: x.detach())

    def to(
        self: _Tree, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> _Tree:
        """Move to another device, or cast for activations of another dtype; states keep at least float32."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        dtype_of_states = None if dtype is None else state_dtype(dtype)

        def move(x: Tensor, rule: Rule) -> Tensor:
            if rule == "cpu":
                return x
            return x.to(device=device, dtype=dtype_of_states if rule == "state" else dtype)

        return self._map(move)

    def rows(self: _Tree, index: Rows) -> _Tree:
        """Select rows of the batch; an index may repeat, to branch one sequence into several.

        Raises:
            IndexError: A row that does not exist.
            TypeError: An index that is not an integer, a list or tensor of integers, or a slice.
        """
        size = self.leaves()[0].shape[0]  # torch 2.10 traces no property of a named tuple
        valid_index = _check_row_index(index, size)

        def select(x: Tensor, rule: Rule) -> Tensor:
            return x[valid_index.cpu() if rule == "cpu" and isinstance(valid_index, Tensor) else valid_index]

        return self._map(select).trim()

    def trim(self: _Tree) -> _Tree:
        """Return the tree with its growing tensors cut to the longest row; the tree itself if nothing grows."""
        if torch.compiler.is_compiling() or not self.growing_names():
            return self
        tree: _Tree = _trim(self)
        return tree

    @classmethod
    def cat(cls: type[_Tree], trees: Iterable[_Tree]) -> _Tree:
        """Concatenate the rows of several trees; growing tensors are padded with zeros to the longest.

        Raises:
            ValueError: No tree, or trees that differ in more than the number of rows and the length of what grows.
        """
        parts = list(trees)
        if not parts:
            raise ValueError(f"{cls.__name__}.cat: expected at least one tree, got none")
        growing = parts[0].growing_names()
        first, *others = [_row_layouts(part, growing) for part in parts]
        for other in others:
            if differing := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
                name = differing[0]
                raise ValueError(
                    f"{cls.__name__}.cat: expected trees that differ in their rows alone, got {name} as "
                    f"{first.get(name)} and as {other.get(name)}"
                )
        columns = zip(first, zip(*(part.leaves() for part in parts), strict=True), strict=True)
        return parts[0].with_tensors(
            torch.cat(_pad_to_longest(tensors) if name in growing else tensors) for name, tensors in columns
        )

    def describe_problem(self) -> str:
        """Return what is wrong with the values; empty if nothing is."""
        problems = (text for name, x in self.tensors().items() if (text := _describe_non_finite(name, x)))
        return next(problems, "") or self.describe_wrong_lengths()

    def describe_wrong_lengths(self) -> str:
        """Return what is wrong with the lengths of what grows; empty if nothing is."""
        return _describe_wrong_lengths(self, "")

    def _map(self: _Tree, function: Callable[[Tensor, Rule], Tensor]) -> _Tree:
        """Return a tree of the results of `function` for each tensor and its rule."""
        fields: Any = self
        rules = [self._rule(name) for name in fields._fields]
        return type(self)(*[_map_node(x, function, rule) for x, rule in zip(fields, rules, strict=True)])

    @classmethod
    def _rule(cls, field: str) -> Rule:
        return "state" if field in cls.FP32_FIELDS else "cpu" if field in cls.CPU_FIELDS else "activation"


# The functions ask whether a node is a tuple, not whether it is a tensor, which takes torch several times as long.


def _map_node(node: Any, function: Callable[[Tensor, Rule], Tensor], rule: Rule) -> Any:
    if isinstance(node, Tree):
        return node._map(function)
    if isinstance(node, tuple):
        return tuple([_map_node(x, function, rule) for x in node])
    return function(node, rule)


def _leaves(node: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    for x in node:
        if isinstance(x, tuple):
            leaves += _leaves(x)
        else:
            leaves.append(x)
    return leaves


def _fill_leaves(node: Any, leaves: Iterator[Tensor]) -> Any:
    children = [_fill_leaves(x, leaves) if isinstance(x, tuple) else next(leaves) for x in node]
    return type(node)(*children) if isinstance(node, Tree) else tuple(children)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    names = node._fields if isinstance(node, Tree) else map(str, range(len(node)))  # type: ignore[attr-defined]
    return zip(names, node, strict=True)


def _named_leaves(node: Any, prefix: str) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    for name, x in _children(node):
        named += _named_leaves(x, f"{prefix}{name}.") if isinstance(x, tuple) else [(f"{prefix}{name}", x)]
    return named


def _growing_names(node: Any, prefix: str) -> Iterator[str]:
    for name, x in _children(node):
        if isinstance(node, Tree) and name in node.GROWING_FIELDS:
            yield f"{prefix}{name}"
        elif isinstance(x, tuple):
            yield from _growing_names(x, f"{prefix}{name}.")


def _trim(node: Any) -> Any:
    growing = node.GROWING_FIELDS if isinstance(node, Tree) else frozenset()
    longest = int(node.lengths.max()) if growing and node.lengths.numel() else 0
    children = [
        x[:, :longest] if name in growing else _trim(x) if isinstance(x, tuple) else x for name, x in _children(node)
    ]
    return type(node)(*children) if isinstance(node, Tree) else tuple(children)


def _row_layouts(tree: Tree, growing: frozenset[str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor by its name, without the rows and without the length of what grows."""
    return {name: (x.dtype, tuple(x.shape[2 if name in growing else 1 :])) for name, x in tree.tensors().items()}


def _pad_to_longest(tensors: Sequence[Tensor]) -> list[Tensor]:
    longest = max(x.shape[1] for x in tensors)
    return [torch.cat([x, x.new_zeros(x.shape[0], longest - x.shape[1], *x.shape[2:])], dim=1) for x in tensors]


def _describe_non_finite(name: str, x: Tensor) -> str:
    count = int((~torch.isfinite(x)).sum())
    return f"{name} holds {count} values that are not finite" if count else ""


def _describe_wrong_lengths(node: Any, prefix: str) -> str:
    """Return which growing tensors differ in length, or are shorter than `lengths` says; empty if none are."""
    if isinstance(node, Tree) and node.GROWING_FIELDS:
        stored = {name: x.shape[1] for name, x in _children(node) if name in node.GROWING_FIELDS}
        lengths: Tensor = node.lengths  # type: ignore[attr-defined]
        if len(set(stored.values())) > 1:
            return f"{prefix}{', '.join(stored)} must have one length, got {', '.join(map(str, stored.values()))}"
        t = next(iter(stored.values()))
        if lengths.numel() and not (int(lengths.min()) >= 0 and int(lengths.max()) <= t):
            return f"{prefix}lengths must be from 0 to {t}, got {lengths.tolist()[:8]}"
    problems = (_describe_wrong_lengths(x, f"{prefix}{name}.") for name, x in _children(node) if isinstance(x, tuple))
    return next(filter(None, problems), "")


def _check_row_index(index: Rows, size: int) -> Tensor | list[int] | slice:
    """Return an index that keeps the batch dimension, checked against the `size` of the batch."""
    if isinstance(index, slice):
        return index
    if isinstance(index, Tensor) and index.ndim == 1 and index.dtype in (torch.int32, torch.int64):
        valid_index: Tensor | list[int] = index
        # On other devices reading the numbers would synchronize; torch checks them there.
        numbers = [] if torch.compiler.is_compiling() or index.device.type != "cpu" else index.tolist()
    else:
        if isinstance(index, Tensor) and index.ndim == 1:
            index = index.tolist()
        try:
            valid_index = numbers = [_as_integer(i) for i in (index if isinstance(index, Sequence) else [index])]
        except TypeError:
            raise TypeError(
                f"rows: expected a row's number, several in a list or a tensor (n,), or a slice, got {index!r}"
            ) from None
    if invalid := [i for i in numbers if not -size <= i < size]:
        raise IndexError(f"rows: there are {size} rows, 0 to {size - 1}, got {invalid[0]}")
    return valid_index


def _as_integer(value: object) -> int:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.ndim):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]
