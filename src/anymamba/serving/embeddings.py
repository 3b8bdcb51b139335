"""Embeddings of texts over HTTP, by a bidirectional model: one text after another, each as if alone."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.sequence.masked_lm import MaskedLM
from anymamba.serving.api.errors import ApiError, invalid, too_many_requests
from anymamba.serving.api.requests import Limits, check_fields, is_text, shown
from anymamba.serving.metrics import Metrics

_FIELDS = {"model", "input", "encoding_format", "dimensions"}
_MOST = 2048  # texts of a request, as in OpenAI's API


class EmbeddingRequest(NamedTuple):
    """What a request asks for.

    Attributes:
        texts: the texts, or their lists of token ids.
        encoding: of the vectors, float or base64.
    """

    texts: list[str] | list[list[int]]
    encoding: str


class EmbeddingService:
    """A model that embeds texts.

    Args:
        model: a bidirectional model.
        tokenizer: of its text.
        name: what clients call the model.
        limits: on requests.

    Attributes:
        open: how many requests are being answered or waiting.
        tokens_read: since the start.
    """

    def __init__(self, model: MaskedLM, tokenizer: Tokenizer, *, name: str, limits: Limits) -> None:
        """Nothing runs yet."""
        self.model, self.tokenizer, self.name, self.limits = model, tokenizer, name, limits
        self.metrics, self.created = Metrics(), int(time.time())
        assert model.config.vocab_size is not None
        self.vocab_size: int = model.config.vocab_size
        self.dimensions = model.embedding.weight.shape[1]
        self.open = self.tokens_read = 0
        self._deadline = float("inf")
        threads = torch.get_num_threads()
        # torch keeps the number of threads for each thread.
        self._worker = ThreadPoolExecutor(1, "embeddings", lambda: torch.set_num_threads(threads))

    def start(self) -> None:
        """Nothing to do: the worker's thread starts with the first request."""

    def finish_by(self, deadline: float) -> None:
        """Let no request run beyond this moment, on the clock of `time.monotonic`."""
        self._deadline = deadline

    def close(self, _: float = 0.0) -> None:
        """End the worker; there is nothing to write."""
        self._deadline = 0.0
        self._worker.shutdown(cancel_futures=True)

    def read(self, body: dict[str, Any]) -> EmbeddingRequest:
        """What a body asks for.

        Raises:
            ApiError: a field is wrong.
        """
        check_fields(body, _FIELDS, self.name)
        encoding = body.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise invalid("encoding_format", f"encoding_format must be float or base64, got {shown(encoding)}")
        if body.get("dimensions") not in (None, self.dimensions) or isinstance(body.get("dimensions"), bool):
            message = f"dimensions must be {self.dimensions} or left out, got {shown(body['dimensions'])}"
            raise invalid("dimensions", message)
        return EmbeddingRequest(self._texts(body.get("input")), encoding)

    def _texts(self, given: Any) -> Any:
        one = isinstance(given, str) or (isinstance(given, list) and given and all(type(x) is int for x in given))
        texts = [given] if one else given
        fine = isinstance(texts, list) and 0 < len(texts) <= _MOST
        fine = fine and (
            all(isinstance(x, str) and x and is_text(x) for x in texts)
            or all(isinstance(x, list) and x and all(type(i) is int for i in x) for x in texts)
        )
        if not fine:
            expected = f"a string, token ids, or a list of up to {_MOST:,} of either, none of them empty"
            raise invalid("input", f"input must be {expected}, got {shown(given)}")
        wrong = next((i for x in texts if not isinstance(x, str) for i in x if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise invalid("input", f"token ids must be between 0 and {self.vocab_size - 1}, got {shown(wrong)}")
        return texts

    async def handle(self, wanted: EmbeddingRequest) -> dict[str, Any]:
        """The answer to a request; if the task is cancelled, the worker stops at the next text.

        Raises:
            ApiError: a text is too long, too many requests are open, or the time ran out.
        """
        if self.open >= self.limits.requests:
            raise too_many_requests(self.open)
        self.open += 1
        gone = threading.Event()
        try:
            deadline = time.monotonic() + self.limits.seconds
            loop = asyncio.get_running_loop()
            vectors, tokens = await loop.run_in_executor(self._worker, self._vectors, wanted, deadline, gone.is_set)
        finally:
            gone.set()
            self.open -= 1
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, wanted.encoding)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.name, "usage": usage}

    @torch.no_grad()
    def _vectors(self, wanted: EmbeddingRequest, deadline: float, gone: Callable[[], bool]) -> tuple[list[Tensor], int]:
        texts = [self._encode(text) for text in wanted.texts]
        vectors = []
        for ids in texts:
            if gone():
                break
            if time.monotonic() >= min(deadline, self._deadline):
                raise ApiError(408, "the time for the request ran out before its texts were read", code="timeout")
            vector_1d = self.model.embed(torch.tensor([ids], device=self.model.embedding.weight.device))
            vectors.append(vector_1d[0].to("cpu", torch.float32))
            self.tokens_read += len(ids)
        return vectors, sum(map(len, texts))

    def _encode(self, text: str | list[int]) -> list[int]:
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        if not ids:
            raise invalid("input", "each text in input must have at least one token, got none")
        if len(ids) > self.limits.prompt:
            message = f"each text in input may have at most {self.limits.prompt} tokens, got {len(ids)}"
            raise ApiError(400, message, param="input", code="context_length_exceeded")
        return ids


def _encoded(vector_d: Tensor, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector_d.numpy().astype("<f4").tobytes()).decode()
    return vector_d.tolist()
