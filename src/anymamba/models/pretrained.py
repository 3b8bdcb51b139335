"""From a directory or hub id to a model, and back."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.files import read_json, replacing, write_json, write_tensors
from anymamba.models.config import MambaLMConfig
from anymamba.models.formats import FORMATS, Format, format_named
from anymamba.models.hub import fetch, is_repository_id
from anymamba.models.lm import MambaLM
from anymamba.models.skeleton import skeleton
from anymamba.models.weights import Stored, describe_mismatch, find_weights, read_entries, weight_file

# Files that go with the weights, whatever the format.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_HEAD, _EMBEDDING = "lm_head.weight", "backbone.embedding.weight"


class Checkpoint(NamedTuple):
    """A checkpoint as found on disk, its weights not yet read.

    Attributes:
        directory: where it is.
        format: the adapter that reads it.
        config: of the model.
        files: of the weights.
        tensors: our name of each tensor, with its file, its name there, and its shape and dtype.
    """

    directory: Path
    format: Format
    config: MambaLMConfig
    files: list[Path]
    tensors: dict[str, tuple[Path, str, Stored]]

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored embedding."""
        return self.tensors[_EMBEDDING][2].dtype


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Find out what a directory or hub id holds, reading the config and the headers of the weights.

    Raises:
        ValueError: there is no checkpoint, its format is unknown, or its tensors do not fit its config.
    """
    directory = resolve(source)
    adapter, config = _read_config(directory)
    files = find_weights(directory, adapter.weight_files)
    if not files:
        raise ValueError(f"{directory}: expected weights in one of {', '.join(adapter.weight_files)}, found none")
    tensors = _match(directory, adapter, config, files)
    return Checkpoint(directory, adapter, config, files, tensors)


def load_model(
    source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> MambaLM:
    """Build the model of a checkpoint and read its weights (`MambaLM.from_pretrained` has the contract)."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"from_pretrained: dtype must be a torch.dtype, as torch.bfloat16, got {dtype!r}")
    checkpoint = open_checkpoint(source)
    asked = dtype or checkpoint.dtype
    model = skeleton(checkpoint.config, asked)
    targets = {name: x.dtype for name, x in model.state_dict().items()}
    if dtype is None:
        _warn_of_narrowing(checkpoint, targets)
    if tied := checkpoint.config.tie_embeddings:
        _check_tied(checkpoint)
        targets.pop(_HEAD)
    state = _read(checkpoint, targets, copy=asked != checkpoint.dtype, device=torch.device(device))
    if tied:
        state[_HEAD] = state[_EMBEDDING]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.to(device).eval()


def save_model(model: MambaLM, directory: str | os.PathLike[str], format: str = "official") -> None:
    """Write config and weights, a tied head once (`MambaLM.save_pretrained` has the contract).

    The config comes last, so that a directory with a config is complete.
    """
    adapter, target = format_named(format), Path(directory)
    raw = adapter.write_config(model.config, model.dtype)
    expect_no_other(target, adapter)
    target.mkdir(parents=True, exist_ok=True)
    state = {name: x for name, x in model.state_dict().items() if name != _HEAD or not model.config.tie_embeddings}
    tensors = {adapter.their_key(name): x.cpu() for name, x in state.items()}
    write_tensors(target / adapter.weight_files[0], tensors, {"format": "pt"})
    write_json(target / adapter.config_files[0], raw)


def expect_no_other(directory: Path, adapter: Format) -> None:
    """Refuse a directory with a model under other names than `adapter` writes: it would still be there.

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
    """Copy the tokenizer's files, and others that go with the weights; their names."""
    copied = [name for name in COMPANIONS if (source / name).is_file()]
    for name in copied:
        with replacing(target / name) as temporary:
            shutil.copyfile(source / name, temporary)
    return copied


def resolve(source: str | os.PathLike[str]) -> Path:
    """A directory as it is; "owner/name" through `huggingface_hub`, which keeps what it fetched.

    Raises:
        ValueError: neither a directory nor a repository that can be had.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{source}: expected a directory with config and weights, got a file")
    if not is_repository_id(source):
        raise ValueError(f'{source}: no such directory, and not the id of a hub repository ("owner/name")')
    return _fetch(str(source))


def _fetch(name: str) -> Path:
    """Fetch the config, and then the weights in the first form that the repository has."""
    instead = "a directory that holds config.json and the weights"
    adapter, _ = _read_config(fetch(name, "*.json", instead=instead))
    for weights in adapter.weight_files:
        stem, suffix = weights.rsplit(".", 1)
        directory = fetch(name, "*.json", weights, f"{stem}-*.{suffix}", instead=instead)
        if find_weights(directory, (weights,)):
            return directory
    raise ValueError(f"{name}: the repository has no weights in one of {', '.join(adapter.weight_files)}")


def _read_config(directory: Path) -> tuple[Format, MambaLMConfig]:
    """The first format that recognises a config of the directory and, if there are several, has weights there."""
    raws = {
        name: read_json(directory / name)
        for name in {name for f in FORMATS.values() for name in f.config_files}
        if (directory / name).is_file()
    }
    found = [
        (adapter, raws[name])
        for adapter in FORMATS.values()
        for name in adapter.config_files
        if name in raws and adapter.recognises(raws[name])
    ]
    if not found:
        what = f"a config of an unknown kind in {', '.join(sorted(raws))}" if raws else "no config.json or params.json"
        raise ValueError(f"{directory}: expected a model in one of the formats {', '.join(FORMATS)}, found {what}")
    with_weights = [pair for pair in found if find_weights(directory, pair[0].weight_files)]
    adapter, raw = (with_weights or found)[0]
    try:
        return adapter, adapter.read_config(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{directory}: {error}") from error


def _match(
    directory: Path, adapter: Format, config: MambaLMConfig, files: list[Path]
) -> dict[str, tuple[Path, str, Stored]]:
    """Match the stored tensors with the model's parameters, one to one, by name and shape."""
    expected = {name: tuple(x.shape) for name, x in skeleton(config).state_dict().items()}
    tensors: dict[str, tuple[Path, str, Stored]] = {}
    unexpected, twice, misshapen = [], [], []
    for path, key, stored in read_entries(files):
        name = adapter.our_key(key)
        if name not in expected:
            unexpected.append(key)
        elif name in tensors:
            twice.append(key)
        else:
            tensors[name] = (path, key, stored)
            if stored.shape != expected[name]:
                misshapen.append(f"{key} (expected {expected[name]}, got {stored.shape})")
    optional = {_HEAD} if config.tie_embeddings else set()
    missing = [adapter.their_key(name) for name in expected if name not in tensors and name not in optional]
    problems = {"missing": missing, "unexpected": unexpected, "present twice": twice, "misshapen": misshapen}
    if text := describe_mismatch(problems):
        raise ValueError(f"{directory}: the weights do not fit the config: {text}")
    return tensors


def _warn_of_narrowing(checkpoint: Checkpoint, targets: dict[str, torch.dtype]) -> None:
    """Nobody asked for a dtype, but a model has one for its activations: that of its embedding."""
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
    if _HEAD not in checkpoint.tensors:
        return
    stored = {name: checkpoint.tensors[name][2].dtype for name in (_HEAD, _EMBEDDING)}
    found = _read(checkpoint, stored, copy=False)
    head, embedding = found[_HEAD], found[_EMBEDDING]
    if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
        raise ValueError(
            f"{checkpoint.directory}: the config says that head and embedding are one (tied), "
            "but the weights hold two different ones"
        )


def _read(
    checkpoint: Checkpoint,
    dtypes: dict[str, torch.dtype],
    *,
    copy: bool,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Tensors by our name, those that `dtypes` names and in its dtypes, file by file."""
    state = {}
    for path in checkpoint.files:
        with weight_file(path) as file:
            for name, dtype in dtypes.items():
                where, key, _ = checkpoint.tensors[name]
                if where == path:
                    state[name] = file.read(key, dtype, copy=copy).to(device)
    return state
