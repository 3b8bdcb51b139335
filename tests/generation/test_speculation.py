"""Drafts change how fast tokens come, never which."""

import random
import warnings

import pytest
import torch

from anymamba import GenerationState, generate, pipeline
from anymamba.core.registry import kernels_off
from anymamba.generation import Speculation, stream
from anymamba.generation.speculation import LookupDrafter, WindowSize
from anymamba.kernels.cpu import bindings
from anymamba.models.token_window import MAX_WINDOW
from anymamba.quantization import quantize_model
from tests.models.cases import FAMILIES, small_lm

compiled = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "filtered": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 1},
    "penalized": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {3: 2.0, 7: -5}, "seed": 2},
    "stopped": {"stop": [[4], [11, 2], 17], "temperature": 1.5, "seed": 3},
}
N = 24


class ScriptedDrafter:
    """Drafts from the tokens that rows will choose, of which some are changed."""

    def __init__(self, rows, wrong, seed=0):
        """`wrong` is the share of drafts that are changed."""
        self.rows = [list(row) for row in rows]
        self.wrong = wrong
        self.random = random.Random(seed)

    def append(self, tokens):
        self.rows = [row[1:] for row in self.rows]

    def keep_rows(self, indices):
        self.rows = [self.rows[i] for i in indices]

    def propose(self, count, state):
        change = lambda token: (token + 1) % 61 if self.random.random() < self.wrong else token  # noqa: E731
        lengths = [self.random.randint(count // 2, count) for _ in self.rows]
        return [[change(token) for token in (row + [0] * n)[:n]] for row, n in zip(self.rows, lengths, strict=True)]


def assert_same(actual, expected):
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.lengths, expected.lengths)
    for name, x in expected.state.tensors().items():
        assert torch.equal(actual.state.tensors()[name], x), name


@compiled
@pytest.mark.parametrize(
    ("family", "way", "batch"),
    [("Mamba2", way, 1 + 2 * (i % 2)) for i, way in enumerate(WAYS)]
    + [(family, "filtered", batch) for family in FAMILIES for batch in (1, 3)],
)
def test_any_draft_gives_the_tokens_and_the_state_of_none(family, way, batch):
    model, ids = small_lm(family), torch.randint(61, (batch, 9))
    options = {**WAYS[way], "return_state": True}
    expected = generate(model, ids, N, **options)
    draft_model = small_lm(family, seed=0 if way == "sampled" else 7)
    drafts = [ScriptedDrafter(expected.rows(), wrong) for wrong in (0, 0.3, 1)]
    for draft in (*drafts, "lookup", draft_model):
        for window in (None, 2, 7, MAX_WINDOW) if draft == "lookup" else (5,):
            assert_same(generate(model, ids, N, speculate=Speculation(draft=draft, window=window), **options), expected)


@compiled
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_weights_in_fewer_bits_and_padded_prompts(format):
    model, ids = quantize_model(small_lm(d_model=64), format), torch.randint(61, (3, 9))
    options = {"mask": torch.tensor([9, 2, 5]), "seed": 4, "return_state": True}
    expected = generate(model, ids, N, **options)
    for draft in (ScriptedDrafter(expected.rows(), 0.2), small_lm(), "lookup"):
        assert_same(generate(model, ids, N, speculate=Speculation(draft=draft, window=6), **options), expected)


@compiled
def test_right_drafts_count_and_wrong_ones_do_not():
    model, ids = small_lm(), torch.randint(61, (1, 9))
    expected = generate(model, ids, N)
    assert (expected.drafted, expected.accepted) == (0, 0)
    right, wrong = (
        generate(model, ids, N, speculate=Speculation(draft=ScriptedDrafter(expected.rows(), share), window=4))
        for share in (0, 1)
    )
    assert right.drafted == right.accepted > N // 3
    assert wrong.drafted > N
    assert wrong.accepted == 0
    # The model itself writes the same drafts, with the same random numbers.
    same = generate(model, ids, N, seed=3, speculate=Speculation(draft=model, window=4))
    assert same.drafted == same.accepted > N // 3


@compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_between_two_tokens_is_that_of_the_tokens_returned(family):
    model, ids = small_lm(family), torch.randint(61, (2, 9))
    rows = generate(model, ids, N).rows()
    plain = stream(model, ids, N)
    drafted = stream(model, ids, N, speculate=Speculation(draft=ScriptedDrafter(rows, 0.1), window=8))
    states = []
    for step, (token, expected) in enumerate(zip(drafted, plain, strict=True)):
        assert token == expected
        if step % 3 == 1:
            states.append((drafted.state, plain.state))
    for state, expected in states:  # later tokens have not changed them
        for name, x in expected.tensors().items():
            assert torch.equal(state.tensors()[name], x), name
        continued = generate(model, None, 5, cache=state, speculate="lookup", history=rows)
        assert torch.equal(continued.tokens, generate(model, None, 5, cache=expected).tokens)


@compiled
def test_a_state_that_is_given_stays_as_it_is():
    model, ids = small_lm(), torch.randint(61, (1, 9))
    state = generate(model, ids, 3, return_state=True).state
    before = state.clone()
    expected = generate(model, None, N, cache=state)
    draft = ScriptedDrafter(expected.rows(), 0)
    actual = generate(model, None, N, cache=state, speculate=Speculation(draft=draft, window=4))
    assert torch.equal(actual.tokens, expected.tokens)
    for name, x in before.tensors().items():
        assert torch.equal(state.tensors()[name], x), name


@compiled
def test_texts_end_where_they_end_without_drafts(tmp_path):
    small_lm(vocab_size=256).save_pretrained(tmp_path)
    text = pipeline(tmp_path, tokenizer="bytes")
    plain = text(["abcabcabc", "a"], 60, seed=1, n=2)
    stop = plain[0][0].text[5:8]
    for options in ({}, {"stop": stop}, {"logprobs": 2}):
        expected = text(["abcabcabc", "a"], 60, seed=1, n=2, **options)
        assert text(["abcabcabc", "a"], 60, seed=1, n=2, speculate="lookup", **options) == expected
    drafted = text.stream("abcabc", 60, speculate=Speculation(window=5))
    assert "".join(drafted) == "".join(text.stream("abcabc", 60))


def test_without_compiled_windows_drafts_have_no_effect_and_it_is_said():
    model, ids = small_lm(), torch.randint(61, (1, 9))
    with kernels_off():
        expected = generate(model, ids, 8)
        with pytest.warns(UserWarning, match="speculate has no effect"):
            actual = generate(model, ids, 8, speculate="lookup")
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.drafted == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ids, 8, speculate=None)


def test_lookup_finds_what_followed_the_longest_end():
    state = GenerationState.like(small_lm())
    drafter = LookupDrafter([[1, 2, 3, 4, 5, 9, 3, 4, 7, 2, 3, 4], [1, 2, 3]])
    assert drafter.propose(3, state) == [[5, 9, 3], []]
    drafter.append([5, 1])
    assert drafter.propose(20, state)[0][:4] == [9, 3, 4, 7]
    drafter.keep_rows([1])
    drafter.append([2])
    assert drafter.propose(5, state) == [[3, 1, 2, 3, 1]]  # the text repeats itself


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("agreement", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_failing_drafts_cost_at_most_a_twentieth(slope, agreement):
    size, rng = WindowSize(), random.Random(0)
    seconds, tokens = 0.0, 0
    while tokens < 1000:
        k = size.choose(MAX_WINDOW)
        spent = 1 + slope * (k - 1)
        right = 0
        while right < k - 1 and rng.random() < agreement:
            right += 1
        if k == 1:
            size.note_single(spent)
        else:
            size.note_window(spent, k, 1 + right)
        seconds, tokens = seconds + spent, tokens + 1 + right
    assert seconds <= 1.05 * tokens
    if agreement >= 0.95 and slope <= 0.1:
        assert seconds < 0.6 * tokens


def test_mistakes_are_named(unchecked):
    model, ids = small_lm(), torch.randint(61, (1, 9))
    for speculate, error, message in (
        ("n-grams", TypeError, 'must be "lookup", a language model or a Drafter'),
        (small_lm(vocab_size=62), ValueError, "must have the vocabulary of the model, 61 tokens, got 62"),
    ):
        with pytest.raises(error, match=message):
            generate(model, ids, 8, speculate=speculate)
    for window in (1, MAX_WINDOW + 1):
        with pytest.raises(ValueError, match=f"window must be from 2 to {MAX_WINDOW} tokens, got {window}"):
            Speculation(window=window)
    with pytest.raises(ValueError, match="history must have 1 rows"):
        generate(model, ids, 8, speculate="lookup", history=[[1], [2]])


@compiled
def test_a_draft_that_is_no_token_is_rejected():
    model, ids = small_lm(), torch.randint(61, (1, 9))
    draft = ScriptedDrafter([[100] * 20], 0)
    with pytest.raises(ValueError, match="drafts must be tokens between 0 and 60"):
        generate(model, ids, 8, speculate=Speculation(draft=draft, window=3))
