"""Write models: to a directory in a format, and to a repository of the hub in one commit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from anymamba.checkpoints.empty_model import expected_tensors
from anymamba.checkpoints.formats import FORMATS, Format, default_format, get_format, gguf
from anymamba.checkpoints.formats.base import StoredTensor, part_name
from anymamba.checkpoints.hub import is_repository_id, upload
from anymamba.checkpoints.open import match_tensors, split_expected
from anymamba.core.io import atomic_write, write_json, write_tensors
from anymamba.models.backbone import EMBEDDING, HEAD, has_another_head
from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM
from anymamba.models.sequence.sequence_model import SequenceModel
from anymamba.quantization.quantize import quantization_config, scales_name, weight_format

# Files that accompany the weights, whatever the format.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_QUANTIZED_FORMATS = ("official", "anymamba")  # formats whose config can name quantized weights
_METADATA = {"format": "pt"}  # which transformers asks for
_CARD = """---
library_name: anymamba
pipeline_tag: text-generation
tags: [{family}]
---
# {name}

A {family} language model of {parameters:,} parameters, in the {format} format.

```python
import anymamba

text = anymamba.pipeline("{name}")
print(text("Once upon a time", temperature=0.8).text)
```
"""


def save_model(model: MambaLM, directory: str | os.PathLike[str], format: str | None = None) -> None:
    """Write config and weights, a tied head once (`MambaLM.save_pretrained` has the contract).

    The config is written last, so that a directory with a config is complete.
    """
    adapter, target = get_format(format or default_format(model.config)), Path(directory)
    tensors = {adapter.foreign_key(name): x.cpu() for name, x in _stored_state(model, adapter).items()}
    raw = _raw_config(model, adapter)
    check_no_other_format(target, adapter)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / adapter.weight_files[0], tensors, _METADATA)
    write_json(target / adapter.config_files[0], raw)


def save_config(model: MambaLM, directory: Path) -> None:
    """Write the config alone, for weights that are written in another way."""
    adapter = get_format(default_format(model.config))
    write_json(directory / adapter.config_files[0], _raw_config(model, adapter))


def save_sequence_model(model: SequenceModel, directory: str | os.PathLike[str]) -> None:
    """Write the weights and then the config of a sequence model."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / "model.safetensors", {name: x.cpu() for name, x in model.state_dict().items()}, _METADATA)
    write_json(target / "config.json", {"model_type": model.MODEL_TYPE, **model.config.to_dict()})


def push_model(
    model: MambaLM,
    name: str,
    *,
    companions: str | os.PathLike[str] | None = None,
    format: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Write a model to a repository of the hub (`MambaLM.push_to_hub` has the contract)."""
    if not is_repository_id(name):
        raise ValueError(f'{name}: expected the id of a hub repository ("owner/name")')
    parameters, format = sum(p.numel() for p in model.parameters()), format or default_format(model.config)
    with TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_model(model, directory, format)
        card = directory / "README.md"
        card.write_text(
            _CARD.format(name=name, family=model.config.layer, parameters=parameters, format=format), encoding="utf-8"
        )
        if companions is not None:
            copy_companions(Path(companions), directory)
            if (existing_card := Path(companions) / "README.md").is_file():
                shutil.copyfile(existing_card, card)
        return upload(directory, name, private=private, token=token)


def check_no_other_format(directory: Path, adapter: Format) -> None:
    """Raise `ValueError` if a directory has a model whose config file `adapter` would not replace."""
    for name in {other.config_files[0] for other in FORMATS.values()} - {adapter.config_files[0]}:
        if (directory / name).is_file():
            raise ValueError(
                f"{directory}: there is a model ({name}) that one in the {adapter.name} format would not replace; "
                "remove it, or name another directory"
            )


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer and other files that accompany the weights; return their names.

    Args:
        source: Directory of a model, or a GGUF file, whose tokenizer is converted if it can be read.
        target: Directory to write to.
    """
    if gguf.is_gguf(source):
        try:
            tokenizer = gguf.tokenizer_files(source)
        except ValueError:
            return []
        for name, content in tokenizer.items():
            write_json(target / name, content)
        return list(tokenizer)
    names = [name for name in COMPANION_FILES if (source / name).is_file()]
    for name in names:
        with atomic_write(target / name) as temporary:
            shutil.copyfile(source / name, temporary)
    return names


def _raw_config(model: MambaLM, adapter: Format) -> dict[str, Any]:
    return {**adapter.write_config(model.config, model.dtype), **quantization_config(model)}


def _stored_state(model: MambaLM, adapter: Format) -> dict[str, Tensor]:
    """Return the tensors of a model's checkpoint by our names, or those of their parts.

    Raise `ValueError` if they do not fit the model's config.
    """
    state, weights = model.state_dict(), weight_format(model)
    # 1) Quantized weights, if the format can name them.
    if weights is not None and adapter.name not in _QUANTIZED_FORMATS:
        raise ValueError(
            f"save_pretrained: the {adapter.name} format cannot hold weights in {weights}; the official one can"
        )
    if weights is not None and model.dtype == torch.float64:
        raise ValueError(
            f"save_pretrained: weights in {weights} are for activations up to float32, got {model.dtype}; "
            "model.float() computes in float32"
        )
    # 2) A tied head is left out.
    if model.config.tie_embeddings and HEAD in state and EMBEDDING in state:
        if has_another_head(state):
            raise ValueError(
                "save_pretrained: the config says that head and embedding are one (tied), but the model holds two "
                "different ones; to keep both, set model.config = dataclasses.replace(model.config, "
                "tie_embeddings=False); to keep the embedding alone, call model.tie_weights()"
            )
        del state[HEAD]
        state.pop(scales_name(HEAD), None)
    # 3) What is written must load again.
    state = _split_parts(state, adapter, model.config)
    entries = [(Path(), adapter.foreign_key(name), StoredTensor(tuple(x.shape), x.dtype)) for name, x in state.items()]
    expected = split_expected(adapter, model.config, expected_tensors(model.config, None, weights))
    try:
        match_tensors(adapter, expected, entries, is_tied=model.config.tie_embeddings)
    except ValueError as error:
        raise ValueError(
            f"save_pretrained: the weights do not fit the config, so they could not be loaded: {error}; merge adapters "
            "and parametrizations into the weights, and give a resized model a config that says so"
        ) from error
    return state


def _split_parts(state: dict[str, Tensor], adapter: Format, config: MambaLMConfig) -> dict[str, Tensor]:
    """Return the tensors with those that a format stores in parts replaced by their parts."""
    split: dict[str, Tensor] = {}
    for name, x in state.items():
        parts = adapter.stored_parts(config, name, x.shape[0]) if x.ndim else {}
        if parts and min(parts.values()) > 0:  # otherwise the shape is wrong, which the caller reports
            names = (part_name(name, part) for part in parts)
            split |= dict(zip(names, x.split(list(parts.values())), strict=True))
        else:
            split[name] = x
    return split
