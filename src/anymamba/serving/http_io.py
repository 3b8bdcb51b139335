"""HTTP in and out for any request: bodies as JSON objects, answers, streams, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from anymamba.serving.api.errors import ApiError
from anymamba.serving.api.requests import Limits, parse_body
from anymamba.serving.metrics import Metrics

# Bytes beyond the limit that are read and dropped: most clients read the answer only after they have sent their body.
_DRAINED = 2**24


def json_response(value: Any) -> Response:
    """An answer that no cache may keep."""
    return Response(json.dumps(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def as_event(value: Any) -> bytes:
    """A value as an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events, whose request ends when the client disconnects, even before the first event."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], *, events: AsyncGenerator[Any, None], **options: Any
    ) -> None:
        """Nothing is sent yet; `content` is made from `events`, those of the request."""
        super().__init__(content, **options)
        self._generators = (content, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def cancel_on_disconnect(request: Request, work: Any, metrics: Metrics) -> Any:
    """What `work` returns; None if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        metrics.count("anymamba_disconnects_total")
        return None
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object; a long one is parsed in another thread, so that it does not block the loop.

    Raises:
        ApiError: it is not JSON, too long, incomplete, or takes too long to arrive.
    """
    content = await _body(request, limits)
    return await asyncio.to_thread(parse_body, content) if len(content) > 2**16 else parse_body(content)


async def _body(request: Request, limits: Limits) -> bytes:
    """The bytes of the body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"expected Content-Type application/json, got {kind[:80] or 'none'}", code="unsupported_type"
        )
    too_long = ApiError(413, f"the body may have at most {limits.body} bytes", code="body_too_large")
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and int(stated[:20]) > limits.body + _DRAINED:
        raise too_long
    content, size = bytearray(), 0

    async def read() -> None:
        nonlocal size
        async for part in request.stream():
            size += len(part)
            if size > limits.body + _DRAINED:
                return
            if size <= limits.body:
                content.extend(part)

    try:
        await asyncio.wait_for(read(), limits.body_seconds)
        if size > limits.body:
            raise too_long
        return bytes(content)
    except (asyncio.TimeoutError, TimeoutError):
        if size > limits.body:
            raise too_long from None
        message = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        raise ApiError(
            400, "the client disconnected before its whole body had arrived", code="incomplete_body"
        ) from None
