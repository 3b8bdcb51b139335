"""What a directory or hub id holds: its format, its config, and its tensors by our names, not yet read."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.checkpoints.empty_model import Expected, expected_tensors
from anymamba.checkpoints.formats import FORMATS, Format, gguf
from anymamba.checkpoints.hub import fetch, is_repository_id
from anymamba.checkpoints.weight_files import (
    DTYPES,
    StoredTensor,
    describe_mismatch,
    describe_non_finite,
    find_weights,
    open_weight_file,
    read_entries,
)
from anymamba.core.io import read_json
from anymamba.core.weight_formats import WeightFormat
from anymamba.models.config import MambaLMConfig
from anymamba.models.mamba3_activation import with_block_options
from anymamba.models.weight_tying import EMBEDDING, PARTS
from anymamba.quantization.ops import rows_at_once
from anymamba.quantization.quantize import parse_quantization_config, quantize_weight

# Up to this many, what a config asks for is listed and compared with the files, however little they hold.
_FEW_LAYERS, _FEW_NUMBERS = 256, 2**20


class Checkpoint(NamedTuple):
    """A checkpoint as found on disk, its weights not yet read.

    Attributes:
        directory: where it is.
        format: the adapter that reads it.
        config: of the model.
        files: of the weights.
        tensors: our name of each tensor, with its file, its name there, and its shape and dtype.
        weights: the narrow format of the weights; None for plain ones.
        computed_in: the dtype of the activations that a narrow format names.
    """

    directory: Path
    format: Format
    config: MambaLMConfig
    files: list[Path]
    tensors: dict[str, tuple[Path, str, StoredTensor]]
    weights: WeightFormat | None = None
    computed_in: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations: that of the stored embedding, unless its format is narrow."""
        found: torch.dtype = getattr(torch, self.computed_in) if self.computed_in else self.tensors[EMBEDDING][2].dtype
        return found


def open_checkpoint(source: str | os.PathLike[str], ssm_cfg: dict[str, Any] | None = None) -> Checkpoint:
    """Find out what a directory or hub id holds, reading the config and the headers of the weights.

    Args:
        source: the directory or hub id.
        ssm_cfg: options of the blocks that override the config's.

    Raises:
        ValueError: there is no checkpoint, its format is unknown, or its tensors do not fit its config.
    """
    directory = resolve_source(source)
    adapter, config = _read_config(directory)
    is_single = directory.suffix == gguf.SUFFIX and directory.is_file()
    if ssm_cfg:
        try:
            config = with_block_options(config, ssm_cfg)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{directory}, with ssm_cfg = {ssm_cfg}: {error}") from error
    files = [directory] if is_single else find_weights(directory, adapter.weight_files)
    if not files:
        raise ValueError(f"{directory}: expected weights in one of {', '.join(adapter.weight_files)}, found none")
    try:
        weights, computed_in, extra = parse_quantization_config(config.extra)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    config = dataclasses.replace(config, extra=extra)
    entries = list(read_entries(files))
    expected = _expected(directory, config, entries, weights)
    tensors, problems = match_tensors(adapter, config, expected, entries)
    if problems:
        raise ValueError(f"{directory}: the weights do not fit the config: {problems}")
    return Checkpoint(directory, adapter, config, files, tensors, weights, computed_in)


def read_config(directory: Path) -> MambaLMConfig:
    """The config of a model in a directory, whether or not its weights are there.

    Raises:
        ValueError: there is none, or its format is unknown.
    """
    config = _read_config(directory)[1]
    return dataclasses.replace(config, extra=parse_quantization_config(config.extra)[2])


def _expected(
    directory: Path, config: MambaLMConfig, entries: list[tuple[Path, str, StoredTensor]], weights: WeightFormat | None
) -> dict[str, Expected]:
    """The tensors that a config asks for, unless it asks for more than the files can hold: that is refused at once."""
    if config.n_layer > max(_FEW_LAYERS, len(entries)):
        raise ValueError(
            f"{directory}: the weights do not fit the config: it asks for {config.n_layer} layers, "
            f"and there are {len(entries)} tensors in all"
        )
    try:
        # Two numbers of four bits are one that is stored.
        most = max(_FEW_NUMBERS, 2 * sum(math.prod(stored.shape) for _, _, stored in entries))
        return expected_tensors(config, most, weights)
    except ValueError as error:
        raise ValueError(f"{directory}: the weights do not fit the config: {error}") from error


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """A directory or GGUF file as it is; "owner/name" through `huggingface_hub`, which keeps what it fetched.

    Raises:
        ValueError: neither a directory nor a repository that can be fetched.
    """
    path = Path(source)
    if path.is_dir() or (path.is_file() and path.suffix == gguf.SUFFIX):
        return path
    if path.exists():
        raise ValueError(f"{source}: expected a directory with config and weights, or a .gguf file, got a file")
    if not is_repository_id(source):
        raise ValueError(f'{source}: no such directory, and not the id of a hub repository ("owner/name")')
    return _fetch(str(source))


def _fetch(name: str) -> Path:
    """Fetch the config, and then the weights in the first form that the repository has."""
    instead = "a directory that holds config.json and the weights"
    adapter, _ = _read_config(fetch(name, "*.json", instead=instead))
    for weights in adapter.weight_files:
        stem, suffix = weights.rsplit(".", 1)
        directory = fetch(name, "*.json", "*.jinja", weights, f"{stem}-*.{suffix}", instead=instead)
        if find_weights(directory, (weights,)):
            return directory
    raise ValueError(f"{name}: the repository has no weights in one of {', '.join(adapter.weight_files)}")


def _read_config(directory: Path) -> tuple[Format, MambaLMConfig]:
    """The first format that recognizes a config of the directory and, if there are several, has weights there."""
    if directory.suffix == gguf.SUFFIX and directory.is_file():
        config = gguf.read_config(directory)
        return gguf.GgufFormat(config.layer), config
    raws = {
        name: read_json(directory / name)
        for name in {name for f in FORMATS.values() for name in f.config_files}
        if (directory / name).is_file()
    }
    found = [
        (adapter, raws[name])
        for adapter in FORMATS.values()
        for name in adapter.config_files
        if name in raws and adapter.recognizes(raws[name])
    ]
    if not found:
        raise ValueError(
            f"{directory}: expected a language model in one of the formats {', '.join(FORMATS)}, "
            f"found {_found_instead(directory, raws)}"
        )
    with_weights = [pair for pair in found if find_weights(directory, pair[0].weight_files)]
    adapter, raw = (with_weights or found)[0]
    try:
        return adapter, adapter.read_config(raw)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{directory}: {error}") from error


def _found_instead(directory: Path, raws: dict[str, Any]) -> str:
    """What a directory without a language model contains, and what opens it."""
    if (kind := str(raws.get("config.json", {}).get("model_type"))).startswith("anymamba_"):
        return f"a model of type {kind}, which anymamba predict and SequenceModel.from_pretrained open"
    if raws:
        return f"a config of an unknown kind in {', '.join(sorted(raws))}"
    if checkpoints := sorted(directory.glob("checkpoints/step-*/model.safetensors")):
        return f"a run that is not finished; its latest checkpoint opens as a model: {checkpoints[-1].parent}"
    return "no config.json or params.json"


def match_tensors(
    adapter: Format,
    config: MambaLMConfig,
    expected: dict[str, Expected],
    entries: Iterable[tuple[Path, str, StoredTensor]],
) -> tuple[dict[str, tuple[Path, str, StoredTensor]], str]:
    """Match stored tensors with the `expected` ones of the model, one to one, by name, shape and dtype.

    Returns:
        The tensors by our names, and a description of what does not fit, empty if all do.
    """
    tensors: dict[str, tuple[Path, str, StoredTensor]] = {}
    unexpected, twice, misshapen, foreign = [], [], [], []
    for path, key, stored in entries:
        name = adapter.our_key(key)
        if name not in expected:
            unexpected.append(key)
        elif name in tensors:
            twice.append(key)
        else:
            tensors[name] = (path, key, stored)
            shape, dtype = expected[name]
            if stored.shape != shape:
                misshapen.append(f"{key} (expected {shape}, got {stored.shape})")
            if dtype is None and stored.dtype not in DTYPES.values():
                foreign.append(f"{key} ({stored.dtype})")
            elif dtype is not None and stored.dtype != dtype:
                foreign.append(f"{key} (expected {dtype}, got {stored.dtype})")
    optional = set(PARTS) if config.tie_embeddings else set()
    missing = [adapter.foreign_key(name) for name in expected if name not in tensors and name not in optional]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "present twice": twice,
        "misshapen": misshapen,
        "of a dtype that weights cannot have": foreign,
    }
    return tensors, describe_mismatch(problems)


def count_non_finite_values(checkpoint: Checkpoint) -> str:
    """Which of the stored tensors hold values that are not finite, empty if none does. All are read, and not kept."""
    dtypes = {name: stored.dtype for name, (_, _, stored) in checkpoint.tensors.items()}
    return describe_non_finite(iter_tensors(checkpoint, dtypes, mapped=True, device=None))


def read_tensors_by_name(
    checkpoint: Checkpoint,
    dtypes: dict[str, torch.dtype],
    *,
    mapped: bool,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """The tensors that `dtypes` names, by our names and in its dtypes."""
    return dict(iter_tensors(checkpoint, dtypes, mapped=mapped, device=device))


def iter_tensors(
    checkpoint: Checkpoint,
    dtypes: dict[str, torch.dtype],
    *,
    mapped: bool,
    device: torch.device | None,
    narrowed: Collection[str] = (),
    format: WeightFormat | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """One after another, file by file; those of `narrowed` as codes and scales of `format`, read rows by rows."""
    for path in checkpoint.files:
        with open_weight_file(path) as file:
            for name, dtype in dtypes.items():
                where, key, (shape, _) = checkpoint.tensors[name]
                if where != path:
                    continue
                if format is not None and name in narrowed:
                    parts = file.parts(key, dtype, device, rows_at_once(shape[1]))
                    yield from quantize_weight(name, parts, shape, format, device).items()
                else:
                    yield name, file.read(key, dtype, device, mapped=mapped)
