"""A load generator for servers with OpenAI's API: `anymamba bench-serve`.

Nothing in this package imports torch, so that the client stays small compared with the server it measures.

Reading order: `client.py` (one HTTP request and the times of its events), `runner.py` (many requests, in a closed or an
open loop), `summary.py` (percentiles, a table and a plot).

One request: `LoadTest` takes the next body from `generate_bodies`, `stream` sends it and yields a `StreamEvent` per
chunk, `LoadTest` stores the arrival time of every token in a `RequestResult`, and `summarize` turns all results into
figures.
"""

from anymamba.serving.load_test.client import RequestError, StreamEvent, Target, get_json, stream
from anymamba.serving.load_test.runner import (
    IntRange,
    LoadPlan,
    LoadTest,
    RequestResult,
    TargetModel,
    find_model,
    generate_bodies,
)
from anymamba.serving.load_test.summary import collect_times, format_table, percentile, plot, summarize

__all__ = [
    "IntRange",
    "LoadPlan",
    "LoadTest",
    "RequestError",
    "RequestResult",
    "StreamEvent",
    "Target",
    "TargetModel",
    "collect_times",
    "find_model",
    "format_table",
    "generate_bodies",
    "get_json",
    "percentile",
    "plot",
    "stream",
    "summarize",
]
