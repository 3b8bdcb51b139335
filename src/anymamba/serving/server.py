"""The process: a socket, the loop, and an orderly end.

§ The server as an ASGI application: its routes, the door in front of them, and the answers to failures.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from anymamba.serving.api.errors import ApiError
from anymamba.serving.embeddings import EmbeddingService
from anymamba.serving.middleware import AccessMiddleware
from anymamba.serving.routes import EmbeddingRoutes, Routes
from anymamba.serving.service import Service


def make_app(
    service: Service | EmbeddingService,
    *,
    key: str | None = None,
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    verbose: bool = False,
) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        service: what answers; it must have been started.
        key: as for `AccessMiddleware`.
        hosts: as for `AccessMiddleware`.
        origins: as for `AccessMiddleware`.
        verbose: as for `AccessMiddleware`.
    """
    routes = Routes(service) if isinstance(service, Service) else EmbeddingRoutes(service)
    app = Starlette(
        routes=routes.table(),
        exception_handlers={404: _not_found, 405: _wrong_method, ApiError: _api_error, Exception: _mistake},
    )
    seconds = service.limits.seconds + 30
    return AccessMiddleware(
        app, key=key, hosts=hosts, origins=origins, seconds=seconds, metrics=service.metrics, verbose=verbose
    )


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    closing = {"Connection": "close"} if error.status in (408, 413) else {}  # the rest of the body is not waited for
    content, headers = json.dumps(error.body()), {**error.headers, **closing}
    return Response(content, error.status, headers, media_type="application/json")


async def _not_found(request: Request, _: Exception) -> Response:
    return await _api_error(request, ApiError(404, f"there is nothing at {request.url.path[:80]!r}", code="not_found"))


async def _wrong_method(request: Request, _: Exception) -> Response:
    message = f"{request.url.path[:80]} does not support {request.method}"
    return await _api_error(request, ApiError(405, message, code="method_not_allowed"))


async def _mistake(request: Request, _: Exception) -> Response:
    # The door prints the traceback: it is for the log, not for the client.
    return await _api_error(
        request, ApiError(500, "internal server error; see the server's log", code="internal_error")
    )


class Server(uvicorn.Server):
    """Shuts down in order: a reply that is not complete when the grace period ends is cut there, as by its length."""

    def __init__(self, config: uvicorn.Config, service: Service | EmbeddingService, grace: float) -> None:
        """Nothing runs yet."""
        super().__init__(config)
        self._service, self._grace = service, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing new, and wait for running requests."""
        self._service.finish_by(time.monotonic() + self._grace)
        await super().shutdown(sockets)


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 with limits: on connections, on the time for headers to arrive, and on the time in which a client reads
    nothing of its answer.
    """

    seconds = 10.0
    most = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for nothing yet."""
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._full: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take data, and check whether headers are still to come."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop()
        self._stop_full()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Limit the time for a client that does not read: its full buffer would keep the connection open."""
        super().pause_writing()
        self._stop_full()
        self._full = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self._stop_full()
        super().resume_writing()

    def _stop_full(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None

    def _watch(self) -> None:
        """Run the timer while headers are awaited; between requests, uvicorn has one of its own."""
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._give_up)

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.abort()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
    """Respond until SIGINT or SIGTERM, then finish running requests within `grace` seconds; a second Ctrl-C exits.

    Args:
        service: what answers.
        app: makes the application once the service has started.
        host: address to listen on.
        port: to listen on; 0 for a free one.
        grace: seconds for running requests to finish, and as many again to write kept states to disk.
        connections: the most at a time; further ones are closed.
        ready: called with the server's address when it listens.

    Raises:
        OSError: the server cannot listen on the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=256) as listener:
        listener.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        protocol = type("Protocol", (TimeoutProtocol,), {"seconds": service.limits.body_seconds, "most": connections})
        ends = _Ends()
        # Until uvicorn handles signals, and when it raises them again after its end.
        before = {number: signal.signal(number, ends) for number in (signal.SIGINT, signal.SIGTERM)}
        url = f"http://{shown}:{listener.getsockname()[1]}"
        try:
            asyncio.run(_serve(service, app, listener, protocol, grace, url, ready, ends))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            service.close(grace)


async def _serve(
    service: Service | EmbeddingService,
    app: Callable[[], ASGIApp],
    listener: socket.socket,
    protocol: type[asyncio.Protocol],
    grace: float,
    url: str,
    ready: Callable[[str], None],
    ends: _Ends,
) -> None:
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
    ends.server = Server(config, service, grace)
    ends.server.should_exit = ends.asked
    ready(url)
    await ends.server.serve(sockets=[listener])


class _Ends:
    """A signal handler that stops the server, even before it has started."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None
        self.asked = False

    def __call__(self, *_: Any) -> None:
        self.asked = True
        if self.server is not None:
            self.server.should_exit = True
