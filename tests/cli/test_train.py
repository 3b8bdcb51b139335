import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from anymamba import MambaLM
from anymamba.core.io import save_tensors
from anymamba.models.loss import chunked_cross_entropy
from tests.training.cases import LENGTHS, draw_nothing, write_corpus

CONFIG = """
threads = 1
[model]
n_layer = 2
d_model = 16
d_state = 8
headdim = 8
[data]
sources = ["{corpus}"]
held_out = 0.1
[batch]
tokens = 64
length = 32
[schedule]
steps = 40
warmup = 2
[evaluation]
every = 20
sample_tokens = 4
"""


@pytest.fixture
def config(tmp_path):
    """Write a config file that trains on a small corpus."""
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(corpus=write_corpus(tmp_path / "corpus").as_posix()))
    return file


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    """Skip syncs and plots: no test here needs to survive a power cut, or looks at a plot."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    draw_nothing(monkeypatch.setattr)


def weights(directory):
    return (directory / "model.safetensors").read_bytes()


def test_train_interrupt_resume_generate_eval(run, config, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    code, out, err = run("train", config, "--out", whole)
    assert code == 0
    assert "held-out text:" in out
    assert f"anymamba generate {whole}" in out
    assert "step 40/40  loss" in err
    assert "\r" not in err

    command = [sys.executable, "-m", "anymamba", "train", str(config), "--out", str(part)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not (part / "metrics.csv").is_file() or (part / "metrics.csv").read_text().count("\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"continue with: anymamba train --resume {part}" in out
    assert 3 <= (part / "metrics.csv").read_text().count("\n") - 1 < 40
    MambaLM.from_pretrained(part)

    assert run("train", config, "--out", part)[0] == 2
    code, out, err = run("train", "--resume", part)
    assert code == 0
    assert "resuming after step" in err
    assert weights(part) == weights(whole)
    assert "resuming after step 40; the run is finished" in run("train", "--resume", part)[2]

    code, out, _ = run("generate", part, "--prompt", "alpha", "--max-new-tokens", 5)
    assert (code, len(out) > 1) == (0, True)
    code, out, _ = run("eval", part, tmp_path / "corpus" / "document0.txt")
    assert code == 0
    assert f"tokens          {LENGTHS[0]}" in out


def test_a_tokenizer_file_goes_with_the_model(run, config, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(path) for path in (tmp_path / "corpus").iterdir()], trainer)
    tokenizer.save(str(tmp_path / "my.json"))
    flags = ["--data.tokenizer", tmp_path / "my.json", "--batch.length", 8, "--schedule.steps", 3]
    assert run("train", config, "--out", tmp_path / "run", *flags)[0] == 0
    (tmp_path / "my.json").unlink()
    assert run("train", "--resume", tmp_path / "run")[0] == 0
    assert run("generate", tmp_path / "run", "--prompt", "alpha")[0] == 0
    code, out, _ = run("eval", tmp_path / "run", tmp_path / "corpus" / "document0.txt")
    assert code == 0
    assert "(1.00 bytes each)" not in out


def test_a_model_is_trained_further(run, config, tmp_path):
    assert run("train", config, "--out", tmp_path / "first", "--schedule.steps", 3)[0] == 0
    flags = ["--schedule.steps", 3, "--data.sources", tmp_path / "corpus", "--batch.tokens", 64, "--batch.length", 32]
    flags += ["--model.init", tmp_path / "first", "--evaluation.sample_tokens", 4]
    code, _, err = run("train", "--out", tmp_path / "second", *flags)
    assert code == 0
    assert f"starting from the weights of {tmp_path / 'first'}" in err
    assert weights(tmp_path / "first") != weights(tmp_path / "second")
    assert run("generate", tmp_path / "second", "--prompt", "alpha")[0] == 0
    code, _, err = run("train", "--out", tmp_path / "third", *flags, "--model.depth", 3)
    assert (code, "n_layer (expected 3, got 2)" in err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "toaster"], "device = toaster: not available here"),
        (["--model.headdim", "48"], "headdim must divide"),
        (["--model.block", "{nonsense = 1}"], "entries that Mamba3 does not know: ['nonsense']"),
        (["--seed", str(2**63)], "seed must be at least 0 and below 2^63, got 9223372036854775808"),
        (["--data.tokenizer", "nowhere.json"], "nowhere.json: no such file"),
        (["--data.tokenizer", "bpe:many"], "expected a number of tokens, 257 or more, got 'many'"),
        (["--data.tokenizer", "bpe:256"], "expected a number of tokens, 257 or more, got '256'"),
        (["--data.tokenizer", "bpe:300", "--model.init", "x"], "model.init comes with the tokenizer that its weights"),
        (["--model.init", "./nowhere"], "./nowhere: no such directory"),
    ],
)
def test_a_config_that_cannot_work_is_rejected_before_text_is_read(run, config, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr("anymamba.training.tasks.language_model.find_text", None)
    code, _, err = run("train", config, "--out", tmp_path / "run", *flags)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


def test_an_interrupt_before_the_first_step_says_that_nothing_is_saved(run, config, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("anymamba.training.tasks.language_model.prepare", interrupt)
    code, out, err = run("train", config, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert err.startswith("stopped before the first step: there is nothing to save")
    monkeypatch.undo()
    assert run("train", config, "--out", tmp_path / "run", "--schedule.steps", 2)[0] == 0


def test_text_from_stdin_is_needed_once(run, tmp_path):
    flags = ["--data.sources", "-", "--model.d_model", 16, "--model.n_layer", 1, "--batch.tokens", 64]
    flags += ["--batch.length", 16, "--schedule.steps", 2, "--evaluation.sample_tokens", 0, "--out", tmp_path / "run"]
    assert run("train", *flags, stdin=b"to and fro " * 200)[0] == 0
    assert run("train", "--resume", tmp_path / "run")[0] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer.lr", "fast"], "--optimizer.lr must be a number (float), got 'fast'"),
        (["--batch.tokens", "65"], "batch.tokens must be a multiple of length"),
        (["--model.headdim", "7"], "headdim must divide"),
        (["--model.block", "{nonsense = 1}"], "entries that Mamba3 does not know: ['nonsense']"),
        (["--data.sources", "nowhere"], "nowhere: no such file, directory or pattern"),
        (["--data.sources", "no*where"], "no*where: no text files there"),
        (["--data.tokenizer", "nowhere.json"], "nowhere.json: no such file"),
        (["--data.tokenizer", "{config}"], "not a readable tokenizer"),
        (["--device", "toaster"], "device = toaster: not available here"),
        (["--batch.length", "100000", "--batch.tokens", "100000"], "too little text to train on"),
        (["--resume", "nowhere"], "nowhere: no such directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, config, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    flags = [flag.format(config=config) if "{config}" in flag else flag for flag in flags]
    code, out, err = run("train", *([] if "--resume" in flags else [config]), *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("anymamba: ")
    assert not (tmp_path / "runs" / "train" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.txt", "too little text"),
        (b"x", "a.txt", "too little text"),
        (b"{]\n", "a.jsonl", "a.jsonl:1: not readable JSON"),
        (b'{"body": "x"}\n', "a.jsonl", 'expected an object with a text "text"'),
        (b'{"text": "x"}\n', "a.jsonl", "too little text"),
        (b"", "a.jsonl", "no text files there"),
    ],
)
def test_text_that_cannot_be_used_is_rejected(run, config, tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    code, out, err = run("train", config, "--data.sources", tmp_path / name, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert message in err


def test_an_unreadable_file_and_an_empty_directory_are_rejected(run, config, tmp_path):
    (tmp_path / "empty").mkdir()
    flags = ["--data.sources", tmp_path / "empty", "--out", tmp_path / "run"]
    assert "no text files there" in run("train", config, *flags)[2]
    (tmp_path / "bad").mkdir()
    for name in ("a", "b"):
        (tmp_path / "bad" / name).write_bytes(b"\xff\xfd" * 50)
    (tmp_path / "t.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "u": 1}, "unk_token": "u"}})
    )
    flags = ["--data.sources", tmp_path / "bad", "--data.tokenizer", tmp_path / "t.json", "--out", tmp_path / "run"]
    code, _, err = run("train", config, *flags)
    assert code == 2
    assert "not UTF-8 text" in err


def test_all_bad_files_are_listed_and_can_be_excluded_or_skipped(run, config, tmp_path):
    corpus, flags = tmp_path / "corpus", ["--schedule.steps", 1, "--evaluation.sample_tokens", 0]
    (corpus / "a.gz").write_bytes(b"x")
    (corpus / "b.jsonl").write_bytes(b"{]\n")
    code, out, err = run("train", config, "--out", tmp_path / "run", *flags)
    assert (code, out) == (2, "")
    first, second, last = err.splitlines()
    assert first.startswith(f"anymamba: {corpus / 'a.gz'}: compressed or binary")
    assert second.startswith(f"anymamba: {corpus / 'b.jsonl'}:1: not readable JSON")
    assert last.startswith("anymamba: 2 in all: fix them, leave them out with --data.exclude PATTERN, or skip")
    code, _, err = run("train", config, "--out", tmp_path / "skip", *flags, "--data.on_error", "skip")
    assert (code, err.count("skipped: ")) == (0, 2)
    assert run("train", config, "--out", tmp_path / "run", *flags, "--data.exclude", "*.gz", "b.*")[0] == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "skip")


def test_a_changed_config_is_rejected_by_name(run, config, tmp_path):
    run("train", config, "--out", tmp_path / "run", "--schedule.steps", 2)
    code, _, err = run("train", "--resume", tmp_path / "run", "--seed", 1)
    assert code == 2
    assert "changed: seed (was 0, got 1)" in err
    assert f"anymamba train --model.init {tmp_path / 'run'} --out DIR" in err
    assert run("train", config, "--resume", tmp_path / "run")[0] == 2
    assert run("train", "--resume", tmp_path / "run", "--out", "x")[0] == 2


def test_a_run_that_was_killed_before_its_first_checkpoint_says_how_to_start_it_again(
    run, config, tmp_path, monkeypatch
):
    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("anymamba.training.trainer.Trainer.save", killed)
        assert run("train", config, "--out", tmp_path / "run")[0] == 130
    code, out, err = run("train", "--resume", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"the run was stopped before its first one, or this is not a run; start it again with --out {tmp_path}" in err
    )
    assert run("train", config, "--out", tmp_path / "run", "--schedule.steps", 1)[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="gloo on loopback")
def test_a_mesh_that_does_not_fit_is_one_line_and_exit_code_2_on_every_rank(config, tmp_path):
    """Of the processes that torchrun would start; the first one speaks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "anymamba", "train", config, "--out", tmp_path / "run", "--parallel.shard", "3"]
    world = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment, "RANK": rank})
        for rank in "01"
    ]
    errors = [rank.communicate()[1] for rank in world]
    assert [rank.returncode for rank in world] == [2, 2]
    assert "replicate · shard · context = (what is left) · 3 · 1 must be the number of ranks, got 2" in errors[0]
    assert [text.count("\n") for text in errors] == [1, 0]
    assert not (tmp_path / "run").exists()


def test_overflow_is_exit_code_1_and_the_state_is_kept(run, config, tmp_path, monkeypatch):
    calls = []

    def overflow(*args, **kwargs):
        calls.append(1)
        return chunked_cross_entropy(*args, **kwargs) * (float("inf") if len(calls) > 3 else 1)

    monkeypatch.setattr("anymamba.models.lm.chunked_cross_entropy", overflow)
    code, _, err = run("train", config, "--out", tmp_path / "run")
    assert code == 1
    assert "step 4: the loss is inf" in err
    monkeypatch.undo()
    assert run("train", "--resume", tmp_path / "run")[0] == 0


def test_a_full_disk_is_a_message_and_the_run_continues_from_before(run, config, tmp_path, monkeypatch):
    saved = []

    def full(path, tensors, metadata):
        saved.append(path)
        if len(saved) == 7:  # text, then model and optimizer after steps 0, 5 and 10
            raise OSError(28, "No space left on device")
        save_tensors(path, tensors, metadata)

    monkeypatch.setattr("anymamba.core.io.save_tensors", full)
    code, _, err = run("train", config, "--out", tmp_path / "run", "--checkpoints.every", 5)
    assert code == 2
    assert "step-00000010: cannot be written; earlier ones are kept" in err
    assert "No space left on device" in err
    monkeypatch.undo()
    code, _, err = run("train", "--resume", tmp_path / "run")
    assert code == 0
    assert "resuming after step 5" in err


def test_help_names_every_field(run):
    code, out, _ = run("train", "--help")
    assert code == 0
    for name in ("--optimizer.lr", "--model.depth", "--seed", "--data.sources", "--resume"):
        assert name in out
    out = " ".join(out.split())
    assert "--model.family VALUE family of the blocks: Mamba1, Mamba2, Mamba3 or a registered one" in out
    for values in ("packed,stream", "cosine,wsd,constant", "adamw,muon", "float32,bfloat16,float64"):
        assert f"{{{values}}}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimiser.lr", "1"], "--optimiser.lr: no such option; did you mean --optimizer.lr"),
        (["--optimiser.lr=1"], "--optimiser.lr: no such option; did you mean --optimizer.lr"),
        (["--lr", "1"], "--optimizer.lr"),
        (["a.toml", "b.toml"], "b.toml: unexpected argument"),
    ],
)
def test_an_option_that_does_not_exist_is_rejected_with_those_that_are_near(run, flags, message):
    code, out, err = run("train", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (b"Call me Ishmael. Some years ago - never mind" * 40, "Call me Ishmael. Some years ago"),
        (b"\n\t\xff\x00to\n\nand fro" * 100, "to and fro to and fro to and fro"),
        (b"\xff\x00" * 1000, " "),
        (b"x" * 1000, "x" * 32),
    ],
)
def test_samples_begin_as_the_text_does(run, config, tmp_path, text, prompt):
    (tmp_path / "one.txt").write_bytes(text)
    half = ["--data.sources", tmp_path / "one.txt", "--data.format", "text", "--data.held_out", 0.5]
    half += ["--schedule.steps", 1]
    code, out, _ = run("train", config, "--out", tmp_path / "run", *half)
    assert code == 0
    assert f"--prompt {shlex.quote(prompt)} " in out
    assert (tmp_path / "run" / "samples" / "step-00000001.txt").read_text().startswith(prompt)
    out = run("train", config, "--out", tmp_path / "other", *half, "--evaluation.prompt", "x y")[1]
    assert "--prompt 'x y' " in out
