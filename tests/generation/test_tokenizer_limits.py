import base64
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymamba.generation import ByteTokenizer, FileTokenizer
from anymamba.generation.tokenizer_limits import growth_of
from anymamba.generation.tokenizers import min_tokens

tokenizers = pytest.importorskip("tokenizers")
normalizers, pre_tokenizers, decoders = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders


def save(path, **parts):
    """Save a byte-level tokenizer with some long tokens, and with these parts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hellohellohello wörld 日本語"] * 3, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def doubling(times):
    return [normalizers.Replace("a", "aa")] * times


ANYWHERE = tokenizers.Regex("x*")
REPLACEMENTS = [decoders.Replace("a", "aa")]
TEXTS = st.text(alphabet=st.sampled_from("helo wörd日本語 e\u0301\u1100\u1161\u11a8ι\u0308\u0301\n"), max_size=60)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace(" ", "▁")], ids=repr)
@given(text=TEXTS | st.text(max_size=60).filter(lambda text: text.isprintable()))
def test_a_text_never_has_fewer_tokens_than_expected(tmp_path_factory, normalizer, text):
    tokenizer = FileTokenizer(
        save(tmp_path_factory.mktemp("bound"), **({"normalizer": normalizer} if normalizer else {}))
    )
    assert min_tokens(tokenizer, text) <= len(tokenizer.encode(text))
    assert not text or min_tokens(tokenizer, text) > 0


def test_a_token_of_bytes_is_a_byte():
    assert min_tokens(ByteTokenizer(), "zwölf") == len(ByteTokenizer().encode("zwölf")) == 6


def test_words_with_byte_fallback_have_a_bound(tmp_path):
    vocabulary = {**{f"<0x{i:02X}>": i for i in range(256)}, "▁hello": 256, "▁": 257}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert min_tokens(tokenizer, "é" * 80) == 20
    assert len(tokenizer.encode("é" * 80)) >= 160


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Replace(tokenizers.Regex(" {2,}"), " ")},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"model": tokenizers.models.WordLevel({"a": 0}, unk_token="a")},
    ],
    ids=str,
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(tmp_path, parts):
    assert min_tokens(FileTokenizer(save(tmp_path, **parts)), "word " * 1000) == 0


def test_truncated_texts_have_no_bound(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(save(tmp_path)))
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert min_tokens(tokenizer, "word " * 1000) == 0
    assert len(tokenizer.encode("word " * 1000)) == 5


def test_composition_shortens_no_character_to_less_than_a_third():
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            apart = unicodedata.normalize("NFD", chr(code)).encode()
            assert len(apart) <= 3 * len(unicodedata.normalize("NFC", chr(code)).encode()), hex(code)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"normalizer": normalizers.Sequence(doubling(40))},
            "the normalizer may make a text 1,099,511,627,776 times",
        ),
        ({"normalizer": normalizers.Replace("a", "b" * 5000)}, "the normalizer may make a text 5,000 times longer"),
        (
            {"normalizer": normalizers.Replace(tokenizers.Regex("x*"), "b" * 5000)},
            "the normalizer may make a text 5,001",
        ),
        ({"normalizer": normalizers.Prepend("b" * 5000)}, "the normalizer may make a text 5,001 times"),
        (
            {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)},
            "the decoder may make a text 1,099,511,627,776",
        ),
    ],
    ids=["doubling", "long", "everywhere", "before", "decoder"],
)
def test_a_tokenizer_that_explodes_texts_is_rejected_when_it_is_read(tmp_path, parts, message):
    with pytest.raises(ValueError, match=f"tokenizer.json: {message}"):
        FileTokenizer(save(tmp_path, **parts))


def test_a_sentencepiece_map_counts_with_its_longest_text():
    trie = bytes(8)
    charsmap = len(trie).to_bytes(4, "little") + trie + b"short\0" + b"x" * 3000 + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    assert growth_of(step) == 3000


def test_usual_steps_are_accepted(tmp_path):
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), *doubling(5)]
    assert FileTokenizer(save(tmp_path, normalizer=normalizers.Sequence(steps))).encode("a")


def test_a_panic_of_the_library_is_a_value_error(tmp_path):
    """A regular expression that needs too many steps; the library panics, which derives from BaseException."""
    tokenizer = FileTokenizer(
        save(tmp_path, pre_tokenizer=pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated"))
    )
    with pytest.raises(ValueError, match=r"tokenizer.json: the tokenizer fails on this text \(.*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
