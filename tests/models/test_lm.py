import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba import MambaLM, SsdPath
from anymamba.generation import prefill
from tests.models.cases import FAMILIES, GOLDEN, LM_GOLDENS, golden, small_lm
from tests.support import FLOOR, MODEL_FLOOR, assert_near

families = pytest.mark.parametrize("family", FAMILIES)


def ids(b, t, vocab=61):
    return torch.randint(vocab, (b, t))


@pytest.mark.parametrize("name", LM_GOLDENS)
def test_logits_are_those_of_the_reference(name):
    model, g = MambaLM.from_pretrained(GOLDEN / name), golden(name)
    exact = copy.deepcopy(model).double()(g["input_ids"]).logits
    assert_near(model(g["input_ids"]).logits, exact, MODEL_FLOOR)
    assert_near(g["logits"], exact, MODEL_FLOOR)


@families
@pytest.mark.parametrize("d_intermediate", [0, 100])
def test_steps_and_any_split_equal_one_call(family, d_intermediate):
    model, x = small_lm(family, torch.float64, d_intermediate=d_intermediate), ids(2, 13)
    whole = model(x)
    cache, logits = None, []
    for t in range(4):
        step, cache = model.step(x[:, t], cache)
        logits.append(step.unsqueeze(1))
    for part in (x[:, 4:5], x[:, 5:12], x[:, 12:]):
        out = model(part, cache)
        cache = out.cache
        logits.append(out.logits)
    assert_near(torch.cat(logits, 1), whole.logits, 1e-10)
    for name, tensor in whole.cache.tensors().items():
        assert_near(cache.tensors()[name], tensor, 1e-10, name)


@families
def test_padded_rows_equal_the_rows_alone(family):
    model, x = small_lm(family, torch.float64), ids(3, 9)
    mask = torch.tensor([[1] * 9, [0, 0, 1, 1, 0, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    labels = x.clone()
    labels[0, 3] = -100
    out, last = model(x, labels=labels, mask=mask), model(x, mask=mask, logits="last")
    total, count = 0.0, 0
    for row in range(3):
        alone = model(x[row : row + 1, mask[row]])
        assert_near(out.logits[row, mask[row]], alone.logits[0], 1e-10)
        assert_near(last.logits[row, 0], alone.logits[0, -1], 1e-10)
        for name, tensor in out.cache.rows(row).tensors().items():
            assert_near(tensor, alone.cache.tensors()[name], 1e-10, name)
        targets = labels[row, mask[row]][1:]
        total += F.cross_entropy(alone.logits[0, :-1], targets, ignore_index=-100, reduction="sum")
        count += (targets != -100).sum()
    assert (out.logits[~mask] == 0).all()
    assert_near(out.loss, total / count, 1e-10)


@families
def test_lengths_mean_padding_at_the_end(family):
    model, x, lengths = small_lm(family), ids(2, 6), torch.tensor([6, 2])
    mask = torch.arange(6) < lengths[:, None]
    a, b = model(x, labels=x, mask=lengths), model(x, labels=x, mask=mask)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(model(x, mask=lengths, logits="last").logits, model(x, mask=mask, logits="last").logits)


@families
def test_packed_sequences_equal_the_sequences_alone(family):
    model, x, bounds = small_lm(family, torch.float64), ids(1, 12), [0, 5, 6, 12]
    cu_seqlens = torch.tensor(bounds)
    out, last = model(x, labels=x, cu_seqlens=cu_seqlens), model(x, cu_seqlens=cu_seqlens, logits="last")
    total = 0.0
    for i in range(3):
        part = x[:, bounds[i] : bounds[i + 1]]
        alone = model(part)
        assert_near(out.logits[:, bounds[i] : bounds[i + 1]], alone.logits, 1e-10)
        assert_near(last.logits[i], alone.logits[0, -1:], 1e-10)
        total += F.cross_entropy(alone.logits[0, :-1], part[0, 1:], reduction="sum")
    assert_near(out.loss, total / 9, 1e-10)


@families
def test_logits_of_the_last_token_are_those_of_all(family):
    model, x = small_lm(family, torch.float64), ids(2, 7)
    assert_near(model(x, logits="last").logits, model(x).logits[:, -1:], 1e-12)


def test_every_algorithm_of_the_scan_gives_the_same_logits():
    model, x = small_lm(dtype=torch.float64), ids(1, 20)
    expected = model(x).logits
    for path in (SsdPath.minimal(7), SsdPath.serial(8), SsdPath.recurrent()):
        assert_near(model(x, path=path).logits, expected, 1e-10, path.algorithm)


@families
def test_every_parameter_receives_a_gradient(family):
    model, x = small_lm(family, d_intermediate=10), ids(2, 9)
    model(x, labels=x).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_loss_without_labels_that_count_is_zero():
    model, x = small_lm(), ids(1, 1)
    assert model(x, labels=x).loss == 0


def test_labels_may_be_int32():
    model, x = small_lm(), ids(2, 9)
    for logits in ("all", "last", "none"):
        loss = model(x.int(), labels=x.int(), logits=logits).loss
        assert_near(loss, model(x, labels=x).loss, FLOOR[torch.float32])


def test_initialization_is_the_official_one():
    torch.manual_seed(0)
    model = MambaLM(
        d_model=64, n_layer=4, vocab_size=1000, d_intermediate=64, ssm_cfg={"layer": "Mamba2", "bias": True}
    )
    assert model.backbone.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    layer = model.backbone.layers[1]
    for weight in (layer.mixer.out_proj.weight, layer.mlp.fc2.weight):
        bound = 1 / math.sqrt(weight.shape[1]) / math.sqrt(4)
        assert bound * 0.98 < weight.abs().max() <= bound
    bound = 1 / math.sqrt(64)
    assert bound * 0.98 < layer.mixer.in_proj.weight.abs().max() <= bound
    assert (layer.mixer.in_proj.bias == 0).all()
    assert (layer.mixer.out_proj.bias == 0).all()


def test_tied_weights_are_one_parameter():
    tied, untied = small_lm(), small_lm(tie_embeddings=False)
    assert tied.lm_head.weight is tied.backbone.embedding.weight
    assert untied.lm_head.weight is not untied.backbone.embedding.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_loading_ties_again_what_the_meta_device_parted(assign, with_head):
    source, x = small_lm(), ids(1, 9)
    state = source.state_dict()
    if not with_head:
        del state["lm_head.weight"]
    model = MambaLM(source.config, device="meta")
    if not assign:
        model.to_empty(device="cpu")
        assert not model.is_tied
    model.load_state_dict(state, assign=assign)
    assert model.is_tied
    assert torch.equal(model(x).logits, source(x).logits)


def test_a_tied_model_within_another_module_reads_a_state_without_a_head():
    outer = torch.nn.ModuleDict({"lm": small_lm(seed=1)})
    outer.load_state_dict({f"lm.{name}": x for name, x in small_lm().state_dict().items() if "lm_head" not in name})
    assert outer["lm"].fingerprint() == small_lm().fingerprint()


def test_two_weights_for_one_tied_parameter_raise():
    untied = small_lm(tie_embeddings=False).state_dict()
    with pytest.raises(
        RuntimeError, match=r"are one \(tied\), but lm_head.weight and .* differ; load them into .*False"
    ):
        small_lm().load_state_dict(untied)
    with pytest.raises(RuntimeError, match=r"Missing key.*lm_head\.weight"):
        small_lm(tie_embeddings=False).load_state_dict(
            {name: x for name, x in untied.items() if not name.startswith("lm_head")}
        )


def test_a_head_of_its_own_stays_one_when_it_is_loaded():
    model = small_lm()
    model.lm_head = torch.nn.Linear(32, 64, bias=False)
    head = model.lm_head.weight.detach().clone()
    model.load_state_dict(model.state_dict())
    assert not model.is_tied
    assert torch.equal(model.lm_head.weight, head)


def test_copies_and_pickles_are_tied():
    for model in (copy.deepcopy(small_lm()), pickle.loads(pickle.dumps(small_lm()))):
        model.load_state_dict(small_lm(seed=1).state_dict(), assign=True)
        assert model.is_tied


def test_layer_norm_models_have_biases_and_run():
    model = small_lm(rms_norm=False)
    assert "backbone.norm_f.bias" in model.state_dict()
    assert torch.isfinite(model(ids(1, 5)).logits).all()


def test_the_residual_stream_is_float32_in_bfloat16_models():
    model, x = small_lm(dtype=torch.bfloat16), ids(1, 5)
    seen = []
    model.backbone.norm_f.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    assert model(x).logits.dtype == torch.bfloat16
    small_lm(dtype=torch.bfloat16, residual_in_fp32=False)
    assert seen == [torch.float32]


@families
def test_bfloat16_stays_close_to_float32(family):
    x = ids(2, 30)
    wide, rounded = small_lm(family), small_lm(family, torch.bfloat16)
    rounded.load_state_dict(wide.state_dict())
    assert_near(rounded(x).logits, wide(x).logits, 0.05)


def test_the_fingerprint_tells_models_apart():
    a, b = small_lm(), small_lm()
    assert a.fingerprint() == b.fingerprint()
    assert a.fingerprint() != small_lm(seed=1).fingerprint()
    assert a.fingerprint() != small_lm(dtype=torch.float64).fingerprint()
    with torch.no_grad():
        b.backbone.layers[1].mixer.out_proj.weight.mul_(1.01)
    assert a.fingerprint() != b.fingerprint()


@pytest.mark.parametrize("logits", ["all", "last", "none"])
@pytest.mark.parametrize("bad", [-1, 64, 10**6])
def test_labels_out_of_range_raise_where_they_count(bad, logits):
    model, x, lengths = small_lm(), ids(2, 5), torch.tensor([5, 3])
    labels = x.clone()
    labels[1, 3:] = bad  # padding
    labels[:, 0] = bad  # nothing comes before it
    labels[0, 2] = -100
    expected = model(x, labels=labels.clamp(-100, 63), mask=lengths, logits=logits).loss
    assert torch.equal(model(x, labels=labels, mask=lengths, logits=logits).loss, expected)
    with pytest.raises(ValueError, match=rf"labels must be 0 to 63, or -100 to be ignored, got .*{bad}"):
        model(x, labels=labels, logits=logits)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(torch.tensor([[3, 64]])), ValueError, "between 0 and 63, got 3 to 64"),
        (lambda m: m(torch.tensor([[-1, 2]])), ValueError, "between 0 and 63, got -1 to 2"),
        (lambda m: m.step(torch.tensor([64])), ValueError, "between 0 and 63"),
        (lambda m: m(torch.tensor([[1.0]])), TypeError, "input_ids must be int32 or int64, got torch.float32"),
        (lambda m: m(ids(1, 0)), ValueError, "at least one step"),
        (lambda m: m(ids(2, 3), m.init_cache(1)), ValueError, "cache"),
        (lambda m: m(ids(1, 3), small_lm(n_layer=1).init_cache(1)), ValueError, "2 layers, got 1"),
        (lambda m: m(ids(2, 3), mask=torch.ones(2, 4, dtype=torch.bool)), ValueError, r"\(b=2, t=3\), got \(2, 4\)"),
        (lambda m: m(ids(2, 3), labels=ids(2, 4)), ValueError, r"the shape of input_ids, \(2, 3\), got \(2, 4\)"),
        (lambda m: MambaLM(m.config, d_model=3), TypeError, "a config or its fields"),
        (lambda m: MambaLM(m.config.to_dict()), TypeError, "a MambaLMConfig, got dict; MambaLMConfig.from_dict"),
        (lambda m: MambaLM("model"), TypeError, "a MambaLMConfig, got str; .*MambaLM.from_pretrained"),
        (lambda m: m([[1, 2]]), TypeError, r"input_ids must be a tensor \(b, t\), got list; torch.tensor\(\[ids\]\)"),
        (lambda m: m(ids(1, 5)[0]), ValueError, r"input_ids must have shape \(b, t\), got \(5,\); .*unsqueeze\(0\)"),
        (lambda m: m(ids(1, 3), ids(1, 3)), TypeError, "an LMCache, got Tensor; pass labels by name, labels="),
        (lambda m: m(ids(1, 3), m(ids(1, 2))), TypeError, "an LMCache, got LMOutput; pass its .cache"),
        (lambda m: m(ids(1, 3), prefill(m, ids(1, 2))), TypeError, "an LMCache, got GenerationState; pass its .cache"),
        (lambda m: m(ids(1, 3), (1, 2)), TypeError, "an LMCache, got tuple"),
        (lambda m: m(ids(1, 3), labels=ids(1, 3).float()), TypeError, "tensor of int32 or int64, got torch.float32"),
        (lambda m: m(ids(1, 3), labels=[[1, 2, 3]]), TypeError, "labels must be a tensor of .*got list"),
    ],
)
def test_bad_input_is_named(call, error, message, unchecked):
    with pytest.raises(error, match=message):
        call(small_lm())


@pytest.mark.usefixtures("unchecked")
def test_a_step_names_what_was_passed_wrongly():
    model = small_lm()
    for wrong in ([1, 2], ids(2, 1)):
        with pytest.raises(ValueError, match=r"input_ids must be a tensor \(b,\), one token per row, got"):
            model.step(wrong)
    with pytest.raises(TypeError, match="cache must be an LMCache, got Tensor"):
        model.step(ids(1, 2)[0], torch.zeros(2))


@families
@torch.no_grad()
def test_hooks_on_layers_and_blocks_see_every_call(family):
    model, seen = small_lm(family), []
    for module in (model.backbone.layers[0], model.backbone.layers[0].mixer):
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    out = model(torch.tensor([[1, 2, 3]]))
    model.step(torch.tensor([4]), out.cache)
    assert seen == [type(model.backbone.layers[0].mixer).__name__, "ResidualLayer"] * 2


@torch.no_grad()
def test_a_block_may_be_wrapped():
    class Doubled(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block
            self.init_cache = block.init_cache

        def forward(self, x, cache=None, **options):
            y, cache = self.block(x, cache, **options)
            return 2 * y, cache

    model, tokens = small_lm(), ids(1, 3)
    before = model(tokens).logits
    model.backbone.layers[0].mixer = Doubled(model.backbone.layers[0].mixer)
    whole = model(tokens).logits
    assert not torch.allclose(before, whole)
    assert_near(model.step(tokens[:, 2], model(tokens[:, :2]).cache)[0], whole[:, 2], 1e-5)
