"""Embeddings: a bidirectional model embeds one text after another, each as if it were alone."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.sequence.masked_lm import MaskedLM
from anymamba.serving.api.fields import (
    ApiError,
    check_fields,
    check_token_ids,
    invalid_value,
    list_texts,
    preview,
    too_many_requests,
)
from anymamba.serving.api.requests import Limits
from anymamba.serving.metrics import Metrics
from anymamba.serving.prompts import tokenize_prompt
from anymamba.serving.routes import (
    CLIENT_CLOSED,
    PROMETHEUS,
    ModelRoutes,
    cancel_on_disconnect,
    json_response,
    read_request,
)
from anymamba.version import __version__

_FIELDS = {"model", "input", "encoding_format", "dimensions"}
_MAX_TEXTS = 2048  # per request, as in OpenAI's API


class EmbeddingRequest(NamedTuple):
    """The checked fields of a request for embeddings."""

    texts: list[str] | list[list[int]]  # texts, or their token ids
    encoding: str  # of the vectors, "float" or "base64"


class EmbeddingRoutes(ModelRoutes):
    """The HTTP routes of a server that embeds texts."""

    def __init__(self, service: EmbeddingService) -> None:
        """Serve this service; there is no page."""
        sizes = {"vocab_size": service.vocab_size, "dimensions": service.dimensions}
        super().__init__(id=service.name, created=service.created, **sizes)
        self._service = service

    def table(self) -> list[Route]:
        """Return the routes."""
        return [
            *super().table(),
            Route("/health", self.get_health),
            Route("/metrics", self.get_metrics),
            Route("/v1/embeddings", self.create_embeddings, methods=["POST"]),
            *(Route(path, self.reject_text) for path in ("/", "/v1/completions", "/v1/chat/completions")),
            *(Route(path, self.reject_text, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")),
        ]

    async def get_health(self, _: Request) -> Response:
        """Return the status of the server, and its load."""
        return json_response({"status": "ok", "version": __version__, "requests": self._service.open})

    async def get_metrics(self, _: Request) -> Response:
        """Return the metrics for Prometheus."""
        service = self._service
        counters = {"anymamba_read_tokens_total": service.tokens_read}
        gauges = {"anymamba_requests_open": service.open}
        return Response(service.metrics.format(counters, gauges), media_type=PROMETHEUS)

    async def create_embeddings(self, http_request: Request) -> Response:
        """Return a vector for each text."""
        service = self._service
        request = await read_request(http_request, service.limits, service.read_fields)
        body = await cancel_on_disconnect(http_request, service.handle(request), service.metrics)
        if body is None:
            return Response(status_code=CLIENT_CLOSED)
        return await asyncio.to_thread(json_response, body)  # many numbers, which would block the event loop

    async def reject_text(self, _: Request) -> Response:
        """Reject a request for text."""
        raise ApiError(400, "this model does not generate text; it serves /v1/embeddings", code="model_without_text")


class EmbeddingService:
    """A bidirectional model that embeds texts; `name` is its name for clients."""

    def __init__(self, model: MaskedLM, tokenizer: Tokenizer, *, name: str, limits: Limits) -> None:
        """Prepare the service; its thread starts with the first request."""
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.limits = limits
        self.metrics = Metrics()
        self.created = int(time.time())
        assert model.config.vocab_size is not None
        self.vocab_size: int = model.config.vocab_size
        self.dimensions = model.embedding.weight.shape[1]
        self.open = 0  # number of open requests
        self.tokens_read = 0  # since the start
        self._deadline = float("inf")
        threads = torch.get_num_threads()  # torch stores the number of threads per thread
        self._executor = ThreadPoolExecutor(1, "embeddings", lambda: torch.set_num_threads(threads))

    def start(self) -> None:
        """Do nothing: the thread starts with the first request."""

    def set_deadline(self, deadline: float) -> None:
        """Let no request run beyond this time on the clock of `time.monotonic`."""
        self._deadline = deadline

    def close(self, _: float = 0.0) -> None:
        """Stop the thread; there is nothing to write."""
        self._deadline = 0.0
        self._executor.shutdown(cancel_futures=True)

    def read_fields(self, body: dict[str, Any]) -> EmbeddingRequest:
        """Read the fields of a body."""
        check_fields(body, _FIELDS, self.name)
        encoding = body.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise invalid_value("encoding_format", f"encoding_format must be float or base64, got {preview(encoding)}")
        if body.get("dimensions") not in (None, self.dimensions) or isinstance(body.get("dimensions"), bool):
            message = f"dimensions must be {self.dimensions} or left out, got {preview(body['dimensions'])}"
            raise invalid_value("dimensions", message)
        return EmbeddingRequest(self._read_texts(body.get("input")), encoding)

    def _read_texts(self, value: Any) -> list[Any]:
        texts = list_texts(value)
        if not (0 < len(texts) <= _MAX_TEXTS and all(texts)):
            expected = f"a string, token ids, or a list of up to {_MAX_TEXTS:,} of either, none of them empty"
            raise invalid_value("input", f"input must be {expected}, got {preview(value)}")
        check_token_ids("input", texts, self.vocab_size)
        return texts

    async def handle(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Return the response to a request; if the task is cancelled, the thread stops at the next text."""
        if self.open >= self.limits.max_requests:
            raise too_many_requests(self.open)
        self.open += 1
        cancelled = threading.Event()
        try:
            deadline = time.monotonic() + self.limits.request_seconds
            loop = asyncio.get_running_loop()
            vectors, tokens = await loop.run_in_executor(
                self._executor, self._embed_texts, request, deadline, cancelled.is_set
            )
        finally:
            cancelled.set()
            self.open -= 1
        data = [
            {"object": "embedding", "index": i, "embedding": _encode_vector(vector, request.encoding)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.name, "usage": usage}

    @torch.no_grad()
    def _embed_texts(
        self, request: EmbeddingRequest, deadline: float, is_cancelled: Callable[[], bool]
    ) -> tuple[list[Tensor], int]:
        max_tokens = self.limits.max_prompt_tokens
        texts = [tokenize_prompt(self.tokenizer, text, "input", max_tokens) for text in request.texts]
        vectors = []
        for ids in texts:
            if is_cancelled():
                break
            if time.monotonic() >= min(deadline, self._deadline):
                raise ApiError(408, "the time for the request ran out before its texts were read", code="timeout")
            vector_1d = self.model.embed(torch.tensor([ids], device=self.model.embedding.weight.device))
            vectors.append(vector_1d[0].to("cpu", torch.float32))
            self.tokens_read += len(ids)
        return vectors, sum(map(len, texts))


def _encode_vector(vector_d: Tensor, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector_d.numpy().astype("<f4").tobytes()).decode()
    return vector_d.tolist()
