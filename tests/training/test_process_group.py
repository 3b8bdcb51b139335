"""Several ranks train as one process does: the same tokens, the same losses, the same weights."""

import functools
import json
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist

from anymamba import MambaLM
from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.config.sections import ParallelSection
from anymamba.training.distributed.process_group import AllRanksError, World
from anymamba.training.metrics.loggers import read_metrics
from tests.ranks import run_cases, shared_directory
from tests.support import assert_near
from tests.training.cases import draw_nothing, silent, tiny, write_corpus

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

STEPS = 4
MAMBA1 = {"model": {"family": "Mamba1", "headdim": None}}
MAMBA2 = {"model": {"family": "Mamba2"}}
STREAM = {"data": {"mode": "stream"}}
MUON = {"optimizer": {"kind": "muon"}}
PARTS = {"batch": {"tokens": 256, "accumulation": 2}}
LONG = {"batch": {"tokens": 128, "length": 128}}  # one row, which ranks share
AGAIN = {"precision": {"activation_checkpointing": True}}

# What is trained, and the meshes it is trained on, by the number of ranks.
RUNS = {
    2: {
        "replicate": ({}, {}),
        "replicate, stream, parts": (STREAM | PARTS, {}),
        "replicate, muon": (MUON, {}),
        "shard": (MAMBA1, {"shard": 2}),
        "shard, stream, parts": (STREAM | PARTS, {"shard": 2}),
        "shard, muon": (MUON, {"shard": 2}),
        "shard, recomputed": (MAMBA2 | AGAIN, {"shard": 2}),
        "context": (LONG, {"context": 2}),
        "context, mamba1": (LONG | MAMBA1, {"context": 2}),
        "context, stream, parts": (MAMBA2 | STREAM | PARTS, {"context": 2}),
        "context, stream, recomputed": (LONG | STREAM | AGAIN, {"context": 2}),
    },
    4: {
        "replicate": (PARTS, {}),
        "replicate and shard": (STREAM | PARTS | MUON, {"replicate": 2, "shard": 2}),
        "shard and context": (STREAM, {"shard": 2, "context": 2}),
        "replicate and context": ({"batch": {"tokens": 256, "length": 128}}, {"replicate": 2, "context": 2}),
        "context": (LONG | STREAM, {"context": 4}),
    },
}


def config_of(fields, mesh):
    corpus = shared_directory("corpus")
    sections = {"precision": {"dtype": "float64"}, "schedule": {"steps": STEPS}, "evaluation": {"sample_tokens": 3}}
    sections["checkpoints"] = {"every": 2}
    for name, values in fields.items():
        sections[name] = {**sections.get(name, {}), **values} if isinstance(values, dict) else values
    return tiny(corpus, parallel={"timeout": 60, **mesh}, **sections)


def world_of(rank):
    return World(rank, dist.get_world_size())


def prepare(rank):
    draw_nothing()
    if rank == 0:
        write_corpus(shared_directory("corpus"))
    dist.barrier()


def losses_of(directory):
    return [(row.loss, row.gradient_norm, *row.evaluation.values()) for row in read_metrics(directory / "metrics.csv")]


def alone(rank, fields):
    """Train the same run in one process; return its directory."""
    directory = shared_directory("alone") / re.sub(r"\W", "", json.dumps(fields))
    if rank == 0 and not (directory / "model.safetensors").exists():
        create_run(config_of(fields, {}), directory, silent).run(shown=False)
    dist.barrier()
    return directory


def assert_same_run(directory, expected, tolerance=1e-7):
    for actual, reference in zip(losses_of(directory), losses_of(expected), strict=True):
        assert actual == pytest.approx(reference, rel=tolerance), (losses_of(directory), losses_of(expected))
    ours, theirs = (MambaLM.from_pretrained(d).state_dict() for d in (directory, expected))
    for name in theirs:
        assert_near(ours[name], theirs[name], 1e-7, name)
    samples = [(d / "samples" / f"step-{STEPS:08d}.txt").read_bytes() for d in (directory, expected)]
    assert samples[0] == samples[1]


def run_case(rank, name, fields, mesh):
    """Check that losses, norms, evaluations and final weights are those of one process."""
    prepare(rank)
    expected, directory = alone(rank, fields), shared_directory(name)
    create_run(config_of(fields, mesh), directory, silent, world_of(rank)).run(shown=False)
    if rank == 0:
        assert_same_run(directory, expected)
    dist.barrier()


def resume_case(rank, name, fields, first, then):
    """Check that a run that is stopped and continues on another mesh ends as one process does."""
    prepare(rank)
    expected, directory = alone(rank, fields), shared_directory(name)
    trainer = create_run(config_of(fields, first), directory, silent, world_of(rank))
    trainer.run([lambda row: row.step == 3], shown=False)
    assert trainer.step == 3
    assert not trainer.finished
    usual = {"replicate": "none", "shard": "1", "context": "1"}
    changes = {f"parallel.{key}": str(then.get(key, value)) for key, value in usual.items()}
    open_run(directory, changes, silent, world_of(rank)).run(shown=False)
    if rank == 0:
        assert_same_run(directory, expected)
    dist.barrier()


def exact_resume_case(rank, fields, mesh):
    """Check that a run that was stopped ends in the same bits as one that was not, on the same mesh."""
    prepare(rank)
    ends = []
    for name in ("whole", "stopped"):
        directory = shared_directory(f"{name}-{'-'.join(mesh)}")
        stop = [lambda row: row.step == 3] if name == "stopped" else []
        create_run(config_of(fields, mesh), directory, silent, world_of(rank)).run(stop, shown=False)
        if stop:
            open_run(directory, {}, silent, world_of(rank)).run(shown=False)
        ends.append(list_checkpoints(directory / "checkpoints")[0])
        dist.barrier()
    if rank == 0:
        for path in ends[0].glob("*.safetensors"):
            assert path.read_bytes() == (ends[1] / path.name).read_bytes(), path
    dist.barrier()


def alone_after_case(rank):
    """Check that a run of several ranks continues in one process."""
    prepare(rank)
    fields = STREAM | PARTS
    expected, directory = alone(rank, fields), shared_directory("then alone")
    create_run(config_of(fields, {"shard": 2}), directory, silent, world_of(rank)).run(
        [lambda row: row.step == 3], shown=False
    )
    if rank == 0:
        open_run(directory, {"parallel.shard": "1"}, silent).run(shown=False)
        assert_same_run(directory, expected)
    dist.barrier()


MISTAKES = {
    "must be the number of ranks, got 2": ({}, {"replicate": 3}),
    "1 · 2 · 2 must be the number of ranks": ({}, {"replicate": 1, "shard": 2, "context": 2}),
    "must be a multiple of the ranks that divide them": ({"batch": {"tokens": 32, "length": 32}}, {}),
    "must have 4 tokens or more, got 3": (MAMBA2 | {"batch": {"tokens": 6, "length": 6}}, {"context": 2}),
    "torch cannot compile layers": ({"precision": {"compile": True}}, {"context": 2}),
}


def mistakes_case(rank):
    """Check that every rank raises the same error before a file is written."""
    prepare(rank)
    for number, (words, (fields, mesh)) in enumerate(MISTAKES.items()):
        directory = shared_directory(f"mistake{number}")
        with pytest.raises(AllRanksError, match=words):
            create_run(config_of(fields, mesh), directory, silent, world_of(rank))
        assert not directory.exists()


def mistake_elsewhere_case(rank):
    """Check that an error on one rank ends all of them, and names that rank."""

    def look():
        if rank == 1:
            raise ValueError("no such file")

    with pytest.raises(AllRanksError, match="rank 1 of 2: no such file"):
        world_of(rank).run_checked(look)


def bfloat16_case(rank):
    """Check that gradients summed in bfloat16 are close to others; the computation may be in bfloat16 as well."""
    prepare(rank)
    for mesh in ({}, {"shard": 2}, {"context": 2}):
        fields = {"precision": {"dtype": "bfloat16"}}
        directory = shared_directory(f"bfloat16{'-'.join(mesh)}")
        trainer = create_run(config_of(fields, {**mesh, "reduce": "bfloat16"}), directory, silent, world_of(rank))
        trainer.run(shown=False)
        if rank == 0:
            losses, alone_losses = losses_of(directory), losses_of(alone_bfloat16())
            assert_near(torch.tensor(losses[0]), torch.tensor(alone_losses[0]), 3e-2)
            assert_near(torch.tensor(losses[-1][:1]), torch.tensor(alone_losses[-1][:1]), 3e-2)
        dist.barrier()


def alone_bfloat16():
    directory = shared_directory("alone bfloat16")
    if not (directory / "model.safetensors").exists():
        create_run(config_of({"precision": {"dtype": "bfloat16"}}, {}), directory, silent).run(shown=False)
    return directory


def overflow_case(rank):
    """Check that a loss that is not finite on one rank stops all of them, before the weights are changed."""
    prepare(rank)
    for mesh in ({}, {"shard": 2}, {"context": 2}):
        directory = shared_directory(f"overflow{'-'.join(mesh)}")
        trainer = create_run(config_of({}, mesh), directory, silent, world_of(rank))
        cost = trainer.task.loss

        def broken(*inputs, cost=cost):
            nats, state = cost(*inputs)
            return nats * float("inf") if rank == 1 else nats, state

        trainer.task.loss = broken
        with pytest.raises(FloatingPointError, match=r"not finite first: .*rank 1 of 2"):
            trainer.run(shown=False)
        assert trainer.step == 0


def hang_case(rank):
    """Check that the error names a rank that does not respond, and what the others wait for."""
    world = world_of(rank)
    world.set_mesh(ParallelSection(timeout=2), torch.device("cpu"))
    heard, end = shared_directory("heard"), time.monotonic() + 60
    if rank == 1:
        while not heard.exists() and time.monotonic() < end:
            time.sleep(0.1)
        return
    with pytest.raises(TimeoutError, match=r"waited 2 s to sum gradients .*no answer from rank 1 "):  # noqa: SIM117
        with world.translate_comm_errors():
            world.all_reduce_sum(torch.zeros(3), "to sum gradients")
    heard.touch()


RANK_CASES = {
    size: {
        name: functools.partial(run_case, name=name, fields=fields, mesh=mesh) for name, (fields, mesh) in runs.items()
    }
    for size, runs in RUNS.items()
}
RANK_CASES[2] |= {
    "resumed, shard to context": functools.partial(
        resume_case, name="a", fields=STREAM | PARTS | MUON, first={"shard": 2}, then={"context": 2}
    ),
    "resumed, context to replicate": functools.partial(
        resume_case, name="b", fields=STREAM, first={"context": 2}, then={}
    ),
    "resumed, exactly, shard": functools.partial(exact_resume_case, fields=STREAM | MUON, mesh={"shard": 2}),
    "resumed, exactly, context": functools.partial(exact_resume_case, fields=STREAM, mesh={"context": 2}),
    "resumed alone": alone_after_case,
    "mistakes": mistakes_case,
    "mistake elsewhere": mistake_elsewhere_case,
    "bfloat16": bfloat16_case,
    "overflow": overflow_case,
    "hang": hang_case,  # last: it leaves the process group broken
}
RANK_CASES[4] |= {
    "resumed, shard and context to replicate": functools.partial(
        resume_case, name="c", fields=STREAM, first={"shard": 2, "context": 2}, then={"replicate": 4}
    ),
}


@functools.cache
def messages(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_ranks_train_as_one_process_does(size, name):
    assert not messages(size)[name], messages(size)[name]
