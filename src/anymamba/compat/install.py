"""Make `import mamba_ssm` and `import causal_conv1d` find the stand-in: a table of its modules, and an importer."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from anymamba.compat import (
    causal_conv1d,
    generation,
    mamba3_scans,
    mamba3_step,
    mha,
    mixer_seq_simple,
    mixers,
    norms,
    residual_block,
    selective_scan_interface,
    selective_state_update,
    ssd_combined,
    ssd_minimal,
)
from anymamba.compat.cuda_as_cpu import redirect as redirect_cuda
from anymamba.compat.cuda_as_cpu import restore as restore_cuda

_SELECTIVE = {
    "selective_scan_fn": selective_scan_interface.selective_scan_fn,
    "selective_scan_ref": selective_scan_interface.selective_scan_fn,
    "mamba_inner_fn": selective_scan_interface.mamba_inner_fn,
    "mamba_inner_ref": selective_scan_interface.mamba_inner_fn,
    "mamba_inner_fn_no_out_proj": selective_scan_interface.mamba_inner_fn_no_out_proj,
    "bimamba_inner_fn": selective_scan_interface.bimamba_inner_fn,
    "bimamba_inner_ref": selective_scan_interface.bimamba_inner_fn,
}
_FUSED_NORMS = {
    "layer_norm_fn": norms.layer_norm_fn,
    "rms_norm_fn": norms.rms_norm_fn,
    "RMSNorm": norms.RMSNorm,
}
_CONV_INTERFACE = {
    "causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
    "causal_conv1d_ref": causal_conv1d.causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d.causal_conv1d_update,
    "causal_conv1d_update_ref": causal_conv1d.causal_conv1d_update,
}
_CONV_VARLEN = {"causal_conv1d_varlen_states": causal_conv1d.causal_conv1d_varlen_states}

TABLE: dict[str, dict[str, Any]] = {
    "mamba_ssm": {
        "selective_scan_fn": selective_scan_interface.selective_scan_fn,
        "mamba_inner_fn": selective_scan_interface.mamba_inner_fn,
        "Mamba": mixers.Mamba,
        "Mamba2": mixers.Mamba2,
        "Mamba3": mixers.Mamba3,
        "MambaLMHeadModel": mixer_seq_simple.MambaLMHeadModel,
    },
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": _SELECTIVE,
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": ssd_combined.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": ssd_combined.mamba_split_conv1d_scan_combined,
    },
    "mamba_ssm.ops.triton.selective_state_update": {
        "selective_state_update": selective_state_update.selective_state_update,
        "selective_state_update_ref": selective_state_update.selective_state_update,
    },
    "mamba_ssm.ops.triton.layernorm_gated": {
        "layernorm_fn": norms.layernorm_fn,
        "rmsnorm_fn": norms.rmsnorm_fn,
        "rms_norm_ref": norms.rms_norm_ref,
        "LayerNorm": norms.GatedLayerNorm,
        "RMSNorm": norms.RMSNormGated,
    },
    "mamba_ssm.ops.triton.layer_norm": _FUSED_NORMS,
    "mamba_ssm.ops.triton.layernorm": _FUSED_NORMS,  # its former name
    "mamba_ssm.ops.triton.mamba3": {},
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": {"mamba3_siso_combined": mamba3_scans.mamba3_siso_combined},
    "mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step": {
        "apply_rotary_qk_inference_fwd": mamba3_step.apply_rotary_qk_inference_fwd
    },
    "mamba_ssm.ops.tilelang": {},
    "mamba_ssm.ops.tilelang.mamba3": {},
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo": {"mamba3_mimo": mamba3_scans.mamba3_mimo},
    "mamba_ssm.ops.cute": {},
    "mamba_ssm.ops.cute.mamba3": {},
    "mamba_ssm.ops.cute.mamba3.mamba3_step_fn": {"mamba3_step_fn": mamba3_step.mamba3_step_fn},
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": {"Mamba": mixers.Mamba, "Block": residual_block.FormerBlock},  # it was here once
    "mamba_ssm.modules.ssd_minimal": {
        "segsum": ssd_minimal.segsum,
        "ssd_minimal_discrete": ssd_minimal.ssd_minimal_discrete,
    },
    "mamba_ssm.modules.mamba2": {"Mamba2": mixers.Mamba2},
    "mamba_ssm.modules.mamba2_simple": {"Mamba2Simple": mixers.Mamba2Simple},
    "mamba_ssm.modules.mamba3": {"Mamba3": mixers.Mamba3},
    "mamba_ssm.modules.block": {"Block": residual_block.Block},
    "mamba_ssm.modules.mha": {"MHA": mha.MHA},
    "mamba_ssm.modules.mlp": {"GatedMLP": residual_block.GatedMLP},
    "mamba_ssm.models": {},
    "mamba_ssm.models.config_mamba": {"MambaConfig": mixer_seq_simple.MambaConfig},
    "mamba_ssm.models.mixer_seq_simple": {
        "create_block": mixer_seq_simple.create_block,
        "_init_weights": mixer_seq_simple._init_weights,
        "MixerModel": mixer_seq_simple.MixerModel,
        "MambaLMHeadModel": mixer_seq_simple.MambaLMHeadModel,
        "MambaConfig": mixer_seq_simple.MambaConfig,
    },
    "mamba_ssm.utils": {},
    "mamba_ssm.utils.generation": {
        "InferenceParams": generation.InferenceParams,
        "GenerationMixin": generation.GenerationMixin,
        "sample": generation.sample,
        "decode": generation.decode,
        "modify_logit_for_repetition_penalty": generation.modify_logit_for_repetition_penalty,
        "modify_logits_for_min_p_filtering": generation.modify_logits_for_min_p_filtering,
        "modify_logits_for_top_k_filtering": generation.modify_logits_for_top_k_filtering,
        "modify_logits_for_top_p_filtering": generation.modify_logits_for_top_p_filtering,
    },
    "mamba_ssm.utils.hf": {
        "load_config_hf": mixer_seq_simple.load_config_hf,
        "load_state_dict_hf": mixer_seq_simple.load_state_dict_hf,
    },
    "causal_conv1d": {
        "causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d.causal_conv1d_update,
    },
    "causal_conv1d.causal_conv1d_interface": _CONV_INTERFACE,
    "causal_conv1d.causal_conv1d_varlen": _CONV_VARLEN,
}

# What else `from mamba_ssm.utils.generation import *` brings, because the official module imports it: the module and
# the name there. Only what is installed is brought.
_GENERATION_IMPORTS = {
    **{name: ("dataclasses", name) for name in ("dataclass", "field")},
    **{name: ("typing", name) for name in ("Callable", "Optional", "Sequence", "Union")},
    **{name: ("einops", name) for name in ("rearrange", "repeat")},
    **{name: ("torch.profiler", name) for name in ("ProfilerActivity", "profile", "record_function")},
    **{name: ("transformers.generation", name) for name in ("GenerateDecoderOnlyOutput", "TextStreamer")},
    "GreedySearchDecoderOnlyOutput": ("transformers.generation", "GenerateDecoderOnlyOutput"),  # its former names
    "SampleDecoderOnlyOutput": ("transformers.generation", "GenerateDecoderOnlyOutput"),
    "F": ("torch.nn", "functional"),
    "Tensor": ("torch", "Tensor"),
    "namedtuple": ("collections", "namedtuple"),
    "partial": ("functools", "partial"),
    **{name: (name, "") for name in ("gc", "time", "torch")},
}
_IMPORTS = {"mamba_ssm.utils.generation": _GENERATION_IMPORTS}

ACTIVATIONS = ("heavy_tail", "softplus")
PACKAGES = ("mamba_ssm", "causal_conv1d")
VERSIONS = {"mamba_ssm": "2.3.0", "causal_conv1d": "1.6.0"}  # the packages whose functions these are
_MARKER = "__anymamba__"


class _ModuleNotProvidedError(NotImplementedError, ImportError):
    """Import of an official module that the stand-in does not provide."""


class _NameNotProvidedError(NotImplementedError, AttributeError):
    """Access to an official name that the stand-in does not provide."""


def _raise_missing(kind: type[Exception], name: str) -> NoReturn:
    raise kind(f"{name}: anymamba's stand-in has no such module or name (docs/compat.md lists what there is)")


class _Finder(MetaPathFinder, Loader):
    """Importer that creates the modules of `TABLE`, and raises for other modules of the two packages."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        if fullname not in TABLE:
            _raise_missing(_ModuleNotProvidedError, fullname)
        return ModuleSpec(fullname, self, is_package=True)  # so that a missing name is looked for as a submodule

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module).update(TABLE[name])
        setattr(module, _MARKER, True)
        module.__version__ = VERSIONS[name.partition(".")[0]]  # type: ignore[attr-defined]
        module.__doc__ = f"anymamba's stand-in for {name}."
        imports = {key: path for key, path in _IMPORTS.get(name, {}).items() if _is_installed(path[0])}
        if imports:
            module.__all__ = [*TABLE[name], *imports]  # type: ignore[attr-defined]

        def get_missing(attribute: str) -> Any:
            if attribute in imports:
                path, imported = imports[attribute]
                there = importlib.import_module(path)
                return getattr(there, imported) if imported else there
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            _raise_missing(_NameNotProvidedError, f"{name}.{attribute}")

        module.__getattr__ = get_missing  # type: ignore[method-assign]


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


_finder = _Finder()


def install(*, a_activation: str | None = None, cuda_as_cpu: bool = False) -> None:
    """Make later imports of `mamba_ssm` and `causal_conv1d` find the stand-in.

    Args:
        a_activation: Activation of the decay rates of a `Mamba3` that names none: "softplus", as before June 2026, or
            "heavy_tail". Default: what an earlier call set, else "heavy_tail".
        cuda_as_cpu: Whether `.cuda()`, `device="cuda"`, `torch.cuda` and autocast for CUDA use the CPU; one line on
            stderr says so. Default: what an earlier call set, else no.

    Raises:
        ValueError: There is no such activation.
        RuntimeError: One of the packages is installed, or was imported before; or there is a CUDA device with
            `cuda_as_cpu`. Nothing is changed then.
    """
    if a_activation not in (None, *ACTIVATIONS):
        raise ValueError(
            f"anymamba.compat.install: a_activation must be one of {', '.join(ACTIVATIONS)}, got {a_activation!r}"
        )
    if _finder not in sys.meta_path:
        _check_absent()
    if cuda_as_cpu:
        redirect_cuda()
    if a_activation is not None:
        mixers.Mamba3.default_a_activation = a_activation
    if _finder not in sys.meta_path:
        _import_all()


def _check_absent() -> None:
    for name in PACKAGES:
        if name in sys.modules:
            raise RuntimeError(f"anymamba.compat.install: {name} has already been imported; call it before that import")
        if importlib.util.find_spec(name) is not None:
            raise RuntimeError(
                f"anymamba.compat.install: {name} is installed, and the stand-in never hides it; uninstall it first"
            )


def _import_all() -> None:
    """Add the importer, and import everything that it finds, before the packages of a working directory are seen."""
    sys.meta_path.append(_finder)
    # transformers' modules look for the packages once, when they are imported.
    mixers_before = [
        n for n, module in sys.modules.items() if n.startswith("transformers.models.") and _is_mixer(module)
    ]
    for package in PACKAGES:
        for name in _modules_of(package):
            importlib.import_module(name)
    if mixers_before:
        warnings.warn(
            f"anymamba.compat.install: {', '.join(sorted(mixers_before))} were imported earlier and do not use it",
            stacklevel=3,
        )


def _modules_of(package: str) -> list[str]:
    return [name for name in TABLE if name.partition(".")[0] == package]


def _is_mixer(module: ModuleType) -> bool:
    return "causal_conv1d_fn" in vars(module) or "mamba_inner_fn" in vars(module)


def uninstall() -> None:
    """Remove the stand-in and its options. Names already imported from it keep working."""
    restore_cuda()
    mixers.Mamba3.default_a_activation = ACTIVATIONS[0]
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [n for n, module in sys.modules.items() if n.partition(".")[0] in PACKAGES]:
        if getattr(sys.modules[name], _MARKER, False):
            del sys.modules[name]
