"""Runs that start from the weights of another model, and runs whose config changes on the way."""

import shutil

import pytest
import torch

from anymamba import MambaLM
from anymamba.generation.tokenizers import load_tokenizer
from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint.manifest import list_checkpoints, read_manifest
from anymamba.training.metrics.loggers import read_metrics
from anymamba.training.optim.optimizer import learning_rate
from tests.models.cases import small_lm
from tests.training.cases import silent, tiny, write_corpus

MODEL = {"vocab_size": 256, "pad_vocab_size_multiple": 1}
FRESH = dict.fromkeys(("n_layer", "d_model", "d_state", "headdim"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def config_with_init(corpus, init, **sections):
    return tiny(corpus, model={**FRESH, "init": str(init), **sections.pop("model", {})}, **sections)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


@pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_run_begins_with_the_weights_and_the_sizes_of_the_model(corpus, tmp_path, family, tied):
    model = small_lm(family, **MODEL, tie_embeddings=tied, rms_norm=False, d_intermediate=128)
    model.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    trainer = create_run(config_with_init(corpus, tmp_path / "model"), tmp_path / "run", silent)
    assert_equal(trainer.model.state_dict(), model.state_dict())
    assert trainer.model.config == MambaLM.from_pretrained(tmp_path / "model").config
    assert trainer.model.training
    assert trainer.run()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert MambaLM.from_pretrained(tmp_path / "run").config == trainer.model.config


def test_weights_are_learned_in_the_precision_of_the_run(corpus, tmp_path):
    small_lm(**MODEL, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    trainer = create_run(config_with_init(corpus, tmp_path / "model"), tmp_path / "run", silent)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_is_bit_equal_and_no_longer_needs_the_model(corpus, tmp_path, kind):
    small_lm("Mamba3", **MODEL).save_pretrained(tmp_path / "model")
    config = config_with_init(corpus, tmp_path / "model", optimizer={"kind": kind}, data={"mode": "stream"})
    whole = create_run(config, tmp_path / "whole", silent)
    assert whole.run()
    part = create_run(config, tmp_path / "part", silent)
    part.save()
    for _ in range(3):
        part._take_step()
    part.save()
    shutil.rmtree(tmp_path / "model")
    again = open_run(tmp_path / "part", {}, silent)
    assert again.step == 3
    assert again.run()
    assert_equal(again.model.state_dict(), whole.model.state_dict())
    assert_equal(again.optimizer.tensors(), whole.optimizer.tensors())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"family": "Mamba3"}, r"family \(expected 'Mamba3', got 'Mamba2'\)"),
        ({"depth": 3}, r"n_layer \(expected 3, got \d\), d_model \(expected 192, got"),
        ({"n_layer": 9}, r"n_layer \(expected 9, got"),
        ({"d_model": 4}, r"d_model \(expected 4, got"),
        ({"d_state": 999}, r"d_state \(expected 999, got"),
        ({"headdim": 999}, r"headdim \(expected 999, got"),
        ({"d_intermediate": 128}, r"d_intermediate \(expected 128, got 0\)"),
        ({"tie_embeddings": False}, r"tie_embeddings \(expected False, got True\)"),
        ({"block": {"d_conv": 9}}, r"d_conv \(expected 9, got"),
    ],
)
def test_sizes_that_contradict_the_model_are_rejected(corpus, tmp_path, section, message):
    small_lm("Mamba2", **MODEL).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=f"model.init = .*: the model differs from the config: {message}"):
        create_run(config_with_init(corpus, tmp_path / "model", model=section), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()


def test_sizes_that_say_the_same_are_not(corpus, tmp_path):
    model = small_lm("Mamba2", **MODEL)
    model.save_pretrained(tmp_path / "model")
    section = {"family": "Mamba2", "n_layer": model.config.n_layer, "d_model": model.config.d_model}
    section |= {"tie_embeddings": True, "d_intermediate": 0, "block": {"d_conv": model.config.block_config().d_conv}}
    create_run(config_with_init(corpus, tmp_path / "model", model=section), tmp_path / "run", silent)


class TestTokenizer:
    @pytest.fixture
    def tokenizer(self, corpus, tmp_path):
        """Train a tokenizer of 270 tokens, and return its directory."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        bpe, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
        learn = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
        bpe.train([str(path) for path in corpus.iterdir()], learn)
        (tmp_path / "tokenizer").mkdir()
        bpe.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
        return tmp_path / "tokenizer"

    def test_that_of_the_model_is_taken(self, corpus, tmp_path, tokenizer):
        small_lm(vocab_size=280).save_pretrained(tmp_path / "model")
        shutil.copy(tokenizer / "tokenizer.json", tmp_path / "model")
        assert create_run(config_with_init(corpus, tmp_path / "model"), tmp_path / "run", silent).run()
        shutil.rmtree(tmp_path / "model")
        assert load_tokenizer(None, tmp_path / "run", 280).vocab_size == 270
        assert open_run(tmp_path / "run", {}, silent).run()

    def test_one_that_does_not_fit_is_rejected(self, corpus, tmp_path, tokenizer):
        small_lm(**MODEL).save_pretrained(tmp_path / "model")
        config = config_with_init(corpus, tmp_path / "model", data={"tokenizer": str(tokenizer)})
        with pytest.raises(ValueError, match="it has 270 tokens, the model 256"):
            create_run(config, tmp_path / "run", silent)
        small_lm(vocab_size=280).save_pretrained(tmp_path / "wide")
        with pytest.raises(ValueError, match=r"no tokenizer\.json next to the weights"):
            create_run(config_with_init(corpus, tmp_path / "wide"), tmp_path / "run", silent)

    def test_a_directory_will_do(self, corpus, tmp_path, tokenizer):
        assert create_run(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "run", silent).run()
        assert load_tokenizer(None, tmp_path / "run", 280).vocab_size == 270


class TestChanges:
    """What may change when a run is resumed."""

    @pytest.mark.parametrize("mode", ["packed", "stream"])
    @pytest.mark.parametrize("kind", ["constant", "wsd"])
    def test_a_longer_schedule_continues_as_if_it_had_been_there_from_the_start(self, corpus, tmp_path, mode, kind):
        def config(steps):
            return tiny(corpus, schedule={"kind": kind, "steps": steps, "decay": 0.3}, data={"mode": mode})

        whole = create_run(config(12), tmp_path / "whole", silent)
        assert whole.run()
        part = create_run(config(6), tmp_path / "part", silent)
        part.save()
        for _ in range(4 if kind == "wsd" else 6):  # a wsd schedule of 6 steps decays in the last 2
            part._take_step()
        part.save()
        longer = open_run(tmp_path / "part", {"schedule.steps": "12"}, silent)
        assert longer.run()
        assert_equal(longer.model.state_dict(), whole.model.state_dict())
        assert open_run(tmp_path / "part", {}, silent).config.schedule.steps == 12

    def test_a_constant_schedule_can_be_given_a_decay(self, corpus, tmp_path):
        whole = create_run(tiny(corpus, schedule={"kind": "wsd", "decay": 0.5}), tmp_path / "whole", silent)
        assert whole.run()
        part = create_run(tiny(corpus, schedule={"kind": "constant", "steps": 3}), tmp_path / "part", silent)
        assert part.run()
        changes = {"schedule.kind": "wsd", "schedule.steps": "6", "schedule.decay": "0.5"}
        ended = open_run(tmp_path / "part", changes, silent)
        assert ended.run()
        assert_equal(ended.model.state_dict(), whole.model.state_dict())

    @pytest.mark.parametrize(
        ("kind", "taken", "changes", "changed"),
        [
            ("cosine", 4, {"schedule.steps": "9"}, r"schedule.steps \(was 6, got 9\)"),
            ("wsd", 6, {"schedule.steps": "9"}, r"schedule.steps \(was 6, got 9\)"),
            ("wsd", 4, {"schedule.final": "0.5", "schedule.decay": "0.9"}, r"schedule.decay .*, schedule.final .*"),
            ("constant", 4, {"schedule.warmup": "3"}, r"schedule.warmup \(was 2, got 3\)"),
        ],
    )
    def test_rates_of_the_steps_taken_are_not_rewritten(self, corpus, tmp_path, kind, taken, changes, changed):
        trainer = create_run(tiny(corpus, schedule={"kind": kind, "decay": 0.5}), tmp_path / "run", silent)
        trainer.save()
        for _ in range(taken):
            trainer._take_step()
        trainer.save()
        message = (
            f"a run continues with the config it started with; changed: {changed}; the {taken} steps taken would "
            "have had other learning rates; to start another run from its weights: anymamba train --model.init .*run "
            "--out DIR"
        )
        with pytest.raises(ValueError, match=message):
            open_run(tmp_path / "run", changes, silent)

    def test_steps_that_have_been_taken_are_not_undone(self, corpus, tmp_path):
        assert create_run(tiny(corpus, schedule={"kind": "constant"}), tmp_path / "run", silent).run()
        with pytest.raises(ValueError, match=r"schedule.steps \(was 6, got 3\); 6 steps have been taken; to start"):
            open_run(tmp_path / "run", {"schedule.steps": "3"}, silent)

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    def test_a_learning_rate_applies_from_the_next_step_on_and_is_recorded(self, corpus, tmp_path, kind):
        config = tiny(corpus, optimizer={"kind": kind}, checkpoints={"keep": 9})
        part = create_run(config, tmp_path / "run", silent)
        part.save()
        for _ in range(3):
            part._take_step()
        part.save()
        before, told = part.optimizer.tensors(), []
        again = open_run(tmp_path / "run", {"optimizer.lr": "0.001", "optimizer.clip": "0.5"}, told.append)
        assert_equal(again.optimizer.tensors(), before)
        assert told == [
            "optimizer.lr changes from 0.003 to 0.001 after step 3",
            "optimizer.clip changes from 1.0 to 0.5 after step 3",
        ]
        assert again.run()
        rates = [row.learning_rate for row in read_metrics(tmp_path / "run" / "metrics.csv")]
        fractions = [learning_rate(step, 1.0, config.schedule) for step in range(3, 6)]
        assert rates == [fraction * 0.001 for fraction in fractions]
        changes = [{"step": 3, "optimizer.lr": [0.003, 0.001], "optimizer.clip": [1.0, 0.5]}]
        for path in list_checkpoints(tmp_path / "run" / "checkpoints")[:-1]:
            assert read_manifest(path).changes == changes, path
        finished = open_run(tmp_path / "run", {}, silent)
        assert (finished.config.optimizer.lr, finished.changes) == (0.001, changes)

    def test_a_kill_after_a_change_does_not_undo_it(self, corpus, tmp_path, monkeypatch):
        config = tiny(corpus, checkpoints={"every": 0})
        part = create_run(config, tmp_path / "run", silent)
        part.save()
        again = open_run(tmp_path / "run", {"optimizer.lr": "0.001"}, silent)

        def interrupt():
            raise KeyboardInterrupt

        monkeypatch.setattr(again, "_take_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            again.run()
        third = open_run(tmp_path / "run", {}, silent)
        assert third.config.optimizer.lr == 0.001
        assert third.run()

    def test_changes_of_the_model_or_the_data_are_rejected(self, corpus, tmp_path):
        create_run(tiny(corpus), tmp_path / "run", silent).save()
        with pytest.raises(ValueError, match=r"changed: seed \(was 0, got 1\); to start another run from its weights:"):
            open_run(tmp_path / "run", {"seed": "1", "optimizer.lr": "1"}, silent)
