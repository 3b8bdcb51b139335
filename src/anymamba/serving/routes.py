"""HTTP routes of a server that generates text: bodies in, responses and streams out."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from anymamba.serving.api.fields import ApiError, internal_error, parse_body
from anymamba.serving.api.requests import GenerationRequest, Limits, read_chat, read_completion, read_text, read_tokens
from anymamba.serving.api.responses import ResponseBuilder
from anymamba.serving.metrics import Metrics
from anymamba.serving.service import Service
from anymamba.version import __version__

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_STATIC = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; nobody receives it
_NO_STORE = {"Cache-Control": "no-store"}
# Bytes beyond the limit that are read and dropped: most clients read the response only after they have sent their body.
_MAX_DRAINED = 2**24
_LONG_BODY = 2**16  # bytes from which a body is parsed in another thread, so that it does not block the event loop

_T = TypeVar("_T")


class ModelRoutes:
    """The routes that every server has: they describe its model, whose name is `id`."""

    def __init__(self, **description: Any) -> None:
        """Describe this model."""
        self._name = description["id"]
        self._description = {**description, "object": "model", "owned_by": "anymamba"}

    def table(self) -> list[Route]:
        """Return the routes."""
        return [Route("/v1/models", self.list_models), Route("/v1/models/{name:path}", self.get_model)]

    async def list_models(self, _: Request) -> Response:
        """Return a list of this one model."""
        return json_response({"object": "list", "data": [self._description]})

    async def get_model(self, request: Request) -> Response:
        """Return the model with this name."""
        if (name := request.path_params["name"]) != self._name:
            message = f"there is no model {name[:80]!r}; this server has {self._name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(self._description)


class Routes(ModelRoutes):
    """The HTTP routes of a server that generates text."""

    def __init__(self, service: Service) -> None:
        """Load the files of the chat page."""
        super().__init__(
            id=service.name,
            created=service.created,
            vocab_size=service.model.config.vocab_size,
            state_bytes=service.state_bytes,
            state_bytes_per_token=service.state_bytes_per_token,
            max_tokens=service.limits.max_tokens,
        )
        self._service = service
        directory = files("anymamba.serving") / "static"
        self._static = {name: (directory / name).read_bytes() for name in _STATIC}

    def table(self) -> list[Route]:
        """Return the routes."""
        return [
            *super().table(),
            Route("/", self.get_static),
            Route("/static/{name}", self.get_static),
            Route("/health", self.get_health),
            Route("/metrics", self.get_metrics),
            Route("/v1/completions", partial(self.generate, read_completion), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.generate, read_chat), methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/embeddings", self.reject_embeddings, methods=["POST"]),
            Route("/v1/sessions/{name:path}", self.get_session, methods=["GET"]),
            Route("/v1/sessions/{name:path}", self.delete_session, methods=["DELETE"]),
        ]

    async def get_static(self, request: Request) -> Response:
        """Return the chat page, or one of its files."""
        name = request.path_params.get("name", "index.html")
        if name not in _STATIC:
            raise ApiError(404, "there is no such file", code="not_found")
        return Response(self._static[name], media_type=_STATIC[name], headers={"Cache-Control": "no-cache"})

    async def get_health(self, _: Request) -> Response:
        """Return the status of the server, and its load."""
        service = self._service
        return json_response({"status": "ok", "version": __version__, "requests": service.open, **service.engine.load})

    async def get_metrics(self, _: Request) -> Response:
        """Return the metrics for Prometheus."""
        service = self._service
        engine = service.engine
        cache = service.cache
        counters = {
            **{f"anymamba_{name}_total": value for name, value in engine.counters.items()},
            "anymamba_state_hits_total": cache.hits,
            "anymamba_state_misses_total": cache.misses,
            "anymamba_state_evictions_total": cache.evictions,
            "anymamba_unfinished_files_total": service.unfinished_files,
        }
        gauges = {f"anymamba_rows_{name}": value for name, value in engine.load.items()}
        gauges |= {
            "anymamba_requests_open": service.open,
            "anymamba_states": len(cache) + len(service.sessions),
            "anymamba_state_bytes": cache.nbytes + service.sessions.nbytes,
        }
        return Response(service.metrics.format(counters, gauges), media_type=PROMETHEUS)

    async def reject_embeddings(self, _: Request) -> Response:
        """Reject a request for embeddings."""
        message = "this model does not give embeddings; it serves /v1/completions and /v1/chat/completions"
        raise ApiError(400, message, code="model_without_embeddings")

    async def tokenize(self, http_request: Request) -> Response:
        """Return the tokens of a text."""
        service = self._service
        text = await read_request(http_request, service.limits, lambda body: read_text(body, service.name))
        tokens = await service.tokenize(text)
        return json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": service.limits.max_prompt_tokens}
        )

    async def detokenize(self, http_request: Request) -> Response:
        """Return the text of tokens."""
        service = self._service
        vocab_size = service.model.config.vocab_size
        tokens = await read_request(
            http_request, service.limits, lambda body: read_tokens(body, vocab_size, service.name)
        )
        return json_response({"prompt": await asyncio.to_thread(service.tokenizer.decode, tokens)})

    async def get_session(self, request: Request) -> Response:
        """Return the size of a session."""
        session = await asyncio.to_thread(self._service.sessions.find, request.path_params["name"])
        if session is None:
            raise ApiError(404, "there is no such session", code="not_found")
        return json_response({"object": "session", "tokens": session.tokens, "bytes": session.state.nbytes})

    async def delete_session(self, request: Request) -> Response:
        """Delete a session."""
        try:
            was_deleted = await asyncio.to_thread(self._service.sessions.delete, request.path_params["name"])
        except OSError as error:
            print(f"anymamba: could not delete a session: {error}", file=sys.stderr, flush=True)
            message = "the session could not be deleted from the disk; it is as it was before this request"
            raise ApiError(507, message, param="session", code="session_not_deleted") from error
        if not was_deleted:
            raise ApiError(404, "there is no such session", code="not_found")
        return json_response({"object": "session", "deleted": True})

    async def generate(
        self, read: Callable[[dict[str, Any], Limits, int, str], GenerationRequest], http_request: Request
    ) -> Response:
        """Continue a text, or write the next message of a conversation, for a request whose fields `read` reads."""
        service = self._service
        # 1) Read the body.
        limits = service.limits
        vocab_size = service.model.config.vocab_size
        request = await read_request(http_request, limits, lambda body: read(body, limits, vocab_size, service.name))
        # 2) Start the request: `events` does nothing until its first event is awaited.
        events = service.handle(request)
        builder = ResponseBuilder(request, service.name, service.tokenizer, service.tool_format)
        if not request.stream:
            return await self._respond_complete(http_request, events, builder)
        # 3) Wait for the first event, because an error in the prompt needs a status of its own; then stream.
        first = await cancel_on_disconnect(http_request, anext(events), service.metrics)
        if first is None:
            await events.aclose()
            return Response(status_code=CLIENT_CLOSED)
        return EventStreamResponse(
            self._stream_events(first, events, builder, request),
            media_type="text/event-stream",
            headers={**_NO_STORE, "X-Accel-Buffering": "no"},
            events=events,
        )

    async def _respond_complete(
        self, http_request: Request, events: AsyncGenerator[Any, None], builder: ResponseBuilder
    ) -> Response:
        async def collect() -> Response:
            async with aclosing(events):
                async for prompt, event in events:
                    builder.add(prompt, event)
            # Log-probabilities of a long prompt take a while to format, which would block the event loop.
            return await asyncio.to_thread(lambda: json_response(builder.complete()))

        response = await cancel_on_disconnect(http_request, collect(), self._service.metrics)
        return Response(status_code=CLIENT_CLOSED) if response is None else response

    async def _stream_events(
        self,
        first: tuple[int, Any],
        events: AsyncGenerator[Any, None],
        builder: ResponseBuilder,
        request: GenerationRequest,
    ) -> AsyncGenerator[bytes, None]:
        is_disconnected = True
        try:
            async with aclosing(events):
                for chunk in builder.add(*first):
                    yield encode_event(chunk)
                async for prompt, event in events:
                    for chunk in builder.add(prompt, event):
                        yield encode_event(chunk)
            if request.include_usage:
                yield encode_event(builder.usage_chunk())
            is_disconnected = False
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            is_disconnected = False
            yield encode_event(error.body())
        except Exception:  # a bug: the status has been sent, so the client gets an event, and the log the traceback
            is_disconnected = False
            traceback.print_exc(file=sys.stderr)
            yield encode_event(internal_error().body())
        finally:
            if is_disconnected:
                self._service.metrics.count("anymamba_disconnects_total")


def json_response(value: Any) -> Response:
    """Return a JSON response that no cache may store."""
    return Response(json.dumps(value), media_type="application/json", headers=_NO_STORE)


def encode_event(value: Any) -> bytes:
    """Encode a value as an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """A stream whose request ends when the client disconnects, even before the first event is sent."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], *, events: AsyncGenerator[Any, None], **options: Any
    ) -> None:
        """Stream `content`, which is made from `events`, those of the request."""
        super().__init__(content, **options)
        self._generators = (content, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def cancel_on_disconnect(request: Request, work: Any, metrics: Metrics) -> Any:
    """Return the result of `work`, or None if the client disconnects first, which cancels it."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.count("anymamba_disconnects_total")
        return None
    finally:
        for other in (task, disconnect):
            other.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_request(request: Request, limits: Limits, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Receive the body of a request, and `read` the fields of its JSON object."""
    content = await _receive_body(request, limits)

    def parse() -> _T:
        return read(parse_body(content))

    return await asyncio.to_thread(parse) if len(content) >= _LONG_BODY else parse()


async def _receive_body(request: Request, limits: Limits) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"expected Content-Type application/json, got {media_type[:80] or 'none'}"
        raise ApiError(415, message, code="unsupported_type")
    max_bytes = limits.max_body_bytes
    # 1) Reject a body by its stated length, if it is too long even to be dropped.
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and int(stated[:20]) > max_bytes + _MAX_DRAINED:
        raise _body_too_large(max_bytes)
    # 2) Receive it. What exceeds the limit is dropped, and the client gets its response at the end of the body.
    content = bytearray()
    size = 0

    async def receive() -> None:
        nonlocal size
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes + _MAX_DRAINED:
                return
            if size <= max_bytes:
                content.extend(chunk)

    try:
        await asyncio.wait_for(receive(), limits.body_seconds)
    except (asyncio.TimeoutError, TimeoutError):
        if size <= max_bytes:
            message = f"the body did not arrive within {limits.body_seconds:g} seconds"
            raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        message = "the client disconnected before its whole body had arrived"
        raise ApiError(400, message, code="incomplete_body") from None
    if size > max_bytes:
        raise _body_too_large(max_bytes)
    return bytes(content)


def _body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body may have at most {max_bytes} bytes", code="body_too_large")
