import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from anymamba.generation.prefill import prefill
from anymamba.serving.sessions import (
    SessionConflictError,
    SessionDamagedError,
    SessionInUseError,
    SessionLimitError,
    SessionModelError,
    SessionStore,
)
from anymamba.serving.state_cache import StateCache, text_key
from tests.core.test_io import fail_to_sync_directories
from tests.models.cases import small_lm

MODEL = small_lm()


def state(*ids):
    return prefill(MODEL, torch.tensor([list(ids) or [1]]))


SIZE = state().nbytes


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.leaves(), b.leaves(), strict=True))


def store(directory=None, limit=2**30, model=MODEL, cache=None, **options):
    return SessionStore(model, StateCache(model) if cache is None else cache, limit, directory, **options)


def turn(sessions, name, tokens, *ids, texts=()):
    """Continue a session with a request that ends with this state."""
    lease = sessions.acquire(name)
    try:
        sessions.load(lease)
        sessions.commit(lease, state(*ids), tokens, texts)
    finally:
        sessions.release(lease)


def tokens(sessions, name):
    session = sessions.find(name)
    return None if session is None else session.tokens


def test_nothing_that_is_cached_displaces_a_session():
    cache = StateCache(MODEL, 2 * SIZE)
    sessions = store(cache=cache, limit=2 * SIZE)
    key = text_key("the same text")
    turn(sessions, "mine", 1, 7, texts=(key,))
    for i in range(5):
        cache.put(state(i + 1), 2, key)
        cache.put(state(i + 1), 2, text_key(str(i)))
    assert same(sessions.find("mine").state, state(7))
    assert cache.nbytes + sessions.nbytes <= 2 * SIZE


def test_sessions_without_a_directory_stay_in_memory_up_to_its_limit():
    cache = StateCache(MODEL, 2 * SIZE)
    sessions = store(cache=cache, limit=2 * SIZE)
    turn(sessions, "a", 1)
    turn(sessions, "b", 1)
    cache.put(state(), 1, text_key("x"))
    assert cache.get(text_key("x")) is None
    with pytest.raises(SessionLimitError):
        turn(sessions, "c", 1)
    turn(sessions, "b", 2)
    assert [tokens(sessions, name) for name in "abc"] == [1, 2, None]
    assert sessions.delete("a")
    turn(sessions, "c", 3)
    assert tokens(sessions, "c") == 3


def test_memory_for_a_new_session_is_reserved_before_its_first_token():
    sessions = store(limit=SIZE)
    first, second = sessions.acquire("a"), sessions.acquire("b")
    sessions.load(first)
    with pytest.raises(SessionLimitError):
        sessions.load(second)
    sessions.commit(first, state(), 1)
    assert tokens(sessions, "a") == 1


def test_a_session_is_leased_to_one_request_at_a_time():
    sessions = store()
    lease = sessions.acquire("a")
    with pytest.raises(SessionInUseError):
        sessions.acquire("a")
    sessions.release(lease)
    sessions.acquire("a")


def test_of_two_servers_one_replaces_a_session_and_the_other_is_told(tmp_path):
    ours, theirs = store(tmp_path), store(tmp_path)
    turn(ours, "shared", 4, 4)
    first, second = ours.acquire("shared"), theirs.acquire("shared")
    ours.load(first)
    theirs.load(second)
    theirs.commit(second, state(1, 5), 15)
    with pytest.raises(SessionConflictError, match="nothing of this request was added"):
        ours.commit(first, state(1, 1), 11)
    for sessions in (ours, theirs, store(tmp_path)):
        assert (tokens(sessions, "shared"), same(sessions.find("shared").state, state(1, 5))) == (15, True)


def test_of_two_servers_that_begin_a_session_one_is_told(tmp_path):
    ours, theirs = store(tmp_path), store(tmp_path)
    first, second = ours.acquire("new"), theirs.acquire("new")
    ours.load(first)
    theirs.load(second)
    ours.commit(first, state(), 1)
    with pytest.raises(SessionConflictError):
        theirs.commit(second, state(), 2)
    assert tokens(theirs, "new") == 1


def test_a_session_that_another_server_continued_is_read_again(tmp_path):
    ours, theirs = store(tmp_path), store(tmp_path)
    turn(ours, "shared", 1, 1)
    turn(theirs, "shared", 2, 2)
    turn(ours, "shared", 3, 3)
    assert (tokens(ours, "shared"), tokens(theirs, "shared")) == (3, 3)
    assert theirs.delete("shared")
    assert tokens(ours, "shared") is None


def test_commits_of_many_servers_at_once_lose_nothing(tmp_path):
    turn(store(tmp_path), "shared", 0)
    done = []

    def work():
        sessions = store(tmp_path)
        for _ in range(8):
            lease = sessions.acquire("shared")
            sessions.load(lease)
            try:
                sessions.commit(lease, state(), lease.session.tokens + 1)
                done.append(1)
            except SessionConflictError:
                pass
            sessions.release(lease)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens(store(tmp_path), "shared") == len(done) > 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_commit_that_fails_leaves_the_session_as_it_was(tmp_path, monkeypatch, on_disk):
    sessions = store(tmp_path if on_disk else None)
    turn(sessions, "mine", 4, 4)
    lease = sessions.acquire("mine")
    sessions.load(lease)
    broken = state(1, 5)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if on_disk:
            patch.setattr("anymamba.core.cache_io.save_tensors", fail)
        else:
            patch.setattr(sessions, "_check_memory", fail)
        with pytest.raises(OSError, match="No space left"):
            sessions.commit(lease, broken, 15)
    assert (tokens(sessions, "mine"), same(sessions.find("mine").state, state(4))) == (4, True)
    sessions.commit(lease, broken, 15)  # a retry appends once
    assert tokens(sessions, "mine") == 15
    assert [file.name for file in tmp_path.rglob("*.tmp")] == []


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("has_links", [False, True])
def test_a_change_whose_directory_cannot_be_synced_is_not_made(tmp_path, monkeypatch, is_new, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", raise_io_error)
    sessions = store(tmp_path)
    if not is_new:
        turn(sessions, "mine", 4, 4)
    before, files = (None if is_new else 4), sorted(tmp_path.rglob("*"))
    lease = sessions.acquire("mine")
    sessions.load(lease)
    with monkeypatch.context() as patch:
        fail_to_sync_directories(patch, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            sessions.commit(lease, state(1, 5), 15)
        assert [tokens(s, "mine") for s in (sessions, store_without_sync(patch, tmp_path))] == [before] * 2
        if not is_new:
            with pytest.raises(OSError, match="Input/output error"):
                sessions.delete("mine")
        assert sorted(tmp_path.rglob("*")) == files
    sessions.commit(lease, state(1, 5), 15)  # neither is the request void, nor does a retry append twice
    sessions.release(lease)
    assert [tokens(s, "mine") for s in (sessions, store(tmp_path))] == [15, 15]


def raise_io_error(*_, **__):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def store_without_sync(patch, directory):
    """Return the sessions as another server opens them, which need not sync to read."""
    with patch.context() as inner:
        inner.setattr(os, "fsync", lambda descriptor: None)
        return store(directory)


@pytest.mark.parametrize("error", ["utime", "_evict"])
def test_what_fails_after_a_commit_does_not_undo_it(tmp_path, monkeypatch, error):
    sessions = store(tmp_path, disk_limit=SIZE // 2)
    monkeypatch.setattr(*(os, "utime") if error == "utime" else (sessions.files, "_evict"), raise_io_error)
    turn(sessions, "mine", 1)
    assert tokens(store(tmp_path), "mine") == 1


def test_sessions_survive_a_clock_that_jumps(tmp_path, monkeypatch):
    """The least recently used sessions are dropped first, whatever the clock says."""
    clock = 1.8e9
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock))
    sessions, other = (store(tmp_path, disk_limit=4 * SIZE) for _ in range(2))
    for jump in (0, 3e9, -4e9, 10, -1e8, 1e9):
        clock += jump
        for i in range(6):
            turn(sessions, str(i), i + 1)
        assert [tokens(store(tmp_path), str(i)) for i in (4, 5)] == [5, 6]
        turn(other, "other", 1)  # which does not know the times of the first server's files
        assert tokens(store(tmp_path), "other") == 1


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_session_deleted_during_a_request_stays_deleted(tmp_path, on_disk, is_new):
    sessions = store(tmp_path if on_disk else None)
    if not is_new:
        turn(sessions, "mine", 1)
    lease = sessions.acquire("mine")
    sessions.load(lease)
    assert sessions.delete("mine")
    sessions.commit(lease, state(), 2)
    sessions.release(lease)
    assert tokens(sessions, "mine") is None
    assert not sessions.delete("mine")


def test_what_ends_after_its_request_is_not_committed():
    sessions = store()
    lease = sessions.acquire("mine")
    sessions.load(lease)
    sessions.release(lease)
    sessions.commit(lease, state(), 2)
    assert tokens(sessions, "mine") is None


def test_a_session_of_other_weights_says_so_and_can_be_deleted(tmp_path):
    turn(store(tmp_path), "mine", 1)
    for model in (small_lm(seed=1), small_lm("Mamba3")):
        other = store(tmp_path, model=model)
        lease = other.acquire("mine")
        with pytest.raises(SessionModelError, match="other weights"):
            other.load(lease, ignore_damage=True)
        with pytest.raises(SessionModelError):
            other.find("mine")
    assert tokens(store(tmp_path), "mine") == 1
    assert other.delete("mine")
    assert tokens(store(tmp_path), "mine") is None


@pytest.mark.parametrize("position", [-1, 20])
def test_a_damaged_session_is_reported_and_replaced_only_on_request(tmp_path, position):
    turn(store(tmp_path), "mine", 1)
    (file,) = tmp_path.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    sessions = store(tmp_path)
    lease = sessions.acquire("mine")
    with pytest.raises(SessionDamagedError):
        sessions.load(lease)
    sessions.load(lease, ignore_damage=True)
    sessions.commit(lease, state(), 5)
    assert tokens(sessions, "mine") == 5


def test_a_session_keeps_the_keys_of_its_conversation(tmp_path):
    turn(store(tmp_path), "mine", 2, 3, 4, texts=(text_key("conversation"), text_key("ü")))
    assert store(tmp_path).find("mine").texts == (text_key("conversation"), text_key("ü"))


def test_files_of_sessions_are_bounded_and_private(tmp_path):
    sessions = store(tmp_path, disk_limit=4 * SIZE)
    for i in range(12):
        turn(sessions, str(i), 1)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 4 * SIZE
    assert not any(file.stat().st_mode & 0o077 for file in files)
    assert tokens(sessions, "11") == 1


def test_what_a_killed_server_left_is_removed_and_counted(tmp_path):
    turn(store(tmp_path), "mine", 1)
    cache = StateCache(MODEL, 0, tmp_path)
    cache.put(state(), 1, text_key("a"))
    cache.close()
    for directory in {file.parent for file in tmp_path.rglob("*.safetensors")}:
        (directory / ".x.safetensors.123.tmp").write_bytes(b"\0" * 1000)
    sessions, cache = store(tmp_path), StateCache(MODEL, 0, tmp_path)
    assert (sessions.files.unfinished_files, cache.files.unfinished_files) == (1, 1)
    assert not list(tmp_path.rglob("*.tmp"))
    assert (tokens(sessions, "mine"), cache.get(text_key("a")).tokens) == (1, 1)


@pytest.fixture
def system_calls(monkeypatch):
    """Return the names of synced, renamed and removed files, in order."""
    calls, opened = [], {}

    def watch(name):
        call = getattr(os, name)

        def watched(target, *args, **kwargs):
            path = opened[target] if name == "fsync" else target
            result = call(target, *args, **kwargs)
            if name == "open":
                opened[result] = path
            else:
                calls.append((name, Path(path).name))
            return result

        monkeypatch.setattr(os, name, watched)

    for name in ("open", "fsync", "replace", "unlink"):
        watch(name)
    return calls


def session_calls(system_calls):
    """Leave out cached prompts, which another test's server may still be writing."""
    return [call for call in system_calls if not call[1].startswith((".text-", "text-"))]


def test_a_session_is_on_the_disk_before_it_replaces_the_previous_one(tmp_path, system_calls):
    sessions = store(tmp_path)
    for _ in range(2):
        system_calls.clear()
        turn(sessions, "mine", 1)
        calls = [call for call in session_calls(system_calls) if not call[1].endswith(".earlier.tmp")]
        (synced, data), (renamed, temporary), (synced_too, directory) = calls[:3]
        assert (synced, renamed, synced_too) == ("fsync", "replace", "fsync")
        assert data == temporary != directory == "sessions"
    system_calls.clear()
    sessions.delete("mine")
    calls = [call for call, name in session_calls(system_calls) if not name.endswith(".earlier.tmp")]
    assert calls == ["unlink", "fsync"]
