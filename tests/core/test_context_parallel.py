"""A sequence that several ranks share gives what it gives on one: outputs, caches, gradients."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist

from anymamba import Mamba1, Mamba2, Mamba3, MambaLM
from anymamba.core.context_parallel import ContextParallelGroup, SequencePart
from anymamba.models.loss import IGNORED_LABEL
from tests.ranks import run_cases
from tests.support import assert_near

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

BLOCKS = {
    "mamba1": lambda: Mamba1(d_model=8, d_state=4),
    "mamba1 narrow conv": lambda: Mamba1(d_model=8, d_state=4, d_conv=1, inner_norms="plain"),
    "mamba2": lambda: Mamba2(d_model=8, d_state=4, headdim=4, ngroups=2),
    "mamba2 learned start": lambda: Mamba2(d_model=8, d_state=4, headdim=4, d_conv=2, learnable_init_states=True),
    "mamba3": lambda: Mamba3(d_model=8, d_state=8, headdim=4),
    "mamba3 mimo": lambda: Mamba3(d_model=8, d_state=8, headdim=4, is_mimo=True, mimo_rank=2, ngroups=2),
    "mamba3 quaternion": lambda: Mamba3(d_model=8, d_state=8, headdim=4, rotation="quaternion"),
    "mamba3 fixed": lambda: Mamba3(d_model=8, d_state=8, headdim=4, rotation="fixed"),
    "mamba3 still": lambda: Mamba3(d_model=8, d_state=8, headdim=4, rope_fraction=0),
}

# Where ranks' parts begin and end, and where sequences do (none: rows of a batch). Cuts and boundaries fall together,
# one token apart, several boundaries to a part, and one sequence across all parts.
LAYOUTS = {
    2: {
        "rows": ([0, 11, 24], None),
        "one": ([0, 13, 24], [0, 24]),
        "at the cut": ([0, 12, 24], [0, 12, 24]),
        "next to the cut": ([0, 12, 24], [0, 11, 13, 24]),
        "some": ([0, 9, 24], [0, 3, 4, 8, 15, 16, 24]),
    },
    3: {
        "rows": ([0, 4, 11, 24], None),
        "across all": ([0, 5, 9, 24], [0, 3, 20, 24]),
        "some": ([0, 8, 16, 24], [0, 7, 16, 17, 24]),
    },
}


def cp_group_of(rank):
    return ContextParallelGroup(list(range(dist.get_world_size())), rank)


def part_of(rank, cuts, bounds):
    """Return this rank's interval, its boundaries, the numbers of its sequences, and its context."""
    begin, end = cuts[rank], cuts[rank + 1]
    cp_group = cp_group_of(rank)
    if bounds is None:
        return begin, end, None, None, SequencePart(cp_group, rank > 0, rank + 1 < cp_group.size)
    numbers = [z for z in range(len(bounds) - 1) if bounds[z] < end and bounds[z + 1] > begin]
    inner = [bounds[z] - begin for z in numbers if bounds[z] > begin]
    local = torch.tensor([0, *inner, end - begin])
    return begin, end, local, numbers, SequencePart(cp_group, begin not in bounds, end not in bounds)


def random_cache(block, rows):
    cache = block.init_cache(rows)
    noise = [torch.randn_like(x) for x in cache]
    if "quaternion" in block.config.__dict__.get("rotation", ""):
        noise[-1] = noise[-1] / noise[-1].norm(dim=-1, keepdim=True)
    return type(cache)(*noise)


def block_case(rank, make, cuts, bounds, carried):
    """Compare outputs, the cache of sequences that end here, and gradients of weights, inputs and carried states."""
    block, t = make().double(), 24
    b = 2 if bounds is None else 1
    x, weight = torch.randn(b, t, 8).double(), torch.randn(b, t, 8).double()
    rows = b if bounds is None else len(bounds) - 1
    cache = random_cache(block, rows) if carried else None
    leaves = [x.requires_grad_(), *(v.requires_grad_() for v in cache or ())]
    whole_bounds = None if bounds is None else torch.tensor(bounds)
    y, new = block.prefill(x, cache, cu_seqlens=whole_bounds)
    (y * weight).sum().backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in (*leaves, *block.parameters())]
    block.zero_grad()
    begin, end, local, numbers, context = part_of(rank, cuts, bounds)
    mine = x.detach()[:, begin:end].requires_grad_()
    states = [v.detach()[slice(None) if numbers is None else numbers].requires_grad_() for v in cache or ()]
    start = type(cache)(*states) if cache else None
    y_here, new_here = block.prefill(mine, start, cu_seqlens=local, context=context)
    (y_here * weight[:, begin:end]).sum().backward()
    assert_near(y_here, y[:, begin:end], 1e-10, "y")
    last = new_here.rows(slice(-1, None) if numbers else slice(None))
    if not context.continues_to_next:
        for name, state in last.tensors().items():
            whole_state = new.tensors()[name][slice(numbers[-1], numbers[-1] + 1) if numbers else slice(None)]
            assert_near(state, whole_state, 1e-10, name)
    assert_near(mine.grad, expected[0][:, begin:end], 1e-10, "dx")
    for name, state, whole_grad in zip(type(cache)._fields if cache else (), states, expected[1:], strict=False):
        # The gradient of a start is where its sequence begins.
        begins_here = [i for i, z in enumerate(numbers or range(b)) if bounds is None or bounds[z] >= begin]
        if bounds is None:
            begins_here = begins_here if rank == 0 else []
        for i in begins_here:
            z = i if numbers is None else numbers[i]
            assert_near(state.grad[i], whole_grad[z], 1e-10, f"d{name}", least=1e-12)
    for p, whole_grad in zip(block.parameters(), expected[len(leaves) :], strict=True):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        assert_near(grad, whole_grad, 1e-10, "weights", least=1e-12)


def model_case(rank, family, checkpointing):
    """Compare the loss of a language model and its gradients, with and without activation checkpointing."""
    fields = {} if family == "Mamba1" else {"headdim": 8}
    stack = {"checkpointing": checkpointing}
    model = MambaLM(
        d_model=16, n_layer=2, vocab_size=11, ssm_cfg={"layer": family, "d_state": 8, **fields}, stack=stack
    ).double()  # fmt: skip
    ids, targets, bounds = torch.randint(11, (1, 30)), torch.randint(11, (1, 30)), [0, 6, 21, 30]
    targets[0, [5, 20]] = IGNORED_LABEL
    nats = model(ids, targets=targets, cu_seqlens=torch.tensor(bounds), logits="none").nats
    nats.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    begin, end, local, _, context = part_of(rank, [0, 14, 30], bounds)
    local_nats = model(
        ids[:, begin:end], targets=targets[:, begin:end], cu_seqlens=local, logits="none", context=context
    ).nats  # fmt: skip
    local_nats.backward()
    total = local_nats.detach().clone()
    dist.all_reduce(total)
    assert_near(total, nats, 1e-12)
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        assert_near(p.grad, expected[name], 1e-10, name, least=1e-12)


def bytes_case(rank, make):
    """Check that a layer sends one row of its cache forward and as many bytes back, whatever the length."""
    block = make()
    cache = block.init_cache(1)
    bytes_sent = []
    for length in (8, 64):
        cp_group = cp_group_of(rank)
        context = SequencePart(cp_group, rank > 0, rank + 1 < cp_group.size)
        y, _ = block.prefill(torch.randn(1, length, 8), context=context)
        y.sum().backward()
        bytes_sent.append(cp_group.sent)
    assert bytes_sent == [cache.nbytes, cache.nbytes], (bytes_sent, cache.nbytes)


def rejection_case(rank):
    """Check that parts that are too short, and options that parts do not allow, are rejected."""
    context = SequencePart(cp_group_of(rank), rank > 0, rank == 0)
    block, x = BLOCKS["mamba2"](), torch.randn(1, 8, 8)
    for words, call in {
        "must have 4 tokens or more, got 3": lambda: block.prefill(x[:, :3], context=context),
        "cannot be combined": lambda: block.prefill(x, mask=torch.tensor([8]), context=context),
        "context cannot be combined with labels": lambda: MambaLM(
            d_model=8, n_layer=1, vocab_size=8, ssm_cfg={"layer": "Mamba1"}
        )(torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long), context=context),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()


RANK_CASES = {
    size: {
        f"{block}, {layout}, {'carried' if carried else 'fresh'}": functools.partial(
            block_case, make=make, cuts=cuts, bounds=bounds, carried=carried
        )
        for layout, (cuts, bounds) in layouts.items()
        for block, make in BLOCKS.items()
        for carried in (True, False)
    }
    for size, layouts in LAYOUTS.items()
}
RANK_CASES[2] |= {
    f"{family} model{', recomputed' if again else ''}": functools.partial(
        model_case, family=family, checkpointing=again
    )
    for family in ("Mamba1", "Mamba2", "Mamba3")
    for again in (False, True)
}
RANK_CASES[2] |= {f"bytes of {name}": functools.partial(bytes_case, make=make) for name, make in BLOCKS.items()}
RANK_CASES[2]["rejections"] = rejection_case


@functools.cache
def messages(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_parts_of_a_sequence_are_the_whole(size, name):
    assert not messages(size)[name], messages(size)[name]
