"""Published checkpoints whose files leave out what is needed to use them: the tokenizer, and Mamba-3's activation.

The official repositories hold a config and weights only. A checkpoint is recognized by sizes in its config, which also
holds for a copy on disk under another name. What the table does not have is asked of the user, or decided by sample
texts (`anymamba.generation.detect_activation`).

Sources: the README of state-spaces/mamba has the sizes of Mamba-1 and Mamba-2 models, and its scripts use GPT-NeoX's
tokenizer. The Mamba-3 models were published in July 2026 with configs of these sizes, and their cards name the
tokenizer of Llama 3.1; that of the 1.5b was read in several public projects, and logits of the 187m on a GPU are those
of the heavy tail. The official package could not hold a Mamba-3 language model until June 2026, after its activation
had become that. The sizes of mamba3-siso-443m and mamba3-mimo-444m could not be verified and are missing.
"""

from __future__ import annotations

from typing import NamedTuple

from anymamba.models.config import MambaLMConfig

_NEOX = "EleutherAI/gpt-neox-20b"
_LLAMA = "meta-llama/Llama-3.1-8B"

# Vocabularies, which suggest a tokenizer even if the other sizes are unknown.
_TOKENIZERS = {50277: _NEOX, 128256: _LLAMA}


class KnownCheckpoint(NamedTuple):
    """What is known of a published checkpoint.

    Attributes:
        name: Hub id of the model.
        tokenizer: Hub id of the repository with its tokenizer.
        activation: Activation of Mamba-3's decay rates; empty for the other families.
    """

    name: str
    tokenizer: str
    activation: str


# Models by family, whether the blocks are MIMO, width and number of layers.
_MODELS = {
    **{
        (family, False, d_model, n_layer): f"state-spaces/{prefix}-{size}"
        for family, prefix, sizes in (
            ("Mamba1", "mamba", ("130m", "370m", "790m", "1.4b", "2.8b")),
            ("Mamba2", "mamba2", ("130m", "370m", "780m", "1.3b", "2.7b")),
        )
        for size, (d_model, n_layer) in zip(
            sizes, ((768, 24), (1024, 48), (1536, 48), (2048, 48), (2560, 64)), strict=True
        )
    },
    ("Mamba3", False, 768, 12): "state-spaces/mamba3-siso-187m",
    ("Mamba3", False, 1536, 24): "state-spaces/mamba3-siso-893m",
    ("Mamba3", False, 2048, 24): "state-spaces/mamba3-siso-1.5b",
    ("Mamba3", True, 768, 12): "state-spaces/mamba3-mimo-187m",
    ("Mamba3", True, 1536, 24): "state-spaces/mamba3-mimo-894m",
    ("Mamba3", True, 2048, 24): "state-spaces/mamba3-mimo-1.5b",
}
_VOCABULARIES = {"Mamba1": 50277, "Mamba2": 50277, "Mamba3": 128256}


def find_known_checkpoint(config: MambaLMConfig) -> KnownCheckpoint | None:
    """Return the published checkpoint that has a config's sizes; None if the table has none."""
    is_mimo = config.ssm_cfg.get("is_mimo", False)
    name = _MODELS.get((config.layer, is_mimo, config.d_model, config.n_layer))
    if name is None or config.vocab_size != _VOCABULARIES[config.layer] or config.attn_layer_idx:
        return None
    return KnownCheckpoint(name, _TOKENIZERS[config.vocab_size], "heavy_tail" if config.layer == "Mamba3" else "")


def suggest_tokenizer(config: MambaLMConfig) -> str | None:
    """Return the hub id of a tokenizer with as many tokens as the config's vocabulary; None if none is known."""
    return _TOKENIZERS.get(config.vocab_size)
