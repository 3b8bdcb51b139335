import copy
import os
import queue
import random
import threading
import time

import pytest
import torch

from anymamba.core.registry import kernels_off
from anymamba.generation import ByteTokenizer, GenerationState, Sampling
from anymamba.generation.prefill import prefill
from anymamba.kernels.cpu import bindings
from anymamba.serving.scheduler import engine as engine_module
from anymamba.serving.scheduler.continuation import (
    Continuation,
    ContinuationOptions,
    Job,
    JobFailed,
    PrefillStart,
    PromptDone,
    SequenceDone,
    TokenEvent,
    choose_tokens,
)
from anymamba.serving.scheduler.decode import DecodeSlots
from anymamba.serving.scheduler.engine import Engine, prompt_key
from tests.models.cases import FAMILIES, small_lm
from tests.support import MODEL_FLOOR, assert_near

SEGMENT = 16
STORMS = int(os.environ.get("ANYMAMBA_STORMS", "20"))


def byte_model(family="Mamba2"):
    return small_lm(family, vocab_size=256, pad_vocab_size_multiple=1)


@pytest.fixture
def running():
    """Make engines, and close them after the test."""
    engines = []

    def make(model, **options):
        def deliver(events):
            for job, event in events:
                job.emit(event)

        engines.append(Engine(model, ByteTokenizer(), deliver, segment_len=SEGMENT, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def plan(n=12, **sampling):
    return ContinuationOptions(sampling=Sampling(**{"seed": 1, "temperature": 1.0, **sampling}), max_tokens=n)


def make_job(ids, plans, state=None, **options):
    """Make a job and the queue of its events."""
    events = queue.Queue()
    keys = [prompt_key(ids)] * len(plans)
    options |= {"continuations": plans, "sampling_keys": keys, "emit": events.put}
    return Job(find_start=lambda: PrefillStart(state, ids, 0), **options), events


def tokens_of(events, rows=1):
    """Return what each row wrote, once all have ended."""
    written = [[] for _ in range(rows)]
    ended = 0
    while ended < rows:
        event = events.get(timeout=60)
        if isinstance(event, JobFailed):
            raise event.error
        if isinstance(event, TokenEvent):
            written[event.choice].append(event.token_text.token)
        ended += isinstance(event, SequenceDone)
    return written


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_come_and_go_give_what_each_gives_alone(running, family):
    model = byte_model(family)
    engine = running(model, rows=5, stall=0.0)
    asked = [([7 * i % 256 for i in range(n + 1)], 3 + 5 * n % 17, n) for n in (0, 15, 16, 17, 40, 3, 33, 8, 70)]
    jobs = [make_job(ids, [plan(n, seed=seed)]) for ids, n, seed in asked]
    for job, _ in jobs:
        engine.submit(job)
        time.sleep(0.002)
    for (ids, n, seed), (_, events) in zip(asked, jobs, strict=True):
        options = {"seed": seed, "temperature": 1.0, "segment_len": SEGMENT}
        assert tokens_of(events) == model.generate(torch.tensor([ids]), n, **options).rows()
    assert engine.load == {"running": 0, "ready": 0, "waiting": 0}


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
def test_an_exact_engine_gives_the_same_bits_from_any_cut(running):
    model = byte_model()
    engine = running(model, exact=True)
    ids = [11 * i % 256 for i in range(90)]
    text = torch.tensor([ids])
    expected = model.generate(text, 10, seed=1, temperature=1.0, exact=True).rows()
    for cut in (0, 1, 16, 50, 89):
        state = prefill(model, text[:, :cut], exact=True) if cut else None
        job, events = make_job(ids[cut:], [plan(10)], state)
        job.sampling_keys = [prompt_key(ids)]
        engine.submit(job)
        assert tokens_of(events) == expected
    with kernels_off(), pytest.raises(ValueError, match="exact reading needs the compiled step"):
        running(model, exact=True)


def test_without_kernels_rows_still_equal_rows_alone(running):
    model = byte_model()
    with kernels_off():
        engine = running(model)
        jobs = [make_job([i, 5, 9], [plan(10, seed=i)]) for i in range(5)]
        for job, _ in jobs:
            engine.submit(job)
        tokens = [tokens_of(events)[0] for _, events in jobs]
        alone = [model.generate(torch.tensor([[i, 5, 9]]), 10, seed=i, temperature=1.0).rows()[0] for i in range(5)]
    assert not engine._decode_loop.slots.together
    assert tokens == alone


def test_the_state_at_the_end_is_that_of_generate(running):
    model = byte_model()
    engine = running(model)
    states = []
    row = ContinuationOptions(sampling=Sampling(seed=1, temperature=1.0), max_tokens=9, feed_final_token=True)
    job, events = make_job([1, 2, 3], [row], on_end=lambda _, state: states.append(state))
    other, others = make_job([4] * 40, [plan(30)])
    engine.submit(other)
    engine.submit(job)
    tokens_of(events)
    tokens_of(others)
    expected = model.generate(torch.tensor([[1, 2, 3]]), 9, seed=1, temperature=1.0, return_state=True).state
    assert all(torch.equal(a, b) for a, b in zip(states[0].leaves(), expected.leaves(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_after_turns_is_a_cold_read_of_all_of_them_to_rounding(running, family):
    model = byte_model(family)
    engine, states, ids = running(model), [], []
    row = ContinuationOptions(sampling=Sampling(seed=1, temperature=1.0), max_tokens=9, feed_final_token=True)
    for new in ([3] * 20, [7, 8, 9], [5] * 18):
        job, events = make_job(new, [row], states[-1] if states else None, on_end=lambda _, state: states.append(state))
        engine.submit(job)
        ids += new + tokens_of(events)[0]
    with torch.no_grad():
        oracle = copy.deepcopy(model).double()(torch.tensor([ids]), cache=None).logits[:, -1]
        cold = model(torch.tensor([ids])).logits[:, -1]
    assert_near(states[-1].logits, oracle, MODEL_FLOOR)
    assert_near(cold, oracle, MODEL_FLOOR)


def test_states_on_the_way_continue_to_the_same_bits(running):
    model, states = byte_model(), {}
    engine = running(model)
    ids = [11 * i % 256 for i in range(45)]
    job, events = make_job(
        ids, [plan(5)], should_cache_at=lambda n: n == 32, on_read=lambda n, state: states.setdefault(n, state)
    )
    engine.submit(job)
    whole = tokens_of(events)
    assert sorted(states) == [32, 45]
    again, events = make_job(ids[32:], [plan(5)], states[32])
    again.sampling_keys = [prompt_key(ids)]
    engine.submit(again)
    assert tokens_of(events) == whole


def test_one_broken_job_touches_no_other(running):
    model = byte_model()
    engine = running(model)
    state = GenerationState.like(model)
    broken = state._replace(logits=torch.full_like(state.logits, float("nan")))
    fine, events = make_job([5, 6], [plan(200)])
    engine.submit(fine)

    def raise_error():
        raise ValueError("this prompt cannot be")

    bad, errors = make_job([], [plan()], broken)
    worse, others = make_job([1], [plan()])
    worse.find_start = raise_error
    engine.submit(bad)
    engine.submit(worse)
    with pytest.raises(ValueError, match="logits are not finite"):
        tokens_of(errors)
    with pytest.raises(ValueError, match="this prompt cannot be"):
        tokens_of(others)
    assert tokens_of(events) == model.generate(torch.tensor([[5, 6]]), 200, seed=1, temperature=1.0).rows()


def test_a_cancelled_job_leaves_and_has_no_further_events(running):
    engine = running(byte_model())
    job, events = make_job([1, 2], [plan(10**6)] * 3)
    engine.submit(job)
    while not isinstance(events.get(timeout=60), TokenEvent):
        pass
    job.cancel()
    until = time.monotonic() + 30
    while any(engine.load.values()) and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.load == {"running": 0, "ready": 0, "waiting": 0}
    while not events.empty():
        events.get()
    written = engine.counters["written_tokens"]
    time.sleep(0.02)
    assert (events.empty(), engine.counters["written_tokens"]) == (True, written)


def test_time_that_runs_out_ends_a_reply_and_rejects_a_prompt(running):
    engine = running(byte_model())
    late, events = make_job([1], [plan()], deadline=time.monotonic() - 1)
    engine.submit(late)
    with pytest.raises(TimeoutError, match="ran out"):
        tokens_of(events)
    long, events = make_job([1], [plan(10**6)], deadline=time.monotonic() + 0.3)
    engine.submit(long)
    assert 1 <= len(tokens_of(events)[0]) < 10**6


def test_a_long_prompt_does_not_hold_up_others(running):
    engine = running(byte_model(), stall=0.0)
    writer, events = make_job([1], [plan(400)])
    engine.submit(writer)
    assert isinstance(events.get(timeout=60), PromptDone)
    reader, reading = make_job([3] * (60 * SEGMENT), [plan(1)])
    engine.submit(reader)
    while not isinstance(reading.get(timeout=60), PromptDone):
        pass
    # Between any two segments the writer got a token.
    assert events.qsize() >= 50


def test_a_long_prompt_does_not_hold_up_shorter_ones_that_came_later(running):
    engine = running(byte_model())
    segments = 40
    reader, reading = make_job([3] * (segments * SEGMENT), [plan(1)], estimated_len=segments * SEGMENT)
    read = []
    late = [make_job([i], [plan(1)], estimated_len=1) for i in range(3)]

    def submit_the_others(position):
        read.append(position)
        if len(read) == 3:
            for job, _ in late:
                engine.submit(job)
        return False

    reader.should_cache_at = submit_the_others
    order = []
    for i, (job, events) in enumerate([(reader, reading), *late]):
        job.emit = lambda event, i=i, events=events: (
            isinstance(event, PromptDone) and order.append(i),
            events.put(event),
        )
    engine.submit(reader)
    for events in (reading, *(events for _, events in late)):
        tokens_of(events)
    assert order == [1, 2, 3, 0]


def test_closing_does_not_wait_for_a_long_prompt(running):
    engine = running(byte_model())
    begun = threading.Event()
    job, events = make_job([1] * (5000 * SEGMENT), [plan(1)], should_cache_at=lambda _: bool(begun.set()))
    engine.submit(job)
    assert begun.wait(60)
    engine.close()
    with pytest.raises(RuntimeError, match="shutting down"):
        tokens_of(events)
    assert engine.counters["read_tokens"] < 5000 * SEGMENT


def test_an_unforeseen_error_fails_the_current_jobs_and_no_other(running, monkeypatch, capsys):
    model = byte_model()
    engine = running(model)
    admit = engine._decode_loop.admit
    monkeypatch.setattr(engine._decode_loop, "admit", lambda: 1 / 0)
    job, events = make_job([1], [plan()])
    engine.submit(job)
    with pytest.raises(ZeroDivisionError):
        tokens_of(events)
    monkeypatch.setattr(engine._decode_loop, "admit", admit)
    job, events = make_job([1], [plan()])
    engine.submit(job)
    assert tokens_of(events) == model.generate(torch.tensor([[1]]), 12, seed=1, temperature=1.0).rows()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_jobs_do_not_wait_while_an_idle_engine_returns_memory(running, monkeypatch):
    """A job that is submitted meanwhile is accepted, and runs afterwards."""
    returning, may_end = threading.Event(), threading.Event()

    def slowly():
        returning.set()
        assert may_end.wait(60)

    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(engine_module, "trim_freed_memory", slowly)
    engine = running(byte_model())
    assert returning.wait(60)
    job, events = make_job([1], [plan(3)])
    asking = threading.Thread(target=engine.submit, args=(job,), daemon=True)
    asking.start()
    asking.join(60)
    assert not asking.is_alive()
    assert engine.load["waiting"] == 1
    may_end.set()
    assert len(tokens_of(events)[0]) == 3


def test_closing_fails_what_is_not_done(running):
    engine = running(byte_model())
    job, events = make_job([1], [plan(10**6)])
    engine.submit(job)
    assert isinstance(events.get(timeout=60), PromptDone)
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(RuntimeError, match="shutting down"):
        tokens_of(events)
    closing.join()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(job)


def test_jobs_that_come_while_the_engine_ends_are_told_so():
    model = byte_model()
    for seed in range(STORMS):
        chance, asked = random.Random(seed), []

        def deliver(events):
            for job, event in events:
                job.emit(event)

        engine = Engine(model, ByteTokenizer(), deliver, segment_len=SEGMENT, rows=3, stall=0.0)

        def ask(seed, engine=engine, asked=asked):
            chance = random.Random(seed)
            for _ in range(6):
                plans = [plan(chance.randrange(1, 30))] * chance.randrange(1, 3)
                job, events = make_job([1] * chance.randrange(1, 60), plans)
                vanishes = chance.random() < 0.3
                try:
                    engine.submit(job)
                except RuntimeError:  # it has been closed
                    return
                asked.append((len(plans), events, vanishes))
                if vanishes:
                    time.sleep(chance.random() * 0.002)
                    job.cancel()

        threads = [threading.Thread(target=ask, args=(f"{seed}/{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(chance.random() * 0.02)
        engine.close()
        for thread in threads:
            thread.join()
        assert not any(engine.load.values())
        for rows, events, vanishes in asked:
            heard = list(events.queue)
            ended = sum(isinstance(event, SequenceDone) for event in heard)
            assert vanishes or ended == rows or isinstance(heard[-1], JobFailed)


@torch.no_grad()
@pytest.mark.parametrize("rows", [65, 130])
def test_slots_step_a_row_the_same_with_any_number_of_rows(rows):
    model = byte_model()
    caches = [model(torch.randint(256, (1, 3))).cache for _ in range(rows)]
    slots = DecodeSlots(model, rows)
    for cache in caches:
        slots.insert(cache)
    tokens = torch.randint(256, (rows,)).tolist()
    logits = slots.step(tokens)
    for row in (0, 63, 64, rows - 1):
        alone = DecodeSlots(model, 1)
        alone.insert(caches[row])
        assert torch.equal(alone.step([tokens[row]])[0], logits[row])


def test_slots_have_at_least_one_row():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        DecodeSlots(byte_model(), 0)


def test_rows_choose_together_what_they_choose_alone_and_a_broken_one_breaks_no_other():
    model, vocab = byte_model(), 256
    state = prefill(model, torch.tensor([[1, 2, 3]]))
    ways = [{"temperature": 0.0}, {}, {}, {"top_p": 0.9}, {"logit_bias": {7: 5.0}}, {"repetition_penalty": 1.5}, {}]
    samplings = [Sampling(**{"temperature": 1.0, "seed": i, **way}) for i, way in enumerate(ways)]
    plans = [ContinuationOptions(sampling=sampling, max_tokens=4) for sampling in samplings]
    rows = [Continuation(plan, ByteTokenizer(), vocab, state, i) for i, plan in enumerate(plans)]
    logits_bv = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(0))
    alone = [choose_tokens([row], logits_bv[i : i + 1])[0] for i, row in enumerate(rows)]
    assert choose_tokens(rows, logits_bv) == alone
    logits_bv[2] = float("nan")
    tokens = choose_tokens(rows, logits_bv)
    assert isinstance(tokens.pop(2), ValueError)
    alone.pop(2)
    assert tokens == alone
