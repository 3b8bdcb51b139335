"""The loop: prefill the prompts, then choose a token and take a step, each row independent of the others.

Letters: b batch, t time, n new tokens, v vocabulary.
"""

from __future__ import annotations

import operator
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anymamba.core.hooks import has_no_hooks
from anymamba.generation.decoder import Decoder
from anymamba.generation.prefill import SEGMENT_LEN, start
from anymamba.generation.sampling import Sampling, check_integer, choose, split_keys, uniform
from anymamba.generation.state import GenerationState
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM

Stop = int | Sequence[int | Sequence[int]] | Tensor | None


class Generation(NamedTuple):
    """New tokens.

    Attributes:
        tokens: (b, n), 0 after the end of rows that stopped early.
        lengths: how many tokens of each row count, including the stop token, (b,).
        state: the state to continue from, if asked for.
    """

    tokens: Int[Tensor, "b n"]
    lengths: Int[Tensor, " b"]
    state: GenerationState | None

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without what comes after its end."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


class _Stopped(NamedTuple):
    """Rows that have stopped: their state before the last token, or the final one if there is no token."""

    rows: list[int]
    state: GenerationState
    pending: Tensor | None


class TokenStream:
    """Tokens one step at a time: each step is a list with one token per row, None for rows that have stopped.

    `stream` makes one. Between two steps, and after the last, `state` is that of the rows. An exception within a
    step, such as an interrupt, leaves the cache half changed: the stream then gives neither tokens nor its state.
    """

    def __init__(
        self,
        model: MambaLM,
        state: GenerationState,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: list[tuple[int, ...]],
        owned: bool = False,
    ) -> None:
        """Start from a state; the arguments are the checked ones of `stream`. `owned`: nothing else uses the state."""
        self._model, self._decoder, self._state, self._sampling = model, Decoder(model), state, sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else int(sampling.seed)
        self._batch_size, self._left, self._stop = state.batch_size, max_new_tokens, stop
        self._rows = list(range(state.batch_size))
        self._pending: Tensor | None = None  # chosen from the state's logits, not yet fed
        self._owned = owned  # nothing else uses the state's cache
        self._intact = True  # no exception came between changes that belong together
        self._tails: dict[int, tuple[int, ...]] = dict.fromkeys(self._rows, ())
        self._longest_stop = max(map(len, stop), default=0)
        self._stopped: list[_Stopped] = []
        self._given: dict[int, Counter[int]] = {row: Counter() for row in self._rows}  # for penalties that count

    def __iter__(self) -> Iterator[list[int | None]]:
        """Itself."""
        return self

    # Not inference mode: what comes out of here may be trained on.
    @torch.no_grad()
    def __next__(self) -> list[int | None]:
        """The next token of each row; the model is only run when a further token is asked for."""
        self._check_intact()
        if not self._rows or not self._left:
            raise StopIteration
        self._intact = False
        tokens = self._next_tokens()
        self._intact = True
        return tokens

    @property
    @torch.no_grad()
    def state(self) -> GenerationState:
        """The state of the rows after the tokens given so far.

        Raises:
            RuntimeError: an exception ended a step before it was done.
        """
        self._check_intact()
        self._intact = False
        state = self._fed_state()
        self._intact = True
        return state

    def _check_intact(self) -> None:
        if not self._intact:
            raise RuntimeError(
                "expected a stream whose steps were all finished, got one that an exception or interrupt ended within "
                "a step: its state is lost; continue from a state that was kept earlier"
            )

    def _next_tokens(self) -> list[int | None]:
        self._feed()
        self._left -= 1
        state, vocab = self._state, self._model.config.vocab_size
        uniforms = [0.0] * len(self._rows)
        if self._sampling.temperature:
            pairs = zip(state.keys.tolist(), state.counts.tolist(), strict=True)
            uniforms = [uniform(self._seed, key, count) for key, count in pairs]
        given = [self._given[row] for row in self._rows]
        self._pending = choose(state.logits[:, :vocab], self._sampling, uniforms, state.seen[:, :vocab], given)
        tokens: list[int | None] = [None] * self._batch_size
        for row, token in zip(self._rows, self._pending.tolist(), strict=True):
            tokens[row] = token
            if self._sampling.counts_tokens:
                self._given[row][token] += 1
        self._set_stopped_aside(tokens)
        return tokens

    def _fed_state(self) -> GenerationState:
        self._feed()
        self._owned = False
        if any(part.pending is not None for part in self._stopped):
            waiting = GenerationState.cat([part.state for part in self._stopped if part.pending is not None])
            pending = torch.cat([part.pending for part in self._stopped if part.pending is not None])
            rows = [row for part in self._stopped if part.pending is not None for row in part.rows]
            fed = [part for part in self._stopped if part.pending is None]
            self._stopped = [*fed, _Stopped(rows, _advance(self._decoder, waiting, pending), None)]
        if not self._stopped:
            return self._state
        parts = [(part.rows, part.state) for part in self._stopped] + [(self._rows, self._state)]
        parts = [(rows, state) for rows, state in parts if rows]
        order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
        return GenerationState.cat([state for _, state in parts]).rows(order.to(self._model.device))

    def _feed(self) -> None:
        if self._pending is not None and self._rows:
            self._state = _advance(self._decoder, self._state, self._pending, in_place=self._owned)
            self._owned = True
        self._pending = None

    def _set_stopped_aside(self, tokens: list[int | None]) -> None:
        if not self._stop or self._pending is None:
            return
        stopped: list[int] = []
        going: list[int] = []
        for i, row in enumerate(self._rows):
            token = tokens[row]
            assert token is not None
            tail = self._tails[row] = (*self._tails[row], token)[-self._longest_stop :]
            (stopped if any(tail[-len(s) :] == s for s in self._stop) else going).append(i)
        if stopped:
            rows = [self._rows[i] for i in stopped]
            self._stopped.append(_Stopped(rows, self._state.rows(stopped), self._pending[stopped]))
            self._rows = [self._rows[i] for i in going]
            self._state, self._pending = self._state.rows(going), self._pending[going]


def _advance(decoder: Decoder, state: GenerationState, tokens: Tensor, *, in_place: bool = False) -> GenerationState:
    logits, cache = decoder.step(tokens.to(decoder.model.device), state.cache, in_place=in_place)
    seen = state.seen.scatter(1, tokens.unsqueeze(1), True)
    return GenerationState(cache, logits, seen, state.keys, state.counts + 1)


def stream(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None = None,
    max_new_tokens: int = 128,
    *,
    stop: Stop = None,
    mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    cache: LMCache | GenerationState | None = None,
    segment_len: int = SEGMENT_LEN,
    **sampling: Any,
) -> TokenStream:
    """Continue token sequences, one token at a time. Prompts are run before this returns.

    Args:
        model: the language model.
        input_ids: prompts; may be left out to continue from a `GenerationState`.
        max_new_tokens: the most tokens to give each row.
        stop: token ids, or sequences of them, after which a row stops.
        mask: for prompts of different lengths, True for real tokens (b, t), padding anywhere; or lengths (b,) of rows
            that are padded at the end.
        cache: what the rows continue from: a cache of the model, or the state of an earlier generation.
        segment_len: tokens of a prompt that are computed at once.
        sampling: how tokens are chosen: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, logit_bias and seed, as `anymamba.generation.Sampling` has them; greedy if none is given.

    Returns:
        An iterator of lists of tokens.

    Raises:
        TypeError: an argument of the wrong type, or an unknown option.
        ValueError: an empty prompt, ids out of range, or sampling values out of range.
    """
    chosen = Sampling.of(sampling)
    check_integer("max_new_tokens", max_new_tokens)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    sequences = _stop_sequences(stop, model.config.vocab_size)
    state = start(model, input_ids, cache, mask=mask, segment_len=segment_len)
    keys = split_keys(state.keys.tolist(), state.counts.tolist())
    state = state._replace(keys=torch.tensor(keys, dtype=torch.int64))
    # What a prompt arrives at is ours alone: the first step need not keep it beside its own result.
    owned = input_ids is not None and _is_unseen(model, state.cache) and not _share_memory(state.cache, cache)
    return TokenStream(model, state, max_new_tokens=max_new_tokens, sampling=chosen, stop=sequences, owned=owned)


def _is_unseen(model: MambaLM, cache: LMCache) -> bool:
    """Whether no hook or subclass can have kept a cache that the model returned, and steps may overwrite it."""
    is_plain = type(model) is MambaLM and all(map(has_no_hooks, model.modules()))
    return is_plain and not any(x.is_inference() for x in cache.leaves())


def _share_memory(new: LMCache, given: LMCache | GenerationState | None) -> bool:
    """Whether a tensor of a new cache lies in the memory of what was given."""
    given = given.cache if isinstance(given, GenerationState) else given
    if given is None:
        return False
    storages = {x.untyped_storage().data_ptr() for x in given.leaves()}
    return any(x.untyped_storage().data_ptr() in storages for x in new.leaves())


def generate(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None = None,
    max_new_tokens: int = 128,
    *,
    return_state: bool = False,
    **options: Any,
) -> Generation:
    """Continue token sequences: `stream`, which has the other options, to its end.

    Args:
        model: the language model.
        input_ids: prompts; may be left out to continue from a `GenerationState`.
        max_new_tokens: the most tokens to give each row.
        return_state: also return the state of the rows, which takes one more step of the model.
        options: of `stream`: stop, mask, cache, segment_len, temperature, top_k, top_p, min_p, penalties, logit_bias
            and seed.

    Returns:
        `tokens` (b, n), 0 after the end of rows that stopped early; `lengths` (b,), how many of them count, including
        the stop token; `state`, a `GenerationState` to continue from, if asked for; and `rows()`, the tokens that count
        as lists.
    """
    tokens = stream(model, input_ids, max_new_tokens, **options)
    rows: list[list[int]] = [[] for _ in range(tokens._batch_size)]
    for step in tokens:
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    longest = max(map(len, rows), default=0)
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64)
    return Generation(
        padded.reshape(len(rows), longest).to(model.device),
        lengths.to(model.device),
        tokens.state if return_state else None,
    )


def _stop_sequences(stop: Stop, vocab_size: int) -> list[tuple[int, ...]]:
    """Every stop sequence as checked token ids."""
    sequences = [tuple(_token(token) for token in _several(entry)) for entry in _several(stop)]
    for sequence in sequences:
        if not sequence:
            raise ValueError("a stop sequence must have at least one token, got an empty one")
        if not all(0 <= token < vocab_size for token in sequence):
            raise ValueError(f"stop tokens must be between 0 and {vocab_size - 1}, got {list(sequence)}")
    return sequences


def _several(entry: Any) -> Iterable[Any]:
    """A list of stop sequences from one, several or None."""
    if entry is None:
        return []
    if isinstance(entry, Tensor):
        entry = entry.tolist()
    return entry if isinstance(entry, Iterable) and not isinstance(entry, str | bytes) else [entry]


def _token(entry: Any) -> int:
    if isinstance(entry, str | bytes):
        raise TypeError(f"stop must be token ids, got the text {entry!r}: encode it with the tokenizer")
    try:
        return operator.index(entry)
    except TypeError:
        raise TypeError(f"stop must be token ids, or sequences of them, got {entry!r}") from None
