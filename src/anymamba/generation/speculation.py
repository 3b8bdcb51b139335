"""Speculation: drafted tokens are read together with the last one, and count as far as the model chooses them itself.

A window of k tokens costs little more than one, because each weight is read once. The model's choice after each token
is made as without drafts, position by position and with the row's own random number; a draft only decides whether the
logits of the next position are there already. So drafts change how fast tokens come, never which.

Rows of a batch advance together: a window serves them for as long as the drafts of all of them are right.

Letters: b batch, k tokens of a window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anymamba.generation.decoder import Decoder
from anymamba.generation.prefill import prefill
from anymamba.generation.sampling import Sampling, check_integer, draw_uniform, sample_tokens
from anymamba.generation.state import GenerationState
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.token_window import MAX_WINDOW, TokenWindow

_NGRAMS = (4, 3, 2)  # lengths of the ends of a text that are looked up, longest first
_ADAPTIVE_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
_BUDGET = 0.04  # share of the time that drafts may cost where they fail


@runtime_checkable
class Drafter(Protocol):
    """Where drafts come from. Rows are those of a batch that continue, in their order."""

    def append(self, tokens: Sequence[int]) -> None:
        """Take note of the token that each row chose."""

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Go on with some of the rows."""

    def propose(self, count: int, state: GenerationState) -> list[list[int]]:
        """Return up to `count` tokens that may follow in each row; `state` is that before the last tokens."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How tokens are drafted.

    Attributes:
        draft: "lookup" looks for the last tokens in the text so far; a language model with the same vocabulary writes
            drafts; a `Drafter` brings its own.
        window: Number of tokens in a window, the last one and its drafts, 2 to 64. If None, it follows from the times
            measured and from how many drafts were right, and drafts that fail cost little.
    """

    draft: Literal["lookup"] | MambaLM | Drafter = "lookup"
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.draft != "lookup" and not isinstance(self.draft, MambaLM | Drafter):
            raise TypeError(f'speculate must be "lookup", a language model or a Drafter, got {self.draft!r}')
        if self.window is not None:
            check_integer("window", self.window)
            if not 2 <= self.window <= MAX_WINDOW:
                raise ValueError(f"window must be from 2 to {MAX_WINDOW} tokens, got {self.window}")


def parse_speculation(
    speculate: Literal["lookup"] | MambaLM | Drafter | Speculation | None, model: MambaLM
) -> Speculation | None:
    """Return how to draft for `model`, checked; None for not at all."""
    if speculate is None:
        return None
    speculation = speculate if isinstance(speculate, Speculation) else Speculation(draft=speculate)
    draft = speculation.draft
    if isinstance(draft, MambaLM) and draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"a draft model must have the vocabulary of the model, {model.config.vocab_size} tokens, "
            f"got {draft.config.vocab_size}"
        )
    return speculation


def make_drafter(
    draft: Literal["lookup"] | MambaLM | Drafter, history: Sequence[Sequence[int]], sampling: Sampling, seed: int
) -> Drafter:
    """Return where drafts come from, for rows that begin with the tokens of `history`."""
    if isinstance(draft, MambaLM):
        return ModelDrafter(draft, history, sampling, seed)
    return LookupDrafter(history) if draft == "lookup" else draft


class LookupDrafter:
    """Drafts what followed the last tokens of a row when they came before, in its prompt or in what it wrote."""

    def __init__(self, history: Sequence[Sequence[int]]) -> None:
        """Begin with the tokens of each row."""
        self._rows = [_Text() for _ in history]
        for text, tokens in zip(self._rows, history, strict=True):
            for token in tokens:
                text.append(token)

    def append(self, tokens: Sequence[int]) -> None:
        """Take note of the token that each row chose."""
        for text, token in zip(self._rows, tokens, strict=True):
            text.append(token)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Go on with some of the rows."""
        self._rows = [self._rows[i] for i in indices]

    def propose(self, count: int, state: GenerationState) -> list[list[int]]:
        """Return what followed in each row; nothing for an end that is new."""
        return [text.continuation(count) for text in self._rows]


class _Text:
    """Tokens, and where each n-gram was followed last."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # the position after an n-gram

    def append(self, token: int) -> None:
        """Add a token: the n-grams before it are followed now."""
        position = len(self._tokens)
        for n in _NGRAMS:
            if position >= n:
                self._followed[tuple(self._tokens[position - n :])] = position
        self._tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest end that came before."""
        for n in _NGRAMS:
            begin = self._followed.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if begin is not None:
                copied = self._tokens[begin : begin + count]
                while len(copied) < count:  # the text repeats itself up to its end
                    copied += self._tokens[begin : begin + count - len(copied)]
                return copied
        return []


class ModelDrafter:
    """Drafts what a smaller model writes, with the random numbers of the rows, which raises agreement."""

    def __init__(self, model: MambaLM, history: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> None:
        """Begin with the tokens of each row, which the model reads when it first drafts."""
        self._decoder = Decoder(model)
        self._sampling = sampling
        self._seed = seed
        self._unread = [list(tokens) for tokens in history]  # tokens of each row that the model has not read
        self._cache = model.init_cache(len(history))
        self._logits: Tensor | None = None  # after the tokens that were read
        self._proposed: list[tuple[Tensor, LMCache]] = []  # logits and cache after each draft but the last
        self._drafts: list[list[int]] = []

    def append(self, tokens: Sequence[int]) -> None:
        """Take note of the token that each row chose."""
        for unread, token in zip(self._unread, tokens, strict=True):
            unread.append(token)
        # The states after drafts that all rows chose are used.
        if self._proposed and [row[:1] for row in self._drafts] == [[token] for token in tokens]:
            logits_bv, cache = self._proposed.pop(0)
            self._logits = logits_bv
            self._cache = cache
            self._drafts = [row[1:] for row in self._drafts]
            for unread in self._unread:
                unread.clear()
        else:
            self._proposed = []

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Go on with some of the rows."""
        index = list(indices)
        self._unread = [self._unread[i] for i in index]
        self._drafts = [self._drafts[i] for i in index] if self._drafts else []
        self._cache = self._cache.rows(index)
        self._logits = None if self._logits is None else self._logits[index]
        self._proposed = [(logits[index], cache.rows(index)) for logits, cache in self._proposed]

    @torch.no_grad()
    def propose(self, count: int, state: GenerationState) -> list[list[int]]:
        """Return what the model writes after the tokens so far."""
        logits_bv = self._read_tokens()
        vocab_size, device = self._decoder.model.config.vocab_size, self._decoder.model.device
        pairs = list(zip(state.keys.tolist(), state.counts.tolist(), strict=True))
        self._drafts = [[] for _ in self._unread]
        self._proposed = []
        for i in range(count):
            # The last tokens are not counted in `state`.
            uniforms = [draw_uniform(self._seed, key, drawn + 1 + i) for key, drawn in pairs]
            tokens_b = sample_tokens(logits_bv[:, :vocab_size], self._sampling, uniforms, state.seen[:, :vocab_size])
            for draft, token in zip(self._drafts, tokens_b.tolist(), strict=True):
                draft.append(token)
            if i + 1 < count:
                cache = self._proposed[-1][1] if self._proposed else self._cache
                logits_bv, cache = self._decoder.step(tokens_b.to(device), cache)
                self._proposed.append((logits_bv, cache))
        return [list(draft) for draft in self._drafts]

    def _read_tokens(self) -> Tensor:
        """Let the model read what it has not read, and return the logits of the next token."""
        if not any(self._unread) and self._logits is not None:
            return self._logits
        prompts = [torch.tensor(tokens) for tokens in self._unread]
        if all(len(prompt) == 1 for prompt in prompts):
            ids_b = torch.cat(prompts).to(self._decoder.model.device)
            logits_bv, cache = self._decoder.step(ids_b, self._cache)
        else:
            lengths_b = torch.tensor([len(prompt) for prompt in prompts])
            state = prefill(self._decoder.model, pad_sequence(prompts, batch_first=True), self._cache, mask=lengths_b)
            logits_bv = state.logits
            cache = state.cache
        self._logits = logits_bv
        self._cache = cache
        for unread in self._unread:
            unread.clear()
        return logits_bv


class WindowSize:
    """How many tokens the next window takes.

    From the time of a token alone, of each further token in a window, and the share of drafts that are right, the
    number is the one with the most tokens per second; 1 is none. What failing drafts cost is counted as debt, and a
    window opens only while that is a small share of the time spent.
    """

    def __init__(self, fixed: int | None = None) -> None:
        """Begin without measurements, or with a number that stays."""
        self._fixed = fixed
        self._single = 0.0  # seconds of a token alone
        self._slope = 0.15  # cost of one more token in a window, in tokens alone
        self._agreement = 0.6  # probability that a draft is right
        self._elapsed = 0.0
        self._debt = 0.0

    def choose(self, most: int) -> int:
        """Return a number up to `most`."""
        if self._fixed is not None:
            return min(self._fixed, most)
        if not self._single:
            return 1
        a = min(self._agreement, 0.98)
        rates = {k: (1 - a**k) / (1 - a) / self._cost(k) for k in _ADAPTIVE_WINDOWS if k <= most}
        best = max(rates, key=rates.__getitem__, default=1)
        # Where drafts do not pay, a short one is tried now and then.
        k = best if best > 1 else min(2, most)
        allowed = _BUDGET * self._elapsed + (self._single if best > 1 else 0.0)
        return k if self._debt + (self._cost(k) - 1) * self._single <= allowed else 1

    def note_single(self, seconds: float) -> None:
        """Take note of a token alone."""
        self._elapsed += seconds
        self._single = seconds if not self._single else min(seconds, 0.9 * self._single + 0.1 * seconds)

    def note_window(self, seconds: float, size: int, read: int) -> None:
        """Take note of a window of `size` tokens, of which `read` counted."""
        self._elapsed += seconds
        if not self._single:
            return
        self._debt = max(0.0, self._debt + seconds - read * self._single)
        self._slope += 0.2 * (max(0.0, seconds / self._single - 1) / (size - 1) - self._slope)
        tried = min(read, size - 1)  # drafts whose position was reached: those that were right, and the first wrong one
        self._agreement += min(0.5, 0.1 * tried) * ((read - 1) / tried - self._agreement)

    def _cost(self, k: int) -> float:
        """Return the time of a window of k tokens, in tokens alone."""
        return 1 + self._slope * (k - 1)


class SpeculativeReader:
    """Reads the tokens of a stream, with drafts after them.

    While a window is open, the cache of a state is the one before the window: `close_window` brings it up to date.

    Attributes:
        drafted: Number of tokens drafted so far, over all rows.
        accepted: How many of them the model chose itself.
    """

    def __init__(self, decoder: Decoder, drafter: Drafter, window: int | None) -> None:
        """Begin without a window; `window` is the number of its tokens, None for an adaptive one."""
        self.drafted = 0
        self.accepted = 0
        self._decoder = decoder
        self._drafter = drafter
        self._size = WindowSize(window)
        self._window: TokenWindow | None = None
        self._ids: list[list[int]] = []  # of the window: the tokens of each row
        self._read = 0  # tokens of the window that count so far
        self._seconds = 0.0  # that the window took

    def note_tokens(self, tokens: Sequence[int]) -> None:
        """Take note of the token that each row chose."""
        self._drafter.append(tokens)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Go on with some of the rows; no window is open."""
        self._drafter.keep_rows(indices)

    def advance(
        self, state: GenerationState, tokens: Tensor, most: int, in_place: bool
    ) -> tuple[GenerationState, bool]:
        """Return the state after one more token per row, of at most `most` to come, and whether its cache is new."""
        # 1) A window that is open has read these tokens already if they are the next ones in all rows.
        row_tokens = tokens.tolist()
        is_drafted = [ids[self._read : self._read + 1] for ids in self._ids] == [[token] for token in row_tokens]
        if self._window is not None and is_drafted:
            self._read += 1
            self.accepted += len(row_tokens)
            return state.after_tokens(tokens, self._window.logits[:, self._read - 1], state.cache), in_place
        state, in_place = self.close_window(state, in_place)
        # 2) The next window: these tokens and their drafts.
        begin = time.perf_counter()
        size = self._size.choose(min(most, MAX_WINDOW))
        drafts = self._drafter.propose(size - 1, state) if size > 1 else [[] for _ in row_tokens]
        length = min(size - 1, *map(len, drafts))
        vocab_size = self._decoder.model.config.vocab_size
        if not all(0 <= token < vocab_size for draft in drafts for token in draft):
            raise ValueError(f"drafts must be tokens between 0 and {vocab_size - 1}, got {drafts}")
        device = self._decoder.model.device
        if length:
            self._ids = [[token, *draft[:length]] for token, draft in zip(row_tokens, drafts, strict=True)]
            self._window = self._decoder.step_window(torch.tensor(self._ids, device=device), state.cache)
            self._read = 1
            self._seconds = time.perf_counter() - begin
            self.drafted += length * len(drafts)
            return state.after_tokens(tokens, self._window.logits[:, 0], state.cache), in_place
        # 3) Nothing to draft: one token.
        logits, cache = self._decoder.step(tokens.to(device), state.cache, in_place=in_place)
        self._size.note_single(time.perf_counter() - begin)
        return state.after_tokens(tokens, logits, cache), True

    def close_window(self, state: GenerationState, in_place: bool) -> tuple[GenerationState, bool]:
        """Return the state with the cache after the tokens that count, and whether that is new or `in_place`."""
        if self._window is None:
            return state, in_place
        begin = time.perf_counter()
        cache = self._window.cache_after(self._read, in_place=in_place)
        self._window = None
        self._size.note_window(self._seconds + time.perf_counter() - begin, len(self._ids[0]), self._read)
        return state._replace(cache=cache), True
