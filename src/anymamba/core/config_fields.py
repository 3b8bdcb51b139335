"""Names and values of config fields: one validator for keywords, JSON and TOML tables and command lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean data.sources?" if names among `known` are similar to `name`, else an empty string.

    A dotted name has a section. Names with the same last part come first, then similar names of the same section, then
    names that are similar as a whole. Letter case, leading dashes, and dashes for underscores are ignored.
    """
    similar = _similar_names(name, list(known))
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def _similar_names(name: str, known: list[str]) -> list[str]:
    section, last = split_section(name)
    if same_last := [other for other in known if split_section(other)[1] == last]:
        return same_last
    siblings = {split_section(other)[1]: other for other in known if split_section(other)[0] == section}
    if siblings:  # compared as a whole, all names of the section would be similar
        return [siblings[other] for other in difflib.get_close_matches(last, siblings, n=3, cutoff=0.6)]
    wholes = {".".join(split_section(other)): other for other in known}
    return [wholes[other] for other in difflib.get_close_matches(f"{section}.{last}", wholes, n=3, cutoff=0.75)]


def split_section(name: str) -> tuple[str, str]:
    """Return the section of a name and its last part, in one spelling for files and the command line."""
    section, _, last = name.lstrip("-").lower().replace("-", "_").rpartition(".")
    return section, last
