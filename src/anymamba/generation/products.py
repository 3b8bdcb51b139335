"""Linear layers while a short prompt is read, by the compiled product that decoding uses.

It reads a weight once for all rows, where torch's product is made for many more of them. A row has the same bits
alone and among up to `MOST_ROWS` others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from anymamba.ground.operators import kernels_are_off
from anymamba.kernels.cpu.product import covers, product


class CompiledProducts(TorchFunctionMode):
    """Within it, this thread's `F.linear` takes the compiled product where there is one; elsewhere, torch's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        if func is F.linear and not kwargs and covers(args[0], args[1]) and not kernels_are_off():
            y = product(args[0], args[1])
            return y if len(args) < 3 or args[2] is None else y.add_(args[2])
        return func(*args, **(kwargs or {}))
