"""One token per row through a whole model, in one call to the compiled kernels where they cover it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core import anomaly
from anymamba.core.dtypes import is_autocast, state_dtype
from anymamba.core.operators import is_tracing
from anymamba.core.registry import are_kernels_off
from anymamba.kernels.cpu.compiled_step import Recording
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM


class Decoder:
    """`MambaLM.step` without gradients, recorded from a model.

    It reads the weights in place, so new values take effect at once, and it records the model again after any other
    change: of parameters, modules, adapters, hooks or the dtype.

    Attributes:
        model: the language model.
    """

    def __init__(self, model: MambaLM) -> None:
        """Record the model."""
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Record the model again, after a change that a program cannot see: in a config, or a constant of a module."""
        model, dtype = self.model, self.model.dtype
        self._recording = Recording(model.record, dtype, model.config.d_model, state_dtype(dtype))

    @property
    def reason(self) -> str:
        """Why the model's modules are called instead of the kernels; empty where the kernels run."""
        return self._recording.reason

    @torch.no_grad()
    def step(
        self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None, *, in_place: bool = False
    ) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token per row.

        Args:
            input_ids: token ids.
            cache: what the rows continue from; a fresh start if not given.
            in_place: overwrite the old cache with the new one; only for a cache that nothing else uses.

        Returns:
            The logits of the next token, and the new cache.
        """
        if cache is None or not self._recording.is_current():
            self.refresh()
        if not self.reason and self._covers(input_ids, cache):
            before = self.model.init_cache(input_ids.shape[0]) if cache is None else cache
            residual = self.model.backbone.embed(input_ids)
            done = self._recording.run(residual, before.leaves(), in_place)
            if done is not None:
                return done[0], before.with_tensors(done[1])
        return self.model.step(input_ids, cache)

    def _covers(self, input_ids: object, cache: object) -> bool:
        """Whether these can be tokens and a cache, and nothing traces, casts or checks the call."""
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1 or not isinstance(cache, LMCache | None):
            return False
        return not (is_tracing() or are_kernels_off() or is_autocast(input_ids.device) or anomaly.is_check_finite_on())


def decoder(model: MambaLM) -> Decoder:
    """A decoder of `model`, for your own loop: `logits, cache = decoder.step(ids, cache)`."""
    return Decoder(model)
