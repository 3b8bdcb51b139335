"""Language models on any stack: from their config, in generation, saving, training and the compiled decoder."""

import numpy as np
import pytest
import torch

from anymamba import MambaLM, decoder
from anymamba.training.api import resume, train
from tests.models.cases import FAMILIES
from tests.support import assert_near
from tests.training.cases import silent, tiny, write_corpus


def small(**stack):
    torch.manual_seed(0)
    model = MambaLM(d_model=32, n_layer=2, vocab_size=61, ssm_cfg=dict(FAMILIES["Mamba2"]), stack=stack)
    with torch.no_grad():
        model.backbone.embedding.weight.normal_(std=0.3)
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight *= 20
    return model.eval()


@pytest.mark.parametrize(
    "stack",
    [
        {"n_virtual": 5, "schedule": "stretched", "ignore_first_residual": True, "ignore_last_residual": True},
        {"n_virtual": 3, "streams": 2, "gate_bias": -1.0, "grad_horizon": 2, "dropout": 0.1},
        {"layer_cfgs": [FAMILIES["Mamba3"], FAMILIES["Mamba1"]]},
    ],
)
def test_language_models_of_any_stack_generate_and_save(stack, tmp_path):
    model = small(**stack)
    ids = torch.randint(61, (2, 7))
    tokens = model.generate(ids, 5).tokens
    logits, cache = None, None
    for t in range(7):
        logits, cache = model.step(ids[:, t], cache)
    assert_near(logits, model(ids).logits[:, -1], 2e-4)
    compiled = decoder(model)
    if "streams" in stack:
        assert "no compiled step" in compiled.reason or "not built" in compiled.reason
    if not compiled.reason:
        assert_near(compiled.step(ids[:, 0], cache)[0], model.step(ids[:, 0], cache)[0], 2e-4)
    with pytest.raises(ValueError, match=r'official format cannot hold.*format="anymamba"'):
        model.save_pretrained(tmp_path / "official", format="official")
    assert not (tmp_path / "official").exists()
    model.save_pretrained(tmp_path)
    again = MambaLM.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    assert torch.equal(again.generate(ids, 5).tokens, tokens)
    state = again.generate(ids, 2, return_state=True).state
    state.save(tmp_path / "state", again)
    assert torch.equal(again.generate(None, 3, cache=type(state).load(tmp_path / "state", again)).tokens, tokens[:, 2:])
    assert again.fingerprint() != small().fingerprint()


def test_embeddings_in_place_of_ids_and_hidden_states_on_request():
    model = small()
    ids = torch.randint(61, (2, 7))
    expected = model(ids, labels=ids, hidden_states=[0, -1])
    output = model(inputs_embeds=model.backbone.embedding(ids), labels=ids)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(model.lm_head(model.backbone.norm_f(expected.hidden_states[1])), expected.logits)
    assert output.hidden_states == ()
    with pytest.raises(ValueError, match="cannot be combined"):
        model(ids, inputs_embeds=model.backbone.embedding(ids))


@pytest.mark.usefixtures("unchecked")
def test_passes_that_do_not_exist_raise():
    model, ids = small(), torch.randint(61, (2, 7))
    with pytest.raises(TypeError, match="MambaLM: hidden_states must be a list of integers, -2 to 1, got True"):
        model(ids, hidden_states=True)
    assert len(model(ids, hidden_states=[np.int64(0)]).hidden_states) == 1
    with pytest.raises(ValueError, match="MambaLM: hidden_states must be -2 to 1, got 2"):
        model(ids, hidden_states=[2])


def test_a_language_model_rejects_an_invalid_stack():
    with pytest.raises(ValueError, match=r"got \['d_model'\]"):
        small(d_model=8)
    with pytest.raises(ValueError, match="grad_horizon must be 1 to 2"):
        small(grad_horizon=5)


def test_a_stack_trains_and_resumes(tmp_path):
    model = {"n_layer": 2, "stack": {"n_virtual": 3, "streams": 2, "gate_bias": -1.0, "dropout": 0.1}}
    config = tiny(write_corpus(tmp_path / "corpus"), model=model)
    trainer = train(config, tmp_path / "run", report=silent)
    assert trainer.finished
    assert trainer.model.config.stack == model["stack"]
    assert MambaLM.from_pretrained(tmp_path / "run").config.stack == model["stack"]
    assert resume(tmp_path / "run", report=silent).step == 6
