"""Build models from checkpoints: open, make the empty model, read every tensor into it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from anymamba.checkpoints.empty_model import empty_model
from anymamba.checkpoints.open import Checkpoint, iter_tensors, open_checkpoint, open_sequence_checkpoint
from anymamba.checkpoints.weight_files import describe_mismatch, describe_non_finite
from anymamba.core.dtypes import resolve_device
from anymamba.core.weight_formats import WeightFormat, check_format
from anymamba.models.backbone import HEAD, PARTS, has_another_head
from anymamba.models.lm import MambaLM
from anymamba.models.sequence.sequence_model import SequenceModel
from anymamba.quantization.quantize import quantizable_names, scales_name

_SequenceModel = TypeVar("_SequenceModel", bound=SequenceModel)


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mapped: bool = False,
    weights: str | None = None,
    ssm_cfg: dict[str, Any] | None = None,
) -> MambaLM:
    """Build the model of a checkpoint and read its weights (`MambaLM.from_pretrained` has the contract)."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"from_pretrained: dtype must be a torch.dtype, such as torch.bfloat16, got {dtype!r}")
    # 1) What is stored, and the model for it.
    device, checkpoint = resolve_device(device), open_checkpoint(source, ssm_cfg)
    format = resolve_weight_format(checkpoint, weights, dtype)
    model = empty_model(checkpoint.config, dtype or checkpoint.dtype, format)
    # 2) The dtype to read each tensor in. Weights that are quantized here are read in float32; their scales are not
    #    stored. A tied head is stored once.
    names_to_quantize = quantizable_names(model) if format is not None and checkpoint.weights is None else []
    scales = set(map(scales_name, names_to_quantize))
    dtypes = {name: x.dtype for name, x in model.state_dict().items() if name not in scales}
    dtypes |= dict.fromkeys(names_to_quantize, torch.float32)
    if dtype is None:
        _warn_of_downcasts(checkpoint, {name: x for name, x in dtypes.items() if name not in names_to_quantize})
    if checkpoint.config.tie_embeddings:
        _check_tied(checkpoint)
        dtypes.pop(HEAD)
        dtypes.pop(scales_name(HEAD), None)
    # 3) Read the tensors into the model.
    to_quantize = dict.fromkeys(names_to_quantize, format) if format is not None else {}
    state = dict(iter_tensors(checkpoint, dtypes, mapped=mapped, device=device, to_quantize=to_quantize))
    if not mapped:
        warn_of_non_finite(checkpoint.directory, state)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.to(device).eval()


def load_sequence_model(
    source: str | os.PathLike[str],
    base: type[_SequenceModel],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> _SequenceModel:
    """Build a sequence model of a class and read its weights (`SequenceModel.from_pretrained` has the contract)."""
    device = resolve_device(device)
    checkpoint, model = open_sequence_checkpoint(Path(source), base, dtype)
    dtypes = {name: x.dtype for name, x in model.state_dict().items()}
    state = dict(iter_tensors(checkpoint, dtypes, mapped=False, device=device))
    warn_of_non_finite(checkpoint.directory, state)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def resolve_weight_format(
    checkpoint: Checkpoint, requested: str | None, dtype: torch.dtype | None
) -> WeightFormat | None:
    """Return the format of the weights to load: the requested one, or else the stored one; None for plain weights."""
    stored = checkpoint.weights
    format = stored if requested is None else check_format("from_pretrained", requested)
    if stored is not None and format != stored:
        raise ValueError(
            f"{checkpoint.directory}: the weights are stored in {stored}, and cannot be loaded in {format}; convert "
            "the model that they were made from"
        )
    if format is not None and dtype == torch.float64:
        raise ValueError(f"from_pretrained: weights in {format} are for activations up to float32, got {dtype}")
    return format


def warn_of_non_finite(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Warn of weights that are not finite, and continue: a broken model must be opened to be examined or repaired."""
    if description := describe_non_finite(tensors.items()):
        warnings.warn(f"{directory}: {description}", stacklevel=4)


def _warn_of_downcasts(checkpoint: Checkpoint, dtypes: dict[str, torch.dtype]) -> None:
    """Warn of weights that lose digits because they are read in the embedding's dtype."""
    stored = {
        name: checkpoint.tensors[part][2].dtype
        for name in dtypes
        for part in checkpoint.parts_of(name)
        if part in checkpoint.tensors
    }
    downcast = [name for name, dtype in stored.items() if torch.promote_types(dtype, dtypes[name]) != dtypes[name]]
    if downcast:
        names = describe_mismatch({"stored with more digits": downcast})
        warnings.warn(
            f"{checkpoint.directory}: the weights are read as {checkpoint.dtype}, the embedding's dtype ({names}); "
            "dtype=torch.float32 keeps all digits",
            stacklevel=4,
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    """Raise `ValueError` if a model whose head is its embedding was stored with a different head."""
    named = [name for head, embedding in PARTS.items() if head in checkpoint.tensors for name in (head, embedding)]
    dtypes = {name: checkpoint.tensors[name][2].dtype for name in named}
    if has_another_head(dict(iter_tensors(checkpoint, dtypes, mapped=True))):
        raise ValueError(
            f"{checkpoint.directory}: the config says that head and embedding are one (tied), "
            "but the weights hold two different ones"
        )
