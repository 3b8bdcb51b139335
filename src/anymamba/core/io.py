"""Files that are either complete or absent, and errors that name the file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_DEEPEST = 64


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it if the block succeeds and removed if it does not.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise with_filename(target, error, temporary) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def with_filename(path: Path, error: OSError, temporary: Path | None = None) -> OSError:
    """The error of a write to `path`, with its name if the error names no file or a temporary one."""
    if error.errno is None or error.filename not in (None, temporary, str(temporary)):
        return error
    return OSError(error.errno, error.strerror or os.strerror(error.errno), str(path))


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory during the block; the system unlocks it when a process dies.

    Without locks (Windows, some network file systems), or without a directory, no process is kept out.

    Raises:
        ValueError: another process holds the lock.
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


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    with atomic_write(path) as temporary:
        save_tensors(temporary, tensors, metadata)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file under this very name, with the permissions of the umask.

    Raises:
        OSError: it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    except SafetensorError as error:  # how the library reports a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: cannot be written ({error})") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(mode)  # the library may create a file there that no other user can read


@contextmanager
def open_tensors(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Iterator[Any]:
    """Open a safetensors file, as `safetensors.safe_open`; on the CPU its tensors are views of the file.

    Raises:
        ValueError: the file is missing, cut short, or of another format.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, copied into memory.

    Raises:
        ValueError: the file is missing, cut short, or of another format.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is not JSON, or not an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not readable JSON ({error})") from error
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(text: str | bytes, where: object = "") -> Any:
    """The value of JSON; `where`, if given, begins the error message.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a number with too many digits.
    """
    begin = f"{where}: " if where else ""
    try:
        value = json.loads(text)
        if _is_deep(value):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{begin}not readable JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"{begin}not readable JSON ({error})") from error
    return value


def _is_deep(value: Any) -> bool:
    """Whether tables and lists are nested so deeply that copying or writing them may fail."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
    return bool(level)


def write_json(path: str | os.PathLike[str], value: dict[str, Any], *, durable: bool = False) -> None:
    """Write a JSON object, indented; a `durable` one is on the disk before it replaces what was there."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        if durable:
            fsync(temporary)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    if path.is_dir() and os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: str | os.PathLike[str]) -> str:
    """A checksum of a file's bytes; "missing" if the file does not exist."""
    if not Path(path).is_file():
        return "missing"
    digest = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
