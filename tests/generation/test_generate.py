import copy
import dataclasses
import inspect
from importlib import import_module

import numpy as np
import pytest
import torch

from anymamba import GenerationState, LMCache, MambaLM, generate, stream
from anymamba.generation import Sampling, prefill
from anymamba.kernels.cpu import bindings
from anymamba.models import LMOutput
from tests.models.cases import FAMILIES, GOLDEN, golden, small_lm
from tests.models.test_lm_cache import bad_rows_cases, rows_cases
from tests.support import FLOOR, MODEL_FLOOR, assert_all_near, assert_near

families = pytest.mark.parametrize("family", FAMILIES)
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}


def prompts(*lengths):
    """Make a padded batch, its mask (padding left, right or in between), and the rows alone."""
    rows = [torch.randint(61, (n,)) for n in lengths]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        positions = torch.randperm(max(lengths))[: len(row)].sort().values
        ids[i, positions], mask[i, positions] = row, True
    return ids, mask, rows


def test_greedy_tokens_are_those_of_the_reference():
    model, g = MambaLM.from_pretrained(GOLDEN / "lm_hf_mamba2"), golden("lm_hf_mamba2")
    prompt = g["input_ids"]
    assert torch.equal(model.generate(prompt, 16).tokens, g["greedy"][:, prompt.shape[1] :])


@pytest.mark.parametrize("name", ["lm_mamba2", "lm_mamba2_mlp_untied", "lm_mamba3_siso", "lm_mamba3_mimo"])
def test_greedy_tokens_are_the_most_likely_of_the_reference_logits(name):
    model, g = MambaLM.from_pretrained(GOLDEN / name), golden(name)
    for t in (1, 7, 40):
        expected = g["logits"][:, t - 1, : model.config.vocab_size].argmax(-1)
        assert torch.equal(model.generate(g["input_ids"][:, :t], 1).tokens[:, 0], expected)


@families
@pytest.mark.parametrize("segment_len", [64, 100, 2048])
def test_steps_and_prefill_agree_on_log_probabilities(family, segment_len):
    """A continuation is as likely token by token as in one go, for any mix of prompts."""
    model = small_lm(family)
    exact = copy.deepcopy(model).double()
    ids, mask, rows = prompts(1, 37, 300, 513)
    state, new, steps = prefill(model, ids, mask=mask, segment_len=segment_len), torch.randint(61, (4, 32)), []
    logits, cache = state.logits, state.cache
    with torch.no_grad():
        for t in range(32):
            steps.append(logits.log_softmax(-1))
            logits, cache = model.step(new[:, t], cache)
        for i, row in enumerate(rows):
            whole = torch.cat([row, new[i]]).unsqueeze(0)
            expected = exact(whole).logits[0, len(row) - 1 : -1].log_softmax(-1)
            assert_near(model(whole).logits[0, len(row) - 1 : -1].log_softmax(-1), expected, MODEL_FLOOR, f"row {i}")
            assert_near(torch.stack(steps, 1)[i], expected, MODEL_FLOOR, f"row {i}, step by step")


@families
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_gives_the_same_in_any_batch(family, options):
    model = small_lm(family, torch.float64)
    ids, mask, rows = prompts(5, 12, 1, 12)
    together = model.generate(ids, 20, mask=mask, segment_len=4, **options).tokens
    for i, row in enumerate(rows):
        assert torch.equal(together[i : i + 1], model.generate(row.unsqueeze(0), 20, **options).tokens), i
    order = [2, 0, 3, 1]
    assert torch.equal(model.generate(ids[order], 20, mask=mask[order], **options).tokens, together[order])


@families
def test_any_segment_length_gives_the_same(family):
    model, ids = small_lm(family, torch.float64), torch.randint(61, (2, 33))
    expected = prefill(model, ids)
    for segment_len in (1, 7, 32, 33, 34):
        state = prefill(model, ids, segment_len=segment_len)
        assert_near(state.logits, expected.logits, FLOOR[torch.float64])
        assert_all_near(state.cache.tensors(), expected.cache.tensors(), FLOOR[torch.float64])


def test_no_more_than_a_segment_is_computed_at_once():
    model, sizes = small_lm(), []
    model.backbone.norm_f.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[:2])))
    ids, mask, _ = prompts(3, 50, 1000)
    prefill(model, ids, mask=mask, segment_len=64)
    assert max(t for _, t in sizes) == 64
    assert len(sizes) == 16
    assert sizes[:3] == [(3, 64), (1, 64), (1, 64)], "rows that have ended take no further part"


def test_a_seed_repeats_and_another_differs():
    model, ids = small_lm(), torch.randint(61, (1, 5))
    first = model.generate(ids, 30, **SAMPLED).tokens
    assert torch.equal(first, model.generate(ids, 30, **SAMPLED).tokens)
    assert not torch.equal(first, model.generate(ids, 30, **{**SAMPLED, "seed": 8}).tokens)
    unseeded = {"temperature": 1.0}
    assert not torch.equal(model.generate(ids, 30, **unseeded).tokens, model.generate(ids, 30, **unseeded).tokens)


def test_equal_prompts_in_a_batch_draw_differently():
    tokens = small_lm().generate(torch.full((3, 4), 9), 30, **SAMPLED).tokens
    assert len({tuple(row) for row in tokens.tolist()}) == 3


def test_rows_stop_independently_and_others_continue():
    model, ids = small_lm(), torch.randint(61, (3, 6))
    full = model.generate(ids, 24, **SAMPLED).tokens
    stop = [full[0, 4].item(), (full[1, 9].item(), full[1, 10].item())]
    expected = []
    for row in full.tolist():
        ends = [i + 1 for i in range(24) if row[i] == stop[0] or tuple(row[max(0, i - 1) : i + 1]) == stop[1]]
        expected.append(row[: min(ends, default=24)])
    out = model.generate(ids, 24, stop=stop, **SAMPLED)
    assert out.rows() == expected
    assert len(expected[0]) <= 5
    assert (out.tokens[0, len(expected[0]) :] == 0).all()
    assert model.generate(ids, 24, stop=full[0, 0].item(), **SAMPLED).rows()[0] == full[0, :1].tolist()


@families
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "repetition_penalty": 1.5}], ids=["greedy", "sampled"])
def test_continuing_from_a_state_equals_not_stopping(family, options):
    model, ids = small_lm(family), torch.randint(61, (2, 6))
    whole = model.generate(ids, 30, **options).tokens
    first = model.generate(ids, 11, return_state=True, **options)
    second = model.generate(None, 19, cache=first.state, **options)
    assert torch.equal(torch.cat([first.tokens, second.tokens], 1), whole)


def test_the_state_of_rows_that_stopped_is_where_they_stopped():
    model, ids = small_lm(), torch.randint(61, (3, 6))
    whole = model.generate(ids, 30, **SAMPLED).tokens
    stop = [whole[0, 3].item(), whole[1, 8].item()]
    first = model.generate(ids, 12, stop=stop, return_state=True, **SAMPLED)
    second = model.generate(None, 8, cache=first.state, **SAMPLED)
    assert len(set(first.lengths.tolist())) > 1
    for i, n in enumerate(first.lengths.tolist()):
        assert first.rows()[i] + second.rows()[i] == whole[i, : n + 8].tolist()


def test_a_state_can_be_taken_between_steps_and_kept():
    """Roll back by keeping a state; nothing that follows changes it."""
    model, ids = small_lm(), torch.randint(61, (1, 6))
    tokens = stream(model, ids, 20, **SAMPLED)
    first_tokens = [next(tokens)[0] for _ in range(5)]
    kept = tokens.state
    copy = kept.clone()
    rest = [step[0] for step in tokens]
    assert [row[0] for row in stream(model, None, 15, cache=kept, **SAMPLED)] == rest
    assert first_tokens + rest == model.generate(ids, 20, **SAMPLED).rows()[0]
    assert torch.equal(kept.logits, copy.logits)
    assert torch.equal(kept.seen, copy.seen)
    assert all(torch.equal(x, copy.cache.tensors()[name]) for name, x in kept.cache.tensors().items())


@families
def test_a_stream_that_was_interrupted_within_a_step_raises_when_continued(family, monkeypatch):
    """The step has begun to overwrite the cache, so that its numbers belong to no token."""
    model, ids = small_lm(family), torch.randint(61, (1, 6))
    tokens = stream(model, ids, 20, **SAMPLED)
    streamed = [next(tokens)[0] for _ in range(4)]
    kept = tokens.state
    streamed += [next(tokens)[0] for _ in range(3)]

    take_step = tokens._decoder.step

    def interrupted(*arguments, **options):
        take_step(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens._decoder, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    with pytest.raises(RuntimeError, match="ended within a step: its state is lost"):
        _ = tokens.state
    with pytest.raises(RuntimeError, match="ended within a step: its state is lost"):
        next(tokens)
    assert [row[0] for row in stream(model, None, 3, cache=kept, **SAMPLED)] == streamed[4:]


def test_one_prefix_branches_into_many_continuations():
    model, ids = small_lm(dtype=torch.float64), torch.randint(61, (1, 50))
    prefix = prefill(model, ids)
    branches = model.generate(None, 20, cache=prefix.rows([0] * 4), **SAMPLED).tokens
    assert len({tuple(row) for row in branches.tolist()}) == 4
    assert torch.equal(branches[:1], model.generate(ids, 20, **SAMPLED).tokens)
    questions = torch.randint(61, (3, 4))
    answers = model.generate(questions, 10, cache=prefix.rows([0] * 3)).tokens
    whole = torch.cat([ids.expand(3, -1), questions], 1)
    assert torch.equal(answers, model.generate(whole, 10).tokens)


@pytest.mark.parametrize(("index", "meant"), rows_cases(), ids=repr)
def test_rows_of_a_state_keep_the_batch_dimension_however_they_are_named(index, meant, unchecked):
    state = prefill(small_lm(), torch.randint(61, (3, 5)))
    chosen = state.rows(index)
    assert chosen.batch_size == chosen.cache.batch_size == len(meant)
    assert torch.equal(chosen.logits, state.logits[meant])
    assert torch.equal(chosen.seen, state.seen[meant])
    assert torch.equal(chosen.keys, state.keys[meant])


@pytest.mark.parametrize(("index", "error", "message"), bad_rows_cases(), ids=repr)
def test_what_names_no_rows_of_a_state_is_rejected(index, error, message, unchecked):
    with pytest.raises(error, match=message):
        prefill(small_lm(), torch.randint(61, (3, 5))).rows(index)


def test_a_state_moves_to_a_model_of_another_dtype():
    model, ids = small_lm(dtype=torch.bfloat16), torch.randint(61, (2, 9))
    wide = small_lm()
    wide.load_state_dict(model.state_dict())
    state = prefill(model, ids).to(torch.float32)
    assert state.logits.dtype == torch.float32
    assert {x.dtype for x in state.cache.tensors().values()} == {torch.float32}
    assert wide.generate(None, 3, cache=state.to("cpu")).tokens.shape == (2, 3)
    assert not state.detach().logits.requires_grad


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
def test_the_state_that_a_prompt_arrived_at_is_there_once():
    """Nothing else refers to it, so the steps after it write to the same memory."""
    tokens = stream(small_lm(), prompts(5)[0], 3)
    before = [x.data_ptr() for x in tokens._state.cache.leaves()]
    list(tokens)
    assert [x.data_ptr() for x in tokens._state.cache.leaves()] == before


def test_what_a_prompt_continues_from_stays_as_it_is_even_if_a_model_hands_it_on(monkeypatch):
    model, ids = small_lm(), prompts(5)[0]
    cache = model(ids).cache
    before = [x.clone() for x in cache.leaves()]

    def handing_on(model, ids, cache, **options):
        return prefill(model, ids, cache, **options)._replace(cache=cache)

    monkeypatch.setattr(import_module("anymamba.generation.generate"), "prefill", handing_on)
    generate(model, ids, 4, cache=cache)
    assert all(torch.equal(x, y) for x, y in zip(cache.leaves(), before, strict=True))


def test_a_cache_that_a_hook_has_kept_stays_as_it_is():
    model, kept = small_lm(), []
    handle = model.register_forward_hook(lambda _, __, output: kept.append(output.cache))
    tokens = stream(model, prompts(5)[0], 3)
    handle.remove()
    before = [x.clone() for x in kept[-1].leaves()]
    list(tokens)
    assert all(torch.equal(x, y) for x, y in zip(kept[-1].leaves(), before, strict=True))


def test_what_is_read_in_inference_mode_can_be_continued_outside_it():
    model = small_lm()
    with torch.inference_mode():
        tokens = stream(model, prompts(5)[0], 3)
    list(tokens)
    model(prompts(3)[0], tokens.state.cache).logits.sum().backward()


def test_a_bare_cache_continues_with_a_prompt():
    model, ids = small_lm(dtype=torch.float64), torch.randint(61, (2, 9))
    cache = model(ids[:, :4]).cache.detach()
    assert torch.equal(model.generate(ids[:, 4:], 8, cache=cache).tokens, model.generate(ids, 8).tokens)


def test_a_state_file_is_the_state(tmp_path):
    model, ids = small_lm(dtype=torch.bfloat16), torch.randint(61, (2, 9))
    state = model.generate(ids, 3, return_state=True, **SAMPLED).state
    state.save(tmp_path / "state", model)
    loaded = GenerationState.load(tmp_path / "state", model)
    for name in ("logits", "seen", "keys", "counts"):
        assert torch.equal(getattr(loaded, name), getattr(state, name)), name
    assert torch.equal(
        model.generate(None, 9, cache=loaded, **SAMPLED).tokens, model.generate(None, 9, cache=state, **SAMPLED).tokens
    )
    with pytest.raises(ValueError, match="belongs to another model"):
        GenerationState.load(tmp_path / "state", small_lm(seed=1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="expected a saved LMCache, got 'GenerationState'"):
        LMCache.load(tmp_path / "state", model)
    content = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        GenerationState.load(tmp_path / "state", model)


def test_padding_of_the_vocabulary_is_never_generated():
    model = small_lm(vocab_size=57, pad_vocab_size_multiple=64, tie_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[57:] = 100 * torch.sign(model.lm_head.weight[57:])
    out = model.generate(torch.randint(57, (4, 5)), 30, temperature=5.0, seed=1)
    assert out.tokens.max() < 57


def test_the_model_runs_once_a_token_and_not_for_the_last():
    model, ids, calls = small_lm(), torch.randint(61, (1, 5)), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids, 4)
    assert len(calls) == 4


def test_no_token_is_asked_for():
    out = small_lm().generate(torch.randint(61, (2, 5)), 0, return_state=True)
    assert out.tokens.shape == (2, 0)
    assert out.rows() == [[], []]
    assert out.state.batch_size == 2


def test_generation_needs_no_gradient_and_leaves_gradients_on():
    model = small_lm()
    tokens = stream(model, torch.randint(61, (1, 5)), 3)
    next(tokens)
    assert torch.is_grad_enabled()
    assert not tokens.state.logits.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(torch.zeros(1, 0, dtype=torch.int64), 3), "at least one token, got none in row 0"),
        (
            lambda m: m.generate(torch.ones(2, 3, dtype=torch.int64), 3, mask=torch.tensor([3, 0])),
            "at least one token, got none in row 1",
        ),
        (lambda m: m.generate(torch.zeros(0, 3, dtype=torch.int64), 3), "at least one row"),
        (lambda m: m.generate(torch.tensor([[1, 64]]), 3), "between 0 and 63, got 1 to 64 in row 0"),
        (lambda m: m.generate(torch.tensor([[1, -1]]), 3), "between 0 and 63, got -1 to 1 in row 0"),
        (lambda m: m.generate(torch.tensor([1, 2]), 3), r"integers of shape \(b, t\), got torch.int64 of shape \(2,\)"),
        (lambda m: m.generate(None, 3), "needs a prompt"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, cache=m.init_cache(2)), "must have 1 rows, .*got 2"),
        (lambda m: m.generate(torch.tensor([[1]]), -1), "max_new_tokens must be at least 0, got -1"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, stop=[[]]), "a stop sequence must have at least one token"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, segment_len=0), "segment_len must be at least 1, got 0"),
        (lambda m: generate(m, torch.tensor([[1]]), 3, top_p=2.0), "top_p must be above 0"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, stop=[500]), r"between 0 and 60, got \[500\]"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, stop=61), r"between 0 and 60, got \[61\]"),
        (lambda m: m.generate(torch.tensor([[1]]), 3, stop=[(1, -1)]), r"between 0 and 60, got \[1, -1\]"),
        (
            lambda m: m.generate(None, 3, cache=prefill(m, torch.tensor([[1]])), mask=torch.tensor([1])),
            "got a mask alone",
        ),
    ],
)
def test_bad_input_is_rejected_by_name(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call(small_lm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [[1, 2]]}, r"input_ids must be a tensor \(b, t\), got list; torch.tensor\(\[ids\]\)"),
        ({"input_ids": "text"}, "input_ids must be a tensor .*got str; .*a tokenizer makes ids from a text"),
        ({"mask": [1]}, r"mask must be a tensor \(b, t\) or lengths \(b,\), got list"),
        ({"stop": "text"}, "got the text 'text': encode it with the tokenizer"),
        ({"stop": [3, "text"]}, "got the text 'text': encode it with the tokenizer"),
        ({"stop": 1.5}, "stop must be token ids, or sequences of them, got 1.5"),
        ({"stop": [[[1]]]}, r"stop must be token ids, or sequences of them, got \[1\]"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        ({"segment_len": 2.5}, "segment_len must be an integer, got 2.5"),
        ({"cache": (1, 2)}, "a GenerationState or an LMCache, got tuple"),
        ({"cache": LMOutput(torch.ones(1, 1, 64), None, small_lm().init_cache(1))}, "got LMOutput; pass its .cache"),
        ({"cache": small_lm().generate(torch.ones(1, 1).long(), 1, return_state=True)}, "got Generation; .*its .state"),
    ],
    ids=repr,
)
def test_arguments_of_another_type_are_rejected_by_name(options, message, unchecked):
    with pytest.raises(TypeError, match=message):
        small_lm().generate(**{"input_ids": torch.tensor([[1]]), "max_new_tokens": 3, **options})


def test_a_filter_or_a_seed_asks_for_draws():
    model, ids = small_lm(), torch.randint(61, (1, 5))
    greedy = model.generate(ids, 30).tokens
    for options in ({"seed": 7}, {"seed": 7, "top_k": 40}, {"seed": 7, "top_p": 0.9}, {"seed": 7, "min_p": 0.1}):
        drawn = model.generate(ids, 30, **options).tokens
        assert torch.equal(drawn, model.generate(ids, 30, temperature=1.0, **options).tokens)
        assert not torch.equal(drawn, greedy)
        assert torch.equal(model.generate(ids, 30, temperature=0.0, **options).tokens, greedy)
    for options in ({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not torch.equal(model.generate(ids, 30, **options).tokens, greedy)


def test_stop_tokens_may_be_any_integers(unchecked):
    model, ids = small_lm(), torch.randint(61, (1, 5))
    third = model.generate(ids, 9, seed=1).rows()[0][2]
    expected = model.generate(ids, 9, seed=1, stop=third).rows()
    for stop in (torch.tensor(third), torch.tensor([third]), [torch.tensor(third)], np.array([third]), {third}):
        assert model.generate(ids, 9, seed=1, stop=stop).rows() == expected


def test_torchs_seed_has_no_part_in_draws():
    model, ids, drawn = small_lm(), torch.randint(61, (1, 5)), []
    for seed in (None, None, 7, 7):
        torch.manual_seed(0)
        drawn.append(model.generate(ids, 30, temperature=1.0, seed=seed).rows())
    assert drawn[0] != drawn[1]
    assert drawn[2] == drawn[3]


def test_options_are_named_once_and_a_misspelled_one_is_corrected():
    model, ids = small_lm(), torch.randint(61, (1, 6))
    with pytest.raises(TypeError, match=r"generation has no option 'temprature'; did you mean temperature\?"):
        model.generate(ids, 3, temprature=1.0)
    text = inspect.getdoc(stream)
    assert all(field.name in text for field in dataclasses.fields(Sampling))
    assert all(f"{name}: " in text for name in inspect.signature(stream).parameters)
