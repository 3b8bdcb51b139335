"""Chunks of the standard library's source, with the package that each is from; no file is in both parts."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
LENGTH = 256  # characters of a chunk
MAX_CHUNKS = 250  # of a package, in both parts together


class Chunk(NamedTuple):
    """A chunk of source code."""

    text: str
    package: str


def read_chunks(packages: Sequence[str] = PACKAGES, max_chunks: int = MAX_CHUNKS) -> tuple[list[Chunk], list[Chunk]]:
    """Return chunks for training, and chunks of every fifth file of a package for testing.

    Raises:
        ValueError: A package has too few files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, test = list[Chunk](), list[Chunk]()
    for package in packages:
        files = sorted(path for path in (root / package).rglob("*.py") if path.stat().st_size > 2 * LENGTH)
        if len(files) < 5:
            raise ValueError(f"{root / package}: expected at least 5 files of Python, got {len(files)}")
        others = [path for i, path in enumerate(files) if i % 5]
        for part, part_files, fraction in ((training, others, 0.8), (test, files[::5], 0.2)):
            chunks = [chunk for path in part_files for chunk in _cut(path, package)]
            order = np.random.default_rng(0).permutation(len(chunks))[: round(fraction * max_chunks)]
            part += [chunks[i] for i in sorted(order)]
    return training, test


def _cut(path: Path, package: str) -> list[Chunk]:
    """Cut a file into chunks that begin at a line, and remove the names of the packages."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    for name in PACKAGES:
        text = text.replace(name, "_")
    chunks = list[Chunk]()
    chunk = ""
    for line in text.splitlines(keepends=True):
        chunk += line
        if len(chunk) >= LENGTH:
            chunks.append(Chunk(chunk[:LENGTH], package))
            chunk = ""
    return chunks


def write_chunks(chunks: Sequence[Chunk], path: Path) -> None:
    """Write chunks as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chunk._asdict()) + "\n" for chunk in chunks), encoding="utf-8")
