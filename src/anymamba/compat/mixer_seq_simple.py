"""The official language model, built from the official parts. Our model, on the same parameters, generates for it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.checkpoints.empty_model import empty_model
from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.compat.generation import GenerationMixin, make_step
from anymamba.compat.mha import MHA
from anymamba.compat.mixers import Mamba, Mamba2, Mamba3
from anymamba.compat.norms import RMSNorm
from anymamba.compat.residual_block import Block, GatedMLP, fused_add_and_norm
from anymamba.core.linear import apply_linear
from anymamba.generation.decoder import Decoder
from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM

_MIXERS: dict[str, Callable[..., Any]] = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}


@dataclass
class MambaConfig:
    """Official configuration of a language model."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


class CausalLMOutput(NamedTuple):
    """Output of the official model.

    Attributes:
        logits: Logits, (b, t, v).
    """

    logits: Tensor


def create_block(
    d_model: int,
    d_intermediate: int,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: list[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """Return a residual layer around attention, if `attn_layer_idx` has the index, or the block of `ssm_cfg`.

    `ssm_cfg["layer"]` names the block, Mamba-1 if it names none.

    Raises:
        ValueError: There is no such block.
    """
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    if layer_idx in (attn_layer_idx or []):
        mixer = partial(MHA, layer_idx=layer_idx, **(attn_cfg or {}), **factory)
    else:
        options = dict(ssm_cfg or {})
        layer = options.pop("layer", "Mamba1")
        if layer not in _MIXERS:
            raise ValueError(f'ssm_cfg["layer"] must be one of {", ".join(_MIXERS)}, got {layer!r}')
        mixer = partial(_MIXERS[layer], layer_idx=layer_idx, **options, **factory)
    norm = partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **factory)
    mlp = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **factory)
    block = Block(d_model, mixer, mlp if d_intermediate else nn.Identity, norm, fused_add_norm, residual_in_fp32)
    block.layer_idx = layer_idx  # type: ignore[assignment]
    return block


@torch.no_grad()
def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Give a module the official initial values; for `apply` of a model, which calls it for every module inside.

    Args:
        module: Module. The bias of an `nn.Linear` becomes zero, unless it is marked `_no_reinit`.
        n_layer: Number of layers.
        initializer_range: Standard deviation of an embedding.
        rescale_prenorm_residual: Whether to draw the last weights of mixers and MLPs again, as `nn.Linear` does,
            divided by the square root of the number of residual branches.
        n_residuals_per_layer: Number of residual branches of a layer, 2 with an MLP.
    """
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.div_(math.sqrt(n_residuals_per_layer * n_layer))


def _accept_former_keywords(initialize: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor be called by keywords without `d_intermediate`, which the first versions did not have."""

    @functools.wraps(initialize)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if "vocab_size" in kwargs and len(args) < 3:
            kwargs.setdefault("d_intermediate", 0)
        initialize(self, *args, **kwargs)

    return call


class MixerModel(nn.Module):
    """Embedding, residual layers and the last norm, with the initial values of `anymamba.MambaLM`.

    An `initializer_cfg` holds options of `_init_weights`.
    """

    @_accept_former_keywords
    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: list[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, **factory)
        layer = partial(create_block, d_model, d_intermediate, ssm_cfg, attn_layer_idx, attn_cfg, norm_epsilon)
        switches = (rms_norm, residual_in_fp32, fused_add_norm)
        self.layers = nn.ModuleList(layer(*switches, layer_idx=i, **factory) for i in range(n_layer))
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **factory)
        if self.embedding.weight.device.type != "meta":
            sizes: dict[str, Any] = {"d_model": d_model, "n_layer": n_layer, "d_intermediate": d_intermediate}
            config = MambaLMConfig(
                **sizes,
                vocab_size=vocab_size,
                ssm_cfg=ssm_cfg or {},
                attn_layer_idx=list(attn_layer_idx or []),
                attn_cfg={name: value for name, value in (attn_cfg or {}).items() if name != "causal"},
                rms_norm=rms_norm,
                pad_vocab_size_multiple=1,
            )
            self.load_state_dict(MambaLM(config, **factory).backbone.state_dict())
            if initializer_cfg:
                residuals = 2 if d_intermediate else 1
                self.apply(partial(_init_weights, n_layer=n_layer, n_residuals_per_layer=residuals, **initializer_cfg))

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Return the states of an empty cache, by layer."""
        make = (batch_size, max_seqlen)
        return {i: layer.allocate_inference_cache(*make, dtype=dtype, **kwargs) for i, layer in enumerate(self.layers)}  # type: ignore[operator]

    def forward(self, input_ids: Tensor, inference_params: Any = None, **mixer_kwargs: Any) -> Tensor:
        """Map ids (b, t) to hidden states (b, t, d)."""
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, inference_params=inference_params, **mixer_kwargs)
        if self.fused_add_norm:
            normed: Tensor = fused_add_and_norm(self.norm_f, hidden, residual, False, self.residual_in_fp32)
            return normed
        return self.norm_f((hidden if residual is None else hidden + residual).to(self.norm_f.weight.dtype))


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """Official language model, with the official names of its parts and parameters."""

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__()
        self.config = config
        padded = _as_our_config(config).padded_vocab_size
        self.backbone = MixerModel(
            d_model=config.d_model,
            n_layer=config.n_layer,
            d_intermediate=config.d_intermediate,
            vocab_size=padded,
            ssm_cfg=config.ssm_cfg,
            attn_layer_idx=config.attn_layer_idx,
            attn_cfg=config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            device=device,
            dtype=dtype,
        )
        self.lm_head = nn.Linear(config.d_model, padded, bias=False, device=device, dtype=dtype)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head share its weight with the embedding, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Return the states of an empty cache, by layer."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        """Return the logits of each token, or of the last `num_last_tokens`; `position_ids` have no effect."""
        hidden = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden = hidden[:, -num_last_tokens:]
        return CausalLMOutput(apply_linear(self.lm_head, hidden))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> MambaLMHeadModel:
        """Load a checkpoint in any supported format, from a directory or a hub id."""
        loaded = load_model(pretrained_model_name, dtype=dtype, device=device or "cpu")
        values = {f.name: getattr(loaded.config, f.name) for f in dataclasses.fields(MambaConfig)}
        model = cls(MambaConfig(**values), device="meta", dtype=loaded.dtype, **kwargs)
        model.load_state_dict(loaded.state_dict(keep_vars=True), assign=True)
        model.tie_weights()
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors, which the official package reads, too."""
        self._as_mamba_lm().save_pretrained(save_directory)

    def _as_mamba_lm(self) -> MambaLM:
        """Return our model on the parameters of this one."""
        config = _as_our_config(self.config)
        mixers = [layer.mixer for layer in self.backbone.layers if isinstance(layer.mixer, Mamba3)]
        if mixers:  # which may have got their activation from `install`
            ssm_cfg = {**config.ssm_cfg, "a_activation": mixers[0].config.a_activation}
            config = dataclasses.replace(config, ssm_cfg=ssm_cfg)
        model = empty_model(config, self.backbone.embedding.weight.dtype)
        model.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        model.tie_weights()
        return model.eval()

    @staticmethod
    def _make_step(model: MambaLMHeadModel, max_length: int, batch_size: int) -> Callable[[Tensor], Tensor]:
        """Return a function as `make_step` does, with our compiled step if no module was changed or hooked."""
        if not _is_unmodified(model):
            return make_step(model, max_length, batch_size)
        decoder, cache = Decoder(model._as_mamba_lm()), None

        def step(ids: Tensor) -> Tensor:
            nonlocal cache
            if cache is not None and ids.shape[1] == 1:
                logits, cache = decoder.step(ids[:, 0], cache, in_place=True)
                return logits
            for segment in ids.split(SEGMENT_LEN, dim=1):
                output = decoder.model(segment, cache, logits="last")
                cache = output.cache
            return output.logits[:, 0]

        return step


def _as_our_config(config: MambaConfig) -> MambaLMConfig:
    return MambaLMConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


_KNOWN_MODULES = (
    MambaLMHeadModel,
    MixerModel,
    Block,
    GatedMLP,
    RMSNorm,
    nn.LayerNorm,
    nn.ModuleList,
    Mamba,
    Mamba2,
    Mamba3,
    MHA,
)


def _is_unmodified(model: MambaLMHeadModel) -> bool:
    """Return whether the model computes what its parameters define: known modules outside of blocks, and no hooks."""
    mixers = [layer.mixer for layer in model.backbone.layers]
    if any(isinstance(mixer, MHA) and not mixer.causal for mixer in mixers):
        return False
    inner = tuple(module for mixer in mixers for module in mixer.modules())  # type: ignore[union-attr]
    known = (*_KNOWN_MODULES, nn.Linear, nn.Embedding)
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if type(module) not in known and not any(module is part for part in inner):
            return False
    return all(type(part) is nn.Linear or not isinstance(part, nn.Linear) or _is_ours(part) for part in inner)


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("anymamba.blocks.")


def load_config_hf(model_name: str) -> dict[str, Any]:
    """Return the config.json of a directory or hub id."""
    values: dict[str, Any] = json.loads((Path(resolve_source(model_name)) / "config.json").read_text(encoding="utf-8"))
    return values


def load_state_dict_hf(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint in any supported format, by official name."""
    return dict(load_model(model_name, dtype=dtype, device=device or "cpu").state_dict())
