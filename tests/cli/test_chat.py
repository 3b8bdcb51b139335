import json
import math
import string

import pytest
import torch

from anymamba import MambaLM
from anymamba.generation import ChatTemplate, FileTokenizer, Pipeline
from anymamba.generation.tokenizers import ByteTokenizer
from tests.generation.cases import with_beginning
from tests.models.cases import small_lm

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Old replies are rendered in another way than they were generated.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role if loop.last else m.role | upper }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def model(tmp_path):
    """Save a model with a tokenizer that begins a text with <s>, and ends a message with <|im_end|>."""
    directory = tmp_path / "model"
    tokenizer = with_beginning(directory, "<s>", "<|im_start|>", "<|im_end|>", end="<|im_end|>")
    model = small_lm(vocab_size=tokenizer.vocab_size, pad_vocab_size_multiple=1, tie_embeddings=False)
    written = tokenizer.encode(string.ascii_letters)
    with torch.no_grad():  # others are never the likeliest
        model.lm_head.weight[[i for i in range(tokenizer.vocab_size) if i not in written]] *= 0
    model.save_pretrained(directory)
    return directory


def put_template(directory, source):
    (directory / "chat_template.jinja").write_text(source)
    return ChatTemplate.from_directory(directory)


def continue_tokens(directory, ids, n=12):
    """Return the text that follows tokens, all of them read from an empty cache."""
    model, tokenizer = MambaLM.from_pretrained(directory), FileTokenizer(directory / "tokenizer.json")
    new = model.generate(torch.tensor([ids]), n, stop=tokenizer.end).rows()[0]
    return tokenizer.decode(new)


def test_a_message_is_answered_in_the_models_template(run, model):
    template, tokenizer = put_template(model, CHATML), FileTokenizer(model / "tokenizer.json")
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        text = template.render([*system, {"role": "user", "content": "Hello"}])
        flags = ["--system", system[0]["content"]] if system else []
        code, out, _ = run("generate", model, "--chat", "--prompt", "Hello", "--max-new-tokens", 12, *flags)
        assert (code, out) == (0, continue_tokens(model, tokenizer.encode(text)) + "\n")
    plain = run("generate", model, "--prompt", "Hello", "--max-new-tokens", 12)[1]
    assert plain == continue_tokens(model, tokenizer.encode("Hello", add_special_tokens=True)) + "\n"


@pytest.mark.parametrize("source", [CHATML, FORGETFUL])
def test_every_turn_answers_the_whole_conversation_and_reads_what_is_new_of_it(run, model, source):
    template, tokenizer = put_template(model, source), FileTokenizer(model / "tokenizer.json")
    code, out, err = run("generate", model, "--interactive", "--max-new-tokens", 12, stdin=b"Hello\n\nAnd you?\nYes\n")
    assert code == 0
    messages, replies, lengths = [], [], []
    for line in ("Hello", "And you?", "Yes"):
        messages.append({"role": "user", "content": line})
        ids = tokenizer.encode(template.render(messages))
        lengths.append(len(ids))
        replies.append(continue_tokens(model, ids))
        messages.append({"role": "assistant", "content": replies[-1]})
    assert out == "".join(f"{reply}\n" for reply in replies)
    known = sum(len(tokenizer.encode(reply)) for reply in replies[:-1])  # and no reply came to its end
    assert f"read {sum(lengths) if source == FORGETFUL else lengths[-1] - known} tokens" in err


def test_interactive_text_without_a_template_stays_text(run, model):
    tokenizer = FileTokenizer(model / "tokenizer.json")
    first = continue_tokens(model, tokenizer.encode("Hello", add_special_tokens=True)) + "\n"
    for flags in ([], ["--no-chat"]):
        _, out, _ = run("generate", model, "--interactive", "--max-new-tokens", 12, *flags, stdin=b"Hello\nAnd\n")
        assert out.startswith(first)
        put_template(model, CHATML)
    text = ChatTemplate.from_directory(model).render([{"role": "user", "content": "Hello"}])
    _, out, _ = run("generate", model, "--interactive", "--max-new-tokens", 12, stdin=b"Hello\n")
    assert out == continue_tokens(model, tokenizer.encode(text)) + "\n"


def test_a_model_without_a_template_can_chat(run, tmp_path):
    small_lm(vocab_size=256, pad_vocab_size_multiple=1).save_pretrained(tmp_path / "bytes")
    _, out, _ = run("generate", tmp_path / "bytes", "--chat", "--prompt", "Hello", "--max-new-tokens", 9)
    text = Pipeline(MambaLM.from_pretrained(tmp_path / "bytes"), ByteTokenizer())
    assert out == text("User: Hello\n\nAssistant:", 9).text + "\n"


def test_prompts_of_a_file_are_messages(run, model, tmp_path):
    template = put_template(model, CHATML)
    (tmp_path / "prompts").write_text("Hello\nAnd you?\n")
    _, out, _ = run("generate", model, "--prompts", tmp_path / "prompts", "--chat", "--max-new-tokens", 9)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Hello", "And you?"]
    tokenizer = FileTokenizer(model / "tokenizer.json")
    for line in lines:
        ids = tokenizer.encode(template.render([{"role": "user", "content": line["prompt"]}]))
        assert line["text"] == continue_tokens(model, ids, 9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system", "x", "--prompt", "a"], "--system starts a conversation, so it needs --chat"),
        (["--chat", "--load-state", "x", "--prompt", "a"], "--chat starts a conversation and cannot continue from"),
        (["--chat", "--prompt", " "], "the message is empty"),
    ],
)
def test_an_invalid_conversation_is_one_line(run, model, flags, message):
    code, _, err = run("generate", model, *flags)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_template_that_raises_is_one_line(run, model):
    put_template(model, "{{ raise_exception('only in French') }}")
    code, _, err = run("generate", model, "--chat", "--prompt", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert "chat_template.jinja: chat template: it rejects these messages: only in French" in err


class TestSpecialTokens:
    def test_they_stand_before_the_first_text_only(self, run, model, tmp_path):
        tokenizer = FileTokenizer(model / "tokenizer.json")
        begin, ids, more = [tokenizer.id_of("<s>")], tokenizer.encode("Hello"), tokenizer.encode("And")
        assert tokenizer.encode("Hello", add_special_tokens=True) == begin + ids
        common = ["generate", model, "--max-new-tokens", 0, "--save-state", tmp_path / "state"]
        _, _, err = run(*common, "--interactive", stdin=b"Hello\nAnd\n")
        assert f"read {1 + len(ids) + len(more)} tokens" in err
        _, _, err = run(*common, "--interactive", "--no-special-tokens", stdin=b"Hello\nAnd\n")
        assert f"read {len(ids) + len(more)} tokens" in err
        _, _, err = run(*common, "--load-state", tmp_path / "state", "--prompt", "And")
        assert f"read {len(more)} tokens" in err

    def test_a_text_after_one_is_scored_whole(self, run, model, tmp_path):
        (tmp_path / "text").write_text("Hello world, and more.")
        tokenizer, lm = FileTokenizer(model / "tokenizer.json"), MambaLM.from_pretrained(model)
        plain = tokenizer.encode("Hello world, and more.")
        first = len(tokenizer.decode(plain[:1]).encode())
        for flags, ids, size in (
            ([], [tokenizer.id_of("<s>"), *plain], 22),
            (["--no-special-tokens"], plain, 22 - first),
        ):
            _, out, _ = run("eval", model, tmp_path / "text", *flags)
            ids_bt = torch.tensor([ids])
            bits = lm(ids_bt, labels=ids_bt).loss.item() * (len(ids) - 1) / math.log(2) / size
            assert float(out.split("bits per byte")[1].split()[0]) == pytest.approx(bits, abs=2e-4)


class TestGrammars:
    @pytest.fixture
    def model(self, tmp_path):
        small_lm(vocab_size=256, pad_vocab_size_multiple=1).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_a_text_follows_its_grammar(self, run, model, tmp_path):
        pytest.importorskip("llguidance")
        (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
        (tmp_path / "grammar").write_text('root ::= "yes" | "no"')
        for flags, texts in (
            (["--schema", tmp_path / "schema.json"], {'"yes"', '"no"'}),
            (["--grammar", tmp_path / "grammar"], {"yes", "no"}),
            (["--regex", "yes|no"], {"yes", "no"}),
            (["--choice", "yes", "--choice", "no"], {"yes", "no"}),
        ):
            code, out, _ = run("generate", model, "--prompt", "Hello", *flags)
            assert code == 0
            assert out.strip() in texts
        (tmp_path / "prompts").write_text("a\nb\n")
        _, out, _ = run("generate", model, "--prompts", tmp_path / "prompts", "--choice", "yes")
        assert [json.loads(line)["text"] for line in out.splitlines()] == ["yes", "yes"]

    def test_a_grammar_that_cannot_be_is_one_line(self, run, model):
        pytest.importorskip("llguidance")
        code, _, err = run("generate", model, "--prompt", "Hello", "--regex", "(")
        assert code == 2
        assert "the regular expression cannot be used" in err
        assert run("generate", model, "--prompt", "Hello", "--regex", "a", "--choice", "b")[0] == 2
