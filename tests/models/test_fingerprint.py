"""The fingerprint names what a model computes: it changes with that, and with nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch

from anymamba import MambaLM, MambaLMConfig
from anymamba.models import fingerprint as module
from tests.models.cases import FAMILIES, small_lm

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Of the models among the fixtures. A change here means that states which users saved belong to no model any more.
KNOWN = {
    "mamba1": ("2:70bc073878aa1a5098bcbccd2d98241a", "b09125ff2f15a9687fcdbeff3112252d"),
    "mamba2": ("2:a8b05061d9ae1b032272be113d0aecac", "2a04e9b7c9525d929ed42f0630efc4a8"),
    "mamba2_bfloat16": ("2:ac1288acb310d68b2adcfee4482d39cf", "2757b1b9c592033d43eae745b5650400"),
    "mamba3_mimo": ("2:867515f1bc49e80b092c1261ee7ceee6", "97b903f5256e91a4baa373b57368ba78"),
}


def with_config(model, **fields):
    """The same weights with another config, whose blocks have these fields."""
    ssm_cfg = {**model.config.ssm_cfg, **{k: v for k, v in fields.items() if k not in MambaLMConfig.__annotations__}}
    others = {k: v for k, v in fields.items() if k in MambaLMConfig.__annotations__}
    other = MambaLM(dataclasses.replace(model.config, ssm_cfg=ssm_cfg, **others), dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", KNOWN)
def test_fingerprints_stay_what_they_are(name):
    model, (now, former) = MambaLM.from_pretrained(FIXTURES / name), KNOWN[name]
    assert model.fingerprint() == now
    assert model.has_fingerprint(now)
    assert model.has_fingerprint(former)


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
    assert module._plain([10**400, -(10**400), 10**30, 2.5]) == [hex(10**400), hex(-(10**400)), 1e30, 2.5]


def test_the_number_of_layers_counts():
    assert len({small_lm(n_layer=n).fingerprint() for n in (1, 2, 3)}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_field_that_has_its_default_changes_nothing(family, monkeypatch):
    """Neither the fingerprint, nor that states with the former one open."""
    model, asked = small_lm(family), {}
    now, former, block_config = model.fingerprint(), former_fingerprint(model), MambaLMConfig.block_config
    bases = (type(model.config.block_config()),)
    later = dataclasses.make_dataclass("Later", [("novelty", int, 3)], bases=bases, frozen=True, kw_only=True)
    monkeypatch.setattr(MambaLMConfig, "block_config", lambda self: later(**vars(block_config(self)), **asked))
    assert model.config.block_config().novelty == 3
    assert model.fingerprint() == now
    assert model.has_fingerprint(now)
    assert model.has_fingerprint(former)
    asked["novelty"] = 4
    assert model.fingerprint() != now
    assert not model.has_fingerprint(now)
    assert not model.has_fingerprint(former)


def former_fingerprint(model):
    """As it was computed before it had a version: the config as it was printed then, and parameters alone."""
    block = model.config.block_config()
    printed = str(block)
    for name in ("inner_norms", "inner_norm_eps"):  # fields that Mamba-1 got later
        printed = printed.replace(f", {name}={getattr(block, name, None)!r}", "")
    return module._digest([model.config.layer, printed], model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_former_fingerprint_is_that_of_the_config_as_it_was_printed(family):
    model = small_lm(family)
    assert model.has_fingerprint(former_fingerprint(model))
    assert not model.has_fingerprint(former_fingerprint(small_lm(family, seed=1)))
    for name in ("", "2:", "0" * 32, "3:" + "0" * 32):
        assert not model.has_fingerprint(name)
