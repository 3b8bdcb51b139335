"""Run in a process of its own: tiny models of transformers without the stand-in and with it, and how far they differ.

Prints a line of JSON for each model: the relative difference of logits, of logits and gradients in training, and of
what follows from a cache; and which of our functions it called.
"""

import functools
import importlib
import inspect
import json
import sys
import warnings

import torch
from transformers import AutoConfig

from anymamba import compat
from anymamba.compat.install import TABLE

warnings.simplefilter("error")
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
MODELS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "jamba": {**ATTENTION, "mamba_d_state": 8, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2},
    "bamba": {**ATTENTION, **MIXER, "attn_layer_indices": [1]},
    "falcon_h1": {**ATTENTION, **MIXER, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_groups": 2},
    "granitemoehybrid": {
        **ATTENTION, **MIXER, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32,
        "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "nemotron_h": {
        **ATTENTION, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
        "layers_block_type": ["mamba", "attention"], "head_dim": 8,
    },
    "zamba2": {
        **ATTENTION, "mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_shared_attention_adapter": False,
        "adapter_rank": 4,
    },
}  # fmt: skip


def build(kind, state=None):
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    (name,) = (n for n in vars(module) if n.endswith("ForCausalLM") and vars(module)[n].__module__ == module.__name__)
    torch.manual_seed(0)
    model = getattr(module, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if state is not None:
        model.load_state_dict(state)
    return model


def measured(model):
    ids = torch.arange(26).reshape(2, 13) % 40
    with torch.no_grad():
        start = model(ids[:, :9], use_cache=True)
        name = "cache_params" if "cache_params" in start else "past_key_values"
        cache = {name: start[name], "use_cache": True}
        rest = [model(ids[:, t : t + 1], **cache) for t in range(9, 13)]
    model.train()
    trained = model(ids, use_cache=False).logits
    trained.square().mean().backward()
    grads = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])
    model.eval()
    return {
        "logits": model(ids, use_cache=False).logits,
        "training": trained,
        "gradients": grads,
        "decoding": torch.cat([start.logits, *(out.logits for out in rest)], 1),
    }


def forget():
    for name in [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]:
        del sys.modules[name]


def counted(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        CALLED.add(function.__name__)
        return function(*args, **kwargs)

    return call


CALLED = set()
for names in TABLE.values():
    names.update({name: counted(x) for name, x in names.items() if inspect.isfunction(x)})
plain = {}
for kind in MODELS:
    model = build(kind)
    plain[kind] = (model.state_dict(), measured(model))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compat.install()
assert "transformers.models.bamba.modeling_bamba" in str(caught[-1].message)
assert "were imported earlier and do not use it" in str(caught[-1].message)
forget()
for kind, (state, before) in plain.items():
    model = build(kind, state)
    after = measured(model)
    errors = {
        name: float((after[name] - x).detach().abs().max() / x.detach().abs().max()) for name, x in before.items()
    }
    print(json.dumps({"kind": kind, "called": sorted(CALLED), "errors": errors}))
    CALLED.clear()
