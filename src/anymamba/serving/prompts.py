"""A prompt on its way to the engine: which tokens are read, from which state, and which states are kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.serving.scheduler.continuation import Continuation
from anymamba.serving.scheduler.events import PrefillStart
from anymamba.serving.state_cache import CachedState, Key, StateCache, ids_key, text_key


class Prompt:
    """The prompt of a completion: its result never depends on what is kept.

    It continues only states that were read in the same segments, so its bits are those of a read from the start.

    Args:
        ids: its tokens, at least one.
        store: of states.
        segment_len: tokens that are read at once.

    Attributes:
        fixed_key: whether the rows' identity for sampling comes from the prompt, and not from a session.
        feeds_final_token: whether the state at the end has read every token.
    """

    fixed_key, feeds_final_token = True, False

    def __init__(self, ids: list[int], store: StateCache, segment_len: int) -> None:
        """Nothing is looked up yet."""
        self.ids, self._store, self._segment = ids, store, segment_len
        self._reused = 0

    def find(self) -> PrefillStart:
        """Where reading starts."""
        start = self._look()
        self._count(start)
        return start

    def length(self) -> int:
        """An estimate of the tokens to read: another prompt may read some of them first."""
        return len(self._look().ids)

    def should_cache_at(self, position: int) -> bool:
        """Whether the state after `position` new tokens is kept: at 1, 2, 4 ... segments, and at the last whole one."""
        segments, rest = divmod(self._reused + position, self._segment)
        return not rest and (segments & (segments - 1) == 0 or segments == len(self.ids) // self._segment)

    def on_read(self, position: int, state: GenerationState) -> None:
        """Keep a state."""
        read = self._reused + position
        if position:
            self._store.put(state, read, *self._exact_keys(read))

    def on_end(self, row: Continuation, state: GenerationState) -> None:
        """Keep nothing: a completion has no next turn."""

    def finalize(self) -> None:
        """Finish what may take a while, once a row has ended."""

    @property
    def caches_final_state(self) -> bool:
        """Whether the state at the end is kept."""
        return False

    def _look(self) -> PrefillStart:
        return self._find_exact()

    def _find_exact(self) -> PrefillStart:
        self._reused = 0
        found = self._store.get(ids_key("end", self.ids))
        if found is None:
            cut = self._store.longest("cut", array("i", self.ids).tobytes())
            if cut is None:
                return PrefillStart(None, self.ids, 0)
            found = cut[0]
        self._reused = found.tokens
        return PrefillStart(found.state, self.ids[found.tokens :], found.tokens)

    def _exact_keys(self, read: int) -> list[Key]:
        keys = [ids_key("end", self.ids)] if read == len(self.ids) else []
        return keys if read % self._segment else [*keys, ids_key("cut", self.ids[:read])]

    def _count(self, start: PrefillStart) -> None:
        if start.reused:
            self._store.hits += 1
        else:
            self._store.misses += 1


class ScoredPrompt(Prompt):
    """A prompt whose every token is scored, so all of it is read."""

    def _look(self) -> PrefillStart:
        return PrefillStart(None, self.ids, 0)


class ChatPrompt(Prompt):
    """A rendered conversation: it can also start from the end of its last turn, and it keeps the end of this one.

    Args:
        text: the conversation as the template renders it.
        session: the key under which its state is kept for good, if it has a name.
        tokenizer: for the rest of the text.
        render: the conversation with a reply at its end.
    """

    def __init__(
        self,
        ids: list[int],
        store: StateCache,
        segment_len: int,
        text: str,
        session: Key | None,
        tokenizer: Tokenizer,
        render: Callable[[str], str],
    ) -> None:
        """Nothing is looked up yet."""
        super().__init__(ids, store, segment_len)
        self._text, self._session, self._tokenizer, self._render = text, session, tokenizer, render
        self._ends: list[tuple[Continuation, GenerationState]] = []
        self._exact, self._tokens = True, len(ids)

    @property
    def caches_final_state(self) -> bool:
        """A conversation and a session keep it."""
        return True

    def _look(self) -> PrefillStart:
        """The start with the fewest tokens left to read; among equals, one with the bits of a read from the start."""
        start, self._exact = self._find_exact(), True
        content = self._text.encode()
        found = self._store.longest("text", content)
        if found is not None and start.ids:
            turn, length = found
            rest = self._tokenizer.encode(content[length:].decode()) if length < len(content) else []
            if len(rest) < len(start.ids):
                start, self._exact = PrefillStart(turn.state, rest, turn.tokens), False
        self._tokens = start.reused + len(start.ids)
        return start

    def should_cache_at(self, position: int) -> bool:
        """As for any prompt, if it is read in the segments of a read from the start."""
        return self._exact and super().should_cache_at(position)

    def on_read(self, position: int, state: GenerationState) -> None:
        """Keep a state; the one at the end also under the text."""
        if self._exact and self._reused + position < len(self.ids):
            super().on_read(position, state)
        elif position:
            exact = self._exact_keys(len(self.ids)) if self._exact else []
            self._store.put(state, self._tokens, *exact, text_key(self._text))

    def on_end(self, row: Continuation, state: GenerationState) -> None:
        """Remember the end of the turn, for `finalize`."""
        if row.completion.resumable_text is not None:
            self._ends.append((row, state))

    def finalize(self) -> None:
        """Keep the ends of turns under the text so far, as it was written and as the template writes it again."""
        while self._ends:
            row, state = self._ends.pop()
            assert row.completion.resumable_text is not None
            texts = {self._text + row.completion.resumable_text}
            if row.completion.reason != "stop" and (again := self._rendered(row.completion.text)) is not None:
                texts.add(again)
            keys = [*map(text_key, texts), *([] if self._session is None else [self._session])]
            kept = self._store.put(state, self._tokens + len(row.completion.tokens) - (row.pending is not None), *keys)
            if self._session is not None:
                self._store.save(kept)

    def _rendered(self, reply: str) -> str | None:
        """The conversation up to the end of a reply, as the next turn's text will begin, apart from spaces."""
        try:
            text = self._render(reply)
        except (ValueError, TypeError):  # some templates refuse a conversation that ends with a reply
            return None
        begin, bare = len(self._text), reply.strip()
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        fine = bare and text.startswith(self._text) and text.startswith(bare, begin)
        return text[: begin + len(bare)] if fine else None


class SessionPrompt(Prompt):
    """Text that is added to a session, which then has read all of its text and replies.

    Args:
        session: its name's key.
        earlier: its state so far, None if it begins.
    """

    feeds_final_token = True

    def __init__(
        self, ids: list[int], store: StateCache, segment_len: int, session: Key, earlier: CachedState | None
    ) -> None:
        """Continue the session."""
        super().__init__(ids, store, segment_len)
        self._session, self._earlier = session, earlier
        self._tokens = len(ids) + (0 if earlier is None else earlier.tokens)
        self.fixed_key = earlier is None
        self._kept: CachedState | None = None

    @property
    def caches_final_state(self) -> bool:
        """A conversation and a session keep it."""
        return True

    def _look(self) -> PrefillStart:
        """The state of the session so far."""
        if self._earlier is None:
            return PrefillStart(None, self.ids, 0)
        return PrefillStart(self._earlier.state, self.ids, self._earlier.tokens)

    def should_cache_at(self, position: int) -> bool:
        """Keep nothing on the way."""
        return False

    def on_read(self, position: int, state: GenerationState) -> None:
        """Keep nothing before the end."""

    def on_end(self, row: Continuation, state: GenerationState) -> None:
        """Keep the new state."""
        self._kept = self._store.put(state, self._tokens + len(row.completion.tokens), self._session)

    def finalize(self) -> None:
        """Write the state to disk, if there is a directory."""
        if self._kept is not None:
            self._store.save(self._kept)


def cache_callbacks(prompt: Prompt) -> dict[str, Any]:
    """The arguments of a job that make it keep the prompt's states."""
    return {
        "find": prompt.find,
        "should_cache_at": prompt.should_cache_at,
        "on_read": prompt.on_read,
        "on_end": prompt.on_end if prompt.caches_final_state else None,
    }
