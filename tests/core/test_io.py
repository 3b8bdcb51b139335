"""Files are complete or absent, and errors name them."""

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anymamba import Mamba2
from anymamba.core.io import TensorFileReader, atomic_write, parse_json, read_json, write_json, write_tensors

LARGE = {"x": torch.zeros(2**14)}  # 64 KiB


def save_state(path):
    Mamba2(16, d_state=128, headdim=8).init_cache(4).save(path)


WRITERS = {
    "tensors": lambda path: write_tensors(path, LARGE, {}),
    "JSON": lambda path: write_json(path, {"x": "y" * 2**16}),
    "a state": save_state,
}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def test_a_file_is_replaced_as_a_whole(write, tmp_path):
    file = tmp_path / "some.file"
    file.write_bytes(b"before")
    write(file)
    assert file.stat().st_size > 2**16
    assert list(tmp_path.iterdir()) == [file]


def record_calls(write, file):
    """Return the order of syncs and renames, as this process asks the system for them."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        fsync, replace = os.fsync, os.replace

        def record_fsync(descriptor):
            events.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
            fsync(descriptor)

        def record_replace(source, target, **options):
            events.append(("rename", os.fspath(source), os.fspath(target)))
            replace(source, target, **options)

        patch.setattr(os, "fsync", record_fsync)
        patch.setattr(os, "replace", record_replace)
        patch.setattr(os, "rename", record_replace)
        WRITERS[write](file)
    return events


TRACED = """
import sys
from pathlib import Path
from tests.core.test_io import WRITERS
WRITERS[sys.argv[1]](Path(sys.argv[2]))
"""


def trace_calls(write, file):
    """Return the order of writes, syncs and renames in the directory, as the kernel sees them."""
    log = file.parent.parent / "trace"
    calls = "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,ftruncate"
    command = ["strace", "-f", "-y", "-s", "4096", "-e", calls, "-o", str(log), sys.executable, "-c", TRACED]
    subprocess.run([*command, write, str(file)], check=True, capture_output=True)
    events = []
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"(?:\d+ +)?(\w+)\((.*)", line)
        if call is None or str(file.parent) not in line:
            continue
        if call[1].startswith("rename"):
            events.append(("rename", *re.findall(r'"([^"]+)"', call[2])[:2]))
        else:
            name = re.match(r"\d+<([^>]*)>", call[2])[1]
            events.append((call[1].replace("fdatasync", "fsync").replace("pwrite64", "write"), name))
    return events


TRACERS = [record_calls] if sys.platform == "linux" else []
TRACERS += [trace_calls] if shutil.which("strace") else []


@pytest.mark.parametrize("trace", TRACERS)
@pytest.mark.parametrize("write", WRITERS)
def test_data_then_name_then_directory_reach_the_disk(write, trace, tmp_path):
    """In any other order, a power cut could leave an empty or a half-written file under the name."""
    directory = tmp_path / "files"
    directory.mkdir()
    file = directory / "some.file"
    file.write_bytes(b"before")
    events = trace(write, file)
    renames = [event for event in events if event[0] == "rename"]
    assert len(renames) == 1
    temporary = renames[0][1]
    assert renames[0][2] == str(file)
    assert temporary != str(file)
    synced = events.index(("fsync", temporary))
    renamed = events.index(renames[0])
    assert synced < renamed < events.index(("fsync", str(directory)))
    assert all(events.index(event) < synced for event in events if event == ("write", temporary))
    last_write = max((i for i, event in enumerate(events) if event == ("write", temporary)), default=-1)
    assert last_write < synced
    assert not any(event[0] == "write" and event[1] == str(file) for event in events)


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(2.5, dtype=torch.bfloat16),
        "transposed": torch.randn(3, 5).T,
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.arange(7).to(torch.uint16),
        "parameter": torch.nn.Parameter(torch.randn(2, dtype=torch.float64)),
    }
    write_tensors(tmp_path / "a", tensors, {"note": "ä"})
    write_tensors(tmp_path / "b", dict(reversed(tensors.items())), {"note": "ä"})
    loaded = load_file(tmp_path / "a")
    assert loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        assert torch.equal(loaded[name], x), name
        assert loaded[name].dtype == x.dtype
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    write_tensors(tmp_path / "none", {}, {})
    assert load_file(tmp_path / "none") == {}
    with pytest.raises(TypeError, match=r"x must have one of F64, .*got torch.complex64"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex64)}, {})
    assert load_file(tmp_path / "a").keys() == tensors.keys()


def test_a_file_that_need_not_last_is_not_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    write_tensors(tmp_path / "some.file", LARGE, {}, durable=False)
    write_json(tmp_path / "some.json", {}, durable=False)


def fail_to_sync_directories(monkeypatch, number):
    fsync = os.fsync

    def fsync_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files_only)


def test_directories_that_cannot_be_synced_are_no_error(tmp_path, monkeypatch):
    fail_to_sync_directories(monkeypatch, errno.EINVAL)
    write_json(tmp_path / "some.json", {"x": 1})
    assert read_json(tmp_path / "some.json") == {"x": 1}


def test_a_directory_sync_that_fails_says_that_the_new_file_is_in_place(tmp_path, monkeypatch):
    fail_to_sync_directories(monkeypatch, errno.EIO)
    write_json(tmp_path / "some.json", {"x": 1}, durable=False)
    with pytest.raises(OSError, match=r"Input/output error; the new file is in place.*some\.json'") as caught:
        write_json(tmp_path / "some.json", {"x": 2})
    assert caught.value.errno == errno.EIO
    assert read_json(tmp_path / "some.json") == {"x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


def test_a_private_file_is_never_readable_by_others(tmp_path):
    with atomic_write(tmp_path / "a", private=True) as temporary:
        assert temporary.stat().st_mode & 0o077 == 0
        temporary.write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_a_sync_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "some.file"
    file.write_bytes(b"before")

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: .*some\.file'"):
        write_tensors(file, LARGE, {})
    check_untouched(file)


@pytest.mark.parametrize("keep", [0.9, 0.3])
def test_a_reader_of_a_file_that_is_cut_short_raises(tmp_path, keep):
    file = tmp_path / "some.file"
    tensors = {"a": torch.arange(1000), "b": torch.randn(3, 4), "none": torch.zeros(0, 3)}
    write_tensors(file, tensors, {"note": "x"})
    reader = TensorFileReader(file)
    assert set(reader.entries) == set(tensors)
    for name, x in tensors.items():
        raw = torch.empty(x.nbytes, dtype=torch.uint8)
        reader.read_into(raw, name)
        assert torch.equal(raw.view(x.dtype).view(x.shape), x)
    raw = torch.empty(16, dtype=torch.uint8)
    reader.read_into(raw, "a", 8 * 500)
    assert raw.view(torch.int64).tolist() == [500, 501]
    reader.check_complete()
    os.truncate(file, int(keep * file.stat().st_size))
    with pytest.raises(ValueError, match=r"some\.file: should have \d+ bytes, got \d+: the file was cut short"):
        reader.check_complete()
    with pytest.raises(ValueError, match=r"some\.file: a should have 8000 bytes, got \d+: the file was cut short"):
        reader.read_into(torch.empty(8000, dtype=torch.uint8), "a")
    reader.close()
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        TensorFileReader(file)


def fail_to_write(file, number, named):
    with atomic_write(file) as temporary:
        temporary.write_bytes(b"half")
        raise OSError(number, os.strerror(number), *([str(temporary)] if named else []))


def check_untouched(file):
    assert file.read_bytes() == b"before"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_failed_write_names_the_file_and_leaves_the_old_one(number, tmp_path):
    """Whether the error names no file, or the temporary one."""
    file = tmp_path / "some.file"
    file.write_bytes(b"before")
    for named in (False, True):
        with pytest.raises(OSError, match=r"some\.file") as caught:
            fail_to_write(file, number, named)
        assert caught.value.errno == number
        assert caught.value.filename == str(file)
        check_untouched(file)


def test_an_error_that_is_of_another_file_names_that_one(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "copy"):
        (tmp_path / "source").read_bytes()
    assert caught.value.filename == str(tmp_path / "source")


FULL = """
import resource, sys
from pathlib import Path
from tests.core.test_io import WRITERS
resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))  # from here on every larger file fails as on a full disk
for write in WRITERS.values():
    try:
        write(Path(sys.argv[1]))
    except OSError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit for files")
def test_a_disk_that_takes_no_more_is_an_error_that_names_the_file(tmp_path):
    file = tmp_path / "some.file"
    file.write_bytes(b"before")
    done = subprocess.run([sys.executable, "-c", FULL, file], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(WRITERS)
    assert all(line == f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: '{file}'" for line in lines)
    check_untouched(file)


@pytest.fixture
def full_disk(tmp_path):
    """Mount a file system of 48 KiB, where the machine allows it."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_is_an_error_that_names_the_file(write, full_disk):
    file = full_disk / "some.file"
    file.write_bytes(b"before")
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: .*some\.file'"):
        write(file)
    check_untouched(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not readable JSON"),
        (b"\xff", "not readable JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**6, "nested too deeply"),
        (b'{"a": ' + b"9" * 10**5 + b"}", "not readable JSON"),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_anything_but_a_json_object_is_rejected_in_one_line(content, message, tmp_path):
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"some\.json: .*{message}") as caught:
        read_json(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_json_is_read_as_it_is():
    assert parse_json('{"a": [1, 2.5, null, "ä"]}', "here") == {"a": [1, 2.5, None, "ä"]}
    assert parse_json('"ä"'.encode(), "here") == "ä"
