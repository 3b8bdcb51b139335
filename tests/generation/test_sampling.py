import math

import pytest
import torch

from anymamba.generation import Sampling
from anymamba.generation.sampling import draw_uniform, hash_tokens, sample_tokens, split_keys
from tests.models.cases import small_lm

PROBABILITIES = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])
GRID = [(i + 0.5) / 2000 for i in range(2000)]


def distribution(logits=None, seen=None, **options):
    """Measure the probabilities with which tokens are drawn, with evenly spaced numbers."""
    logits = PROBABILITIES.log() if logits is None else logits
    sampling = Sampling(temperature=options.pop("temperature", 1.0), **options)
    rows = sample_tokens(
        logits.expand(len(GRID), -1), sampling, GRID, None if seen is None else seen.expand(len(GRID), -1)
    )
    return torch.bincount(rows, minlength=logits.shape[1]) / len(GRID)


def near(a, b):
    return torch.allclose(a, torch.as_tensor(b, dtype=torch.float32), atol=2e-3)


def test_draws_follow_the_softmax():
    assert near(distribution(), PROBABILITIES[0])


def test_temperature_scales_the_logits():
    expected = (PROBABILITIES.log() / 2).softmax(-1)[0]
    assert near(distribution(temperature=2.0), expected)


def test_temperature_zero_takes_the_most_likely_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    assert sample_tokens(logits, Sampling(), [0.9, 0.9]).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-40, 1e-30])
def test_a_tiny_temperature_takes_the_most_likely(temperature):
    logits = torch.tensor([[0.0, 3.0, 1.0, -1e30], [-1.0, -2.0, -math.inf, -1.5]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        sampling = Sampling(temperature=temperature, **options)
        assert sample_tokens(logits, sampling, [0.999, 0.999]).tolist() == [1, 0]


def test_top_k_keeps_the_k_most_likely():
    assert near(distribution(top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0])
    assert near(distribution(top_k=1), [0, 1, 0, 0, 0])
    assert near(distribution(top_k=99), PROBABILITIES[0])


def test_top_p_keeps_the_fewest_that_reach_p():
    assert near(distribution(top_p=0.6), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0])
    assert near(distribution(top_p=0.66), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85])
    assert near(distribution(top_p=1e-6), [0, 1, 0, 0, 0])


def test_top_p_is_relative_to_what_top_k_left():
    assert near(distribution(top_k=2, top_p=0.61), [0, 1, 0, 0, 0])


def test_top_p_looks_as_far_as_it_must():
    """A flat distribution over more tokens than are looked at first."""
    logits = torch.zeros(1, 6000)
    drawn = sample_tokens(logits.expand(50, -1), Sampling(temperature=1.0, top_p=0.5), [i / 50 for i in range(50)])
    assert len(set(drawn.tolist())) == 50


def test_top_p_of_a_nearly_flat_vocabulary_draws_from_the_most_likely_ones():
    logits = torch.linspace(0, 0.5, 5000)[torch.randperm(5000)].unsqueeze(0)
    p, order = logits[0].double().softmax(-1).sort(descending=True)
    kept = int((p.cumsum(0) < 0.7).sum()) + 1
    cumulative = p[:kept].cumsum(0) / p[:kept].sum()
    for rank in (0, 1, 300, kept // 2, kept - 1):
        middle = float(cumulative[rank] - p[rank] / p[:kept].sum() / 2)
        assert sample_tokens(logits, Sampling(temperature=1.0, top_p=0.7), [middle]).item() == order[rank]


def test_min_p_keeps_those_near_the_most_likely():
    assert near(distribution(min_p=0.45), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85])


def test_the_repetition_penalty_touches_seen_tokens_only():
    logits = torch.tensor([[1.0, -1.0, 2.0]])
    seen = torch.tensor([[True, True, False]])
    expected = torch.tensor([0.5, -2.0, 2.0]).softmax(-1)
    assert near(distribution(logits, seen, repetition_penalty=2.0), expected)


def test_penalties_count_what_each_row_was_given():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, -1)
    sampling = Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert sample_tokens(logits, sampling, [0.0] * 3, None, [{}, {0: 1}, {0: 3}]).tolist() == [0, 0, 1]
    one = Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    drawn = [sample_tokens(logits[:1], one, [u], None, [{0: 2, 2: 1}]).item() for u in GRID]
    expected = torch.tensor([2.0 - 1.0, 1.0, -0.75]).softmax(-1)
    assert near(torch.bincount(torch.tensor(drawn), minlength=3) / len(GRID), expected)


def test_a_bias_is_added_to_the_logits_of_its_tokens():
    expected = (PROBABILITIES.log() + torch.tensor([0, 0, 3.0, -100, 0])).softmax(-1)[0]
    assert near(distribution(logit_bias={2: 3.0, 3: -100.0}), expected)
    with pytest.raises(ValueError, match="tokens 0 to 4"):
        sample_tokens(PROBABILITIES, Sampling(logit_bias={5: 1.0}), [0.0])


def test_penalties_are_the_same_alone_and_in_a_batch():
    model = small_lm()
    options = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {3: 1.5}, "seed": 5, "stop": [7]}
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    together = model.generate(prompts, 20, **options).rows()
    assert together == [model.generate(prompts[i : i + 1], 20, **options).rows()[0] for i in range(2)]
    assert together != model.generate(prompts, 20, seed=5, stop=[7]).rows()


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for u in (0.0, 0.5, 1 - 2**-53):
        assert sample_tokens(logits, Sampling(temperature=1.0), [u]).item() == 1


def test_half_precision_logits_are_drawn_in_float32():
    assert near(distribution(PROBABILITIES.log().bfloat16()), PROBABILITIES.log().bfloat16().float().softmax(-1)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_rejected(bad, temperature):
    logits = torch.tensor([[0.0, bad]])
    with pytest.raises(ValueError, match="logits are not finite"):
        sample_tokens(logits, Sampling(temperature=temperature), [0.5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be between 0 and 1e[+]30, got -1.0"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"top_k": 0}, "top_k must be None or at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1, got 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 1e-30 and 1e[+]30, got 0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be between 1e-30 and 1e[+]30, got 1e-40"),
        ({"repetition_penalty": 10**400}, "repetition_penalty must be between 1e-30 and 1e[+]30, got 1000"),
        ({"presence_penalty": math.nan}, "presence_penalty must be between -1e[+]30 and 1e[+]30, got nan"),
        ({"frequency_penalty": 1e39}, "frequency_penalty must be between -1e[+]30 and 1e[+]30, got 1e[+]39"),
        ({"logit_bias": {3: math.inf}}, "logit_bias must be between -1e[+]30 and 1e[+]30, got inf for token 3"),
    ],
)
def test_values_outside_their_ranges_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("repetition_penalty", [1e-30, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e30])
def test_values_at_the_ends_of_their_ranges_can_be_computed(repetition_penalty, temperature):
    penalties = {"presence_penalty": -1e30, "frequency_penalty": 1e30, "logit_bias": {0: 1e30, 1: -1e30}}
    sampling = Sampling(repetition_penalty=repetition_penalty, temperature=temperature, **penalties)
    logits = torch.tensor([[3.0, -3.0, 0.0, 1e5]])
    token = sample_tokens(logits, sampling, [0.5], torch.ones(1, 4, dtype=torch.bool), [{0: 10**6, 2: 1, 3: 4}])
    assert 0 <= token.item() < 4


def test_numbers_are_uniform_and_depend_on_everything():
    numbers = torch.tensor(
        [draw_uniform(1, key, count) for key in range(50) for count in range(50)], dtype=torch.float64
    )
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(numbers.var() - 1 / 12) < 0.005
    assert 0 <= numbers.min() < numbers.max() < 1
    assert len({draw_uniform(1, 2, 3), draw_uniform(2, 2, 3), draw_uniform(1, 3, 3), draw_uniform(1, 2, 4)}) == 4
    assert draw_uniform(-1, -(2**63), 0) == draw_uniform(2**64 - 1, -(2**63), 0)


def test_a_row_is_known_by_its_tokens_and_twins_are_told_apart():
    key = hash_tokens(torch.tensor([1, 2, 3]))
    assert key == hash_tokens(torch.tensor([1, 2, 3], dtype=torch.int32))
    assert key != hash_tokens(torch.tensor([1, 2]))
    keys = split_keys([key, 5, key, key], [0, 0, 0, 1])
    assert keys[0] == keys[3] == key
    assert len(set(keys)) == 3
