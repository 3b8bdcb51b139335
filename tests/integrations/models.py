"""Tiny models of every architecture, with lively random weights."""

import copy
import inspect
import math

import torch
import transformers

from anymamba.integrations.transformers import accelerate

VOCABULARY, WIDTH = 61, 32
SHARED = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8}


def mamba(**fields):
    return transformers.MambaConfig(**{**SHARED, "num_hidden_layers": 2, "state_size": 12, "use_bias": True} | fields)


def falcon_mamba(**fields):
    return transformers.FalconMambaConfig(
        **{**SHARED, "num_hidden_layers": 2, "state_size": 12, "use_bias": True} | fields
    )


def jamba(**fields):
    sizes = {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2}
    experts = {"expert_layer_offset": 1, "num_experts": 3, "num_experts_per_tok": 2, "mamba_d_state": 12}
    other = {"mamba_dt_rank": 3, "mamba_proj_bias": True, "use_mamba_kernels": True}
    return transformers.JambaConfig(**{**SHARED, **ATTENTION, **sizes, **experts, **other} | fields)


def mamba2(**fields):
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 12, "num_hidden_layers": 2, "chunk_size": 8}
    return transformers.Mamba2Config(**{**SHARED, **sizes, "use_bias": True} | fields)


def bamba(**fields):
    sizes = {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_proj_bias": True, "mamba_expand": 2}
    return transformers.BambaConfig(**{**SHARED, **ATTENTION, **MAMBA2, **sizes} | fields)


def granite(**fields):
    sizes = {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 3}
    other = {"num_experts_per_tok": 2, "shared_intermediate_size": 24, "mamba_proj_bias": True, "mamba_expand": 2}
    return transformers.GraniteMoeHybridConfig(**{**SHARED, **ATTENTION, **MAMBA2, **sizes, **other} | fields)


def nemotron(**fields):
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8}
    layers = {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": 8, "use_bias": True}
    return transformers.NemotronHConfig(**{**SHARED, **ATTENTION, **sizes, **layers} | fields)


def zamba2(**fields):
    sizes = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4}
    mamba = {
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "mamba_d_state": 12,
        "mamba_headdim": 16,
        "mamba_expand": 2,
        "chunk_size": 8,
    }
    other = {"num_mem_blocks": 1, "adapter_rank": 4, "add_bias_linear": True, "use_shared_attention_adapter": True}
    return transformers.Zamba2Config(**{**SHARED, **ATTENTION, **sizes, **mamba, **other} | fields)


def falcon_h1(**fields):
    sizes = {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_proj_bias": True, "head_dim": 8}
    scales = {"ssm_in_multiplier": 1.3, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_out_multiplier": 0.8}
    return transformers.FalconH1Config(**{**SHARED, **ATTENTION, **MAMBA2, **sizes, **scales} | fields)


CONFIGS = {
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
    "mamba2": mamba2,
    "bamba": bamba,
    "granite": granite,
    "nemotron": nemotron,
    "zamba2": zamba2,
    "falcon_h1": falcon_h1,
}
MAMBA1_LIKE = ("mamba", "falcon_mamba", "jamba")
MAMBA2_LIKE = tuple(name for name in CONFIGS if name not in MAMBA1_LIKE)
_MADE = {}


def enliven(model):
    """Make the weights so large that every part of the model counts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(0.7 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.4 * noise)
            elif "embed" not in name:
                parameter.copy_(noise / math.sqrt(math.prod(parameter.shape[1:])))
    return model


def plain(name, dtype=torch.float32, **fields):
    """Make a causal language model of transformers, in eval mode."""
    key = (name, repr(sorted(fields.items())))
    if key not in _MADE:
        config = CONFIGS[name](**fields)
        config._attn_implementation = config._experts_implementation = "eager"  # which compute in float64 too
        _MADE[key] = enliven(transformers.AutoModelForCausalLM.from_config(config)).eval()
    return copy.deepcopy(_MADE[key]).to(dtype)


def pair(name, dtype=torch.float32, **fields):
    """Make the same model twice: transformers' own, and accelerated."""
    original = plain(name, dtype, **fields)
    return original, accelerate(copy.deepcopy(original))


def ids(b, t, seed=0):
    """Draw random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(seed))


def parameters_of(model):
    """Return the names of the arguments of a model's forward."""
    return inspect.signature(model.forward).parameters


def cache_name(model):
    """Return the keyword of a model's cache, as an argument and as an output."""
    return "cache_params" if "cache_params" in parameters_of(model) else "past_key_values"


def cache_of(model, output):
    """Return the cache in an output."""
    return getattr(output, cache_name(model))


def positions(model, start, t):
    """Return positions for a model that takes them: Bamba counts from zero whatever its cache holds."""
    takes = "position_ids" in parameters_of(model)
    return {"position_ids": torch.arange(start, start + t).unsqueeze(0)} if takes else {}


def run(model, input_ids, cache=None, start=0, **options):
    """Return the logits, and the cache after them; tokens continue from position `start`."""
    options |= {} if cache is None else {cache_name(model): cache}
    output = model(input_ids, use_cache=True, **positions(model, start, input_ids.shape[1]), **options)
    return output.logits, cache_of(model, output)


def run_split(model, input_ids, lengths):
    """Return the logits of a sequence that is run in parts of these lengths."""
    parts, cache, start = [], None, 0
    for length in lengths:
        logits, cache = run(model, input_ids[:, start : start + length], cache, start)
        parts.append(logits)
        start += length
    return torch.cat(parts, 1)
