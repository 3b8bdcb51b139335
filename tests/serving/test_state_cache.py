import threading

import torch

from anymamba.generation import prefill
from anymamba.serving.state_cache import StateCache, ids_key, text_key
from tests.models.cases import small_lm

MODEL = small_lm()


def state(*ids):
    return prefill(MODEL, torch.tensor([list(ids) or [1]]))


SIZE = state().nbytes


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.leaves(), b.leaves(), strict=True))


def test_the_longest_beginning_is_found():
    cache = StateCache(MODEL)
    for text in ("ab", "abcd", "abX", "ü"):
        cache.put(state(), 1, text_key(text))
    assert cache.find_longest("text", b"abcde")[1] == 4
    assert cache.find_longest("text", b"abc")[1] == 2
    assert cache.find_longest("text", "üb".encode())[1] == 2
    assert cache.find_longest("text", b"b") is None
    assert cache.find_longest("cut", b"abcde") is None


def test_the_least_recently_used_go_first():
    cache = StateCache(MODEL, 3 * SIZE)
    keys = [text_key(text) for text in "abcd"]
    for key in keys[:3]:
        cache.put(state(), 1, key)
    assert cache.get(keys[0])
    cache.put(state(), 1, keys[3])
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert (cache.nbytes, len(cache), cache.evictions) == (3 * SIZE, 3, 1)


def test_a_key_is_replaced_and_bytes_are_counted_once():
    cache = StateCache(MODEL)
    cache.put(state(1), 1, text_key("a"), ids_key("end", [1]))
    cache.put(state(2), 2, text_key("a"))
    assert (len(cache), cache.nbytes) == (1, SIZE)
    assert cache.get(ids_key("end", [1])) is None
    assert cache.get(text_key("a")).tokens == 2


def test_what_is_kept_holds_no_more_memory_than_it_says():
    cache = StateCache(MODEL)
    long = prefill(MODEL, torch.randint(0, 61, (1, 500)))
    cached = cache.put(long, 500, text_key("a"))
    assert sum(x.untyped_storage().nbytes() for x in cached.state.leaves()) == cached.state.nbytes == SIZE


def test_what_is_pushed_out_of_memory_is_found_on_disk_by_this_and_later_stores(tmp_path):
    cache = StateCache(MODEL, 2 * SIZE, tmp_path)
    states = {text: state(i + 1) for i, text in enumerate("abcd")}
    for text, expected in states.items():
        cache.put(expected, 1, text_key(text))
    assert len(cache) == 2
    assert same(cache.find_longest("text", b"abc")[0].state, states["a"])
    cache.close()
    later = StateCache(MODEL, 2 * SIZE, tmp_path)
    for text, expected in states.items():
        assert same(later.find_longest("text", text.encode() + b"...")[0].state, expected)
    other = small_lm(seed=1)
    assert StateCache(other, 2 * SIZE, tmp_path).find_longest("text", b"a") is None


def test_the_disk_is_bounded(tmp_path):
    cache = StateCache(MODEL, 0, tmp_path, disk_limit=4 * SIZE)
    for i in range(12):
        cache.put(state(i + 1), 1, ids_key("end", [i]))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= 4 * SIZE
    assert cache.get(ids_key("end", [0])) is None


def test_the_most_recently_used_survive_a_restart(tmp_path):
    cache = StateCache(MODEL, 9 * SIZE, tmp_path, disk_limit=4 * SIZE)
    for i in range(8):
        cache.put(state(i + 1), 1, ids_key("end", [i]))
    assert cache.get(ids_key("end", [0]))
    cache.close()
    later = StateCache(MODEL, 9 * SIZE, tmp_path, disk_limit=4 * SIZE)
    assert later.get(ids_key("end", [0]))
    assert later.get(ids_key("end", [7]))
    assert later.get(ids_key("end", [1])) is None


def test_closing_ends_when_its_time_is_over(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    cache = StateCache(MODEL, 9 * SIZE, tmp_path)
    write = cache.files.write
    monkeypatch.setattr(cache.files, "write", lambda *args, **options: (clock.advance(4), write(*args, **options)))
    for i in range(8):
        cache.put(state(i + 1), 1, ids_key("end", [i]))
    cache.close(seconds=10.0)
    later = StateCache(MODEL, 9 * SIZE, tmp_path)
    assert [i for i in range(8) if later.get(ids_key("end", [i]))] == [5, 6, 7]


class Clock:
    """`time.monotonic` as the cache sees it, which a test advances."""

    def __init__(self, monkeypatch):
        self._now = 0.0
        monkeypatch.setattr("anymamba.serving.state_cache.time.monotonic", lambda: self._now)

    def advance(self, seconds):
        self._now += seconds


def test_requests_do_not_wait_for_a_slow_disk(tmp_path, monkeypatch):
    cache = StateCache(MODEL, 2 * SIZE, tmp_path)
    write, may_write = cache.files.write, threading.Event()

    def slowly(*arguments, **options):
        assert may_write.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(cache.files, "write", slowly)
    states = [state(i + 1, 5) for i in range(5)]
    for i, cached in enumerate(states):
        cache.put(cached, 2, text_key(f"t{i}"))  # returns although nothing can be written
    assert len(cache) == 2
    cached, length = cache.find_longest("text", b"t0 and more")
    assert (same(cached.state, states[0]), length) == (True, 2)
    may_write.set()
    cache.close()
    again = StateCache(MODEL, 9 * SIZE, tmp_path)
    assert all(same(again.get(text_key(f"t{i}")).state, cached) for i, cached in enumerate(states))
