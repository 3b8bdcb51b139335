"""Text in, text out: a model and its tokenizer as one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.generation.completion import Choice, Completion, CompletionBuilder
from anymamba.generation.detect_activation import detect_activation
from anymamba.generation.generate import stream
from anymamba.generation.prefill import start
from anymamba.generation.sampling import check_integer
from anymamba.generation.tokenizers import Tokenizer, load_tokenizer
from anymamba.models.lm import MambaLM


def pipeline(
    source: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    ssm_cfg: dict[str, Any] | None = None,
) -> Pipeline:
    """A model and its tokenizer, from a directory or hub id.

        text = anymamba.pipeline("runs/mine")
        print(text("Once upon a time", temperature=0.8).text)

    Args:
        source: directory, file or hub id of the model, as for `MambaLM.from_pretrained`.
        tokenizer: "bytes", a tokenizer.json, a directory with one, or a hub id; the one beside the weights if not
            given.
        dtype: to compute in; the file's if not given.
        weights: a format of fewer bits for the weights, as for `MambaLM.from_pretrained`.
        device: to compute on.
        ssm_cfg: options of the blocks that override the config's.

    Raises:
        ValueError: there is no model, or no tokenizer that belongs to it.
    """
    directory = resolve_source(source)
    model = load_model(directory, dtype=dtype, device=device, weights=weights, ssm_cfg=ssm_cfg)
    found = load_tokenizer(tokenizer, directory, model.config.padded_vocab_size)
    if (evidence := detect_activation(model, found)) is not None:
        warnings.warn(f"{directory}: {evidence}", stacklevel=2)
    return Pipeline(model, found)


class Pipeline:
    """Continues texts.

    Attributes:
        model: the language model.
        tokenizer: of its text.
    """

    def __init__(self, model: MambaLM, tokenizer: Tokenizer) -> None:
        """Join a model with its tokenizer."""
        self.model, self.tokenizer = model, tokenizer

    @overload
    def __call__(self, prompt: str, max_new_tokens: int = ..., *, n: None = ..., **options: Any) -> Completion: ...
    @overload
    def __call__(self, prompt: str, max_new_tokens: int = ..., *, n: int, **options: Any) -> list[Completion]: ...
    @overload
    def __call__(
        self, prompt: Sequence[str], max_new_tokens: int = ..., *, n: None = ..., **options: Any
    ) -> list[Completion]: ...
    @overload
    def __call__(
        self, prompt: Sequence[str], max_new_tokens: int = ..., *, n: int, **options: Any
    ) -> list[list[Completion]]: ...
    def __call__(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 128,
        *,
        n: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_end: bool = False,
        add_special_tokens: bool = True,
        batch_size: int = 16,
        **sampling: Any,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continue a text, or several of any lengths.

        Args:
            prompt: a text, or a list of them.
            max_new_tokens: the largest number of tokens for each.
            n: samples of each prompt, which is read once; the temperature is then 1 unless given.
            stop: texts before which a continuation ends.
            logprobs: also return the log-probability of each token, and of this many most likely ones.
            ignore_end: do not end at the tokenizer's end token.
            add_special_tokens: begin with the tokens that the tokenizer puts before a text; False for the text of a
                chat template, which already has them.
            batch_size: rows computed together; it changes results by rounding only.
            **sampling: temperature, top_k, top_p, min_p, repetition_penalty and seed, as for `anymamba.generate`.

        Returns:
            A completion; a list of them for a list of prompts; with `n`, a list of `n` in place of each.

        Raises:
            TypeError: an argument that should be a text or a whole number is not.
            ValueError: a prompt or stop text is empty, or an option is out of its range.
        """
        if not isinstance(prompt, str | Sequence):
            raise TypeError(f"prompt must be a text or a list of texts, got {type(prompt).__name__}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        done = list(
            self.batches(
                prompts,
                max_new_tokens,
                n=1 if n is None else n,
                stop=stop,
                logprobs=logprobs,
                ignore_end=ignore_end,
                add_special_tokens=add_special_tokens,
                batch_size=batch_size,
                **sampling,
            )
        )
        by_prompt = [found for _, found in sorted((place, found) for batch in done for place, found in batch)]
        results = [found[0] for found in by_prompt] if n is None else by_prompt
        return results[0] if isinstance(prompt, str) else results

    def batches(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 128,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        ignore_end: bool = False,
        add_special_tokens: bool = True,
        batch_size: int = 16,
        **sampling: Any,
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """The same, batch by batch as they finish.

        Yields:
            Pairs of a prompt's place in the list and its `n` completions.
        """
        for name, value, least in (("n", n, 1), ("batch_size", batch_size, 1), ("logprobs", logprobs or 0, 0)):
            check_integer(name, value)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if n > 1:
            sampling = {"temperature": 1.0, **{name: x for name, x in sampling.items() if x is not None}}
        stops = check_texts("stop", [stop] if isinstance(stop, str) else stop)
        ends = [] if ignore_end else [i for i in self.tokenizer.end if i < self.model.config.vocab_size]
        tokens_of = self._tokens(check_texts("prompt", prompts), add_special_tokens)
        for group in _groups(tokens_of, max(1, batch_size // n)):
            ids = [torch.tensor(key) for key in group]
            lengths = torch.tensor([len(row) for row in ids])
            state = start(self.model, pad_sequence(ids, batch_first=True), mask=lengths)
            copies = [row for row, places in enumerate(group.values()) for _ in range(n * len(places))]
            tokens = stream(self.model, None, max_new_tokens, cache=state.rows(copies), stop=ends, **sampling)
            drafts = [CompletionBuilder(self.tokenizer, ends, stops) for _ in copies]
            self._write(tokens, drafts, logprobs)
            completions = iter([draft.completion(logprobs) for draft in drafts])
            yield [(place, [next(completions) for _ in range(n)]) for places in group.values() for place in places]

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        add_special_tokens: bool = True,
        **sampling: Any,
    ) -> Iterator[str]:
        """Continue one text, piece by piece; the arguments are the same as for a call.

        Yields:
            Text, never half a character, and nothing of a stop text.
        """
        (ids,) = self._tokens(check_texts("prompt", [prompt]), add_special_tokens)
        ends = [] if ignore_end else [i for i in self.tokenizer.end if i < self.model.config.vocab_size]
        stops = check_texts("stop", [stop] if isinstance(stop, str) else stop)
        draft = CompletionBuilder(self.tokenizer, ends, stops)
        for (token,) in stream(self.model, torch.tensor([ids]), max_new_tokens, stop=ends, **sampling):
            assert token is not None
            if piece := draft.add(token):
                yield piece
            if draft.reason != "length":
                break
        if piece := draft.finish():
            yield piece

    def _tokens(self, prompts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        """The tokens of each prompt."""
        found = [tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)) for prompt in prompts]
        if () in found:
            raise ValueError(f"a prompt must have at least one token, got none in prompt {found.index(())}")
        return found

    def _write(self, tokens: Any, drafts: list[CompletionBuilder], logprobs: int | None) -> None:
        """Run a stream until all drafts are complete."""
        while any(draft.reason == "length" for draft in drafts):
            logits = tokens.state.logits if logprobs is not None else None
            step = next(tokens, None)
            if step is None:
                break
            for row, (draft, token) in enumerate(zip(drafts, step, strict=True)):
                if token is not None and draft.reason == "length":
                    draft.add(token, [] if logits is None else self._choices(logits[row], token, logprobs or 0))

    def _choices(self, logits_v: Tensor, token: int, most: int) -> list[Choice]:
        """A token, and the most likely ones, with their log-probabilities."""
        logprobs = logits_v[: self.model.config.vocab_size].to("cpu", torch.float32).log_softmax(-1)
        ids = [token, *logprobs.topk(min(most, len(logprobs))).indices.tolist()]
        return [Choice(i, self.tokenizer.decode([i]), logprobs[i].item()) for i in ids]


def _groups(prompts: list[tuple[int, ...]], size: int) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Prompts by their tokens, `size` at a time, with their places; equal ones stay together, to draw differently."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, ids in enumerate(prompts):
        places.setdefault(ids, []).append(place)
    keys = list(places)
    for begin in range(0, len(keys), size):
        yield {key: places[key] for key in keys[begin : begin + size]}


def check_texts(name: str, texts: Sequence[str]) -> list[str]:
    """A list of texts, none of them empty.

    Raises:
        TypeError: one is not a text.
        ValueError: one is empty.
    """
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a text or a list of texts, got {text!r}")
        if not text:
            raise ValueError(f"{name} must be a text, got an empty one")
    return list(texts)
