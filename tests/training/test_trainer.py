import json
import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from anymamba import MambaLM
from anymamba.generation.tokenizers import ByteTokenizer, load_tokenizer
from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.metrics.loggers import read_metrics
from tests.support import assert_near
from tests.training.cases import silent, tiny, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def gradients(corpus, directory, **sections):
    """Return the gradients of the first step, before clipping."""
    config = tiny(corpus, optimizer={"clip": 0.0}, **sections)
    trainer = create_run(config, directory, silent)
    loss, _, _ = trainer._differentiate(trainer.task.batches(0))
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def losses(trainer):
    return [row.loss for row in read_metrics(trainer.directory / "metrics.csv")]


@pytest.mark.usefixtures("plots")
def test_a_run_learns_and_leaves_what_it_promises(corpus, tmp_path):
    config = tiny(corpus, schedule={"steps": 30}, evaluation={"every": 10, "sample_tokens": 8, "prompt": "alp"})
    trainer = create_run(config, tmp_path / "run", silent)
    assert trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row.step for row in rows] == list(range(1, 31))
    assert rows[-1].tokens == 30 * 128
    assert rows[-1].loss < 0.85 * rows[0].loss
    assert [row.step for row in rows if row.evaluation] == [10, 20, 30]
    samples = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert samples == [f"step-000000{n}.txt" for n in (10, 20, 30)]
    assert (tmp_path / "run" / "samples" / samples[0]).read_text(errors="replace").startswith("alp")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    loaded = MambaLM.from_pretrained(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True))


class TestTokenizers:
    @pytest.fixture
    def tokenizer(self, corpus, tmp_path):
        """Write a tokenizer.json, and a file in the same directory that names the token at the end of a text."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        learn = trainers.BpeTrainer(
            vocab_size=280, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
        )
        bpe.train([str(path) for path in corpus.iterdir()], learn)
        file = tmp_path / "tokenizer" / "mine.json"
        file.parent.mkdir()
        bpe.save(str(file))
        (file.parent / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        return file

    def test_checkpoints_have_the_tokenizer(self, corpus, tmp_path, tokenizer):
        trainer = create_run(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "run", silent)
        assert trainer.run()
        for directory in (tmp_path / "run", *list_checkpoints(tmp_path / "run" / "checkpoints")):
            loaded = load_tokenizer(None, directory, trainer.model.config.vocab_size)
            assert loaded.end == [0]
            assert (directory / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

    def test_an_end_token_without_other_files_is_learned_and_exported(self, corpus, tmp_path, tokenizer):
        (tokenizer.parent / "tokenizer_config.json").unlink()
        tokenizer.write_text(tokenizer.read_text().replace("<end>", "<|endoftext|>"))
        told = []
        trainer = create_run(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "run", told.append)
        tokens = trainer.task.corpus.train
        assert int((tokens.read(0, tokens.total) == 0).sum()) == len(tokens.lengths)
        assert not any("ends a document" in line for line in told)
        assert trainer.run()
        for directory in (tmp_path / "run", *list_checkpoints(tmp_path / "run" / "checkpoints")):
            assert json.loads((directory / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
            assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 0

    def test_an_unknown_end_token_is_reported_and_can_be_named(self, corpus, tmp_path, tokenizer):
        (tokenizer.parent / "tokenizer_config.json").unlink()
        told = []
        trainer = create_run(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "without", told.append)
        (line,) = [line for line in told if "ends a document" in line]
        assert line.endswith("name it with --data.end_token TOKEN")
        tokens = trainer.task.corpus.train
        assert not bool((tokens.read(0, tokens.total) == 0).any())
        named = {"tokenizer": str(tokenizer), "end_token": "<end>"}
        tokens = create_run(tiny(corpus, data=named), tmp_path / "with", silent).task.corpus.train
        assert int((tokens.read(0, tokens.total) == 0).sum()) == len(tokens.lengths)
        assert load_tokenizer(None, tmp_path / "with", 280).end == [0]
        for tokenizer_name, token, message in (
            (str(tokenizer), "<nowhere>", "expected a token '<nowhere>'"),
            ("bytes", "<end>", "bytes have no token that ends a document"),
        ):
            with pytest.raises(ValueError, match=message):
                create_run(
                    tiny(corpus, data={"tokenizer": tokenizer_name, "end_token": token}), tmp_path / "bad", silent
                )

    def test_one_is_made_of_the_training_text(self, corpus, tmp_path):
        config = tiny(corpus, data={"tokenizer": "bpe:280"}, batch={"length": 16})
        trainer = create_run(config, tmp_path / "run", silent)
        tokens = trainer.task.corpus.train
        assert trainer.model.config.vocab_size == 280
        assert int((tokens.read(0, tokens.total) == 0).sum()) == len(tokens.lengths)  # an end to each document
        assert tokens.total < 0.7 * int(tokens.sizes.sum())
        tokenizer = load_tokenizer(None, tmp_path / "run", 280)
        text = "alpha  beta\n\tgamma ä\U0001f600"
        assert (tokenizer.decode(tokenizer.encode(text)), tokenizer.end) == (text, [0])
        assert trainer.run()
        again = create_run(config, tmp_path / "again", silent)
        assert again.task.corpus.checksum == trainer.task.corpus.checksum
        assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / "run/tokenizer.json").read_bytes()
        assert open_run(tmp_path / "run", {}, silent).run()

    def test_a_failed_attempt_leaves_none_to_a_run_on_bytes(self, corpus, tmp_path, tokenizer):
        short = tiny(corpus, data={"tokenizer": str(tokenizer)}, batch={"tokens": 10**6, "length": 10**6})
        with pytest.raises(ValueError, match="too little text to train on"):
            create_run(short, tmp_path / "run", silent)
        assert create_run(tiny(corpus), tmp_path / "run", silent).run()
        assert isinstance(load_tokenizer(None, tmp_path / "run", 256), ByteTokenizer)
        assert not list((tmp_path / "run").glob("*tokenizer*"))

    def test_a_failed_attempt_leaves_no_end_to_another_tokenizer(self, corpus, tmp_path, tokenizer):
        short = tiny(corpus, data={"tokenizer": str(tokenizer)}, batch={"tokens": 10**6, "length": 10**6})
        with pytest.raises(ValueError, match="too little text to train on"):
            create_run(short, tmp_path / "run", silent)
        (tokenizer.parent / "tokenizer_config.json").unlink()
        create_run(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "run", silent)
        assert load_tokenizer(None, tmp_path / "run", 280).end == []


def test_held_out_bits_count_every_byte(corpus, tmp_path):
    trainer = create_run(tiny(corpus, precision={"dtype": "float64"}), tmp_path / "run", silent)
    held_out, nats = trainer.task.corpus.held_out, 0.0
    offset = 0
    for length in held_out.lengths.tolist():
        ids = held_out.read(offset, offset + length).unsqueeze(0)
        offset += length
        nats += math.log(256) + trainer.model(ids, labels=ids).loss.item() * (length - 1)
    trainer.task.evaluate(trainer.model, 0, torch.float64)
    held_out_result = trainer.task.held_out
    assert held_out_result.bits_per_byte == pytest.approx(nats / math.log(2) / held_out.total, rel=1e-12)
    corpus = trainer.task.corpus
    assert held_out_result.baselines == {
        "byte 5-gram": corpus.ngram_bits / held_out.total,
        "xz -9": 8 * corpus.xz_bytes / held_out.total,
    }


@pytest.mark.parametrize("mode", ["packed", "stream"])
def test_accumulation_equals_one_large_batch(corpus, tmp_path, mode):
    sections = {"data": {"mode": mode}, "precision": {"dtype": "float64"}}
    whole, expected = gradients(corpus, tmp_path / "whole", **sections)
    parts, actual = gradients(corpus, tmp_path / "parts", batch={"accumulation": 4}, **sections)
    assert parts == pytest.approx(whole, rel=1e-13)
    for name in expected:
        assert_near(actual[name], expected[name], 1e-10, name)


@pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
@pytest.mark.parametrize("mode", ["packed", "stream"])
def test_activation_checkpointing_changes_no_bit(corpus, tmp_path, mode, family):
    sections = {"data": {"mode": mode}, "model": {"family": family, "d_intermediate": 32}, "schedule": {"steps": 3}}
    runs = []
    for recompute in (False, True):
        config = tiny(corpus, precision={"activation_checkpointing": recompute}, **sections)
        trainer = create_run(config, tmp_path / str(recompute), silent)
        trainer.run()
        runs.append(trainer)
    assert losses(runs[0]) == losses(runs[1])
    for (name, a), b in zip(runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a.grad, b.grad), name


def test_compiling_without_a_compiler_is_rejected(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler: no-such-compiler was not found"):
        create_run(tiny(corpus, precision={"compile": True}), tmp_path / "run", silent)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_bfloat16_keeps_weights_and_follows_float32(corpus, tmp_path):
    runs = []
    for dtype in ("float32", "bfloat16"):
        config = tiny(corpus, precision={"dtype": dtype}, data={"mode": "stream"}, schedule={"steps": 8})
        trainer = create_run(config, tmp_path / dtype, silent)
        trainer.run()
        assert trainer.model.dtype == torch.float32
        runs.append(losses(trainer))
    assert runs[0] != runs[1]
    assert runs[1] == pytest.approx(runs[0], rel=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["packed", "stream"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_is_bit_equal(corpus, tmp_path, mode, dtype, kind):
    sections = {"precision": {"dtype": dtype}, "optimizer": {"kind": kind}}
    config = tiny(corpus, data={"mode": mode}, batch={"accumulation": 2}, **sections)
    whole = create_run(config, tmp_path / "whole", silent)
    assert whole.run()
    part = create_run(config, tmp_path / "part", silent)
    part.save()
    for _ in range(3):
        part._take_step()
    part.save()
    again = open_run(tmp_path / "part", {}, silent)
    assert again.step == 3
    assert again.run()
    assert losses(again) == losses(whole)[3:]
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    states = whole.optimizer.tensors(), again.optimizer.tensors()
    assert states[0].keys() == states[1].keys()
    assert any(key.endswith("in_proj.weight[B].momentum") for key in states[0]) == (kind == "muon")
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_by_a_signal_ends_as_if_it_had_not_been_stopped(corpus, tmp_path, number, monkeypatch):
    """Every file of its last checkpoint, torch's generator included: an additional save draws nothing."""
    config = tiny(corpus, data={"mode": "stream"}, evaluation={"sample_tokens": 4})
    assert create_run(config, tmp_path / "whole", silent).run()
    stopped = create_run(config, tmp_path / "part", silent)
    batches = stopped.task.batches
    monkeypatch.setattr(
        stopped.task, "batches", lambda step: (signal.raise_signal(number) if step == 2 else None, batches(step))[1]
    )
    assert not stopped.run()
    assert stopped.step == 3
    assert open_run(tmp_path / "part", {}, silent).run()
    whole, part = (list_checkpoints(tmp_path / name / "checkpoints")[0] for name in ("whole", "part"))
    for file in whole.iterdir():
        assert (part / file.name).read_bytes() == file.read_bytes(), file.name
    rng = load_file(whole / "optimizer.safetensors")["rng"]
    torch.manual_seed(config.seed)
    create_run(config, tmp_path / "fresh", silent)
    assert torch.equal(rng, torch.get_rng_state())  # a run draws its fresh weights and nothing else


class TestNonFinite:
    def broken(self, corpus, directory):
        trainer = create_run(tiny(corpus), directory, silent)
        trainer.save()
        for _ in range(3):
            trainer._take_step()
        return trainer

    def stop(self, trainer):
        before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        with pytest.raises(FloatingPointError) as error:
            trainer.run()
        after = trainer.model.state_dict()
        assert all(torch.equal(after[name], x) or not torch.isfinite(x).all() for name, x in before.items())
        assert trainer.step == 3
        return str(error.value)

    def test_a_bad_output_names_the_module_and_keeps_the_state(self, corpus, tmp_path):
        trainer = self.broken(corpus, tmp_path / "run")
        good = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        spoil = trainer.model.backbone.layers[1].mixer.in_proj
        handle = spoil.register_forward_hook(lambda module, inputs, output: output * math.inf)
        message = self.stop(trainer)
        assert "step 4: the loss is nan" in message
        assert "not finite first: the output of backbone.layers.1.mixer.in_proj." in message
        handle.remove()
        again = open_run(tmp_path / "run", {}, silent)
        assert again.step == 3
        assert all(torch.equal(again.model.state_dict()[name], x) for name, x in good.items())
        assert again.run()

    def test_a_bad_parameter_is_named(self, corpus, tmp_path):
        trainer = self.broken(corpus, tmp_path / "run")
        with torch.no_grad():
            trainer.model.backbone.layers[0].mixer.dt_bias[0] = math.nan
        assert "not finite first: the parameter backbone.layers.0.mixer.dt_bias." in self.stop(trainer)

    def test_a_bad_gradient_is_named(self, corpus, tmp_path):
        trainer = self.broken(corpus, tmp_path / "run")
        layer = trainer.model.backbone.layers[0].mixer.out_proj

        def hook(module, inputs, output):
            output.register_hook(lambda gradient: gradient * math.nan)

        layer.register_forward_hook(hook)
        message = self.stop(trainer)
        assert "the norm of its gradient nan" in message
        assert "the gradient at the output of backbone.layers.0.mixer.out_proj." in message


@pytest.mark.usefixtures("plots")
def test_no_plot_without_matplotlib_is_one_line(corpus, tmp_path, monkeypatch, capsys):
    import anymamba.training.trainer as loop

    monkeypatch.setattr(loop, "can_plot", lambda: False)
    assert create_run(tiny(corpus), tmp_path / "run", silent).run()
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1
    assert not (tmp_path / "run" / "loss.png").exists()
