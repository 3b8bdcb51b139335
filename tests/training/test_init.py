"""Runs that begin with the weights of another model, and runs that are made longer."""

import shutil

import pytest
import torch

from anymamba import MambaLM
from anymamba.generation.tokenizers import load_tokenizer
from anymamba.training.language import resume, train
from tests.models.cases import small_lm
from tests.training.cases import silent, tiny, write_corpus

MODEL = {"vocab_size": 256, "pad_vocab_size_multiple": 1}
FRESH = dict.fromkeys(("n_layer", "d_model", "d_state", "headdim"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def begun_with(corpus, init, **sections):
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
    trainer = train(begun_with(corpus, tmp_path / "model"), tmp_path / "run", silent)
    assert_equal(trainer.model.state_dict(), model.state_dict())
    assert trainer.model.config == MambaLM.from_pretrained(tmp_path / "model").config
    assert trainer.model.training
    assert trainer.run()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert MambaLM.from_pretrained(tmp_path / "run").config == trainer.model.config


def test_weights_are_learnt_in_the_precision_of_the_run(corpus, tmp_path):
    small_lm(**MODEL, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    trainer = train(begun_with(corpus, tmp_path / "model"), tmp_path / "run", silent)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_is_bit_equal_and_needs_the_model_no_more(corpus, tmp_path, kind):
    small_lm("Mamba3", **MODEL).save_pretrained(tmp_path / "model")
    config = begun_with(corpus, tmp_path / "model", optimiser={"kind": kind}, data={"mode": "stream"})
    whole = train(config, tmp_path / "whole", silent)
    assert whole.run()
    part = train(config, tmp_path / "part", silent)
    part.save()
    for _ in range(3):
        part._take_step()
    part.save()
    shutil.rmtree(tmp_path / "model")
    again = resume(tmp_path / "part", {}, silent)
    assert again.step == 3
    assert again.run()
    assert_equal(again.model.state_dict(), whole.model.state_dict())
    assert_equal(again.optimiser.tensors(), whole.optimiser.tensors())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"family": "Mamba3"}, r"family \(asked for 'Mamba3', found 'Mamba2'\)"),
        ({"depth": 3}, r"n_layer \(asked for 3, found \d\), d_model \(asked for 192, found"),
        ({"n_layer": 9}, r"n_layer \(asked for 9, found"),
        ({"d_model": 4}, r"d_model \(asked for 4, found"),
        ({"d_state": 999}, r"d_state \(asked for 999, found"),
        ({"headdim": 999}, r"headdim \(asked for 999, found"),
        ({"d_intermediate": 128}, r"d_intermediate \(asked for 128, found 0\)"),
        ({"tie_embeddings": False}, r"tie_embeddings \(asked for False, found True\)"),
        ({"block": {"d_conv": 9}}, r"d_conv \(asked for 9, found"),
    ],
)
def test_sizes_that_contradict_the_model_are_refused(corpus, tmp_path, section, message):
    small_lm("Mamba2", **MODEL).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=f"model.init = .*: another model than the fields beside it: {message}"):
        train(begun_with(corpus, tmp_path / "model", model=section), tmp_path / "run", silent)
    assert not (tmp_path / "run").exists()


def test_sizes_that_say_the_same_are_not(corpus, tmp_path):
    model = small_lm("Mamba2", **MODEL)
    model.save_pretrained(tmp_path / "model")
    section = {"family": "Mamba2", "n_layer": model.config.n_layer, "d_model": model.config.d_model}
    section |= {"tie_embeddings": True, "d_intermediate": 0, "block": {"d_conv": model.config.block_config().d_conv}}
    train(begun_with(corpus, tmp_path / "model", model=section), tmp_path / "run", silent)


class TestTokenizer:
    @pytest.fixture
    def tokenizer(self, corpus, tmp_path):
        """A directory with a tokenizer of 270 tokens."""
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        made.pre_tokenizer = pre_tokenizers.ByteLevel()
        learn = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
        made.train([str(path) for path in corpus.iterdir()], learn)
        (tmp_path / "tokenizer").mkdir()
        made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
        return tmp_path / "tokenizer"

    def test_that_of_the_model_is_taken(self, corpus, tmp_path, tokenizer):
        small_lm(vocab_size=280).save_pretrained(tmp_path / "model")
        shutil.copy(tokenizer / "tokenizer.json", tmp_path / "model")
        assert train(begun_with(corpus, tmp_path / "model"), tmp_path / "run", silent).run()
        shutil.rmtree(tmp_path / "model")
        assert load_tokenizer(None, tmp_path / "run", 280).vocab_size == 270
        assert resume(tmp_path / "run", {}, silent).run()

    def test_one_that_does_not_fit_is_refused(self, corpus, tmp_path, tokenizer):
        small_lm(**MODEL).save_pretrained(tmp_path / "model")
        config = begun_with(corpus, tmp_path / "model", data={"tokenizer": str(tokenizer)})
        with pytest.raises(ValueError, match="it has 270 tokens, the model 256"):
            train(config, tmp_path / "run", silent)
        small_lm(vocab_size=280).save_pretrained(tmp_path / "wide")
        with pytest.raises(ValueError, match=r"no tokenizer\.json beside the weights"):
            train(begun_with(corpus, tmp_path / "wide"), tmp_path / "run", silent)

    def test_a_directory_will_do(self, corpus, tmp_path, tokenizer):
        assert train(tiny(corpus, data={"tokenizer": str(tokenizer)}), tmp_path / "run", silent).run()
        assert load_tokenizer(None, tmp_path / "run", 280).vocab_size == 270


class TestLonger:
    @pytest.mark.parametrize("mode", ["packed", "stream"])
    def test_a_constant_schedule_goes_on_as_if_never_ended(self, corpus, tmp_path, mode):
        sections = {"data": {"mode": mode}}
        whole = train(tiny(corpus, schedule={"kind": "constant", "steps": 9}, **sections), tmp_path / "whole", silent)
        assert whole.run()
        assert train(tiny(corpus, schedule={"kind": "constant"}, **sections), tmp_path / "part", silent).run()
        longer = resume(tmp_path / "part", {"schedule.steps": "9"}, silent)
        assert longer.step == 6
        assert longer.run()
        assert_equal(longer.model.state_dict(), whole.model.state_dict())
        assert resume(tmp_path / "part", {}, silent).config.schedule.steps == 9

    @pytest.mark.parametrize(("kind", "steps"), [("cosine", 9), ("wsd", 9), ("constant", 5)])
    def test_others_say_why_not(self, corpus, tmp_path, kind, steps):
        trainer = train(tiny(corpus, schedule={"kind": kind}), tmp_path / "run", silent)
        trainer.save()
        message = rf"schedule.steps \(was 6, got {steps}\); only a constant schedule may be made longer: the rates"
        with pytest.raises(ValueError, match=message):
            resume(tmp_path / "run", {"schedule.steps": str(steps)}, silent)
