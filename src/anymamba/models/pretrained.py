"""From a directory or hub id to a model, and back."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.ground.files import read_json, replacing, write_json, write_tensors
from anymamba.models.config import MambaLMConfig
from anymamba.models.formats import FORMATS, Format, format_named
from anymamba.models.hub import fetch, is_repository_id
from anymamba.models.lm import MambaLM
from anymamba.models.skeleton import expected_shapes, skeleton
from anymamba.models.tying import EMBEDDING, HEAD, same_values
from anymamba.models.weights import (
    DTYPES,
    Stored,
    describe_mismatch,
    describe_non_finite,
    find_weights,
    read_entries,
    weight_file,
)

# Files that go with the weights, whatever the format.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

# Up to so many, what a config asks for is listed and compared with what the files hold, however little that is.
_FEW_LAYERS, _FEW_NUMBERS = 256, 2**20


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
        return self.tensors[EMBEDDING][2].dtype


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
    entries = list(read_entries(files))
    expected = _expected(directory, config, entries)
    tensors, problems = _match(adapter, config, expected, entries)
    if problems:
        raise ValueError(f"{directory}: the weights do not fit the config: {problems}")
    return Checkpoint(directory, adapter, config, files, tensors)


def _expected(
    directory: Path, config: MambaLMConfig, entries: list[tuple[Path, str, Stored]]
) -> dict[str, tuple[int, ...]]:
    """The tensors that a config asks for, unless it asks for more than the files can hold: that is refused at once."""
    if config.n_layer > max(_FEW_LAYERS, len(entries)):
        raise ValueError(
            f"{directory}: the weights do not fit the config: it asks for {config.n_layer} layers, "
            f"and there are {len(entries)} tensors in all"
        )
    try:
        return expected_shapes(config, max(_FEW_NUMBERS, sum(math.prod(stored.shape) for _, _, stored in entries)))
    except ValueError as error:
        raise ValueError(f"{directory}: the weights do not fit the config: {error}") from error


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mapped: bool = False,
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
    if checkpoint.config.tie_embeddings:
        _check_tied(checkpoint)
        targets.pop(HEAD)
    state = _read(checkpoint, targets, mapped=mapped, device=torch.device(device))
    if not mapped:
        warn_of_non_finite(checkpoint.directory, state)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.to(device).eval()


def save_model(model: MambaLM, directory: str | os.PathLike[str], format: str = "official") -> None:
    """Write config and weights, a tied head once (`MambaLM.save_pretrained` has the contract).

    The config comes last, so that a directory with a config is complete.
    """
    adapter, target = format_named(format), Path(directory)
    tensors = {adapter.their_key(name): x for name, x in _stored_state(model, adapter).items()}
    raw = adapter.write_config(model.config, model.dtype)
    expect_no_other(target, adapter)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / adapter.weight_files[0], {key: x.cpu() for key, x in tensors.items()}, {"format": "pt"})
    write_json(target / adapter.config_files[0], raw)


def _stored_state(model: MambaLM, adapter: Format) -> dict[str, Tensor]:
    """The tensors of a model's checkpoint by our names: those that the model of its config has, and no others.

    Raises:
        ValueError: nobody could load them with that config.
    """
    state = model.state_dict()
    if model.config.tie_embeddings and HEAD in state and EMBEDDING in state:
        if not same_values(state[HEAD], state[EMBEDDING]):
            raise ValueError(
                "save_pretrained: the config says that head and embedding are one (tied), but the model holds two "
                "different ones; to keep both, set model.config = dataclasses.replace(model.config, "
                "tie_embeddings=False); to keep the embedding alone, call model.tie_weights()"
            )
        del state[HEAD]
    entries = [(Path(), adapter.their_key(name), Stored(tuple(x.shape), x.dtype)) for name, x in state.items()]
    if problems := _match(adapter, model.config, expected_shapes(model.config), entries)[1]:
        raise ValueError(
            f"save_pretrained: the weights do not fit the model's config, so nobody could load them: {problems}; merge "
            "adapters and parametrisations into the weights, and give a resized model a config that says so"
        )
    return state


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
        directory = fetch(name, "*.json", "*.jinja", weights, f"{stem}-*.{suffix}", instead=instead)
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
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{directory}: {error}") from error


def _match(
    adapter: Format,
    config: MambaLMConfig,
    expected: dict[str, tuple[int, ...]],
    entries: Iterable[tuple[Path, str, Stored]],
) -> tuple[dict[str, tuple[Path, str, Stored]], str]:
    """Match stored tensors with the `expected` ones of the model, one to one, by name and shape.

    Returns:
        Them by our names, and what does not fit, empty if all does.
    """
    tensors: dict[str, tuple[Path, str, Stored]] = {}
    unexpected, twice, misshapen, foreign = [], [], [], []
    for path, key, stored in entries:
        name = adapter.our_key(key)
        if name not in expected:
            unexpected.append(key)
        elif name in tensors:
            twice.append(key)
        else:
            tensors[name] = (path, key, stored)
            if stored.shape != expected[name]:
                misshapen.append(f"{key} (expected {expected[name]}, got {stored.shape})")
            if stored.dtype not in DTYPES.values():
                foreign.append(f"{key} ({stored.dtype})")
    optional = {HEAD} if config.tie_embeddings else set()
    missing = [adapter.their_key(name) for name in expected if name not in tensors and name not in optional]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "present twice": twice,
        "misshapen": misshapen,
        "of a dtype that weights cannot have": foreign,
    }
    return tensors, describe_mismatch(problems)


def warn_of_non_finite(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Say that weights are not finite, and continue: a broken model must be opened to be looked at or mended."""
    if found := describe_non_finite(tensors.items()):
        warnings.warn(f"{directory}: {found}", stacklevel=4)


def non_finite_values(checkpoint: Checkpoint) -> str:
    """Which of the stored tensors hold values that are not finite, empty if none does. All are read, and not kept."""
    dtypes = {name: stored.dtype for name, (_, _, stored) in checkpoint.tensors.items()}
    return describe_non_finite(_each(checkpoint, dtypes, mapped=True, device=None))


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
    if HEAD not in checkpoint.tensors:
        return
    stored = {name: checkpoint.tensors[name][2].dtype for name in (HEAD, EMBEDDING)}
    found = _read(checkpoint, stored, mapped=True)
    if not same_values(found[HEAD], found[EMBEDDING]):
        raise ValueError(
            f"{checkpoint.directory}: the config says that head and embedding are one (tied), "
            "but the weights hold two different ones"
        )


def _read(
    checkpoint: Checkpoint,
    dtypes: dict[str, torch.dtype],
    *,
    mapped: bool,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Tensors by our name, those that `dtypes` names and in its dtypes."""
    return dict(_each(checkpoint, dtypes, mapped=mapped, device=device))


def _each(
    checkpoint: Checkpoint, dtypes: dict[str, torch.dtype], *, mapped: bool, device: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """One after another, file by file."""
    for path in checkpoint.files:
        with weight_file(path) as file:
            for name, dtype in dtypes.items():
                where, key, _ = checkpoint.tensors[name]
                if where == path:
                    yield name, file.read(key, dtype, device, mapped=mapped)
