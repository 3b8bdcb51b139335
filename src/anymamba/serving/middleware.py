"""The server's door: who may send requests, which headers every answer has, and how errors are answered."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anymamba.serving.api.errors import ApiError
from anymamba.serving.metrics import Metrics

# The page and its parts, which hold nothing secret, and the health check.
_OPEN = ("/", "/health", "/page/")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
_PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class AccessMiddleware:
    """Admits requests that have the key, are addressed to this server, and do not come from another site's page.

    Args:
        app: the application behind it.
        key: clients must send it as a bearer token; None if no key is required.
        hosts: names of the server besides localhost and plain addresses. The page of another site can make its own
            name resolve to this server, but it cannot make a browser send an address in place of that name.
        origins: sites whose pages may send requests.
        seconds: the time for a request and its answer, after which the connection is closed.
        metrics: counts the requests.
        verbose: print a line for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        hosts: Iterable[str],
        origins: Iterable[str],
        seconds: float,
        metrics: Metrics,
        verbose: bool = False,
    ) -> None:
        """Stand in front of `app`."""
        self._app, self._key, self._seconds, self._metrics, self._verbose = app, key, seconds, metrics, verbose
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}
        self._origins = {origin.rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ResponseBuilder a request."""
        if scope["type"] != "http":  # there are no websockets here
            return
        answer = _ResponseSender(send, self._cors(scope))
        try:
            self._check(scope)
            if scope["method"] == "OPTIONS":
                await answer.send_json(204, None, _preflight(answer.cors))
                return
            await asyncio.wait_for(self._app(scope, receive, answer), self._seconds)
        except ApiError as error:
            await answer.send_error(error)
        except (asyncio.TimeoutError, TimeoutError):  # different before Python 3.11
            await answer.send_error(ApiError(408, "the time for the request ran out", code="timeout"))
        except asyncio.CancelledError:  # the server ends, and this request did not end in time
            await answer.send_error(ApiError(503, "the server is shutting down", code="shutting_down"))
        except Exception:  # a bug: its traceback is for the log, not for the client
            traceback.print_exc(file=sys.stderr)
            await answer.send_error(ApiError(500, "internal server error; see the server's log", code="internal_error"))
        finally:
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self._metrics.count("anymamba_requests_total", path=path, status=str(answer.status or "none"))
            if self._verbose:
                print(f"{time.strftime('%H:%M:%S')} {scope['method']} {path} {answer.status}", file=sys.stderr)

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self._is_ours(host):
            message = (
                f"this server does not answer to the name {host[:80]!r}; start it with --allow-host NAME to allow it"
            )
            raise ApiError(403, message, code="host_not_allowed")
        origin = headers.get(b"origin")
        own = {f"http://{host}", f"https://{host}"}
        if origin is not None and origin not in own | self._origins:
            message = "pages of other sites may not use this server; start it with --cors ORIGIN to allow one"
            raise ApiError(403, message, code="origin_not_allowed")
        path = scope["path"]
        is_open = path in _OPEN or path.startswith("/page/") or scope["method"] == "OPTIONS"
        key = None if self._key is None else self._key.encode()
        if key is not None and not is_open:
            given = headers.get(b"authorization", "").partition(" ")
            fine = given[0].lower() == "bearer" and hmac.compare_digest(given[2].strip().encode("latin-1"), key)
            if not fine:
                message = "expected the server's key, as in 'Authorization: Bearer KEY', got "
                message += "a different one" if given[2] else "none"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is None or origin.decode("latin-1") not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


def _preflight(cors: list[tuple[bytes, bytes]]) -> dict[str, str]:
    allow = {"Allow": "GET, POST, DELETE, OPTIONS"}
    if not cors:
        return allow
    return allow | {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Access-Control-Max-Age": "600",
    }


class _ResponseSender:
    """Sends an answer with the door's headers, or an error if no answer has begun."""

    def __init__(self, send: Send, cors: list[tuple[bytes, bytes]]) -> None:
        self._send, self.cors, self.status = send, cors, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS, *self.cors]}
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error; if an answer has begun, its connection is closed before it is complete."""
        if not self.status:
            await self.send_json(error.status, error.body(), error.headers)

    async def send_json(self, status: int, body: Any, headers: dict[str, str]) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        pairs = [(b"content-length", str(len(content)).encode())] if status != 204 else []
        pairs += [(b"content-type", b"application/json")] if content else []
        pairs += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": status, "headers": pairs})
        await self({"type": "http.response.body", "body": content})
