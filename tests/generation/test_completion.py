"""One path from token to text: what the pipeline, the command line and the server make of the tokens of a row."""

import pytest

from anymamba.generation import ByteTokenizer
from anymamba.generation.completion import CompletionBuilder
from anymamba.generation.sampling import TokenScore


def feed(text, **options):
    """Pass the bytes of a text to a builder until it ends; return the builder and what it returned."""
    builder = CompletionBuilder(ByteTokenizer(), **options)
    parts = []
    for token in text if isinstance(text, bytes) else text.encode():
        parts.append(builder.add(token))
        if builder.reason is not None:
            break
    return builder, parts


def test_a_character_is_returned_when_it_is_complete():
    builder, parts = feed("zö")
    assert parts == ["z", "", "ö"]
    assert (builder.text, builder.reason, builder.finish()) == ("zö", None, "")
    assert builder.reason == "length"


def test_an_incomplete_character_becomes_a_replacement_at_the_end():
    builder, parts = feed("zö".encode()[:-1])
    assert parts == ["z", ""]
    assert builder.resumable_text == "z"
    assert (builder.finish(), builder.text, builder.finish()) == ("\ufffd", "z\ufffd", "")


def test_an_end_token_is_a_token_without_text_and_releases_what_was_held_back():
    builder, parts = feed("ab|c", end_tokens=[ord("|")], stop_texts=["bc"])
    assert parts == ["a", "", "b"]
    assert (builder.text, builder.reason, builder.tokens) == ("ab", "end", list(b"ab|"))
    assert builder.resumable_text == "ab"


def test_a_stop_text_is_left_out():
    builder, parts = feed("one two three", stop_texts=["two", "three"])
    assert "".join(parts) == builder.text == "one "
    assert (builder.reason, builder.tokens) == ("stop", list(b"one two"))
    assert builder.resumable_text == "one tw"  # the model has not read the last token


@pytest.mark.parametrize(("max_tokens", "text", "reason"), [(3, "abc", "length"), (4, "ab", "stop"), (9, "ab", "stop")])
def test_the_number_of_tokens_ends_a_text_unless_a_stop_text_does(max_tokens, text, reason):
    builder, parts = feed("abcdef", stop_texts=["cd"], max_tokens=max_tokens)
    assert "".join(parts) == builder.text == text
    assert (builder.reason, len(builder.tokens)) == (reason, min(max_tokens, 4))


def test_what_a_model_has_read_ends_with_a_whole_character_or_is_unknown():
    builder, _ = feed("é".encode() + b"\xc3")
    assert builder.resumable_text == "é"
    builder.add(0xA9)
    assert builder.resumable_text is None  # the model has read half of the second one
    builder.add(ord("!"))
    assert builder.resumable_text == "éé"


def test_a_completion_has_log_probabilities_as_requested():
    builder = CompletionBuilder(ByteTokenizer())
    builder.add(97, [TokenScore(97, -0.5), TokenScore(98, -0.1)])
    assert builder.build().choices is None
    assert builder.build(0).alternatives is None
    completion = builder.build(1)
    assert completion.choices == [(97, "a", -0.5)]
    assert completion.alternatives == [[(98, "b", -0.1)]]
    assert (completion.text, completion.reason) == ("a", "length")
