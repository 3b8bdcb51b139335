"""One token per row through a whole model of transformers that consists of mixers only, in one call to the kernels.

    r = embeddings[ids]        r <- r + mixer_i(norm_i(r))        y = norm_f(r)

The compiled step updates the cache of transformers in place. For any other call, or if a module has hooks or adapters,
the forward of transformers runs and calls the mixers one by one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anymamba.integrations.transformers.architectures import (
    Stack,
    class_in_folder,
    original_class,
    read_state,
    uncovered_reason,
)
from anymamba.integrations.transformers.mixer import AcceleratedMixer, advance, describe_norm, eps_of
from anymamba.integrations.transformers.packing import arguments_by_name, mask_of_new_tokens
from anymamba.kernels.compiled_step import CompiledStep, StepSource, compiled_step, usable_step
from anymamba.kernels.step_description import StepBuilder


class AcceleratedStack(nn.Module):
    """Model of transformers whose tokens run in one call; mixed into its class (`accelerated_classes.py`)."""

    STACK: ClassVar[Stack]

    # Attributes of the models of transformers.
    config: Any
    embeddings: nn.Module
    layers: nn.ModuleList
    norm_f: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the forward of transformers does, one token in one call."""
        if torch.compiler.is_compiling() or self.training:
            return super().forward(*args, **kwargs)
        arguments = arguments_by_name(original_class(type(self).__name__).forward, args, kwargs)
        before = self._states_before(arguments)
        source = arguments["input_ids"] if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
        step = None if before is None else usable_step(self, (source, *before), self.step_source)
        if before is None or step is None:
            return super().forward(*args, **kwargs)
        x = self.embeddings(source) if arguments.get("inputs_embeds") is None else source
        y = advance(step, x[:, 0], before)
        if y is None:
            return super().forward(**{**arguments, "input_ids": None, "inputs_embeds": x})
        return self._output(y.unsqueeze(1).to(self._stream_dtype(x)), arguments)

    def _states_before(self, arguments: dict[str, Any]) -> list[Tensor] | None:
        """Return the windows and states that one token per row continues from; None for any other call."""
        ids = arguments.get("input_ids")
        embeddings = arguments.get("inputs_embeds")
        mask = arguments.get("attention_mask")
        source = ids if embeddings is None else embeddings
        if (ids is None) == (embeddings is None) or arguments.get("cache_params") is None:
            return None
        if not isinstance(source, Tensor) or source.ndim < 2 or source.shape[1] != 1:
            return None
        if mask is not None and (mask.ndim != 2 or mask_of_new_tokens(mask, 1) is not None):
            return None
        if self._option(arguments, "output_hidden_states"):
            return None
        return self._read_states(arguments["cache_params"])

    def _stream_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the residual stream, which is that of the last norm."""
        in_fp32 = any(layer.residual_in_fp32 for layer in self.layers[:1])
        return torch.promote_types(x.dtype, torch.float32) if in_fp32 else x.dtype

    def _read_states(self, cache: Any) -> list[Tensor] | None:
        """Return the windows and states of all layers; None if one cannot be read or has not begun."""
        tensors: list[Tensor] = []
        for index in range(len(self.layers)):
            state = None if uncovered_reason(cache, index) else read_state(cache, index)
            if state is None:
                return None
            tensors += state
        return tensors

    def _output(self, hidden: Tensor, arguments: dict[str, Any]) -> Any:
        cache = arguments["cache_params"]
        if not self._option(arguments, "return_dict"):
            return hidden, cache
        output = class_in_folder(self.STACK.folder, f"{self.STACK.prefix}Output")
        return output(last_hidden_state=hidden, cache_params=cache if self._option(arguments, "use_cache") else None)

    def _option(self, arguments: dict[str, Any], name: str) -> Any:
        """Return an argument of the call, or the field of the config in its place."""
        value = arguments.get(name)
        return getattr(self.config, name) if value is None else value

    def describe_step(self, builder: StepBuilder) -> None:
        """Describe one token after the embedding; slot 0 is the residual stream."""
        width, names = builder.input_width, tuple(self._modules)
        if names != ("embeddings", "layers", "norm_f"):
            builder.reject(f"its parts are {', '.join(names)}")
        block = class_in_folder(self.STACK.folder, f"{self.STACK.prefix}Block")
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
