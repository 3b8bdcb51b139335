"""Constrained output: the masks against a slow reference, and what rows make of them."""

import json
import random
import re
from collections import Counter

import pytest
import torch

from anymamba.generation import (
    ByteTokenizer,
    Choice,
    FileTokenizer,
    Grammar,
    GrammarError,
    Pipeline,
    Sampling,
    Speculation,
    compile_grammar,
    generate,
    stream,
)
from anymamba.generation.grammar import read_grammar
from anymamba.generation.sampling import draw_uniform, sample_tokens
from tests.generation.schemas import check_schema
from tests.models.cases import small_lm

pytest.importorskip("llguidance")

# Finite sets of texts, so that a reference can try every one of them.
FINITE = {
    "choices": (Grammar.from_choices(["yes", "yesterday", "no", "né\n", '"q"', "日本"]), None),
    "regex": (Grammar("regex", "(ab|a)(c|bd)?[é日]?"), ["ab", "a"]),
    "enum": (Grammar.from_schema({"enum": ["a", 'b"c', 12, None, True]}), None),
    "lark": (Grammar("lark", 'start: "a" (B | C)\nB: "b" "b"?\nC: "bc" | "c"'), None),
    "gbnf": (Grammar("lark", 'root ::= "x" [0-1] ("y" | "yy")'), None),
}
TEXTS = {
    "choices": {"yes", "yesterday", "no", "né\n", '"q"', "日本"},
    "regex": {a + b + c for a in ("ab", "a") for b in ("", "c", "bd") for c in ("", "é", "日")},
    "enum": {'"a"', r'"b\"c"', "12", "null", "true"},
    "lark": {"ab", "abb", "abc", "ac"},
    "gbnf": {"x" + a + b for a in "01" for b in ("y", "yy")},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": -3, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def word_tokenizer(directory, kind):
    """Train a small tokenizer whose tokens are longer than a character and may end within one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ['{"a": 1}', "yesterday", "né", "日本", "abbd", '"size": ', ": true", "xyy"]
    if kind == "byte_level":
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(words * 9, trainer)
    else:
        names = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        names += ["▁", "a", "ab", "yes", "▁a", '{"', '":', "né", "日"]
        vocabulary = {name: i for i, name in enumerate(names)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
        decoders = tokenizers.decoders
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return FileTokenizer(directory / "tokenizer.json")


@pytest.fixture(scope="module", params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return ByteTokenizer()
    return word_tokenizer(tmp_path_factory.mktemp(request.param), request.param)


def token_bytes(tokenizer):
    """Return the bytes of every token by a way of its own: from the names in the file."""
    if isinstance(tokenizer, ByteTokenizer):
        return {i: bytes([i]) for i in range(256)}
    library = tokenizer._tokenizer
    if library.pre_tokenizer is None:
        names = {i: library.id_to_token(i) for i in range(2, tokenizer.vocab_size)}
        return {
            i: bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
            for i, name in names.items()
        }
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    byte_of = {chr(i): i for i in printable} | {chr(256 + n): i for n, i in enumerate(others)}
    names = {i: library.id_to_token(i) for i in range(1, tokenizer.vocab_size)}
    return {i: bytes(byte_of[c] for c in name) for i, name in names.items()}


def walk(matcher, content_of, rng, most):
    """Take allowed tokens at random; yield the bytes so far, the mask and whether the row has ended."""
    text = b""
    ended = False
    for _ in range(most):
        yield text, set(matcher.allowed.nonzero().flatten().tolist()), matcher.is_complete
        if matcher.is_complete:
            return
        token = rng.choice(sorted(matcher.allowed.nonzero().flatten().tolist()))
        matcher.add(token)
        ended = token not in content_of
        if ended:
            return
        text += content_of[token]


@pytest.mark.parametrize("case", FINITE)
def test_masks_are_those_of_a_slow_reference(case, tokenizer):
    texts = {text.encode() for text in TEXTS[case]}
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    content_of = token_bytes(tokenizer)
    compiled = compile_grammar(FINITE[case][0], tokenizer)
    seen = set()
    for seed in range(30):
        for text, allowed, is_complete in walk(compiled.start(400), content_of, random.Random(seed), 60):
            expected = {token for token, content in content_of.items() if text + content in beginnings}
            ends = set(tokenizer.end) if text in texts else set()
            assert allowed == expected | ends
            assert is_complete == (not expected)
            seen.add(text)
    assert len(seen & texts) >= 0.7 * len(texts)


def test_every_way_to_write_a_valid_object_is_allowed(tokenizer):
    content_of = token_bytes(tokenizer)
    compiled = compile_grammar(Grammar.from_schema(SCHEMA), tokenizer)
    for seed in range(40):
        rng = random.Random(seed)
        value = {"name": "".join(rng.choices('a"\\é日\n😀', k=rng.randrange(6)))}
        value |= {"size": rng.randint(-3, 40)} if rng.random() < 0.5 else {}
        value |= {"tags": rng.choices("ab", k=rng.randrange(4))}
        style = rng.choice([{"indent": 2}, {}, {"separators": (",", ":")}])
        rest = json.dumps(value, ensure_ascii=False, **style).encode()
        matcher = compiled.start(tokenizer.vocab_size)
        while rest:
            token = rng.choice([i for i, content in content_of.items() if content and rest.startswith(content)])
            matcher.add(token)
            rest = rest[len(content_of[token]) :]
        assert matcher.is_complete


def test_every_text_that_a_mask_leads_to_is_valid(tokenizer):
    content_of = token_bytes(tokenizer)
    compiled = compile_grammar(Grammar.from_schema(SCHEMA), tokenizer)
    finished = 0
    for seed in range(20):
        *_, (text, _, is_complete) = walk(compiled.start(400), content_of, random.Random(seed), 400)
        if is_complete:
            finished += 1
            value = json.loads(text)
            assert list(value) == [name for name in SCHEMA["properties"] if name in value]
            assert {"name", "tags"} <= set(value)
            assert len(value["name"]) <= 5
            assert set(value["tags"]) <= {"a", "b"}
            assert -3 <= value.get("size", 0) <= 40
            assert not re.search(rb"\s{20}", text)
    assert finished >= 15


def test_replies_to_random_schemas_follow_them():
    text = Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())
    outcomes = Counter(check_schema(text, seed) for seed in range(60))
    assert outcomes["followed"] >= 30
    assert set(outcomes) <= {"followed", "cut off", "rejected"}


def test_whitespace_has_an_end():
    matcher = compile_grammar(Grammar.from_schema({"type": "object"}), ByteTokenizer()).start(256)
    for character in "{\n" + 16 * " ":
        matcher.add(ord(character))
    assert not any(bool(matcher.allowed[ord(c)]) for c in " \n\t\r")


BAD = {
    "an expression that is not one": Grammar("regex", "a("),
    "look-around": Grammar("regex", "(?=a)b"),
    "the empty text alone": Grammar("regex", ""),
    "a type that is not one": Grammar.from_schema({"type": "foo"}),
    "a keyword without effect": Grammar.from_schema({"type": "array", "uniqueItems": True}),
    "a keyword that the schema itself allows to ignore": Grammar.from_schema(
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    ),
    "nothing at all": Grammar.from_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "another site's schema": Grammar.from_schema({"$ref": "http://example.com/schema.json"}),
    "a rule that is missing": Grammar("lark", "start: a"),
    "rules nested too deeply": Grammar("lark", 'root ::= "a" ' + "(" * 9000 + '"a"' + ")" * 9000),
    "a stack that overflows": Grammar(
        "lark", "\n".join(f"r{i}: r{i + 1}" for i in range(40000)) + '\nstart: r0\nr40000: "a"'
    ),
    "a schema nested too deeply": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "too many combinations": Grammar.from_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in "ab"]} for i in range(20)]}
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_grammar_that_cannot_be_is_one_line(case):
    with pytest.raises(GrammarError, match="cannot be used") as caught:
        compile_grammar(BAD[case], ByteTokenizer())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert compile_grammar(Grammar("regex", "a"), ByteTokenizer()).start(256).allowed[ord("a")]


def test_a_grammar_without_tokens_for_it_is_an_error():
    compiled = compile_grammar(Grammar("regex", "aé"), ByteTokenizer())
    matcher = compiled.start(128)
    with pytest.raises(GrammarError, match="no tokens"):
        matcher.add(ord("a"))


def test_a_token_that_is_not_allowed_is_an_error():
    with pytest.raises(ValueError, match="expected a token that the grammar allows, got 98"):
        compile_grammar(Grammar("regex", "a"), ByteTokenizer()).start(256).add(98)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"top_p": 0.9, "top_k": 40, "seed": 1}])
def test_a_constrained_row_is_masked_sampling_of_that_row_alone(options):
    model = small_lm(vocab_size=256, pad_vocab_size_multiple=1)
    compiled = compile_grammar(Grammar.from_schema(SCHEMA), ByteTokenizer())
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    rows = generate(model, prompts, 60, grammar=compiled, return_state=True, **options)
    sampling = Sampling(**options)
    for row in range(3):
        single = stream(model, prompts[row : row + 1], 60)  # its own choices are not taken
        state = single.state
        key = generate(model, prompts, 0, return_state=True).state.keys[row].item()
        matcher = compiled.start(256)
        expected = []
        while len(expected) < 60 and not matcher.is_complete:
            uniform = draw_uniform(sampling.seed, key, len(expected)) if sampling.temperature else 0.0
            masked = torch.where(matcher.allowed, state.logits.float(), -torch.inf)
            token = sample_tokens(masked, sampling, [uniform]).item()
            expected.append(token)
            matcher.add(token)
            state = generate(model, torch.tensor([[token]]), 0, cache=state, return_state=True).state
        assert rows.rows()[row] == expected


def test_a_text_ends_where_its_grammar_does():
    text = Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())
    for options in ({"choices": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}):
        completion = text("a", 20, **options)
        assert completion.text in ("yes", "no")
        assert completion.reason == "end"
        assert "".join(text.stream("a", 20, **options)) == completion.text
    exact = text("a", len(completion.tokens), **options)
    assert exact.reason == "end"
    assert text("a", 1, **options).reason == "length"
    samples = text(["a", "b"], 20, n=3, choices=["yes", "no"], logprobs=1, seed=0)
    assert {sample.text for row in samples for sample in row} <= {"yes", "no"}
    assert all(isinstance(choice, Choice) for choice in samples[0][0].choices)


def test_a_model_class_is_a_schema():
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel, extra="forbid"):
        x: bool
        y: list[bool] = pydantic.Field(max_length=2)

    text = Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())
    for seed in range(5):
        completion = text("a", 200, schema=Point, seed=seed)
        assert completion.reason == "end"
        Point.model_validate_json(completion.text)


def test_an_end_token_is_allowed_exactly_where_a_text_is_complete(tmp_path):
    tokenizer = word_tokenizer(tmp_path, "byte_level")
    (end,) = tokenizer.end
    model = small_lm(vocab_size=tokenizer.vocab_size)
    compiled = compile_grammar(Grammar("regex", "a+"), tokenizer)
    assert not compiled.start(tokenizer.vocab_size).allowed[end]
    row = generate(model, torch.tensor([[5]]), 30, grammar=compiled, logit_bias={end: 1000.0}).rows()[0]
    assert row[-1] == end
    assert re.fullmatch("a+", tokenizer.decode(row))


def test_a_special_token_is_not_its_name(tmp_path):
    tokenizer = word_tokenizer(tmp_path, "byte_level")
    matcher = compile_grammar(Grammar.from_choices(["</s>"]), tokenizer).start(tokenizer.vocab_size)
    assert not matcher.allowed[tokenizer.end[0]]
    for token in tokenizer._tokenizer.model.tokenize("<"):
        assert matcher.allowed[token.id]


def test_a_tokenizer_without_bytes_is_an_error(tmp_path):
    from tests.generation.cases import bare

    with pytest.raises(ValueError, match="constrained output cannot use this tokenizer"):
        compile_grammar(Grammar("regex", "a"), FileTokenizer(bare(tmp_path, "</s>")))


@pytest.mark.usefixtures("unchecked")
def test_options_are_checked():
    for options, error, words in (
        ({"regex": "a", "choices": ["a"]}, ValueError, "got regex and choices"),
        ({"regex": 1}, TypeError, "regex must be a text, got int"),
        ({"choices": "abc"}, TypeError, "choices must be a list of texts"),
        ({"choices": []}, GrammarError, "at least one choice"),
        ({"choices": [""]}, TypeError, "not empty"),
        ({"schema": 3}, TypeError, "got int"),
        ({"schema": "{"}, GrammarError, "not readable JSON"),
        ({"schema": {"const": {1}}}, TypeError, "plain data"),
    ):
        with pytest.raises(error, match=words):
            read_grammar(**options)
    with pytest.raises(TypeError, match="what compile_grammar returns, got str"):
        generate(small_lm(vocab_size=256), torch.tensor([[1]]), 1, grammar="a")


def test_drafts_change_nothing():
    model = small_lm(vocab_size=256, pad_vocab_size_multiple=1)
    compiled = compile_grammar(Grammar.from_schema(SCHEMA), ByteTokenizer())
    prompts = torch.tensor([list(b'{"name": "a", "tags": []}'), list(b'{"name": "b", "tags": []}')])
    expected = generate(model, prompts, 60, grammar=compiled)
    drafted = generate(model, prompts, 60, grammar=compiled, speculate="lookup")
    assert drafted.rows() == expected.rows()


def test_drafts_change_nothing_under_a_grammar():
    grammar = compile_grammar(Grammar.from_schema(SCHEMA), ByteTokenizer())
    model = small_lm(vocab_size=256)
    ids = torch.tensor([list(b"name: a"), list(b"name: b")])
    options = {"grammar": grammar, "temperature": 1.0, "seed": 3, "return_state": True}
    plain = generate(model, ids, 80, **options)
    for speculate in ("lookup", Speculation(draft=model, window=5)):
        drafted = generate(model, ids, 80, speculate=speculate, **options)
        assert drafted.rows() == plain.rows()
        for name, x in plain.state.tensors().items():
            assert torch.equal(drafted.state.tensors()[name], x), name
