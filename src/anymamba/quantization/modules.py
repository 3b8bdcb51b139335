"""Linear layers and embeddings with quantized weights (formats: `anymamba.core.weight_formats`)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.core.weight_formats import QuantizedTensor, QuantizedWeight, WeightFormat
from anymamba.quantization.ops import dequantize, quantized_linear


class QuantizedLinear(QuantizedWeight):
    """`y = x weightᵀ + bias`, summed in float32; the gradient reaches x and the bias, not the weight."""

    HAS_COMPILED_FORWARD: ClassVar = True  # of this very class: the compiled kernels do what its `forward` does

    bias: nn.Parameter | None

    def __init__(
        self,
        format: WeightFormat,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Make room for the weight and the bias; `dtype` is that of the activations."""
        super().__init__(format, out_features, in_features, dtype=dtype, device=device)
        self.in_features, self.out_features = in_features, out_features
        values = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        """(..., in_features) -> (..., out_features), in the dtype of x."""
        return quantized_linear(x, self.stored, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """The rows of a table by their numbers."""

    def __init__(
        self,
        format: WeightFormat,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Make room for the table; `dtype` is that of what it returns."""
        super().__init__(format, num_embeddings, embedding_dim, dtype=dtype, device=device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        """The rows `ids`."""
        flat, scales = ids.flatten(), self.scales
        rows = QuantizedTensor(
            torch.embedding(self.weight, flat), None if scales is None else torch.embedding(scales, flat), self._width
        )
        return dequantize(rows).to(self.dtype).view(*ids.shape, self.embedding_dim)
