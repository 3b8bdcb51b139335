import pytest
import torch

import anymamba
from anymamba import MambaLM
from anymamba.generation import ByteTokenizer, Pipeline, load_tokenizer
from anymamba.generation.completion import StopFilter
from tests.models.cases import small_lm

PROMPTS = ["Hello", "a", "A longer prompt than the others", "Hello", "zwölf"]


@pytest.fixture(scope="module")
def text():
    return Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())


def alone(text, prompt, n=12, **options):
    """Return what the library generates from one prompt."""
    return text.model.generate(torch.tensor([list(prompt.encode())]), n, **options).rows()[0]


def test_a_directory_becomes_text_in_text_out(tmp_path):
    small_lm(vocab_size=256, pad_vocab_size_multiple=1).save_pretrained(tmp_path)
    text = anymamba.pipeline(tmp_path)
    completion = text("Hello", 12)
    assert completion.tokens == alone(text, "Hello")
    assert (completion.text, completion.reason) == (ByteTokenizer().decode(completion.tokens), "length")
    assert (completion.choices, completion.alternatives) == (None, None)
    assert anymamba.pipeline(tmp_path, dtype=torch.float64).model.dtype == torch.float64


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3, "top_k": 50}], ids=["greedy", "drawn"])
def test_prompts_of_any_lengths_give_what_each_gives_alone(text, batch_size, options):
    completions = text(PROMPTS, 12, batch_size=batch_size, **options)
    for prompt, completion in list(zip(PROMPTS, completions, strict=True))[:3]:
        assert completion.tokens == alone(text, prompt, **options)
    assert (completions[0].tokens == completions[3].tokens) == (
        not options
    )  # equal prompts draw differently, in any batches


def test_samples_of_a_prompt_differ_and_are_repeatable(text):
    completions = text(["Hello", "a"], 8, n=3, seed=5)
    assert [len(samples) for samples in completions] == [3, 3]
    assert len({completion.text for completion in completions[0]}) == 3
    assert completions == text(["Hello", "a"], 8, n=3, seed=5, batch_size=1)
    assert completions[1] == text("a", 8, n=3, seed=5)
    assert completions[0][0].tokens == alone(text, "Hello", 8, seed=5)
    assert len({completion.text for completion in text("Hello", 8, n=3)}) > 1  # several ask for draws
    assert len({completion.text for completion in text("Hello", 8, n=3, temperature=0)}) == 1
    assert [len(text("Hello", 8, n=1)), text(["Hello"], 8, n=1)] == [1, [text("Hello", 8, n=1)]]


def test_a_stop_text_ends_a_row_and_is_left_out(text):
    whole = text("Hello", 40, seed=1).text
    stop = whole[9:12]
    completion = text("Hello", 40, seed=1, stop=["nowhere", stop])
    assert (completion.text, completion.reason) == (whole[: whole.index(stop)], "stop")
    assert text(["Hello", "a"], 40, seed=1, stop=stop)[0] == completion
    assert "".join(text.stream("Hello", 40, seed=1, stop=stop)) == completion.text
    assert "".join(text.stream("Hello", 40, seed=1)) == whole


def test_the_end_token_ends_a_row_and_is_left_out(byte_level):
    tokenizer = load_tokenizer(byte_level)
    model = small_lm(vocab_size=tokenizer.vocab_size, pad_vocab_size_multiple=1)
    text = Pipeline(model, tokenizer)
    seed = next(seed for seed in range(100) if tokenizer.end[0] in text("héllo", 40, seed=seed, ignore_end=True).tokens)
    whole, ended = text("héllo", 40, seed=seed, ignore_end=True), text("héllo", 40, seed=seed)
    end = whole.tokens.index(tokenizer.end[0])
    assert (ended.tokens, ended.reason) == (whole.tokens[: end + 1], "end")
    assert ended.text == tokenizer.decode(whole.tokens[:end]) == "".join(text.stream("héllo", 40, seed=seed))


def test_log_probabilities_are_those_of_one_forward(text):
    prompt, options = "Hello", {"seed": 3, "temperature": 0.7}
    completion, plain = text([prompt, "a"], 10, logprobs=4, **options)[0], text(prompt, 10, **options)
    assert (completion.tokens, completion.text) == (plain.tokens, plain.text)
    ids = torch.tensor([[*prompt.encode(), *completion.tokens]])
    logprobs = text.model(ids).logits[0].double().log_softmax(-1)[len(prompt) - 1 : -1]
    for row, token, choice, alternatives in zip(
        logprobs, completion.tokens, completion.choices, completion.alternatives, strict=True
    ):
        assert choice.token == token
        assert choice.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert choice.text == ByteTokenizer().decode([token])
        assert [x.logprob for x in alternatives] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
        assert [x.logprob for x in alternatives] == pytest.approx([row[x.token].item() for x in alternatives], abs=1e-4)
    assert text(prompt, 3, logprobs=0).alternatives is None
    assert len(text(prompt, 3, logprobs=0).choices) == 3


def test_batches_come_as_they_are_done(text):
    batches = text.batches(PROMPTS, 2, batch_size=2)
    assert [number for number, _ in next(batches)] == [0, 3, 1]  # two prompts, of which one is there twice
    assert [number for batch in batches for number, _ in batch] == [2, 4]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, ValueError, "prompt must be a text, got an empty one"),
        (["a", ""], {}, ValueError, "prompt must be a text, got an empty one"),
        (["a", 3], {}, TypeError, "prompt must be a text or a list of strings, got 3"),
        (3, {}, TypeError, "prompt must be a text or a list of strings, got int"),
        ("a", {"stop": ["", "x"]}, ValueError, "stop must be a text, got an empty one"),
        ("a", {"n": 0}, ValueError, "n must be at least 1, got 0"),
        ("a", {"n": 1.5}, TypeError, "n must be an integer, got 1.5"),
        ("a", {"logprobs": -1}, ValueError, "logprobs must be at least 0, got -1"),
        ("a", {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ("a", {"top_p": 2.0}, ValueError, "top_p must be above 0"),
        ("a", {"temprature": 2.0}, TypeError, "temprature"),
    ],
)
def test_a_mistake_is_named(unchecked, text, prompt, options, error, message):
    with pytest.raises(error, match=message):
        text(prompt, 4, **options)


def test_no_prompts_give_no_completions(text):
    assert text([]) == []


def test_what_may_begin_a_stop_text_is_held_back():
    until = StopFilter(["abc", "bd"])
    assert [until.push(x) for x in ("xa", "b", "x", "ab")] == ["x", "", "abx", ""]
    assert (until.push("dx"), until.stopped) == ("a", True)


def test_a_model_of_the_library_can_be_joined_with_a_tokenizer(tmp_path):
    model = small_lm(vocab_size=256, pad_vocab_size_multiple=1)
    model.save_pretrained(tmp_path)
    joined = Pipeline(MambaLM.from_pretrained(tmp_path), load_tokenizer("bytes"))
    assert joined("x", 5).tokens == alone(joined, "x", 5)
