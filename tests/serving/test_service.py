import asyncio
import threading

import pytest

from anymamba.generation import ByteTokenizer
from anymamba.generation.tokenizers import FileTokenizer
from anymamba.serving.api.fields import ApiError
from anymamba.serving.api.requests import Limits, read_chat, read_completion
from anymamba.serving.scheduler.continuation import PromptDone
from anymamba.serving.service import Service
from anymamba.serving.sessions import SessionStore
from anymamba.serving.state_cache import StateCache
from tests.models.cases import small_lm

MODEL = small_lm(vocab_size=256, pad_vocab_size_multiple=1)
LIMITS = Limits(max_prompt_tokens=200_000)


class Template:
    def render(self, messages, add_generation_prompt=True):
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return text + "<assistant>" * add_generation_prompt


def make_service(tokenizer=None, memory=2**30, directory=None, limits=LIMITS):
    cache = StateCache(MODEL, memory, directory)
    sessions = SessionStore(MODEL, cache, memory, directory)
    tokenizer = tokenizer or ByteTokenizer()
    return Service(MODEL, tokenizer, Template(), name="m", cache=cache, sessions=sessions, limits=limits)


def completion(prompt, max_tokens=2, **fields):
    return read_completion({"prompt": prompt, "max_tokens": max_tokens, "seed": 1, **fields}, LIMITS, 256, "m")


def chat(text, **fields):
    messages = [{"role": "user", "content": text}]
    return read_chat({"messages": messages, "max_tokens": 2, "seed": 1, **fields}, LIMITS, 256, "m")


def run(scenario, *services):
    """Start services, and run a coroutine with them."""

    async def main():
        for service in services:
            service.start()
        try:
            return await asyncio.wait_for(scenario(), 300)
        finally:
            for service in services:
                service.close()

    return asyncio.run(main())


async def events_of(service, request):
    return [event async for _, event in service.handle(request)]


async def error_of(service, request):
    with pytest.raises(ApiError) as error:
        await events_of(service, request)
    return error.value.status, error.value.code


class WatchedTokenizer(ByteTokenizer):
    """Notes its threads; long texts wait until they may go on."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.threads = []
        self.long = 0
        self.most_long = 0

    def encode(self, text, add_special_tokens=False):
        self.threads.append(threading.current_thread().name)
        if len(text) > 2**16:
            self.long += 1
            self.most_long = max(self.most_long, self.long)
            assert self.may_go_on.wait(60)
            self.long -= 1
        return super().encode(text)


def test_a_text_that_must_be_too_long_is_not_tokenized():
    tokenizer = WatchedTokenizer()
    service = make_service(tokenizer)

    async def scenario():
        for request in (completion("x" * 200_001), chat("x" * 200_001)):
            assert await error_of(service, request) == (400, "context_length_exceeded")

    run(scenario, service)
    assert tokenizer.threads == []


def test_long_prompts_wait_for_each_other_and_delay_no_short_one():
    tokenizer = WatchedTokenizer()
    limits = Limits(max_prompt_tokens=2**17)
    service = make_service(tokenizer, limits=limits)

    async def scenario():
        requests = [completion("y" * (2**16 + 1), max_tokens=0, echo=True) for _ in range(3)]
        long = [asyncio.ensure_future(events_of(service, request)) for request in requests]
        while not tokenizer.long:
            await asyncio.sleep(0.01)
        assert await events_of(service, completion("short"))
        assert not any(task.done() for task in long)
        tokenizer.may_go_on.set()
        for events in await asyncio.gather(*long):
            (prompt,) = [event for event in events if isinstance(event, PromptDone)]
            assert len(prompt.prompt_ids) == 2**16 + 1

    run(scenario, service)
    assert tokenizer.most_long == 1
    assert len(tokenizer.threads) == 4
    assert all("prompts" in name for name in tokenizer.threads)


def test_the_engine_does_not_tokenize_what_the_service_has_tokenized():
    tokenizer = WatchedTokenizer()
    service = make_service(tokenizer)

    async def scenario():
        await events_of(service, chat("first"))
        await events_of(service, chat("first"))
        await events_of(service, chat("first</><user>second"))

    run(scenario, service)
    assert all("prompts" in name for name in tokenizer.threads)


def test_a_tokenizer_that_fails_is_one_error_and_one_line(tmp_path, capfd):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    inner.save(str(tmp_path / "tokenizer.json"))
    service = make_service(FileTokenizer(tmp_path / "tokenizer.json"))

    async def scenario():
        assert await error_of(service, completion("a" * 40 + "b")) == (500, "tokenizer_failed")
        assert await events_of(service, completion("a"))

    run(scenario, service)
    errors = capfd.readouterr().err
    assert errors.count("anymamba: ") == 1
    assert "Traceback" not in errors


class Panic(BaseException):
    """An error of a native library."""


class FailingTokenizer(ByteTokenizer):
    """Cannot decode, once an error is set."""

    error = None

    def decode(self, ids):
        if self.error is not None:
            raise self.error
        return super().decode(ids)


@pytest.mark.parametrize("error", [ValueError("no text"), Panic("no text")])
def test_an_error_within_a_reply_is_one_response_and_one_line(error, capfd):
    tokenizer = FailingTokenizer()
    service = make_service(tokenizer)

    async def scenario():
        tokenizer.error = error
        assert await error_of(service, completion("x")) == (500, "internal_error")
        tokenizer.error = None
        assert await events_of(service, completion("x"))

    run(scenario, service)
    assert capfd.readouterr().err == f"anymamba: {error!r}\n"


@pytest.mark.parametrize("request_for", [completion, chat])
def test_a_session_without_memory_is_rejected_before_its_first_event(request_for):
    service = make_service(memory=0)

    async def scenario():
        assert await error_of(service, request_for("x", session="mine")) == (429, "session_limit")
        assert await events_of(service, request_for("x"))
        assert service.open == 0

    run(scenario, service)


def test_a_turn_that_the_disk_does_not_take_can_be_repeated(tmp_path, monkeypatch, capfd):
    service = make_service(directory=tmp_path)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    async def scenario():
        await events_of(service, completion("12345", session="mine"))
        with monkeypatch.context() as patch:
            patch.setattr("anymamba.core.cache_io.save_tensors", fail)
            assert await error_of(service, completion("123", session="mine")) == (507, "session_not_written")
        assert service.sessions.find("mine").tokens == 7
        await events_of(service, completion("123", session="mine"))
        assert service.sessions.find("mine").tokens == 12

    run(scenario, service)
    assert "could not write a session" in capfd.readouterr().err


def test_a_session_deleted_during_a_request_begins_again():
    service = make_service()

    async def scenario():
        await events_of(service, completion("12345", session="mine"))
        events = service.handle(completion("123", session="mine", max_tokens=20))
        await anext(events)
        assert service.sessions.delete("mine")
        assert [event async for event in events]
        assert service.sessions.find("mine") is None
        await events_of(service, completion("1", session="mine"))
        assert service.sessions.find("mine").tokens == 3

    run(scenario, service)


def test_of_two_servers_with_one_session_one_reports_a_conflict(tmp_path):
    ours, theirs = make_service(directory=tmp_path), make_service(directory=tmp_path)

    async def scenario():
        await events_of(ours, completion("12345", session="mine"))
        events = ours.handle(completion("1", session="mine", max_tokens=20))
        await anext(events)
        await events_of(theirs, completion("12", session="mine"))
        with pytest.raises(ApiError, match="nothing of this request was added") as error:
            [event async for event in events]
        assert (error.value.status, error.value.code) == (409, "session_conflict")
        assert ours.sessions.find("mine").tokens == 7 + 4
        await events_of(ours, completion("1", session="mine"))
        assert theirs.sessions.find("mine").tokens == 11 + 3

    run(scenario, ours, theirs)


def test_a_chat_session_outlives_requests_that_end_with_the_same_text():
    service = make_service()

    async def scenario():
        for _ in range(2):
            await events_of(service, chat("hi", session="mine"))
            await events_of(service, chat("hi"))
            await events_of(service, chat("hi", session="other"))
        assert all(service.sessions.find(name) is not None for name in ("mine", "other"))

    run(scenario, service)
