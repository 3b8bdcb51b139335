"""The figures of a load test: percentiles, rates and errors, as numbers, as a table and as a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from anymamba.serving.load_test.runner import RequestResult

_PERCENTILES = (50, 90, 95, 99)
_TIMES = {
    "first_token_seconds": "time to first token, ms",
    "between_tokens_seconds": "between tokens, ms",
    "request_seconds": "whole request, ms",
}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def collect_times(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Return the latencies of successful requests in seconds: to the first token, between tokens, and in total."""
    successes = [result for result in results if result.error is None and result.token_times]
    return {
        "first_token_seconds": [result.token_times[0] - result.due for result in successes],
        "between_tokens_seconds": [b - a for result in successes for a, b in pairwise(result.token_times)],
        "request_seconds": [result.end - result.due for result in successes],
    }


def summarize(results: Sequence[RequestResult]) -> dict[str, Any]:
    """Return the figures by name.

    Rates count successful requests, over the time from the first request to the last response.
    """
    successes = [result for result in results if result.error is None]
    seconds = max((result.end for result in results), default=0.0)
    written = sum(len(result.token_times) for result in successes)
    read = sum(result.prompt_tokens for result in successes)
    figures: dict[str, Any] = {
        "requests": len(results),
        "errors": dict(Counter(result.error for result in results if result.error is not None)),
        "error_messages": sorted({result.message for result in results if result.message})[:5],
        "seconds": seconds,
        "prompt_tokens": read,
        "written_tokens": written,
        "requests_per_second": len(successes) / seconds if seconds else 0.0,
        "written_tokens_per_second": written / seconds if seconds else 0.0,
        "tokens_per_second": (read + written) / seconds if seconds else 0.0,
    }
    for name, values in collect_times(results).items():
        if values:
            points = {f"p{p}": percentile(values, p) for p in _PERCENTILES}
            figures[name] = {"mean": sum(values) / len(values), **points, "max": max(values)}
    return figures


def format_table(figures: dict[str, Any]) -> str:
    """Format the figures for a terminal."""
    columns = ("mean", *(f"p{p}" for p in _PERCENTILES), "max")
    failures = sum(figures["errors"].values())
    lines = [
        f"{figures['requests'] - failures} of {figures['requests']} requests succeeded in "
        f"{figures['seconds']:.1f} s: {figures['prompt_tokens']:,} tokens read, {figures['written_tokens']:,} written",
        f"{figures['written_tokens_per_second']:,.1f} tokens/s written, "
        f"{figures['tokens_per_second']:,.1f} with prompts, {figures['requests_per_second']:.2f} requests/s",
        "",
        f"{'':24}" + "".join(f"{name:>10}" for name in columns),
    ]
    lines += [
        f"{title:24}" + "".join(f"{1e3 * figures[name][column]:10,.1f}" for column in columns)
        for name, title in _TIMES.items()
        if name in figures
    ]
    lines += [f"{count} requests failed: {kind}" for kind, count in figures["errors"].items()]
    return "\n".join([*lines, *(f"  {message}" for message in figures["error_messages"])])


def plot(results: Sequence[RequestResult], title: str, path: Path) -> None:
    """Plot the distributions of latencies and the tokens written per second; the suffix of `path` sets the format."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 3), [*collect_times(results).items()][:2], strict=False):
        sorted_ms = [1e3 * value for value in sorted(values)]
        axes.step(sorted_ms, [(i + 1) / len(sorted_ms) for i in range(len(sorted_ms))], where="post")
        axes.set(xlabel=_TIMES[name].replace(", ms", " (ms)"), ylabel="fraction", ylim=(0, 1))
        axes.grid(alpha=0.3)
    axes = figure.axes[2]
    tokens_by_second = Counter(int(arrival) for result in results for arrival in result.token_times)
    last = max(tokens_by_second, default=0)
    axes.stairs([tokens_by_second[second] for second in range(last + 1)], range(last + 2), fill=True, alpha=0.6)
    axes.set(xlabel="seconds", ylabel="tokens written per second", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
