"""Several packed rows by `seq_idx`, and the states at chosen positions of a prefill."""

import pytest
import torch

from anymamba import BidirectionalStack, LatentModel, MaskedLM, SequenceClassifier
from tests.blocks.families import make_block
from tests.models.cases import small_lm
from tests.models.test_stack import BLOCKS, MIXED, WIDTH, make
from tests.support import assert_all_near, assert_near

SEQ_IDX = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 2, 2], [7, 8, 8, 7, 7, 7]])
CUTS = [(0, 0, 3), (0, 3, 6), (1, 0, 2), (1, 2, 6), (2, 0, 1), (2, 1, 3), (2, 3, 6)]


@pytest.mark.parametrize("kind", ["mamba1", "mamba2 groups", "mamba3", "stack"])
def test_packed_rows_equal_their_sequences_alone(kind):
    model = make("virtual") if kind == "stack" else make_block(kind)
    x = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    y, cache = model.prefill(x, seq_idx=SEQ_IDX)
    alone = [model.prefill(x[row : row + 1, begin:end]) for row, begin, end in CUTS]
    for (row, begin, end), (expected, _) in zip(CUTS, alone, strict=True):
        assert_near(y[row, begin:end], expected[0], 1e-10)
    assert_all_near(cache.tensors(), type(cache).cat([c for _, c in alone]).tensors(), 1e-10)
    assert torch.equal(model(x, seq_idx=SEQ_IDX), y)


def test_packed_rows_in_both_directions():
    model = BidirectionalStack(d_model=WIDTH, **{**MIXED, "n_layer": 2, "layer_cfgs": []}, dtype=torch.float64)
    x = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    y = model(x, seq_idx=SEQ_IDX)
    for row, begin, end in CUTS:
        assert_near(y[row, begin:end], model(x[row : row + 1, begin:end])[0], 1e-10)


def test_a_language_model_takes_packed_rows_with_labels():
    model = small_lm("Mamba3", torch.float64)
    ids = torch.randint(61, (3, 6))
    packed = model(ids, labels=ids, seq_idx=SEQ_IDX, hidden_states=[0])
    alone = [model(ids[row : row + 1, begin:end], labels=ids[row : row + 1, begin:end]) for row, begin, end in CUTS]
    for (row, begin, end), expected in zip(CUTS, alone, strict=True):
        assert_near(packed.logits[row, begin:end], expected.logits[0], 1e-10)
    assert_near(packed.nats, sum(output.nats for output in alone), 1e-10)
    assert packed.hidden_states[0].shape == (3, 6, 32)
    last = model(ids, seq_idx=SEQ_IDX, logits="last").logits
    assert_near(last[:, 0], torch.stack([output.logits[0, -1] for output in alone]), 1e-10)


def test_models_around_stacks_take_packed_rows():
    stack = {"d_model": WIDTH, "n_layer": 2, "ssm_cfg": BLOCKS["Mamba2"]}
    latent = LatentModel(input_size=3, output_size=2, stack=stack, dtype=torch.float64)
    x, ids = torch.randn(3, 6, 3, dtype=torch.float64), torch.randint(9, (3, 6))
    y, cache = latent.prefill(x, seq_idx=SEQ_IDX)
    assert cache.batch_size == len(CUTS)
    assert torch.equal(latent(x, seq_idx=SEQ_IDX), y)
    masked = MaskedLM(vocab_size=9, bidirectional=True, stack=stack, dtype=torch.float64)
    logits, loss = masked(ids, ids, seq_idx=SEQ_IDX)
    vectors = masked.embed(ids, seq_idx=SEQ_IDX)
    judge = SequenceClassifier(vocab_size=9, output_size=2, pooling="class_token", stack=stack, dtype=torch.float64)
    classes = judge(ids, seq_idx=SEQ_IDX).logits
    hidden = latent.backbone.hidden_states(latent.input(x), [0], seq_idx=SEQ_IDX)[0]
    both = masked.backbone.hidden_states(masked.embedding(ids), [0], seq_idx=SEQ_IDX)[0]
    for i, (row, begin, end) in enumerate(CUTS):
        part, part_ids = x[row : row + 1, begin:end], ids[row : row + 1, begin:end]
        assert_near(y[row, begin:end], latent(part)[0], 1e-10)
        assert_near(logits[row, begin:end], masked(part_ids).logits[0], 1e-10)
        assert_near(vectors[i], masked.embed(part_ids)[0], 1e-10)
        assert_near(classes[i], judge(part_ids).logits[0], 1e-10)
        assert_near(hidden[row, begin:end], latent.backbone.hidden_states(latent.input(part), [0])[0][0], 1e-10)
        assert_near(both[row, begin:end], masked.backbone.hidden_states(masked.embedding(part_ids), [0])[0][0], 1e-10)
    assert_near(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), 1e-10)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2", "mamba3 quaternion", "stack"])
def test_states_at_positions_are_those_of_shorter_prefills(kind):
    model = make("streams") if kind == "stack" else make_block(kind)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    positions = [4, 9, 1, 4]
    y, states = model.states_at(x, positions)
    assert_near(y, model(x), 1e-10)
    for position, state in zip(positions, states, strict=True):
        assert_all_near(state.tensors(), model.prefill(x[:, :position])[1].tensors(), 1e-10)
    with pytest.raises(ValueError, match="positions must be 1 to t = 9, got 10"):
        model.states_at(x, [10])


@pytest.mark.parametrize("class_tokens", [[], ["start", "middle", "end"]])
def test_models_have_the_states_at_positions(class_tokens):
    lm, ids = small_lm("Mamba3", torch.float64), torch.randint(61, (2, 9))
    logits, states = lm.states_at(ids, torch.tensor([4, 9]))
    assert_near(logits, lm(ids).logits, 1e-10)
    assert_all_near(states[0].tensors(), lm(ids[:, :4]).cache.tensors(), 1e-10)
    assert_near(lm(ids[:, 4:], states[0]).logits, logits[:, 4:], 1e-10)
    stack = {"d_model": WIDTH, "n_layer": 2, "ssm_cfg": BLOCKS["Mamba2"]}
    latent = LatentModel(input_size=3, output_size=2, class_tokens=class_tokens, stack=stack, dtype=torch.float64)
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    y, states = latent.states_at(x, [4, 9, 1], length=9)
    assert_near(y, latent(x), 1e-10)
    assert_all_near(states[2].tensors(), latent.prefill(x[:, :1], length=9)[1].tensors(), 1e-10)
    assert {name: v.shape for name, v in latent.init_cache(2).tensors().items()} == {
        name: v.shape for name, v in states[0].tensors().items()
    }


@pytest.mark.usefixtures("unchecked")
def test_positions_that_are_no_numbers_raise():
    for model in (make_block("mamba2"), make("Mamba2")):
        x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"states_at: positions must be integers, 1 to t = 6, got \[2.5\]"):
            model.states_at(x, [2.5])
    with pytest.raises(ValueError, match=r"MambaLM.states_at: positions must be 1 to t = 6, got 0"):
        small_lm("Mamba2").states_at(torch.randint(61, (1, 6)), [0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", [lambda: make_block("mamba2"), lambda: make("Mamba2")])
def test_bad_seq_idx(model):
    model, x = model(), torch.randn(3, 6, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"seq_idx must have shape \(b=3, t=6\)"):
        model.prefill(x, seq_idx=SEQ_IDX[:2])
    with pytest.raises(TypeError, match="seq_idx must be a tensor of int32 or int64"):
        model.prefill(x, seq_idx=SEQ_IDX.float())
    with pytest.raises(ValueError, match="seq_idx cannot be combined with cu_seqlens or mask, got mask"):
        model.prefill(x, seq_idx=SEQ_IDX, mask=torch.tensor([6, 6, 6]))
