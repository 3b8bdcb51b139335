"""A program together with the modules that it was recorded from: whether they are still the same.

§ What a program was recorded from, and whether it is still so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anymamba.kernels.cpu.step_program import NotCoveredError, Program, Watched


class Recording:
    """A program of modules as they are, and whether they still are so.

    Args:
        record: as for `Program`, like the others.
        dtype: of the output.
        input_width: channels of the input.
        input_dtype: of the input.

    Attributes:
        program: None where the kernels cannot run the modules.
        reason: why not.
    """

    def __init__(
        self, record: Callable[[Program], None], dtype: torch.dtype, input_width: int, input_dtype: torch.dtype
    ) -> None:
        """Record."""
        self._watched = Watched()
        self.program: Program | None = None
        self.reason = ""
        try:
            self.program = Program(record, dtype, input_width, input_dtype, self._watched)
        except NotCoveredError as reason:
            self.reason = str(reason)
        self._seen = self._watched.look()

    def is_current(self) -> bool:
        """Whether types, submodules, parameters, hooks, methods and numbers are those that were recorded.

        Values of parameters are not among them: they are read where they lie.
        """
        return self._watched.is_as(self._seen)

    def run(self, x: Tensor, cache: Sequence[Tensor], in_place: bool = False) -> tuple[Tensor, list[Tensor]] | None:
        """`Program.run`; None where there is no program."""
        return None if self.program is None else self.program.run(x, cache, in_place)
