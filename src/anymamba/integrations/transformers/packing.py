"""Packed and padded batches: where sequences begin, and how tokens are arranged for the operators.

Some models of transformers do not pass their keywords on to their mixers. So a hook on the model reads them, and the
mixers look them up here. Gradient checkpointing runs layers again after the model has returned: during the call its
function is replaced by one that takes the packing along.

A `Layout` arranges the tokens of a batch for the operators, gives the state that each sequence starts from and the one
that each row ends with, and restores the outputs to rows.

Letters: b rows, t time, z sequences, d channels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.core.checks import can_read_values
from anymamba.core.layout import Padding
from anymamba.integrations.transformers.architectures import LayerState

_NOT_TRACED = "accelerate: packed sequences are not traced; call the model without torch.compile"
_ACTIVE: ContextVar[tuple[Packing | None, ...]] = ContextVar("anymamba_packing", default=())


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences in a batch of packed rows.

    Attributes:
        shape: Shape of the batch, (b, t).
        cu_seqlens: Boundaries of all sequences in the rows joined end to end, (z + 1,), from 0 to b t.
        first: First sequence of real tokens of each row, (b,).
        last: Last sequence of real tokens of each row, (b,).
        real: Whether each row has any real token, (b,).
    """

    shape: tuple[int, int]
    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    real: Tensor

    @property
    def sequences(self) -> int:
        """Number of sequences, including stretches of padding."""
        return self.cu_seqlens.shape[0] - 1

    @staticmethod
    def of_ids(ids: Tensor, mask: Tensor | None = None) -> Packing:
        """Return the packing of integers (b, t) that change where a sequence begins; padding is a separate sequence.

        Raises:
            ValueError: Not two axes, or a mask of another shape.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            received = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"accelerate: seq_idx must have shape (b, t), got {received}")
        b, t = ids.shape
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"accelerate: seq_idx must have the shape of the mask, {tuple(mask.shape)}, got {(b, t)}")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        begins = torch.ones_like(real)
        begins[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | (real[:, 1:] != real[:, :-1])
        return Packing._of_starts(begins, real)

    @staticmethod
    def of_positions(positions: Tensor, rows: int) -> Packing | None:
        """Return the packing of positions (b, t) or (1, t) that restart at zero; None if they do not restart."""
        begins = (positions == 0).expand(rows, -1).clone()
        if not bool(begins[:, 1:].any()):
            return None
        begins[:, 0] = True
        return Packing._of_starts(begins, torch.ones_like(begins))

    @staticmethod
    def of_bounds(bounds: Tensor, t: int) -> Packing:
        """Return the packing of the boundaries (0, ..., t) of sequences in one row.

        Raises:
            ValueError: They do not run from 0 to t.
        """
        bounds = bounds.to("cpu", torch.long)
        if bounds.ndim != 1 or bounds.numel() < 2 or bounds[0] != 0 or bounds[-1] != t:
            raise ValueError(f"accelerate: cu_seq_lens_q must run from 0 to t = {t}, got {bounds.tolist()}")
        begins = torch.zeros(1, t, dtype=torch.bool)
        begins[0, bounds[:-1][bounds[:-1] < t]] = True
        return Packing._of_starts(begins, torch.ones_like(begins))

    @staticmethod
    def _of_starts(begins: Tensor, real: Tensor) -> Packing:
        b, t = begins.shape
        starts = begins.flatten().nonzero().flatten()
        sequence = begins.flatten().cumsum(0).view(b, t) - 1
        has_real, column = real.any(1), torch.arange(b, device=begins.device)
        first = real.to(torch.uint8).argmax(1)
        last = t - 1 - real.flip(1).to(torch.uint8).argmax(1)
        return Packing(
            shape=(b, t),
            cu_seqlens=torch.cat([starts, starts.new_tensor([b * t])]),
            first=sequence[column, first],
            last=sequence[column, last],
            real=has_real,
        )


def current_packing() -> Packing | None:
    """Return the packing of the current call."""
    if torch.compiler.is_compiling():
        return None
    active = _ACTIVE.get()
    return active[-1] if active else None


@contextmanager
def _within(packing: Packing) -> Iterator[None]:
    token = _ACTIVE.set((packing,))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class _CheckpointWithPacking:
    """Checkpoint function whose forward and recomputation run with a packing."""

    def __init__(self, checkpoint: Callable[..., Any], packing: Packing) -> None:
        self.checkpoint = checkpoint
        self.packing = packing

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run_with_packing(*inputs: Any, **options: Any) -> Any:
            with _within(self.packing):
                return function(*inputs, **options)

        return self.checkpoint(run_with_packing, *args, **kwargs)


def _checkpointing_modules(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if callable(m.__dict__.get("_gradient_checkpointing_func")))


def _inner_frames_are_compiled() -> bool:
    """Return whether torch.compile is active but skipped this frame; the frames of the mixers would be compiled."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Read the packing before the forward of a model."""
    if torch.compiler.is_compiling():
        if kwargs.get("seq_idx") is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError(_NOT_TRACED)
        return
    active = _ACTIVE.get()
    # A model within a model leaves this to the outer one.
    packing = active[-1] if active else read_packing(model, args, kwargs)
    if packing is not None and _inner_frames_are_compiled():
        raise ValueError(_NOT_TRACED)
    _ACTIVE.set((*active, packing))
    if packing is not None and not active:
        for module in _checkpointing_modules(model):
            module._gradient_checkpointing_func = _CheckpointWithPacking(module._gradient_checkpointing_func, packing)


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Remove the packing after the forward of a model, even if it failed."""
    if torch.compiler.is_compiling():
        return
    active = _ACTIVE.get()
    _ACTIVE.set(active[:-1])
    if len(active) == 1:
        for module in _checkpointing_modules(model):
            if isinstance(module._gradient_checkpointing_func, _CheckpointWithPacking):
                module._gradient_checkpointing_func = module._gradient_checkpointing_func.checkpoint


def read_packing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packing | None:
    """Return the packing in the arguments of a model: `seq_idx`, `cu_seq_lens_q`, or `position_ids` that restart."""
    arguments = arguments_by_name(type(model).forward, args, kwargs)
    tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] < 2 or tokens.device.type != "cpu":
        return None
    b, t = tokens.shape[:2]
    mask: Any = arguments.get("attention_mask")
    positions: Any = arguments.get("position_ids")
    if isinstance(arguments.get("seq_idx"), Tensor):
        two_axes = isinstance(mask, Tensor) and mask.ndim == 2
        return Packing.of_ids(arguments["seq_idx"], mask[:, -t:] if two_axes else None)
    if isinstance(arguments.get("cu_seq_lens_q"), Tensor) and b == 1:
        return Packing.of_bounds(arguments["cu_seq_lens_q"], t)
    # transformers' attention reads positions the same way: only if there is no mask.
    is_read = isinstance(positions, Tensor) and positions.ndim == 2 and mask is None
    return Packing.of_positions(positions, b) if is_read and positions.shape[1] == t else None


def arguments_by_name(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a forward, by name."""
    return {**dict(zip(_parameter_names(forward), args, strict=False)), **kwargs} if args else kwargs


@functools.cache
def _parameter_names(forward: Any) -> tuple[str, ...]:
    """Return the parameters of the forward of a model, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def install(model: nn.Module) -> None:
    """Install hooks that read the packing of every call of `model`."""
    remove(model)
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def remove(model: nn.Module) -> None:
    """Undo `install`, also on a copy of the model."""
    for hooks, hook, flags in (
        (model._forward_pre_hooks, _enter, (model._forward_pre_hooks_with_kwargs,)),
        (model._forward_hooks, _leave, (model._forward_hooks_with_kwargs, model._forward_hooks_always_called)),
    ):
        for key in [key for key, other in hooks.items() if other is hook]:
            for table in (hooks, *flags):
                table.pop(key, None)


MakeEmptyState = Callable[[int], LayerState]  # from a number of sequences


class Layout:
    """Layout of rows of one length."""

    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def arrange(self, x: Tensor) -> Tensor:
        """Return the tokens (b, t, d) as the operators take them."""
        return x

    def start(self, before: LayerState | None, empty_state: MakeEmptyState, rows: int) -> LayerState:
        """Return the state that each sequence starts from."""
        return empty_state(rows) if before is None else before

    def end(self, after: LayerState, start: LayerState) -> LayerState:
        """Return the state that each row ends with."""
        return after

    def restore_rows(self, y: Tensor) -> Tensor:
        """Return outputs as rows (b, t, d)."""
        return y


class Padded(Layout):
    """Layout of rows of different lengths, padded anywhere; outputs at the padding are zero."""

    def __init__(self, mask: Tensor) -> None:
        """Take a boolean mask (b, t), True for real tokens."""
        self._padding = Padding.from_mask("accelerate", mask, mask.shape[0], mask.shape[1], mask.device)
        self.lengths = self._padding.lengths

    def arrange(self, x: Tensor) -> Tensor:
        """Move the real tokens to the front."""
        return self._padding.compact(x)

    def restore_rows(self, y: Tensor) -> Tensor:
        """Move the outputs back."""
        return self._padding.restore(y)


class Packed(Layout):
    """Layout of several sequences per row; the first continues from the cache, and the last one goes to the cache."""

    def __init__(self, packing: Packing, shape: tuple[int, int]) -> None:
        """Take where sequences begin, for rows (b, t)."""
        if packing.shape != shape:
            raise ValueError(f"accelerate: packed sequences must have the tokens' shape, {shape}, got {packing.shape}")
        self._packing = packing
        self.cu_seqlens = packing.cu_seqlens

    def arrange(self, x: Tensor) -> Tensor:
        """Return the rows (b, t, d) joined end to end, (1, b t, d)."""
        return x.reshape(1, -1, x.shape[-1])

    def start(self, before: LayerState | None, empty_state: MakeEmptyState, rows: int) -> LayerState:
        """Return zeros, except for the first sequence of each row."""
        start = empty_state(self._packing.sequences)
        if before is None:
            return start
        first = self._packing.first
        window, state = before.window.to(start.window.dtype), before.state.to(start.state.dtype)
        return LayerState(start.window.index_copy(0, first, window), start.state.index_copy(0, first, state))

    def end(self, after: LayerState, start: LayerState) -> LayerState:
        """Return the state after the last sequence of each row; for a row of padding only, the one it started from."""
        first, last, real = self._packing.first, self._packing.last, self._packing.real
        pairs = zip(after, start, strict=True)
        ends = (torch.where(real.view(-1, *[1] * (x.ndim - 1)), x[last], old[first]) for x, old in pairs)
        return LayerState(*ends)

    def restore_rows(self, y: Tensor) -> Tensor:
        """Return (1, b t, d) as (b, t, d)."""
        return y.reshape(*self._packing.shape, -1)


def mask_of_new_tokens(mask: Any, t: int) -> Tensor | None:
    """Return the columns of the mask for the last t tokens, True for real ones; None if all are real."""
    if mask is None:
        return None
    real: Tensor = mask[:, mask.shape[1] - t :].bool()
    return None if can_read_values(real) and bool(real.all()) else real


def layout_of(mask: Tensor | None, packing: Packing | None, shape: tuple[int, int]) -> Layout:
    """Return the layout of a batch (b, t) with this mask of new tokens and these packed sequences."""
    if packing is not None:
        return Packed(packing, shape)
    return Layout() if mask is None else Padded(mask)
