"""Files that are either complete or absent, also after a power cut, and errors that name the file.

Every file is written under a temporary name next to its own. `atomic_write` puts its data on the disk, renames it, and
then puts the directory on the disk: at any moment there is either the former file or the new one, and when the call
returns, the new one survives a power cut.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# The safetensors format's names of the dtypes that it shares with torch.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAX_NESTING = 64
_CHUNK_BYTES = 2**20
# Errors of systems and file systems on which a directory cannot be synced.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """Yield a temporary name next to `path`, which is renamed to it if the block succeeds, and removed if it fails.

    A `durable` file survives a power cut from then on. False saves time for a file in a directory that is synced as a
    whole later. Only its owner can read a `private` file. An earlier file is unchanged if an `OSError` is raised,
    unless that says that the new one is in place: then the disk failed to sync the directory.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        if private:
            temporary.touch(0o600)
        yield temporary
        if durable:
            fsync(temporary)
        temporary.replace(target)
        if durable:
            _sync_renamed(target)
    except OSError as error:
        raise with_filename(target, error, temporary) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_renamed(target: Path) -> None:
    """Put the new name of a complete file on the disk."""
    try:
        fsync(target.parent)
    except OSError as error:
        message = f"{error.strerror}; the new file is in place, but may not survive a power cut"
        raise OSError(error.errno, message, str(target)) from error


def with_filename(path: Path, error: OSError, temporary: Path | None = None) -> OSError:
    """Return the error of a write to `path` with that name, if the error names no file or the temporary one."""
    if error.errno is None or error.filename not in (None, temporary, str(temporary)):
        return error
    return OSError(error.errno, error.strerror or os.strerror(error.errno), str(path))


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the names in a directory, would survive a power cut.

    Directories are skipped on systems that cannot sync them.
    """
    is_directory = path.is_dir()
    if is_directory and os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_directory and error.errno in _NO_DIRECTORY_SYNC):
            raise


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory during the block; the system unlocks it when a process dies.

    Raises `ValueError` if another process holds the lock. Without locks (Windows, some network file systems), or
    without a directory, no process is kept out.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context((directory / ".lock").open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{directory}: another process is using this run; wait until it ends, or name another directory"
                ) from error
        yield


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str], *, durable: bool = True
) -> None:
    """Write a safetensors file with `metadata` in its header, by `atomic_write`."""
    with atomic_write(path, durable=durable) as temporary:
        save_tensors(temporary, tensors, metadata)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file under this very name; the same tensors give the same bytes.

    The library's own function would write under a further temporary name, which a killed process leaves behind. Raises
    `TypeError` for a dtype that the format does not have.
    """
    # 1) The header: wide dtypes first, so that every tensor is aligned, and padding to a multiple of 8 bytes.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, x in ordered:
        if x.dtype not in DTYPE_NAMES:
            raise TypeError(f"{path}: {name} must have one of {', '.join(DTYPE_NAMES.values())}, got {x.dtype}")
        end = begin + x.numel() * x.element_size()
        header[name] = {"dtype": DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # 2) The file: the length of the header, the header, the tensors.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in ordered:
            file.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextmanager
def open_tensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Iterator[Any]:
    """Open a safetensors file, as `safetensors.safe_open`; on the CPU its tensors are views of the mapped file.

    Raises `ValueError` if the file is missing, shorter than its header says, or of another format. If it is cut short
    later, reading a view ends the process (`TensorFileReader` reads copies instead, and raises).
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def check_size(path: Path, size: int, expected: int) -> None:
    """Raise `ValueError` if a file has fewer bytes than expected: reading a mapped one would end the process."""
    if size < expected:
        raise ValueError(f"{path}: should have {expected} bytes, got {size}: the file was cut short")


class TensorFileReader:
    """A safetensors file whose tensors are read on demand, as bytes, and never mapped.

    A file that is cut short while it is in use raises `ValueError`, where a mapped one would end the process.

    Attributes:
        path: Name of the file.
        entries: Entry of each tensor in the header, by name: "dtype", "shape", and "data_offsets".
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which is checked as in `open_tensors`."""
        with open_tensors(path):
            pass
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._close = weakref.finalize(self, os.close, descriptor)
        self._file = FileIO(descriptor, closefd=False)
        self._lock = threading.Lock()
        header_size = int.from_bytes(self._file.read(8), "little")
        header = parse_json(self._file.read(header_size), path)
        self.entries: dict[str, Any] = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._data_start = 8 + header_size

    def close(self) -> None:
        """Close the file, which otherwise happens when the reader is no longer used."""
        self._close()

    def check_complete(self) -> None:
        """Raise `ValueError` if the file has become shorter than its header says."""
        end = self._data_start + max((entry["data_offsets"][1] for entry in self.entries.values()), default=0)
        check_size(self.path, os.fstat(self._file.fileno()).st_size, end)

    def read_into(self, raw: Tensor, name: str, begin: int = 0) -> None:
        """Fill a tensor of bytes with those of the tensor `name`, from its byte `begin` on."""
        buffer: memoryview = raw.numpy().data
        filled = 0
        with self._lock:
            self._file.seek(self._data_start + self.entries[name]["data_offsets"][0] + begin)
            while filled < len(buffer) and (size := self._file.readinto(buffer[filled:])):
                filled += size
        if filled != len(buffer):
            raise ValueError(
                f"{self.path}: {name} should have {len(buffer)} bytes, got {filled}: the file was cut short"
            )


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object; raise `ValueError` if the file is not JSON, or holds something else."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not readable JSON ({error})") from error
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(text: str | bytes, where: object = "") -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` with `where` (such as the name of a file) for text that is not JSON, is nested too deeply, or
    has a number with too many digits.
    """
    begin = f"{where}: " if where else ""
    try:
        value = json.loads(text)
        if _is_nested_too_deeply(value):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{begin}not readable JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{begin}not readable JSON ({error})") from error
    return value


def _is_nested_too_deeply(value: Any) -> bool:
    """Return whether tables and lists are nested so deeply that copying or writing them may fail."""
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
    return bool(level)


def write_json(path: str | os.PathLike[str], value: dict[str, Any], *, durable: bool = True) -> None:
    """Write a JSON object, indented, by `atomic_write`."""
    with atomic_write(path, durable=durable) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def digest_file(path: str | os.PathLike[str]) -> str:
    """Return a checksum of a file's bytes; "missing" if the file does not exist."""
    if not Path(path).is_file():
        return "missing"
    with Path(path).open("rb") as file:
        return digest_rest(file)


def digest_rest(file: IO[bytes]) -> str:
    """Return a checksum of the bytes of an open file from its position on."""
    digest = hashlib.blake2b(digest_size=16)
    while block := file.read(_CHUNK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def check_tensor_names(where: str, stored: Iterable[str], expected: Iterable[str]) -> None:
    """Raise `ValueError` if expected tensors are missing from a file, or others are there."""
    stored_names, expected_names = dict.fromkeys(stored), dict.fromkeys(expected)
    if missing := [name for name in expected_names if name not in stored_names]:
        raise ValueError(f"{where} lacks {', '.join(missing[:5])}")
    if unknown := [name for name in stored_names if name not in expected_names]:
        raise ValueError(f"{where} holds unexpected tensors: {', '.join(map(repr, unknown[:5]))}")
