"""Pieces of source of the standard library, and the package that each is from; no file is in two parts."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
LENGTH = 256  # characters of a piece
MOST = 250  # pieces of a package, in both parts together


class Chunk(NamedTuple):
    """A piece of source."""

    text: str
    package: str


def read_chunks(packages: Sequence[str] = PACKAGES, most: int = MOST) -> tuple[list[Chunk], list[Chunk]]:
    """Pieces for training, and pieces of other files for testing: of every fifth file of a package.

    Raises:
        ValueError: a package has no files here.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, test = list[Chunk](), list[Chunk]()
    for package in packages:
        files = sorted(path for path in (root / package).rglob("*.py") if path.stat().st_size > 2 * LENGTH)
        if len(files) < 5:
            raise ValueError(f"{root / package}: expected at least 5 files of Python, got {len(files)}")
        others = [path for i, path in enumerate(files) if i % 5]
        for part, chosen, share in ((training, others, 0.8), (test, files[::5], 0.2)):
            found = [chunk for path in chosen for chunk in _cut(path, package)]
            order = np.random.default_rng(0).permutation(len(found))[: round(share * most)]
            part += [found[i] for i in sorted(order)]
    return training, test


def _cut(path: Path, package: str) -> list[Chunk]:
    """A file in pieces that begin at a line; the packages' names are removed."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    for name in PACKAGES:
        text = text.replace(name, "_")
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= LENGTH:
            pieces.append(Chunk(piece[:LENGTH], package))
            piece = ""
    return pieces


def write_chunks(chunks: Sequence[Chunk], path: Path) -> None:
    """As JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chunk._asdict()) + "\n" for chunk in chunks), encoding="utf-8")
