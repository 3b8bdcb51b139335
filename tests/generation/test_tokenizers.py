import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymamba.generation import ByteTokenizer, FileTokenizer, IncrementalDetokenizer, Pipeline, load_tokenizer
from anymamba.generation.tokenizers import write_end_token
from anymamba.training.data.documents import encode
from tests.generation.cases import TEXT, bare, with_beginning
from tests.models.cases import small_lm


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """Make a tokenizer of words with a marked space, and bytes for unknown ones, as Llama 2 and Mistral have."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁hello": 257, "▁world": 258, "▁": 259}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    directory = tmp_path_factory.mktemp("byte_fallback")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def streamed(tokenizer, ids):
    text = IncrementalDetokenizer(tokenizer)
    return [*(text.push(token) for token in ids), text.finish()]


def test_text_survives_bytes_and_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.encode(b"\xff".decode(errors="surrogateescape")) == [0xFF]
    assert tokenizer.decode([300]) == "\ufffd"


def test_a_tokenizer_file_is_read_with_its_end_token(byte_level):
    tokenizer = FileTokenizer(byte_level / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.end == [0]


class TestEnd:
    @pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"])
    def test_a_special_token_of_a_usual_name_is_found_without_other_files(self, tmp_path, token):
        assert FileTokenizer(bare(tmp_path, "<pad>", token)).end == [2]

    def test_the_most_certain_of_several_is_taken(self, tmp_path):
        assert FileTokenizer(bare(tmp_path, "<|im_end|>", "</s>", "<|endoftext|>")).end == [3]

    def test_an_ordinary_word_or_another_name_is_none(self, tmp_path):
        assert FileTokenizer(bare(tmp_path, "<mine>", plain=["</s>"])).end == []

    def test_a_file_beside_it_has_the_last_word(self, tmp_path):
        file = bare(tmp_path, "<|endoftext|>", "<mine>")
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<mine>"}')
        assert FileTokenizer(file).end == [2]
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
        assert FileTokenizer(file).end == [1]

    def test_it_can_be_named(self, tmp_path):
        file = bare(tmp_path, "<|endoftext|>", "<mine>")
        assert FileTokenizer(file, "<mine>").end == [2]
        with pytest.raises(ValueError, match="expected a token '<other>' that ends a text, found none"):
            FileTokenizer(file, "<other>")

    def test_it_is_written_where_other_programs_look_for_it(self, tmp_path):
        file = bare(tmp_path, "<|endoftext|>", "<mine>")
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (tmp_path / name).write_text('{"eos_token": "<|endoftext|>", "kept": 1}')
        write_end_token(FileTokenizer(file, "<mine>"), tmp_path)
        assert FileTokenizer(file).end == [2]
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"eos_token": "<mine>", "kept": 1}
        assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 2}
        written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        write_end_token(FileTokenizer(file), tmp_path)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


class TestSpecialTokens:
    def test_they_are_added_where_they_are_asked_for(self, tmp_path):
        tokenizer = with_beginning(tmp_path, "<s>", "</s>", end="</s>")
        begin, end = tokenizer.id_of("<s>"), tokenizer.id_of("</s>")
        plain = tokenizer.encode("ab")
        assert begin not in plain
        # A text that is continued has no end, but one that it spells itself.
        assert tokenizer.encode("ab", add_special_tokens=True) == [begin, *plain]
        assert tokenizer.encode("ab</s>", add_special_tokens=True) == [begin, *plain, end]
        assert tokenizer.encode("", add_special_tokens=True) == [begin]
        assert tokenizer.encode("") == []

    def test_a_tokenizer_without_any_adds_none(self, byte_level):
        for tokenizer in (FileTokenizer(byte_level / "tokenizer.json"), ByteTokenizer()):
            assert tokenizer.encode(TEXT, add_special_tokens=True) == tokenizer.encode(TEXT)

    def test_a_pipeline_begins_with_them_unless_told_otherwise(self, tmp_path):
        tokenizer = with_beginning(tmp_path, "<s>", "</s>", end="</s>")
        model = small_lm(vocab_size=tokenizer.vocab_size)
        text = Pipeline(model, tokenizer)
        for add in (True, False):
            ids = torch.tensor([tokenizer.encode("Hello", add_special_tokens=add)])
            expected = model.generate(ids, 9, stop=tokenizer.end).rows()[0]
            assert text("Hello", 9, add_special_tokens=add).tokens == expected
            assert "".join(text.stream("Hello", 9, add_special_tokens=add)) == tokenizer.decode(expected)
        assert text("Hello", 9) == text("Hello", 9, add_special_tokens=True)

    def test_a_model_is_trained_as_it_is_asked(self, tmp_path):
        tokenizer = with_beginning(tmp_path, "<s>", "</s>", end="</s>")
        begin, end = tokenizer.id_of("<s>"), tokenizer.id_of("</s>")
        assert encode("name", b"ab", tokenizer).tolist() == [begin, *tokenizer.encode("ab"), end]


def test_no_half_character_is_given(byte_level):
    for tokenizer in (ByteTokenizer(), FileTokenizer(byte_level / "tokenizer.json")):
        parts = streamed(tokenizer, tokenizer.encode(TEXT))
        assert "".join(parts) == TEXT
        assert not any("\ufffd" in part for part in parts)


def test_words_keep_their_spaces_and_bytes_become_characters(byte_fallback):
    tokenizer = FileTokenizer(byte_fallback / "tokenizer.json")
    ids = [257, 258, *(i + 1 for i in "日本👍".encode()), 258, 257]
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "hello world日本👍 world hello"
    assert parts[:2] == ["hello", " world"]
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_is_given_at_the_end():
    assert streamed(ByteTokenizer(), [0x61, 0xE6, 0x97]) == ["a", "", "", "\ufffd"]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_stream_to_what_they_decode_to(ids):
    assert "".join(streamed(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


def test_text_comes_as_soon_as_it_is_certain():
    assert streamed(ByteTokenizer(), "aéb".encode()) == ["a", "", "é", "b", ""]


def test_the_tokenizer_of_a_model_is_found(byte_level, tmp_path):
    assert isinstance(load_tokenizer(None, tmp_path, 256), ByteTokenizer)
    assert isinstance(load_tokenizer("bytes", byte_level, 1000), ByteTokenizer)
    assert isinstance(load_tokenizer(None, byte_level, 1000), FileTokenizer)
    assert isinstance(load_tokenizer(byte_level, tmp_path, 1000), FileTokenizer)
    assert isinstance(load_tokenizer(byte_level / "tokenizer.json", tmp_path, 256 + 44), FileTokenizer)


def test_a_tokenizer_alone_needs_no_model(byte_level):
    for name in (byte_level, str(byte_level), byte_level / "tokenizer.json", "bytes"):
        tokenizer = load_tokenizer(name)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert FileTokenizer(str(byte_level / "tokenizer.json")).end == [0]
    with pytest.raises(ValueError, match="expected a name, or the directory of a model, got neither"):
        load_tokenizer()


def test_a_tokenizer_that_does_not_fit_is_rejected(byte_level, tmp_path):
    with pytest.raises(ValueError, match=r"does not belong to the model: it has .* tokens, the model 100"):
        load_tokenizer(byte_level, tmp_path, 100)
    with pytest.raises(ValueError, match=r"no tokenizer.json next to the weights; pass one with --tokenizer"):
        load_tokenizer(None, tmp_path, 1000)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a readable tokenizer"):
        load_tokenizer(None, tmp_path, 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_config.json", {"eos_token": 2.5}),
        ("tokenizer_config.json", {"eos_token": True}),
        ("tokenizer_config.json", {"eos_token": {"content": [["x"]]}}),
        ("special_tokens_map.json", {"eos_token": [{"content": "x"}]}),
        ("generation_config.json", {"eos_token_id": -1}),
        ("generation_config.json", {"eos_token_id": [1, None]}),
        ("generation_config.json", {"eos_token_id": float("nan")}),
    ],
)
def test_an_end_token_that_is_none_is_rejected_with_its_file(byte_level, tmp_path, name, value):
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"{name}: eos_token(_id)? must be a token or its id, or several, got"):
        FileTokenizer(tmp_path / "tokenizer.json")


def test_half_a_character_is_no_end_token(byte_level, tmp_path):
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    assert FileTokenizer(tmp_path / "tokenizer.json").end == []


def test_the_documents_example_goes_from_text_to_text(byte_level, tmp_path, monkeypatch, capsys):
    """The first one of docs/language_models.md that has a tokenizer, with the files it names."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_level, "path/to/checkpoint")
    small_lm(vocab_size=300).save_pretrained("path/to/checkpoint")
    page = (Path(__file__).parents[2] / "docs" / "language_models.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "load_tokenizer" in code]
    exec(example, variables := {})
    tokenizer, printed = variables["tokenizer"], capsys.readouterr().out
    assert printed.startswith(tokenizer.decode(variables["out"].rows()[0]) + "\n")
    assert variables["state"].counts.item() == variables["out"].lengths.item()
    assert Path("story.safetensors").is_file()


def test_without_the_library_the_extra_is_named(byte_level, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'anymamba\[hf\]'"):
        load_tokenizer(byte_level, byte_level, 1000)


def test_a_tokenizer_is_fetched_from_the_hub(byte_level, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(byte_level))
    assert load_tokenizer("some/tokenizer", tmp_path, 1000).end == [0]
