"""The server as an ASGI application: its routes, the door in front of them, and the answers to failures."""

from __future__ import annotations

import json

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from anymamba.serving.door import Door
from anymamba.serving.embeddings import EmbeddingService
from anymamba.serving.errors import ApiError
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
        key: as for `Door`.
        hosts: as for `Door`.
        origins: as for `Door`.
        verbose: as for `Door`.
    """
    routes = Routes(service) if isinstance(service, Service) else EmbeddingRoutes(service)
    app = Starlette(
        routes=routes.table(),
        exception_handlers={404: _not_found, 405: _wrong_method, ApiError: _api_error, Exception: _mistake},
    )
    seconds = service.limits.seconds + 30
    return Door(app, key=key, hosts=hosts, origins=origins, seconds=seconds, metrics=service.metrics, verbose=verbose)


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
