"""Serving a model with attention layers, whose states grow: the promises of every other model."""

import asyncio
import time

import pytest
import torch

from anymamba import LMCache
from anymamba.generation import ByteTokenizer, GenerationState
from anymamba.generation.prefill import prefill
from anymamba.serving.api.requests import Limits, read_chat
from anymamba.serving.scheduler.continuation import PromptDone, TokenEvent
from anymamba.serving.scheduler.growing_slots import GrowingSlots
from anymamba.serving.service import Service
from anymamba.serving.sessions import SessionLimitError, SessionStore
from anymamba.serving.state_cache import StateCache
from tests.models.cases import small_lm
from tests.serving.test_engine import make_job, plan, running, tokens_of  # noqa: F401  (a fixture)
from tests.serving.test_service import Template

SEGMENT = 16


def hybrid(dtype=torch.float32):
    attention = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4}}
    return small_lm("Mamba2", dtype, vocab_size=256, pad_vocab_size_multiple=1, **attention).eval()


ASKED = [([7 * i % 256 for i in range(n + 1)], 3 + 5 * n % 17, n) for n in (0, 15, 17, 40, 3, 33)]


@pytest.mark.parametrize(
    ("dtype", "together"),
    [(torch.float32, None), (torch.float32, False), (torch.float64, True)],
    ids=["in one call", "alone", "float64 in one call"],
)
def test_rows_that_come_and_go_give_what_each_gives_alone(running, dtype, together):  # noqa: F811
    model = hybrid(dtype)
    engine = running(model, rows=4, stall=0.0, together=together)
    jobs = [make_job(ids, [plan(n, seed=seed)]) for ids, n, seed in ASKED]
    for job, _ in jobs:
        engine.submit(job)
        time.sleep(0.002)
    for (ids, n, seed), (_, events) in zip(ASKED, jobs, strict=True):
        options = {"seed": seed, "temperature": 1.0, "segment_len": SEGMENT}
        assert tokens_of(events) == model.generate(torch.tensor([ids]), n, **options).rows()
    assert isinstance(engine._decode_loop.slots, GrowingSlots)


def test_a_kept_prefix_continues_to_the_same_bits(running):  # noqa: F811
    model, states = hybrid(), {}
    engine, ids = running(model), [11 * i % 256 for i in range(45)]
    job, events = make_job(
        ids, [plan(5)], should_cache_at=lambda n: n == 32, on_read=lambda n, state: states.setdefault(n, state)
    )
    engine.submit(job)
    whole = tokens_of(events)
    kept = states[32].clone()
    for _ in range(2):  # a branch does not change what it continues from
        again, events = make_job(ids[32:], [plan(5)], states[32])
        again.sampling_keys = job.sampling_keys
        engine.submit(again)
        assert tokens_of(events) == whole
        assert all(torch.equal(a, b) for a, b in zip(states[32].leaves(), kept.leaves(), strict=True))
    assert states[32].cache.layers[1].lengths.tolist() == [32]


def test_slots_keep_each_rows_cache():
    model = hybrid(torch.float64)
    slots = GrowingSlots(model, 4, together=True)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    for prompt in prompts:
        slots.insert(prefill(model, torch.tensor([prompt])).cache)
    with torch.no_grad():
        slots.step([10, 11, 12])
        middle = slots.copy_row(1)
        slots.remove(0)  # the last row moves there
        slots.step([13, 14])
        for slot, ids in enumerate([[5, 6, 7, 8, 9, 12, 13], [4, 11, 14]]):
            expected, row = model(torch.tensor([ids])).cache, slots.copy_row(slot)
            for a, b in zip(row.trim().leaves(), expected.leaves(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert middle.layers[1].lengths.tolist() == [2]
    assert isinstance(middle, LMCache)


def test_a_turn_reads_only_its_new_text_and_replies_as_a_fresh_read():
    model = hybrid(torch.float64)  # in which rounding moves no token
    limits = Limits(max_requests=9, max_prompt_tokens=999, max_tokens=99, request_seconds=99.0)

    def make_service():
        cache = StateCache(model, 2**28)
        return Service(
            model,
            ByteTokenizer(),
            Template(),
            name="m",
            cache=cache,
            sessions=SessionStore(model, cache),
            limits=limits,
        )

    async def reply(service, messages, **fields):
        request = read_chat(
            {"messages": messages, "max_tokens": 8, "seed": 1, "temperature": 0, "ignore_eos": True, **fields},
            limits,
            256,
            "m",
        )
        events = [event async for _, event in service.handle(request)]
        (done,) = (event for event in events if isinstance(event, PromptDone))
        tokens = [event.token_text.token for event in events if isinstance(event, TokenEvent)]
        return done.cached_tokens, len(done.prompt_ids), tokens

    async def main():
        service, fresh = make_service(), make_service()
        service.start()
        fresh.start()
        try:
            messages = [{"role": "user", "content": "one two three four"}]
            _, _, tokens = await reply(service, messages, session="mine")
            answer = bytes(tokens).decode("utf-8", errors="replace")
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and five"}]
            cached, length, tokens = await reply(service, messages, session="mine")
            assert cached > 0.5 * (length - len("and five"))
            assert tokens == (await reply(fresh, messages))[2]
            assert service.state_bytes_per_token == 2 * 2 * 8 * 8
        finally:
            service.close()
            fresh.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_memory_is_reserved_for_what_a_session_will_hold():
    model = hybrid()
    state = prefill(model, torch.tensor([[1, 2, 3]]))
    per_token = state.bytes_per_step
    assert GenerationState.like(model).nbytes + 3 * per_token == state.nbytes
    sessions = SessionStore(model, StateCache(model), GenerationState.like(model).nbytes + 100 * per_token)
    lease = sessions.acquire("long")
    sessions.load(lease)
    with pytest.raises(SessionLimitError, match="there is not enough memory"):
        sessions.reserve(lease, 101)
    sessions.reserve(lease, 100)
    sessions.commit(lease, state, 3)
    sessions.release(lease)
    assert sessions.nbytes == state.nbytes
    lease = sessions.acquire("long")
    sessions.load(lease)
    sessions.reserve(lease, 100)  # its own memory counts once
    with pytest.raises(SessionLimitError, match="there is not enough memory"):
        sessions.reserve(lease, 101)
