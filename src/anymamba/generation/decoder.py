"""The logits after one more token per row, or a window of them, in one call to the kernels where they cover the model.

Tokens become text elsewhere: in completion.py and tokenizers.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.kernels.compiled_step import StepSource, compiled_step, forget_steps, may_run, usable_step
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.token_window import MAX_WINDOW, TokenWindow, check_window, unroll_window

_WINDOW = "window"  # the part of a model's compiled steps that keeps what a replay needs


class Decoder:
    """`MambaLM.step` without gradients, compiled for a model.

    It reads the weights in place, so new values take effect at once, and it is compiled again after any other change:
    of parameters, modules, adapters, hooks or the dtype.

    Attributes:
        model: The language model.
    """

    def __init__(self, model: MambaLM) -> None:
        """Compile the step."""
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Compile the step again, after a change that is not detected: in a config, or a constant of a module."""
        forget_steps(self.model)
        compiled_step(self.model, self._source)

    @property
    def reason(self) -> str:
        """Why the model's modules are called instead of the kernels; empty where the kernels run."""
        return compiled_step(self.model, self._source).reason

    @torch.no_grad()
    def step(
        self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None, *, in_place: bool = False
    ) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token per row.

        Args:
            input_ids: Token ids.
            cache: What the rows continue from; an empty cache by default.
            in_place: Overwrite the old cache with the new one; only for a cache that nothing else uses.

        Returns:
            The logits of the next token, and the new cache.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim == 1 and isinstance(cache, LMCache | None):
            if cache is None:
                self.refresh()
            before = self.model.init_cache(input_ids.shape[0]) if cache is None else cache
            leaves = before.leaves()
            if (step := usable_step(self.model, (input_ids, *leaves), self._source)) is not None:
                result = step.run(self.model.backbone.embed(input_ids), leaves, in_place)
                if result is not None:
                    return result[0], before.with_tensors(result[1])
        return self.model.step(input_ids, cache)

    @property
    @torch.no_grad()
    def window_reason(self) -> str:
        """Why `step_window` takes one token at a time; empty where it reads the weights once."""
        if not may_run(self.model, (torch.empty(0, device=self.model.device),)):
            return "kernels are switched off, or something such as autocast needs the modules"
        return compiled_step(self.model, self._window_source, _WINDOW).reason

    @torch.no_grad()
    def step_window(self, input_ids: Int[Tensor, "b k"], cache: LMCache | None = None) -> TokenWindow:
        """Run over several tokens per row, of which any number may count afterwards.

        The weights are read once for up to 64 rows and tokens together, with the same bits as `step` token by token.

        Args:
            input_ids: Token ids of each row, up to 64.
            cache: What the rows continue from; an empty cache by default. It is unchanged.

        Returns:
            The logits after each token, and the cache after any number of them: `window.cache_after(counts)`.
        """
        check_window("Decoder.step_window", input_ids)
        b, k = input_ids.shape
        before = self.model.init_cache(b) if cache is None else cache
        if isinstance(before, LMCache):
            leaves = before.leaves()
            step = usable_step(self.model, (input_ids, *leaves), self._window_source, _WINDOW)
            if step is not None:
                result = step.look_ahead(self.model.backbone.embed(input_ids.flatten()), leaves, k)
                if result is not None:
                    logits, replay = result

                    def advance(counts: list[int], in_place: bool) -> LMCache:
                        return before.with_tensors(replay.advance(counts, in_place))

                    return TokenWindow(logits.unflatten(0, (b, k)), advance)
        return unroll_window(self.step, input_ids, before)

    def check_exact(self) -> None:
        """Raise `ValueError` if windows of the compiled step do not run, which exact reading needs."""
        if reason := self.window_reason:
            raise ValueError(f"exact reading needs the compiled step, which does not run: {reason}")

    @torch.no_grad()
    def read(
        self,
        input_ids: Int[Tensor, "b t"],
        cache: LMCache | None = None,
        *,
        logits: Literal["all", "last", "none"] = "last",
    ) -> tuple[Float[Tensor, "b n v"] | None, LMCache]:
        """Run over sequences in windows, with the bits of `step` token by token, however a text is cut.

        Args:
            input_ids: Token ids, at least one of each row.
            cache: What the rows continue from; an empty cache by default. It is unchanged.
            logits: Whether to return the logits after every token, after the last one, or none.

        Returns:
            The logits, or None, and the new cache.

        Raises:
            ValueError: There is no token, or the compiled step does not run.
        """
        b, t = input_ids.shape
        if t == 0:
            raise ValueError("Decoder.read: expected at least one token in each row, got none")
        self.check_exact()
        cache = self.model.init_cache(b) if cache is None else cache
        end = t - (logits == "last")  # the last token is a step of its own
        part, source = ("", self._source) if logits == "all" else ("read", self._read_source)
        outputs: list[Tensor] = []
        for begin in range(0, end, MAX_WINDOW):
            ids_bk = input_ids[:, begin : min(begin + MAX_WINDOW, end)]
            embedded = self.model.backbone.embed(ids_bk.flatten())
            step = compiled_step(self.model, source, part)
            result = step.run(embedded, cache.leaves(), in_place=begin > 0, window=ids_bk.shape[1])
            if result is None:
                raise ValueError("Decoder.read: the cache does not belong to this model")
            cache = cache.with_tensors(result[1])
            if logits == "all":
                outputs.append(result[0].unflatten(0, (b, -1)))
        if logits == "last":
            logits_bv, cache = self.step(input_ids[:, -1], cache, in_place=end > 0)
            return logits_bv.unsqueeze(1), cache
        return torch.cat(outputs, dim=1) if outputs else None, cache

    def _source(self) -> StepSource:
        model, dtype = self.model, self.model.dtype
        return StepSource(model.describe_step, model.config.d_model, dtype, state_dtype(dtype), model.device)

    def _read_source(self) -> StepSource:
        return self._source()._replace(describe=self.model.describe_read)

    def _window_source(self) -> StepSource:
        return self._source()._replace(keeps_slots=True)


def decoder(model: MambaLM) -> Decoder:
    """Return a decoder of `model`, for your own loop: `logits, cache = decoder.step(ids, cache)`."""
    return Decoder(model)
