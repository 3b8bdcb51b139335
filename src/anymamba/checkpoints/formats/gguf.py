"""GGUF files of llama.cpp with Mamba-1 and Mamba-2 models, read through the `gguf` package: weights, config, tokenizer.

Their tensors have other names and shapes: A itself is stored, not its logarithm, and axes of length one are dropped or
added. Quantized tensors (Q8_0, Q4_0, ...) are read as float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from anymamba.checkpoints.formats import gguf_tokenizer
from anymamba.checkpoints.formats.base import Format, StoredTensor
from anymamba.checkpoints.formats.gguf_header import check_header
from anymamba.core.io import check_size
from anymamba.models.config import MambaLMConfig

SUFFIX = ".gguf"
_NAMES = {
    "token_embd.weight": "backbone.embedding.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "norm.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm.weight": "mixer.norm.weight",
    "ssm_out.weight": "mixer.out_proj.weight",
}
_MAMBA1 = {"ssm_x.weight": "mixer.x_proj.weight", "ssm_dt.weight": "mixer.dt_proj.weight"}
_MAMBA1["ssm_dt.bias"] = "mixer.dt_proj.bias"
_MAMBA2 = {"ssm_dt.bias": "mixer.dt_bias"}
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its suffix."""
    return path.suffix == SUFFIX and path.is_file()


class GgufFormat(Format):
    """The format of a single file with config, weights and tokenizer."""

    name: ClassVar[str] = "gguf"
    config_files: ClassVar[tuple[str, ...]] = ()
    weight_files: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layer: str) -> None:
        """Choose the names of tensors by the block family, `layer`."""
        self._layer = {**_LAYER, **(_MAMBA1 if layer == "Mamba1" else _MAMBA2)}

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return False: the config is in the file itself."""
        return False

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Raise: the config is in the file itself."""
        raise NotImplementedError

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Raise `ValueError`: GGUF files can only be read."""
        raise ValueError("the gguf format can be read but not written; llama.cpp converts the transformers format")

    def our_key(self, key: str) -> str:
        """Return our name: `blk.N.ssm_in.weight` becomes `backbone.layers.N.mixer.in_proj.weight`."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", key)
        if match is None or match[2] not in self._layer:
            return _NAMES.get(key, key)
        return f"backbone.layers.{match[1]}.{self._layer[match[2]]}"

    def foreign_key(self, key: str) -> str:
        """Invert `our_key`."""
        names = {ours: theirs for theirs, ours in _NAMES.items()}
        match = re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", key)
        layer = {ours: theirs for theirs, ours in self._layer.items()}
        return names.get(key, key) if match is None else f"blk.{match[1]}.{layer.get(match[2], match[2])}"


class GgufFile:
    """A GGUF file; a context in which tensors can be read, in our shapes."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        self.path = path

    def __enter__(self) -> GgufFile:
        """Map the file and read its header; raise `ValueError` if it is damaged, or the `gguf` package is missing."""
        try:
            gguf: Any = import_module("gguf")
        except ImportError as error:
            raise ValueError(f"{self.path}: to read it, install gguf (pip install 'anymamba[hf]')") from error
        check_header(self.path)
        self._size = self.path.stat().st_size
        try:
            self._reader: Any = gguf.GGUFReader(self.path)
        except Exception as error:  # a damaged header can fail in any way
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: not a readable GGUF file ({reason})") from error
        self._dequantize = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        del self._reader
        self._tensors = {}

    def field(self, name: str, default: Any = None) -> Any:
        """Return a value of the header, or `default`."""
        entry = self._reader.get_field(name)
        return default if entry is None else entry.contents()

    def entries(self) -> dict[str, StoredTensor]:
        """Return our shape and the dtype of each tensor, float32 for quantized ones, by its name in the file."""
        return {
            name: StoredTensor(self._shape(name), _PLAIN.get(_kind(x), torch.float32))
            for name, x in self._tensors.items()
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return our shape of a tensor; the file's is reversed, and axes of length one are dropped or added."""
        shape = tuple(int(n) for n in reversed(self._tensors[name].shape))
        part = name.rpartition("blk.")[2].partition(".")[2]
        if part == "ssm_conv1d.weight":
            return (shape[0], 1, *shape[1:])
        if part in ("ssm_a", "ssm_d") and len(shape) == 2 and shape[1] == 1:  # of Mamba-2
            return shape[:1]
        return (shape[0] * shape[1],) if part == "ssm_norm.weight" and len(shape) == 2 else shape

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None, *, mapped: bool) -> Tensor:
        """Return a tensor, copied."""
        check_size(self.path, self.path.stat().st_size, self._size)
        tensor = self._tensors[name]
        kind = _kind(tensor)
        try:
            if kind == "BF16":
                x = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
            else:
                plain = tensor.data if kind in _PLAIN else self._dequantize(tensor.data, tensor.tensor_type)
                x = torch.from_numpy(plain.copy())
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{self.path}: {name} is stored as {kind}, which cannot be read") from error
        x = x.reshape(self._shape(name))
        return (torch.log(-x.double()) if name.endswith(".ssm_a") else x).to(device, dtype)

    def read_rows(self, name: str, dtype: torch.dtype, device: torch.device | None, rows: int) -> Iterator[Tensor]:
        """Yield a tensor some rows at a time."""
        yield from self.read(name, dtype, device, mapped=False).split(rows)


def _kind(tensor: Any) -> str:
    return str(tensor.tensor_type.name)


def read_config(path: Path) -> MambaLMConfig:
    """Return the config of a model in a GGUF file; raise `ValueError` for one that cannot be computed."""
    with GgufFile(path) as file:
        kind = file.field("general.architecture")
        if kind not in ("mamba", "mamba2"):
            raise ValueError(f'{path}: expected a GGUF file of architecture "mamba" or "mamba2", got {kind!r}')

        def number(name: str, default: Any = None) -> Any:
            value = file.field(f"{kind}.{name}", default)
            if value is None:
                raise ValueError(f"{path}: the header has no {kind}.{name}")
            return value

        eps = number("attention.layer_norm_rms_epsilon")
        if abs(eps - 1e-5) > 1e-9:
            raise ValueError(f"{path}: the norms of the residual stream must have eps = 1e-05, got {eps:g}")
        tensors = file.entries()
        if "token_embd.weight" not in tensors:
            raise ValueError(f"{path}: expected a tensor token_embd.weight, found none")
        width, inner, rank = number("embedding_length"), number("ssm.inner_size"), number("ssm.time_step_rank")
        block = {"d_state": number("ssm.state_size"), "d_conv": number("ssm.conv_kernel"), "expand": inner / width}
        block["conv_bias"] = "blk.0.ssm_conv1d.bias" in tensors
        if kind == "mamba":
            norms = "plain" if number("ssm.dt_b_c_rms", False) else "none"
            block |= {"layer": "Mamba1", "dt_rank": rank, "inner_norms": norms}
        else:
            block |= {"layer": "Mamba2", "headdim": inner // rank, "ngroups": number("ssm.group_count", 1)}
        return MambaLMConfig(
            d_model=width,
            n_layer=number("block_count"),
            vocab_size=tensors["token_embd.weight"].shape[0],
            ssm_cfg={name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in block.items()},
            pad_vocab_size_multiple=1,
            tie_embeddings="output.weight" not in tensors,
        )


def tokenizer_files(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tokenizer of a GGUF file as the files that other formats have next to their weights: names, contents.

    Raise `ValueError` if there is none, or it is of a kind that cannot be written that way.
    """
    with GgufFile(path) as file:
        return gguf_tokenizer.tokenizer_files(str(path), file.field)
