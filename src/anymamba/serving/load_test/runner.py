"""Requests in a closed loop, so many at a time, or in an open loop, so many per second regardless of the answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from anymamba.serving.load_test.client import Refused, Target, get, stream

_WORDS = ("the", "of", "and", "to", "in", "is", "it", "that", "was", "for", "on", "with", "one", "had", "not", "but")


class Range(NamedTuple):
    """A whole number between two others, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        """As it is given on the command line."""
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The load.

    Attributes:
        requests: how many, None for no bound.
        seconds: for how long new ones are sent, None for no bound.
        concurrency: how many at a time in a closed loop.
        rate: how many per second in an open loop, at random times; None for a closed loop.
        read: tokens of a prompt.
        write: tokens of a reply.
        warm_up: requests before those that count.
        seed: of prompts, lengths and times.
        timeout: seconds for a request.
        model: its name, if it is not the server's first.
        fields: to add to every request.
    """

    requests: int | None
    seconds: float | None
    concurrency: int
    rate: float | None
    read: Range
    write: Range
    warm_up: int
    seed: int
    timeout: float
    model: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class Model(NamedTuple):
    """What the server reports about its model; only anymamba's own servers report the vocabulary's size."""

    name: str
    vocab_size: int | None


@dataclass
class Request:
    """What became of a request; times are seconds since the first that counts.

    Attributes:
        due: when it was to be sent; a delay in sending it counts as the server's time.
        read: tokens of the prompt, by the server's count if it gives one.
        tokens: when each token came.
        end: when it was over.
        error: what kind of error there was, if there was one.
        message: what the server said about it.
    """

    due: float
    read: int
    tokens: list[float] = field(default_factory=list)
    end: float = 0.0
    error: str | None = None
    message: str | None = None


async def find_model(target: Target, name: str | None) -> Model:
    """The model that will answer.

    Raises:
        ValueError: the server cannot be reached, refuses, or has no such model.
    """
    try:
        listed = await asyncio.wait_for(get(target, "/models"), 30)
        entries = [entry for entry in listed["data"] if name in (None, entry["id"])]
        if not entries:
            raise ValueError(f"{target.url} has no model {name!r}")
        size = entries[0].get("vocab_size")
        return Model(entries[0]["id"], size if isinstance(size, int) else None)
    except (OSError, asyncio.TimeoutError) as error:
        raise ValueError(f"cannot reach {target.url}: {error or type(error).__name__}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{target.url}/models does not answer as OpenAI's API does") from error
    except Refused as error:
        raise ValueError(f"{target.url}/models: {error}") from error


def bodies(plan: Plan, model: Model, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Requests without end, the same for the same seed: tokens of the prompt, and the body."""
    chance = random.Random(seed)
    while True:
        read, write = chance.randint(*plan.read), chance.randint(*plan.write)
        body: dict[str, Any] = {"model": model.name, "max_tokens": write, "stream_options": {"include_usage": True}}
        if model.vocab_size is None:
            body["prompt"] = " ".join(chance.choice(_WORDS) for _ in range(read))
        else:
            body["prompt"] = [chance.randrange(model.vocab_size) for _ in range(read)]
            body |= {"ignore_eos": True, "return_token_ids": True, "seed": chance.randrange(2**31)}
        yield read, {**body, **plan.fields}


class Run:
    """A load in progress; `done` lists the requests that have ended."""

    def __init__(self, target: Target, plan: Plan, model: Model) -> None:
        """Nothing was sent yet."""
        self._target, self._plan, self._model = target, plan, model
        self.done: list[Request] = []
        self.open = 0
        self._began = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first request that counts was due."""
        return time.perf_counter() - self._began

    async def run(self, progress: Callable[[Run], None] = lambda _: None) -> list[Request]:
        """Send everything, and wait for the last answer; `progress` is called about every second."""
        for read, body in islice(bodies(self._plan, self._model, ~self._plan.seed), self._plan.warm_up):
            await self._send(Request(0.0, read), body)
        self._began = time.perf_counter()
        telling = asyncio.ensure_future(self._tell(progress))
        try:
            await (self._closed() if self._plan.rate is None else self._open(self._plan.rate))
        finally:
            telling.cancel()
        return self.done

    async def _tell(self, progress: Callable[[Run], None]) -> None:
        while True:
            await asyncio.sleep(1)
            progress(self)

    async def _closed(self) -> None:
        """Workers, each of which sends its next request when the last was answered."""
        waiting = self._wanted()

        async def work() -> None:
            for read, body in waiting:
                if self._is_over(self.elapsed):
                    return
                await self._count(Request(self.elapsed, read), body)

        await asyncio.gather(*(work() for _ in range(self._plan.concurrency)))

    async def _open(self, rate: float) -> None:
        """Requests at the times of a Poisson process."""
        chance, due, tasks = random.Random(self._plan.seed + 1), 0.0, []
        for read, body in self._wanted():
            if self._is_over(due):
                break
            await asyncio.sleep(max(0.0, due - self.elapsed))
            tasks.append(asyncio.ensure_future(self._count(Request(due, read), body)))
            due += chance.expovariate(rate)
        await asyncio.gather(*tasks)

    def _wanted(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """As many requests as asked for."""
        return islice(bodies(self._plan, self._model, self._plan.seed), self._plan.requests)

    def _is_over(self, moment: float) -> bool:
        return self._plan.seconds is not None and moment >= self._plan.seconds

    async def _count(self, request: Request, body: dict[str, Any]) -> None:
        self.open += 1
        await self._send(request, body)
        self.open -= 1
        self.done.append(request)

    async def _send(self, request: Request, body: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(self._receive(request, body), self._plan.timeout)
        except Refused as error:
            request.error, request.message = error.kind, str(error)
        except (asyncio.TimeoutError, TimeoutError):
            request.error = "timeout"
        except OSError as error:
            request.error, request.message = "connection", str(error)
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            request.error, request.message = "answer not understood", repr(error)
        request.end = self.elapsed

    async def _receive(self, request: Request, body: dict[str, Any]) -> None:
        async with aclosing(stream(self._target, "/completions", body)) as moments:
            async for moment in moments:
                if usage := moment.data.get("usage"):
                    request.read = usage["prompt_tokens"]
                for choice in moment.data["choices"]:
                    count = len(choice["token_ids"]) if "token_ids" in choice else bool(choice["text"])
                    request.tokens += [moment.time - self._began] * count
