"""The common part of models that do not generate text: inputs of tokens or vectors, a stack, and files.

Letters: b batch, t time, c input_size, d d_model, z sequences: rows, or packed ones.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from anymamba.blocks.block_inputs import check_batch, check_input
from anymamba.core.checks import check_dtype_and_device, check_shape
from anymamba.core.layout import Padding
from anymamba.models.backbone import embed_ids
from anymamba.models.stack.bidirectional import BidirectionalStack
from anymamba.models.stack.class_tokens import Position, check_positions
from anymamba.models.stack.stack import Stack
from anymamba.models.stack.stack_config import BidirectionalConfig, StackConfig, config_from_dict, make_stack_config

POOLINGS = ("last", "mean", "class_token")


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Fields of a stack, with the inputs and outputs of the model around it."""

    stack: dict[str, Any]  # fields of `StackConfig`, or of `BidirectionalConfig`
    bidirectional: bool = False
    vocab_size: int | None = None  # number of tokens, if the inputs are token ids
    input_size: int | None = None  # width of the vectors, if the inputs are vectors
    output_size: int = 1  # width of the output, per step or per sequence
    pooling: Literal["last", "mean", "class_token"] = "mean"  # the vector that represents a sequence
    labels: list[str] = field(default_factory=list)  # names of the classes, if they have any
    class_tokens: list[Position] = field(default_factory=list)  # positions of class tokens before the input projection

    def __post_init__(self) -> None:
        """Check the fields, and copy tables and lists, so that later changes by the caller have no effect."""
        for name in ("stack", "labels", "class_tokens"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        if not isinstance(self.stack, dict):
            raise ValueError(f"SequenceConfig: stack must be a table of its fields, got {self.stack!r}")
        if not isinstance(self.bidirectional, bool):
            raise ValueError(f"SequenceConfig: bidirectional must be true or false, got {self.bidirectional!r}")
        if (self.vocab_size is None) == (self.input_size is None):
            both = f"vocab_size = {self.vocab_size}, input_size = {self.input_size}"
            raise ValueError(f"SequenceConfig: give vocab_size for tokens, or input_size for vectors, got {both}")
        for name in ("vocab_size", "input_size", "output_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 2**31):
                raise ValueError(f"SequenceConfig: {name} must be an integer, at least 1, got {value!r}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"SequenceConfig: pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if not isinstance(self.labels, list) or len(self.labels) not in (0, self.output_size):
            raise ValueError(f"SequenceConfig: labels must name all {self.output_size} outputs, got {self.labels!r}")
        check_positions("SequenceConfig: class_tokens", self.class_tokens)
        self.stack_config()

    def stack_config(self) -> StackConfig:
        """Return the config of the stack."""
        kind = BidirectionalConfig if self.bidirectional else StackConfig
        config: StackConfig = kind.from_dict(self.stack)
        return config

    def has_class_tokens(self) -> bool:
        """Return whether there are class tokens at any level."""
        return bool(self.class_tokens) or self.stack_config().has_class_tokens()

    @property
    def d_model(self) -> int:
        """Width of the stack."""
        return int(self.stack["d_model"])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SequenceConfig:
        """Return the config with these fields, as `to_dict` returned them; raise `ValueError` for other ones."""
        config: SequenceConfig = config_from_dict(cls, values)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name."""
        return dataclasses.asdict(self)


_M = TypeVar("_M", bound="SequenceModel")


class SequenceModel(nn.Module):
    """Input layer and stack. A subclass adds a head; files name it by its `MODEL_TYPE`.

    Args:
        config: `SequenceConfig`; its fields may be given as keywords instead.
        device: Device of the parameters.
        dtype: Dtype of the parameters (blocks keep some in float32, like the official ones).
    """

    MODEL_TYPE: ClassVar[str]
    SUPPORTS_CLASS_TOKENS: ClassVar[bool] = False
    BY_MODEL_TYPE: ClassVar[dict[str, type[SequenceModel]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class under its model type."""
        super().__init_subclass__(**kwargs)
        SequenceModel.BY_MODEL_TYPE[cls.MODEL_TYPE] = cls

    def __init__(
        self,
        config: SequenceConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        if not hasattr(type(self), "MODEL_TYPE"):
            kinds = ", ".join(kind.__name__ for kind in SequenceModel.BY_MODEL_TYPE.values())
            raise TypeError(f"SequenceModel has no head: create one of {kinds}, or use from_pretrained")
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = make_stack_config(type(self).__name__, SequenceConfig, config, fields)
        self.check_config(c)
        if c.has_class_tokens() and not self.SUPPORTS_CLASS_TOKENS:
            raise ValueError(
                f"{type(self).__name__}: class tokens are for a LatentModel or a Stack; a classifier has "
                'pooling="class_token"'
            )
        if c.vocab_size is not None:
            self.embedding = nn.Embedding(c.vocab_size, c.d_model, **factory)
            nn.init.normal_(self.embedding.weight, std=0.02)
        else:
            self.input = nn.Linear(c.input_size, c.d_model, **factory)
        kind: Any = BidirectionalStack if c.bidirectional else Stack
        self.backbone = kind(c.stack_config(), **factory)
        self.build_head(c, factory)

    def check_config(self, config: SequenceConfig) -> None:
        """Raise for a config that this model cannot have."""

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """Create the parameters after the stack."""
        raise NotImplementedError

    def outer_projections(self) -> list[nn.Linear]:
        """Return the projections into and out of the stack, which optimizers treat unlike hidden ones."""
        return [m for m in self.children() if isinstance(m, nn.Linear)]

    @property
    def _reference_tensor(self) -> Tensor:
        return self.embedding.weight if self.config.vocab_size is not None else self.input.weight

    def embed_inputs(
        self, x: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """Return the inputs of the stack, and how the rows are padded.

        Inputs are ids (b, t), their embeddings (b, t, d), or vectors (b, t, c) or (b, c).
        """
        where = type(self).__name__
        if self.config.vocab_size is not None and isinstance(x, Tensor) and x.is_floating_point():
            check_input(where, x, "b t d", self.config.d_model, self.embedding.weight, name="inputs_embeds")
            return x, check_batch(where, x, cu_seqlens, mask)
        if self.config.vocab_size is not None:
            if not isinstance(x, Tensor) or x.ndim != 2:
                received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{where}: token ids must have shape (b, t), got {received}")
            return embed_ids(where, self.embedding, x), check_batch(where, x, cu_seqlens, mask)
        x, padding = self.check_vectors(x, cu_seqlens, mask)
        return self.input(x), padding

    def check_vectors(
        self, x: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """Return vectors (b, t, c) or (b, c) with zeros at the padding, and how the rows are padded."""
        where = type(self).__name__
        letters = "b c" if isinstance(x, Tensor) and x.ndim == 2 else "b t c"
        check_shape(where, "x", x, letters, {"c": self.config.input_size or 0})
        check_dtype_and_device(where, "x", x, self._reference_tensor.dtype, self._reference_tensor.device)
        padding = check_batch(where, x, cu_seqlens, mask)
        if padding is not None:  # the values there must not reach the gradient of the projection
            x = x.masked_fill(~padding.real_mask().unsqueeze(-1), 0)
        return x, padding

    def encode(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """Return the outputs of the stack (b, t, d), and how the rows are padded."""
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        return self.backbone(inputs, cu_seqlens=cu_seqlens, mask=padding), padding

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write model.safetensors, then config.json: a directory that has the config is complete."""
        from anymamba.checkpoints.save import save_sequence_model

        save_sequence_model(self, directory)

    @classmethod
    def from_pretrained(
        cls: type[_M],
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> _M:
        """Read what `save_pretrained` wrote. `SequenceModel.from_pretrained` reads any kind.

        Args:
            directory: Directory with config.json and model.safetensors.
            dtype: Dtype of the parameters; that of the file if not given.
            device: Device of the parameters; "auto" is the first of cuda, mps and cpu that is available.

        Raises:
            ValueError: There is no such model, it is of another kind, or its weights do not match its config.
        """
        from anymamba.checkpoints.load import load_sequence_model

        return load_sequence_model(directory, cls, dtype=dtype, device=device)
