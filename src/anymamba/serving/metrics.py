"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LABELED = ("anymamba_requests_total",)
_HISTOGRAMS = ("anymamba_first_token_seconds", "anymamba_next_token_seconds")
_HELP = {
    "anymamba_requests_total": "Requests answered, by path and status.",
    "anymamba_reused_tokens_total": "Prompt tokens that a cached state had already read.",
    "anymamba_disconnects_total": "Requests whose client disconnected.",
    "anymamba_first_token_seconds": "Time from a request's arrival to a row's first token.",
    "anymamba_next_token_seconds": "Time between two tokens of a row.",
}


class Metrics:
    """Counters and histograms; only the server's event loop changes them."""

    def __init__(self) -> None:
        """Set all of them to zero."""
        self._counters: Counter[str] = Counter(
            {name: 0 for name in _HELP if name not in _LABELED and name not in _HISTOGRAMS}
        )
        self._buckets = {"first": [0] * (len(_BUCKETS) + 1), "next": [0] * (len(_BUCKETS) + 1)}
        self._sums = {"first": 0.0, "next": 0.0}

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        """Add to a counter."""
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        self._counters[f"{name}{{{text}}}" if text else name] += by

    def observe(self, histogram: Literal["first", "next"], seconds: float) -> None:
        """Add a latency to the histogram of first or of next tokens."""
        bucket = next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))
        self._buckets[histogram][bucket] += 1
        self._sums[histogram] += seconds

    def format(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
        """Format all metrics, together with counters and gauges that are stored elsewhere."""
        lines: list[str] = []
        described: set[str] = set()
        for name, value in sorted(self._counters.items()):
            base = name.partition("{")[0]
            if base not in described:
                described.add(base)
                lines += [f"# HELP {base} {_HELP[base]}", f"# TYPE {base} counter"]
            lines.append(f"{name} {value}")
        for kind, values in (("counter", counters), ("gauge", {**gauges, **_process_gauges()})):
            for name, number in values.items():
                lines += [f"# TYPE {name} {kind}", f"{name} {int(number)}"]
        for histogram in ("first", "next"):
            lines += self._format_histogram(f"anymamba_{histogram}_token_seconds", histogram)
        return "\n".join(lines) + "\n"

    def _format_histogram(self, name: str, histogram: str) -> list[str]:
        lines = [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip([*map(str, _BUCKETS), "+Inf"], self._buckets[histogram], strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sums[histogram]:.6f}", f"{name}_count {total}"]


def _process_gauges() -> dict[str, float]:
    """Return the memory and descriptors of this process, where the system reports them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        return {}
    return {
        "process_resident_memory_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "process_open_fds": float(descriptors),
    }
