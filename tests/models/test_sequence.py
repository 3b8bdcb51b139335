"""Models of signals, classes and masked tokens around a stack."""

import json

import pytest
import torch

from anymamba import (
    LatentModel,
    MaskedLM,
    SequenceClassifier,
    SequenceModel,
    SequenceRegressor,
    StackCache,
    mask_tokens,
)
from anymamba.models.inputs import ids_or_embeddings
from tests.models.test_stack import BLOCKS
from tests.support import assert_near

WIDTH = 16
STACK = {"d_model": WIDTH, "n_layer": 2, "ssm_cfg": BLOCKS["Mamba3"]}
ROWS = (5, 1, 7)


def in_batch(rows, begins=(2, 4, 1)):
    """Pad rows to 8 steps in several ways, with a mask; the padding of numbers is NaN."""
    first = rows[0]
    fill = torch.nan if first.is_floating_point() else 0
    batch = torch.full((len(rows), 8, *first.shape[1:]), fill, dtype=first.dtype)
    mask = torch.zeros(len(rows), 8, dtype=torch.bool)
    for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        mask[i, begin : begin + len(row)] = True
        batch[i, mask[i]] = row
    return batch, mask


@pytest.mark.parametrize("pooling", ["last", "mean", "class_token"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("source", [{"vocab_size": 11}, {"input_size": 3}])
def test_padded_and_packed_sequences_are_judged_as_alone(pooling, bidirectional, source):
    options = {"pooling": pooling, "bidirectional": bidirectional, "output_size": 4, "stack": STACK, **source}
    model = SequenceClassifier(**options, dtype=torch.float64)
    if "vocab_size" in source:
        rows = [torch.randint(11, (t,)) for t in ROWS]
    else:
        rows = [torch.randn(t, 3, dtype=torch.float64) for t in ROWS]
    labels = torch.tensor([0, 3, 2])
    alone = torch.cat([model(row.unsqueeze(0)).logits for row in rows])
    packed = model(torch.cat(rows).unsqueeze(0), labels, cu_seqlens=torch.tensor([0, 5, 6, 13]))
    batch, mask = in_batch(rows)
    padded = model(batch, labels, mask=mask)
    assert_near(packed.logits, alone, 1e-10)
    assert_near(padded.logits, alone, 1e-10)
    expected = torch.nn.functional.cross_entropy(alone, labels)
    grads = [
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for loss in (expected, packed.loss, padded.loss)
    ]
    for whole, *others in zip(*grads, strict=True):
        for grad in others:
            assert_near(grad, whole, 1e-9, least=1e-4)


def test_pooling_by_hand():
    rows = [torch.randn(t, 3, dtype=torch.float64) for t in ROWS]
    for pooling in ("last", "mean", "class_token"):
        model = SequenceClassifier(input_size=3, output_size=2, pooling=pooling, stack=STACK, dtype=torch.float64)
        for row in rows:
            x = model.input(row.unsqueeze(0))
            if pooling == "class_token":
                x = torch.cat([x, model.class_token.view(1, 1, -1)], 1)
            hidden = model.backbone(x)
            expected = model.head(hidden.mean(1) if pooling == "mean" else hidden[:, -1])
            assert_near(model(row.unsqueeze(0)).logits, expected, 1e-12)


def test_a_latent_model_steps_as_it_reads(tmp_path):
    model = LatentModel(input_size=3, output_size=2, stack=STACK, dtype=torch.float64)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    y, cache = model.prefill(x)
    assert_near(model(x), y, 1e-12)
    stepped = None
    for t in range(6):
        y_t, stepped = model.step(x[:, t], stepped)
        assert_near(y_t, y[:, t], 1e-10)
    assert_near(model.step(x[:, 0], cache)[0], model.step(x[:, 0], stepped)[0], 1e-10)
    fresh, _ = model.prefill(x, model.init_cache(2))
    assert_near(fresh, y, 1e-12)
    cache.save(tmp_path / "state", model)
    again = StackCache.load(tmp_path / "state", model)
    assert torch.equal(model.step(x[:, 0], again)[0], model.step(x[:, 0], cache)[0])
    with pytest.raises(ValueError, match="belongs to another model"):
        StackCache.load(tmp_path / "state", LatentModel(input_size=3, output_size=2, stack=STACK, dtype=torch.float64))
    assert model.step_infinite(x[:, 0]).shape == (2, 2)
    both = LatentModel(input_size=3, bidirectional=True, stack=STACK)
    with pytest.raises(TypeError, match="a bidirectional model reads whole sequences and has no steps"):
        both.step(torch.randn(1, 3))


def test_a_masked_model_sees_both_sides_and_no_padding():
    model = MaskedLM(vocab_size=12, bidirectional=True, stack=STACK, dtype=torch.float64)
    rows = [torch.randint(11, (t,)) for t in ROWS]
    ids, mask = in_batch(rows)
    labels = torch.randint(11, ids.shape)
    output = model(ids, labels, mask=mask)
    alone = torch.cat([model(row.unsqueeze(0)).logits[0] for row in rows])
    assert_near(output.logits[mask], alone, 1e-10)
    assert_near(output.loss, torch.nn.functional.cross_entropy(alone, labels[mask]), 1e-10)
    changed = ids.clone()
    changed[2, 7] = (changed[2, 7] + 1) % 11
    assert not torch.equal(model(changed, mask=mask).logits[2, 1], output.logits[2, 1])
    vectors = torch.cat([model.embed(row.unsqueeze(0)) for row in rows])
    assert_near(model.embed(ids, mask=mask), vectors, 1e-10)
    assert_near(model.embed(torch.cat(rows).unsqueeze(0), cu_seqlens=torch.tensor([0, 5, 6, 13])), vectors, 1e-10)
    assert_near(vectors.norm(dim=1), torch.ones(3, dtype=torch.float64), 1e-12)


def test_masked_tokens_are_the_labels():
    ids = torch.randint(11, (50, 40))
    hidden, labels = mask_tokens(ids, 11, share=0.25, generator=torch.Generator().manual_seed(0))
    covered = hidden == 11
    assert 0.2 < covered.float().mean() < 0.3
    assert torch.equal(labels[covered], ids[covered])
    assert (labels[~covered] == -100).all()
    assert torch.equal(hidden[~covered], ids[~covered])


def learn(model, batch, steps=120, rate=1e-2):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        loss = batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_classifier_learns_which_of_two_tokens_came_first():
    model = SequenceClassifier(vocab_size=4, output_size=2, stack=STACK)

    def draw(count):
        ids = torch.randint(2, 4, (count, 12))
        label = torch.randint(2, (count,))
        positions = torch.rand(count, 12).argsort(1)[:, :2].sort(1).values
        ids.scatter_(1, positions, torch.stack([label, 1 - label], 1))
        return ids, label

    learn(model, lambda: model(*draw(64)).loss)
    ids, label = draw(400)
    assert (model(ids).logits.argmax(1) == label).float().mean() > 0.95


def test_latent_models_and_regressors_learn_a_running_and_a_total_sum():
    block = {**STACK, "ssm_cfg": BLOCKS["Mamba2"]}
    latent = LatentModel(input_size=1, stack=block)
    regressor = SequenceRegressor(input_size=1, pooling="last", stack=block)

    def signals():
        x = torch.randn(64, 8, 1)
        return x, x.cumsum(1) / 3

    def running():
        x, sums = signals()
        return (latent(x) - sums).square().mean()

    def total():
        x, sums = signals()
        return regressor(x, sums[:, -1]).loss

    assert learn(latent, running) < 0.05
    assert learn(regressor, total) < 0.1


MODELS = {
    "latent": lambda: LatentModel(input_size=3, output_size=2, stack=STACK),
    "classifier": lambda: SequenceClassifier(vocab_size=9, output_size=2, labels=["no", "yes"], stack=STACK),
    "regressor": lambda: SequenceRegressor(input_size=3, pooling="class_token", bidirectional=True, stack=STACK),
    "masked": lambda: MaskedLM(vocab_size=9, bidirectional=True, stack={**STACK, "merge": "linear"}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_are_saved_and_loaded_by_their_kind(kind, tmp_path):
    model = MODELS[kind]().eval()
    model.save_pretrained(tmp_path)
    again = SequenceModel.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.config == model.config
    state = again.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    x = torch.randint(9, (2, 5)) if model.config.vocab_size else torch.randn(2, 5, 3)
    first, second = model(x), again(x)
    assert torch.equal(*(y if isinstance(y, torch.Tensor) else y.logits for y in (first, second)))
    assert next(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    other = LatentModel if kind != "latent" else MaskedLM
    with pytest.raises(ValueError, match="expected a model of type"):
        other.from_pretrained(tmp_path)


def test_files_that_do_not_fit_raise(tmp_path):
    MODELS["latent"]().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"output_size": 5}, "of the wrong shape: .*output.weight"),
        ({"stack": {**raw["stack"], "n_layer": 3}}, "missing: backbone.layers.2"),
        ({"stack": {**raw["stack"], "n_layer": 60000}}, "asks for 60000 layers"),
        ({"stack": {**raw["stack"], "d_model": 2**24}}, "do not fit the config"),
        ({"novelty": 1}, r"got \['novelty'\]"),
        ({"model_type": "mamba"}, "got 'mamba'"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(ValueError, match=message):
            SequenceModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a directory with config"):
        SequenceModel.from_pretrained(tmp_path / "nowhere")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (LatentModel, {"vocab_size": 3}, "input_size must be given"),
        (MaskedLM, {"vocab_size": 3}, "bidirectional=True must be given"),
        (SequenceClassifier, {}, "give vocab_size for tokens, or input_size"),
        (SequenceClassifier, {"vocab_size": 3, "input_size": 3}, "give vocab_size for tokens, or input_size"),
        (SequenceClassifier, {"vocab_size": 3, "pooling": "max"}, "pooling must be one of last, mean, class_token"),
        (SequenceClassifier, {"vocab_size": 3, "labels": ["a", "b"]}, "must name all 1 outputs"),
        (SequenceClassifier, {"vocab_size": 0}, "vocab_size must be an integer, at least 1, got 0"),
    ],
)
def test_configs_that_are_invalid_raise(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields, stack=STACK)


@pytest.mark.usefixtures("unchecked")
def test_bad_calls_say_what_was_expected():
    model = SequenceClassifier(vocab_size=4, output_size=2, stack=STACK)
    ids = torch.randint(4, (2, 5))
    with pytest.raises(ValueError, match="labels must be 0 to 1"):
        model(ids, torch.tensor([0, 2]))
    for wrong in (torch.tensor([0.0, 1.0]), [0, 1]):
        with pytest.raises(TypeError, match="labels must be a tensor of int32 or int64, got"):
            model(ids, wrong)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\), got \(3,\)"):
        model(ids, torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="only padding in row 1"):
        model(ids, mask=torch.tensor([5, 0]))
    with pytest.raises(ValueError, match="token ids must be between 0 and 3"):
        model(ids + 4)
    with pytest.raises(ValueError, match=r"token ids must have shape \(b, t\)"):
        model(ids.unsqueeze(-1))
    masked = MaskedLM(vocab_size=4, bidirectional=True, stack=STACK)
    with pytest.raises(ValueError, match="MaskedLM: labels must be 0 to 3, or -100 to be ignored, got 0 to 9"):
        masked(ids, torch.tensor([[0, 9, -100, -100, 1]] * 2))
    with pytest.raises(TypeError, match=r"MaskedLM: labels must be a tensor of int32 or int64, got torch.float32"):
        masked(ids, ids.float())
    with pytest.raises(ValueError, match=r"MaskedLM.embed: every row must have a real step, got only padding in row 0"):
        masked.embed(ids, mask=torch.tensor([0, 5]))
    with pytest.raises(TypeError, match="labels must be a tensor, got list"):
        SequenceRegressor(vocab_size=4, stack=STACK)(ids, [1.0, 2.0])
    with pytest.raises(TypeError, match=r"SequenceModel has no head: create one of .*LatentModel"):
        SequenceModel(vocab_size=4, stack=STACK)
    latent = LatentModel(input_size=3, stack=STACK)
    with pytest.raises(ValueError, match=r"LatentModel.step: x must have shape \(b, c=3\), got \(2, 5, 3\)"):
        latent.step(torch.randn(2, 5, 3))


def test_a_masked_model_without_labels_that_count_has_no_loss():
    model, ids = MaskedLM(vocab_size=4, bidirectional=True, stack=STACK), torch.randint(4, (2, 5))
    loss = model(ids, torch.full((2, 5), -100)).loss
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_embeddings_in_place_of_ids_give_the_same():
    ids, labels = torch.randint(11, (3, 8)), torch.tensor([0, 1, 1])
    classifier = SequenceClassifier(vocab_size=11, output_size=2, stack=STACK)
    rows = {"mask": torch.tensor([8, 3, 5])}
    embeds = classifier.embedding(ids).masked_fill((torch.arange(8) >= rows["mask"][:, None]).unsqueeze(-1), torch.nan)
    by_ids, by_rows = classifier(ids, labels, **rows), classifier(labels=labels, inputs_embeds=embeds, **rows)
    assert torch.equal(by_rows.logits, by_ids.logits)
    by_rows.loss.backward()
    assert classifier.embedding.weight.grad.isfinite().all()

    masked = MaskedLM(vocab_size=11, bidirectional=True, stack=STACK)
    for packed in ({}, {"seq_idx": torch.tensor([[0] * 3 + [1] * 5] * 3)}):
        by_ids = masked(ids, ids, **packed)
        by_rows = masked(labels=ids, inputs_embeds=masked.embedding(ids), **packed)
        assert torch.equal(by_rows.logits, by_ids.logits)
        assert torch.equal(by_rows.loss, by_ids.loss)

    with pytest.raises(ValueError, match="MaskedLM: expected input_ids or inputs_embeds, got both"):
        masked(ids, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="SequenceClassifier: expected x or inputs_embeds, got neither"):
        classifier()
    with pytest.raises(TypeError, match=r"SequenceClassifier: x must be integer token ids, got torch.float32"):
        classifier(embeds)
    with pytest.raises(TypeError, match=r"MaskedLM: inputs_embeds must have a floating-point dtype, got torch.int64"):
        ids_or_embeddings("MaskedLM", "input_ids", None, ids, reads_ids=True)
    of_vectors = SequenceClassifier(input_size=WIDTH, output_size=2, stack=STACK)
    with pytest.raises(ValueError, match="inputs_embeds are for a model of tokens; this one reads vectors, as x"):
        of_vectors(inputs_embeds=embeds)
    with pytest.raises(ValueError, match=r"SequenceClassifier: inputs_embeds must have shape .*d=16"):
        classifier(inputs_embeds=torch.randn(2, 3, 5))


def test_labels_at_the_padding_of_a_masked_model_may_be_anything():
    model, ids, lengths = MaskedLM(vocab_size=11, bidirectional=True, stack=STACK), torch.randint(11, (2, 6)), [6, 3]
    labels = ids.masked_fill(torch.arange(6) >= torch.tensor(lengths)[:, None], -1)
    mask = torch.tensor(lengths)
    assert torch.equal(model(ids, labels, mask=mask).loss, model(ids, ids, mask=mask).loss)
    with pytest.raises(ValueError, match="labels must be 0 to 10, or -100 to be ignored, got -1"):
        model(ids, labels)
