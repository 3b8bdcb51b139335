"""Backbone of a language model, an embedding and a stack with the official names, and the tying of its head.

A head that is tied to the embedding is one parameter with it in the model, and one tensor in a file.

Letters: b batch, t time, d d_model, z packed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.core.context_parallel import SequencePart
from anymamba.core.layout import Padding
from anymamba.models.cache import LMCache
from anymamba.models.config import MambaLMConfig
from anymamba.models.inputs import check_cache
from anymamba.models.stack.residual_layer import ResidualLayer, RMSNorm
from anymamba.models.stack.stack import Stack
from anymamba.quantization.quantize import QuantizedEmbedding
from anymamba.scan import SsdPath

if TYPE_CHECKING:
    from anymamba.kernels.step_description import StepBuilder

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
# Parts of the head, each with its counterpart in the embedding; only quantized weights have scales.
PARTS = {HEAD: EMBEDDING, "lm_head.scales": "backbone.embedding.scales"}


class Backbone(Stack):
    """Stack with an embedding before it: residual layers and the last norm."""

    CACHE = LMCache

    def __init__(
        self, config: MambaLMConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the parameters. The embedding comes first: checkpoints and random seeds depend on the order."""
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, device=device, dtype=dtype)
        self._build(config.stack_config(), device=device, dtype=dtype)

    @property
    def residual_in_fp32(self) -> bool:
        """Return whether the residual stream is float32 or wider."""
        return self.config.residual_in_fp32

    def forward(  # type: ignore[override]  # that of a stack takes embeddings
        self,
        input_ids: Int[Tensor, "b *t"] | None,
        cache: LMCache | None = None,
        *,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Padding | None = None,
        context: SequencePart | None = None,
        requested: Sequence[int] | None = None,
    ) -> Any:
        """Return the hidden states after the last norm, of a sequence (b, t, d) or a token (b, d), and the new cache.

        Same arguments as `MambaLM.forward`. With `requested` passes, the third result is the residual stream after each
        of them.
        """
        check_cache(cache)
        x = inputs_embeds
        if x is None:
            assert input_ids is not None
            x = self.embed(input_ids)
        options: dict[str, Any] = {} if context is None else {"context": context}  # not every family has this argument
        y, new_cache, hidden_states = self._run(
            x, cache, mask, requested or (), path=path, cu_seqlens=cu_seqlens, **options
        )
        return (y, new_cache) if requested is None else (y, new_cache, hidden_states)

    def embed(self, input_ids: Int[Tensor, "b *t"]) -> Float[Tensor, "b *t d"]:
        """Return the residual stream before the first layer; raises as `embed_ids` does."""
        return self._to_residual(embed_ids("MambaLM", self.embedding, input_ids))

    def describe_step(self, builder: StepBuilder) -> None:
        """Describe one token through all layers, from slot 0 to slot 0: the residual stream."""
        c, last = self.config, self.n_passes - 1
        if not c.residual_in_fp32 and builder.dtype != builder.acc_dtype:
            builder.reject("the residual stream is narrower than float32")
        if c.streams:
            builder.reject("gated residual streams have no compiled step")
        if self.training and c.dropout:
            builder.reject("dropout has no compiled step: model.eval() switches it off")
        if c.input_multiplier != 1:
            builder.scale(0, builder.input_width, factor=c.input_multiplier, to=0)
        layers = builder.submodule(self, "layers", nn.ModuleList)
        names = list(layers._modules)
        for v, index in enumerate(self._layer_of_pass):
            ignored = (v == 0 and c.ignore_first_residual) or (v == last and c.ignore_last_residual)
            builder.submodule(layers, names[index], ResidualLayer).describe_step(builder, 0, add_residual=not ignored)

    def describe_norm(self, builder: StepBuilder) -> int:
        """Describe the last norm; return the slot of its result."""
        width = builder.input_width
        y = builder.norm(0, builder.submodule(self, "norm_f", RMSNorm), width)
        factor = self.config.output_multiplier
        return y if factor == 1 else builder.scale(y, width, factor=factor, to=y)


def embed_ids(where: str, embedding: nn.Embedding | QuantizedEmbedding, input_ids: Any) -> Tensor:
    """Return the embeddings of token ids; raise for ids that are not integers, not tokens, or on another device."""
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: input_ids must be int32 or int64, got {input_ids.dtype}")
    if input_ids.device != (device := embedding.weight.device):
        raise ValueError(f"{where}: input_ids must be on {device}, got {input_ids.device}")
    try:
        embeddings: Tensor = embedding(input_ids)
    except IndexError as error:
        raise ValueError(
            f"{where}: token ids must be between 0 and {embedding.num_embeddings - 1}, "
            f"got {int(input_ids.min())} to {int(input_ids.max())}"
        ) from error
    return embeddings


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are one, or hold the same numbers in the same dtype."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    alias = a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return alias or torch.equal(a, b.to(a.device))


def has_another_head(state: Mapping[str, Tensor], prefix: str = "") -> bool:
    """Return whether a state dict has a head that differs from its embedding."""
    pairs = ((state.get(prefix + head), state.get(prefix + embedding)) for head, embedding in PARTS.items())
    return any(head is not None and (table is None or not same_values(head, table)) for head, table in pairs)


def before_loading(
    model: Any,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Let a tied model read a state dict without a head; reject two different weights for one parameter."""
    if not model.config.tie_embeddings or state.get(prefix + EMBEDDING) is None:
        return
    for head, embedding in PARTS.items():
        if (table := state.get(prefix + embedding)) is not None:
            state.setdefault(prefix + head, table)
    if model.is_tied and has_another_head(state, prefix):
        errors.append(
            f"head and embedding of the model are one (tied), but {prefix}{HEAD} and {prefix}{EMBEDDING} differ; "
            "load them into a model with tie_embeddings=False"
        )


def after_loading(model: Any, incompatible: Any) -> None:
    """Tie head and embedding again after they were moved off the meta device, or assigned."""
    if model.config.tie_embeddings and not model.is_tied:
        parts = {name: _parameter_at(model, name) for pair in PARTS.items() for name in pair}
        tensors = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
        if HEAD in tensors and EMBEDDING in tensors and not has_another_head(tensors):
            model.tie_weights()


def _parameter_at(model: Any, name: str) -> Any:
    """Return the parameter of a dotted name; None if there is none."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model
