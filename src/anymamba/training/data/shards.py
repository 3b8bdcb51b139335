"""Tokenized text on disk: shards of whole documents, read as they are needed, and an index with their checksums.

A shard is a safetensors file: `tokens` in the smallest dtype, `lengths` of the documents in tokens, `sizes` in bytes.
The index is written after every shard, so that tokenizing continues where it was stopped.
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

from anymamba.core.io import TensorFileReader, digest_file, open_tensors, read_json, run_lock, write_json, write_tensors
from anymamba.generation.tokenizers import FileTokenizer, Tokenizer
from anymamba.training.checkpoint.manifest import make_directory, remove_temporary_files
from anymamba.training.config.sections import DataSection
from anymamba.training.data.baselines import TRAINING_BYTES, ngram_bits, xz_bytes
from anymamba.training.data.documents import Document, Text, encode, sample
from anymamba.training.data.sources import find_text

_INDEX = "index.json"
_INDEX_TYPES = {"train": list, "held_out": list, "xz_bytes": int, "ngram_bits": float, "vocab_size": int}
_TOKEN_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "I32": torch.int32}
_SHARD_TYPES = {"file": str, "documents": int, "tokens": int, "blake2b": str}
_SPLIT_RULE = "by bytes"  # by which text is held out


class TokenShard:
    """Tokens of one shard, read from its file when they are needed.

    A file that is cut short while a run reads it raises an error, where a mapped one would end the process.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; raise `ValueError` if it is missing, cut short, or damaged."""
        self._reader = TensorFileReader(path)
        entry = self._reader.entries.get("tokens", {})
        if entry.get("dtype") not in _TOKEN_DTYPES or len(entry["shape"]) != 1:
            raise ValueError(f"{path}: damaged: expected a vector of tokens, got {reprlib.repr(entry)}")
        self._dtype = _TOKEN_DTYPES[entry["dtype"]]
        self._length: int = entry["shape"][0]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    def read(self, begin: int, end: int) -> Int[Tensor, " t"]:
        """Return tokens from `begin` to `end` as int64."""
        raw = torch.empty(max(0, end - begin) * self._dtype.itemsize, dtype=torch.uint8)
        self._reader.read_into(raw, "tokens", begin * self._dtype.itemsize)
        return raw.view(self._dtype).to(torch.int64)


class Tokens(NamedTuple):
    """Tokens of documents, one after another."""

    parts: list[TokenShard]  # tokens of each shard
    lengths: Int[Tensor, " documents"]  # length of each document in tokens, (documents,)
    sizes: Int[Tensor, " documents"]  # size of each document in bytes, (documents,)

    @property
    def total(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    def read(self, begin: int, end: int) -> Int[Tensor, " t"]:
        """Return tokens from `begin` to `end`, across shards, as int64."""
        slices = []
        for part in self.parts:
            if begin < len(part) and end > 0:
                slices.append(part.read(max(0, begin), min(end, len(part))))
            begin, end = begin - len(part), end - len(part)
        return torch.cat(slices) if len(slices) != 1 else slices[0]


class Corpus(NamedTuple):
    """Tokenized text, ready to be trained on."""

    train: Tokens  # the training text
    held_out: Tokens  # the held-out text
    xz_bytes: int  # bytes that `xz -9` needs for the held-out text
    ngram_bits: float  # bits that a byte n-gram of the training text needs for the held-out text
    vocab_size: int  # vocabulary size of the tokenizer
    checksum: str  # checksum of the index, and through it of every token


def prepare(
    config: DataSection,
    directory: Path,
    tokenizer: Tokenizer,
    report: Callable[[str], None] = lambda _: None,
    text: Text | None = None,
) -> Corpus:
    """Tokenize what is not tokenized yet, and open the result.

    Raise `ValueError` if a source cannot be read, has no text, or is too short, or the directory has other text.
    `text` is the text that the config names, if it has been found already.
    """
    text = text or find_text(config, report)
    key = _key(config, tokenizer, text)
    report(f"{_describe(text.train, text, 'to train on')}; {_describe(text.held_out, text, 'held out')}")
    if not _is_complete(_read_index(directory), key):
        make_directory(directory)
        with run_lock(directory):
            remove_temporary_files(directory)
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


def _describe(documents: list[Document], text: Text, what: str) -> str:
    size, count = sum(document.size(text.stdin) for document in documents), len(documents)
    ends = sum(document.begin > 0 for document in documents)  # at most one: the end that was cut off a document
    whole = f"{count - ends:,} {'document' if count - ends == 1 else 'documents'}"
    named = whole if not ends else "the end of a document" if count == ends else f"{whole} and the end of another"
    return f"{what}: {named}, {size:,} bytes"


def open_corpus(directory: Path) -> Corpus:
    """Open shards and check them against their index; raise `ValueError` if it is incomplete, or one is damaged."""
    index = _read_index(directory)
    if not index.get("complete"):
        raise ValueError(f"{directory / _INDEX}: expected the index of tokenized text, found none that is complete")
    if wrong := [name for name, kind in _INDEX_TYPES.items() if type(index.get(name)) is not kind or not index[name]]:
        raise ValueError(f"{directory / _INDEX}: damaged: expected {wrong[0]}, got {reprlib.repr(index.get(wrong[0]))}")
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


def _tokenize(config: DataSection, directory: Path, tokenizer: Tokenizer, text: Text, index: dict[str, Any]) -> None:
    """Write the shards of a text and their index, going on from an index that was left incomplete."""
    # 1) Training text, after the shards that are complete.
    index = {"key": index["key"], "vocab_size": tokenizer.vocab_size, "train": index.get("train", []), "held_out": []}
    index["train"] = list(takewhile(lambda s: digest_file(directory / s["file"]) == s["blake2b"], index["train"]))
    tokenized = sum(shard["documents"] for shard in index["train"])
    for shard in _shards(config, tokenizer, text.train[tokenized:], text.stdin):
        _write_shard(directory, index, "train", shard, tokenizer)
    # 2) Held-out text, up to a number of bytes.
    held_out, limit = b"", config.held_out_bytes
    documents = []
    for document in text.held_out:
        if limit < 2:
            break
        content = _cut(document.read(text.stdin), limit)
        held_out += content
        limit -= len(content)
        documents.append((encode(document.name, content, tokenizer), len(content)))
    if documents:
        _write_shard(directory, index, "held_out", documents, tokenizer)
    for name in ("train", "held_out"):
        if (count := sum(shard["tokens"] for shard in index[name])) < 2:
            raise ValueError(
                f"{', '.join(config.sources)}: too little text: expected at least two tokens "
                f"{'to train on' if name == 'train' else 'that are held out'}, got {count}"
            )
    # 3) Baselines; then the index is complete.
    index["xz_bytes"] = xz_bytes(held_out)
    index["ngram_bits"] = ngram_bits(b"".join(sample(text.train, text.stdin, TRAINING_BYTES)), held_out)
    index["complete"] = True
    if text.skipped:
        (directory / "skipped.txt").write_text("\n".join(text.skipped) + "\n", encoding="utf-8")
    write_json(directory / _INDEX, index)


def _shards(
    config: DataSection, tokenizer: Tokenizer, documents: list[Document], stdin: bytes
) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield documents as (tokens, bytes), in groups of about `shard_tokens` tokens."""
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


def _write_shard(
    directory: Path, index: dict[str, Any], split: str, documents: list[tuple[Tensor, int]], tokenizer: Tokenizer
) -> None:
    dtype = next(
        (d for d, size in ((torch.uint8, 2**8), (torch.uint16, 2**16)) if tokenizer.vocab_size <= size), torch.int32
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
        path = directory / shard["file"]
        parts.append(TokenShard(path))
        with open_tensors(path) as file:
            lengths.append(file.get_tensor("lengths").clone())
            sizes.append(file.get_tensor("sizes").clone())
        length, size = lengths[-1], sizes[-1]
        is_valid = length.ndim == 1 and length.shape == size.shape and length.dtype == torch.int64
        if not is_valid or int(length.sum()) != len(parts[-1]):
            raise ValueError(f"{path}: damaged: its documents are not as long as its tokens")
    return Tokens(parts, torch.cat(lengths), torch.cat(sizes))


def _read_index(directory: Path) -> dict[str, Any]:
    """Return the index of a directory, empty if there is none; raise `ValueError` if an entry of a shard is damaged."""
    index = read_json(directory / _INDEX) if (directory / _INDEX).is_file() else {}
    shards = [index.get(name, []) for name in ("train", "held_out")]
    for shard in [shard for several in shards for shard in (several if isinstance(several, list) else [several])]:
        fine = isinstance(shard, dict) and all(type(shard.get(name)) is kind for name, kind in _SHARD_TYPES.items())
        if not fine or Path(shard["file"]).name != shard["file"]:
            names = ", ".join(_SHARD_TYPES)
            raise ValueError(f"{directory / _INDEX}: damaged: a shard must have {names}, got {reprlib.repr(shard)}")
    return index


def _key(config: DataSection, tokenizer: Tokenizer, text: Text) -> str:
    """Return a key that changes with the documents, the tokenizer or the split."""
    digest = hashlib.blake2b(text.stdin, digest_size=16)
    options = [
        _SPLIT_RULE,
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
    """Return the first `limit` bytes, or a few less if a character would be cut."""
    if len(content) <= limit:
        return content
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return content[:limit]
    return content[:limit].decode("utf-8", "ignore").encode()
