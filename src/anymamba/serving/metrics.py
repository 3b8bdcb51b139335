"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_HELP = {
    "anymamba_requests_total": "Requests answered, by path and status.",
    "anymamba_reused_tokens_total": "Prompt tokens that a kept state had already read.",
    "anymamba_disconnects_total": "Requests whose client disconnected.",
    "anymamba_first_token_seconds": "Time from a request's arrival to a row's first token.",
    "anymamba_next_token_seconds": "Time between two tokens of a row.",
}


class Metrics:
    """Counters and histograms; only the server's loop changes them."""

    def __init__(self) -> None:
        """All at zero."""
        self._counters: Counter[str] = Counter(dict.fromkeys(_HELP, 0))
        for name in ("anymamba_requests_total", "anymamba_first_token_seconds", "anymamba_next_token_seconds"):
            del self._counters[name]
        self._buckets = {"first": [0] * (len(_BUCKETS) + 1), "next": [0] * (len(_BUCKETS) + 1)}
        self._sums = {"first": 0.0, "next": 0.0}

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        """Add to a counter."""
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        self._counters[f"{name}{{{text}}}" if text else name] += by

    def observe(self, what: Literal["first", "next"], seconds: float) -> None:
        """Add to a histogram."""
        bucket = next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))
        self._buckets[what][bucket] += 1
        self._sums[what] += seconds

    def text(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
        """All of it as text, with the counters and gauges of others."""
        lines: list[str] = []
        said: set[str] = set()
        for name, value in sorted(self._counters.items()):
            base = name.partition("{")[0]
            if base not in said:
                said.add(base)
                lines += [f"# HELP {base} {_HELP[base]}", f"# TYPE {base} counter"]
            lines.append(f"{name} {value}")
        for kind, numbers in (("counter", counters), ("gauge", {**gauges, **_process()})):
            for name, number in numbers.items():
                lines += [f"# TYPE {name} {kind}", f"{name} {int(number)}"]
        for what in ("first", "next"):
            lines += self._histogram(f"anymamba_{what}_token_seconds", what)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, what: str) -> list[str]:
        lines, total = [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} histogram"], 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self._buckets[what], strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sums[what]:.6f}", f"{name}_count {total}"]


def _process() -> dict[str, float]:
    """Figures of this process, where the system reports them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        return {}
    return {
        "process_resident_memory_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "process_open_fds": float(descriptors),
    }
