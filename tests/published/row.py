"""What a row of the evidence is: a repository at a commit, and a function that compares its figures with ours."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.published.clone import Clone
from tests.support import relative_error

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Figure(NamedTuple):
    """A published figure and ours.

    Attributes:
        name: What it measures.
        published: Published figure.
        ours: Our figure.
        agrees: Whether the two agree; None if ours was not computed.
        criterion: What counts as agreement.
    """

    name: str
    published: str
    ours: str
    agrees: bool | None
    criterion: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a row.

    Args:
        dtype: Dtype to compute in; None for the published one.
        is_quick: Whether a row of many models runs a few of them.
    """

    dtype: torch.dtype | None = None
    is_quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published thing.

    Args:
        name: Name on the command line.
        title: What it is, in a line.
        repository: "owner/name" on GitHub.
        commit: Commit that the figures are of.
        compare: Function that returns the figures.
    """

    name: str
    title: str
    repository: str
    commit: str
    compare: Callable[[Clone, Options], list[Figure]]


def near(name: str, published: Tensor, ours: Tensor, floor: float, what: str) -> Figure:
    """Compare tensors by their largest difference, relative to the largest published entry."""
    error = relative_error(ours, published)
    return Figure(name, what, f"differs by {error:.1e}", error <= floor, f"{floor:.1e} of the largest entry")


def same_digits(name: str, published: str, ours: float) -> Figure:
    """Compare a number with the printed digits of the published one."""
    digits = len(published.partition(".")[2])
    agrees = abs(ours - float(published)) <= 0.5 * 10.0**-digits
    criterion = f"the same {digits} printed decimals"
    return Figure(name, published, f"{ours:.{digits + 2}f}", agrees, criterion)


def format_figures(figures: list[Figure]) -> str:
    """Return the figures as a table."""
    lines = [("figure", "published", "ours", "agree", "criterion")]
    words = {True: "yes", False: "NO", None: "-"}
    lines += [(f.name, f.published, f.ours, words[f.agrees], f.criterion) for f in figures]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def run_row(row: Row, clone: Clone, options: Options) -> tuple[list[Figure], float]:
    """Return the figures of a row, and the seconds that they took."""
    start = time.perf_counter()
    with torch.no_grad():
        figures = row.compare(clone, options)
    return figures, time.perf_counter() - start
