import json

import pytest

from tests.generation.cases import TEXT


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Train a small byte-level BPE, as GPT-NeoX and Llama 3 have."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return directory
