"""Linear layers and embeddings with quantized weights (formats: `anymamba.core.weight_formats`)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.core.weight_formats import QuantizedTensor, QuantizedWeight, WeightFormat
from anymamba.quantization.ops import dequantize_tensor, quantized_linear


class QuantizedLinear(QuantizedWeight):
    """`y = x weightᵀ + bias`, summed in float32; the gradient reaches x and the bias, not the weight."""

    HAS_COMPILED_FORWARD: ClassVar = True  # true for this class alone: kernels compute what its `forward` computes

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
        """Allocate weight and bias without values.

        Args:
            format: Format of the weight.
            in_features: Channels of the input.
            out_features: Channels of the output.
            bias: Whether there is a bias.
            dtype: Dtype of the activations and of the bias.
            device: Device of the parameters.
        """
        super().__init__(format, out_features, in_features, dtype=dtype, device=device)
        self.in_features = in_features
        self.out_features = out_features
        values = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        """Map (..., in_features) to (..., out_features), in the dtype of x."""
        return quantized_linear(x, self.stored, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """An embedding table, whose rows are dequantized when they are looked up."""

    def __init__(
        self,
        format: WeightFormat,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the table without values.

        Args:
            format: Format of the table.
            num_embeddings: Rows of the table.
            embedding_dim: Columns of the table.
            dtype: Dtype of the result.
            device: Device of the table.
        """
        super().__init__(format, num_embeddings, embedding_dim, dtype=dtype, device=device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        """Return the rows `ids`."""
        flat = ids.flatten()
        scales = None if self.scales is None else torch.embedding(self.scales, flat)
        rows = QuantizedTensor(torch.embedding(self.weight, flat), scales, self.format, self._width)
        return dequantize_tensor(rows).to(self.dtype).view(*ids.shape, self.embedding_dim)
