"""Padded batches: rows of different lengths, padded anywhere, computed as if each were alone.

The real tokens of a row are moved to its front, in order, so that a block sees rows that are padded at the end, where a
causal model does not look; the outputs are moved back and are zero at the padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.ground.checks import expect_tensor, values_are_cheap


class Padding(NamedTuple):
    """Which steps of a batch are real.

    Attributes:
        lengths: real steps of each row, (b,).
        front: True for the first `lengths` steps of each row, (b, t).
        order: where the i-th step of the compacted row comes from, (b, t); None if the rows are already compact.
        is_clean: the caller has compacted the rows and will restore them: there is nothing to do in between.
    """

    lengths: Int[Tensor, " b"]
    front: Bool[Tensor, "b t"]
    order: Int[Tensor, "b t"] | None
    is_clean: bool = False

    @staticmethod
    def of(where: str, mask: Tensor | Padding, b: int, t: int, device: torch.device) -> Padding:
        """Read a boolean mask (b, t), True for real tokens, or the lengths (b,) of rows that are padded at the end."""
        if isinstance(mask, Padding):
            return mask
        expect_tensor(where, "mask", mask)
        if mask.device != device:
            raise ValueError(f"{where}: mask must be on {device}, got {mask.device}")
        time = torch.arange(t, device=device)
        if mask.dtype == torch.bool:
            if mask.shape != (b, t):
                raise ValueError(f"{where}: a boolean mask must have shape (b={b}, t={t}), got {tuple(mask.shape)}")
            lengths = mask.sum(1)
            order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)
            return Padding(lengths, time < lengths.unsqueeze(1), order)
        if mask.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{where}: mask must be boolean (b, t) or integer lengths (b,), got {mask.dtype}")
        if mask.shape != (b,):
            raise ValueError(
                f"{where}: lengths given as mask must have shape (b={b},), got {tuple(mask.shape)}; "
                "pass a mask of ones and zeros as mask.bool()"
            )
        if values_are_cheap(mask) and mask.numel() and not (int(mask.min()) >= 0 and int(mask.max()) <= t):
            raise ValueError(f"{where}: lengths must be between 0 and t = {t}, got {mask.tolist()}")
        return Padding(mask.long(), time < mask.unsqueeze(1), None)

    def real(self) -> Bool[Tensor, "b t"]:
        """True for real steps, where they stand."""
        return self.front if self.order is None else torch.zeros_like(self.front).scatter(1, self.order, self.front)

    def compact(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Move the real tokens to the front and zero the rest."""
        if self.is_clean:
            return x
        if self.order is not None:
            x = x.gather(1, self.order.unsqueeze(-1).expand_as(x))
        return x.masked_fill(~self.front.unsqueeze(-1), 0)

    def restore(self, y: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Undo `compact`: every real token back in its place, zeros at the padding."""
        if self.is_clean:
            return y
        y = y.masked_fill(~self.front.unsqueeze(-1), 0)
        if self.order is None:
            return y
        return torch.zeros_like(y).scatter(1, self.order.unsqueeze(-1).expand_as(y), y)

    def cleaned(self) -> Padding:
        """The same padding for callees that receive rows which are already compact."""
        return self._replace(order=None, is_clean=True)
