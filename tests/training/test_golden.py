"""The losses of a small run, so that a change in the numbers is noticed."""

import pytest
import torch

from anymamba.training.api import create_run
from anymamba.training.metrics.loggers import read_metrics
from tests.support import LOSSES_FLOOR
from tests.training.cases import silent, tiny, write_corpus

GOLDEN = {
    "Mamba2": [
        5.932132293248509,
        5.782457483934713,
        5.584751774209167,
        5.592678298420141,
        5.518905151841767,
        5.47595998023941,
        5.421684362467104,
        5.431427480568016,
    ],
    "Mamba3": [
        5.630516531303786,
        5.536654271777988,
        5.466258854515988,
        5.36038001327827,
        5.222835921051248,
        5.160979875085321,
        5.191235165892081,
        5.259347274443616,
    ],
}


def set_parameters(model):
    """Set values that do not depend on how a machine draws random numbers."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 1.7 + i).view(parameter.shape)
            parameter.copy_(wave * 0.3 + (1.0 if "norm" in name else 0.0))


@pytest.mark.parametrize("family", GOLDEN)
def test_losses_are_those_of_the_list(tmp_path, family):
    config = tiny(
        write_corpus(tmp_path / "corpus"),
        model={"family": family},
        precision={"dtype": "float64"},
        batch={"accumulation": 2},
        data={"mode": "stream", "held_out": 0.1747},  # one document
        schedule={"steps": 8},
        evaluation={"every": 0, "sample_tokens": 0},
    )
    trainer = create_run(config, tmp_path / "run", silent)
    set_parameters(trainer.model)
    trainer.run()
    losses = [row.loss for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert losses == pytest.approx(GOLDEN[family], rel=LOSSES_FLOOR)
