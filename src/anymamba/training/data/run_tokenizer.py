"""Byte-pair encoding trained on the text of a run."""

from __future__ import annotations

from pathlib import Path

from anymamba.core.io import atomic_write
from anymamba.training.data.documents import sample
from anymamba.training.data.sources import Text

PREFIX = "bpe:"
_END_TOKEN = "<|endoftext|>"
_MIN_VOCAB_SIZE = 257  # all bytes, and the end token
_TRAINING_BYTES = 2**23  # of the text, at most


def bpe_vocab_size(name: str) -> int | None:
    """Return the number of tokens in "bpe:1024"; None for the name of another tokenizer.

    Raises:
        ValueError: It is not a number, or too small, or the library is not installed.
    """
    if not name.startswith(PREFIX):
        return None
    text = name.removeprefix(PREFIX)
    if not text.isdecimal() or int(text) < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"data.tokenizer = {name}: expected a number of tokens, {_MIN_VOCAB_SIZE} or more, got {text!r}"
        )
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"data.tokenizer = {name}: install tokenizers (pip install 'anymamba[hf]')") from error
    return int(text)


def train_bpe(text: Text, size: int, path: Path) -> None:
    """Write a tokenizer.json of `size` tokens, trained on a sample of the training text; the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sample(text.train, text.stdin, _TRAINING_BYTES)
    tokenizer.train_from_iterator((part.decode("utf-8", "ignore") for part in texts), trainer)
    with atomic_write(path) as temporary:
        tokenizer.save(str(temporary))
