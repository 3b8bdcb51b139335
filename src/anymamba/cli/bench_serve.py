"""`anymamba bench-serve`: put load on a server and measure how it copes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anymamba.cli.serve_options import KEY_VARIABLE


def run(args: argparse.Namespace) -> None:
    """Print what will be sent, send it, and print the figures."""
    if importlib.util.find_spec("h11") is None:
        raise ValueError("to measure a server, install h11 (pip install 'anymamba[serve]')")
    from anymamba.serving.load_test import (
        IntRange,
        LoadPlan,
        LoadTest,
        Target,
        find_model,
        format_table,
        plot,
        summarize,
    )

    _expect(args)
    plan = LoadPlan(
        requests=args.requests if args.requests is not None or args.seconds is not None else 64,
        seconds=args.seconds,
        concurrency=args.concurrency,
        rate=args.rate,
        prompt_tokens=IntRange(*args.prompt_tokens),
        output_tokens=IntRange(*args.output_tokens),
        warm_up=args.warm_up,
        seed=args.seed,
        timeout=args.timeout,
        model=args.model,
        fields=dict(args.field),
    )
    target = Target.from_url(args.url, args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE))

    async def measure() -> tuple[str, LoadTest]:
        model = await find_model(target, plan.model)
        title = f"{model.name} at {target.url}: {_described(plan)}"
        _say(f"sending to {title}")
        if model.vocab_size is None:
            _say("the server does not report its vocabulary size: prompts are words, and replies may end early")
        progress = _Progress()
        load_test = LoadTest(target, plan, model)
        await load_test.run(progress.show)
        progress.end()
        return title, load_test

    title, load_test = asyncio.run(measure())
    figures = summarize(load_test.results)
    print(format_table(figures))
    if args.json is not None:
        from anymamba.core.io import write_json

        requests = [asdict(result) for result in load_test.results]
        write_json(args.json, {"target": target.url, "plan": asdict(plan), "summary": figures, "requests": requests})
    if args.plot is not None:
        plot(load_test.results, title, Path(args.plot))
    if load_test.results and sum(figures["errors"].values()) == len(load_test.results):
        raise ValueError("no request succeeded")


def _described(plan: Any) -> str:
    """The load in words."""
    count = "" if plan.requests is None else f"{plan.requests} requests"
    time = "" if plan.seconds is None else f"requests for {plan.seconds:g} s"
    how = f"{plan.concurrency} at a time" if plan.rate is None else f"{plan.rate:g} per second"
    tokens = f"{plan.prompt_tokens} prompt tokens and {plan.output_tokens} reply tokens each"
    warm_up = f", after {plan.warm_up} to warm up" if plan.warm_up else ""
    return f"{' or '.join(filter(None, (count, time)))}, {how}, {tokens}{warm_up}"


def _expect(args: argparse.Namespace) -> None:
    for name in ("requests", "concurrency"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if args.warm_up < 0:
        raise ValueError(f"--warm-up must be 0 or more, got {args.warm_up}")
    for name in ("seconds", "rate", "timeout"):
        if (number := getattr(args, name)) is not None and not 0 < number < float("inf"):
            raise ValueError(f"--{name} must be above 0, got {number:g}")
    for name in ("json", "plot"):
        if (file := getattr(args, name)) is not None and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"--{name}: there is no directory {Path(file).absolute().parent}")
    if args.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("to plot, install matplotlib (pip install 'anymamba[train]')")
        if Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot must be a file that ends in .png, .svg or .pdf, got {args.plot}")


class _Progress:
    """A line on stderr that changes on a terminal; elsewhere, one every ten seconds."""

    def __init__(self) -> None:
        self._calls = 0

    def show(self, run: Any) -> None:
        self._calls += 1
        tokens = sum(len(result.token_times) for result in run.results)
        text = f"{run.elapsed:.0f} s: {len(run.results)} requests done, {run.open} open, {tokens:,} tokens written"
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif self._calls % 10 == 0:
            _say(text)

    def end(self) -> None:
        if sys.stderr.isatty() and self._calls:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say(message: str) -> None:
    print(f"anymamba: {message}", file=sys.stderr, flush=True)
