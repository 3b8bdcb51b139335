"""A load test: a closed loop with a fixed number of open requests, or an open loop with a fixed request rate."""

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

from anymamba.serving.load_test.client import RequestError, Target, get_json, stream

_WORDS = ("the", "of", "and", "to", "in", "is", "it", "that", "was", "for", "on", "with", "one", "had", "not", "but")


class IntRange(NamedTuple):
    """A range of integers, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        """Format the range as on the command line."""
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The load to put on a server."""

    requests: int | None  # None for no bound
    seconds: float | None  # during which new requests are sent, or None for no bound
    concurrency: int  # open requests in a closed loop
    rate: float | None  # requests per second in an open loop, at random times, or None for a closed loop
    prompt_tokens: IntRange
    output_tokens: IntRange
    warm_up: int  # requests before those that are measured
    seed: int  # of prompts, lengths and times
    timeout: float  # of one request in seconds
    model: str | None = None  # its name, or None for the server's first one
    fields: dict[str, Any] = field(default_factory=dict)  # that are added to every request


class TargetModel(NamedTuple):
    """The server's description of its model; only anymamba's own servers report the vocabulary size."""

    name: str
    vocab_size: int | None


@dataclass
class RequestResult:
    """The outcome of a request; times are seconds since the first measured request was due."""

    due: float  # when the request was to be sent; a delay in sending it counts as latency
    prompt_tokens: int  # as counted by the server if it reports it
    token_times: list[float] = field(default_factory=list)  # when each token arrived
    end: float = 0.0
    error: str | None = None  # its kind
    message: str | None = None  # the server's error message


async def find_model(target: Target, name: str | None) -> TargetModel:
    """Return the model that will respond; raise ValueError if there is none, or the server does not list it."""
    try:
        listing = await asyncio.wait_for(get_json(target, "/models"), 30)
        entries = [entry for entry in listing["data"] if name in (None, entry["id"])]
        if not entries:
            raise ValueError(f"{target.url} has no model {name!r}")
        vocab_size = entries[0].get("vocab_size")
        return TargetModel(entries[0]["id"], vocab_size if isinstance(vocab_size, int) else None)
    except (OSError, asyncio.TimeoutError) as error:
        raise ValueError(f"cannot reach {target.url}: {error or type(error).__name__}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{target.url}/models does not respond as OpenAI's API does") from error
    except RequestError as error:
        raise ValueError(f"{target.url}/models: {error}") from error


def generate_bodies(plan: LoadPlan, model: TargetModel, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield an endless, reproducible sequence of requests: the prompt's length in tokens, and the body."""
    rng = random.Random(seed)
    while True:
        prompt_tokens = rng.randint(*plan.prompt_tokens)
        output_tokens = rng.randint(*plan.output_tokens)
        options = {"include_usage": True}
        body: dict[str, Any] = {"model": model.name, "max_tokens": output_tokens, "stream_options": options}
        if model.vocab_size is None:
            body["prompt"] = " ".join(rng.choice(_WORDS) for _ in range(prompt_tokens))
        else:
            body["prompt"] = [rng.randrange(model.vocab_size) for _ in range(prompt_tokens)]
            body |= {"ignore_eos": True, "return_token_ids": True, "seed": rng.randrange(2**31)}
        yield prompt_tokens, {**body, **plan.fields}


class LoadTest:
    """A load test in progress."""

    def __init__(self, target: Target, plan: LoadPlan, model: TargetModel) -> None:
        """Prepare the test; no request is sent."""
        self._target = target
        self._plan = plan
        self._model = model
        self.results: list[RequestResult] = []  # of the requests that have ended
        self.open = 0  # number of open requests
        self._start_time = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first measured request was due."""
        return time.perf_counter() - self._start_time

    async def run(self, on_progress: Callable[[LoadTest], None] = lambda _: None) -> list[RequestResult]:
        """Send all requests and wait for the last response; `on_progress` is called about every second."""
        bodies = generate_bodies(self._plan, self._model, ~self._plan.seed)
        for prompt_tokens, body in islice(bodies, self._plan.warm_up):
            await self._send(RequestResult(0.0, prompt_tokens), body)
        self._start_time = time.perf_counter()
        reporter = asyncio.ensure_future(self._report_progress(on_progress))
        try:
            rate = self._plan.rate
            await (self._run_closed_loop() if rate is None else self._run_open_loop(rate))
        finally:
            reporter.cancel()
        return self.results

    async def _report_progress(self, on_progress: Callable[[LoadTest], None]) -> None:
        while True:
            await asyncio.sleep(1)
            on_progress(self)

    async def _run_closed_loop(self) -> None:
        """Run workers that each send their next request after the response to the previous one."""
        bodies = self._planned_bodies()

        async def work() -> None:
            for prompt_tokens, body in bodies:
                if self._is_over(self.elapsed):
                    return
                await self._measure(RequestResult(self.elapsed, prompt_tokens), body)

        await asyncio.gather(*(work() for _ in range(self._plan.concurrency)))

    async def _run_open_loop(self, rate: float) -> None:
        """Send requests at the times of a Poisson process."""
        rng = random.Random(self._plan.seed + 1)
        due = 0.0
        tasks = []
        for prompt_tokens, body in self._planned_bodies():
            if self._is_over(due):
                break
            await asyncio.sleep(max(0.0, due - self.elapsed))
            tasks.append(asyncio.ensure_future(self._measure(RequestResult(due, prompt_tokens), body)))
            due += rng.expovariate(rate)
        await asyncio.gather(*tasks)

    def _planned_bodies(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return as many bodies as the plan allows."""
        return islice(generate_bodies(self._plan, self._model, self._plan.seed), self._plan.requests)

    def _is_over(self, elapsed: float) -> bool:
        return self._plan.seconds is not None and elapsed >= self._plan.seconds

    async def _measure(self, result: RequestResult, body: dict[str, Any]) -> None:
        self.open += 1
        await self._send(result, body)
        self.open -= 1
        self.results.append(result)

    async def _send(self, result: RequestResult, body: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(self._receive(result, body), self._plan.timeout)
        except RequestError as error:
            result.error = error.kind
            result.message = str(error)
        except (asyncio.TimeoutError, TimeoutError):
            result.error = "timeout"
        except OSError as error:
            result.error = "connection"
            result.message = str(error)
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            result.error = "invalid response"
            result.message = repr(error)
        result.end = self.elapsed

    async def _receive(self, result: RequestResult, body: dict[str, Any]) -> None:
        async with aclosing(stream(self._target, "/completions", body)) as events:
            async for event in events:
                if usage := event.data.get("usage"):
                    result.prompt_tokens = usage["prompt_tokens"]
                for choice in event.data["choices"]:
                    count = len(choice["token_ids"]) if "token_ids" in choice else bool(choice["text"])
                    result.token_times += [event.time - self._start_time] * count
