"""From the contents of a directory or hub id to a model, and back."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.checkpoints.empty_model import SkipInitialization, empty_model, expected_tensors
from anymamba.checkpoints.formats import FORMATS, Format, default_format, get_format, gguf
from anymamba.checkpoints.open import Checkpoint, iter_tensors, match_tensors, open_checkpoint, read_tensors_by_name
from anymamba.checkpoints.weight_files import (
    SafetensorsFile,
    StoredTensor,
    describe_mismatch,
    describe_non_finite,
)
from anymamba.core.io import atomic_write, write_json, write_tensors
from anymamba.core.weight_formats import WeightFormat, check_format
from anymamba.models.lm import MambaLM
from anymamba.models.sequence.sequence_model import SequenceConfig
from anymamba.models.weight_tying import EMBEDDING, HEAD, PARTS, has_another_head
from anymamba.quantization.quantize import (
    quantizable_names,
    quantization_config,
    scales_name,
    weight_format,
)

# Files that go with the weights, whatever the format.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


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
    checkpoint = open_checkpoint(source, ssm_cfg)
    format = resolve_weight_format(checkpoint, weights, dtype)
    asked = dtype or checkpoint.dtype
    model = empty_model(checkpoint.config, asked, format)
    narrowed = quantizable_names(model) if format is not None and checkpoint.weights is None else []
    made = set(map(scales_name, narrowed))
    targets = {name: x.dtype for name, x in model.state_dict().items() if name not in made}
    targets |= dict.fromkeys(narrowed, torch.float32)
    if dtype is None:
        _warn_of_narrowing(checkpoint, targets)
    if checkpoint.config.tie_embeddings:
        _check_tied(checkpoint)
        targets.pop(HEAD)
        targets.pop(scales_name(HEAD), None)
    where = torch.device(device)
    state = dict(iter_tensors(checkpoint, targets, mapped=mapped, device=where, narrowed=set(narrowed), format=format))
    if not mapped:
        warn_of_non_finite(checkpoint.directory, state)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.to(device).eval()


def resolve_weight_format(checkpoint: Checkpoint, asked: str | None, dtype: torch.dtype | None) -> WeightFormat | None:
    """The narrow format to load a checkpoint in: the one that is asked for, or that it is stored in.

    Raises:
        ValueError: there is no such format, or the weights cannot be loaded in it.
    """
    stored = checkpoint.weights
    format = stored if asked is None else check_format("from_pretrained", asked)
    if stored is not None and format != stored:
        raise ValueError(
            f"{checkpoint.directory}: the weights are stored in {stored}, and cannot be loaded in {format}; convert "
            "the model that they were made from"
        )
    if format is not None and dtype == torch.float64:
        raise ValueError(f"from_pretrained: weights in {format} are for activations up to float32, got {dtype}")
    return format


def save_model(model: MambaLM, directory: str | os.PathLike[str], format: str | None = None) -> None:
    """Write config and weights, a tied head once (`MambaLM.save_pretrained` has the contract).

    The config comes last, so that a directory with a config is complete.
    """
    adapter, target = get_format(format or default_format(model.config)), Path(directory)
    tensors = {adapter.foreign_key(name): x for name, x in _stored_state(model, adapter).items()}
    raw = _written_config(model, adapter)
    check_no_other_format(target, adapter)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / adapter.weight_files[0], {key: x.cpu() for key, x in tensors.items()}, {"format": "pt"})
    write_json(target / adapter.config_files[0], raw)


def save_config(model: MambaLM, directory: Path) -> None:
    """Write the config alone, for weights that are written in another way."""
    adapter = get_format(default_format(model.config))
    write_json(directory / adapter.config_files[0], _written_config(model, adapter))


def _written_config(model: MambaLM, adapter: Format) -> dict[str, Any]:
    return {**adapter.write_config(model.config, model.dtype), **quantization_config(model)}


def _stored_state(model: MambaLM, adapter: Format) -> dict[str, Tensor]:
    """The tensors of a model's checkpoint by our names: those that the model of its config has, and no others.

    Raises:
        ValueError: they could not be loaded with that config.
    """
    state, weights = model.state_dict(), weight_format(model)
    if weights is not None and adapter.name not in ("official", "anymamba"):
        raise ValueError(
            f"save_pretrained: the {adapter.name} format cannot hold weights in {weights}; the official one can"
        )
    if weights is not None and model.dtype == torch.float64:
        raise ValueError(
            f"save_pretrained: weights in {weights} are for activations up to float32, got {model.dtype}; "
            "model.float() computes in float32"
        )
    if model.config.tie_embeddings and HEAD in state and EMBEDDING in state:
        if has_another_head(state):
            raise ValueError(
                "save_pretrained: the config says that head and embedding are one (tied), but the model holds two "
                "different ones; to keep both, set model.config = dataclasses.replace(model.config, "
                "tie_embeddings=False); to keep the embedding alone, call model.tie_weights()"
            )
        del state[HEAD]
        state.pop(scales_name(HEAD), None)
    entries = [(Path(), adapter.foreign_key(name), StoredTensor(tuple(x.shape), x.dtype)) for name, x in state.items()]
    _, problems = match_tensors(adapter, model.config, expected_tensors(model.config, None, weights), entries)
    if problems:
        raise ValueError(
            f"save_pretrained: the weights do not fit the config, so they could not be loaded: {problems}; merge "
            "adapters and parametrizations into the weights, and give a resized model a config that says so"
        )
    return state


def check_no_other_format(directory: Path, adapter: Format) -> None:
    """Refuse a directory with a model under names other than those `adapter` writes: it would remain there.

    Raises:
        ValueError: there is one.
    """
    for name in {other.config_files[0] for other in FORMATS.values()} - {adapter.config_files[0]}:
        if (directory / name).is_file():
            raise ValueError(
                f"{directory}: there is a model ({name}) that one in the {adapter.name} format would not replace; "
                "remove it, or name another directory"
            )


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files, and others that belong to the weights; returns their names."""
    if source.suffix == gguf.SUFFIX and source.is_file():
        return _write_tokenizer(source, target)
    copied = [name for name in COMPANION_FILES if (source / name).is_file()]
    for name in copied:
        with atomic_write(target / name) as temporary:
            shutil.copyfile(source / name, temporary)
    return copied


def _write_tokenizer(source: Path, target: Path) -> list[str]:
    """Write the tokenizer of a GGUF file, if it has one that can be read; returns the names of its files."""
    try:
        found = gguf.tokenizer_files(source)
    except ValueError:
        return []
    for name, content in found.items():
        write_json(target / name, content)
    return list(found)


def warn_of_non_finite(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Warn of weights that are not finite, and continue: a broken model must be opened to be examined or repaired."""
    if found := describe_non_finite(tensors.items()):
        warnings.warn(f"{directory}: {found}", stacklevel=4)


def _warn_of_narrowing(checkpoint: Checkpoint, targets: dict[str, torch.dtype]) -> None:
    """Warn that the weights are read in the embedding's dtype, as no dtype was asked for."""
    stored = {name: entry[2].dtype for name, entry in checkpoint.tensors.items()}
    narrowed = [name for name, dtype in stored.items() if torch.promote_types(dtype, targets[name]) != targets[name]]
    if narrowed:
        names = describe_mismatch({"stored wider than that": narrowed})
        warnings.warn(
            f"{checkpoint.directory}: the weights are read as {checkpoint.dtype}, the embedding's dtype ({names}); "
            "dtype=torch.float32 keeps all digits",
            stacklevel=4,
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    """Raise if a model whose head is its embedding was stored with a head that differs."""
    named = [name for head, embedding in PARTS.items() if head in checkpoint.tensors for name in (head, embedding)]
    stored = {name: checkpoint.tensors[name][2].dtype for name in named}
    if has_another_head(read_tensors_by_name(checkpoint, stored, mapped=True)):
        raise ValueError(
            f"{checkpoint.directory}: the config says that head and embedding are one (tied), "
            "but the weights hold two different ones"
        )


_FEW_LAYERS, _FEW_NUMBERS = 256, 2**20  # up to this many, a config is built and compared with its file


def load_sequence_model(
    source: Path, kind: Any, config: SequenceConfig, dtype: torch.dtype | None, device: torch.device
) -> Any:
    """Build a sequence model and read its weights from `source`."""
    with SafetensorsFile(source / "model.safetensors") as file:
        entries = file.entries()
        if config.stack_config().n_layer > max(_FEW_LAYERS, len(entries)):
            layers = config.stack_config().n_layer
            raise ValueError(f"{source}: the config asks for {layers} layers, and there are {len(entries)} tensors")
        numbers = sum(math.prod(entry.shape) for entry in entries.values())
        asked = dtype or next((entry.dtype for name, entry in entries.items() if name.endswith("norm.weight")), None)
        try:
            with SkipInitialization(max(_FEW_NUMBERS, numbers)):
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
