"""Small models, and the reference models on disk."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from anymamba import MambaLM

GOLDEN = Path(__file__).parent.parent / "golden"

# Reference directories with weights.
LM_GOLDENS = [
    "lm_mamba1",
    "lm_hf_mamba",
    "lm_mamba2",
    "lm_mamba2_mlp_untied",
    "lm_hf_mamba2",
    "lm_mamba3_siso",
    "lm_mamba3_mimo",
]

# One small model of each family; every test of generation runs on all of them.
FAMILIES = {
    "Mamba1": {"layer": "Mamba1", "d_state": 8},
    "Mamba2": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 2},
    "Mamba3": {"layer": "Mamba3", "d_state": 16, "headdim": 8, "ngroups": 2},
    "Mamba3 MIMO": {"layer": "Mamba3", "d_state": 16, "headdim": 8, "is_mimo": True, "mimo_rank": 2},
}


def small_lm(family="Mamba2", dtype=torch.float32, seed=0, **fields):
    """Make a model of two layers that does more than repeat its last token."""
    torch.manual_seed(seed)
    defaults = {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": dict(FAMILIES[family])}
    model = MambaLM(**{**defaults, **fields}, dtype=dtype)
    with torch.no_grad():
        for parameter in {model.backbone.embedding.weight, model.lm_head.weight}:
            parameter.normal_(std=0.3)
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight *= 20
    return model


def codestral_lm(dtype=torch.float32):
    """Make a model that the Codestral format can hold: official block sizes, several groups."""
    return small_lm(
        ssm_cfg={"layer": "Mamba2", "ngroups": 2},
        d_model=64,
        pad_vocab_size_multiple=1,
        tie_embeddings=False,
        dtype=dtype,
    )


def golden(name):
    return load_file(GOLDEN / name / "golden.safetensors")
