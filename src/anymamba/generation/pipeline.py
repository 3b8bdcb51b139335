"""Text in, text out: a model and its tokenizer as one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.nn.utils.rnn import pad_sequence

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.generation.completion import Completion, CompletionBuilder
from anymamba.generation.detect_activation import detect_activation
from anymamba.generation.generate import TokenStream, stream
from anymamba.generation.grammar import CompiledGrammar, compile_grammar, read_grammar
from anymamba.generation.prefill import prefill
from anymamba.generation.sampling import check_integer, score_token
from anymamba.generation.tokenizers import Tokenizer, load_tokenizer, select_end_tokens
from anymamba.models.lm import MambaLM


def pipeline(
    source: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    device: torch.device | str = "auto",
    ssm_cfg: dict[str, Any] | None = None,
) -> Pipeline:
    """Load a model and its tokenizer from a directory or hub id.

        text = anymamba.pipeline("runs/mine")
        print(text("Once upon a time", temperature=0.8).text)

    Args:
        source: Directory, file or hub id of the model, as for `MambaLM.from_pretrained`.
        tokenizer: "bytes", a tokenizer.json, a directory with one, or a hub id; by default the one next to the weights.
        dtype: Dtype to compute in; by default the file's.
        weights: Quantized format of the weights, as for `MambaLM.from_pretrained`.
        device: Device to compute on; "auto" is the first of cuda, mps and cpu that is available.
        ssm_cfg: Options of the blocks that override the config's.

    Raises:
        ValueError: There is no model, or no tokenizer that belongs to it.
    """
    directory = resolve_source(source)
    model = load_model(directory, dtype=dtype, device=device, weights=weights, ssm_cfg=ssm_cfg)
    loaded_tokenizer = load_tokenizer(tokenizer, directory, model.config.padded_vocab_size)
    if (detection := detect_activation(model, loaded_tokenizer)) is not None:
        warnings.warn(f"{directory}: {detection}", stacklevel=2)
    return Pipeline(model, loaded_tokenizer)


class Pipeline:
    """A language model that continues texts.

    Attributes:
        model: Language model.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, model: MambaLM, tokenizer: Tokenizer) -> None:
        """Join a model and its tokenizer."""
        self.model = model
        self.tokenizer = tokenizer

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
        **options: Any,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continue a text, or several of any lengths.

        Args:
            prompt: A text, or a list of strings.
            max_new_tokens: Largest number of tokens for each.
            n: Number of samples of each prompt, which is read once; the temperature is then 1 unless given.
            stop: Strings at which a completion stops; they are not returned.
            logprobs: Number of most likely tokens to return with their log-probabilities for each token, in addition to
                the token's own; None for no log-probabilities.
            ignore_end: Whether to continue after the tokenizer's end token.
            add_special_tokens: Whether to begin with the tokens that the tokenizer puts before a text; False for the
                text of a chat template, which already has them.
            batch_size: Number of rows computed together. Without compiled kernels, it changes results by rounding.
            **options: temperature, top_k, top_p, min_p, repetition_penalty, seed, exact and speculate, as for
                `anymamba.generate`; and at most one of schema (a JSON schema, or a model class of pydantic), regex,
                grammar (Lark or GBNF) and choices (a list of texts), which completions then follow.

        Returns:
            A completion; a list of them for a list of prompts; with `n`, a list of `n` in place of each.

        Raises:
            TypeError: An argument that should be a text or an integer is not.
            ValueError: A prompt or stop text is empty, or an option is out of its range.
        """
        if not isinstance(prompt, str | Sequence):
            raise TypeError(f"prompt must be a text or a list of strings, got {type(prompt).__name__}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        batches = self.batches(
            prompts,
            max_new_tokens,
            n=1 if n is None else n,
            stop=stop,
            logprobs=logprobs,
            ignore_end=ignore_end,
            add_special_tokens=add_special_tokens,
            batch_size=batch_size,
            **options,
        )
        by_index = dict(pair for batch in batches for pair in batch)
        samples = [by_index[index] for index in range(len(prompts))]
        results = [completions[0] for completions in samples] if n is None else samples
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
        exact: bool = False,
        **options: Any,
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Continue several texts, batch by batch as they finish; the arguments are those of a call.

        Yields:
            Pairs of a prompt's index and its `n` completions.
        """
        for name, value, minimum in (("n", n, 1), ("batch_size", batch_size, 1), ("logprobs", logprobs or 0, 0)):
            check_integer(name, value)
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        grammar, sampling = self._compile_grammar(options)
        if n > 1:
            sampling = {"temperature": 1.0, **{name: x for name, x in sampling.items() if x is not None}}
        stop_texts = check_texts("stop", [stop] if isinstance(stop, str) else stop)
        end_tokens = self._end_tokens(ignore_end)
        ids_by_prompt = self._encode(check_texts("prompt", prompts), add_special_tokens)
        for batch in _group_prompts(ids_by_prompt, max(1, batch_size // n)):
            # 1) Read each prompt of the batch once.
            ids = [torch.tensor(prompt_ids) for prompt_ids in batch]
            lengths = torch.tensor([len(row) for row in ids])
            state = prefill(self.model, pad_sequence(ids, batch_first=True), mask=lengths, exact=exact)
            # 2) Copy its state for every sample.
            copies = [row for row, indices in enumerate(batch.values()) for _ in range(n * len(indices))]
            prompts_read = list(batch)
            tokens = stream(
                self.model,
                None,
                max_new_tokens,
                cache=state.rows(copies),
                stop=end_tokens,
                history=[prompts_read[row] for row in copies],
                grammar=grammar,
                **sampling,
            )
            # 3) Turn tokens into text until every sample has ended.
            builders = [CompletionBuilder(self.tokenizer, end_tokens=end_tokens, stop_texts=stop_texts) for _ in copies]
            self._complete(tokens, builders, logprobs)
            completions = (builder.build(logprobs) for builder in builders)
            yield [(i, [next(completions) for _ in range(n)]) for indices in batch.values() for i in indices]

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Iterator[str]:
        """Continue one text as it is written; the arguments are those of a call.

        Yields:
            Text, never part of a character, and nothing of a stop text.
        """
        grammar, sampling = self._compile_grammar(options)
        (ids,) = self._encode(check_texts("prompt", [prompt]), add_special_tokens)
        end_tokens = self._end_tokens(ignore_end)
        stop_texts = check_texts("stop", [stop] if isinstance(stop, str) else stop)
        builder = CompletionBuilder(self.tokenizer, end_tokens=end_tokens, stop_texts=stop_texts)
        tokens = stream(self.model, torch.tensor([ids]), max_new_tokens, stop=end_tokens, grammar=grammar, **sampling)
        for (token,) in tokens:
            assert token is not None
            if text := builder.add(token, is_last=tokens.has_complete_grammar(0)):
                yield text
            if builder.reason is not None:
                return
        if text := builder.finish():
            yield text

    def _end_tokens(self, ignore_end: bool) -> list[int]:
        return [] if ignore_end else select_end_tokens(self.tokenizer, self.model.config.vocab_size)

    def _compile_grammar(self, options: dict[str, Any]) -> tuple[CompiledGrammar | None, dict[str, Any]]:
        """Return the grammar that options ask for, and the options of sampling."""
        sampling = dict(options)
        names = ("schema", "regex", "grammar", "choices")
        grammar = read_grammar(**{name: sampling.pop(name, None) for name in names})
        return None if grammar is None else compile_grammar(grammar, self.tokenizer), sampling

    def _encode(self, prompts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt."""
        ids = [tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)) for prompt in prompts]
        if () in ids:
            raise ValueError(f"a prompt must have at least one token, got none in prompt {ids.index(())}")
        return ids

    def _complete(self, tokens: TokenStream, builders: list[CompletionBuilder], logprobs: int | None) -> None:
        """Run a stream until every text has ended."""
        vocab_size = self.model.config.vocab_size
        while any(builder.reason is None for builder in builders):
            logits_bv = tokens.state.logits if logprobs is not None else None
            if (step := next(tokens, None)) is None:
                return
            for row, (builder, token) in enumerate(zip(builders, step, strict=True)):
                if token is not None and builder.reason is None:
                    scores = [] if logits_bv is None else score_token(logits_bv[row, :vocab_size], token, logprobs or 0)
                    builder.add(token, scores, is_last=tokens.has_complete_grammar(row))


def _group_prompts(prompts: list[tuple[int, ...]], size: int) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Yield prompts by their tokens, `size` at a time, with their indices.

    Equal prompts stay in one batch, so that they draw differently.
    """
    indices: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(prompts):
        indices.setdefault(ids, []).append(index)
    keys = list(indices)
    for begin in range(0, len(keys), size):
        yield {key: indices[key] for key in keys[begin : begin + size]}


def check_texts(name: str, texts: Sequence[str]) -> list[str]:
    """Return texts as a list; raise `TypeError` for one that is not a text, `ValueError` for an empty one."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a text or a list of strings, got {text!r}")
        if not text:
            raise ValueError(f"{name} must be a text, got an empty one")
    return list(texts)
