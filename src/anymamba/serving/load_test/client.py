"""A small client for servers with OpenAI's API: one connection per request, and the arrival time of every event."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

_JSON = "application/json"


class RequestError(Exception):
    """An error response, or a response that is not valid HTTP; errors are counted by their `kind`, a short name."""

    def __init__(self, kind: str, message: str) -> None:
        """Create an error of this kind."""
        super().__init__(message)
        self.kind = kind


class Target(NamedTuple):
    """The server that requests are sent to."""

    url: str  # for display, without credentials
    is_secure: bool  # by TLS
    host: str
    port: int
    base: str  # prefix of all paths, such as "/v1"
    key: str | None  # API key that is sent with every request

    @classmethod
    def from_url(cls, url: str, key: str | None = None) -> Target:
        """Parse a URL that may or may not end in /v1; raise ValueError if it is invalid."""
        expected = f"expected a URL such as http://127.0.0.1:8080, got {url!r}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(expected) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(expected)
        is_secure = parts.scheme == "https"
        base = parts.path.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        display_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{base}"
        return cls(display_url, is_secure, parts.hostname, port or (443 if is_secure else 80), base, key)


class StreamEvent(NamedTuple):
    """One event of a stream and its arrival time on the clock of `time.perf_counter`."""

    time: float
    data: dict[str, Any]


async def get_json(target: Target, path: str) -> Any:
    """Return the JSON document at a path.

    Raises:
        RequestError: The server responds with an error.
        OSError: The server cannot be reached.
    """
    async with aclosing(_send_request(target, "GET", path, None)) as chunks:
        content = b"".join([chunk async for chunk in chunks])
    try:
        return json.loads(content)
    except ValueError as error:
        raise RequestError("no JSON", f"{target.url}{path}: expected JSON, got {content[:60]!r}") from error


async def stream(target: Target, path: str, body: dict[str, Any]) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of a streamed response, up to its [DONE].

    Raises:
        RequestError: The server responds with an error, before the stream or in it, or breaks the stream off.
        OSError: The server cannot be reached.
    """
    buffer = b""
    is_complete = False
    content = json.dumps({**body, "stream": True}).encode()
    async with aclosing(_send_request(target, "POST", path, content)) as chunks:
        async for chunk in chunks:
            now = time.perf_counter()
            *events, buffer = (buffer + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if not event.startswith(b"data:"):
                    continue
                payload = event[5:].strip()
                if payload == b"[DONE]":
                    is_complete = True
                    continue
                data = json.loads(payload)
                if "error" in data:
                    raise RequestError("error in the stream", _error_message(payload))
                yield StreamEvent(now, data)
    if not is_complete:
        raise RequestError("broken off", "the stream ended without [DONE]")


async def _send_request(target: Target, method: str, path: str, content: bytes | None) -> AsyncGenerator[bytes, None]:
    """Send a request and yield the chunks of the response's body."""
    tls = ssl.create_default_context() if target.is_secure else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    try:
        connection = h11.Connection(h11.CLIENT)
        writer.write(_encode_request(connection, target, method, path, content))
        status = 0
        error_body = b""
        while True:
            try:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(2**16))
                    continue
            except h11.RemoteProtocolError as error:
                message = f"the response is incomplete or not valid HTTP: {error}"
                raise RequestError("broken off", message) from error
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield bytes(event.data)
                else:
                    error_body += bytes(event.data)[: 2**16]
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
        if status != 200:
            raise RequestError(f"status {status}", _error_message(error_body) or f"status {status}")
    finally:
        writer.close()


def _encode_request(connection: h11.Connection, target: Target, method: str, path: str, content: bytes | None) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = [("Host", f"{host}:{target.port}"), ("Connection", "close"), ("User-Agent", "anymamba bench-serve")]
    if target.key is not None:
        headers.append(("Authorization", f"Bearer {target.key}"))
    if content is not None:
        headers += [("Content-Type", _JSON), ("Content-Length", str(len(content)))]
    request = connection.send(h11.Request(method=method, target=target.base + path, headers=headers)) or b""
    if content is not None:
        request += connection.send(h11.Data(data=content)) or b""
    return request + (connection.send(h11.EndOfMessage()) or b"")


def _error_message(content: bytes) -> str:
    """Return the message of an error response in one line."""
    try:
        text = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode("utf-8", "replace")
    return " ".join(text.split())[:300]
