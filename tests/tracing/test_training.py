"""Runs whose layers torch compiles."""

import math
import os
import shutil

import pytest
import torch

from anymamba.training.api import create_run, open_run
from anymamba.training.metrics.loggers import read_metrics
from tests.training.cases import silent, tiny, write_corpus

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"),
    # Raised by torch's compiler itself.
    pytest.mark.filterwarnings(
        "ignore:`torch._prims_common.check` is deprecated", "ignore:The .grad attribute of a Tensor"
    ),
]


def losses(directory):
    return [row.loss for row in read_metrics(directory / "metrics.csv")]


def test_a_compiled_run_follows_the_plain_one_and_resumes_bit_for_bit(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")

    def config(compile, **precision):
        sections = {"evaluation": {"every": 2}, "schedule": {"steps": 4}}
        return tiny(corpus, precision={"compile": compile, **precision}, **sections)

    assert create_run(config(False), tmp_path / "plain", silent).run()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    whole = create_run(config(True), tmp_path / "whole", silent)
    assert whole.run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # whatever the layer and the number of sequences
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)

    part = create_run(config(True), tmp_path / "part", silent)
    part.save()
    for _ in range(3):
        part._take_step()
    part.save()
    torch._dynamo.reset()
    again = open_run(tmp_path / "part", {}, silent)
    assert again.step == 3
    assert again.run()
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")[3:]
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name

    recomputed = create_run(config(True, activation_checkpointing=True), tmp_path / "recomputed", silent)
    assert recomputed.run()
    assert losses(tmp_path / "recomputed") == losses(tmp_path / "whole")


def test_what_is_not_finite_is_found_in_a_compiled_layer(tmp_path):
    trainer = create_run(tiny(write_corpus(tmp_path / "corpus"), precision={"compile": True}), tmp_path / "run", silent)
    with torch.no_grad():
        trainer.model.backbone.layers[1].mixer.D[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"not finite first: the parameter backbone\.layers\.1\.mixer\.D"):
        trainer.run()
    with torch.no_grad():
        trainer.model.backbone.layers[1].mixer.D[0] = 1.0
        trainer.model.backbone.layers[1].norm.weight.fill_(3e38)
    with pytest.raises(FloatingPointError, match=r"not finite first: the output of backbone\.layers\.1\.norm"):
        trainer.run()
