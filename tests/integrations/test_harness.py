"""The model type of lm-evaluation-harness gives the scores of the harness' own type for transformers.

The harness brings many packages, so it is no part of the development environment: `make test-harness` runs this file.
"""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from anymamba import MambaLM
from anymamba.generation import load_tokenizer
from anymamba.integrations.harness import HarnessModel
from tests.models.cases import small_lm

pytestmark = pytest.mark.filterwarnings("default")

TEXT = "The village lies at the end of a narrow valley, where the river turns to the south. In the summer the farmers "
PAIRS = [
    ("", " The village"),
    ("The village", " lies at"),
    ("The village", " turns"),
    ("The village ", "lies at the end of a narrow valley"),
    ("The village lies at the end of a", " n"),
    ("The village lies at the end of a", " m"),
    (TEXT * 3, " take"),
    ("<|end|>The village", " lies"),
]


@pytest.fixture(scope="module", params=["Mamba1", "Mamba2"])
def model_directory(request, tmp_path_factory):
    """Return a directory that transformers and anymamba both read: a model of random weights, and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "initial_alphabet": alphabet, "special_tokens": ["<|end|>"], "show_progress": False}
    tokenizer.train_from_iterator([TEXT] * 3, tokenizers.trainers.BpeTrainer(**options))
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|end|>", "bos_token": "<|end|>", "pad_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    model = small_lm(request.param, vocab_size=304)
    model.save_pretrained(directory, format="transformers")
    return directory


def requests(kind, arguments):
    """Return requests as the harness makes them."""
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def both(directory, **options):
    """Return the harness' model of transformers, and ours, in float32 with a short window."""
    options = {"pretrained": str(directory), "dtype": "float32", "device": "cpu", "max_length": 48, **options}
    return HFLM(**options), HarnessModel(**options)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_likelihoods_of_continuations_equal_those_of_transformers(model_directory, batch_size):
    theirs, ours = both(model_directory, batch_size=batch_size)
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    scores = ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in expected]
    for (score, _), (reference, _) in zip(scores, expected, strict=True):
        assert score == pytest.approx(reference, rel=1e-4)


def test_the_most_likely_continuation_is_recognized(model_directory):
    theirs, ours = both(model_directory)
    ids = torch.tensor([ours.tok_encode("The village")])
    generated = ours.model.generate(ids, 3).rows()[0]
    pair = [(("", ""), ids[0].tolist(), generated), (("", ""), ids[0].tolist(), [*generated[:-1], generated[-1] ^ 1])]
    (_, is_greedy), (_, is_other_greedy) = ours._loglikelihood_tokens(pair)
    assert is_greedy
    assert not is_other_greedy
    assert [x[1] for x in theirs._loglikelihood_tokens(pair, disable_tqdm=True)] == [True, False]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rolling_likelihoods_equal_those_of_transformers(model_directory, batch_size):
    theirs, ours = both(model_directory, batch_size=batch_size)
    texts = [("The village",), (TEXT,), (TEXT * 3,), ("",)]
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_generated_texts_equal_those_of_transformers(model_directory, batch_size):
    theirs, ours = both(model_directory, batch_size=batch_size, max_length=256)
    options = [{"until": ["e", "zz"], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 5, "do_sample": False}]
    prompts = ["The village", "In the summer", TEXT]
    arguments = [(prompt, option) for option in options for prompt in prompts]
    expected = theirs.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", arguments)) == expected


def test_quantized_weights_are_scored_like_the_quantized_model(model_directory):
    ours = HarnessModel(str(model_directory), weights="int8", batch_size=2)
    scores = ours.loglikelihood(requests("loglikelihood", PAIRS[1:4]), disable_tqdm=True)
    model = MambaLM.from_pretrained(model_directory, weights="int8")
    tokenizer = load_tokenizer(None, model_directory)
    for (context, continuation), (score, _) in zip(PAIRS[1:3], scores, strict=False):
        ids = torch.tensor(tokenizer.encode(context + continuation))
        count = len(ids) - len(tokenizer.encode(context))
        with torch.no_grad():
            log_probabilities = model(ids[None]).logits[0].log_softmax(-1)
        expected = log_probabilities[:-1].gather(1, ids[1:, None])[-count:].sum()
        assert score == pytest.approx(expected.item(), rel=1e-4)


def test_long_continuations_are_scored_a_few_tokens_at_a_time(model_directory, monkeypatch):
    ours = HarnessModel(str(model_directory), batch_size=4)
    whole = ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    monkeypatch.setattr("anymamba.integrations.harness._MAX_LOGITS", 1)
    for (score, _), (expected, _) in zip(
        ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True), whole, strict=True
    ):
        assert score == pytest.approx(expected, rel=1e-5)


def test_bad_options_say_what_is_expected(model_directory, tmp_path):
    for options, message in (
        ({"dtype": "float8"}, "dtype must be auto or one of"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            HarnessModel(str(model_directory), **options)
    ours = HarnessModel(str(model_directory))
    with pytest.raises(ValueError, match=r"generation options must be among .*, got num_beams"):
        ours.generate_until(requests("generate_until", [("The", {"until": ["."], "num_beams": 2})]))
    small_lm("Mamba2", vocab_size=256).save_pretrained(tmp_path)
    of_bytes = HarnessModel(str(tmp_path))
    assert of_bytes.loglikelihood(requests("loglikelihood", [("a", "b")]), disable_tqdm=True)[0][0] < 0
    with pytest.raises(ValueError, match="pass one as prefix_token_id"):
        of_bytes.loglikelihood_rolling(requests("loglikelihood_rolling", [("ab",)]))
    assert HarnessModel(str(tmp_path), prefix_token_id=10).eot_token_id == 10


@pytest.fixture
def tasks(tmp_path):
    """Return a directory with three tasks on a data set of four questions."""
    lines = [
        {"question": "The village lies", "choices": [" at the end", " in the summer"], "label": 0},
        {"question": "The river turns", "choices": [" to the south", " the farmers"], "label": 1},
        {"question": "In the summer", "choices": [" the farmers", " narrow"], "label": 0},
        {"question": "The farmers", "choices": [" take", " valley", " end"], "label": 2},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    shared = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    (tmp_path / "choose.yaml").write_text(
        f"task: choose\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: choices\ndoc_to_target: label\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (tmp_path / "read.yaml").write_text(
        f"task: read\n{shared}output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{question}}}}'\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    )
    (tmp_path / "write.yaml").write_text(
        f"task: write\n{shared}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs:\n  until: ['.']\n  max_gen_toks: 6\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return tmp_path


def test_tasks_get_the_scores_of_transformers(model_directory, tasks):
    from lm_eval.tasks import TaskManager

    results = {}
    for model, options in (("hf", {}), ("anymamba", {})):
        arguments = {"pretrained": str(model_directory), "dtype": "float32", **options}
        results[model] = simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=["choose", "read", "write"],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            batch_size=2,
            device="cpu",
            bootstrap_iters=0,
        )["results"]
    for task in ("choose", "read", "write"):
        figures = {name: value for name, value in results["hf"][task].items() if isinstance(value, float)}
        assert figures
        for name, value in figures.items():
            assert results["anymamba"][task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_the_command_of_the_harness_knows_the_model_type(model_directory, tasks):
    command = [sys.executable, "-m", "anymamba.integrations.harness", "--model", "anymamba"]
    command += ["--model_args", f"pretrained={model_directory},weights=int8", "--tasks", "choose"]
    command += ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "acc_norm" in result.stdout


def test_the_growing_caches_of_a_hybrid_are_continued_too(tmp_path):
    attention = {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 8}
    model = small_lm("Mamba2", n_layer=4, vocab_size=256, attn_layer_idx=[1, 3], attn_cfg=attention)
    model.save_pretrained(tmp_path)
    pairs = [("hello", " world"), ("hello", " w"), ("a longer context here", " yes indeed"), ("x", "y")]
    scores = HarnessModel(str(tmp_path), batch_size=3).loglikelihood(
        requests("loglikelihood", pairs), disable_tqdm=True
    )
    for (context, continuation), (score, _) in zip(pairs, scores, strict=True):
        ids = torch.tensor(list((context + continuation).encode()))
        with torch.no_grad():
            log_probabilities = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = log_probabilities.gather(1, ids[1:, None])[-len(continuation) :].sum()
        assert score == pytest.approx(expected.item(), rel=1e-4)
