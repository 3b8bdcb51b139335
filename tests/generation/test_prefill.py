"""Prompts segment by segment, as the server reads them."""

import pytest
import torch

from anymamba.generation import prefill
from anymamba.generation.prefill import Prefill
from tests.models.cases import FAMILIES, small_lm

SEGMENT = 7


def read(reader):
    """Return the states of a prefill, by position."""
    states = {}
    while not reader.is_done:
        state = reader.read_segment()
        if state is not None:
            states[reader.position] = state
    return states


def assert_equal(state, expected):
    for name, tensor in expected.tensors().items():
        assert torch.equal(state.tensors()[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_state_is_that_of_the_prompt_up_to_there(family):
    model = small_lm(family)
    ids = torch.randint(61, (1, 5 * SEGMENT + 3))
    reader = Prefill(model, [ids[0].tolist()], segment_len=SEGMENT, keeps_state_at=lambda position: position == 14)
    states = read(reader)
    assert sorted(states) == [14, 38]
    for position, state in states.items():
        assert_equal(state, prefill(model, ids[:, :position], segment_len=SEGMENT))


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_on_from_a_kept_state_gives_the_same_bits(family):
    model = small_lm(family)
    ids = torch.randint(61, (1, 4 * SEGMENT + 2))
    states = read(Prefill(model, list(ids), segment_len=SEGMENT, keeps_state_at=lambda position: position == 14))
    rest = read(Prefill(model, [ids[0, 14:]], states[14], segment_len=SEGMENT))
    for name in ("cache", "logits", "seen"):
        before, after = getattr(states[30], name), getattr(rest[16], name)
        if name == "cache":
            assert all(torch.equal(x, y) for x, y in zip(before.leaves(), after.leaves(), strict=True))
        else:
            assert torch.equal(before, after)


def test_rows_of_any_lengths_come_back_in_order():
    model = small_lm()
    prompts = [torch.randint(61, (length,)) for length in (3, 20, 1, 9)]
    reader = Prefill(model, prompts, segment_len=SEGMENT)
    assert reader.remaining == 20
    (state,) = read(reader).values()
    assert reader.remaining == 0
    for row, prompt in enumerate(prompts):
        alone = prefill(model, prompt.unsqueeze(0), segment_len=SEGMENT)
        torch.testing.assert_close(state.logits[row : row + 1], alone.logits)
        assert torch.equal(state.seen[row], alone.seen[0])
        assert state.keys[row] == alone.keys[0]


def test_scores_of_a_prompt_do_not_change_its_state_and_do_not_depend_on_segments():
    model = small_lm()
    ids = torch.randint(61, (20,)).tolist()
    plain, scored = (Prefill(model, [ids], segment_len=SEGMENT, logprobs=n) for n in (None, 2))
    assert_equal(read(scored)[20], read(plain)[20])
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :, :61].log_softmax(-1)
    assert scored.prompt_scores[0] == []
    for t, scores in enumerate(scored.prompt_scores[1:], 1):
        assert scores[0].token == ids[t]
        assert scores[0].logprob == pytest.approx(logprobs[t - 1, ids[t]].item(), abs=1e-4)
        assert [score.token for score in scores[1:]] == logprobs[t - 1].topk(2).indices.tolist()


def test_an_empty_prompt_is_rejected():
    with pytest.raises(ValueError, match="a prompt must have at least one token, got none in row 1"):
        Prefill(small_lm(), [[1], []])
