"""Prefill: prompts become states, segment by segment, so that memory does not grow with the prompt.

`prefill` reads the prompts of a batch to their ends. `Prefill` is the same procedure one segment at a time: the server
decodes other rows between two segments, and keeps states on the way.

Letters: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anymamba.core.layout import Padding
from anymamba.core.linear import apply_linear
from anymamba.generation.decoder import Decoder
from anymamba.generation.sampling import TokenScore, check_integer, hash_tokens, score_token
from anymamba.generation.state import GenerationState
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM

SEGMENT_LEN = 2048


@torch.no_grad()
def prefill(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None,
    cache: LMCache | GenerationState | None = None,
    *,
    mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    segment_len: int = SEGMENT_LEN,
    exact: bool = False,
) -> GenerationState:
    """Read prompts, ready to generate.

    Args:
        model: Language model.
        input_ids: Prompts (b, t); None to use a `GenerationState` as it is.
        cache: What the rows continue from: a cache of the model, or the state of an earlier generation.
        mask: True for real tokens (b, t), with padding anywhere; or lengths (b,) of rows that are padded at the end.
        segment_len: Number of tokens computed at once.
        exact: Whether to read in windows of the compiled step, so that the state has the same bits however a text is
            cut: into prompts and continuations, segments, batches, generated tokens and kept states.

    Returns:
        The state of the rows after their prompts.

    Raises:
        TypeError: Prompts or a cache of the wrong type.
        ValueError: A row without tokens, or token ids out of range.
    """
    _check_cache(cache)
    check_integer("segment_len", segment_len)
    if input_ids is None:
        if mask is not None:
            raise ValueError("a mask needs the prompts it belongs to (input_ids), got a mask alone")
        if not isinstance(cache, GenerationState):
            raise ValueError("generation needs a prompt (input_ids), or the state of an earlier generation as cache")
        return cache
    prompts = split_prompts(model, input_ids, mask)
    if cache is not None and cache.batch_size != len(prompts):
        raise ValueError(f"the cache must have {len(prompts)} rows, one for each prompt, got {cache.batch_size}")
    if not prompts:
        raise ValueError("generation needs at least one row, got a batch of 0")
    reader = Prefill(model, prompts, cache, segment_len=segment_len, exact=exact)
    state = None
    while not reader.is_done:
        state = reader.read_segment()
    assert state is not None
    return state


class _FinishedRows(NamedTuple):
    """Rows whose prompts have been read to the end."""

    rows: list[int]
    logits_bv: Tensor
    cache: LMCache


class Prefill:
    """Prompts of one batch on their way into a model, one segment at a time.

    Segments are cut at multiples of `segment_len` from where reading starts, independent of other prompts, so a prompt
    gives the same bits each time. Rows may have different lengths; one that has ended is not computed any further.

    Attributes:
        position: Number of tokens of the longest prompt that have been read.
        prompt_scores: Log-probabilities of the tokens read so far, if requested: the token's own and those of the
            most likely ones; nothing for the first token of a text.
    """

    def __init__(
        self,
        model: MambaLM,
        prompts: Sequence[Tensor | list[int]],
        earlier: LMCache | GenerationState | None = None,
        *,
        segment_len: int = SEGMENT_LEN,
        exact: bool = False,
        keeps_state_at: Callable[[int], bool] | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Prepare to read prompts of at least one token each, from `earlier` on; from the zero state if it is None.

        `exact` is that of `prefill`; `keeps_state_at` returns whether the state at a position before the end is needed
        too. `logprobs` is the number of most likely tokens to score for each token of a single prompt; None for no
        scores.
        """
        if segment_len < 1:
            raise ValueError(f"segment_len must be at least 1, got {segment_len}")
        assert logprobs is None or len(prompts) == 1
        self.position = 0
        self.prompt_scores: list[list[TokenScore]] = []
        self._model = model
        self._prompts = [torch.as_tensor(prompt, dtype=torch.int64, device=model.device) for prompt in prompts]
        self._lengths = [len(prompt) for prompt in self._prompts]
        if 0 in self._lengths:
            raise ValueError(f"a prompt must have at least one token, got none in row {self._lengths.index(0)}")
        self._earlier = earlier if isinstance(earlier, GenerationState) else None
        self._cache = earlier.cache if isinstance(earlier, GenerationState) else earlier
        self._segment_len = segment_len
        self._decoder = Decoder(model) if exact else None
        if self._decoder is not None:
            self._decoder.check_exact()
        self._keeps_state_at = keeps_state_at
        self._logprobs = logprobs
        self._active = list(range(len(prompts)))  # rows with tokens left; `_cache` is theirs
        self._finished: list[_FinishedRows] = []
        self._last_logits_1v: Tensor | None = None  # to score the first token of the next segment

    @property
    def remaining(self) -> int:
        """Number of tokens of the longest prompt still to be read."""
        return max(0, max(self._lengths) - self.position)

    @property
    def is_done(self) -> bool:
        """Return whether every prompt has been read."""
        return self.remaining == 0

    @torch.no_grad()
    def read_segment(self) -> GenerationState | None:
        """Read the next segment of every row that has tokens left.

        Returns:
            The state of all rows at the end of the prompts, and at positions where `keeps_state_at` asks for it; None
            elsewhere.
        """
        # 1) Cut the segment out of the rows that have tokens left.
        begin = self.position
        end = min(begin + self._segment_len, max(self._lengths))
        segments = [self._prompts[row][begin:end] for row in self._active]
        ending = [i for i, row in enumerate(self._active) if self._lengths[row] <= end]
        staying = [i for i, row in enumerate(self._active) if self._lengths[row] > end]
        is_kept = bool(staying) and self._keeps_state_at is not None and self._keeps_state_at(end)
        # 2) Run the model over them. Only a row's last logits are ever needed, and only where a state is returned.
        logits_bv, cache = self._run(segments, with_logits=bool(ending) or is_kept)
        # 3) Set rows that have ended aside, so that the others do not wait for padding.
        if ending:
            assert logits_bv is not None
            rows = [self._active[i] for i in ending]
            self._active = [self._active[i] for i in staying]
            if staying:
                self._finished.append(_FinishedRows(rows, logits_bv[ending], cache.rows(ending)))
                logits_bv = logits_bv[staying]
                cache = cache.rows(staying)
            else:
                self._finished.append(_FinishedRows(rows, logits_bv, cache))
        self._cache = cache
        self.position = end
        # 4) Put the rows together again where their state is asked for.
        if staying and not is_kept:
            return None
        parts = list(self._finished)
        if staying:
            assert logits_bv is not None
            parts.append(_FinishedRows(self._active, logits_bv, cache))
        return self._make_state(parts)

    def _run(self, segments: list[Tensor], with_logits: bool) -> tuple[Tensor | None, LMCache]:
        """Run the model over a segment of each active row; return the last logits (b, v) and the cache after it."""
        if self._decoder is not None:
            return self._run_exact(self._decoder, segments, with_logits)
        lengths = [len(segment) for segment in segments]
        ids_bt = pad_sequence(segments, batch_first=True)
        if self._logprobs is not None:
            return self._run_scored(ids_bt, self._logprobs)
        lengths_b = None if len(set(lengths)) == 1 else torch.tensor(lengths, device=ids_bt.device)
        output = self._model(ids_bt, self._cache, mask=lengths_b, logits="last" if with_logits else "none")
        return (output.logits[:, 0] if with_logits else None), output.cache

    def _run_exact(self, decoder: Decoder, segments: list[Tensor], with_logits: bool) -> tuple[Tensor | None, LMCache]:
        """Do the same in windows; rows of different lengths one by one, which changes no bit."""
        is_even = len({len(segment) for segment in segments}) == 1
        parts = [torch.stack(segments)] if is_even else [segment.unsqueeze(0) for segment in segments]
        logits, caches = [], []
        for row, ids_bt in enumerate(parts):
            cache = self._cache if is_even or self._cache is None else self._cache.rows([row])
            kind: Literal["all", "last", "none"] = "last" if with_logits else "none"
            logits_bnv, after = decoder.read(ids_bt, cache, logits="all" if self._logprobs is not None else kind)
            if self._logprobs is not None and logits_bnv is not None:
                self._score(ids_bt, logits_bnv[0], self._logprobs)
            logits.append(None if logits_bnv is None else logits_bnv[:, -1])
            caches.append(after)
        last = [x for x in logits if x is not None]
        return (torch.cat(last) if last else None), LMCache.cat(caches)

    def _run_scored(self, ids_1t: Tensor, alternatives: int) -> tuple[Tensor, LMCache]:
        """Run the model over a segment of one row, and score each token with the logits before it."""
        model = self._model
        hidden_1td, cache = model.backbone(ids_1t, self._cache)
        # A head rounds one row differently from many, so the last logits are computed as they are without scores.
        last_1v = apply_linear(model.lm_head, hidden_1td[:, -1:])[:, 0]
        self._score(ids_1t, apply_linear(model.lm_head, hidden_1td)[0], alternatives)
        return last_1v, cache

    def _score(self, ids_1t: Tensor, logits_tv: Tensor, alternatives: int) -> None:
        """Score each token of one row with the logits before it; `logits_tv` are those after each."""
        vocab_size = self._model.config.vocab_size
        before = [self._last_logits_1v, *logits_tv[:-1].split(1)]
        for logits_1v, token in zip(before, ids_1t[0].tolist(), strict=True):
            scores = [] if logits_1v is None else score_token(logits_1v[0, :vocab_size], token, alternatives)
            self.prompt_scores.append(scores)
        self._last_logits_1v = logits_tv[-1:].clone()

    def _make_state(self, parts: list[_FinishedRows]) -> GenerationState:
        """Return the state of all rows, in their order, after the tokens read so far."""
        if len(parts) == 1:
            logits_bv = parts[0].logits_bv
            cache = parts[0].cache
        else:
            logits_bv = torch.cat([part.logits_bv for part in parts])
            order = torch.tensor([row for part in parts for row in part.rows], device=logits_bv.device).argsort()
            logits_bv = logits_bv[order]
            cache = LMCache.cat([part.cache for part in parts]).rows(order)
        earlier = self._earlier
        tokens = [prompt[: self.position].cpu() for prompt in self._prompts]
        if earlier is None:
            seen_bv = torch.zeros(len(tokens), self._model.config.padded_vocab_size, dtype=torch.bool)
            keys_b = torch.tensor([hash_tokens(row) for row in tokens], dtype=torch.int64)
            counts_b = torch.zeros_like(keys_b)
        else:
            seen_bv = earlier.seen.clone()
            keys_b = earlier.keys
            counts_b = earlier.counts
        for seen_v, row in zip(seen_bv, tokens, strict=True):
            seen_v[row] = True
        return GenerationState(cache, logits_bv, seen_bv, keys_b, counts_b)


def _check_cache(cache: object) -> None:
    if cache is None or isinstance(cache, LMCache | GenerationState):
        return
    hints = [f"; pass its .{name}" for name in ("state", "cache") if getattr(cache, name, None) is not None]
    raise TypeError(f"cache must be a GenerationState or an LMCache, got {type(cache).__name__}{''.join(hints[:1])}")


def split_prompts(model: MambaLM, input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the real tokens of each row, checked."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor (b, t), got {type(input_ids).__name__}; torch.tensor([ids]) makes one from a "
            "list of ids, and a tokenizer makes ids from a text"
        )
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids must be integers of shape (b, t), got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor (b, t) or lengths (b,), got {type(mask).__name__}")
    b, t = input_ids.shape
    if mask is None:
        prompts = list(input_ids)
    elif mask.dtype == torch.bool and mask.shape == input_ids.shape:
        prompts = [row[real] for row, real in zip(input_ids, mask, strict=True)]
    else:
        lengths = Padding.from_mask("generate", mask, b, t, input_ids.device).lengths.tolist()
        prompts = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
    largest = model.config.padded_vocab_size - 1
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"a prompt must have at least one token, got none in row {i}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high > largest:
            raise ValueError(f"token ids must be between 0 and {largest}, got {low} to {high} in row {i}")
    return prompts
