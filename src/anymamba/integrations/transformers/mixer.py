"""What the accelerated mixers share: the forward that stands in for transformers' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import is_autocast, state_dtype
from anymamba.core.hooks import has_no_hooks
from anymamba.core.linear import apply_linear
from anymamba.integrations.transformers import mixer_step
from anymamba.integrations.transformers.architectures import Architecture, is_of_transformers
from anymamba.integrations.transformers.mixer_step import Carried
from anymamba.integrations.transformers.packing import Layout, Packing, current, layout_of, mask_of_new_tokens
from anymamba.kernels.step import OUTPUT, StepBuilder
from anymamba.ops.norms_and_gates import rms_norm

NormKind = Literal["transformers", "official"]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Why a mixer last ran transformers' own forward.
FALLBACKS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a mixer is accelerated.

    Attributes:
        norm: "official" normalizes groups of channels before `out_proj`, as the published weights were trained;
            otherwise what transformers normalizes.
    """

    norm: NormKind = "transformers"


class AcceleratedMixer(nn.Module):
    """A mixer of transformers whose forward runs on this library's operators.

    It is mixed into transformers' class of the mixer (`classes.py`), whose attributes it reads. A kind adds `mix`,
    `fresh_shapes` and `describe_core`.
    """

    ARCHITECTURE: ClassVar[Architecture]
    # Submodules that are called, and those whose parameters are read.
    PROJECTIONS: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj")

    _anymamba: Options
    # Of transformers' mixers.
    layer_idx: int
    activation: str
    hidden_size: int
    intermediate_size: int
    ssm_state_size: int
    conv_kernel_size: int
    conv1d: nn.Conv1d
    in_proj: nn.Module
    out_proj: nn.Module
    ssm_in_multiplier: float
    mup_vector: Tensor
    A_log: nn.Parameter
    D: nn.Parameter

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        """(b, t, d) -> (b, t, d), from what `cache_params` holds of this layer, which is replaced.

        Args:
            hidden_states: inputs.
            cache_params: transformers' cache, or None.
            attention_mask: (b, t) or more columns, of which the last t count; zero for padding.
            kwargs: `seq_idx` (b, t) changes where a packed sequence begins. Others are transformers' own.
        """
        reason = self.not_covered(hidden_states, cache_params, attention_mask)
        if reason:
            if not torch.compiler.is_compiling():
                FALLBACKS[self] = reason
            output: Tensor = super().forward(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return output
        (b, t), before = hidden_states.shape[:2], mixer_step.read(cache_params, self.layer_idx)
        mask = mask_of_new_tokens(attention_mask, t)
        if t == 1 and mask is None and before is not None:
            token = mixer_step.run_step(self, hidden_states, before)
            if token is not None:
                return token
        layout = layout_of(mask, self._packing(kwargs, mask, t), (b, t))
        return self._sequence(hidden_states, before, layout, cache_params)

    def not_covered(self, x: Tensor, cache: Any = None, mask: Any = None) -> str:
        """Why transformers' own forward must run; empty if ours can."""
        if x.device.type != "cpu":
            return f"the input is on {x.device.type}, not on a CPU"
        if x.ndim != 3 or not x.numel() or x.dtype not in _DTYPES:
            return f"the input has shape {tuple(x.shape)} and dtype {x.dtype}"
        if self.activation not in ("silu", "swish"):
            return f"its activation is {self.activation}, not silu"
        if any("_hf_hook" in module.__dict__ for module in (self, *self.children())):
            return "the package accelerate has hooks on it, to move its weights"
        if mask is not None and (mask.ndim != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] < x.shape[1]):
            return f"its mask has shape {tuple(mask.shape)} for an input of shape {tuple(x.shape)}"
        return mixer_step.missing(cache, self.layer_idx)

    def _packing(self, kwargs: dict[str, Any], mask: Tensor | None, t: int) -> Packing | None:
        seq_idx = kwargs.get("seq_idx")
        if seq_idx is not None and torch.compiler.is_compiling():
            raise ValueError("accelerate: packed sequences are not traced; call the model without torch.compile")
        if t == 1:
            return None
        found = current()
        return Packing.of_ids(seq_idx, mask) if found is None and seq_idx is not None else found

    def _sequence(self, x: Tensor, before: Carried | None, layout: Layout, cache: Any) -> Tensor:
        narrow = torch.get_autocast_dtype("cpu") if is_autocast(x.device) else x.dtype
        wide = state_dtype(narrow)

        def fresh(rows: int) -> Carried:
            window, state = self.fresh_shapes()
            return Carried(x.new_zeros((rows, *window), dtype=narrow), x.new_zeros((rows, *state), dtype=wide))

        start = layout.start(before, fresh, x.shape[0])
        # What a backward pass will read must not be the cache's own memory, which is about to be written.
        copy = before is not None and torch.is_grad_enabled()
        start = Carried(start.window.to(narrow, copy=copy), start.state.to(wide, copy=copy))
        y, after = self.mix(layout.lay(x), start, layout)
        if cache is not None:
            mixer_step.write(cache, self.layer_idx, layout.end(after, start))
        return layout.put_back(y)

    def mix(self, x: Tensor, start: Carried, layout: Layout) -> tuple[Tensor, Carried]:
        """What the kind of mixer computes, from `start`."""
        raise NotImplementedError

    def fresh_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a window and of a state, without the batch."""
        raise NotImplementedError

    def describe_step(self, builder: StepBuilder, x: int, *, to: int = OUTPUT, add: bool = False) -> None:
        """Describe one token, from slot `x` to slot `to`, or added to it."""
        width = self.projected_width()
        builder.watch(self, "activation")
        if self.activation not in ("silu", "swish"):
            builder.reject(f"its activation is {self.activation}, not silu")
        if self.ARCHITECTURE.scaled:
            builder.watch(self, "ssm_in_multiplier")
            x = builder.scale(x, self.hidden_size, factor=float(self.ssm_in_multiplier))
        projected = builder.linear(x, self, "in_proj", self.hidden_size, width)
        if self.ARCHITECTURE.scaled:
            builder.scale(projected, width, weight=builder.buffer(self, "mup_vector", 1, 1, width), to=projected)
        y = self.describe_core(builder, projected)
        builder.linear(y, self, "out_proj", self.intermediate_size, self.hidden_size, to=to, add=add)

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Describe the computation between the projections; return the slot of its result."""
        raise NotImplementedError

    def projected_width(self) -> int:
        """Channels of `in_proj`'s output."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """`in_proj`, with the scales around it."""
        if not self.ARCHITECTURE.scaled:
            return apply_linear(self.in_proj, x)
        projected: Tensor = apply_linear(self.in_proj, x * self.ssm_in_multiplier)
        return (projected * self.mup_vector).to(projected.dtype)

    def describe_conv(self, builder: StepBuilder, x: int, channels: int) -> int:
        """Describe the convolution; return the slot of its result."""
        return builder.conv(x, builder.submodule(self, "conv1d", nn.Conv1d), channels, self.conv_kernel_size)


def eps_of(norm: nn.Module) -> float:
    """The number that a norm of transformers adds to the mean square."""
    found: float = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps")  # noqa: B009
    return found


def describe_norm(builder: StepBuilder, owner: nn.Module, name: str) -> nn.Module:
    """The submodule `name`, a norm that computes what its class in transformers does; its numbers are watched."""
    norm: nn.Module = builder.submodule(owner, name, type(getattr(owner, name)))
    if not is_of_transformers(type(norm)):
        builder.reject(f"{name} is a {type(norm).__name__}, which is not transformers' own")
    builder.watch(norm, "variance_epsilon", "eps", "group_size", "n_groups", "norm_before_gate")
    return norm


def inner_norm(norm: nn.Module, x: Tensor, is_weighted: bool) -> Tensor:
    """An RMS norm of transformers over the last axis."""
    if not (has_no_hooks(norm) and is_of_transformers(type(norm))):
        return norm(x)
    weight = norm.weight if is_weighted else x.new_ones(x.shape[-1])
    assert isinstance(weight, Tensor)
    return rms_norm(x, weight, eps=eps_of(norm))
