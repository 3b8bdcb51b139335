"""Results as a Markdown table and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import CaseResult, DisagreementError

_HEADER = ("case", "contender", "median ms", "spread ms", "ratio", "peak MiB")


@dataclass(kw_only=True)
class Report:
    """All results of one run of the program."""

    command: str
    machine: dict[str, Any]
    results: list[CaseResult] = field(default_factory=list)
    rejected: list[DisagreementError] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the report as Markdown: machine, command, table, and cases that failed or cannot be trusted."""
        sections = [self._machine_line(), f"```\n{self.command}\n```", self._table()]
        doubts = [
            f"Not to be trusted: `{result.case.name}`, {doubt}." for result in self.results if (doubt := result.doubt)
        ]
        if doubts:
            sections.append("\n".join(doubts))
        if self.rejected:
            sections.append("\n".join(f"Rejected: `{error.case}`, its contenders disagree." for error in self.rejected))
        return "\n\n".join(sections) + "\n"

    def json(self) -> str:
        """Return everything as a dict, with every sample."""
        document = {
            "command": self.command,
            "machine": self.machine,
            "cases": [_case_as_json(result) for result in self.results],
            "rejected": [{"case": error.case, "differences": error.differences} for error in self.rejected],
        }
        return json.dumps(document, indent=2) + "\n"

    def _machine_line(self) -> str:
        machine = self.machine
        versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
        cpu = f"{machine['device']}; {machine['cpu']}" if "device" in machine else machine["cpu"]
        return (
            f"{cpu} ({machine['cores']} cores, {machine['capability']}, {machine['memory_gib']} GiB), "
            f"{machine['threads']} threads, {versions}."
        )

    def _table(self) -> str:
        rows = [_HEADER, *(row for result in self.results for row in _rows(result))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        left = 2  # case and contender; the rest are figures
        lines = [
            "| "
            + " | ".join(
                cell.ljust(width) if column < left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            + " |"
            for row in rows
        ]
        rule = "|".join(
            "-" * (width + 2) if column < left else "-" * (width + 1) + ":" for column, width in enumerate(widths)
        )
        return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it, so that `path` is never half written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _rows(result: CaseResult) -> list[tuple[str, ...]]:
    baseline_ms = next(timing.median_ms for timing in result.timings if timing.contender == result.case.baseline)
    return [
        (
            result.case.name,
            timing.contender,
            _figure(timing.median_ms),
            f"{_figure(min(timing.samples_ms))} to {_figure(max(timing.samples_ms))}",
            f"{timing.median_ms / baseline_ms:.2f}",
            "" if result.peak_bytes is None else f"{result.peak_bytes[timing.contender] / 2**20:.1f}",
        )
        for timing in result.timings
    ]


def _case_as_json(result: CaseResult) -> dict[str, Any]:
    return {
        "case": result.case.name,
        "baseline": result.case.baseline,
        "tolerance": result.case.tolerance,
        "cores_used_by_others": result.cores_used_by_others,
        "contenders": [
            {
                "contender": timing.contender,
                "median_ms": timing.median_ms,
                "samples_ms": timing.samples_ms,
                "calls_per_sample": timing.calls_per_sample,
                "peak_bytes": None if result.peak_bytes is None else result.peak_bytes[timing.contender],
            }
            for timing in result.timings
        ],
    }


def _figure(milliseconds: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:#.3g}"
