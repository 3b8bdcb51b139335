"""The fingerprint names what a model computes: it changes with that, and with nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch

from anymamba import MambaLM, MambaLMConfig
from anymamba.models import cache as module
from tests.models.cases import FAMILIES, small_lm

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Of the models among the fixtures. A change here means that states which users saved belong to no model any more.
KNOWN = {
    "mamba1": "70bc073878aa1a5098bcbccd2d98241a",
    "mamba2": "a8b05061d9ae1b032272be113d0aecac",
    "mamba2_bfloat16": "ac1288acb310d68b2adcfee4482d39cf",
    "mamba3_mimo": "867515f1bc49e80b092c1261ee7ceee6",
}


def with_config(model, **fields):
    """Make a model with the same weights and another config, whose blocks have these fields."""
    ssm_cfg = {**model.config.ssm_cfg, **{k: v for k, v in fields.items() if k not in MambaLMConfig.__annotations__}}
    others = {k: v for k, v in fields.items() if k in MambaLMConfig.__annotations__}
    other = MambaLM(dataclasses.replace(model.config, ssm_cfg=ssm_cfg, **others), dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", KNOWN)
def test_fingerprints_stay_what_they_are(name):
    assert MambaLM.from_pretrained(FIXTURES / name).fingerprint() == KNOWN[name]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Mamba2", {"residual_in_fp32": False}),
        ("Mamba2", {"norm_before_gate": True}),
        ("Mamba2", {"dt_limit": (0.0, 0.01)}),
        ("Mamba3", {"A_floor": 1.0}),
        ("Mamba3", {"a_activation": "softplus"}),
        ("Mamba3", {"rotation_range": 2}),
    ],
)
def test_what_changes_the_result_changes_the_name(family, change):
    """Also where no parameter shows it."""
    model = small_lm(family, torch.bfloat16)
    other = with_config(model, **change)
    x = torch.randint(61, (1, 9))
    assert not torch.equal(other(x).logits, model(x).logits)
    assert other.fingerprint() != model.fingerprint()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Mamba1", {"dt_init": "constant", "dt_scale": 2.0}),
        ("Mamba2", {"chunk_size": 7, "A_init_range": (2, 3), "conv_init": 0.5}),
        ("Mamba2", {"dt_limit": (0, float("inf"))}),
        ("Mamba2", {"vocab_size": 62, "fused_add_norm": False, "extra": {"note": "x"}}),
        ("Mamba3", {"dt_min": 0.002, "dt_max": 0.2, "dt_init_floor": 1e-5}),
        ("Mamba3", {"rope_fraction": 0.5, "expand": 2.0}),
    ],
)
def test_what_changes_no_result_does_not(family, change):
    model = small_lm(family)
    assert with_config(model, **change).fingerprint() == model.fingerprint()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_buffer_counts(family):
    model = small_lm(family)
    names = {model.fingerprint()}
    for parameter in model.parameters():
        parameter.data.view(-1)[0] += 1
        names.add(model.fingerprint())
    assert len(names) == 1 + len(list(model.parameters()))
    model.backbone.norm_f.register_buffer("scale", torch.ones(3, dtype=torch.int8))
    names.add(model.fingerprint())
    model.backbone.norm_f.scale[1] = 2
    names.add(model.fingerprint())
    names.add(model.to(torch.float64).fingerprint())
    assert len(names) == 4 + len(list(model.parameters()))


def test_numbers_of_any_size_have_a_name():
    assert module._normalize([10**400, -(10**400), 10**30, 2.5]) == [hex(10**400), hex(-(10**400)), 1e30, 2.5]


def test_the_number_of_layers_counts():
    assert len({small_lm(n_layer=n).fingerprint() for n in (1, 2, 3)}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_field_that_has_its_default_changes_nothing(family, monkeypatch):
    model, changes = small_lm(family), {}
    fingerprint, block_config = model.fingerprint(), MambaLMConfig.block_config
    bases = (type(model.config.block_config()),)
    later = dataclasses.make_dataclass("Later", [("novelty", int, 3)], bases=bases, frozen=True, kw_only=True)
    monkeypatch.setattr(MambaLMConfig, "block_config", lambda self: later(**vars(block_config(self)), **changes))
    assert model.config.block_config().novelty == 3
    assert model.fingerprint() == fingerprint
    changes["novelty"] = 4
    assert model.fingerprint() != fingerprint
