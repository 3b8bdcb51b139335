"""Repositories on the hub, through `huggingface_hub`, which keeps what it has fetched."""

from __future__ import annotations

import os
from pathlib import Path


def is_repository_id(name: str | os.PathLike[str]) -> bool:
    """Whether a name that is no path reads as "owner/name"."""
    text = str(name)
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith("/")


def fetch(name: str, *patterns: str, instead: str) -> Path:
    """The directory with those files of a repository that match the patterns.

    Args:
        name: "owner/name".
        patterns: of file names.
        instead: what the user may pass instead, for the error.

    Raises:
        ValueError: the library is missing, or the files cannot be had.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"{name}: no such path; to fetch it from the hub, install huggingface_hub (pip install 'anymamba[hf]')"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{name}: no such path, and the hub did not give it ({reason}); pass {instead} instead"
        ) from error
