"""Prompts on their way to the engine: which tokens are read, from which state, and which states are cached.

There are three kinds. `Prompt` is the prompt of a completion, `ChatPrompt` a rendered conversation, and `SessionPrompt`
text that is appended to a session. Each offers the callbacks of a job; `finalize` does what may take a while after it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any

from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer, min_tokens
from anymamba.serving.api.fields import ApiError, invalid_value
from anymamba.serving.scheduler.continuation import Continuation, PrefillStart
from anymamba.serving.sessions import SessionLease, SessionStore
from anymamba.serving.state_cache import Key, StateCache, ids_key, text_key


def tokenize_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], param: str, max_tokens: int, *, may_be_empty: bool = False
) -> list[int]:
    """Return the tokens of a text or of token ids; `param` is the name of the field, for errors.

    A text that cannot have as few as `max_tokens` is rejected without being tokenized.
    """
    if isinstance(prompt, str):
        if (at_least := min_tokens(tokenizer, prompt)) > max_tokens:
            raise _prompt_too_long(param, max_tokens, f"at least {at_least}")
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            print(f"anymamba: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
            raise ApiError(500, f"the tokenizer fails on {param}", param=param, code="tokenizer_failed") from error
    else:
        ids = prompt
    if not ids and not may_be_empty:
        raise invalid_value(param, f"{param} must have at least one token, got none")
    if len(ids) > max_tokens:
        raise _prompt_too_long(param, max_tokens, str(len(ids)))
    return ids


def _prompt_too_long(param: str, max_tokens: int, count: str) -> ApiError:
    message = f"{param} may have at most {max_tokens} tokens, got {count}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


class Prompt:
    """The prompt of a completion, whose result never depends on what is cached.

    It continues only states that were read in the same segments, so its bits are those of a prefill from the beginning.
    """

    seeds_sampling_from_prompt = True  # the sampling keys come from the prompt, not from the state of a session
    feeds_final_token = False  # the final state has read every token
    caches_final_state = False  # the final state is stored

    def __init__(self, ids: list[int], cache: StateCache, segment_len: int) -> None:
        """Prepare the prompt; the cache is not searched yet."""
        self.ids = ids
        self._cache = cache
        self._segment_len = segment_len
        self._cached_tokens = 0

    def job_options(self) -> dict[str, Any]:
        """Return the arguments of the job that concern its prompt."""
        return {
            "find_start": self.find_start,
            "should_cache_at": self.should_cache_at,
            "on_read": self.on_read,
            "on_end": self.on_end if self.caches_final_state else None,
        }

    def find_start(self) -> PrefillStart:
        """Return where the prefill begins, and count a hit or a miss of the cache."""
        start = self._search()
        if start.cached_tokens:
            self._cache.hits += 1
        else:
            self._cache.misses += 1
        return start

    def estimate_len(self) -> int:
        """Return an estimate of the tokens to read: another prompt may read some of them first."""
        return len(self._search().ids)

    def should_cache_at(self, position: int) -> bool:
        """Return whether to cache the state after `position` new tokens.

        States are cached after 1, 2, 4, ... segments, and after the last whole one.
        """
        segments, rest = divmod(self._cached_tokens + position, self._segment_len)
        is_power_of_two = segments & (segments - 1) == 0
        return not rest and (is_power_of_two or segments == len(self.ids) // self._segment_len)

    def on_read(self, position: int, state: GenerationState) -> None:
        """Cache a state after `position` new tokens."""
        if position:
            tokens = self._cached_tokens + position
            self._cache.put(state, tokens, *self._exact_keys(tokens))

    def on_end(self, continuation: Continuation, state: GenerationState) -> None:
        """Take the final state of a continuation."""

    def finalize(self) -> None:
        """Store the final states, once a continuation has ended."""

    def _search(self) -> PrefillStart:
        return self._search_exact()

    def _search_exact(self) -> PrefillStart:
        """Search for a state with the bits of a prefill from the beginning."""
        self._cached_tokens = 0
        cached = self._cache.get(ids_key("end", self.ids))
        if cached is None:
            cut = self._cache.find_longest("cut", array("i", self.ids).tobytes())
            if cut is None:
                return PrefillStart(None, self.ids, 0)
            cached, _ = cut
        self._cached_tokens = cached.tokens
        return PrefillStart(cached.state, self.ids[cached.tokens :], cached.tokens)

    def _exact_keys(self, tokens: int) -> list[Key]:
        keys = [ids_key("end", self.ids)] if tokens == len(self.ids) else []
        return keys if tokens % self._segment_len else [*keys, ids_key("cut", self.ids[:tokens])]


class ScoredPrompt(Prompt):
    """A prompt of which every token is scored, so all of it is read."""

    def _search(self) -> PrefillStart:
        return PrefillStart(None, self.ids, 0)


class ChatPrompt(Prompt):
    """A rendered conversation: it can also continue from the end of its previous turn, and stores the end of this one.

    Args:
        ids: Tokens of the text.
        text: Conversation as the template renders it.
        render_reply: Renders the conversation with a reply at its end.
        lease: Lease of the conversation's session, or None.
    """

    caches_final_state = True

    def __init__(
        self,
        ids: list[int],
        cache: StateCache,
        segment_len: int,
        text: str,
        tokenizer: Tokenizer,
        render_reply: Callable[[str], str],
        sessions: SessionStore,
        lease: SessionLease | None,
    ) -> None:
        """Prepare the prompt; the cache is not searched yet."""
        super().__init__(ids, cache, segment_len)
        self._text = text
        self._tokenizer = tokenizer
        self._render_reply = render_reply
        self._sessions = sessions
        self._lease = lease
        self._ends: list[tuple[Continuation, GenerationState]] = []
        self._remaining_ids_by_offset: dict[int, list[int]] = {}  # tokens of the text from a byte offset on
        self._is_exact = True
        self._tokens = len(ids)

    def _search(self) -> PrefillStart:
        """Return the start with the fewest tokens to read; among equals, one with the bits of a full prefill."""
        # 1) A state of the same tokens has the same bits.
        start = self._search_exact()
        self._is_exact = True
        # 2) A state of a prefix of the text has read the tokens that were fed, which may be others.
        previous = self._find_previous_turn() if start.ids else None
        if previous is not None:
            state, tokens, length = previous
            ids = self._tokenize_rest(length)
            if len(ids) < len(start.ids):
                start = PrefillStart(state, ids, tokens)
                self._is_exact = False
        self._tokens = start.cached_tokens + len(start.ids)
        return start

    def _tokenize_rest(self, begin: int) -> list[int]:
        """Tokenize the text from byte offset `begin`.

        The service searches before the engine does, so that the engine's thread need not tokenize the same text again.
        """
        if begin not in self._remaining_ids_by_offset:
            rest = self._text.encode()[begin:].decode()
            self._remaining_ids_by_offset[begin] = self._tokenizer.encode(rest) if rest else []
        return self._remaining_ids_by_offset[begin]

    def _find_previous_turn(self) -> tuple[GenerationState, int, int] | None:
        """Return the state of the longest prefix of the text, its tokens, and the prefix's length in bytes."""
        content = self._text.encode()
        candidates = []
        cached = self._cache.find_longest("text", content)
        if cached is not None:
            candidates.append((cached[0].state, cached[0].tokens, cached[1]))
        session = None if self._lease is None else self._lease.session
        if session is not None:
            candidates += [
                (session.state, session.tokens, key.length)
                for key in session.texts
                if key.length <= len(content) and text_key(content[: key.length].decode(errors="replace")) == key
            ]
        return max(candidates, key=lambda candidate: candidate[2], default=None)

    def should_cache_at(self, position: int) -> bool:
        """Return whether to cache the state after `position` new tokens: only with the bits of a full prefill."""
        return self._is_exact and super().should_cache_at(position)

    def on_read(self, position: int, state: GenerationState) -> None:
        """Cache a state after `position` new tokens; the one at the end also under the text."""
        if self._is_exact and self._cached_tokens + position < len(self.ids):
            super().on_read(position, state)
        elif position:
            exact_keys = self._exact_keys(len(self.ids)) if self._is_exact else []
            self._cache.put(state, self._tokens, *exact_keys, text_key(self._text))

    def on_end(self, continuation: Continuation, state: GenerationState) -> None:
        """Take the state at the end of a turn, unless it ends within a character."""
        if continuation.completion.resumable_text is not None:
            self._ends.append((continuation, state))

    def finalize(self) -> None:
        """Store the ends of turns under the text so far, both as it was written and as the template renders it."""
        while self._ends:
            continuation, state = self._ends.pop()
            completion = continuation.completion
            assert completion.resumable_text is not None
            texts = {self._text + completion.resumable_text}
            if completion.reason != "stop" and (rendered := self._render_up_to_reply(completion.text)) is not None:
                texts.add(rendered)
            keys = tuple(map(text_key, sorted(texts)))
            tokens = self._tokens + len(completion.tokens) - (continuation.pending_token is not None)
            if self._lease is None:
                self._cache.put(state, tokens, *keys)
            else:
                self._sessions.commit(self._lease, state, tokens, keys)

    def _render_up_to_reply(self, reply: str) -> str | None:
        """Return the conversation up to the end of a reply as the next request will render it, apart from spaces."""
        try:
            text = self._render_reply(reply)
        except (ValueError, TypeError):  # some templates reject a conversation that ends with a reply
            return None
        stripped = reply.strip()
        begin = len(self._text)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        is_found = stripped and text.startswith(self._text) and text.startswith(stripped, begin)
        return text[: begin + len(stripped)] if is_found else None


class SessionPrompt(Prompt):
    """Text that is appended to a session, which then has read all of its text and replies.

    The text may have no tokens if the session has read some already.
    """

    feeds_final_token = True
    caches_final_state = True

    def __init__(
        self, ids: list[int], cache: StateCache, segment_len: int, sessions: SessionStore, lease: SessionLease
    ) -> None:
        """Continue the session."""
        super().__init__(ids, cache, segment_len)
        self._sessions = sessions
        self._lease = lease
        self._tokens = len(ids) + (0 if lease.session is None else lease.session.tokens)
        self._end: tuple[GenerationState, int] | None = None
        self.seeds_sampling_from_prompt = lease.session is None

    def _search(self) -> PrefillStart:
        session = self._lease.session
        if session is None:
            return PrefillStart(None, self.ids, 0)
        return PrefillStart(session.state, self.ids, session.tokens)

    def should_cache_at(self, position: int) -> bool:
        """Return False: only the final state is stored."""
        return False

    def on_read(self, position: int, state: GenerationState) -> None:
        """Drop the state: only the final state is stored."""

    def on_end(self, continuation: Continuation, state: GenerationState) -> None:
        """Take the final state."""
        self._end = (state, self._tokens + len(continuation.completion.tokens))

    def finalize(self) -> None:
        """Replace the session by its new state."""
        if self._end is not None:
            self._sessions.commit(self._lease, *self._end)
            self._end = None
