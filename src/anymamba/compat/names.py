"""The official names that the stand-in has: its modules, and what each of them holds."""

from __future__ import annotations

from typing import Any

from anymamba.compat import convolutions, inference, layers, models, modules, norms, scans, selective, updates

_SELECTIVE = {
    "selective_scan_fn": selective.selective_scan_fn,
    "selective_scan_ref": selective.selective_scan_fn,
    "mamba_inner_fn": selective.mamba_inner_fn,
    "mamba_inner_ref": selective.mamba_inner_fn,
}
_FUSED_NORMS = {
    "layer_norm_fn": norms.layer_norm_fn,
    "rms_norm_fn": norms.rms_norm_fn,
    "RMSNorm": norms.RMSNorm,
}
_CONV_INTERFACE = {
    "causal_conv1d_fn": convolutions.causal_conv1d_fn,
    "causal_conv1d_ref": convolutions.causal_conv1d_fn,
    "causal_conv1d_update": convolutions.causal_conv1d_update,
    "causal_conv1d_update_ref": convolutions.causal_conv1d_update,
}
_CONV_VARLEN = {"causal_conv1d_varlen_states": convolutions.causal_conv1d_varlen_states}

TABLE: dict[str, dict[str, Any]] = {
    "mamba_ssm": {
        "selective_scan_fn": selective.selective_scan_fn,
        "mamba_inner_fn": selective.mamba_inner_fn,
        "Mamba": modules.Mamba,
        "Mamba2": modules.Mamba2,
        "Mamba3": modules.Mamba3,
        "MambaLMHeadModel": models.MambaLMHeadModel,
    },
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": _SELECTIVE,
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": scans.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": scans.mamba_split_conv1d_scan_combined,
    },
    "mamba_ssm.ops.triton.selective_state_update": {
        "selective_state_update": updates.selective_state_update,
        "selective_state_update_ref": updates.selective_state_update,
    },
    "mamba_ssm.ops.triton.layernorm_gated": {
        "layernorm_fn": norms.layernorm_fn,
        "rmsnorm_fn": norms.rmsnorm_fn,
        "LayerNorm": norms.GatedLayerNorm,
        "RMSNorm": norms.RMSNormGated,
    },
    "mamba_ssm.ops.triton.layer_norm": _FUSED_NORMS,
    "mamba_ssm.ops.triton.layernorm": _FUSED_NORMS,  # its former name
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": {"Mamba": modules.Mamba, "Block": layers.Block},  # Block: its former place
    "mamba_ssm.modules.mamba2": {"Mamba2": modules.Mamba2},
    "mamba_ssm.modules.mamba2_simple": {"Mamba2Simple": modules.Mamba2Simple},
    "mamba_ssm.modules.mamba3": {"Mamba3": modules.Mamba3},
    "mamba_ssm.modules.block": {"Block": layers.Block},
    "mamba_ssm.modules.mlp": {"GatedMLP": layers.GatedMLP},
    "mamba_ssm.models": {},
    "mamba_ssm.models.config_mamba": {"MambaConfig": models.MambaConfig},
    "mamba_ssm.models.mixer_seq_simple": {
        "create_block": models.create_block,
        "MixerModel": models.MixerModel,
        "MambaLMHeadModel": models.MambaLMHeadModel,
        "MambaConfig": models.MambaConfig,
    },
    "mamba_ssm.utils": {},
    "mamba_ssm.utils.generation": {
        "InferenceParams": inference.InferenceParams,
        "GenerationMixin": inference.GenerationMixin,
        "sample": inference.sample,
        "decode": inference.decode,
        "modify_logit_for_repetition_penalty": inference.modify_logit_for_repetition_penalty,
    },
    "mamba_ssm.utils.hf": {
        "load_config_hf": models.load_config_hf,
        "load_state_dict_hf": models.load_state_dict_hf,
    },
    "causal_conv1d": {
        "causal_conv1d_fn": convolutions.causal_conv1d_fn,
        "causal_conv1d_update": convolutions.causal_conv1d_update,
    },
    "causal_conv1d.causal_conv1d_interface": _CONV_INTERFACE,
    "causal_conv1d.causal_conv1d_varlen": _CONV_VARLEN,
}
