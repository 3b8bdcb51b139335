"""Text to tokens and back: tokenizer.json files, and bytes for models trained on bytes.

A token may end in the middle of a character. `IncrementalDetokenizer` returns text only when its characters are
complete.
"""

from __future__ import annotations

import os
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from anymamba.checkpoints.formats import gguf
from anymamba.checkpoints.hub import fetch, is_repository_id
from anymamba.checkpoints.known import find_known_checkpoint, suggest_tokenizer
from anymamba.checkpoints.open import read_config
from anymamba.checkpoints.save import COMPANION_FILES
from anymamba.core.io import read_json, write_json
from anymamba.generation.tokenizer_limits import check_growth, max_bytes_per_token

# Usual names of the token that ends a text, the most certain first.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<|im_end|>")
_REPLACEMENT = "\ufffd"
_WINDOW = 64  # most tokens that are decoded together


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer, as generation uses it.

    Attributes:
        vocab_size: Number that all ids are below.
        end: Ids of tokens that end a text, if there are any.
    """

    vocab_size: int
    end: list[int]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, with the tokens that precede the first text of a sequence if requested."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are not a character become U+FFFD."""


class ByteTokenizer:
    """A text as its UTF-8 bytes: ids 0 to 255, no special tokens."""

    vocab_size = 256
    end: list[int] = []  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of a text; surrogates for undecodable bytes of a file or terminal become bytes again."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes; ids above 255, which a padded vocabulary allows, become U+FFFD."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode("utf-8", errors="replace")

    def min_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without making them."""
        return len(text.encode("utf-8", errors="surrogatepass"))


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` library.

    Attributes:
        path: File of the tokenizer.
        vocab_size: Number that all ids are below.
        end: Ids of tokens that end a text: those named by the files next to it, or else a special token with a usual
            name.
    """

    def __init__(self, path: str | os.PathLike[str], end: str | None = None) -> None:
        """Read the file.

        Args:
            path: File of the tokenizer.
            end: Token that ends a text, where neither the file nor those next to it name one.

        Raises:
            ValueError: The file is missing or damaged, makes texts very much longer, has no token `end`, or the library
                is not installed.
        """
        self.path = path = Path(path)
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError as error:
            raise ValueError(
                f"{path}: to read it, install tokenizers (pip install 'anymamba[hf]'), or pass the byte tokenizer"
            ) from error
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        with _library_errors(f"{path}: not a readable tokenizer"):
            self._tokenizer: Any = LibraryTokenizer.from_file(str(path))
        check_growth(str(path), self._tokenizer)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end = self._find_end_tokens(end)

    def _find_end_tokens(self, name: str | None) -> list[int]:
        if name is not None:
            if (token := self.id_of(name)) is None:
                raise ValueError(f"{self.path}: expected a token {name!r} that ends a text, found none")
            return [token]
        named = sorted({i for token in _named_end_tokens(self.path.parent) if (i := self.id_of(token)) is not None})
        special = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return named or [special[token] for token in _USUAL_ENDS if token in special][:1]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            text: Text to encode.
            add_special_tokens: Add the tokens that the file's post-processor puts around the first text of a sequence,
                except an end token after it: the text is to be continued.

        Raises:
            ValueError: The tokenizer fails on the text.
        """
        with _library_errors(f"{self.path}: the tokenizer fails on this text"):
            # This method is faster: it does not return the offsets of the tokens in the text.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if add_special_tokens:
            is_added: list[int] = encoding.special_tokens_mask
            while ids and is_added.pop() and ids[-1] in self.end:
                ids.pop()
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens.

        Raises:
            ValueError: The tokenizer fails on the ids.
        """
        with _library_errors(f"{self.path}: the tokenizer fails on these tokens"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without tokenizing it; 0 if nothing is known."""
        size = len(text.encode("utf-8", errors="surrogatepass"))
        return -(-size // self._max_bytes_per_token) if self._max_bytes_per_token is not None else 0

    @cached_property
    def _max_bytes_per_token(self) -> int | None:
        return max_bytes_per_token(self._tokenizer)

    def to_json(self) -> str:
        """Return the file's content as the library reads it, without truncation or padding."""
        copy = type(self._tokenizer).from_str(self._tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        content: str = copy.to_str()
        return content

    def id_of(self, token: str | int) -> int | None:
        """Return the id of a token, or an id as it is; None for a token that the tokenizer does not have."""
        if isinstance(token, int):
            return token
        try:
            token_id: int | None = self._tokenizer.token_to_id(token)
        except UnicodeEncodeError:  # half a character, as JSON can spell it, is not a token
            return None
        return token_id


@contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Raise errors of the `tokenizers` library as ValueError: bare exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UnicodeError):
        raise
    except BaseException as error:
        raise ValueError(f"{message} ({error})") from error


def min_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return a number of tokens that a text has at least, without tokenizing it; 0 if the tokenizer cannot tell."""
    count: int = getattr(tokenizer, "min_tokens", lambda _: 0)(text)
    return count


def _named_end_tokens(directory: Path) -> Iterable[str | int]:
    """Yield the ends of a text that the files next to a tokenizer name, each a token or an id."""
    for name, field in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
    ):
        value = read_json(directory / name).get(field) if (directory / name).is_file() else None
        if isinstance(value, dict):
            value = value.get("content")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not (isinstance(token, str) or (isinstance(token, int) and token >= 0)):
                preview = reprlib.repr(token)
                raise ValueError(f"{directory / name}: {field} must be a token or its id, or several, got {preview}")
            yield token


def write_end_token(tokenizer: FileTokenizer, directory: Path) -> None:
    """Name the token that ends a text in the files next to a model, where others look for it, unless they name one."""
    named = [i for token in _named_end_tokens(directory) if (i := tokenizer.id_of(token)) is not None]
    if not tokenizer.end or sorted(set(named)) == tokenizer.end:
        return
    text = tokenizer._tokenizer.id_to_token(tokenizer.end[0])
    for name, values in (
        ("tokenizer_config.json", {"eos_token": text}),
        ("special_tokens_map.json", {"eos_token": text}),
        ("generation_config.json", {"eos_token_id": tokenizer.end[0]}),
    ):
        before = read_json(directory / name) if (directory / name).is_file() else {}
        if before or name != "special_tokens_map.json":  # the older file, not needed
            write_json(directory / name, {**before, **values})


def load_tokenizer(
    name: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Load a tokenizer by name, or the one of a model.

    Args:
        name: "bytes", a tokenizer.json, a directory with one, or a hub id; None for the one next to the weights, the
            byte tokenizer for a vocabulary of 256, or that of a published model (`anymamba.checkpoints.known`).
        directory: Directory of the model, or its GGUF file, for a name of None.
        vocab_size: Number of rows of the model's embedding, to check that the tokenizer belongs to it.

    Raises:
        ValueError: There is no tokenizer, or it has more tokens than the model.
    """
    tokenizer: Tokenizer
    if name is None and directory is not None and gguf.is_gguf(Path(directory)):
        with TemporaryDirectory() as extracted:
            for file, content in gguf.tokenizer_files(Path(directory)).items():
                write_json(Path(extracted) / file, content)
            return load_tokenizer(None, extracted, vocab_size)
    if name is None and directory is None:
        raise ValueError("load_tokenizer: expected a name, or the directory of a model, got neither")
    model_file = None if directory is None else Path(directory) / "tokenizer.json"
    if name == "bytes":
        tokenizer = ByteTokenizer()
    elif name is not None:
        tokenizer = FileTokenizer(_find_file(name))
    elif model_file is not None and model_file.is_file():
        tokenizer = FileTokenizer(model_file)
    elif vocab_size == 256:
        tokenizer = ByteTokenizer()
    else:
        assert directory is not None
        tokenizer = _load_known_tokenizer(Path(directory))
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer does not belong to the model: it has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        )
    return tokenizer


def _load_known_tokenizer(directory: Path) -> FileTokenizer:
    """Fetch the tokenizer of a published model, with a warning; raise `ValueError` with what to pass for any other."""
    problem = f"{directory}: no tokenizer.json next to the weights"
    instead = 'pass one with --tokenizer, "bytes" for a model of bytes, or the hub id of a repository that has it'
    config = None
    with suppress(ValueError):  # not a language model
        config = read_config(directory)
    if config is None or (known := find_known_checkpoint(config)) is None:
        suggestion = None if config is None else suggest_tokenizer(config)
        hint = f"; the vocabulary has the size of {suggestion}'s" if suggestion else ""
        raise ValueError(f"{problem}; {instead}{hint}")
    try:
        tokenizer = FileTokenizer(_find_file(known.tokenizer))
    except ValueError as error:
        raise ValueError(
            f"{problem}. {known.name} was trained with the tokenizer of {known.tokenizer}, which could not be read "
            f"({error}): pass its tokenizer.json, or the hub id of a copy, with --tokenizer"
        ) from error
    warnings.warn(f"{problem}: using that of {known.tokenizer}, as for {known.name}", stacklevel=3)
    return tokenizer


def _find_file(name: str | os.PathLike[str]) -> Path:
    """Return the tokenizer.json of a path or hub id."""
    path = Path(name)
    if path.is_dir():
        return path / "tokenizer.json"
    if path.exists() or path.suffix == ".json" or not is_repository_id(name):
        return path
    return fetch(str(name), *COMPANION_FILES, instead="a tokenizer.json") / COMPANION_FILES[0]


def select_end_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the tokens that end a text and that a model with this vocabulary can generate."""
    return [token for token in tokenizer.end if token < vocab_size]


class IncrementalDetokenizer:
    """Text from tokens that come one at a time, never part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start a text."""
        self._tokenizer = tokenizer
        # A token's text may depend on the tokens before it, so the tokens of the last complete text are kept and
        # decoded again with every new one.
        self._ids: list[int] = []
        self._returned_ids = 0  # how many of them belong to text that was returned
        self._returned_characters = 0  # how many characters of their text were returned

    def push(self, token: int) -> str:
        """Add a token; return the text that can no longer change, which may be empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # An incomplete character decodes to replacement characters, and with some tokenizers so do the bytes before it.
        incomplete = 0 if len(self._ids) > _WINDOW else len(text) - len(text.rstrip(_REPLACEMENT))
        certain = text[self._returned_characters : len(text) - incomplete]
        if incomplete or not certain:
            self._returned_characters += len(certain)
        else:
            self._ids = self._ids[self._returned_ids :]
            self._returned_ids = len(self._ids)
            self._returned_characters = len(self._tokenizer.decode(self._ids))
        return certain

    @property
    def is_at_boundary(self) -> bool:
        """Return whether the text of all tokens so far was returned: no character is incomplete."""
        return self._returned_ids == len(self._ids)

    def finish(self) -> str:
        """Return the rest of the text; a character that stayed incomplete becomes U+FFFD."""
        text = self._tokenizer.decode(self._ids)[self._returned_characters :]
        self._ids = []
        self._returned_ids = 0
        self._returned_characters = 0
        return text
