"""Quantized weights: decoding reads every weight once per token, so smaller weights decode faster.

Read `core/weight_formats.py` first (what each format stores), then:

- `ops.py`: quantize and dequantize a tensor, and the operator `quantized_linear`;
- `quantize.py`: `QuantizedLinear` and `QuantizedEmbedding`, whole language models, and the entry of a config file that
  names the format.

One weight, from file to product: `checkpoints` reads its rows in float32 some at a time, `quantize_rows` stores them as
codes and scales in the format of that name, a `QuantizedLinear` holds both, and its `forward` calls `quantized_linear`
with codes, scales and the format's name; a kernel that covers the format computes it, or the portable implementation.
"""

from anymamba.core.weight_formats import QuantizedTensor as QuantizedTensor
from anymamba.core.weight_formats import WeightFormat as WeightFormat
from anymamba.quantization.ops import dequantize_tensor as dequantize_tensor
from anymamba.quantization.ops import quantize_tensor as quantize_tensor
from anymamba.quantization.ops import quantized_linear as quantized_linear
from anymamba.quantization.quantize import QuantizedEmbedding as QuantizedEmbedding
from anymamba.quantization.quantize import QuantizedLinear as QuantizedLinear
from anymamba.quantization.quantize import quantize_model as quantize_model
from anymamba.quantization.quantize import weight_format as weight_format
