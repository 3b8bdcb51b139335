"""How the tokens of a batch are laid out: rows of one length, padded rows, or packed sequences.

A layout lays the tokens of a batch out for the operators, says what each sequence starts from and what its rows end
with, and puts the outputs back in their places.

Letters: b rows, t time, z sequences, d channels.

§ Packed sequences: where each begins, taken from the arguments of a model and passed to its mixers.

Some models of transformers do not pass their keywords on to their mixers. So a hook on the model reads them, and the
mixers look them up here. Gradient checkpointing runs layers again after the model has returned: during the call its
function is replaced by one that carries the packing along.
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
from anymamba.integrations.transformers.mixer_step import Carried

_NOT_TRACED = "accelerate: packed sequences are not traced; call the model without torch.compile"
_ACTIVE: ContextVar[tuple[Packing | None, ...]] = ContextVar("anymamba_packing", default=())


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where sequences begin in a batch of packed rows, whose tokens lie row after row.

    Attributes:
        shape: of the batch, (b, t).
        cu_seqlens: boundaries of all sequences, (z + 1,), from 0 to b t.
        first: of each row, its first sequence of real tokens, (b,).
        last: of each row, its last one, (b,).
        real: whether a row has any real token, (b,).
    """

    shape: tuple[int, int]
    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    real: Tensor

    @property
    def sequences(self) -> int:
        """How many sequences there are, including stretches of padding."""
        return self.cu_seqlens.shape[0] - 1

    @staticmethod
    def of_ids(ids: Tensor, mask: Tensor | None = None) -> Packing:
        """From numbers (b, t) that change where a sequence begins; padding is a separate sequence that is not read.

        Raises:
            ValueError: not two axes, or a mask of another shape.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"accelerate: seq_idx must have shape (b, t), got {found}")
        b, t = ids.shape
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"accelerate: seq_idx must have the shape of the mask, {tuple(mask.shape)}, got {(b, t)}")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        begins = torch.ones_like(real)
        begins[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | (real[:, 1:] != real[:, :-1])
        return Packing._of(begins, real)

    @staticmethod
    def of_positions(positions: Tensor, rows: int) -> Packing | None:
        """From positions (b, t) or (1, t) that restart at zero; None if they do not."""
        begins = (positions == 0).expand(rows, -1).clone()
        if not bool(begins[:, 1:].any()):
            return None
        begins[:, 0] = True
        return Packing._of(begins, torch.ones_like(begins))

    @staticmethod
    def of_bounds(bounds: Tensor, t: int) -> Packing:
        """From the boundaries (0, ..., t) of sequences in one row.

        Raises:
            ValueError: they do not run from 0 to t.
        """
        bounds = bounds.to("cpu", torch.long)
        if bounds.ndim != 1 or bounds.numel() < 2 or bounds[0] != 0 or bounds[-1] != t:
            raise ValueError(f"accelerate: cu_seq_lens_q must run from 0 to t = {t}, got {bounds.tolist()}")
        begins = torch.zeros(1, t, dtype=torch.bool)
        begins[0, bounds[:-1][bounds[:-1] < t]] = True
        return Packing._of(begins, torch.ones_like(begins))

    @staticmethod
    def _of(begins: Tensor, real: Tensor) -> Packing:
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


def current() -> Packing | None:
    """The packing of the current call."""
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


class _Bringing:
    """A checkpoint function that computes, and computes again, with a packing."""

    def __init__(self, checkpoint: Callable[..., Any], packing: Packing) -> None:
        self.checkpoint, self.packing = checkpoint, packing

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def bringing(*inputs: Any, **options: Any) -> Any:
            with _within(self.packing):
                return function(*inputs, **options)

        return self.checkpoint(bringing, *args, **kwargs)


def _checkpointed(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if callable(m.__dict__.get("_gradient_checkpointing_func")))


def _inner_frames_are_compiled() -> bool:
    """Whether torch.compile is at work, and has left this frame out: those that mixers run in it would not."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model's forward: read its packing."""
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
        for module in _checkpointed(model):
            module._gradient_checkpointing_func = _Bringing(module._gradient_checkpointing_func, packing)


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After a model's forward, even if it failed."""
    if torch.compiler.is_compiling():
        return
    active = _ACTIVE.get()
    _ACTIVE.set(active[:-1])
    if len(active) == 1:
        for module in _checkpointed(model):
            if isinstance(module._gradient_checkpointing_func, _Bringing):
                module._gradient_checkpointing_func = module._gradient_checkpointing_func.checkpoint


def read_packing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packing | None:
    """The packing in the arguments of a model: `seq_idx`, `cu_seq_lens_q`, or `position_ids` that restart."""
    given = named(type(model).forward, args, kwargs)
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] < 2 or tokens.device.type != "cpu":
        return None
    b, t = tokens.shape[:2]
    mask: Any = given.get("attention_mask")
    positions: Any = given.get("position_ids")
    if isinstance(given.get("seq_idx"), Tensor):
        two_axes = isinstance(mask, Tensor) and mask.ndim == 2
        return Packing.of_ids(given["seq_idx"], mask[:, -t:] if two_axes else None)
    if isinstance(given.get("cu_seq_lens_q"), Tensor) and b == 1:
        return Packing.of_bounds(given["cu_seq_lens_q"], t)
    # transformers' attention reads positions the same way: only if there is no mask.
    is_read = isinstance(positions, Tensor) and positions.ndim == 2 and mask is None
    return Packing.of_positions(positions, b) if is_read and positions.shape[1] == t else None


def named(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a forward, by name."""
    return {**dict(zip(_names(forward), args, strict=False)), **kwargs} if args else kwargs


@functools.cache
def _names(forward: Any) -> tuple[str, ...]:
    """The arguments of a model's forward, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def install(model: nn.Module) -> None:
    """Read the packing of every call of `model`."""
    remove(model)
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def remove(model: nn.Module) -> None:
    """Undo `install`, also on a copy of the model that was installed on."""
    for hooks, hook, flags in (
        (model._forward_pre_hooks, _enter, (model._forward_pre_hooks_with_kwargs,)),
        (model._forward_hooks, _leave, (model._forward_hooks_with_kwargs, model._forward_hooks_always_called)),
    ):
        for key in [key for key, found in hooks.items() if found is hook]:
            for table in (hooks, *flags):
                table.pop(key, None)


# A fresh start of this many sequences.
Fresh = Callable[[int], Carried]


class Layout:
    """Rows of one length."""

    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def lay(self, x: Tensor) -> Tensor:
        """(b, t, d) -> what the operators run over."""
        return x

    def start(self, before: Carried | None, fresh: Fresh, rows: int) -> Carried:
        """What each sequence starts from."""
        return fresh(rows) if before is None else before

    def end(self, after: Carried, start: Carried) -> Carried:
        """What each row ends with."""
        return after

    def put_back(self, y: Tensor) -> Tensor:
        """Undo `lay` for outputs."""
        return y


class Padded(Layout):
    """Rows of different lengths, padded anywhere; outputs at the padding are zero."""

    def __init__(self, mask: Tensor) -> None:
        """Take a boolean mask (b, t), True for real tokens."""
        self._padding = Padding.from_mask("accelerate", mask, mask.shape[0], mask.shape[1], mask.device)
        self.lengths = self._padding.lengths

    def lay(self, x: Tensor) -> Tensor:
        """Move the real tokens to the front."""
        return self._padding.compact(x)

    def put_back(self, y: Tensor) -> Tensor:
        """Move them back."""
        return self._padding.restore(y)


class Packed(Layout):
    """Several sequences in a row; the first of a row continues its cache, and the last is what the row ends with."""

    def __init__(self, packing: Packing, shape: tuple[int, int]) -> None:
        """Take where sequences begin, for rows (b, t)."""
        if packing.shape != shape:
            raise ValueError(f"accelerate: packed sequences must have the tokens' shape, {shape}, got {packing.shape}")
        self._packing, self.cu_seqlens = packing, packing.cu_seqlens

    def lay(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (1, b t, d)."""
        return x.reshape(1, -1, x.shape[-1])

    def start(self, before: Carried | None, fresh: Fresh, rows: int) -> Carried:
        """Zeros, except for the first sequence of each row."""
        start = fresh(self._packing.sequences)
        if before is None:
            return start
        first = self._packing.first
        window, state = before.window.to(start.window.dtype), before.state.to(start.state.dtype)
        return Carried(start.window.index_copy(0, first, window), start.state.index_copy(0, first, state))

    def end(self, after: Carried, start: Carried) -> Carried:
        """The state after the last sequence of each row; for a row that is all padding, what it started from."""
        first, last, real = self._packing.first, self._packing.last, self._packing.real
        pairs = zip(after, start, strict=True)
        ends = (torch.where(real.view(-1, *[1] * (x.ndim - 1)), x[last], old[first]) for x, old in pairs)
        return Carried(*ends)

    def put_back(self, y: Tensor) -> Tensor:
        """(1, b t, d) -> (b, t, d)."""
        return y.reshape(*self._packing.shape, -1)


def mask_of_new_tokens(mask: Any, t: int) -> Tensor | None:
    """The columns of the mask that belong to the last t tokens, True for real ones; None if all are real."""
    if mask is None:
        return None
    real: Tensor = mask[:, mask.shape[1] - t :].bool()
    return None if can_read_values(real) and bool(real.all()) else real


def layout_of(mask: Tensor | None, packing: Packing | None, shape: tuple[int, int]) -> Layout:
    """The layout of a batch (b, t) with this mask of new tokens and these packed sequences."""
    if packing is not None:
        return Packed(packing, shape)
    return Layout() if mask is None else Padded(mask)
