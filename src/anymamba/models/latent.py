"""A model of signals: vectors in, vectors out, one for each step.

    y = output(stack(input(x)))        input, output: linear, with bias

Letters: b batch, t time, c input_size, o output_size, z packed sequences.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.models.cache import StackCache
from anymamba.models.sequence import SequenceModel
from anymamba.models.sequence_config import SequenceConfig


class LatentModel(SequenceModel):
    """A stack between two projections, for continuous inputs and outputs: forecasts, filters, control.

    model = LatentModel(input_size=3, output_size=1, stack={"d_model": 64, "n_layer": 2})
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_latent"

    def expect_config(self, config: SequenceConfig) -> None:
        """Numbers come in.

        Raises:
            ValueError: tokens do.
        """
        if config.input_size is None:
            raise ValueError(f"LatentModel: input_size must be given, got vocab_size = {config.vocab_size}")

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """The projection to what comes out."""
        self.output = nn.Linear(config.d_model, config.output_size, **factory)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b t o"]:
        """An output for each step; `cu_seqlens` and `mask` as for a block. Outputs at the padding have no meaning."""
        y: Tensor = self.output(self.encode(x, cu_seqlens=cu_seqlens, mask=mask)[0])
        return y

    def prefill(
        self,
        x: Float[Tensor, "b t c"],
        cache: StackCache | None = None,
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t o"], StackCache]:
        """Outputs, and the cache to continue from; arguments as for `Stack.prefill`.

        Raises:
            TypeError: the stack is bidirectional.
        """
        stack = self._causal("prefill")
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        y, new = stack.prefill(inputs, cache, cu_seqlens=cu_seqlens, mask=padding)
        return self.output(y), new

    def step(self, x: Float[Tensor, "b c"], cache: StackCache | None = None) -> tuple[Float[Tensor, "b o"], StackCache]:
        """The output of one step, and the cache to continue from."""
        y, new = self._causal("step").step(self.embed_inputs(x)[0], cache)
        return self.output(y), new

    def step_infinite(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b o"]:
        """What the output comes to under an input that repeats forever."""
        y: Tensor = self.output(self._causal("step_infinite").step_infinite(self.embed_inputs(x)[0]))
        return y

    def _causal(self, name: str) -> Any:
        if self.config.bidirectional:
            raise TypeError(f"LatentModel.{name}: a bidirectional model has no steps, it reads whole sequences")
        return self.backbone
