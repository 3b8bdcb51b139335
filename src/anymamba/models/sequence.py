"""What models around a stack share: inputs of tokens or numbers, the stack, and files.

Letters: b batch, t time, c input_size, d d_model, z sequences: rows, or packed ones.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from anymamba.ground.checks import expect_like, expect_shape
from anymamba.ground.files import read_json, write_json, write_tensors
from anymamba.ground.padding import Padding
from anymamba.models.backbone import embedded
from anymamba.models.batches import check_batch, check_input
from anymamba.models.bidirectional import BidirectionalStack
from anymamba.models.pretrained import warn_of_non_finite
from anymamba.models.sequence_config import SequenceConfig
from anymamba.models.skeleton import WithoutValues
from anymamba.models.stack import Stack
from anymamba.models.stack_config import stack_config
from anymamba.models.weights import SafetensorsFile, describe_mismatch

_M = TypeVar("_M", bound="SequenceModel")
_FEW_LAYERS, _FEW_NUMBERS = 256, 2**20  # up to this many, a config is built and compared with its file


class SequenceModel(nn.Module):
    """An input layer and a stack. A subclass adds a head, and is found by its `MODEL_TYPE`.

    Args:
        config: a `SequenceConfig`; its fields may be given as keywords instead.
        device: of the parameters.
        dtype: of the parameters (blocks keep some in float32, as officially).
    """

    MODEL_TYPE: ClassVar[str]
    TAKES_CLASS_TOKENS: ClassVar[bool] = False
    KINDS: ClassVar[dict[str, type[SequenceModel]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the class known by its model type."""
        super().__init_subclass__(**kwargs)
        SequenceModel.KINDS[cls.MODEL_TYPE] = cls

    def __init__(
        self,
        config: SequenceConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialise the parameters."""
        if not hasattr(type(self), "MODEL_TYPE"):
            kinds = ", ".join(kind.__name__ for kind in SequenceModel.KINDS.values())
            raise TypeError(f"SequenceModel has no head: make one of {kinds}, or open a file with from_pretrained")
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = stack_config(type(self).__name__, SequenceConfig, config, fields)
        self.expect_config(c)
        if c.has_class_tokens() and not self.TAKES_CLASS_TOKENS:
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

    def expect_config(self, config: SequenceConfig) -> None:
        """Refuse a config that this model cannot have."""

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """Create the parameters after the stack."""
        raise NotImplementedError

    def ends(self) -> list[nn.Linear]:
        """The projections into the stack and out of it, which are no hidden ones."""
        return [m for m in self.children() if isinstance(m, nn.Linear)]

    @property
    def _activation_like(self) -> Tensor:
        return self.embedding.weight if self.config.vocab_size is not None else self.input.weight

    def embed_inputs(
        self, x: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """Ids (b, t), their embeddings (b, t, d), or numbers (b, t, c) or (b, c), as inputs of the stack; the padding.

        Raises:
            ValueError: another shape or device, or ids that are not tokens.
            TypeError: another dtype.
        """
        where = type(self).__name__
        if self.config.vocab_size is not None and isinstance(x, Tensor) and x.is_floating_point():
            check_input(where, x, "b t d", self.config.d_model, self.embedding.weight, name="inputs_embeds")
            return x, check_batch(where, x, cu_seqlens, mask)
        if self.config.vocab_size is not None:
            if not isinstance(x, Tensor) or x.ndim != 2:
                found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{where}: token ids must have shape (b, t), got {found}")
            return embedded(where, self.embedding, x), check_batch(where, x, cu_seqlens, mask)
        x, padding = self.checked_numbers(x, cu_seqlens, mask)
        return self.input(x), padding

    def checked_numbers(
        self, x: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """Numbers (b, t, c) or (b, c), zero at the padding, and how the rows are padded.

        Raises:
            ValueError: another shape or device.
            TypeError: another dtype.
        """
        where = type(self).__name__
        letters = "b c" if isinstance(x, Tensor) and x.ndim == 2 else "b t c"
        expect_shape(where, "x", x, letters, {"c": self.config.input_size or 0})
        expect_like(where, "x", x, self._activation_like.dtype, self._activation_like.device)
        padding = check_batch(where, x, cu_seqlens, mask)
        if padding is not None:  # the values there must not reach the gradient of the projection
            x = x.masked_fill(~padding.real().unsqueeze(-1), 0)
        return x, padding

    def encode(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, mask: Tensor | Padding | None = None
    ) -> tuple[Tensor, Padding | None]:
        """The stack's outputs (b, t, d), and how the rows are padded."""
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        return self.backbone(inputs, cu_seqlens=cu_seqlens, mask=padding), padding

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors, the config last: a directory with one is complete."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        state = {name: x.cpu().contiguous() for name, x in self.state_dict().items()}
        write_tensors(target / "model.safetensors", state, {"format": "pt"})
        write_json(target / "config.json", {"model_type": self.MODEL_TYPE, **self.config.to_dict()})

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
            directory: with config.json and model.safetensors.
            dtype: of the parameters; the file's if not given.
            device: of the parameters.

        Raises:
            ValueError: there is no such model, it is of another kind, or its weights do not fit its config.
        """
        source = Path(directory)
        if not (source / "config.json").is_file():
            raise ValueError(f"{source}: expected a directory with config.json and model.safetensors")
        raw = read_json(source / "config.json")
        kind: Any = SequenceModel.KINDS.get(str(raw.pop("model_type", None)))
        if kind is None or not issubclass(kind, cls):
            names = [name for name, known in SequenceModel.KINDS.items() if issubclass(known, cls)]
            found = read_json(source / "config.json").get("model_type")
            raise ValueError(f"{source}: expected a model of type {' or '.join(names)}, got {found!r}")
        try:
            config = SequenceConfig.from_dict(raw)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from error
        model: _M = _read(source, kind, config, dtype, torch.device(device))
        return model


def _read(source: Path, kind: Any, config: SequenceConfig, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A model and its weights."""
    with SafetensorsFile(source / "model.safetensors") as file:
        entries = file.entries()
        if config.stack_config().n_layer > max(_FEW_LAYERS, len(entries)):
            layers = config.stack_config().n_layer
            raise ValueError(f"{source}: the config asks for {layers} layers, and there are {len(entries)} tensors")
        numbers = sum(math.prod(entry.shape) for entry in entries.values())
        asked = dtype or next((entry.dtype for name, entry in entries.items() if name.endswith("norm.weight")), None)
        try:
            with WithoutValues(max(_FEW_NUMBERS, numbers)):
                model = kind(config, device="cpu", dtype=asked)
        except ValueError as error:
            raise ValueError(f"{source}: the weights do not fit the config: {error}") from error
        expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        stored = {name: entry.shape for name, entry in entries.items()}
        problems = {
            "missing": [name for name in expected if name not in stored],
            "unexpected": [name for name in stored if name not in expected],
            "misshapen": [name for name in expected if stored.get(name, expected[name]) != expected[name]],
        }
        if wrong := describe_mismatch(problems):
            raise ValueError(f"{source}: the weights do not fit the config: {wrong}")
        targets = {name: x.dtype for name, x in model.state_dict().items()}
        state = {name: file.read(name, targets[name], device, mapped=False) for name in expected}
    warn_of_non_finite(source, state)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()
