import threading

import pytest
import torch

from anymamba.generation import prefill
from anymamba.serving.state_cache import SessionLimitError, StateCache, ids_key, session_key, text_key
from tests.models.cases import small_lm

MODEL = small_lm()


def state(*ids):
    return prefill(MODEL, torch.tensor([list(ids) or [1]]))


SIZE = state().nbytes


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.leaves(), b.leaves(), strict=True))


def test_the_longest_beginning_is_found():
    store = StateCache(MODEL)
    for text in ("ab", "abcd", "abX", "ü"):
        store.put(state(), 1, text_key(text))
    assert store.longest("text", b"abcde")[1] == 4
    assert store.longest("text", b"abc")[1] == 2
    assert store.longest("text", "üb".encode())[1] == 2
    assert store.longest("text", b"b") is None
    assert store.longest("cut", b"abcde") is None


def test_the_least_recently_used_go_first():
    store = StateCache(MODEL, 3 * SIZE)
    keys = [text_key(text) for text in "abcd"]
    for key in keys[:3]:
        store.put(state(), 1, key)
    assert store.get(keys[0])
    store.put(state(), 1, keys[3])
    assert [store.get(key) is not None for key in keys] == [True, False, True, True]
    assert (store.nbytes, len(store), store.evictions) == (3 * SIZE, 3, 1)


def test_a_key_is_replaced_and_bytes_are_counted_once():
    store = StateCache(MODEL)
    store.put(state(1), 1, text_key("a"), ids_key("end", [1]))
    store.put(state(2), 2, text_key("a"))
    assert (len(store), store.nbytes) == (1, SIZE)
    assert store.get(ids_key("end", [1])) is None
    assert store.get(text_key("a")).tokens == 2
    assert store.remove(text_key("a"))
    assert (len(store), store.nbytes, store.longest("text", b"a")) == (0, 0, None)


def test_what_is_kept_holds_no_more_memory_than_it_says():
    store = StateCache(MODEL)
    long = prefill(MODEL, torch.randint(0, 61, (1, 500)))
    kept = store.put(long, 500, text_key("a"))
    assert sum(x.untyped_storage().nbytes() for x in kept.state.leaves()) == kept.state.nbytes == SIZE


def test_sessions_stay_in_memory_where_there_is_no_disk():
    store = StateCache(MODEL, 2 * SIZE)
    store.put(state(), 1, session_key("a"))
    store.put(state(), 1, session_key("b"))
    store.put(state(), 1, text_key("x"))
    assert store.get(session_key("a"))
    assert store.get(text_key("x")) is None
    with pytest.raises(SessionLimitError):
        store.put(state(), 1, session_key("c"))
    store.put(state(), 2, session_key("b"))
    assert store.get(session_key("b")).tokens == 2


def test_what_is_pushed_out_of_memory_is_found_on_disk_by_this_and_later_stores(tmp_path):
    store = StateCache(MODEL, 2 * SIZE, tmp_path)
    states = {text: state(i + 1) for i, text in enumerate("abcd")}
    for text, made in states.items():
        store.put(made, 1, text_key(text))
    assert len(store) == 2
    assert same(store.longest("text", b"abc")[0].state, states["a"])
    store.close()
    later = StateCache(MODEL, 2 * SIZE, tmp_path)
    for text, made in states.items():
        assert same(later.longest("text", text.encode() + b"...")[0].state, made)
    other = small_lm(seed=1)
    assert StateCache(other, 2 * SIZE, tmp_path).longest("text", b"a") is None


def test_the_disk_is_bounded(tmp_path):
    store = StateCache(MODEL, 0, tmp_path, disk_limit=4 * SIZE)
    for i in range(12):
        store.put(state(i + 1), 1, ids_key("end", [i]))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= 4 * SIZE
    assert store.get(ids_key("end", [0])) is None


def test_the_most_recently_used_survive_a_restart(tmp_path):
    store = StateCache(MODEL, 9 * SIZE, tmp_path, disk_limit=4 * SIZE)
    for i in range(8):
        store.put(state(i + 1), 1, ids_key("end", [i]))
    assert store.get(ids_key("end", [0]))
    store.close()
    later = StateCache(MODEL, 9 * SIZE, tmp_path, disk_limit=4 * SIZE)
    assert later.get(ids_key("end", [0]))
    assert later.get(ids_key("end", [7]))
    assert later.get(ids_key("end", [1])) is None


def test_closing_ends_when_its_time_is_over(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    store = StateCache(MODEL, 9 * SIZE, tmp_path)
    write = store.files.write
    monkeypatch.setattr(store.files, "write", lambda *args, **options: (clock.advance(4), write(*args, **options)))
    for i in range(8):
        store.put(state(i + 1), 1, ids_key("end", [i]))
    store.save(store.put(state(9), 1, session_key("mine")))
    store.close(seconds=10.0)
    later = StateCache(MODEL, 9 * SIZE, tmp_path)
    assert [i for i in range(8) if later.get(ids_key("end", [i]))] == [5, 6, 7]
    assert later.get(session_key("mine"))


class Clock:
    """`time.monotonic` as the store sees it, which a test advances."""

    def __init__(self, monkeypatch):
        self._now = 0.0
        monkeypatch.setattr("anymamba.serving.state_cache.time.monotonic", lambda: self._now)

    def advance(self, seconds):
        self._now += seconds


def test_a_session_survives_with_its_text_and_a_damaged_one_is_refused(tmp_path):
    store = StateCache(MODEL, 2 * SIZE, tmp_path)
    made = state(3, 4)
    store.save(store.put(made, 2, text_key("conversation"), session_key("mine")))
    later = StateCache(MODEL, 2 * SIZE, tmp_path)
    assert same(later.get(session_key("mine")).state, made)
    assert later.longest("text", b"conversation, continued")[1] == len("conversation")
    (file,) = tmp_path.rglob("session-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        StateCache(MODEL, 2 * SIZE, tmp_path).get(session_key("mine"))


def test_nobody_waits_for_a_slow_disk(tmp_path, monkeypatch):
    store = StateCache(MODEL, 2 * SIZE, tmp_path)
    write, may_write = store.files.write, threading.Event()

    def slowly(*arguments, **options):
        assert may_write.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(store.files, "write", slowly)
    states = [state(i + 1, 5) for i in range(5)]
    for i, kept in enumerate(states):
        store.put(kept, 2, text_key(f"t{i}"))  # returns although nothing can be written
    assert len(store) == 2
    found, length = store.longest("text", b"t0 and more")
    assert (same(found.state, states[0]), length) == (True, 2)
    may_write.set()
    store.close()
    again = StateCache(MODEL, 9 * SIZE, tmp_path)
    assert all(same(again.get(text_key(f"t{i}")).state, kept) for i, kept in enumerate(states))
