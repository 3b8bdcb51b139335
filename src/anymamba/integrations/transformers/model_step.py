"""One token per row through a whole model of transformers that is nothing but mixers, in one call to the kernels.

    r = embeddings[ids]        r <- r + mixer_i(norm_i(r))        y = norm_f(r)

The program advances transformers' own cache in place. For any other call, or if a module has hooks or adapters,
transformers' own forward runs and calls the mixers one by one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anymamba.integrations.transformers import mixer_step
from anymamba.integrations.transformers.architectures import Stack, of_folder, own_class
from anymamba.integrations.transformers.mixer import AcceleratedMixer, describe_norm, eps_of
from anymamba.integrations.transformers.packing import mask_of_new_tokens, named
from anymamba.kernels.compiled_step import CompiledStep, StepSource, compiled_step, usable_step
from anymamba.kernels.step import StepBuilder


class AcceleratedStack(nn.Module):
    """A model of transformers whose tokens run in one call; mixed into its class (`classes.py`)."""

    STACK: ClassVar[Stack]

    # Of transformers' models.
    config: Any
    embeddings: nn.Module
    layers: nn.ModuleList
    norm_f: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        if torch.compiler.is_compiling() or self.training:
            return super().forward(*args, **kwargs)
        given = named(own_class(type(self).__name__).forward, args, kwargs)
        before = self._before(given)
        source = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
        step = None if before is None else usable_step(self, (source, *before), self.step_source)
        if before is None or step is None:
            return super().forward(*args, **kwargs)
        x = self.embeddings(source) if given.get("inputs_embeds") is None else source
        y = mixer_step.advance(step, x[:, 0], before)
        if y is None:
            return super().forward(**{**given, "input_ids": None, "inputs_embeds": x})
        return self._output(y.unsqueeze(1).to(self._stream_dtype(x)), given)

    def _before(self, given: dict[str, Any]) -> list[Tensor] | None:
        """What one token per row continues from; None for any other call."""
        ids, embedded, mask = given.get("input_ids"), given.get("inputs_embeds"), given.get("attention_mask")
        source = ids if embedded is None else embedded
        if (ids is None) == (embedded is None) or given.get("cache_params") is None:
            return None
        if not isinstance(source, Tensor) or source.ndim < 2 or source.shape[1] != 1:
            return None
        if mask is not None and (mask.ndim != 2 or mask_of_new_tokens(mask, 1) is not None):
            return None
        if self._option(given, "output_hidden_states"):
            return None
        return self._carried(given["cache_params"])

    def _stream_dtype(self, x: Tensor) -> torch.dtype:
        """Of the residual stream, and so of what the last norm returns."""
        is_wide = any(layer.residual_in_fp32 for layer in self.layers[:1])
        return torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype

    def _carried(self, cache: Any) -> list[Tensor] | None:
        """The windows and states of all layers; None if one cannot be read or has not begun."""
        found: list[Tensor] = []
        for index in range(len(self.layers)):
            carried = None if mixer_step.missing(cache, index) else mixer_step.read(cache, index)
            if carried is None:
                return None
            found += carried
        return found

    def _output(self, hidden: Tensor, given: dict[str, Any]) -> Any:
        cache = given["cache_params"]
        if not self._option(given, "return_dict"):
            return hidden, cache
        output = of_folder(self.STACK.folder, f"{self.STACK.prefix}Output")
        return output(last_hidden_state=hidden, cache_params=cache if self._option(given, "use_cache") else None)

    def _option(self, given: dict[str, Any], name: str) -> Any:
        """An argument of the call, or what the config says in its place."""
        found = given.get(name)
        return getattr(self.config, name) if found is None else found

    def describe_step(self, builder: StepBuilder) -> None:
        """Describe one token after the embedding; slot 0 is the residual stream."""
        width, names = builder.input_width, tuple(self._modules)
        if names != ("embeddings", "layers", "norm_f"):
            builder.reject(f"its parts are {', '.join(names)}")
        block = of_folder(self.STACK.folder, f"{self.STACK.prefix}Block")
        layers = builder.submodule(self, "layers", nn.ModuleList)
        for index, name in enumerate(layers._modules):
            layer = builder.submodule(layers, name, block)
            if tuple(layer._modules) != ("norm", "mixer") or layer.mixer.layer_idx != index:
                builder.reject(f"the parts of layer {index} are not a norm and its mixer")
            if not builder.attribute(layer, "residual_in_fp32") and builder.dtype != builder.acc_dtype:
                builder.reject("the residual stream is narrower than float32")
            if not isinstance(layer.mixer, AcceleratedMixer):
                builder.reject(f"the mixer of layer {index} is not accelerated")
            hidden = self._describe_norm(builder, layer, "norm")
            builder.submodule(layer, "mixer", type(layer.mixer)).describe_step(builder, hidden, to=0, add=True)
            builder.release(hidden)
        builder.write(self._describe_norm(builder, self, "norm_f"), width)

    def step_source(self) -> StepSource:
        """Return what the step is compiled from."""
        weight = getattr(self.norm_f, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else self.config.dtype
        return StepSource(self.describe_step, self.config.hidden_size, dtype, dtype)

    def _describe_norm(self, builder: StepBuilder, owner: nn.Module, name: str) -> int:
        norm = describe_norm(builder, owner, name)
        if type(norm).__name__ != f"{self.STACK.prefix}RMSNorm":
            builder.reject(f"{name} is a {type(norm).__name__}")
        return builder.norm(0, norm, builder.input_width, eps=eps_of(norm))


def compiled_stack(stack: AcceleratedStack) -> CompiledStep:
    """Return the step of a model as it is now."""
    return compiled_step(stack, stack.step_source)
