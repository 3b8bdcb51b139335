"""Clones of repositories: where they are, and the files of one commit as text, arrays and weights.

Files are read from git's objects, so a bare clone and one with a work tree are the same, and whatever is checked out
does not matter. A file that is not the expected one raises `ValueError` in one line; one that a partial clone does not
have raises `MissingFileError`.
"""

import io
import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

MAX_DEPTH = 4  # levels below the given directory at which clones are looked for


class MissingFileError(ValueError):
    """A file that the commit has and the clone does not."""


class Clone:
    """A git directory, read at one commit."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory = directory
        self.commit = commit

    def list_files(self, prefix: str = "") -> list[str]:
        """Return the paths of the commit that begin with `prefix`."""
        names = run_git(self.directory, "ls-tree", "-r", "-z", "--name-only", self.commit).decode().split("\0")
        return [name for name in names if name and name.startswith(prefix)]

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        try:
            return run_git(self.directory, "cat-file", "blob", f"{self.commit}:{path}")
        except subprocess.CalledProcessError as error:
            listed = path in self.list_files()
            reason = "this clone is partial and lacks it" if listed else "the commit has no such file"
            raise MissingFileError(f"{path}: {reason}") from error

    def read_text(self, path: str) -> str:
        """Return a UTF-8 file's text."""
        try:
            return self.read(path).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error

    def read_json(self, path: str, *fields: str) -> dict:
        """Return a JSON object that has these fields."""
        try:
            content = json.loads(self.read_text(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        return check_fields(path, content, *fields)

    def read_table(self, path: str, columns: int) -> np.ndarray:
        """Return numbers separated by spaces, (rows, columns), in float64."""
        try:
            return np.array(self.read(path).split(), dtype=np.float64).reshape(-1, columns)
        except ValueError as error:
            raise ValueError(f"{path}: expected lines of {columns} numbers ({error})") from error

    def read_arrays(self, path: str, *names: str) -> dict[str, np.ndarray]:
        """Return the arrays of a .npz file, which must have these; arrays of Python objects are rejected."""
        try:
            with np.load(io.BytesIO(self.read(path)), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except MissingFileError:
            raise
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a .npz file of plain arrays ({first_line(error)})") from error
        return check_fields(path, arrays, *names)

    def read_pickle(self, path: str, *fields: str) -> dict:
        """Return a dict of tensors and plain values that torch saved; any other pickle is rejected unread."""
        content = self.read(path)
        try:
            value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            # The unpickler and the archive reader raise errors of many kinds.
            raise ValueError(f"{path}: not a file of tensors and plain values ({first_line(error)})") from error
        return check_fields(path, value, *fields)


def check_fields(path: str, content: object, *fields: str) -> dict:
    """Return a dict that has the fields; raise `ValueError` for anything else."""
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a table, got {type(content).__name__}")
    if missing := [name for name in fields if name not in content]:
        raise ValueError(f"{path}: expected {', '.join(fields)}, lacks {', '.join(missing)}")
    return content


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def load_weights(path: str, module: torch.nn.Module, state: dict) -> None:
    """Load a state dict whose names and shapes are those of the module; raise `ValueError` in one line otherwise."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    different = [name for name in sorted(expected.keys() | stored.keys()) if expected.get(name) != stored.get(name)]
    if different:
        name = different[0]
        raise ValueError(
            f"{path}: {len(different)} tensors are not the model's: {name} should have the shape "
            f"{expected.get(name, 'none')}, has {stored.get(name, 'none')}"
        )
    module.load_state_dict(state)


def find_clone(directory: Path, commit: str) -> Clone | None:
    """Return the clone below a directory that has the commit; None if none has."""
    for candidate in _git_directories(directory, MAX_DEPTH):
        try:
            run_git(candidate, "cat-file", "-e", f"{commit}^{{commit}}")
        except subprocess.CalledProcessError:
            continue
        return Clone(candidate, commit)
    return None


def run_git(directory: Path, *arguments: str) -> bytes:
    """Return the output of a git command on a directory."""
    environment = {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-c", "safe.directory=*", "-C", str(directory), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def _git_directories(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / ".git").exists() or all((directory / name).exists() for name in ("HEAD", "objects", "refs")):
        yield directory
    elif depth > 0 and directory.is_dir():
        for child in sorted(path for path in directory.iterdir() if path.is_dir()):
            yield from _git_directories(child, depth - 1)
