import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from time import perf_counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from anymamba import (
    GenerationState,
    LatentModel,
    MambaLM,
    MambaLMConfig,
    MaskedLM,
    SequenceClassifier,
    SequenceRegressor,
)
from anymamba.checkpoints.empty_model import empty_model
from anymamba.cli import generate, info
from anymamba.cli.main import main
from anymamba.core.io import read_json
from anymamba.generation.tokenizers import ByteTokenizer
from tests.generation.cases import bare
from tests.models.cases import GOLDEN, small_lm
from tests.support import MODEL_FLOOR, assert_all_near, assert_near

MODEL = dict(vocab_size=256, pad_vocab_size_multiple=1)  # noqa: C408


@pytest.fixture
def model(tmp_path):
    """Save a model of bytes in a directory."""
    small_lm(**MODEL).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def continuation(directory, prompt, n, **options):
    tokens = MambaLM.from_pretrained(directory).generate(torch.tensor([list(prompt)]), n, **options).rows()[0]
    return ByteTokenizer().decode(tokens)


@pytest.fixture
def interrupted(monkeypatch):
    """Send Ctrl-C, once or more often, when the model's head has run a number of times."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it

    def arrange(runs, times=1):
        load = generate.load

        def loaded(args):
            model, tokenizer = load(args)
            ran = []

            def hook(*_):
                ran.append(1)
                if len(ran) == runs:
                    for _ in range(times):
                        signal.raise_signal(signal.SIGINT)

            model.lm_head.register_forward_hook(hook)
            monkeypatch.setattr(generate, "load", load)
            return model, tokenizer

        monkeypatch.setattr(generate, "load", loaded)

    yield arrange
    signal.signal(signal.SIGINT, before)


class TestGenerate:
    def test_the_text_is_that_of_the_library(self, run, model):
        code, out, err = run("generate", model, "--prompt", "Hello", "--max-new-tokens", 12)
        assert (code, out) == (0, continuation(model, b"Hello", 12) + "\n")
        assert re.search(r"read 5 tokens \([\d.]+/s\), wrote 12 tokens \([\d.]+/s\)", err)

    def test_drafts_do_not_change_the_text(self, run, model, tmp_path):
        flags = ("generate", model, "--prompt", "Hello", "--max-new-tokens", 12, "--seed", 1)
        expected = run(*flags)[1]
        for speculate in ("lookup", model, "off"):
            code, out, err = run(*flags, "--speculate", speculate)
            assert (code, out) == (0, expected)
            assert bool(re.search(r"\(\d+ of \d+ drafted ones accepted\)", err)) == (speculate != "off")
        (tmp_path / "prompts").write_text("Hello\nGoodbye\n")
        file = ("generate", model, "--prompts", tmp_path / "prompts", "--max-new-tokens", 12, "--seed", 1)
        assert run(*file, "--speculate", "lookup")[1] == run(*file)[1]

    def test_a_draft_model_has_the_same_vocabulary(self, run, model, tmp_path):
        MambaLM(d_model=16, n_layer=1, vocab_size=300).save_pretrained(tmp_path)
        code, _, err = run("generate", model, "--prompt", "Hello", "--speculate", tmp_path)
        assert code == 2
        assert "a draft model must have the vocabulary of the model" in err

    def test_a_prompt_comes_from_a_file_or_stdin(self, run, model, tmp_path):
        (tmp_path / "prompt").write_bytes(b"Gr\xc3\xbc\xff")
        expected = continuation(model, b"Gr\xc3\xbc\xff", 9) + "\n"
        assert run("generate", model, "--file", tmp_path / "prompt", "--max-new-tokens", 9)[1] == expected
        assert run("generate", model, "--max-new-tokens", 9, stdin=b"Gr\xc3\xbc\xff")[1] == expected

    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    def test_one_newline_at_the_end_is_the_terminals_and_a_files_own(self, run, model, tmp_path, end):
        expected = continuation(model, b"the\ncat", 9) + "\n"
        assert run("generate", model, "--max-new-tokens", 9, stdin=b"the\ncat" + end)[1] == expected
        more = continuation(model, b"cat" + end, 9) + "\n"
        assert run("generate", model, "--max-new-tokens", 9, stdin=b"cat" + end + end)[1] == more
        (tmp_path / "prompt").write_bytes(b"cat" + end)
        assert run("generate", model, "--file", tmp_path / "prompt", "--max-new-tokens", 9)[1] == more

    def test_a_filter_or_a_seed_asks_for_draws(self, run, model):
        def text(*flags):
            return run("generate", model, "--prompt", "Hello", "--max-new-tokens", 20, *flags)[1]

        assert text("--seed", 3) == text("--seed", 3, "--temperature", 1)
        assert text("--seed", 3, "--top-k", 40) == text("--seed", 3, "--top-k", 40, "--temperature", 1)
        assert text("--seed", 3, "--top-k", 40, "--temperature", 0) == text() != text("--seed", 3)

    def test_options_reach_the_sampler(self, run, model):
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3}
        flags = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
        _, out, _ = run("generate", model, "--prompt", "Hello", "--max-new-tokens", 20, *flags)
        assert out == continuation(model, b"Hello", 20, **options) + "\n"

    def test_a_state_continues_where_it_was_saved(self, run, model, tmp_path):
        whole = continuation(model, b"Hello", 30)
        state = tmp_path / "state"
        _, first, _ = run("generate", model, "--prompt", "Hello", "--max-new-tokens", 10, "--save-state", state)
        _, second, _ = run("generate", model, "--prompt", "", "--max-new-tokens", 20, "--load-state", state)
        assert ByteTokenizer().encode(whole)[:5] == ByteTokenizer().encode(first)[:5]
        assert first[:-1] + second[:-1] == whole

    def test_interactive_turns_share_the_state(self, run, model):
        code, out, err = run("generate", model, "--interactive", "--max-new-tokens", 6, stdin=b"one\ntwo\n")
        lm = MambaLM.from_pretrained(model)
        first = lm.generate(torch.tensor([list(b"one")]), 6, return_state=True)
        second = lm.generate(torch.tensor([list(b"two")]), 6, cache=first.state)
        decode = ByteTokenizer().decode
        assert code == 0
        assert out == decode(first.rows()[0]) + "\n" + decode(second.rows()[0]) + "\n"
        assert "read 6 tokens" in err

    def test_an_empty_line_continues_the_text(self, run, model):
        code, out, _ = run("generate", model, "--interactive", "--max-new-tokens", 6, stdin=b"\none\n\n")
        (tokens,) = MambaLM.from_pretrained(model).generate(torch.tensor([list(b"one")]), 12).rows()
        decode = ByteTokenizer().decode
        assert (code, out) == (0, decode(tokens[:6]) + "\n" + decode(tokens[6:]) + "\n")

    @pytest.mark.parametrize("runs", [2, 3, 9])
    def test_an_interrupt_leaves_the_state_after_a_whole_token(self, run, model, tmp_path, interrupted, runs):
        state, flags = tmp_path / "state", ("--temperature", 1, "--seed", 3)
        before = signal.getsignal(signal.SIGINT)
        interrupted(runs)
        code, first, _ = run(
            "generate", model, "--prompt", "Hello", "--max-new-tokens", 30, "--save-state", state, *flags
        )
        assert code == 130
        assert signal.getsignal(signal.SIGINT) is before
        saved = GenerationState.load(state, MambaLM.from_pretrained(model))
        whole = MambaLM.from_pretrained(model).generate(
            torch.tensor([list(b"Hello")]), runs, temperature=1.0, seed=3, return_state=True
        )
        assert first == ByteTokenizer().decode(whole.rows()[0]) + "\n"
        assert torch.equal(saved.counts, whole.state.counts)
        assert_near(saved.logits, whole.state.logits, MODEL_FLOOR)
        assert_all_near(saved.cache.tensors(), whole.state.cache.tensors(), MODEL_FLOOR)

    def test_an_interrupted_text_is_followed_by_its_speed(self, run, model, interrupted):
        interrupted(4)
        code, _, err = run("generate", model, "--prompt", "Hello", "--max-new-tokens", 30)
        assert code == 130
        assert re.fullmatch(r"read 5 tokens \([\d.]+/s\), wrote 4 tokens \([\d.]+/s\), on \S+\n", err)

    @pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
    def test_a_terminal_is_told_how_to_continue_and_to_leave(self, model, capsys, monkeypatch):
        ours, theirs = os.openpty()
        os.write(ours, b"one\n\n\x04")
        with os.fdopen(theirs) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert main(["generate", model, "--interactive", "--max-new-tokens", "3"]) == 0
        os.close(ours)
        first, *rest = capsys.readouterr().err.splitlines()
        assert "an empty line lets the model continue" in first
        assert first.endswith("Ctrl-C ends a reply, Ctrl-D exits.")
        assert rest[-1].startswith("> > > read 3 tokens")

    def test_an_interrupted_turn_is_followed_by_the_next(self, run, model, interrupted):
        interrupted(4)
        code, out, _ = run("generate", model, "--interactive", "--max-new-tokens", 6, stdin=b"one\ntwo\n")
        lm, decode = MambaLM.from_pretrained(model), ByteTokenizer().decode
        first = lm.generate(torch.tensor([list(b"one")]), 4, return_state=True)
        second = lm.generate(torch.tensor([list(b"two")]), 6, cache=first.state)
        assert (code, out) == (0, decode(first.rows()[0]) + "\n" + decode(second.rows()[0]) + "\n")

    def test_a_second_interrupt_stops_at_once_and_saves_no_half_state(self, run, model, tmp_path, interrupted):
        interrupted(4, times=2)
        code, _, err = run("generate", model, "--prompt", "Hello", "--save-state", tmp_path / "state")
        assert (code, err) == (130, "")
        assert not (tmp_path / "state").exists()

    def test_the_state_is_saved_when_nobody_reads_the_text(self, model, tmp_path):
        arguments = ["generate", model, "--prompt", "Hello", "--save-state", str(tmp_path / "state")]
        command = shlex.join([sys.executable, "-m", "anymamba", *arguments])
        done = subprocess.run(["bash", "-c", f"{command} | true"], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert GenerationState.load(tmp_path / "state", MambaLM.from_pretrained(model)).counts.item() >= 1

    @pytest.mark.parametrize("form", ["lines", "jsonl", "stdin", "json on stdin"])
    def test_a_file_of_prompts_becomes_json_lines_in_order(self, run, model, tmp_path, form):
        prompts = ["Hello", "a longer prompt", "Hello", "x", "Grün"]
        lines = [json.dumps({"prompt": p, "id": i}) if "json" in form else p for i, p in enumerate(prompts)]
        content = "\n\n".join(lines).encode() + b"\n"
        file = tmp_path / ("prompts.jsonl" if form == "jsonl" else "prompts.txt")
        file.write_bytes(content)
        flags = ["--max-new-tokens", 9, "--seed", 3, "--batch-size", 2, "--stop", "nowhere"]
        where = "-" if "stdin" in form else file
        code, out, err = run("generate", model, "--prompts", where, *flags, stdin=content)
        entries = [json.loads(line) for line in out.splitlines()]
        assert (code, [entry["prompt"] for entry in entries]) == (0, prompts)
        assert [entry.get("id") for entry in entries] == ([*range(5)] if "json" in form else [None] * 5)
        for index in (0, 1, 3, 4):
            assert entries[index]["text"] == continuation(model, prompts[index].encode(), 9, seed=3)
        assert (entries[0]["reason"], len(entries[0]["tokens"])) == ("length", 9)
        assert entries[0]["text"] != entries[2]["text"]
        assert re.search(r"5 of 5 prompts, [\d.]+ new tokens/s, on ", err)

    def test_prompts_can_have_samples_and_log_probabilities(self, run, model, tmp_path):
        (tmp_path / "prompts").write_text("one\ntwo\n")
        flags = ["--prompts", tmp_path / "prompts", "--max-new-tokens", 4, "--samples", 3, "--logprobs", 2]
        entries = [json.loads(line) for line in run("generate", model, *flags)[1].splitlines()]
        assert [entry["prompt"] for entry in entries] == ["one"] * 3 + ["two"] * 3
        for entry in entries:
            assert [choice["token"] for choice in entry["choices"]] == entry["tokens"]
            assert all(len(alternatives) == 2 for alternatives in entry["alternatives"])

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.txt", "\n\n", "a.txt: expected one prompt per line, found none"),
            ("a.jsonl", '{]\n{"prompt": "x"}\n{"text": "x"}\n', "line 1: not readable JSON"),
            ("a.jsonl", '{]\n{"prompt": "x"}\n{"text": "x"}\n', 'line 3: expected an object with a text "prompt"'),
            ("a.jsonl", '{"prompt": ""}', 'line 1: expected an object with a text "prompt"'),
        ],
    )
    def test_all_lines_that_are_not_prompts_are_named(self, run, model, tmp_path, name, content, message):
        (tmp_path / name).write_text(content)
        code, out, err = run("generate", model, "--prompts", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err

    def test_an_interrupt_leaves_whole_lines(self, run, model, tmp_path, interrupted, monkeypatch):
        (tmp_path / "prompts").write_text("one\ntwo\nthree\n")
        interrupted(10)
        flags = ["--prompts", tmp_path / "prompts", "--max-new-tokens", 6, "--batch-size", 1]
        code, out, err = run("generate", model, *flags)
        assert code == 130
        assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one"]
        assert err.startswith("1 of 3 prompts, ")

    def test_text_stops_before_a_stop_text(self, run, model):
        whole = continuation(model, b"Hello", 40, temperature=1.0, seed=0)
        stop = whole[10:13]
        flags = ("--max-new-tokens", 40, "--temperature", 1, "--seed", 0, "--stop", "nowhere", "--stop", stop)
        _, out, _ = run("generate", model, "--prompt", "Hello", *flags)
        assert out == whole[: whole.index(stop)] + "\n"

    def test_the_command_streams_in_a_process_of_its_own(self, model):
        command = [sys.executable, "-m", "anymamba", "generate", model, "--max-new-tokens", "8"]
        done = subprocess.run(command, input=b"Hello", capture_output=True, check=True)
        assert done.stdout.decode() == continuation(model, b"Hello", 8) + "\n"

    def test_the_first_token_does_not_wait_for_a_compiler(self, model):
        """Loading a model and generating imports neither torch's compiler nor symbolic mathematics."""
        script = """
import sys
from anymamba.cli.main import main
code = main(["generate", sys.argv[1], "--prompt", "Hello", "--max-new-tokens", "3"])
assert not {"torch._dynamo", "sympy", "transformers"} & set(sys.modules)
sys.exit(code)
"""
        subprocess.run([sys.executable, "-c", script, model], capture_output=True, check=True)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--prompt", ""], "the prompt is empty: pass --prompt, --file, or a text on stdin"),
            (["--prompt", "x", "--top-p", "2"], "--top-p must be above 0 and at most 1, got 2.0"),
            (["--prompt", "x", "--temperature", "nan"], "--temperature must be between 0 and 1e+30, got nan"),
            (["--prompt", "x", "--max-new-tokens", "-1"], "--max-new-tokens must be at least 0, got -1"),
            (["--prompt", "x", "--stop", ""], "--stop must be a text, got an empty one"),
            (["--prompt", "x", "--load-state", "nowhere"], "nowhere: no such file"),
            (["--prompt", "x", "--device", "cuda:77"], "--device cuda:77: not available here"),
            (["--prompt", "x", "--device", "toaster"], "--device toaster: not available here; available are cpu"),
            (["--prompt", "x", "--device", "vulkan"], "--device vulkan: not available here; available are cpu"),
            (["--prompt", "x", "--device", "hpu"], "--device hpu: not available here; available are cpu"),
            (["--prompt", "x", "--device", "meta"], "--device meta: computes no values; available are cpu"),
            (
                ["--prompt", "x", "--repetition-penalty", "1e-40"],
                "--repetition-penalty must be between 1e-30 and 1e+30",
            ),
            (["--prompt", "x", "--tokenizer", "nowhere.json"], "nowhere.json: no such file"),
            (["--prompt", "x", "--threads", "0"], "--threads must be at least 1, got 0"),
            (["--file", "nowhere"], "nowhere: no such file"),
            (["--file", "."], ".: expected a file, got a directory"),
            (["--prompt", "x", "--save-state", "nowhere/state"], "nowhere/state: there is no such directory"),
            (["--prompts", "nowhere"], "nowhere: no such file"),
            (["--prompts", "nowhere", "--samples", "0"], "--samples must be at least 1, got 0"),
            (["--prompts", "nowhere", "--logprobs", "-1"], "--logprobs must be at least 0, got -1"),
            (["--prompt", "x", "--samples", "3"], "--samples can only be used with --prompts"),
            (["--prompt", "x", "--logprobs", "3"], "--logprobs can only be used with --prompts"),
            (["--prompts", "x", "--save-state", "y"], "--save-state belongs to one text, and cannot be used with --pr"),
        ],
    )
    def test_a_mistake_is_one_line_and_exit_code_2(self, run, model, flags, message):
        code, out, err = run("generate", model, *flags)
        assert (code, out) == (2, "")
        assert err.startswith("anymamba: ")
        assert message in err
        assert err.count("\n") == 1
        assert len(err) < 200

    @pytest.mark.parametrize("closed", ["<&-", ">&-"])
    def test_a_closed_stream_is_one_line(self, model, closed):
        command = f"{shlex.join([sys.executable, '-m', 'anymamba', 'generate', model])} {closed}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 2
        assert re.fullmatch("anymamba: std(in|out) is closed: .*\n", done.stderr)

    def test_a_state_of_another_model_or_a_cut_one_is_rejected(self, run, model, tmp_path):
        state = tmp_path / "state"
        small_lm(**MODEL, seed=1).save_pretrained(tmp_path / "other")
        run("generate", tmp_path / "other", "--prompt", "x", "--save-state", state)
        code, _, err = run("generate", model, "--prompt", "x", "--load-state", state)
        assert code == 2
        assert "belongs to another model" in err
        state.write_bytes(state.read_bytes()[:1000])
        code, _, err = run("generate", model, "--prompt", "x", "--load-state", state)
        assert code == 2
        assert "not a readable safetensors file" in err

    def test_a_model_without_a_tokenizer_says_what_to_pass(self, run):
        code, _, err = run("generate", GOLDEN / "lm_mamba2", "--prompt", "x")
        assert code == 2
        assert "no tokenizer.json next to the weights; pass one with --tokenizer" in err


class TestConvert:
    def test_there_and_back_is_the_same(self, run, tmp_path):
        source = GOLDEN / "lm_hf_mamba2"
        code, out, _ = run("convert", source, tmp_path / "official")
        assert code == 0
        assert "transformers -> official" in out
        assert run("convert", tmp_path / "official", tmp_path / "back", "--format", "transformers")[0] == 0
        assert (tmp_path / "back" / "model.safetensors").read_bytes() != b""
        a, b = MambaLM.from_pretrained(source), MambaLM.from_pretrained(tmp_path / "back")
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
        assert f"{sum(p.numel() for p in a.parameters()):,} parameters" in out  # a tied head counts once

    def test_weights_are_converted_and_tokenizers_copied(self, run, model, tmp_path):
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        code, out, _ = run("convert", model, tmp_path / "bfloat16", "--dtype", "bfloat16")
        assert code == 0
        assert "copied tokenizer.json" in out
        assert MambaLM.from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16
        assert (tmp_path / "bfloat16" / "tokenizer.json").read_text() == "{}"

    def test_transformers_knows_what_ends_a_text(self, run, tmp_path):
        transformers = pytest.importorskip("transformers")
        small_lm(**MODEL, ssm_cfg={"layer": "Mamba2", "headdim": 8}).save_pretrained(tmp_path / "model")
        bare(tmp_path / "model", "<pad>", "<|endoftext|>")
        assert run("convert", tmp_path / "model", tmp_path / "theirs", "--format", "transformers")[0] == 0
        assert transformers.AutoConfig.from_pretrained(tmp_path / "theirs").eos_token_id == 2

    def test_nothing_is_left_where_it_fails(self, run, tmp_path):
        code, _, err = run("convert", GOLDEN / "lm_mamba2_mlp_untied", tmp_path / "a", "--format", "transformers")
        assert code == 2
        assert "cannot hold this model" in err
        assert list(tmp_path.iterdir()) == []

    def test_no_directory_is_left_where_it_fails(self, run, tmp_path):
        target = tmp_path / "new" / "deep" / "model"
        assert run("convert", GOLDEN / "lm_mamba2_mlp_untied", target, "--format", "transformers")[0] == 2
        assert list(tmp_path.iterdir()) == []

    def test_a_gguf_file_is_not_written_as_a_directory(self, run, tmp_path):
        code, _, err = run("convert", GOLDEN / "lm_hf_mamba2", tmp_path / "model.gguf")
        assert (code, err.count("\n")) == (2, 1)
        assert "model.gguf: writing GGUF files is not supported; DST is a directory" in err
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_with_files_is_not_overwritten_unasked(self, run, model, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes").write_text("mine")
        code, _, err = run("convert", model, tmp_path / "full")
        assert code == 2
        assert "not empty; pass --force" in err
        assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes"]
        assert run("convert", model, tmp_path / "full", "--force")[0] == 0
        assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["config.json", "model.safetensors", "notes"]

    def test_a_model_in_another_format_is_not_left_beside_the_new_one(self, run, tmp_path):
        source = GOLDEN / "lm_mamba2"
        assert run("convert", source, tmp_path / "a")[0] == 0
        code, _, err = run("convert", source, tmp_path / "a", "--force", "--format", "codestral")
        assert code == 2
        assert "there is a model (config.json) that one in the codestral format would not replace" in err
        assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]

    def test_a_warning_is_one_line(self, run, model, tmp_path):
        command = [sys.executable, "-m", "anymamba", "convert", model, tmp_path / "out", "--format", "transformers"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr.startswith("anymamba: warning: transformers before 5.23 normalizes over all channels")
        assert done.stderr.count("\n") == 1


STACK = {"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "headdim": 8}}


class TestInfo:
    def test_the_machine(self, run):
        code, out, _ = run("info")
        assert code == 0
        assert re.search(rf"torch +{re.escape(torch.__version__)}\n", out)
        assert re.search(r"kernels/cpu +(built, using|none:) \w+", out)
        assert re.search(r"scan on cpu +(fused|serial_recalculated) for float32", out)

    def test_a_model(self, run, model):
        code, out, _ = run("info", model)
        table = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines())
        lm = MambaLM.from_pretrained(model)
        assert code == 0
        assert table["parameters"] == f"{sum(p.numel() for p in lm.parameters()):,}"
        assert table["state"].startswith(f"{lm.init_cache(1).nbytes / 1024:.1f} KiB per sequence")
        assert table["values"] == "all finite"
        assert table["model"].startswith("Mamba2, official format")

    @pytest.mark.parametrize(
        ("model", "rows"),
        [
            (
                lambda: LatentModel(
                    input_size=3,
                    output_size=2,
                    class_tokens=["start"],
                    stack={**STACK, "n_virtual": 3, "class_tokens": [0]},
                ),
                {
                    "model": "LatentModel, Mamba2, in ",
                    "shape": "2 layers of width 16; 3 passes, cyclic; 1 class token",
                    "input": "3 numbers per step",
                    "class tokens": "1 before the input",
                    "output": "2 numbers for each step",
                    "state": "",
                },
            ),
            (
                lambda: SequenceClassifier(vocab_size=9, output_size=2, labels=["ja", "né"], stack=STACK),
                {"input": "tokens below 9", "output": "one of 2 classes for each sequence, from the mean of its"},
            ),
            (
                lambda: SequenceRegressor(input_size=3, pooling="class_token", bidirectional=True, stack=STACK),
                {"shape": "2 layers of width 16; in both directions, merge mean", "output": "1 number for each"},
            ),
            (
                lambda: MaskedLM(vocab_size=9, bidirectional=True, stack={**STACK, "merge": "linear"}),
                {"output": "the token at each position", "values": "all finite"},
            ),
        ],
    )
    def test_a_model_around_a_stack(self, model, rows, run, tmp_path):
        saved = model()
        saved.save_pretrained(tmp_path)
        code, out, _ = run("info", tmp_path)
        table = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines())
        assert code == 0
        assert table["parameters"] == f"{sum(p.numel() for p in saved.parameters()):,}"
        for name, value in rows.items():
            assert table[name].startswith(value)
        code, _, err = run("info", tmp_path, "--weights", "int8")
        assert (code, err.count("\n")) == (2, 1)
        assert f"--weights: for language models only, got a {type(saved).__name__}" in err

    def test_a_language_model_of_several_families(self, run, tmp_path):
        stack = {"layer_cfgs": [{"layer": "Mamba1"}, {"layer": "Mamba3", "headdim": 8}], "streams": 2, "gate_bias": 0.0}
        MambaLM(d_model=16, n_layer=2, vocab_size=9, stack=stack).save_pretrained(tmp_path)
        table = dict(re.split("  +", line, maxsplit=1) for line in run("info", tmp_path)[1].splitlines())
        assert table["model"].startswith("Mamba1+Mamba3, anymamba format")
        assert table["shape"] == "2 layers of width 16; 2 gated streams"
        assert table["layer 1"].startswith("Mamba3, d_state 128")

    def test_weights_that_are_not_finite_are_reported_wherever_a_model_is_opened(self, run, model, tmp_path):
        tensors = load_file(tmp_path / "model" / "model.safetensors")
        tensors["backbone.norm_f.weight"][0] = float("nan")
        save_file(tensors, tmp_path / "model" / "model.safetensors")
        warning = "1 tensor holds values that are not finite, first backbone.norm_f.weight (1 of 32)"
        code, out, _ = run("info", model)
        assert code == 0
        assert re.search(rf"values +{re.escape(warning)}\n", out)
        for command in (["generate", model, "--prompt", "x"], ["convert", model, tmp_path / "out"]):
            whole = [sys.executable, "-m", "anymamba", *command]
            done = subprocess.run(whole, capture_output=True, text=True, check=False)
            assert done.stderr.splitlines()[0] == f"anymamba: warning: {model}: {warning}"

    def test_a_config_that_asks_for_ten_thousand_layers_is_rejected_at_once(self, run, model, tmp_path):
        config = read_json(tmp_path / "model" / "config.json")
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "n_layer": 10_000}))
        began = perf_counter()
        code, _, err = run("info", model)
        assert perf_counter() - began < 2
        assert code == 2
        assert re.fullmatch(r"anymamba: .*the weights do not fit the config: it asks for 10000 layers, .*\n", err)

    def test_a_larger_dtype_weighs_more(self, run, model):
        weigh = [
            re.search(r"weights +([\d.]+) KiB", run("info", model, *flags)[1]) for flags in ([], ["--dtype", "float64"])
        ]
        assert float(weigh[1][1]) > 1.9 * float(weigh[0][1])


class TestEval:
    def test_bits_and_perplexity_are_those_of_one_forward(self, run, model, tmp_path):
        text = ("The quick brown fox.\n" * 150).encode()
        (tmp_path / "text").write_bytes(text)
        code, out, err = run("eval", model, tmp_path / "text")
        ids = torch.tensor([list(text)])
        nats = MambaLM.from_pretrained(model)(ids, labels=ids).loss.item()
        assert code == 0
        assert float(re.search(r"bits per byte +([\d.]+)", out)[1]) == pytest.approx(
            nats / 0.6931471805599453, rel=1e-4
        )
        assert float(re.search(r"perplexity +([\d.]+)", out)[1]) == pytest.approx(2.718281828459045**nats, rel=1e-4)
        assert "tokens/s" in err

    @pytest.mark.parametrize("content", ["é12", "aé12", "\ufffd12", "日本"])
    def test_a_first_token_that_is_part_of_a_character_counts_as_its_own_byte(self, run, model, tmp_path, content):
        text = content.encode()
        (tmp_path / "text").write_bytes(text)
        ids = torch.tensor([list(text)])
        nats = MambaLM.from_pretrained(model)(ids, labels=ids).loss.item()
        _, out, _ = run("eval", model, tmp_path / "text")
        assert float(re.search(r"bits per byte +([\d.]+)", out)[1]) == pytest.approx(nats / math.log(2), rel=1e-4)

    @pytest.mark.parametrize("content", [b"", b"x"])
    def test_a_text_that_is_too_short_is_rejected(self, run, model, tmp_path, content):
        (tmp_path / "text").write_bytes(content)
        code, _, err = run("eval", model, tmp_path / "text")
        assert code == 2
        assert f"expected a text of at least two tokens, got {len(content)}" in err

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("nowhere", "nowhere: no such file or directory"),
            ("{empty}", "{empty}: no text files there"),
            ("/dev/null", "/dev/null: expected a text of at least two tokens, got 0"),
            ("-", "stdin: expected a text of at least two tokens, got 0"),
        ],
    )
    def test_files_that_are_not_text_are_named(self, run, model, tmp_path, file, message):
        (tmp_path / "empty").mkdir()
        code, out, err = run("eval", model, file.format(empty=tmp_path / "empty"))
        assert (code, out, err) == (2, "", f"anymamba: {message.format(empty=tmp_path / 'empty')}\n")

    def test_files_and_directories_are_scored_one_by_one_and_together(self, run, model, tmp_path):
        texts = {"folder/a.txt": "one text " * 20, "folder/deep/b.txt": "another text " * 30, "c.txt": "third " * 9}
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "folder" / "short.txt").write_text("x")
        code, out, err = run("eval", model, tmp_path / "folder", tmp_path / "c.txt")
        header, *lines = out.splitlines()
        assert (code, header.split()) == (0, ["tokens", "bits", "per", "byte", "perplexity"])
        assert lines[2].split() == ["1", "too", "short", str(tmp_path / "folder" / "short.txt")]
        rows = {line.split()[3]: line.split()[:3] for line in lines if "short" not in line}
        nats = counted = 0
        for name, text in texts.items():
            alone = run("eval", model, tmp_path / name)[1]
            tokens, bits, perplexity = rows[str(tmp_path / name)]
            assert f"tokens          {tokens} " in alone
            assert f"bits per byte   {bits}\n" in alone
            assert f"perplexity      {perplexity} per token" in alone
            ids = torch.tensor([list(text.encode())])
            nats += MambaLM.from_pretrained(model)(ids, labels=ids).loss.item() * (len(text) - 1)
            counted += len(text) - 1
        assert lines[-1].endswith("all 4 texts")
        assert float(rows["all"][1]) == pytest.approx(nats / math.log(2) / counted, rel=1e-4)
        assert int(rows["all"][0]) == sum(map(len, texts.values())) + 1
        assert "tokens/s" in err

    def test_all_files_of_a_directory_that_are_not_text_are_named(self, run, model, tmp_path):
        (tmp_path / "folder").mkdir()
        for name in ("a.gz", "b.zip", "c.txt"):
            (tmp_path / "folder" / name).write_text("some text")
        code, out, err = run("eval", model, tmp_path / "folder")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.count("compressed or binary, not text; unpack it") == 2
        assert "data.format" not in err  # a field of training
        assert "a.gz: " in err
        assert "b.zip: " in err

    def test_stdin_and_pipes_are_scored_as_files_are(self, run, model, tmp_path):
        text = "Grün und grün.\n".encode() * 30
        (tmp_path / "text").write_bytes(text)
        _, expected, _ = run("eval", model, tmp_path / "text")
        assert run("eval", model, "-", stdin=text)[1] == expected
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,))
        writer.start()
        assert run("eval", model, tmp_path / "pipe")[1] == expected
        writer.join()


class TestAll:
    @pytest.mark.parametrize("command", ["generate", "info", "convert", "eval"])
    def test_damage_is_one_line_and_exit_code_2(self, run, tmp_path, command):
        shutil.copytree(GOLDEN / "lm_mamba2", tmp_path / "model")
        save_file({"a": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
        rest = {"generate": ["--prompt", "x"], "info": [], "convert": [tmp_path / "out"], "eval": [tmp_path / "text"]}
        (tmp_path / "text").write_text("some text")
        code, out, err = run(command, tmp_path / "model", *rest[command])
        assert (code, out) == (2, "")
        assert "the weights do not fit the config" in err
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            MemoryError("std::bad_alloc"),
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            RuntimeError("unable to mmap 344320040 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB"),
        ],
        ids=str,
    )
    def test_too_little_memory_is_one_line_and_exit_code_2(self, run, monkeypatch, error):
        def fails(_):
            raise error

        def fails_within(_):
            try:
                raise error
            except Exception as cause:
                raise RuntimeError("the model could not be read") from cause

        for function in (fails, fails_within):
            monkeypatch.setattr(info, "run_info", function)
            code, out, err = run("info")
            assert (code, out) == (2, "")
            assert err.startswith("anymamba: out of memory: ")
            assert err.count("\n") == 1

    def test_torch_says_itself_that_memory_is_out(self, run, monkeypatch):
        monkeypatch.setattr(info, "run_info", lambda _: torch.empty(2**50))
        assert run("info")[2].startswith("anymamba: out of memory: ")

    def test_another_error_is_not_hidden(self, run, monkeypatch):
        def fails(_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(info, "run_info", fails)
        with pytest.raises(RuntimeError, match="a bug"):
            run("info")

    @pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
    @pytest.mark.parametrize("limit", [300, 1500, 2100])
    def test_a_memory_limit_that_is_too_low_is_one_line_wherever_it_is_reached(self, tmp_path, limit):
        """300 MB: in torch's import; then in mapping or reading 600 MB of weights, which are a hole in a file."""
        config = MambaLMConfig(d_model=64, n_layer=1, vocab_size=2_300_000, ssm_cfg={"layer": "Mamba2"})
        entries, size = {}, 0
        for name, x in empty_model(config).state_dict().items():
            if name != "lm_head.weight":
                entries[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [size, size + 4 * x.numel()]}
                size += 4 * x.numel()
        header = json.dumps(entries).encode()
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        command = shlex.join([sys.executable, "-m", "anymamba", "generate", str(tmp_path), "--tokenizer", "bytes"])
        command = f"ulimit -v {limit}000; {command} --prompt x"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("anymamba: out of memory: ")
