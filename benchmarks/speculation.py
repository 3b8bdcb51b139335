"""The cases of several tokens per reading of the weights: windows, drafts that fail or come true, and exact prompts.

Models are those of `generation.py`, with random weights. The share of accepted drafts on real
texts follows from a trained model: `anymamba generate --speculate lookup` prints it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from itertools import cycle, islice

import torch

from anymamba.generation import GenerationState, Speculation, decoder, generate, prefill
from anymamba.models import MambaLM
from anymamba.quantization import quantize_model
from benchmarks.generation import our_model, prompt
from benchmarks.harness import Call, Case, Contender, forward

CONFIGS = ("mamba2-130m", "mamba3-siso-187m")
FORMATS = ("float32", "bfloat16", "int8", "int4")
WINDOWS = (1, 2, 4, 8, 16)
ONE_TOKEN = "one token"
NEW_TOKENS = 96


@cache
def model_in(config: str, format: str, small: bool = False) -> MambaLM:
    """Return a model with weights in a format."""
    model = our_model(config, small)
    return model if format == "float32" else quantize_model(copy.deepcopy(model), format)  # type: ignore[arg-type]


def set_up_window(config: str, format: str, k: int, small: bool = False) -> Call:
    """Return a call that reads a window of k tokens, all of which count; 0 stands for the step of one token."""
    model, ids_1k = model_in(config, format, small), prompt(1, max(k, 1))
    decode = decoder(model)
    with torch.no_grad():
        cache = prefill(model, prompt(1, 64)).cache

    def run() -> dict[str, torch.Tensor]:
        nonlocal cache
        if k == 0:
            logits, cache = decode.step(ids_1k[:, 0], cache, in_place=True)
            return {"logits": logits}
        window = decode.step_window(ids_1k, cache)
        cache = window.cache_after(k, in_place=True)
        return {"logits": window.logits[:, 0]}

    return forward(run)


class _FixedDrafter:
    """Drafts the tokens of a row that are given, or wrong ones."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, is_right: bool) -> None:
        self._tokens = list(tokens)
        self._vocab_size = vocab_size
        self._is_right = is_right

    def append(self, tokens: Sequence[int]) -> None:
        """Go on by one token."""
        self._tokens = self._tokens[1:]

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Do nothing: there is one row."""

    def propose(self, count: int, state: GenerationState) -> list[list[int]]:
        """Return the next tokens, each changed if drafts are to fail."""
        tokens = list(islice(cycle(self._tokens or [0]), count))
        return [tokens if self._is_right else [(token + 1) % self._vocab_size for token in tokens]]


def set_up_drafts(config: str, format: str, drafts: str, small: bool = False) -> Call:
    """Return a call that generates with drafts that are all wrong, all right, looked up, or with none."""
    model, ids_1t = model_in(config, format, small), prompt(1, 64)
    state = prefill(model, ids_1t)
    count = 8 if small else NEW_TOKENS
    expected = generate(model, None, count, cache=state).rows()[0]

    def run() -> dict[str, torch.Tensor]:
        speculate: Speculation | None = None
        if drafts == "looked up":
            speculate = Speculation()
        elif drafts != "none":
            drafter = _FixedDrafter(expected, model.config.vocab_size, is_right=drafts == "right")
            speculate = Speculation(draft=drafter)
        history = [ids_1t[0].tolist()]
        generation = generate(model, None, count, cache=state, speculate=speculate, history=history)
        return {"tokens": generation.tokens.float()}

    return forward(run)


def set_up_prompt(config: str, format: str, way: str, small: bool = False) -> Call:
    """Return a call that reads a prompt, exactly or not."""
    model, ids_1t = model_in(config, format, small), prompt(1, 64 if small else 512)
    return forward(lambda: {"logits": prefill(model, ids_1t, exact=way == "exact").logits})


def window_case(config: str, format: str) -> Case:
    """Return the cases of a window of k tokens against one token."""
    contenders = [
        Contender(
            name=f"{k} tokens" if k else ONE_TOKEN,
            setup=partial(set_up_window, config, format, k),
            tiny=partial(set_up_window, config, format, k, True),
            computes="window",
        )
        for k in (0, *WINDOWS)
    ]
    return Case(name=f"speculation/window/{config}/{format}", contenders=tuple(contenders), baseline=ONE_TOKEN)


def drafts_case(config: str, format: str) -> Case:
    """Return the cases of drafts that fail, which may cost a twentieth, that come true, and that are looked up."""
    contenders = [
        Contender(
            name=drafts,
            setup=partial(set_up_drafts, config, format, drafts),
            tiny=partial(set_up_drafts, config, format, drafts, True),
            computes="tokens",
        )
        for drafts in ("none", "wrong", "right", "looked up")
    ]
    return Case(name=f"speculation/drafts/{config}/{format}", contenders=tuple(contenders), baseline="none")


def prompt_case(config: str, format: str) -> Case:
    """Return the cases of a prompt of 512 tokens, as usual and exactly."""
    contenders = [
        Contender(
            name=way,
            setup=partial(set_up_prompt, config, format, way),
            tiny=partial(set_up_prompt, config, format, way, True),
            computes=way,
        )
        for way in ("as usual", "exact")
    ]
    return Case(name=f"speculation/prompt/{config}/{format}", contenders=tuple(contenders), baseline="as usual")


CASES: tuple[Case, ...] = (
    *(window_case(config, format) for config in CONFIGS for format in FORMATS),
    *(drafts_case("mamba2-130m", format) for format in ("float32", "int8")),
    *(prompt_case(config, "float32") for config in CONFIGS),
)
