"""The server process: the ASGI application, connections with time limits, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from anymamba.serving.api.fields import ApiError, internal_error
from anymamba.serving.embeddings import EmbeddingRoutes, EmbeddingService
from anymamba.serving.middleware import AccessMiddleware
from anymamba.serving.routes import Routes
from anymamba.serving.service import Service

_RESPONSE_SECONDS = 30  # time to send a response, beyond the time limit of the request itself


def make_app(
    service: Service | EmbeddingService,
    *,
    key: str | None = None,
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    verbose: bool = False,
) -> ASGIApp:
    """Return the server as an ASGI application; `AccessMiddleware` describes the options."""
    routes = Routes(service) if isinstance(service, Service) else EmbeddingRoutes(service)
    app = Starlette(
        routes=routes.table(),
        exception_handlers={
            404: _respond_not_found,
            405: _respond_wrong_method,
            ApiError: _respond_api_error,
            Exception: _respond_internal_error,
        },
    )
    return AccessMiddleware(
        app,
        key=key,
        hosts=hosts,
        origins=origins,
        seconds=service.limits.request_seconds + _RESPONSE_SECONDS,
        metrics=service.metrics,
        verbose=verbose,
    )


async def _respond_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # After these, the rest of the body is not read, so the connection cannot be used again.
    closing = {"Connection": "close"} if error.status in (408, 413) else {}
    headers = {**error.headers, **closing}
    return Response(json.dumps(error.body()), error.status, headers, media_type="application/json")


async def _respond_not_found(request: Request, _: Exception) -> Response:
    error = ApiError(404, f"there is nothing at {request.url.path[:80]!r}", code="not_found")
    return await _respond_api_error(request, error)


async def _respond_wrong_method(request: Request, _: Exception) -> Response:
    message = f"{request.url.path[:80]} does not support {request.method}"
    return await _respond_api_error(request, ApiError(405, message, code="method_not_allowed"))


async def _respond_internal_error(request: Request, _: Exception) -> Response:
    return await _respond_api_error(request, internal_error())  # the middleware prints the traceback


class Server(uvicorn.Server):
    """A server that lets running requests finish on shutdown, and ends their replies when the grace period is over."""

    def __init__(self, config: uvicorn.Config, service: Service | EmbeddingService, grace: float) -> None:
        """Configure the server; it does not run yet."""
        super().__init__(config)
        self._service = service
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for running requests."""
        self._service.set_deadline(time.monotonic() + self._grace)
        await super().shutdown(sockets)


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 with limits on connections, and on the time that headers take to arrive and a client does not read."""

    seconds = 10.0  # limit on both times
    max_connections = 1024  # further ones are closed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start without timers."""
        super().__init__(*args, **kwargs)
        self._timers: dict[Literal["headers", "writing"], asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._update_header_timer()

    def data_received(self, data: bytes) -> None:
        """Process data, and stop the timer once the headers are complete."""
        super().data_received(data)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_timer("headers")
        self._stop_timer("writing")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Limit the time that a full buffer keeps the connection of a client open that does not read."""
        super().pause_writing()
        self._stop_timer("writing")
        self._timers["writing"] = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client reads."""
        self._stop_timer("writing")
        super().resume_writing()

    def _update_header_timer(self) -> None:
        """Run the timer while headers are awaited; between requests, uvicorn has a timer of its own."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("headers")
        elif "headers" not in self._timers:
            self._timers["headers"] = self.loop.call_later(self.seconds, self._abort_if_idle)

    def _abort_if_idle(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.abort()

    def _stop_timer(self, name: Literal["headers", "writing"]) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def serve(
    service: Service | EmbeddingService,
    app: Callable[[], ASGIApp],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    grace: float = 10.0,
    connections: int = 1024,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Handle requests until SIGINT or SIGTERM, then finish running requests; a second Ctrl-C exits at once.

    Args:
        service: Service that handles requests.
        app: Function that makes the application once the service has started.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        grace: Seconds for running requests to finish, and again to write cached states to disk.
        connections: Largest number of connections; further ones are closed.
        ready: Function that is called with the server's URL once it listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=256) as listener:
        # 1) Listen before the engine starts, so that a busy port is reported at once.
        listener.setblocking(False)
        limits = {"seconds": service.limits.body_seconds, "max_connections": connections}
        protocol = type("Protocol", (TimeoutProtocol,), limits)
        # 2) Handle signals until uvicorn does, and again when it has returned and raises them a second time.
        stop_request = _StopRequest()
        previous = {number: signal.signal(number, stop_request) for number in (signal.SIGINT, signal.SIGTERM)}
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

        async def run() -> None:
            service.start()
            config = uvicorn.Config(
                app(),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=math.ceil(grace) + 2,
            )
            server = Server(config, service, grace)
            stop_request.attach(server)
            ready(url)
            await server.serve(sockets=[listener])

        # 3) Run until a signal comes; then write what is cached.
        try:
            asyncio.run(run())
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            service.close(grace)


class _StopRequest:
    """A signal handler that stops the server, even if the signal comes before the server has started."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._is_set = False

    def attach(self, server: uvicorn.Server) -> None:
        self._server = server
        server.should_exit = self._is_set

    def __call__(self, *_: Any) -> None:
        self._is_set = True
        if self._server is not None:
            self._server.should_exit = True
