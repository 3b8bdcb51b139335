"""One token per row through a whole model of transformers that is nothing but mixers, in one call to the kernels.

    r = embeddings[ids]        r <- r + mixer_i(norm_i(r))        y = norm_f(r)

The program advances transformers' own cache in place. For any other call, or if a module has hooks or adapters,
transformers' own forward runs and calls the mixers one by one.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.integrations.transformers import mixer_step
from anymamba.integrations.transformers.architectures import Stack, of_folder, own_class
from anymamba.integrations.transformers.mixer import AcceleratedMixer, eps_of, record_norm
from anymamba.integrations.transformers.packing import mask_of_new_tokens, named
from anymamba.kernels.cpu.compiled_step import Recording
from anymamba.kernels.cpu.step_program import MAX_ROWS, Program

_RECORDED: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


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
        program = None if before is None else recorded(self).program
        if before is None or program is None or self._wants_gradients():
            return super().forward(*args, **kwargs)
        x = self.embeddings(given["input_ids"]) if given.get("inputs_embeds") is None else given["inputs_embeds"]
        y = mixer_step.advance(program, x[:, 0], before)
        if y is None:
            return super().forward(**{**given, "input_ids": None, "inputs_embeds": x})
        return self._output(y.unsqueeze(1).to(self._stream_dtype(x)), given)

    def _before(self, given: dict[str, Any]) -> list[Tensor] | None:
        """What one token per row continues from; None for any other call."""
        ids, embedded, mask = given.get("input_ids"), given.get("inputs_embeds"), given.get("attention_mask")
        source = ids if embedded is None else embedded
        if (ids is None) == (embedded is None) or given.get("cache_params") is None:
            return None
        if not isinstance(source, Tensor) or source.ndim < 2 or source.shape[1] != 1 or source.shape[0] > MAX_ROWS:
            return None
        if mask is not None and (mask.ndim != 2 or mask_of_new_tokens(mask, 1) is not None):
            return None
        if self._option(given, "output_hidden_states"):
            return None
        before = self._carried(given["cache_params"])
        return None if before is None or not mixer_step.may_run((source, *before)) else before

    def _stream_dtype(self, x: Tensor) -> torch.dtype:
        """Of the residual stream, and so of what the last norm returns."""
        is_wide = any(layer.residual_in_fp32 for layer in self.layers[:1])
        return torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype

    def _wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

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

    def record(self, program: Program) -> None:
        """Describe one token after the embedding to the compiled kernels; slot 0 is the residual stream."""
        width, names = program.input_width, tuple(self._modules)
        if names != ("embeddings", "layers", "norm_f"):
            program.refuse(f"its parts are {', '.join(names)}")
        block = of_folder(self.STACK.folder, f"{self.STACK.prefix}Block")
        layers = program.child(self, "layers", nn.ModuleList)
        for index, name in enumerate(layers._modules):
            layer = program.child(layers, name, block)
            if tuple(layer._modules) != ("norm", "mixer") or layer.mixer.layer_idx != index:
                program.refuse(f"the parts of layer {index} are not a norm and its mixer")
            if not program.number(layer, "residual_in_fp32") and program.dtype != program.wide:
                program.refuse("the residual stream is narrower than float32")
            if not isinstance(layer.mixer, AcceleratedMixer):
                program.refuse(f"the mixer of layer {index} is not accelerated")
            hidden = self._record_norm(program, layer, "norm")
            program.child(layer, "mixer", type(layer.mixer)).record(program, hidden, to=0, add=True)
            program.release(hidden)
        program.write(self._record_norm(program, self, "norm_f"), width)

    def _record_norm(self, program: Program, owner: nn.Module, name: str) -> int:
        norm = record_norm(program, owner, name)
        if type(norm).__name__ != f"{self.STACK.prefix}RMSNorm":
            program.refuse(f"{name} is a {type(norm).__name__}")
        return program.norm(0, norm, program.input_width, eps=eps_of(norm))


def recorded(stack: AcceleratedStack) -> Recording:
    """The program of a model as it is now."""
    found = _RECORDED.get(stack)
    if found is None or not found.is_current():
        weight = getattr(stack.norm_f, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else stack.config.dtype
        found = _RECORDED[stack] = Recording(stack.record, dtype, stack.config.hidden_size, dtype)
    return found
