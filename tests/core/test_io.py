"""Files are complete or absent, and errors name them."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from anymamba import Mamba2
from anymamba.core.io import atomic_write, parse_json, read_json, write_json, write_tensors

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
    """A file system of 48 KiB, where the machine lets us make one."""
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
def test_anything_but_a_json_object_is_refused_in_one_line(content, message, tmp_path):
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"some\.json: .*{message}") as caught:
        read_json(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_json_is_read_as_it_is():
    assert parse_json('{"a": [1, 2.5, null, "ä"]}', "here") == {"a": [1, 2.5, None, "ä"]}
    assert parse_json('"ä"'.encode(), "here") == "ä"
