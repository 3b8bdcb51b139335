"""What a directory, file or hub id holds: its format, its config, and its tensors by our names, not yet read."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from anymamba.checkpoints.empty_model import ExpectedTensor, SkipInitialization, expected_tensors
from anymamba.checkpoints.formats import FORMATS, AnymambaFormat, Format, gguf
from anymamba.checkpoints.formats.base import StoredTensor, part_name
from anymamba.checkpoints.hub import fetch, is_repository_id
from anymamba.checkpoints.weight_files import (
    FLOAT_DTYPES,
    describe_mismatch,
    describe_non_finite,
    find_weights,
    list_tensors,
    open_weight_file,
)
from anymamba.core.io import read_json
from anymamba.core.weight_formats import WeightFormat
from anymamba.models.backbone import EMBEDDING, PARTS
from anymamba.models.config import MambaLMConfig, with_block_options
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel
from anymamba.quantization.ops import rows_at_once
from anymamba.quantization.quantize import parse_quantization_config, quantize_weight

# A config that asks for no more than this is compared with its files, however little they hold.
_MIN_ALLOWED_LAYERS = 256
_MIN_ALLOWED_NUMEL = 2**20
_INSTEAD_OF_HUB = "a directory that holds config.json and the weights"

# A tensor in a file: the file, its name there, and its shape and dtype.
Entry = tuple[Path, str, StoredTensor]
_IN_PARTS: Entry = (
    Path(),
    "",
    StoredTensor((), torch.float32),
)  # in place of one for a tensor that is not stored whole
_SequenceModel = TypeVar("_SequenceModel", bound=SequenceModel)


class Checkpoint(NamedTuple):
    """A checkpoint on disk, whose weights are not yet read.

    Attributes:
        directory: Directory, or GGUF file.
        format: Adapter that reads it.
        config: Config of the model: a `MambaLMConfig`, or a `SequenceConfig`.
        files: Files of the weights.
        tensors: Each tensor by our name, or each part of one that is stored in parts: its file, its name there, and its
            shape and dtype.
        weights: Format of quantized weights; None for plain ones.
        activation_dtype: Dtype of the activations that the config of quantized weights names.
    """

    directory: Path
    format: Format
    config: Any
    files: list[Path]
    tensors: dict[str, Entry]
    weights: WeightFormat | None = None
    activation_dtype: str | None = None

    def parts_of(self, name: str) -> list[str]:
        """Return the names in `tensors` of the parts of a tensor, or its own if it is stored as one."""
        return [name] if name in self.tensors else [part for part in self.tensors if part.startswith(f"{name}[")]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations: that of the stored embedding, unless the weights are quantized."""
        name = self.activation_dtype
        dtype: torch.dtype = getattr(torch, name) if name else self.tensors[EMBEDDING][2].dtype
        return dtype


def open_checkpoint(source: str | os.PathLike[str], ssm_cfg: dict[str, Any] | None = None) -> Checkpoint:
    """Open the checkpoint of a language model, reading its config and the headers of its weights.

    Args:
        source: Directory, GGUF file or hub id.
        ssm_cfg: Options of the blocks that override those of the config.

    Raises:
        ValueError: No checkpoint, an unknown format, or tensors that do not fit the config.
    """
    # 1) The format, and the config.
    directory = resolve_source(source)
    adapter, config = _read_config(directory)
    if ssm_cfg:
        with _name_errors(f"{directory}, with ssm_cfg = {ssm_cfg}", ValueError, TypeError):
            config = with_block_options(config, ssm_cfg)
    with _name_errors(str(directory), ValueError):
        weights, activation_dtype, extra = parse_quantization_config(config.extra)
    config = dataclasses.replace(config, extra=extra)
    # 2) The tensors that are stored.
    files = [directory] if gguf.is_gguf(directory) else find_weights(directory, adapter.weight_files)
    if not files:
        raise ValueError(f"{directory}: expected weights in one of {', '.join(adapter.weight_files)}, found none")
    entries = list(list_tensors(files))
    # 3) The tensors that the config asks for, matched one to one.
    with _name_errors(f"{directory}: the weights do not fit the config", ValueError):
        expected = expected_tensors(config, _limit_size(config.n_layer, entries), weights)
        expected = split_expected(adapter, config, expected)
        tensors = match_tensors(adapter, expected, entries, is_tied=config.tie_embeddings)
    return Checkpoint(directory, adapter, config, files, tensors, weights, activation_dtype)


def open_sequence_checkpoint(
    directory: Path, base: type[_SequenceModel], dtype: torch.dtype | None
) -> tuple[Checkpoint, _SequenceModel]:
    """Open the checkpoint of a sequence model of class `base`; return it with a model that has no values yet.

    A `dtype` of None is the stored one. Raise `ValueError` for no such model, one of another class, or tensors that do
    not fit the config.
    """
    # 1) The class, and the config.
    adapter = AnymambaFormat()
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory}: expected a directory with config.json and model.safetensors")
    raw = read_json(directory / "config.json")
    model_type = raw.pop("model_type", None)
    kind: Any = SequenceModel.BY_MODEL_TYPE.get(str(model_type))
    if kind is None or not issubclass(kind, base):
        names = [name for name, other in SequenceModel.BY_MODEL_TYPE.items() if issubclass(other, base)]
        raise ValueError(f"{directory}: expected a model of type {' or '.join(names)}, got {model_type!r}")
    with _name_errors(str(directory), ValueError, TypeError):
        config = SequenceConfig.from_dict(raw)
    # 2) The tensors that are stored.
    files = find_weights(directory, adapter.weight_files) or [directory / adapter.weight_files[0]]
    entries = list(list_tensors(files))
    stored_dtype = next((stored.dtype for _, name, stored in entries if name.endswith("norm.weight")), None)
    # 3) The tensors that the config asks for, matched one to one.
    num_layers = config.stack_config().n_layer
    with _name_errors(f"{directory}: the weights do not fit the config", ValueError):
        with SkipInitialization(_limit_size(num_layers, entries)):
            model: _SequenceModel = kind(config, device="cpu", dtype=dtype or stored_dtype)
        expected = {name: ExpectedTensor(tuple(x.shape), None) for name, x in model.state_dict().items()}
        tensors = match_tensors(adapter, expected, entries, is_tied=False)
    return Checkpoint(directory, adapter, config, files, tensors), model


def read_config(directory: Path) -> MambaLMConfig:
    """Return the config of a language model in a directory, whether or not its weights are there."""
    config = _read_config(directory)[1]
    return dataclasses.replace(config, extra=parse_quantization_config(config.extra)[2])


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Return a directory or GGUF file as it is, and fetch "owner/name" from the hub.

    Raises:
        ValueError: Neither a directory nor a repository that can be fetched.
    """
    path = Path(source)
    if path.is_dir() or gguf.is_gguf(path):
        return path
    if path.exists():
        raise ValueError(f"{source}: expected a directory with config and weights, or a .gguf file, got a file")
    if not is_repository_id(source):
        raise ValueError(f'{source}: no such directory, and not the id of a hub repository ("owner/name")')
    # First the config, which names the format, and then the weights in the first form that the repository has.
    name = str(source)
    adapter, _ = _read_config(fetch(name, "*.json", instead=_INSTEAD_OF_HUB))
    for weights in adapter.weight_files:
        stem, suffix = weights.rsplit(".", 1)
        directory = fetch(name, "*.json", "*.jinja", weights, f"{stem}-*.{suffix}", instead=_INSTEAD_OF_HUB)
        if find_weights(directory, (weights,)):
            return directory
    raise ValueError(f"{name}: the repository has no weights in one of {', '.join(adapter.weight_files)}")


def split_expected(
    adapter: Format, config: MambaLMConfig, expected: dict[str, ExpectedTensor]
) -> dict[str, ExpectedTensor]:
    """Return the expected tensors with those that a format stores in parts replaced by their parts, in their order."""
    split: dict[str, ExpectedTensor] = {}
    for name, (shape, dtype) in expected.items():
        parts = adapter.stored_parts(config, name, shape[0])
        split |= {part_name(name, part): ExpectedTensor((rows, *shape[1:]), dtype) for part, rows in parts.items()}
        if not parts:
            split[name] = ExpectedTensor(shape, dtype)
    return split


def match_tensors(
    adapter: Format, expected: dict[str, ExpectedTensor], entries: Iterable[Entry], *, is_tied: bool
) -> dict[str, Entry]:
    """Return the stored tensors by our names; raise `ValueError` unless they match `expected` one to one.

    Names, shapes and dtypes must match. A tied head, which is the embedding, need not be stored.
    """
    tensors: dict[str, Entry] = {}
    unexpected, duplicate, wrong_shape, wrong_dtype = [], [], [], []
    for path, key, stored in entries:
        name = adapter.our_key(key)
        if name not in expected:
            unexpected.append(key)
        elif name in tensors:
            duplicate.append(key)
        else:
            tensors[name] = (path, key, stored)
            shape, dtype = expected[name]
            if stored.shape != shape:
                wrong_shape.append(f"{key} (expected {shape}, got {stored.shape})")
            if dtype is None and stored.dtype not in FLOAT_DTYPES.values():
                wrong_dtype.append(f"{key} ({stored.dtype})")
            elif dtype is not None and stored.dtype != dtype:
                wrong_dtype.append(f"{key} (expected {dtype}, got {stored.dtype})")
    optional = set(PARTS) if is_tied else set()
    names_by_problem = {
        "missing": [adapter.foreign_key(name) for name in expected if name not in tensors and name not in optional],
        "unexpected": unexpected,
        "present twice": duplicate,
        "of the wrong shape": wrong_shape,
        "of a dtype that weights cannot have": wrong_dtype,
    }
    if problems := describe_mismatch(names_by_problem):
        raise ValueError(problems)
    return {name: tensors[name] for name in expected if name in tensors}


def iter_tensors(
    checkpoint: Checkpoint,
    dtypes: dict[str, torch.dtype],
    *,
    mapped: bool,
    device: torch.device | None = None,
    to_quantize: Mapping[str, WeightFormat] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `dtypes` names, by our names and in its dtypes, file by file; views of it if `mapped`.

    Those to quantize are read some rows at a time, and yielded as codes and scales in the formats of `to_quantize`.
    """
    to_quantize = to_quantize or {}
    for path in checkpoint.files:
        with open_weight_file(path) as file:
            for name, dtype in dtypes.items():
                stored_in, key, (shape, _) = checkpoint.tensors.get(name, _IN_PARTS)
                if stored_in != path:
                    continue
                if (format := to_quantize.get(name)) is not None:
                    chunks = file.read_rows(key, dtype, device, rows_at_once(shape[1]))
                    yield from quantize_weight(name, chunks, shape, format, device).items()
                else:
                    yield name, file.read(key, dtype, device, mapped=mapped)
    in_parts = {name: dtype for name, dtype in dtypes.items() if name not in checkpoint.tensors}
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for path in checkpoint.files if in_parts else ():
            files[path] = stack.enter_context(open_weight_file(path))
        for name, dtype in in_parts.items():
            entries = [checkpoint.tensors[part] for part in checkpoint.parts_of(name)]
            x = torch.cat([files[path].read(key, dtype, device, mapped=mapped) for path, key, _ in entries])
            if (format := to_quantize.get(name)) is not None:
                yield from quantize_weight(name, x.split(rows_at_once(x.shape[1])), x.shape, format, device).items()
            else:
                yield name, x


def describe_non_finite_tensors(checkpoint: Checkpoint) -> str:
    """Return which stored tensors hold values that are not finite, empty if none does; each is read and dropped."""
    dtypes = {name: stored.dtype for name, (_, _, stored) in checkpoint.tensors.items()}
    return describe_non_finite(iter_tensors(checkpoint, dtypes, mapped=False))


@contextmanager
def _name_errors(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as `ValueError`, with `where` before the message."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{where}: {error}") from error


def _limit_size(n_layer: int, entries: list[Entry]) -> int:
    """Return the most elements of a tensor of the model; raise `ValueError` for more layers than stored tensors."""
    if n_layer > max(_MIN_ALLOWED_LAYERS, len(entries)):
        raise ValueError(f"it asks for {n_layer} layers, and there are {len(entries)} tensors in all")
    # A stored byte may hold two numbers of four bits.
    return max(_MIN_ALLOWED_NUMEL, 2 * sum(math.prod(stored.shape) for _, _, stored in entries))


def _read_config(directory: Path) -> tuple[Format, MambaLMConfig]:
    """Return the first format that recognizes a config of the directory; if several do, one that has weights there."""
    if gguf.is_gguf(directory):
        config = gguf.read_config(directory)
        return gguf.GgufFormat(config.layer), config
    names = {name for adapter in FORMATS.values() for name in adapter.config_files}
    raws = {name: read_json(directory / name) for name in names if (directory / name).is_file()}
    candidates = [
        (adapter, raws[name])
        for adapter in FORMATS.values()
        for name in adapter.config_files
        if name in raws and adapter.recognizes(raws[name])
    ]
    if not candidates:
        raise ValueError(
            f"{directory}: expected a language model in one of the formats {', '.join(FORMATS)}, "
            f"found {_describe_other_content(directory, raws)}"
        )
    with_weights = [pair for pair in candidates if find_weights(directory, pair[0].weight_files)]
    adapter, raw = (with_weights or candidates)[0]
    with _name_errors(str(directory), ValueError, TypeError, KeyError, OverflowError):
        return adapter, adapter.read_config(raw)


def _describe_other_content(directory: Path, raws: dict[str, Any]) -> str:
    """Return what a directory without a language model contains, and what opens it."""
    if (model_type := str(raws.get("config.json", {}).get("model_type"))).startswith("anymamba_"):
        return f"a model of type {model_type}, which anymamba predict and SequenceModel.from_pretrained open"
    if raws:
        return f"a config of an unknown kind in {', '.join(sorted(raws))}"
    if checkpoints := sorted(directory.glob("checkpoints/step-*/model.safetensors")):
        return f"a run that is not finished; its latest checkpoint opens as a model: {checkpoints[-1].parent}"
    return "no config.json or params.json"
