"""The figures of a load: percentiles, rates and errors, as numbers, as a table and as a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from anymamba.serving.load_test.runner import Request

_PERCENTILES = (50, 90, 95, 99)
_TIMES = {
    "first_token_seconds": "time to first token, ms",
    "between_tokens_seconds": "between tokens, ms",
    "request_seconds": "whole request, ms",
}


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many of a hundred do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def times(requests: Sequence[Request]) -> dict[str, list[float]]:
    """Seconds of requests that succeeded: to the first token, between two tokens, and in all."""
    fine = [request for request in requests if request.error is None and request.tokens]
    return {
        "first_token_seconds": [request.tokens[0] - request.due for request in fine],
        "between_tokens_seconds": [b - a for request in fine for a, b in pairwise(request.tokens)],
        "request_seconds": [request.end - request.due for request in fine],
    }


def summary(requests: Sequence[Request]) -> dict[str, Any]:
    """The figures by name. Rates are over the time from the first request to the last answer, of what succeeded."""
    fine = [request for request in requests if request.error is None]
    seconds = max((request.end for request in requests), default=0.0)
    written, read = sum(len(r.tokens) for r in fine), sum(r.read for r in fine)
    found: dict[str, Any] = {
        "requests": len(requests),
        "errors": dict(Counter(r.error for r in requests if r.error is not None)),
        "error_messages": sorted({r.message for r in requests if r.message})[:5],
        "seconds": seconds,
        "prompt_tokens": read,
        "written_tokens": written,
        "requests_per_second": len(fine) / seconds if seconds else 0.0,
        "written_tokens_per_second": written / seconds if seconds else 0.0,
        "tokens_per_second": (read + written) / seconds if seconds else 0.0,
    }
    for name, values in times(requests).items():
        if values:
            points = {f"p{p}": percentile(values, p) for p in _PERCENTILES}
            found[name] = {"mean": sum(values) / len(values), **points, "max": max(values)}
    return found


def table(found: dict[str, Any]) -> str:
    """The figures to read."""
    columns = ("mean", *(f"p{p}" for p in _PERCENTILES), "max")
    lines = [
        f"{found['requests'] - sum(found['errors'].values())} of {found['requests']} requests succeeded in "
        f"{found['seconds']:.1f} s: {found['prompt_tokens']:,} tokens read, {found['written_tokens']:,} written",
        f"{found['written_tokens_per_second']:,.1f} tokens/s written, {found['tokens_per_second']:,.1f} with prompts, "
        f"{found['requests_per_second']:.2f} requests/s",
        "",
        f"{'':24}" + "".join(f"{name:>10}" for name in columns),
    ]
    lines += [
        f"{title:24}" + "".join(f"{1e3 * found[name][column]:10,.1f}" for column in columns)
        for name, title in _TIMES.items()
        if name in found
    ]
    lines += [f"{count} requests failed: {kind}" for kind, count in found["errors"].items()]
    return "\n".join([*lines, *(f"  {message}" for message in found["error_messages"])])


def plot(requests: Sequence[Request], title: str, path: Path) -> None:
    """Distributions of the times, and tokens written in each second, as a plot in the format of the file's name."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, 3), [*times(requests).items()][:2], strict=False):
        ordered = [1e3 * value for value in sorted(values)]
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axes.set(xlabel=_TIMES[name].replace(", ms", " (ms)"), ylabel="share", ylim=(0, 1))
        axes.grid(alpha=0.3)
    axes = figure.axes[2]
    seconds = Counter(int(moment) for request in requests for moment in request.tokens)
    last = max(seconds, default=0)
    axes.stairs([seconds[second] for second in range(last + 1)], range(last + 2), fill=True, alpha=0.6)
    axes.set(xlabel="seconds", ylabel="tokens written per second", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
