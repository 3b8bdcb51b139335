"""A small client for servers with OpenAI's API: one connection per request, and the time of every event."""

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


class Refused(Exception):  # noqa: N818
    """The server answered with an error, or not in HTTP; `kind` is a short name by which errors are counted."""

    def __init__(self, kind: str, message: str) -> None:
        """An error of this kind."""
        super().__init__(message)
        self.kind = kind


class Target(NamedTuple):
    """Where requests go.

    Attributes:
        url: as it is shown.
        secure: with TLS.
        host: of the server.
        port: of the server.
        base: of paths, such as "/v1".
        key: sent with every request, if there is one.
    """

    url: str
    secure: bool
    host: str
    port: int
    base: str
    key: str | None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Target:
        """From a URL, with or without /v1 at its end.

        Raises:
            ValueError: it is not a URL.
        """
        expected = f"expected a URL such as http://127.0.0.1:8080, got {url!r}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(expected) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(expected)
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{base}"
        return cls(shown, secure, parts.hostname, port or (443 if secure else 80), base, key)


class Moment(NamedTuple):
    """An event of a stream and when it arrived, on the clock of `time.perf_counter`."""

    time: float
    data: dict[str, Any]


async def get(target: Target, path: str) -> Any:
    """The JSON that a path answers with.

    Raises:
        Refused: it answers with an error.
        OSError: the server cannot be reached.
    """
    async with aclosing(_answer(target, "GET", path, None)) as parts:
        content = b"".join([part async for part in parts])
    try:
        return json.loads(content)
    except ValueError as error:
        raise Refused("no JSON", f"{target.url}{path}: expected JSON, got {content[:60]!r}") from error


async def stream(target: Target, path: str, body: dict[str, Any]) -> AsyncGenerator[Moment, None]:
    """The events of a stream, up to its [DONE].

    Raises:
        Refused: the server answers with an error, before the stream or in it, or breaks it off.
        OSError: the server cannot be reached.
    """
    held, done = b"", False
    async with aclosing(_answer(target, "POST", path, json.dumps({**body, "stream": True}).encode())) as parts:
        async for part in parts:
            now = time.perf_counter()
            *events, held = (held + part).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if not event.startswith(b"data:"):
                    continue
                content = event[5:].strip()
                if content == b"[DONE]":
                    done = True
                    continue
                data = json.loads(content)
                if "error" in data:
                    raise Refused("error in the stream", _message(content))
                yield Moment(now, data)
    if not done:
        raise Refused("broken off", "the stream ended without [DONE]")


async def _answer(target: Target, method: str, path: str, content: bytes | None) -> AsyncGenerator[bytes, None]:
    """The parts of an answer's body."""
    secure = ssl.create_default_context() if target.secure else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=secure)
    try:
        connection = h11.Connection(h11.CLIENT)
        writer.write(_request(connection, target, method, path, content))
        status, failed = 0, b""
        while True:
            try:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(2**16))
                    continue
            except h11.RemoteProtocolError as error:
                raise Refused("broken off", f"the answer is not HTTP, or is broken off: {error}") from error
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield bytes(event.data)
                else:
                    failed += bytes(event.data)[: 2**16]
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
        if status != 200:
            raise Refused(f"status {status}", _message(failed) or f"status {status}")
    finally:
        writer.close()


def _request(connection: h11.Connection, target: Target, method: str, path: str, content: bytes | None) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = [("Host", f"{host}:{target.port}"), ("Connection", "close"), ("User-Agent", "anymamba bench-serve")]
    if target.key is not None:
        headers.append(("Authorization", f"Bearer {target.key}"))
    if content is not None:
        headers += [("Content-Type", _JSON), ("Content-Length", str(len(content)))]
    sent = connection.send(h11.Request(method=method, target=target.base + path, headers=headers)) or b""
    if content is not None:
        sent += connection.send(h11.Data(data=content)) or b""
    return sent + (connection.send(h11.EndOfMessage()) or b"")


def _message(content: bytes) -> str:
    """What an error says, in one line."""
    try:
        text = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = content.decode("utf-8", "replace")
    return " ".join(text.split())[:300]
