"""One implementation of the verbs for every tree of tensors: caches of blocks and models, and states of generations."""

from typing import ClassVar, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from anymamba.core.cache_io import SavableTree, restore_tree
from anymamba.core.cache_tree import Tree
from tests.models.cases import FAMILIES, small_lm


class _LeafFields(NamedTuple):
    narrow: torch.Tensor
    state: torch.Tensor


class Leaf(_LeafFields, Tree):
    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset({"state"})


class _RootFields(NamedTuple):
    parts: tuple[Leaf, ...]
    pair: tuple[tuple[torch.Tensor, ...], ...]
    one: Leaf
    counts: torch.Tensor


class Root(_RootFields, Tree):
    __slots__ = ()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"counts"})


NAMES = [
    *("parts.0.narrow", "parts.0.state", "parts.1.narrow", "parts.1.state"),
    *("pair.0.0", "pair.0.1", "pair.1.0", "one.narrow", "one.state", "counts"),
]


def leaf(rows):
    return Leaf(torch.randn(rows, 2), torch.randn(rows, 3, 4, requires_grad=True))


def root(rows=3):
    pair = ((torch.randn(rows), torch.randn(rows, 1)), (torch.randn(rows, 5),))
    return Root((leaf(rows), leaf(rows)), pair, leaf(rows), torch.arange(rows))


def trees():
    """Make one tree of every class."""
    for family in FAMILIES:
        model = small_lm(family)
        state = model.generate(torch.randint(61, (3, 5)), 2, seed=0, return_state=True).state
        yield from (state, state.cache, state.cache.layers[0])


def test_tensors_have_dotted_names_in_the_order_of_the_fields():
    tree = root()
    assert list(tree.tensors()) == NAMES
    assert all(a is b for a, b in zip(tree.tensors().values(), tree.leaves(), strict=True))
    assert tree.tensors()["pair.1.0"] is tree.pair[1][0]
    assert (tree.batch_size, tree.nbytes) == (3, sum(x.nbytes for x in tree.leaves()))


def test_every_tree_of_the_library_is_tensors_and_nothing_else():
    for tree in trees():
        assert all(isinstance(x, torch.Tensor) for x in tree.leaves())
        assert {x.shape[0] for x in tree.leaves()} == {3}


def test_trees_of_torch_see_the_same_leaves():
    for tree in (root(), *trees()):
        leaves, structure = _pytree.tree_flatten(tree)
        assert all(a is b for a, b in zip(leaves, tree.leaves(), strict=True))
        again = _pytree.tree_unflatten(leaves, structure)
        assert type(again) is type(tree)
        assert list(again.tensors()) == list(tree.tensors())


def test_other_tensors_are_put_in_their_places():
    tree = root()
    others = [torch.full_like(x, i) for i, x in enumerate(tree.leaves())]
    replaced = tree.with_tensors(others)
    assert isinstance(replaced, Root)
    assert all(a is b for a, b in zip(replaced.leaves(), others, strict=True))
    assert isinstance(replaced.parts[1], Leaf)
    assert replaced.pair[1][0] is others[6]
    for wrong in (others[:-1], [*others, others[0]], []):
        with pytest.raises(ValueError, match=f"Root: expected 10 tensors, got {len(wrong)}"):
            tree.with_tensors(wrong)


def test_a_clone_shares_no_memory_and_a_detached_one_has_no_history():
    tree = root()
    clone, detached = tree.clone(), tree.detach()
    for x, copy, plain in zip(tree.leaves(), clone.leaves(), detached.leaves(), strict=True):
        assert torch.equal(x, copy)
        assert x.data_ptr() != copy.data_ptr() == copy.data_ptr()
        assert x.data_ptr() == plain.data_ptr()
        assert not plain.requires_grad
    assert clone.one.state.requires_grad


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_states_stay_wide_and_what_is_kept_stays_as_it_is(dtype, wide):
    for moved in (root().to(dtype), root().to(dtype=dtype), root().to("cpu", dtype)):
        dtypes = {name: x.dtype for name, x in moved.tensors().items()}
        assert dtypes == {
            name: torch.int64 if name == "counts" else wide if name.endswith("state") else dtype for name in NAMES
        }


def test_what_is_kept_stays_on_the_cpu():
    moved = root().to("meta")
    assert {name for name, x in moved.tensors().items() if x.device.type == "cpu"} == {"counts"}


@pytest.mark.parametrize("index", [1, [2, 0, 2], slice(1, 3), torch.tensor([2, 1], dtype=torch.int32), []], ids=str)
def test_rows_are_selected_everywhere(index):
    tree, expected = root(), [index] if isinstance(index, int) else index
    chosen = tree.rows(index)
    for x, selected in zip(tree.leaves(), chosen.leaves(), strict=True):
        assert torch.equal(selected, x[expected])


def test_cat_is_the_inverse_of_rows():
    tree = root()
    joined = Root.cat(tree.rows(i) for i in range(3))
    assert isinstance(joined, Root)
    assert all(torch.equal(a, b) for a, b in zip(joined.leaves(), tree.leaves(), strict=True))
    alone = Root.cat([tree])
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(alone.leaves(), tree.leaves(), strict=True))


def test_what_differs_in_more_than_rows_is_not_joined():
    tree = root()
    with pytest.raises(ValueError, match=r"Root.cat: expected at least one tree, got none"):
        Root.cat([])
    with pytest.raises(ValueError, match=r"parts.0.narrow as \(torch.float32, \(2,\)\) and as \(torch.float64,"):
        Root.cat([tree, tree.to(torch.float64)])
    with pytest.raises(ValueError, match=r"parts.1.narrow as \(torch.float32, \(2,\)\) and as None"):
        Root.cat([tree, tree._replace(parts=tree.parts[:1])])
    other = tree._replace(one=tree.one._replace(narrow=torch.zeros(3, 9)))
    with pytest.raises(ValueError, match=r"one.narrow as \(torch.float32, \(2,\)\) and as \(torch.float32, \(9,\)\)"):
        Root.cat([tree, other])


def test_values_that_are_not_finite_are_a_problem():
    tree = root()
    assert tree.describe_problem() == ""
    tree.parts[1].narrow[0, 1], tree.parts[1].narrow[2, 0] = float("nan"), float("-inf")
    assert tree.describe_problem() == "parts.1.narrow holds 2 values that are not finite"


class _KeysFields(NamedTuple):
    k: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor


class Keys(_KeysFields, SavableTree):
    """What attention would keep: keys (b, t, n) that grow, how many of them each row has, and a part of fixed size."""

    __slots__ = ()
    GROWING_FIELDS: ClassVar[frozenset[str]] = frozenset({"k"})
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"lengths"})


class _HybridFields(NamedTuple):
    layers: tuple[Tree, ...]


class Hybrid(_HybridFields, Tree):
    __slots__ = ()


def keys(*lengths, spare=0):
    """Make rows with these many keys, in a buffer that can hold `spare` more."""
    k = torch.zeros(len(lengths), max(lengths, default=0) + spare, 4)
    for row, length in enumerate(lengths):
        k[row, :length] = torch.randn(length, 4)
    return Keys(k, torch.tensor(lengths, dtype=torch.int64), torch.randn(len(lengths), 3))


def assert_rows_equal(tree, *parts):
    """Assert that the rows of a tree are those of the parts, whatever the padding."""
    rows = [part.rows([i]) for part in parts for i in range(part.batch_size)]
    assert tree.batch_size == len(rows)
    for i, row in enumerate(rows):
        length = int(row.lengths)
        assert int(tree.lengths[i]) == length
        assert torch.equal(tree.k[i, :length], row.k[0])
        assert not tree.k[i, length:].any()
        assert torch.equal(tree.last[i], row.last[0])


def test_rows_of_any_lengths_share_a_batch():
    a, b, empty = keys(5, 0, 2, spare=3), keys(7), keys(0)
    tree = Keys.cat([a, b, empty])
    assert tree.k.shape == (5, 8, 4)
    assert_rows_equal(tree, a, b, empty)
    assert_rows_equal(Keys.cat([tree, a]), a, b, empty, a)
    with pytest.raises(ValueError, match="differ in their rows alone, got k as"):
        Keys.cat([a, b._replace(k=b.k[..., :2])])


def test_selected_rows_do_not_carry_the_padding_of_others():
    tree = keys(5, 1, 0, 3, spare=2)
    assert [tree.rows(index).k.shape[:2] for index in ([1], [3, 1], [2], slice(None))] == [
        (1, 1),
        (2, 3),
        (1, 0),
        (4, 5),
    ]
    assert_rows_equal(tree.rows([3, 3]), tree.rows(3), tree.rows(3))
    assert tree.rows([1]).nbytes == 4 * 4 + 8 + 3 * 4
    assert tree.rows([]).k.shape == (0, 0, 4)


def test_growing_trees_inside_others_are_found_by_name():
    tree = Hybrid((leaf(2), keys(3, 1, spare=1)))
    assert tree.growing_names() == {"layers.1.k"}
    assert root().growing_names() == frozenset()
    assert tree.trim().layers[1].k.shape == (2, 3, 4)
    other = Hybrid((leaf(1), keys(6)))
    together = Hybrid.cat([tree, other])
    assert_rows_equal(together.layers[1], tree.layers[1], other.layers[1])
    assert_rows_equal(together.rows([2]).layers[1], other.layers[1])


def test_casts_keep_lengths_and_padding():
    tree = keys(2, 4).to(torch.bfloat16)
    assert (tree.k.dtype, tree.lengths.dtype, tree.last.dtype) == (torch.bfloat16, torch.int64, torch.bfloat16)
    assert_rows_equal(tree, tree)


@pytest.mark.parametrize("lengths", [(3, 1), (0, 0), ()])
def test_growing_trees_are_saved_without_padding_and_loaded(tmp_path, lengths):
    tree = keys(*lengths, spare=4)
    tree.save(tmp_path / "state")
    loaded = Keys.load(tmp_path / "state")
    assert loaded.k.shape == (len(lengths), max(lengths, default=0), 4)
    assert_rows_equal(loaded, tree)
    like = keys(9)
    assert_rows_equal(restore_tree("file", like, loaded.tensors()), tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([3, 9])}, r"file: lengths must be from 0 to 3, got \[3, 9\]"),
        ({"lengths": torch.tensor([3, -1])}, r"file: lengths must be from 0 to 3, got \[3, -1\]"),
        ({"k": torch.zeros(2, 3, 5)}, r"file: k must be torch.float32 of shape \(2, steps, 4\)"),
        ({"k": torch.zeros(2)}, r"file: k must be torch.float32 of shape \(2, steps, 4\)"),
        ({"k": torch.full((2, 3, 4), torch.nan)}, "file: k holds 24 values that are not finite"),
    ],
)
def test_files_with_wrong_growing_tensors_are_rejected(change, message):
    tree = keys(3, 1)
    with pytest.raises(ValueError, match=message):
        restore_tree("file", tree, {**tree.tensors(), **change})
