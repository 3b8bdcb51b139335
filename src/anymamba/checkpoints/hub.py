"""Repositories on the hub, through `huggingface_hub`, which caches what it has fetched."""

from __future__ import annotations

import os
from pathlib import Path

_INSTALL = "install huggingface_hub (pip install 'anymamba[hf]')"


def is_repository_id(name: str | os.PathLike[str]) -> bool:
    """Return whether a name that is not a path reads as "owner/name"."""
    text = str(name)
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/")


def fetch(name: str, *patterns: str, instead: str) -> Path:
    """Return a directory with those files of a repository that match the patterns; raise `ValueError` if it fails.

    `instead` says in the error what the user may pass instead.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(f"{name}: no such path; to fetch it from the hub, {_INSTALL}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{name}: no such path, and it could not be fetched from the hub ({reason}); pass {instead} instead"
        ) from error


def upload(directory: Path, name: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Write the files of a directory to a repository in one commit, and return the address of the commit.

    The repository is created if it does not exist, with the owner's default if `private` is None. A `token` of None is
    that of `hf auth login`. If the hub does not accept the files, nothing is written.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(f"{name}: to write to the hub, {_INSTALL}") from error
    try:
        api = HfApi(token=token)
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload model with anymamba"))
    except Exception as error:  # the errors of a network are those of the library in use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: the hub did not accept it ({reason})") from error
