"""What transformers, PEFT and accelerate call on a model that they train, for language models.

None of these libraries is needed here, and nothing here depends on them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from anymamba.models.backbone import Backbone
from anymamba.models.cache import HasFingerprint, LMCache


class HasTrainerMethods(HasFingerprint):
    """A language model with the attributes that trainers and adapters of other libraries look for.

    Attributes:
        generation_config: None, because `generate` takes all its options as arguments. PEFT sets it.
    """

    backbone: Backbone
    lm_head: nn.Linear
    generation_config: Any = None

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.backbone.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, cache: LMCache | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for the next token: all ids, or the last of each row if there is a cache.

        Other options are returned as they are.
        """
        return {"input_ids": input_ids if cache is None else input_ids[:, -1:], "cache": cache, **options}

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Return whether the backward pass recomputes each layer from its inputs."""
        return self.backbone.config.checkpointing

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Keep only the inputs of each layer, and recompute the rest in the backward pass, to save memory.

        Args:
            gradient_checkpointing_kwargs: Options of `torch.utils.checkpoint`, which change no result: it is never
                reentrant here.
        """
        self._set_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep what the backward pass needs."""
        self._set_checkpointing(False)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Do what `gradient_checkpointing_enable` does, which newer versions of transformers call so.

        Raises:
            ValueError: Only some layers are to be recomputed, or their inputs are to be moved to another device.
        """
        if every_n_layers != 1 or offload:
            raise ValueError(
                "MambaLM: activation checkpointing must have every_n_layers = 1 and offload = False, got "
                f"{every_n_layers} and {offload}"
            )
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def _set_checkpointing(self, checkpointing: bool) -> None:
        # The model's own config, which is saved with it, stays as it is.
        self.backbone.config = dataclasses.replace(self.backbone.config, checkpointing=checkpointing)


def merge_masks(
    mask: Tensor | None,
    attention_mask: Tensor | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
) -> Tensor | None:
    """Return the mask of a call with transformers' arguments.

    Raises:
        ValueError: Both masks are given, the attention mask is no matrix, or an output is requested that there is not.
    """
    if output_attentions:
        raise ValueError("MambaLM: output_attentions must be False: there are no attention weights to return")
    if output_hidden_states:
        raise ValueError("MambaLM: output_hidden_states must be False; hidden_states=[-1] names the passes to return")
    if attention_mask is None:
        return mask
    if mask is not None:
        raise ValueError("MambaLM: mask cannot be combined with attention_mask, which is transformers' name for it")
    if attention_mask.ndim != 2:
        raise ValueError(f"MambaLM: attention_mask must have shape (b, t), got {tuple(attention_mask.shape)}")
    return attention_mask.bool()
