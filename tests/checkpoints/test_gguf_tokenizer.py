"""Tokenizers in the headers of GGUF files."""

import random
from itertools import pairwise

import pytest

from anymamba.checkpoints.formats.gguf_tokenizer import tokenizer_files
from anymamba.core.io import write_json
from anymamba.generation.tokenizers import FileTokenizer

pytest.importorskip("tokenizers")
SPACE = "▁"


def load(directory, fields):
    """Load the tokenizer of a header with these fields."""
    header = {f"tokenizer.{name}": value for name, value in fields.items()}
    for file, content in tokenizer_files("model.gguf", lambda name, default=None: header.get(name, default)).items():
        write_json(directory / file, content)
    return FileTokenizer(directory / "tokenizer.json")


def pieces(seed=0, count=60):
    """Make a vocabulary of sentencepiece: special tokens, bytes, characters, and merged pieces, each with a score."""
    draw = random.Random(seed)
    vocabulary = [SPACE, *"abcd", "é"]
    while len(vocabulary) < count:
        if (piece := draw.choice(vocabulary) + draw.choice(vocabulary)) not in vocabulary and len(piece) < 9:
            vocabulary.append(piece)
    tokens = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{i:02X}>" for i in range(256)), *vocabulary]
    kinds = [2, 3, 3, 4] + [6] * 256 + [1] * len(vocabulary)
    scores = [0.0] * 260 + [-float(n) for n in draw.sample(range(1000), len(vocabulary))]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }


def join_by_score(fields, text, prefix=SPACE):
    """Join adjacent pieces as sentencepiece does: first those that make the piece of the highest score."""
    ids = dict(zip(fields["ggml.tokens"], range(10**6), strict=False))
    score = dict(zip(fields["ggml.tokens"][260:], fields["ggml.scores"][260:], strict=True))
    symbols = list(prefix + text.replace(" ", SPACE))
    while pairs := [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]:
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for x in symbols for i in ([ids[x]] if x in ids else [4 + byte for byte in x.encode()])]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_joined_by_their_scores(seed, tmp_path):
    fields, draw = pieces(seed), random.Random(seed)
    tokenizer = load(tmp_path, fields)
    for length in (1, 2, 3, 7, 20, 20, 20, 60):
        text = "".join(draw.choice("aabbccdd é") for _ in range(length))
        assert tokenizer.encode(text) == join_by_score(fields, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_special_tokens_and_spaces(tmp_path):
    fields = pieces()
    tokenizer = load(tmp_path, fields)
    text = "a 雪\tb"
    assert [4 + byte for byte in "雪".encode()] == tokenizer.encode(text)[-5:-2]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab", add_special_tokens=True) == [1, *join_by_score(fields, "ab")]
    assert tokenizer.end == [2]
    assert tokenizer.encode("[INST]a")[:2] == [3, *join_by_score(fields, "a")][:2]
    assert tokenizer.decode([1, *tokenizer.encode(" ab"), 2]) == " ab"
    (tmp_path / "plain").mkdir()
    plain = load(tmp_path / "plain", fields | {"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    assert plain.encode("ab c", add_special_tokens=True) == join_by_score(fields, "ab c", prefix="")
    assert plain.decode(plain.encode(" ab")) == " ab"


def test_pieces_without_scores_are_rejected():
    fields = {f"tokenizer.{name}": value for name, value in pieces().items() if name != "ggml.scores"}
    with pytest.raises(ValueError, match=r"expected a score for each of the 320 tokens, got no scores"):
        tokenizer_files("model.gguf", lambda name, default=None: fields.get(name, default))


def test_ids_and_types_beyond_the_vocabulary_are_rejected_or_ignored():
    fields = {f"tokenizer.{name}": value for name, value in byte_pairs("gpt-2", "a b").items()}
    fields |= {"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True}
    files = tokenizer_files("model.gguf", lambda name, default=None: fields.get(name, default))
    assert "post_processor" not in files["tokenizer.json"]
    assert "bos_token" not in files["tokenizer_config.json"]
    fields["tokenizer.ggml.token_type"] = [1, 1]
    with pytest.raises(ValueError, match=r"model.gguf: expected a type for each of the 98 tokens, got 2"):
        tokenizer_files("model.gguf", lambda name, default=None: fields.get(name, default))
    with pytest.raises(ValueError, match=r"model.gguf: tokenizer.huggingface.json: not readable JSON"):
        tokenizer_files("model.gguf", {"tokenizer.huggingface.json": "{"}.get)


def byte_pairs(pre, *merges, **fields):
    """Make a vocabulary of byte pairs: every printable character, and what the merges make."""
    tokens = [*(chr(i) for i in range(33, 127)), "Ġ", "Ċ", *(merge.replace(" ", "") for merge in merges), "<s>"]
    kinds = [1] * (len(tokens) - 1) + [3]
    header = {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": kinds}
    return header | {"ggml.merges": list(merges), "ggml.bos_token_id": len(tokens) - 1} | fields


def words(tokenizer, text):
    """Split a text into words: if everything is merged, each word is one token."""
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_falcon_s_split(tmp_path):
    """Stretches of punctuation, words with the space before them, digits by threes."""
    merges = ("Ġ a", "Ġ 1", "1 2", "12 3", "3 4", ". .", "a .", "4 5")
    split_words = words(load(tmp_path, byte_pairs("falcon", *merges)), "a a.. 12345 123")
    assert split_words == ["a", " a", "..", " ", "123", "45", " ", "123"]
    plain = words(load(tmp_path, byte_pairs("gpt-2", *merges)), "a..")
    assert plain == ["a", ".."]


@pytest.mark.parametrize("pre", ["llama-bpe", "falcon3"])
def test_llama_3_s_split(pre, tmp_path):
    """Up to three digits, without the space before them."""
    tokenizer = load(tmp_path, byte_pairs(pre, "Ġ a", "Ġ 1", "1 2", "12 3", "3 4", "4 5"))
    assert words(tokenizer, "a a 12345") == ["a", " a", " ", "123", "45"]
    begins = tokenizer.encode("a", add_special_tokens=True)
    assert (len(begins) == 2) == (pre == "llama-bpe")


def test_the_header_says_whether_a_text_begins_with_a_token(tmp_path):
    tokenizer = load(tmp_path, byte_pairs("gpt-2", **{"ggml.add_bos_token": True}))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == tokenizer.vocab_size - 1
    assert tokenizer.encode("a") == [64]
