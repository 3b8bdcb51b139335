"""What the server answers at each path, for a model that writes text and for one that gives embeddings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from anymamba.serving.api.errors import ApiError
from anymamba.serving.api.requests import GenerationRequest, Limits, read_chat, read_completion
from anymamba.serving.api.responses import ResponseBuilder
from anymamba.serving.embeddings import EmbeddingService
from anymamba.serving.http_io import EventStream, as_event, cancel_on_disconnect, json_response, read_object
from anymamba.serving.service import Service
from anymamba.serving.state_cache import session_key
from anymamba.version import __version__

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


class _Common:
    """Answers about the model, which are the same for both kinds."""

    def __init__(self, service: Service | EmbeddingService) -> None:
        self._about = service

    async def models(self, _: Request) -> Response:
        """The model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model with this name."""
        if (name := request.path_params["name"]) != self._about.name:
            message = f"there is no model {name[:80]!r}; this server has {self._about.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        about = self._about
        return {"id": about.name, "object": "model", "created": about.created, "owned_by": "anymamba"}


class EmbeddingRoutes(_Common):
    """What a server of embeddings answers at each path."""

    def __init__(self, service: EmbeddingService) -> None:
        """ResponseBuilder with this service; there is no page."""
        super().__init__(service)
        self._service = service

    def table(self) -> list[Route]:
        """The paths."""
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.no_text) for path in ("/", "/v1/completions", "/v1/chat/completions")),
            *(Route(path, self.no_text, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")),
        ]

    async def health(self, _: Request) -> Response:
        """The state of the server, and its load."""
        return json_response({"status": "ok", "version": __version__, "requests": self._service.open})

    async def metrics(self, _: Request) -> Response:
        """Numbers for Prometheus."""
        service = self._service
        counters, gauges = {"anymamba_read_tokens_total": service.tokens_read}, {"anymamba_requests_open": service.open}
        return Response(service.metrics.text(counters, gauges), media_type=_PROMETHEUS)

    async def embeddings(self, request: Request) -> Response:
        """A vector for each text."""
        service = self._service
        wanted = service.read(await read_object(request, service.limits))
        made = await cancel_on_disconnect(request, service.handle(wanted), service.metrics)
        if made is None:
            return Response(status_code=499)
        content = await asyncio.to_thread(json.dumps, made)  # many numbers, which would hold up the loop
        return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def no_text(self, _: Request) -> Response:
        """Refuse, and say what the model can do."""
        raise ApiError(400, "this model does not generate text; it serves /v1/embeddings", code="model_without_text")

    def _model(self) -> dict[str, Any]:
        return {**super()._model(), "vocab_size": self._service.vocab_size, "dimensions": self._service.dimensions}


class Routes(_Common):
    """What a server of text answers at each path."""

    def __init__(self, service: Service) -> None:
        """Load the page."""
        super().__init__(service)
        self._service = service
        folder = files("anymamba.serving") / "page"
        self._page = {name: (folder / name).read_bytes() for name in _PAGE}

    def table(self) -> list[Route]:
        """The paths."""
        return [
            Route("/", self.page),
            Route("/page/{name}", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.no_embeddings, methods=["POST"]),
            Route("/v1/sessions/{name:path}", self.session, methods=["GET", "DELETE"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page, or a part of it."""
        name = request.path_params.get("name", "index.html")
        if name not in _PAGE:
            raise ApiError(404, "there is no such part of the page", code="not_found")
        return Response(self._page[name], media_type=_PAGE[name], headers={"Cache-Control": "no-cache"})

    async def health(self, _: Request) -> Response:
        """The state of the server, and its load."""
        return json_response(
            {"status": "ok", "version": __version__, "requests": self._service.open, **self._service.engine.load}
        )

    async def metrics(self, _: Request) -> Response:
        """Numbers for Prometheus."""
        service, engine, store = self._service, self._service.engine, self._service.store
        counters = {
            "anymamba_read_tokens_total": engine.tokens_read,
            "anymamba_written_tokens_total": engine.tokens_written,
            "anymamba_steps_total": engine.steps,
            "anymamba_state_hits_total": store.hits,
            "anymamba_state_misses_total": store.misses,
            "anymamba_state_evictions_total": store.evictions,
        }
        gauges = {f"anymamba_rows_{name}": float(value) for name, value in engine.load.items()}
        gauges |= {
            "anymamba_requests_open": float(service.open),
            "anymamba_states": float(len(store)),
            "anymamba_state_bytes": float(store.nbytes),
        }
        return Response(service.metrics.text(counters, gauges), media_type=_PROMETHEUS)

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            **super()._model(),
            "vocab_size": service.model.config.vocab_size,
            "state_bytes": service.state_bytes,
            "max_tokens": service.limits.max_tokens,
        }

    async def no_embeddings(self, _: Request) -> Response:
        """Refuse, and say what the model can do."""
        message = "this model does not give embeddings; it serves /v1/completions and /v1/chat/completions"
        raise ApiError(400, message, code="model_without_embeddings")

    async def session(self, request: Request) -> Response:
        """What a session has read; DELETE removes it."""
        key = session_key(request.path_params["name"])
        if request.method == "DELETE":
            found = await asyncio.to_thread(self._service.store.remove, key)
            if not found:
                raise ApiError(404, "there is no such session", code="not_found")
            return json_response({"object": "session", "deleted": True})
        with suppress(ValueError):
            kept = await asyncio.to_thread(self._service.store.get, key)
            if kept is not None:
                return json_response({"object": "session", "tokens": kept.tokens, "bytes": kept.state.nbytes})
        raise ApiError(404, "there is no such session", code="not_found")

    async def completions(self, request: Request) -> Response:
        """A text and what follows it."""
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        """A conversation and its next message."""
        return await self._answer(request, read_chat)

    async def _answer(
        self, request: Request, read: Callable[[dict[str, Any], Limits, int, str], GenerationRequest]
    ) -> Response:
        service = self._service
        wanted = read(
            await read_object(request, service.limits), service.limits, service.model.config.vocab_size, service.name
        )
        events, answer = service.handle(wanted), ResponseBuilder(service, wanted)
        if not wanted.stream:
            return await self._whole(request, events, answer)
        # An error in the prompt needs a status of its own, so the stream starts only after the first event.
        first = await cancel_on_disconnect(request, anext(events), service.metrics)
        if first is None:
            await events.aclose()
            return Response(status_code=499)
        return EventStream(
            self._stream(first, events, answer, wanted),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            events=events,
        )

    async def _whole(self, request: Request, events: AsyncGenerator[Any, None], answer: ResponseBuilder) -> Response:
        async def collect() -> dict[str, Any]:
            async with aclosing(events) as found:
                async for prompt, event in found:
                    answer.add(prompt, event)
            return answer.whole()

        made = await cancel_on_disconnect(request, collect(), self._service.metrics)
        return Response(status_code=499) if made is None else json_response(made)

    async def _stream(
        self,
        first: tuple[int, Any],
        events: AsyncGenerator[Any, None],
        answer: ResponseBuilder,
        wanted: GenerationRequest,
    ) -> AsyncGenerator[bytes, None]:
        done = False
        try:
            async with aclosing(events) as found:
                for chunk in answer.add(*first):
                    yield as_event(chunk)
                async for prompt, event in found:
                    for chunk in answer.add(prompt, event):
                        yield as_event(chunk)
            if wanted.include_usage:
                yield as_event(answer.last_chunk())
            done = True
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            done = True
            yield as_event(error.body())
        finally:
            if not done:
                self._service.metrics.count("anymamba_disconnects_total")
