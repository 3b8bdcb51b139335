"""Common part of the accelerated mixers: the forward that replaces that of transformers, and the compiled step.

One token per row runs through a mixer in one call to the compiled kernels, in place on the cache of transformers. If
only the outer projections cannot be compiled, as with adapters, they are called as modules, and the compiled step runs
what is between them.

Letters: b batch, t time, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import is_autocast, state_dtype
from anymamba.core.linear import apply_linear
from anymamba.core.operators import has_no_hooks
from anymamba.integrations.transformers.architectures import (
    Architecture,
    LayerState,
    is_of_transformers,
    read_state,
    uncovered_reason,
    write_state,
)
from anymamba.integrations.transformers.packing import Layout, Packing, current_packing, layout_of, mask_of_new_tokens
from anymamba.kernels.compiled_step import CompiledStep, StepSource, compiled_step, may_run
from anymamba.kernels.step_description import OUTPUT, StepBuilder
from anymamba.ops.norms_and_gates import rms_norm

NormKind = Literal["transformers", "official"]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Why a mixer last ran the forward of transformers.
FALLBACKS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an accelerated mixer.

    Attributes:
        norm: Norm before `out_proj`: "official" normalizes groups of channels, as in the training of the published
            weights; "transformers" normalizes what transformers does.
    """

    norm: NormKind = "transformers"


class AcceleratedMixer(nn.Module):
    """Mixer of transformers whose forward runs on this library's operators.

    It is mixed into the class that transformers has for the mixer (`accelerated_classes.py`), whose attributes it
    reads. A subclass adds `mix`, `empty_state_shapes` and `describe_core`.
    """

    ARCHITECTURE: ClassVar[Architecture]

    _anymamba: Options
    # Attributes of the mixers of transformers.
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
        """Map (b, t, d) to (b, t, d), from the state of this layer in `cache_params`, which is replaced.

        Args:
            hidden_states: Inputs.
            cache_params: Cache of transformers, or None.
            attention_mask: Mask (b, t), zero for padding; of more columns, the last t are used.
            kwargs: `seq_idx` (b, t), which changes where a packed sequence begins; others go to transformers.
        """
        # 1) Fall back to transformers where the operators do not cover the call.
        reason = self.reason_for_fallback(hidden_states, cache_params, attention_mask)
        if reason:
            if not torch.compiler.is_compiling():
                FALLBACKS[self] = reason
            output: Tensor = super().forward(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return output
        # 2) One token per row: the compiled step.
        (b, t), before = hidden_states.shape[:2], read_state(cache_params, self.layer_idx)
        mask = mask_of_new_tokens(attention_mask, t)
        if t == 1 and mask is None and before is not None:
            token = run_step(self, hidden_states, before)
            if token is not None:
                return token
        # 3) Anything else: the operators, on rows, padded rows or packed sequences.
        layout = layout_of(mask, self._packing(kwargs, mask, t), (b, t))
        return self._run_sequence(hidden_states, before, layout, cache_params)

    def reason_for_fallback(self, x: Tensor, cache: Any = None, mask: Any = None) -> str:
        """Return why the forward of transformers must run; empty if ours can."""
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
        return uncovered_reason(cache, self.layer_idx)

    def _packing(self, kwargs: dict[str, Any], mask: Tensor | None, t: int) -> Packing | None:
        seq_idx = kwargs.get("seq_idx")
        if seq_idx is not None and torch.compiler.is_compiling():
            raise ValueError("accelerate: packed sequences are not traced; call the model without torch.compile")
        if t == 1:
            return None
        packing = current_packing()
        return Packing.of_ids(seq_idx, mask) if packing is None and seq_idx is not None else packing

    def _run_sequence(self, x: Tensor, before: LayerState | None, layout: Layout, cache: Any) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if is_autocast(x.device) else x.dtype
        acc_dtype = state_dtype(dtype)

        def empty_state(rows: int) -> LayerState:
            window, state = self.empty_state_shapes()
            return LayerState(x.new_zeros((rows, *window), dtype=dtype), x.new_zeros((rows, *state), dtype=acc_dtype))

        start = layout.start(before, empty_state, x.shape[0])
        # The backward pass must not read the memory of the cache, which is overwritten below.
        copy = before is not None and torch.is_grad_enabled()
        start = LayerState(start.window.to(dtype, copy=copy), start.state.to(acc_dtype, copy=copy))
        y, after = self.mix(layout.arrange(x), start, layout)
        if cache is not None:
            write_state(cache, self.layer_idx, layout.end(after, start))
        return layout.restore_rows(y)

    def mix(self, x: Tensor, start: LayerState, layout: Layout) -> tuple[Tensor, LayerState]:
        """Compute the mixer from `start`; return its output and the state after it."""
        raise NotImplementedError

    def empty_state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a window and of a state, without the batch."""
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
        """Return the number of output channels of `in_proj`."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """Apply `in_proj`, with the scales around it."""
        if not self.ARCHITECTURE.scaled:
            return apply_linear(self.in_proj, x)
        projected: Tensor = apply_linear(self.in_proj, x * self.ssm_in_multiplier)
        return (projected * self.mup_vector).to(projected.dtype)

    def describe_conv(self, builder: StepBuilder, x: int, channels: int) -> int:
        """Describe the convolution; return the slot of its result."""
        return builder.conv(x, builder.submodule(self, "conv1d", nn.Conv1d), channels, self.conv_kernel_size)


def eps_of(norm: nn.Module) -> float:
    """Return the number that a norm of transformers adds to the mean square."""
    eps: float = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps")  # noqa: B009
    return eps


def describe_norm(builder: StepBuilder, owner: nn.Module, name: str) -> nn.Module:
    """Return the submodule `name`, a norm of transformers, and watch its numbers."""
    norm: nn.Module = builder.submodule(owner, name, type(getattr(owner, name)))
    if not is_of_transformers(type(norm)):
        builder.reject(f"{name} is a {type(norm).__name__}, which is not transformers' own")
    builder.watch(norm, "variance_epsilon", "eps", "group_size", "n_groups", "norm_before_gate")
    return norm


def apply_inner_norm(norm: nn.Module, x: Tensor, is_weighted: bool) -> Tensor:
    """Apply an RMS norm of transformers over the last axis."""
    if not (has_no_hooks(norm) and is_of_transformers(type(norm))):
        return norm(x)
    weight = norm.weight if is_weighted else x.new_ones(x.shape[-1])
    assert isinstance(weight, Tensor)
    return rms_norm(x, weight, eps=eps_of(norm))


class MixerStep(NamedTuple):
    """The compiled step of a mixer.

    Attributes:
        step: The step, which may be one that cannot be compiled.
        is_whole: Whether it includes the outer projections.
        reason: Why there is no compiled step, or why it is not whole.
    """

    step: CompiledStep
    is_whole: bool
    reason: str


def compiled_mixer(mixer: AcceleratedMixer) -> MixerStep:
    """Return the step of a mixer as it is now."""
    dtype = mixer.conv1d.weight.dtype
    weight = getattr(mixer.in_proj, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype

    def core(builder: StepBuilder) -> None:
        builder.write(mixer.describe_core(builder, 0), mixer.intermediate_size)

    def whole(builder: StepBuilder) -> None:
        mixer.describe_step(builder, 0)

    step = compiled_step(mixer, lambda: StepSource(whole, mixer.hidden_size, dtype, dtype))
    if not step.reason:
        return MixerStep(step, True, "")
    inner = compiled_step(mixer, lambda: StepSource(core, mixer.projected_width(), dtype, dtype), part="core")
    return MixerStep(inner, False, inner.reason or step.reason)


def advance(step: CompiledStep, x: Tensor, before: Sequence[Tensor]) -> Tensor | None:
    """Run one token (b, d), in place on the tensors of the cache; return None if the step does not cover them."""
    result = step.run(x, before, in_place=True)
    if result is None:
        return None
    y, after = result
    for old, new in zip(before, after, strict=True):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return y


def run_step(mixer: AcceleratedMixer, x: Tensor, before: LayerState) -> Tensor | None:
    """Run one token, (b, 1, d) to (b, 1, d), in place on the cache; return None if the operators must run."""
    if not may_run(mixer, (x, *before)):
        return None
    step, is_whole, _ = compiled_mixer(mixer)
    if step.executable is None:
        return None
    y = advance(step, x[:, 0] if is_whole else mixer.project(x)[:, 0], before)
    if y is None:
        return None
    return y.unsqueeze(1) if is_whole else mixer.out_proj(y.unsqueeze(1))
