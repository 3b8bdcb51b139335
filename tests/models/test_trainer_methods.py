"""Trainers and adapters of other libraries find what they expect on a language model."""

import dataclasses

import pytest
import torch

from anymamba import MambaLM, MambaLMConfig
from tests.models.cases import small_lm
from tests.support import assert_near

IDS = torch.arange(40).view(4, 10) % 7


class TestConfig:
    def test_use_cache_can_be_set_and_is_no_field(self):
        config = MambaLMConfig(d_model=8, n_layer=1, vocab_size=20)
        assert config.use_cache is True
        config.use_cache = False
        assert config.use_cache is False
        assert MambaLMConfig.use_cache is True
        assert config == MambaLMConfig(d_model=8, n_layer=1, vocab_size=20)
        assert "use_cache" not in config.to_dict()

    @pytest.mark.parametrize("name", ["d_model", "model_type", "unheard_of"])
    def test_other_attributes_stay_frozen(self, name):
        config = MambaLMConfig(d_model=8, n_layer=1, vocab_size=20)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 16)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(config, name)


class TestMasks:
    def test_an_attention_mask_is_a_mask(self):
        model, real = small_lm(), torch.tensor([10, 7, 3, 1])
        attention_mask = (torch.arange(10) < real.unsqueeze(1)).long()
        expected = model(IDS, labels=IDS, mask=attention_mask.bool())
        for mask in (attention_mask, attention_mask.bool()):
            output = model(IDS, labels=IDS, attention_mask=mask, return_dict=True, output_attentions=False)
            assert torch.equal(output.logits, expected.logits)
            assert torch.equal(output.loss, expected.loss)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"output_attentions": True}, "there are no attention weights"),
            ({"output_hidden_states": True}, r"hidden_states=\[-1\] names the passes"),
            ({"mask": torch.ones(4), "attention_mask": torch.ones(4, 10)}, "mask cannot be combined"),
            ({"attention_mask": torch.ones(4)}, r"attention_mask must have shape \(b, t\), got \(4,\)"),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_what_there_is_not_is_an_error(self, options, message):
        options = {name: x.long() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with pytest.raises(ValueError, match=message):
            small_lm()(IDS, **options)


def test_embeddings_are_those_of_the_model():
    model = small_lm()
    assert model.get_input_embeddings() is model.backbone.embedding
    assert model.get_output_embeddings() is model.lm_head


def test_inputs_for_generation_are_arguments_of_forward():
    model = small_lm().eval()
    whole = model(**model.prepare_inputs_for_generation(IDS)).logits
    cache = model(IDS[:, :-1]).cache
    inputs = model.prepare_inputs_for_generation(IDS, cache, logits="last")
    assert inputs["input_ids"].shape == (4, 1)
    assert_near(model(**inputs).logits[:, -1], whole[:, -1], 1e-5)


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradient_checkpointing_changes_neither_gradients_nor_what_is_saved(tmp_path):
    model = small_lm()
    expected = gradients(model)
    runs = []
    model.backbone.layers[0].mixer.register_forward_pre_hook(lambda *_: runs.append(1))
    for enable in (model.gradient_checkpointing_enable, model.activation_checkpointing_enable):
        enable({"use_reentrant": False})
        assert model.is_gradient_checkpointing
        runs.clear()
        assert all(map(torch.equal, gradients(model), expected))
        assert len(runs) == 2
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
        runs.clear()
        gradients(model)
        assert len(runs) == 1
    model.gradient_checkpointing_enable()
    model.save_pretrained(tmp_path)
    assert not MambaLM.from_pretrained(tmp_path).is_gradient_checkpointing
    with pytest.raises(ValueError, match="every_n_layers = 1 and offload = False, got 2 and False"):
        model.activation_checkpointing_enable(every_n_layers=2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peft_trains_saves_and_merges_a_causal_lm(checkpointing, tmp_path):
    peft = pytest.importorskip("peft")
    model = small_lm()
    if checkpointing:
        model.gradient_checkpointing_enable()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["in_proj", "out_proj"])
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    with torch.no_grad():
        logits = adapted(IDS).logits
        tokens = adapted.generate(IDS[:, :4], 3).tokens
    adapted.save_pretrained(tmp_path / "adapter")
    again = small_lm()
    again.load_state_dict(before)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    merged = adapted.merge_and_unload()
    assert type(merged) is MambaLM
    merged.save_pretrained(tmp_path / "merged")
    saved = MambaLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_near(again(IDS).logits, logits, 1e-5)
        assert_near(saved(IDS).logits, logits, 1e-4)
    assert torch.equal(saved.generate(IDS[:, :4], 3).tokens, tokens)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_transformers_trains_it(checkpointing, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            output = model(**inputs)
            return (output.loss, {"logits": output.logits}) if return_outputs else output.loss

    model = small_lm()
    before = model.lm_head.weight.clone()
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in IDS]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, activation_checkpointing=checkpointing,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    expected = model(IDS, labels=IDS).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    trainer.train()
    assert trainer.state.global_step == 2
    assert model.config.use_cache is arguments.use_cache
    assert model.is_gradient_checkpointing == checkpointing
    assert not torch.equal(model.lm_head.weight, before)
    assert model(IDS, labels=IDS).loss.item() < expected
