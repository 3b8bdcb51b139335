"""Predicted costs are those of real steps: bytes of the collectives, operations of the products."""

import functools
import os
import socket
import struct
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.cost_model import (
    Machine,
    Mesh,
    Message,
    best_context,
    messages,
    ring_attention_bytes,
    sizes_of,
    step_seconds,
)
from benchmarks.scale import options_of, tables
from torch.utils.flop_counter import FlopCounterMode

from anymamba import MambaLM, MambaLMConfig, SsdPath, portable
from anymamba.scan.chunking import compute_final_state
from anymamba.training.api import create_run
from anymamba.training.distributed.process_group import World
from tests.models.cases import FAMILIES
from tests.ranks import run_cases, shared_directory
from tests.training.cases import silent, tiny

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

MAMBA1 = {"family": "Mamba1", "headdim": None}
MAMBA2 = {"family": "Mamba2"}
MAMBA3 = {"family": "Mamba3"}
ODD = {"family": "Mamba2", "d_model": 20, "headdim": 8}  # rows that the ranks do not divide evenly
PARTS = {"batch": {"tokens": 256, "accumulation": 2}}

# A model, further sections, and a mesh, by the number of ranks.
STEPS = {
    2: {
        "replicate, mamba1": (MAMBA1, {}, {}),
        "replicate, mamba3, parts": (MAMBA3, PARTS, {}),
        "replicate, bfloat16": (MAMBA2, {}, {"reduce": "bfloat16"}),
        "shard, mamba1": (MAMBA1, {}, {"shard": 2}),
        "shard, mamba2, untied": ({**MAMBA2, "tie_embeddings": False}, {}, {"shard": 2}),
        "shard, mamba3, parts": (MAMBA3, PARTS, {"shard": 2}),
        "shard, again": (MAMBA2, {"precision": {"activation_checkpointing": True}}, {"shard": 2}),
        "context, mamba1": (MAMBA1, {}, {"context": 2}),
        "context, mamba2, parts": (MAMBA2, PARTS, {"context": 2}),
        "context, mamba3": (MAMBA3, {}, {"context": 2}),
    },
    3: {
        "shard, odd": (ODD, {"batch": {"tokens": 192}}, {"shard": 3}),
        "context, mamba3": (MAMBA3, {"batch": {"tokens": 192}}, {"context": 3}),
    },
    4: {
        "replicate and shard": (MAMBA1, PARTS, {"replicate": 2, "shard": 2}),
        "replicate and context": (MAMBA3, {}, {"replicate": 2, "context": 2}),
        "shard and context": (ODD, {}, {"shard": 2, "context": 2}),
        "shard": (MAMBA3, {"batch": {"tokens": 256}}, {"shard": 4}),
    },
}


# The collectives of a step by kind: their names in versions of torch, and where their whole tensor is among the
# arguments.
EXCHANGES = {
    "all-reduce": (("all_reduce",), 0, "tensor"),
    "all-gather": (("all_gather_single", "all_gather_into_tensor"), 0, "output_tensor"),
    "reduce-scatter": (("reduce_scatter_single", "reduce_scatter_tensor"), 1, "input"),
    "send": (("isend",), 0, "tensor"),
}
OTHERS = ("all_gather", "broadcast", "gather", "scatter", "reduce", "all_to_all", "all_to_all_single", "send")


@contextmanager
def count_exchanges():
    """Collect the bytes of collectives in the context, by kind and number of ranks; scalars are left out."""
    sizes_by_kind, nested = Counter(), []

    def wrap(function, kind, index, name):
        def call(*args, **kwargs):
            whole = args[index] if len(args) > index else kwargs[name]
            world = 2 if kind == "send" else dist.get_world_size(kwargs.get("group"))
            if not nested and whole.numel() > 1:
                sizes_by_kind[kind, world] += whole.nbytes
            nested.append(kind)  # one of them may call another
            try:
                return function(*args, **kwargs)
            finally:
                nested.pop()

        return call

    def unexpected_exchange(*args, **kwargs):
        raise AssertionError("a step has no such exchange")

    with pytest.MonkeyPatch.context() as patch:
        for kind, (names, index, argument) in EXCHANGES.items():
            for name in names:
                if hasattr(dist, name):
                    patch.setattr(dist, name, wrap(getattr(dist, name), kind, index, argument))
        for name in OTHERS:
            patch.setattr(dist, name, unexpected_exchange)
        yield sizes_by_kind


def step_case(rank, name, model, sections, mesh):
    """Take one step of a real run; with context parallelism each rank has a part of one document's row."""
    corpus, size = shared_directory("corpus"), dist.get_world_size()
    if rank == 0:
        corpus.mkdir(exist_ok=True)
        for number in range(5):
            (corpus / f"{number}.txt").write_bytes(b"some words of a text " * 500)
    dist.barrier()
    shard, context = mesh.get("shard", 1), mesh.get("context", 1)
    batch = {"tokens": 192 if size == 3 else 256, "accumulation": 1, **sections.get("batch", {})}
    batch["length"] = batch["tokens"] // batch["accumulation"] // (size // context) if context > 1 else 32
    config = tiny(corpus, model=model, parallel={"timeout": 60, **mesh}, **{**sections, "batch": batch})
    trainer = create_run(config, shared_directory(name), silent, World(rank, size))
    trainer._take_step()  # of which FSDP's is longer
    with count_exchanges() as sizes_by_kind:
        trainer._take_step()
    expected = messages(
        sizes_of(config.model.lm_config(256)),
        Mesh(size // (context * shard), shard, context),
        parts=batch["accumulation"],
        cp_rank=rank % context,
        gradient=2 if mesh.get("reduce") == "bfloat16" else 4,
    )
    assert expected
    assert dict(sizes_by_kind) == {(message.kind, message.ranks): message.size for message in expected}


def bytes_on_the_wire():
    """Return the bytes that this process has sent over TCP."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                counts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", counts, 200)[0]  # tcpi_bytes_sent
    return total


def wire_case(rank):
    """Check that a ring sends as much as predicted, and gloo's reduce-scatter as much as its all-reduce, twice that."""
    size, number = dist.get_world_size(), 2**18
    whole, part = torch.ones(size * number), torch.ones(number)
    one = Message("all-reduce", size, whole.nbytes)
    for expected, call in (
        (one, lambda: dist.all_reduce(whole)),
        (one, lambda: dist.reduce_scatter_tensor(part, whole)),
        (one._replace(kind="all-gather"), lambda: dist.all_gather_into_tensor(whole, part)),
    ):
        call()  # which connects
        dist.barrier()
        before = bytes_on_the_wire()
        call()
        dist.barrier()
        assert bytes_on_the_wire() - before == pytest.approx(expected.sent, rel=0.01)


RANK_CASES = {
    size: {
        name: functools.partial(step_case, name=name, model=model, sections=sections, mesh=mesh)
        for name, (model, sections, mesh) in steps.items()
    }
    for size, steps in STEPS.items()
}
if Path("/proc/self/fd").exists():
    for cases in RANK_CASES.values():
        cases["wire"] = wire_case


@functools.cache
def errors(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_a_step_sends_what_is_predicted(size, name):
    assert not errors(size)[name], errors(size)[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_as_many_operations_as_predicted(family):
    """Projections, MLP and head, and the products of a scan in chunks; the backward pass takes twice as many."""
    config = MambaLMConfig(d_model=32, n_layer=2, vocab_size=61, d_intermediate=128, ssm_cfg=FAMILIES[family])
    model, sizes, length = MambaLM(config), sizes_of(config), 64
    path = None if family == "Mamba1" else SsdPath.for_block(model.backbone.layers[0].mixer, "serial")
    with portable():
        with FlopCounterMode(display=False) as forward:
            logits = model(torch.randint(61, (1, length)), path=path).logits
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    rel = 5e-3 if "MIMO" in family else 0  # whose ranks are mixed by small products of their own
    for counts, factor in ((forward, 1), (backward, 2)):
        counts_by_operator = counts.get_flop_counts()["Global"]
        scan = counts_by_operator[torch.ops.aten.bmm] / length
        assert (sum(counts_by_operator.values()) / length - scan) == factor * sizes.products
        if family != "Mamba1":
            assert scan == pytest.approx(factor * sizes.scan, rel=rel)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.layers * sizes.carried == model.init_cache(1).nbytes


def test_the_state_of_a_part_takes_as_many_operations_as_predicted():
    sizes = sizes_of(MambaLMConfig(d_model=32, n_layer=1, vocab_size=8, ssm_cfg=dict(FAMILIES["Mamba2"])))
    with FlopCounterMode(display=False) as counter:
        compute_final_state(torch.randn(1, 24, 1, 8, 8), torch.randn(1, 24, 1, 2, 16), -torch.rand(1, 24, 8))
    assert counter.get_total_flops() == 24 * sizes.again


def test_a_row_is_shared_by_as_many_ranks_as_pay():
    """More and fewer of them take longer; ring attention sends more with every token, and context does not."""
    sizes = sizes_of(MambaLMConfig(d_model=64, n_layer=2, vocab_size=64, ssm_cfg=dict(FAMILIES["Mamba2"])))
    machine, length = Machine(flops=1e9, bandwidth=1e8, latency=1e-4, memory=1e9), 10**6
    best = round(best_context(sizes, length, machine))
    seconds = {
        context: step_seconds(sizes, Mesh(context=context), 1, length, machine)
        for context in (best // 4, best // 2, best, 2 * best, 4 * best)
    }
    assert min(seconds, key=seconds.get) == best
    ring = [ring_attention_bytes(2, 64, t, 8) for t in (1000, 2000)]
    assert ring == [3 * 2 * 2 * 64 * 2 * 875, 3 * 2 * 2 * 64 * 2 * 1750]


@pytest.mark.parametrize(("layers", "context"), [(1, 2), (2, 3), (6, 2), (5, 9)])
def test_a_shared_row_takes_the_time_of_its_schedule(layers, context):
    """Rank by rank and layer by layer, there and back."""
    sizes = sizes_of(MambaLMConfig(d_model=64, n_layer=layers, vocab_size=64, ssm_cfg=dict(FAMILIES["Mamba2"])))
    machine, length = Machine(flops=1e9, bandwidth=1e6, latency=1e-2, memory=1e9), 90
    work = length / context * sizes.flops(context) / machine.flops / (2 * layers)
    end_times = [0.0] * context
    for order in (range(context), reversed(range(context))):
        ranks = list(order)
        for _ in range(layers):
            received = 0.0
            for rank in ranks:
                end_times[rank] = max(end_times[rank] + work, received)
                if rank != ranks[-1]:
                    end_times[rank] += machine.hop(sizes)
                received = end_times[rank]
    whole = step_seconds(sizes, Mesh(context=context), 1, length, machine)
    gradients = sum(m.sent for m in messages(sizes, Mesh(replicate=context))) / machine.bandwidth
    assert max(end_times) == pytest.approx(whole - gradients)


def test_the_document_has_the_tables_that_are_predicted():
    text = (Path(__file__).parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
    for line in tables(options_of([])):
        assert line in text


def test_layers_that_differ_are_rejected():
    with pytest.raises(ValueError, match=r"layers must be alike and pass once, got stack = \{'n_virtual': 4\}"):
        sizes_of(MambaLMConfig(d_model=16, n_layer=2, vocab_size=8, stack={"n_virtual": 4}))
