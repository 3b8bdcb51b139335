"""`anymamba serve`: a model as an HTTP server; and `anymamba bench-serve`: load on a server, and how it copes.

The load comes from another process, often on another machine: it must not import torch, so imports are made late.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.util
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anymamba.cli.options import check_at_least
from anymamba.cli.serve_options import KEY_VARIABLE

if TYPE_CHECKING:
    from anymamba.generation import ChatTemplate
    from anymamba.generation.tool_calls import ToolFormat
    from anymamba.serving.api.requests import Limits
    from anymamba.serving.embeddings import EmbeddingService
    from anymamba.serving.load_test import LoadPlan, LoadTest
    from anymamba.serving.service import Service

_MIB = 2**20


def run_serve(args: argparse.Namespace) -> None:
    """Load the model, listen, and answer until Ctrl-C."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"to serve, install {error.name} (pip install 'anymamba[serve]')") from error
    from anymamba.checkpoints.open import resolve_source
    from anymamba.core.process import use_one_malloc_arena
    from anymamba.models.sequence.masked_lm import is_masked_lm
    from anymamba.serving.api.requests import Limits
    from anymamba.serving.server import make_app, serve

    # 1) Check the options before the model is loaded.
    _check_serve(args)
    use_one_malloc_arena()
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"--api-key (or {KEY_VARIABLE}) must not be empty")
    limits = Limits(
        max_body_bytes=args.max_body * _MIB,
        max_prompt_tokens=args.max_prompt,
        max_tokens=args.max_tokens,
        max_choices=args.max_n,
        max_requests=args.max_requests,
        request_seconds=args.request_seconds,
        body_seconds=args.body_seconds,
    )
    # 2) Load the model.
    directory = resolve_source(args.model)
    make_service = _make_embedding_service if is_masked_lm(directory) else _make_text_service
    service, notes = make_service(args, directory, limits)

    # 3) Listen until Ctrl-C.
    def report_ready(url: str) -> None:
        for note in notes:
            _print_note(note)
        if args.host not in ("127.0.0.1", "::1", "localhost") and key is None:
            _print_note("anyone who can reach this address can use the server; --api-key requires a key")
        print(f"listening on {url}", flush=True)

    serve(
        service,
        lambda: make_app(
            service, key=key, hosts=(args.host, *args.allow_host), origins=tuple(args.cors), verbose=args.verbose
        ),
        host="127.0.0.1" if args.host == "localhost" else args.host,
        port=args.port,
        grace=args.grace,
        connections=args.max_connections,
        ready=report_ready,
    )
    _print_note("stopped")


def _make_text_service(args: argparse.Namespace, directory: Path, limits: Limits) -> tuple[Service, list[str]]:
    """Return a service that continues texts, and what to print about it."""
    from anymamba.cli.common import format_bytes, load
    from anymamba.core.registry import describe_device
    from anymamba.generation import ChatTemplate
    from anymamba.serving.service import Service
    from anymamba.serving.sessions import SessionStore
    from anymamba.serving.state_cache import StateCache

    model, tokenizer = load(args)
    template = ChatTemplate.from_directory(directory if args.chat_template is None else args.chat_template)
    states = None if args.states is None else Path(args.states)
    memory = args.state_memory * _MIB
    disk = args.state_disk * _MIB
    cache = StateCache(model, memory, states, disk)
    service = Service(
        model.eval(),
        tokenizer,
        template,
        name=_model_name(args),
        cache=cache,
        sessions=SessionStore(model, cache, memory, states, disk),
        limits=limits,
        stop_texts=template.stop,
        tool_format=_find_tool_format(args, template),
        engine={
            "rows": args.rows,
            "segment_len": args.segment_len,
            "stall": args.stall,
            "together": args.together,
            "exact": args.exact,
        },
    )
    growth = service.state_bytes_per_token
    rest = f" and {format_bytes(growth)} for each of its tokens" if growth else " of any length"
    notes = [f"{service.name}: {format_bytes(service.state_bytes)} per conversation{rest}"]
    notes.append(f"computing on {describe_device(model.device)}")
    if service.unfinished_files:
        notes.append(f"removed {service.unfinished_files} unfinished files of servers that were killed")
    if template.is_plain:
        notes.append("the model has no chat template: conversations are written as User: ... Assistant: ...")
    return service, notes


def _make_embedding_service(
    args: argparse.Namespace, directory: Path, limits: Limits
) -> tuple[EmbeddingService, list[str]]:
    """Return a service that embeds texts, and what to print about it."""
    from anymamba.cli.common import DTYPES, set_threads
    from anymamba.core.dtypes import parse_device
    from anymamba.core.registry import describe_device
    from anymamba.generation import load_tokenizer
    from anymamba.models.sequence.masked_lm import MaskedLM
    from anymamba.serving.embeddings import EmbeddingService

    if args.weights is not None or args.block:
        raise ValueError("--weights and --block apply to language models only; this model gives embeddings")
    set_threads(args)
    device = parse_device(args.device, "--device")
    model = MaskedLM.from_pretrained(directory, dtype=DTYPES.get(args.dtype), device=device).eval()
    assert model.config.vocab_size is not None
    tokenizer = load_tokenizer(args.tokenizer, directory, model.config.vocab_size)
    service = EmbeddingService(model, tokenizer, name=_model_name(args), limits=limits)
    embeddings = f"{service.name}: embeddings of {service.dimensions} numbers, at /v1/embeddings"
    return service, [embeddings, f"computing on {describe_device(device)}"]


def _find_tool_format(args: argparse.Namespace, template: ChatTemplate) -> ToolFormat | None:
    """Return how the model writes tool calls; None if its template does not describe tools."""
    from anymamba.generation.tool_calls import FORMATS, detect_format

    if args.tool_format is not None:
        return FORMATS[args.tool_format]
    return detect_format("\n".join(template.sources.values())) if template.takes_tools else None


def _model_name(args: argparse.Namespace) -> str:
    return args.name or Path(args.model).absolute().name


def _check_serve(args: argparse.Namespace) -> None:
    check_at_least(
        args, 1, "max_body", "max_prompt", "max_tokens", "max_n", "max_requests", "max_connections", "segment_len"
    )
    for name in ("request_seconds", "body_seconds", "grace", "stall", "state_memory", "state_disk"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(args, name)}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be between 0 and {2**16 - 1}, got {args.port}")
    _check_address(args.host, args.port)


def _check_address(host: str, port: int) -> None:
    """Raise ValueError unless the server can listen there, before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host, port, family)
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"--host {host}: not an address of this machine") from error
        reason = os.strerror(error.errno or 0)
        hint = "choose another one, or 0 for any free port"
        raise ValueError(f"--port {port}: the server cannot listen there ({reason}); {hint}") from error


def _print_note(message: str) -> None:
    print(f"anymamba: {message}", file=sys.stderr, flush=True)


def run_bench_serve(args: argparse.Namespace) -> None:
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

    _check_bench_serve(args)
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
        title = f"{model.name} at {target.url}: {_describe(plan)}"
        _print_note(f"sending to {title}")
        if model.vocab_size is None:
            _print_note("the server does not report its vocabulary size: prompts are words, and replies may end early")
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


def _describe(plan: LoadPlan) -> str:
    """Return the load in words."""
    count = "" if plan.requests is None else f"{plan.requests} requests"
    time = "" if plan.seconds is None else f"requests for {plan.seconds:g} s"
    pace = f"{plan.concurrency} at a time" if plan.rate is None else f"{plan.rate:g} per second"
    tokens = f"{plan.prompt_tokens} prompt tokens and {plan.output_tokens} reply tokens each"
    warm_up = f", after {plan.warm_up} to warm up" if plan.warm_up else ""
    return f"{' or '.join(filter(None, (count, time)))}, {pace}, {tokens}{warm_up}"


def _check_bench_serve(args: argparse.Namespace) -> None:
    check_at_least(args, 1, "requests", "concurrency")
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
    """Line on stderr that changes on a terminal; elsewhere, a new one every ten seconds."""

    def __init__(self) -> None:
        self._calls = 0

    def show(self, run: Any) -> None:
        self._calls += 1
        tokens = sum(len(result.token_times) for result in run.results)
        text = f"{run.elapsed:.0f} s: {len(run.results)} requests done, {run.open} open, {tokens:,} tokens written"
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif self._calls % 10 == 0:
            _print_note(text)

    def end(self) -> None:
        if sys.stderr.isatty() and self._calls:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
