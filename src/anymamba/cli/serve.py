"""`anymamba serve`: a model as an HTTP server."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from anymamba.cli.common import DTYPES, load, readable_bytes, set_threads
from anymamba.cli.serve_options import KEY_VARIABLE
from anymamba.core.process import use_one_malloc_arena
from anymamba.serving.api.requests import Limits
from anymamba.serving.embeddings import EmbeddingService
from anymamba.serving.service import Service

_MIB = 2**20


def run(args: argparse.Namespace) -> None:
    """Load the model, listen, and answer until Ctrl-C."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"to serve, install {error.name} (pip install 'anymamba[serve]')") from error
    from anymamba.checkpoints.open import resolve_source
    from anymamba.models.sequence.masked_lm import is_masked_lm
    from anymamba.serving.server import make_app, serve

    _check_positive(args)
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
    directory = resolve_source(args.model)
    make = _embedding_service if is_masked_lm(directory) else _text_service
    service, facts = make(args, directory, limits)

    def ready(url: str) -> None:
        for fact in facts:
            _say(fact)
        if args.host not in ("127.0.0.1", "::1", "localhost") and key is None:
            _say("anyone who can reach this address can use the server; --api-key requires a key")
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
        ready=ready,
    )
    _say("stopped")


def _text_service(args: argparse.Namespace, directory: Path, limits: Limits) -> tuple[Service, list[str]]:
    """A service that continues texts, and what to print about it."""
    from anymamba.generation.chat import ChatTemplate
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
        name=_name(args),
        cache=cache,
        sessions=SessionStore(model, cache, memory, states, disk),
        limits=limits,
        stop_texts=template.stop,
        engine={"rows": args.rows, "segment_len": args.segment_len, "stall": args.stall, "together": args.together},
    )
    facts = [f"{service.name}: {readable_bytes(service.state_bytes)} per conversation, whatever its length"]
    if template.is_plain:
        facts.append("the model has no chat template: conversations are written as User: ... Assistant: ...")
    return service, facts


def _embedding_service(args: argparse.Namespace, directory: Path, limits: Limits) -> tuple[EmbeddingService, list[str]]:
    """A service that embeds texts, and what to print about it."""
    from anymamba.core.dtypes import parse_device
    from anymamba.generation.tokenizers import load_tokenizer
    from anymamba.models.sequence.masked_lm import MaskedLM

    if args.weights is not None or args.block:
        raise ValueError("--weights and --block apply to language models only; this model gives embeddings")
    set_threads(args)
    device = parse_device(args.device, "--device")
    model = MaskedLM.from_pretrained(directory, dtype=DTYPES.get(args.dtype), device=device).eval()
    assert model.config.vocab_size is not None
    tokenizer = load_tokenizer(args.tokenizer, directory, model.config.vocab_size)
    service = EmbeddingService(model, tokenizer, name=_name(args), limits=limits)
    return service, [f"{service.name}: embeddings of {service.dimensions} numbers, at /v1/embeddings"]


def _name(args: argparse.Namespace) -> str:
    return args.name or Path(args.model).absolute().name


def _check_positive(args: argparse.Namespace) -> None:
    for name in ("max_body", "max_prompt", "max_tokens", "max_n", "max_requests", "max_connections", "segment_len"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("request_seconds", "body_seconds", "grace", "stall", "state_memory", "state_disk"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(args, name)}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be between 0 and {2**16 - 1}, got {args.port}")


def _say(message: str) -> None:
    print(f"anymamba: {message}", file=sys.stderr, flush=True)
