"""The loop: prefill the prompts, then choose a token and take a step, each row independent of the others.

Letters: b batch, t time, n new tokens, v vocabulary.
"""

from __future__ import annotations

import operator
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anymamba.core.operators import has_no_hooks
from anymamba.generation.decoder import Decoder
from anymamba.generation.grammar import CompiledGrammar, TokenMatcher
from anymamba.generation.prefill import SEGMENT_LEN, prefill, split_prompts
from anymamba.generation.sampling import Sampling, check_integer, draw_uniform, sample_tokens, split_keys
from anymamba.generation.speculation import Drafter, Speculation, SpeculativeReader, make_drafter, parse_speculation
from anymamba.generation.state import GenerationState
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM

Stop = int | Sequence[int | Sequence[int]] | Tensor | None


class Generation(NamedTuple):
    """New tokens of several rows.

    Attributes:
        tokens: Token ids (b, n), 0 after the end of rows that stopped early.
        lengths: Number of tokens of each row that count, including the stop token (b,).
        state: State to continue from, if requested.
        drafted: Number of tokens that speculation drafted.
        accepted: Number of these that the model chose itself.
    """

    tokens: Int[Tensor, "b n"]
    lengths: Int[Tensor, " b"]
    state: GenerationState | None
    drafted: int = 0
    accepted: int = 0

    def rows(self) -> list[list[int]]:
        """Return the tokens of each row, without the padding after its end."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


class _StoppedRows(NamedTuple):
    """Rows that have stopped, by their numbers in the batch."""

    rows: list[int]
    state: GenerationState
    pending: Tensor | None  # their last tokens, which the model has not read after `state`; None once it has


class TokenStream:
    """Tokens one step at a time: a list with one token per row, None for rows that have stopped.

    `stream` makes one. The token of a step is chosen before the model reads it: the model runs only when a further
    token, or the state, is asked for. Between two steps, and after the last, `state` is the state of the rows. An
    exception within a step, such as an interrupt, leaves the cache half changed: the stream then returns neither tokens
    nor its state.
    """

    def __init__(
        self,
        model: MambaLM,
        state: GenerationState,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: list[tuple[int, ...]],
        owns_state: bool = False,
        speculation: Speculation | None = None,
        history: Sequence[Sequence[int]] = (),
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Start from a state, which steps may overwrite if nothing else uses it (`owns_state`).

        With a `speculation`, `history` has the tokens of each row so far, for drafts.
        """
        self._model = model
        self._decoder = Decoder(model)
        self._sampling = sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else int(sampling.seed)
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._batch_size = state.batch_size
        self._steps_left = max_new_tokens
        self._is_intact = True  # no exception came between changes that belong together
        # Rows that continue, by their number in the batch; `_state` and `_pending` are in this order.
        self._rows = list(range(state.batch_size))
        self._state = state
        self._pending: Tensor | None = None  # chosen from the state's logits, not read yet
        self._owns_state = owns_state
        self._last_tokens: dict[int, tuple[int, ...]] = dict.fromkeys(self._rows, ())  # as many as a stop sequence has
        self._token_counts: dict[int, Counter[int]] = {row: Counter() for row in self._rows}
        self._stopped: list[_StoppedRows] = []
        # Reads drafts together with the pending tokens; `_state` then has the cache before them.
        self._reader: SpeculativeReader | None = None
        if speculation is not None:
            drafter = make_drafter(speculation.draft, history, sampling, self._seed)
            self._reader = SpeculativeReader(self._decoder, drafter, speculation.window)
        self._matchers: list[TokenMatcher] = []  # one per row of the batch, or none without a grammar
        if grammar is not None:
            self._matchers = [grammar.start(model.config.vocab_size) for _ in self._rows]

    def __iter__(self) -> Iterator[list[int | None]]:
        """Return the stream itself."""
        return self

    # Not inference mode: the results may be used in training.
    @torch.no_grad()
    def __next__(self) -> list[int | None]:
        """Return the next token of each row."""
        self._check_intact()
        if not self._rows or not self._steps_left:
            raise StopIteration
        self._is_intact = False
        # 1) The model reads the tokens of the last step.
        self._feed_pending()
        # 2) Each row chooses a token from its logits, with its own random number.
        tokens = self._choose_tokens()
        # 3) Rows whose tokens end with a stop sequence, or whose grammar allows no more, leave the batch with their
        #    state; the others continue.
        self._set_stopped_aside(tokens)
        self._steps_left -= 1
        self._is_intact = True
        return tokens

    @property
    def drafted(self) -> int:
        """Number of tokens that speculation drafted so far."""
        return 0 if self._reader is None else self._reader.drafted

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that the model chose itself."""
        return 0 if self._reader is None else self._reader.accepted

    @property
    @torch.no_grad()
    def state(self) -> GenerationState:
        """Return the state of the rows after the tokens returned so far.

        Raises:
            RuntimeError: An exception ended a step before it was done.
        """
        self._check_intact()
        self._is_intact = False
        # 1) The model reads the last tokens of the rows that continue. The state leaves this stream, so that the next
        #    step may not overwrite it.
        self._feed_pending()
        self._close_window()
        self._owns_state = False
        # 2) It reads the last tokens of the rows that have stopped since the last call, all of them in one step.
        self._feed_stopped()
        # 3) All rows together, in the order of the batch.
        state = self._state
        if self._stopped:
            parts = self._stopped + ([_StoppedRows(self._rows, state, None)] if self._rows else [])
            order = torch.tensor([row for part in parts for row in part.rows]).argsort()
            state = GenerationState.cat([part.state for part in parts]).rows(order.to(self._model.device))
        self._is_intact = True
        return state

    def has_complete_grammar(self, row: int) -> bool:
        """Return whether a row has ended because its grammar allows no further text."""
        return bool(self._matchers) and self._matchers[row].is_complete

    def _check_intact(self) -> None:
        if not self._is_intact:
            raise RuntimeError(
                "expected a stream whose steps were all finished, got one that an exception or interrupt ended within "
                "a step: its state is lost; continue from a state that was kept earlier"
            )

    def _feed_pending(self) -> None:
        """Let the model read the tokens of the last step."""
        if self._pending is not None and self._rows:
            if self._reader is not None:
                most = max(1, self._steps_left)
                state, owns_state = self._reader.advance(self._state, self._pending, most, in_place=self._owns_state)
                self._state = state
                self._owns_state = owns_state
            else:
                self._state = _advance(self._decoder, self._state, self._pending, in_place=self._owns_state)
                self._owns_state = True
        self._pending = None

    def _close_window(self) -> None:
        """Bring the cache to the tokens read so far, if drafts were read with them."""
        if self._reader is not None:
            state, owns_state = self._reader.close_window(self._state, in_place=self._owns_state)
            self._state = state
            self._owns_state = owns_state

    def _feed_stopped(self) -> None:
        """Let the model read the last tokens of rows that have stopped."""
        unread = [part for part in self._stopped if part.pending is not None]
        if unread:
            rows = [row for part in unread for row in part.rows]
            state = GenerationState.cat([part.state for part in unread])
            pending = torch.cat([part.pending for part in unread if part.pending is not None])
            read = [part for part in self._stopped if part.pending is None]
            self._stopped = [*read, _StoppedRows(rows, _advance(self._decoder, state, pending), None)]

    def _choose_tokens(self) -> list[int | None]:
        """Choose the next token of each row, which becomes pending."""
        state = self._state
        vocab_size = self._model.config.vocab_size
        uniforms = [0.0] * len(self._rows)
        if self._sampling.temperature:
            pairs = zip(state.keys.tolist(), state.counts.tolist(), strict=True)
            uniforms = [draw_uniform(self._seed, key, count) for key, count in pairs]
        self._pending = sample_tokens(
            state.logits[:, :vocab_size],
            self._sampling,
            uniforms,
            state.seen[:, :vocab_size],
            [self._token_counts[row] for row in self._rows],
            [self._matchers[row].allowed for row in self._rows] if self._matchers else None,
        )
        tokens: list[int | None] = [None] * self._batch_size
        for row, token in zip(self._rows, self._pending.tolist(), strict=True):
            tokens[row] = token
            if self._sampling.needs_token_counts:
                self._token_counts[row][token] += 1
            if self._matchers:
                self._matchers[row].add(token)
        if self._reader is not None:
            self._reader.note_tokens(self._pending.tolist())
        return tokens

    def _set_stopped_aside(self, tokens: list[int | None]) -> None:
        """Move rows whose tokens end with a stop sequence, or whose grammar allows no more, out of the batch."""
        if not (self._stop or self._matchers) or self._pending is None:
            return
        stopping: list[int] = []
        continuing: list[int] = []
        for i, row in enumerate(self._rows):
            token = tokens[row]
            assert token is not None
            last = self._last_tokens[row] = (*self._last_tokens[row], token)[-self._longest_stop :]
            is_stopped = any(last[-len(stop) :] == stop for stop in self._stop) or self.has_complete_grammar(row)
            (stopping if is_stopped else continuing).append(i)
        if stopping:
            self._close_window()
            if self._reader is not None:
                self._reader.keep_rows(continuing)
            rows = [self._rows[i] for i in stopping]
            self._stopped.append(_StoppedRows(rows, self._state.rows(stopping), self._pending[stopping]))
            self._rows = [self._rows[i] for i in continuing]
            self._state = self._state.rows(continuing)
            self._pending = self._pending[continuing]


def _advance(decoder: Decoder, state: GenerationState, tokens: Tensor, *, in_place: bool = False) -> GenerationState:
    """Return the state after one more token per row."""
    logits, cache = decoder.step(tokens.to(decoder.model.device), state.cache, in_place=in_place)
    return state.after_tokens(tokens, logits, cache)


def stream(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None = None,
    max_new_tokens: int = 128,
    *,
    stop: Stop = None,
    mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    cache: LMCache | GenerationState | None = None,
    segment_len: int = SEGMENT_LEN,
    exact: bool = False,
    speculate: Literal["lookup"] | MambaLM | Drafter | Speculation | None = None,
    history: Sequence[Sequence[int]] | None = None,
    grammar: CompiledGrammar | None = None,
    **sampling: Any,
) -> TokenStream:
    """Continue token sequences, one token at a time. Prompts are read before this returns.

    Args:
        model: Language model.
        input_ids: Prompts (b, t); None to continue from a `GenerationState`.
        max_new_tokens: Largest number of tokens for each row.
        stop: Token ids, or sequences of them, after which a row stops.
        mask: For prompts of different lengths: True for real tokens (b, t), with padding anywhere; or lengths (b,) of
            rows that are padded at the end.
        cache: What the rows continue from: a cache of the model, or the state of an earlier generation.
        segment_len: Number of tokens of a prompt computed at once.
        exact: Whether to read prompts in windows of the compiled step. Logits, tokens and states then have the same
            bits however a text is cut into prompts, continuations and kept states.
        speculate: Where drafts of the next tokens come from, which the model reads together with the last token; the
            tokens are the same, to the bit. "lookup": what followed the last tokens earlier in the text. A language
            model with the same vocabulary: what it writes. A `Speculation` has further options.
        history: Tokens of each row before those that this call reads, for drafts.
        grammar: Grammar that the new tokens of each row follow, from `compile_grammar`; a row also stops where no
            further text is possible.
        sampling: How tokens are chosen: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, logit_bias and seed, the fields of `anymamba.generation.Sampling`; greedy by default.

    Returns:
        An iterator of lists of tokens.

    Raises:
        TypeError: An argument of the wrong type, or an unknown option.
        ValueError: An empty prompt, token ids out of range, or sampling values out of range.
    """
    # 1) Check everything before the prompts are read, which may take a while.
    options = Sampling.from_options(sampling)
    check_integer("max_new_tokens", max_new_tokens)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    sequences = _parse_stop(stop, model.config.vocab_size)
    speculation = parse_speculation(speculate, model)
    if not isinstance(grammar, CompiledGrammar | None):
        raise TypeError(f"grammar must be what compile_grammar returns, got {type(grammar).__name__}")
    # 2) Read the prompts.
    state = prefill(model, input_ids, cache, mask=mask, segment_len=segment_len, exact=exact)
    texts = [list(row) for row in history] if history is not None else [[] for _ in range(state.batch_size)]
    if len(texts) != state.batch_size:
        raise ValueError(f"history must have {state.batch_size} rows, one for each sequence, got {len(texts)}")
    if speculation is not None and input_ids is not None:
        texts = [text + row.tolist() for text, row in zip(texts, split_prompts(model, input_ids, mask), strict=True)]
    if speculation is not None and (reason := Decoder(model).window_reason):
        warnings.warn(f"speculate has no effect, because the compiled step does not run: {reason}", stacklevel=2)
        speculation = None
    # 3) Rows with equal prompts draw differently.
    keys = split_keys(state.keys.tolist(), state.counts.tolist())
    state = state._replace(keys=torch.tensor(keys, dtype=torch.int64))
    # 4) No one else holds the cache of a new prefill, so the first step may update it in place.
    owns_state = input_ids is not None and _is_unshared(model, state.cache, cache)
    return TokenStream(
        model,
        state,
        max_new_tokens=max_new_tokens,
        sampling=options,
        stop=sequences,
        owns_state=owns_state,
        speculation=speculation,
        history=texts,
        grammar=grammar,
    )


def _is_unshared(model: MambaLM, cache: LMCache, earlier: LMCache | GenerationState | None) -> bool:
    """Return whether steps may overwrite a cache that a model returned.

    No hook or subclass can have kept it, no tensor is of inference mode, and none is stored in the earlier cache.
    """
    is_plain = type(model) is MambaLM and all(map(has_no_hooks, model.modules()))
    if not is_plain or any(x.is_inference() for x in cache.leaves()):
        return False
    before = earlier.cache if isinstance(earlier, GenerationState) else earlier
    storages = {x.untyped_storage().data_ptr() for x in (before.leaves() if before is not None else [])}
    return not any(x.untyped_storage().data_ptr() in storages for x in cache.leaves())


def generate(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None = None,
    max_new_tokens: int = 128,
    *,
    return_state: bool = False,
    **options: Any,
) -> Generation:
    """Continue token sequences, and return all new tokens at once.

    Args:
        model: Language model.
        input_ids: Prompts (b, t); None to continue from a `GenerationState`.
        max_new_tokens: Largest number of tokens for each row.
        return_state: Also return the state of the rows, which costs one more step of the model.
        options: Further options of `stream`: stop, mask, cache, segment_len, exact, speculate, history, grammar, and
            those of `Sampling`.

    Returns:
        The tokens (b, n), how many of each row count (b,), and the state of the rows if requested.
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
        tokens.drafted,
        tokens.accepted,
    )


def _parse_stop(stop: Stop, vocab_size: int) -> list[tuple[int, ...]]:
    """Return every stop sequence as checked token ids."""
    sequences = [tuple(_parse_token(token) for token in _as_iterable(entry)) for entry in _as_iterable(stop)]
    for sequence in sequences:
        if not sequence:
            raise ValueError("a stop sequence must have at least one token, got an empty one")
        if not all(0 <= token < vocab_size for token in sequence):
            raise ValueError(f"stop tokens must be between 0 and {vocab_size - 1}, got {list(sequence)}")
    return sequences


def _as_iterable(entry: Any) -> Iterable[Any]:
    """Return one entry, several or None as several."""
    if entry is None:
        return []
    if isinstance(entry, Tensor):
        entry = entry.tolist()
    return entry if isinstance(entry, Iterable) and not isinstance(entry, str | bytes) else [entry]


def _parse_token(entry: Any) -> int:
    if isinstance(entry, str | bytes):
        raise TypeError(f"stop must be token ids, got the text {entry!r}: encode it with the tokenizer")
    try:
        return operator.index(entry)
    except TypeError:
        raise TypeError(f"stop must be token ids, or sequences of them, got {entry!r}") from None
