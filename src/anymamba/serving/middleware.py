"""Access control: which requests are accepted, which headers every response has, and how failures are reported."""

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

from anymamba.serving.api.fields import ApiError, internal_error
from anymamba.serving.metrics import Metrics

# The page and its files, which hold no secrets, and the health check need no key.
_PUBLIC_PATHS = ("/", "/health", "/static/")
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
# Other paths are counted together: clients choose them, and each would be a metric of its own.
_COUNTED_PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class AccessMiddleware:
    """Accepts requests that carry the key, are addressed to this server, and do not come from another site's page.

    Args:
        app: Application that handles accepted requests.
        key: Bearer token that clients must send, or None if no key is required.
        hosts: Names of the server in addition to localhost and IP addresses. The page of another site can make its own
            name resolve to this server, but it cannot make a browser send an address in place of that name. "*" is any
            name, for a server that a proxy which checks names protects.
        origins: Sites whose pages may send requests.
        seconds: Time limit of a request and its response, after which the connection is closed.
        metrics: Metrics in which requests are counted.
        verbose: True to print a line per request.
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
        """Wrap `app`."""
        self._app = app
        self._key = None if key is None else key.encode()
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}
        self._origins = {origin.rstrip("/") for origin in origins}
        self._seconds = seconds
        self._metrics = metrics
        self._verbose = verbose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":  # websockets and lifespan events are not supported
            return
        sender = _ResponseSender(send, self._cors_headers(scope))
        try:
            self._check_access(scope)
            if scope["method"] == "OPTIONS":
                await sender.send_json(204, None, _preflight_headers(sender.cors_headers))
                return
            await asyncio.wait_for(self._app(scope, receive, sender), self._seconds)
        except ApiError as error:
            await sender.send_error(error)
        except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
            await sender.send_error(ApiError(408, "the time for the request ran out", code="timeout"))
        except asyncio.CancelledError:  # the server shut down before this request ended
            await sender.send_error(ApiError(503, "the server is shutting down", code="shutting_down"))
        except Exception:  # a bug: its traceback is for the log, not for the client
            traceback.print_exc(file=sys.stderr)
            await sender.send_error(internal_error())
        finally:
            path = scope["path"] if scope["path"] in _COUNTED_PATHS else "other"
            self._metrics.count("anymamba_requests_total", path=path, status=str(sender.status or "none"))
            if self._verbose:
                print(f"{time.strftime('%H:%M:%S')} {scope['method']} {path} {sender.status}", file=sys.stderr)

    def _check_access(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # 1) The request is addressed to this server.
        host = headers.get(b"host", "")
        if not self._is_own_host(host):
            message = (
                f"this server does not respond to the name {host[:80]!r}; start it with --allow-host NAME to allow it"
            )
            raise ApiError(403, message, code="host_not_allowed")
        # 2) It comes from the server's own page, from an allowed site, or not from a page at all.
        origin = headers.get(b"origin")
        same_origin = {f"http://{host}", f"https://{host}"}
        if origin is not None and origin not in same_origin | self._origins:
            message = "pages of other sites may not use this server; start it with --cors ORIGIN to allow one"
            raise ApiError(403, message, code="origin_not_allowed")
        # 3) It carries the key.
        path = scope["path"]
        is_public = path in _PUBLIC_PATHS or path.startswith("/static/") or scope["method"] == "OPTIONS"
        if self._key is None or is_public:
            return
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._key):
            problem = "a different one" if token else "none"
            message = f"expected the server's key, as in 'Authorization: Bearer KEY', got {problem}"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_own_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self._hosts or name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _cors_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is None or origin.decode("latin-1") not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


def _preflight_headers(cors_headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    allow = {"Allow": "GET, POST, DELETE, OPTIONS"}
    if not cors_headers:
        return allow
    return allow | {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": "Authorization, Content-Type",
        "Access-Control-Max-Age": "600",
    }


class _ResponseSender:
    """Sends a response with the middleware's headers, or an error if no response has begun."""

    def __init__(self, send: Send, cors_headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self.cors_headers = cors_headers  # which let the page of an allowed site read the response
        self.status = 0  # that was sent, or 0 before that

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS, *self.cors_headers]}
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error; if a response has begun, its connection is closed before it is complete."""
        if not self.status:
            await self.send_json(error.status, error.body(), error.headers)

    async def send_json(self, status: int, body: Any, headers: dict[str, str]) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        pairs = [(b"content-length", str(len(content)).encode())] if status != 204 else []
        pairs += [(b"content-type", b"application/json")] if content else []
        pairs += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": status, "headers": pairs})
        await self({"type": "http.response.body", "body": content})
