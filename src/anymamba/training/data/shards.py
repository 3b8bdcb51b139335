"""Tokenized text on disk: memory-mapped shards of whole documents, and an index with their checksums.

A shard is a safetensors file: `tokens` in the narrowest dtype, `lengths` of the documents in tokens, `sizes` in bytes.
The index is written after every shard, so tokenizing continues where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from anymamba.core.io import digest_file, open_tensors, read_json, run_lock, write_json, write_tensors
from anymamba.generation.tokenizers import FileTokenizer, Tokenizer
from anymamba.training.config.sections import DataSection
from anymamba.training.data.documents import Document, encode, sample
from anymamba.training.data.sources import Text, find_text
from anymamba.training.evaluation.baselines import TRAINING_BYTES, ngram_bits, xz_bytes

_INDEX = "index.json"
_COMPLETE = {"train": list, "held_out": list, "xz_bytes": int, "ngram_bits": float, "vocab_size": int}
_SHARD = {"file": str, "documents": int, "tokens": int, "blake2b": str}
_SPLIT = "by bytes"  # the rule by which text is held out


class Tokens(NamedTuple):
    """Documents one after another.

    Attributes:
        parts: the tokens of each shard, as views of its file.
        lengths: of the documents in tokens, (documents,).
        sizes: of the documents in bytes, (documents,).
    """

    parts: list[Tensor]
    lengths: Int[Tensor, " documents"]
    sizes: Int[Tensor, " documents"]

    @property
    def total(self) -> int:
        """How many tokens there are."""
        return int(self.lengths.sum())

    def read(self, begin: int, end: int) -> Int[Tensor, " t"]:
        """Tokens from `begin` to `end`, across shards, as int64."""
        found = []
        for part in self.parts:
            if begin < len(part) and end > 0:
                found.append(part[max(0, begin) : end].to(torch.int64))
            begin, end = begin - len(part), end - len(part)
        return torch.cat(found) if len(found) != 1 else found[0]


class Corpus(NamedTuple):
    """Tokenized text, ready to be trained on.

    Attributes:
        train: the training text.
        held_out: the held-out text.
        xz_bytes: the bytes that `xz -9` needs for the held-out text.
        ngram_bits: the bits that a byte n-gram of the training text needs for it.
        vocab_size: of the tokenizer.
        checksum: of the index, and through it of every token.
    """

    train: Tokens
    held_out: Tokens
    xz_bytes: int
    ngram_bits: float
    vocab_size: int
    checksum: str


def prepare(
    config: DataSection,
    directory: Path,
    tokenizer: Tokenizer,
    report: Callable[[str], None] = lambda _: None,
    text: Text | None = None,
) -> Corpus:
    """Tokenize what is not tokenized yet, and open the result.

    Args:
        config: names the sources.
        directory: of the shards.
        tokenizer: of the text.
        report: receives lines about what happens.
        text: of the config, if it has been found already.

    Raises:
        ValueError: a source cannot be read, has no text, or is too short, or the directory has other text.
    """
    text = text or find_text(config, report)
    key = _key(config, tokenizer, text)
    report(f"{_described(text.train, text, 'to train on')}; {_described(text.held_out, text, 'held out')}")
    if not _is_complete(_read_index(directory), key):
        directory.mkdir(parents=True, exist_ok=True)
        with run_lock(directory):
            index = _read_index(directory)
            if config.shards is not None and index.get("complete") and index.get("key") != key:
                raise ValueError(
                    f"data.shards = {directory}: expected tokenized text of the same sources, tokenizer and split, "
                    "found that of others, or of files that have changed since; name another directory, or remove it "
                    "if no run needs it"
                )
            if not _is_complete(index, key):
                _tokenize(config, directory, tokenizer, text, index if index.get("key") == key else {"key": key})
                report(f"tokenized into {directory}")
    return open_corpus(directory)


def _is_complete(index: dict[str, Any], key: str) -> bool:
    return index.get("key") == key and bool(index.get("complete"))


def _described(documents: list[Document], text: Text, what: str) -> str:
    size, count = sum(document.size(text.stdin) for document in documents), len(documents)
    ends = sum(document.begin > 0 for document in documents)  # at most one: the end that was cut off a document
    whole = f"{count - ends:,} {'document' if count - ends == 1 else 'documents'}"
    named = whole if not ends else "the end of a document" if count == ends else f"{whole} and the end of another"
    return f"{what}: {named}, {size:,} bytes"


def open_corpus(directory: Path) -> Corpus:
    """Open shards and check them against their index.

    Raises:
        ValueError: the index is missing or incomplete, or a shard is damaged.
    """
    index = _read_index(directory)
    if not index.get("complete"):
        raise ValueError(f"{directory / _INDEX}: expected the index of tokenized text, found none that is complete")
    if wrong := [name for name, kind in _COMPLETE.items() if type(index.get(name)) is not kind or not index[name]]:
        found = reprlib.repr(index.get(wrong[0]))
        raise ValueError(f"{directory / _INDEX}: damaged: expected {wrong[0]}, got {found}")
    for name in ("train", "held_out"):
        for shard in index[name]:
            if digest_file(directory / shard["file"]) != shard["blake2b"]:
                raise ValueError(f"{directory / shard['file']}: damaged; remove {directory} to tokenize again")
    ngram_bits = index.pop("ngram_bits")  # which other machines round differently
    checksum = hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Corpus(
        _open(directory, index["train"]),
        _open(directory, index["held_out"]),
        index["xz_bytes"],
        ngram_bits,
        index["vocab_size"],
        checksum,
    )


def _tokenize(
    config: DataSection,
    directory: Path,
    tokenizer: Tokenizer,
    found: Text,
    index: dict[str, Any],
) -> None:
    index = {"key": index["key"], "vocab_size": tokenizer.vocab_size, "train": index.get("train", []), "held_out": []}
    index["train"] = list(takewhile(lambda s: digest_file(directory / s["file"]) == s["blake2b"], index["train"]))
    done = sum(shard["documents"] for shard in index["train"])
    for shard in _shards(config, tokenizer, found.train[done:], found.stdin):
        _write(directory, index, "train", shard, tokenizer)
    text, limit = b"", config.held_out_bytes
    pieces = []
    for document in found.held_out:
        if limit < 2:
            break
        content = _cut(document.read(found.stdin), limit)
        text, limit = text + content, limit - len(content)
        pieces.append((encode(document.name, content, tokenizer), len(content)))
    if pieces:
        _write(directory, index, "held_out", pieces, tokenizer)
    for name in ("train", "held_out"):
        if (count := sum(shard["tokens"] for shard in index[name])) < 2:
            raise ValueError(
                f"{', '.join(config.sources)}: too little text: expected at least two tokens "
                f"{'to train on' if name == 'train' else 'that are held out'}, got {count}"
            )
    index["xz_bytes"] = xz_bytes(text)
    index["ngram_bits"] = ngram_bits(b"".join(sample(found.train, found.stdin, TRAINING_BYTES)), text)
    index["complete"] = True
    if found.skipped:
        (directory / "skipped.txt").write_text("\n".join(found.skipped) + "\n", encoding="utf-8")
    write_json(directory / _INDEX, index)


def _shards(
    config: DataSection, tokenizer: Tokenizer, documents: list[Document], stdin: bytes
) -> Iterator[list[tuple[Tensor, int]]]:
    """Documents as (tokens, bytes), in groups of about `shard_tokens`."""
    group: list[tuple[Tensor, int]] = []
    tokens = 0
    for document in documents:
        content = document.read(stdin)
        group.append((encode(document.name, content, tokenizer), len(content)))
        tokens += len(group[-1][0])
        if tokens >= config.shard_tokens:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _write(
    directory: Path, index: dict[str, Any], split: str, documents: list[tuple[Tensor, int]], tokenizer: Tokenizer
) -> None:
    dtype = next(
        (d for d, most in ((torch.uint8, 2**8), (torch.uint16, 2**16)) if tokenizer.vocab_size <= most), torch.int32
    )
    tensors = {
        "tokens": torch.cat([ids.to(dtype) for ids, _ in documents]),
        "lengths": torch.tensor([len(ids) for ids, _ in documents], dtype=torch.int64),
        "sizes": torch.tensor([size for _, size in documents], dtype=torch.int64),
    }
    file = f"{split}-{len(index[split]):05d}.safetensors"
    write_tensors(directory / file, tensors, {})
    shard = {"file": file, "documents": len(documents), "tokens": len(tensors["tokens"])}
    index[split] = [*index[split], {**shard, "blake2b": digest_file(directory / file)}]
    write_json(directory / _INDEX, index)


def _open(directory: Path, shards: list[dict[str, Any]]) -> Tokens:
    parts, lengths, sizes = [], [], []
    for shard in shards:
        with open_tensors(directory / shard["file"]) as file:
            parts.append(file.get_tensor("tokens"))
            lengths.append(file.get_tensor("lengths").clone())
            sizes.append(file.get_tensor("sizes").clone())
        tokens, length, size = parts[-1], lengths[-1], sizes[-1]
        fine = tokens.dtype in (torch.uint8, torch.uint16, torch.int32) and tokens.ndim == length.ndim == 1
        if not fine or length.shape != size.shape or length.dtype != torch.int64 or int(length.sum()) != len(tokens):
            raise ValueError(f"{directory / shard['file']}: damaged: its documents are not as long as its tokens")
    return Tokens(parts, torch.cat(lengths), torch.cat(sizes))


def _read_index(directory: Path) -> dict[str, Any]:
    """The index of a directory, empty if there is none; the fields of its shards are checked.

    Raises:
        ValueError: it is damaged.
    """
    index = read_json(directory / _INDEX) if (directory / _INDEX).is_file() else {}
    shards = [index.get(name, []) for name in ("train", "held_out")]
    for shard in [shard for several in shards for shard in (several if isinstance(several, list) else [several])]:
        fine = isinstance(shard, dict) and all(type(shard.get(name)) is kind for name, kind in _SHARD.items())
        if not fine or Path(shard["file"]).name != shard["file"]:
            found = reprlib.repr(shard)
            raise ValueError(f"{directory / _INDEX}: damaged: a shard should have {', '.join(_SHARD)}, got {found}")
    return index


def _key(config: DataSection, tokenizer: Tokenizer, text: Text) -> str:
    """A key that changes with the documents, the tokenizer or the split."""
    digest = hashlib.blake2b(text.stdin, digest_size=16)
    options = [
        _SPLIT,
        config.tokenizer,
        config.held_out,
        config.held_out_bytes,
        config.shard_tokens,
        config.jsonl_field,
        *tokenizer.end[:1],
    ]
    digest.update(json.dumps(options).encode())
    if isinstance(tokenizer, FileTokenizer):
        digest.update(tokenizer.path.read_bytes())
    # All documents in the order of the sources: the options determine which of them are held out.
    for document in text.documents:
        changed = 0 if document.path is None else document.path.stat().st_mtime_ns
        digest.update(
            f"{document.name} {document.begin} {document.end} {changed} {document.size(text.stdin)}\n".encode()
        )
    return digest.hexdigest()


def _cut(content: bytes, limit: int) -> bytes:
    """The first `limit` bytes, or a few less if a character would be cut."""
    if len(content) <= limit:
        return content
    return content[:limit].decode("utf-8", "ignore").encode() if _is_text(content) else content[:limit]


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
