"""Trainer, gradient checkpointing and adapters on accelerated models."""

import copy

import pytest
import torch
import transformers

from anymamba.integrations.transformers import accelerate, report, restore
from tests.integrations.models import ids, pair, plain, run, run_split
from tests.support import assert_near, relative_error

TOLERANCE = 1e-5


def trained(model, tmp_path, data, collate=None, **options):
    """Return the losses of a few steps of transformers' Trainer."""
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "mamba", "bamba"])
def test_the_trainer_s_losses_are_those_of_plain_models(name, checkpointing, tmp_path):
    original, fast = pair(name)
    data = [{"input_ids": row, "labels": row} for row in ids(8, 12)]
    expected = trained(original, tmp_path, data)
    losses = trained(fast, tmp_path, data, gradient_checkpointing=checkpointing)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("seq_idx", [False, True])
@pytest.mark.parametrize("name", ["bamba", "mamba2"])
def test_the_flattening_collator_trains_without_padding(name, seq_idx, tmp_path):
    """Losses of flattened batches are those of one sequence after another, weighted by their tokens."""
    _, fast = pair(name)
    data = [{"input_ids": row.tolist()} for row in ids(8, 12)]
    options = {"return_position_ids": True, "return_seq_idx": seq_idx}
    collate = transformers.DataCollatorWithFlattening(**options)
    batch = collate(data[:3])
    with torch.no_grad():
        loss = fast(**batch, use_cache=False).loss
        alone = [fast(row[None], labels=row[None], use_cache=False).loss for row in ids(8, 12)[:3]]
    assert_near(loss, torch.stack(alone).mean(), TOLERANCE)
    assert len(trained(fast, tmp_path, data, collate)) == 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "granite"])
def test_checkpointed_gradients(name, reentrant):
    fast = pair(name)[1].train()
    x = ids(2, 9)

    def gradients(model):
        model.zero_grad()
        model(x, labels=x).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(fast)
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fast.enable_input_require_grads()
    for name, grad in gradients(fast).items():
        assert_near(grad, expected[name], TOLERANCE, name, least=1e-4)


def add_adapters(model, targets):
    """Add adapters to the model that change its outputs."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


MAMBA2_TARGETS = ["in_proj", "out_proj"]
MAMBA1_TARGETS = ["in_proj", "x_proj", "dt_proj"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "targets"), [("bamba", MAMBA2_TARGETS), ("mamba2", ["in_proj"]), ("jamba", MAMBA1_TARGETS)]
)
def test_adapters_count_in_sequences_and_tokens_and_merge(name, targets):
    fast = accelerate(plain(name))
    x = ids(2, 12)
    before = fast(x).logits
    model = add_adapters(fast, targets)
    logits = model(x).logits
    assert relative_error(logits, before) > 1e-2
    tokens = {layer.token for layer in report(model).layers}
    assert tokens == {"operators" if name == "jamba" else "one call, projections apart"}
    assert_near(run_split(model.base_model.model, x, (9, 1, 1, 1)), logits, TOLERANCE)
    merged = model.merge_and_unload()
    assert {layer.token for layer in report(merged).layers} == {"one call"}
    assert_near(merged(x).logits, logits, TOLERANCE)
    assert_near(restore(merged)(x).logits, logits, TOLERANCE)


def test_an_adapter_of_dt_proj_has_an_effect_and_a_gradient():
    fast = accelerate(plain("mamba"))
    x = ids(2, 9)
    with torch.no_grad():
        before = fast(x).logits
    model = add_adapters(fast, ["dt_proj"]).train()
    output = model(x, labels=x)
    assert relative_error(output.logits, before) > 1e-3
    output.loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(grad is not None and grad.abs().max() > 0 for grad in trained.values())


def test_adapters_train_as_on_a_plain_model(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in ids(8, 12)]
    models = (plain("bamba"), accelerate(plain("bamba")))
    losses = [trained(add_adapters(model, MAMBA2_TARGETS).train(), tmp_path, data) for model in models]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@torch.no_grad()
def test_a_step_of_an_optimizer_counts_for_the_next_token():
    _, fast = pair("mamba2")
    x = ids(2, 9)
    _, cache = run(fast, x[:, :8])
    run(fast, x[:, 8:], cache)  # records
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-1)
        fast(x, labels=x).loss.backward()
        optimizer.step()
    _, cache = run(fast, x[:, :8])
    assert_near(run(fast, x[:, 8:], cache)[0], fast(x).logits[:, 8:], TOLERANCE)


@torch.no_grad()
def test_what_is_exchanged_in_a_mixer_counts_for_the_next_token():
    """Modules, parameters, hooks and numbers: a recorded token notices each."""

    def exchange_module(mixer):
        mixer.out_proj = copy.deepcopy(mixer.out_proj)
        mixer.out_proj.weight.mul_(2)

    def exchange_parameter(mixer):
        mixer.D = torch.nn.Parameter(mixer.D + 1)

    def move_parameter(mixer):
        mixer.A_log.data = mixer.A_log.data + 0.5

    def hook(mixer):
        mixer.in_proj.register_forward_hook(lambda module, inputs, output: output * 1.5)

    def hook_norm(mixer):
        mixer.norm.register_forward_hook(lambda module, inputs, output: output * 1.5)

    def patch(mixer):
        mixer.out_proj.forward = lambda y: torch.nn.functional.linear(y, mixer.out_proj.weight) + 1

    def change_number(mixer):
        mixer.time_step_limit = (0.2, 0.4)

    x = ids(2, 9)
    for change in (exchange_module, exchange_parameter, move_parameter, hook, hook_norm, patch, change_number):
        _, fast = pair("mamba2")
        before = run_split(fast, x, (7, 1, 1))
        change(fast.backbone.layers[1].mixer)
        logits = run_split(fast, x, (7, 1, 1))
        assert relative_error(logits, before) > 1e-3, change.__name__
        assert_near(logits, fast(x).logits, TOLERANCE, change.__name__)
