"""The cases of hybrid models: the shape of granite-4.0-h-350m with random weights, against transformers' own model."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anymamba.generation import prefill
from anymamba.models import MambaLM, MambaLMConfig
from benchmarks.generation import MODULES, prompt, set_up_steps
from benchmarks.harness import Call, Case, Contender, forward

ATTENTION_LAYERS = (10, 13, 17, 27)
ACCELERATED = "transformers, accelerated"


def config(small: bool = False) -> MambaLMConfig:
    """Return the config, or one of two layers."""
    return MambaLMConfig(
        d_model=768,
        n_layer=2 if small else 32,
        vocab_size=256 if small else 100352,
        d_intermediate=2048,
        ssm_cfg={"layer": "Mamba2", "d_state": 128, "headdim": 32},
        attn_layer_idx=[1] if small else list(ATTENTION_LAYERS),
        attn_cfg={
            "num_heads": 12,
            "num_heads_kv": 4,
            "qkv_proj_bias": False,
            "out_proj_bias": False,
            "softmax_scale": 0.015625,
        },
        stack={
            "mlp_cfg": {"multiple_of": 1, "gate_first": True},
            "input_multiplier": 12.0,
            "residual_multiplier": 0.246,
            "output_multiplier": 1 / 3,
        },
        pad_vocab_size_multiple=1,
    )


@cache
def our_model(small: bool = False) -> MambaLM:
    """Return our model with random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaLM(config(small)).eval()


@cache
def their_model(accelerated: bool, small: bool = False) -> Any:
    """Return transformers' model with the weights of ours, plain or with our mixers."""
    with tempfile.TemporaryDirectory() as directory:
        our_model(small).save_pretrained(directory, format="granitemoehybrid")
        kind = import_module("transformers").GraniteMoeHybridForCausalLM
        model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    if accelerated:
        import_module("anymamba.integrations.transformers").accelerate(model)
    return model


def set_up_prefill(library: str, batch: int, t: int, small: bool = False) -> Call:
    """Prefill a prompt, and return the logits of the next token and a cache."""
    ids_bt = prompt(batch, t)
    if library.startswith("transformers"):
        theirs = their_model(library == ACCELERATED, small)
        return forward(lambda: {"logits": theirs(ids_bt, use_cache=True, logits_to_keep=1).logits[:, -1]})
    model = our_model(small)
    return forward(lambda: {"logits": prefill(model, ids_bt).logits})


def set_up_decode(library: str, batch: int, t: int, small: bool = False) -> Call:
    """Return a call that decodes one token per row after a prompt; each continues from the one before."""
    ids_bt, ids_b = prompt(batch, t), prompt(batch, 1)[:, 0]
    if not library.startswith("transformers"):
        return set_up_steps(our_model(small), ids_bt, ids_b, by_modules=library == MODULES)
    theirs = their_model(library == ACCELERATED, small)
    with torch.no_grad():
        past = theirs(ids_bt, use_cache=True, logits_to_keep=1).past_key_values

    def their_step() -> dict[str, Tensor]:
        out = theirs(ids_b.unsqueeze(1), past_key_values=past, use_cache=True)
        return {"logits": out.logits[:, -1]}

    return forward(their_step)


def against_transformers(name: str, set_up: Any, batch: int, t: int) -> Case:
    """Return the case of one workload."""
    libraries = ("anymamba", *((MODULES,) if set_up is set_up_decode else ()), "transformers", ACCELERATED)
    contenders = tuple(
        Contender(
            name=library,
            setup=partial(set_up, library, batch, t),
            tiny=partial(set_up, library, 1, 16, True),
            computes=name,
            library="transformers" if library.startswith("transformers") else "anymamba",
        )
        for library in libraries
    )
    return Case(name=f"hybrids/{name}", contenders=contenders, baseline="anymamba", tolerance=1e-4)


CASES: tuple[Case, ...] = (
    *(against_transformers(f"prefill/t{t}", set_up_prefill, 1, t) for t in (512, 2048)),
    *(against_transformers(f"decode/b{b}/t{t}", set_up_decode, b, t) for t in (128, 4096) for b in (1, 8)),
)
