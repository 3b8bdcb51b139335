"""Mamba-1 with norms of dt, B and C: Falcon-Mamba without weights, Jamba with, against transformers."""

import json

import pytest
import torch

from anymamba import Mamba1, MambaLM, decoder
from tests.support import FLOOR, MODEL_FLOOR, assert_near

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    """Make a tiny model of transformers with large weights, and save it; return both."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 6, "time_step_rank": 5}
    theirs = transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**sizes, mixer_rms_eps=1e-3)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    where = tmp_path_factory.mktemp("falcon")
    theirs.save_pretrained(where)
    return theirs, where


def test_logits_are_those_of_transformers(falcon):
    theirs, where = falcon
    ours, ids = MambaLM.from_pretrained(where), 1 + torch.arange(26).reshape(2, 13)  # 0 is padding
    assert ours.config.block_config().inner_norms == "plain"
    with torch.no_grad():
        exact = MambaLM.from_pretrained(where, dtype=torch.float64)(ids).logits
        assert_near(theirs(ids, use_cache=False).logits, exact, MODEL_FLOOR)
        assert_near(ours(ids).logits, exact, MODEL_FLOOR)
        greedy = theirs.generate(ids[:, :5], max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert torch.equal(ours.generate(ids[:, :5], 8).tokens, greedy[:, 5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norms", ["plain", "weighted"])
def test_a_compiled_step_is_a_step_of_the_modules(norms, dtype):
    block = {"inner_norms": norms, "inner_norm_eps": 1e-2, "dt_rank": 5, "d_state": 6}
    model = MambaLM(d_model=24, n_layer=2, vocab_size=40, ssm_cfg=block).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        steps = decoder(model)
        assert "norm" not in steps.reason
        cache = plain = None
        for ids in torch.arange(12).reshape(4, 3):
            logits, cache = steps.step(ids, cache)
            expected, plain = model.step(ids, plain)
            assert_near(logits, expected, 4 * FLOOR[dtype])


def test_it_survives_both_formats_and_transformers_opens_ours(falcon, tmp_path):
    theirs, where = falcon
    ours, ids = MambaLM.from_pretrained(where), torch.arange(8).reshape(1, 8)
    ours.save_pretrained(tmp_path / "official")
    again = MambaLM.from_pretrained(tmp_path / "official")
    again.save_pretrained(tmp_path / "theirs", format="transformers")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("falcon_mamba", ["FalconMambaForCausalLM"])
    assert config["mixer_rms_eps"] == 1e-3
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, theirs(ids).logits)
        assert torch.equal(again(ids).logits, ours(ids).logits)


def test_weighted_norms_are_those_of_jamba():
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "mamba_d_state": 6, "mamba_dt_rank": 5, "rms_norm_eps": 1e-3}
    config = transformers.JambaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    theirs = JambaMambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    ours = Mamba1(24, d_state=6, dt_rank=5, inner_norms="weighted", inner_norm_eps=1e-3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 24)
    assert_near(ours(x), theirs(x), FLOOR[torch.float32])


@pytest.mark.usefixtures("unchecked")
def test_what_no_format_holds_is_rejected(tmp_path):
    model = MambaLM(d_model=16, n_layer=1, vocab_size=8, ssm_cfg={"inner_norms": "weighted"})
    with pytest.raises(ValueError, match=r"needs \{'inner_norms': 'none'\}, got \{'inner_norms': 'weighted'\}"):
        model.save_pretrained(tmp_path / "x", format="transformers")
    with pytest.raises(ValueError, match="inner_norms must be none, plain or weighted, got 'some'"):
        Mamba1(16, inner_norms="some")
    assert not (tmp_path / "x").exists()
