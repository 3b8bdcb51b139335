"""What `anymamba info` says of a stack, and of models around one that do not generate text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anymamba.cli.common import readable_bytes
from anymamba.ground.files import read_json
from anymamba.models import BidirectionalConfig, LatentModel, MaskedLM, SequenceModel, SequenceRegressor, StackConfig
from anymamba.models.weights import describe_non_finite
from anymamba.training.file_task import FACTS

_BLOCK_FIELDS = ("d_state", "dt_width", "headdim", "nheads", "ngroups", "expand", "is_mimo", "mimo_rank")


def kind_of(directory: Path) -> type[SequenceModel] | None:
    """The kind of model around a stack that a directory has; None for anything else."""
    if not (directory / "config.json").is_file():
        return None
    return SequenceModel.KINDS.get(str(read_json(directory / "config.json").get("model_type")))


def stack_rows(config: StackConfig) -> list[tuple[str, str]]:
    """The shape of a stack and of its blocks."""
    shape = f"{config.n_layer} layers of width {config.d_model}"
    if config.mlp_width:
        shape += f", MLP {config.mlp_width}"
    return [("shape", "; ".join([shape, *_composition(config)])), *_blocks(config)]


def _composition(config: StackConfig) -> list[str]:
    """What distinguishes a stack from layers that are passed through once, one after another."""
    ignored = [name for name in ("first", "last") if getattr(config, f"ignore_{name}_residual")]
    places = len(config.class_tokens) + sum(map(len, config.layer_class_tokens))
    said = {
        f"in both directions, merge {getattr(config, 'merge', '')}": isinstance(config, BidirectionalConfig),
        f"{len(config.layers_of_passes())} passes, {_schedule(config)}": _is_scheduled(config),
        f"{' and '.join(ignored)} residual ignored": bool(ignored),
        f"{config.streams} gated streams": bool(config.streams),
        f"{places} class token{'s' * (places > 1)}": bool(places),
        f"dropout {config.dropout}": bool(config.dropout),
        f"gradients through the last {config.grad_horizon}": config.grad_horizon is not None,
    }
    return [text for text, holds in said.items() if holds]


def _is_scheduled(config: StackConfig) -> bool:
    return config.n_virtual is not None or not isinstance(config.schedule, str)


def _schedule(config: StackConfig) -> str:
    return config.schedule if isinstance(config.schedule, str) else f"layers {' '.join(map(str, config.schedule))}"


def _blocks(config: StackConfig) -> list[tuple[str, str]]:
    """A row for all blocks, or one for each layer if they differ."""
    if not config.layer_cfgs:
        return [("block", described_block(config.block_config()))]
    return [
        (f"layer {i}", f"{config.family(i).__name__}, {described_block(config.block_config(i))}")
        for i in range(config.n_layer)
    ]


def described_block(block: Any) -> str:
    """The sizes of a block, by name."""
    return ", ".join(f"{name} {getattr(block, name)}" for name in _BLOCK_FIELDS if hasattr(block, name))


def sequence_model_rows(directory: Path, kind: type[SequenceModel]) -> list[tuple[str, str]]:
    """What a model around a stack reads and answers."""
    model = kind.from_pretrained(directory)
    c = model.config
    stack = c.stack_config()
    weights = sum(p.nbytes for p in model.parameters())
    dtype = next(model.parameters()).dtype
    reads = f"tokens, {c.vocab_size} of them" if c.vocab_size is not None else f"{_numbers(c.input_size)} a step"
    rows = [
        ("model", f"{kind.__name__}, {stack.layer}, in {directory}"),
        *_trained_for(directory),
        *stack_rows(stack),
        ("reads", reads),
        *([("class tokens", f"{len(c.class_tokens)} before the input")] if c.class_tokens else []),
        ("answers", _answers(model)),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("stored as", f"{dtype}, {readable_bytes((directory / 'model.safetensors').stat().st_size)}"),
        ("weights", readable_bytes(weights)),
    ]
    if isinstance(model, LatentModel) and not c.bidirectional:
        rows.append(("state", f"{readable_bytes(model.init_cache(1).nbytes)} per sequence, at any length"))
    return [*rows, ("values", describe_non_finite(model.state_dict().items()) or "all finite")]


def _trained_for(directory: Path) -> list[tuple[str, str]]:
    """What a run on files wrote beside the model, if one made it."""
    if not (directory / FACTS).is_file():
        return []
    facts = read_json(directory / FACTS)
    targets, columns = (" ".join(facts.get(name) or []) for name in ("targets", "columns"))
    of, read = f" of {targets}" if targets else "", f", reading {columns}" if columns else ""
    return [("trained for", f"{facts.get('task')}{of}{read}")]


def _numbers(count: int | None) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _answers(model: SequenceModel) -> str:
    c = model.config
    numbers = _numbers(c.output_size)
    if isinstance(model, MaskedLM):
        return "the token at each position, and an embedding of each sequence"
    if isinstance(model, LatentModel):
        return f"{numbers} for each step"
    pooled = {"mean": "the mean of its steps", "last": "its last step", "class_token": "a class token"}[c.pooling]
    if isinstance(model, SequenceRegressor):
        return f"{numbers} for each sequence, from {pooled}"
    names = f": {', '.join(c.labels)}" if c.labels else ""
    return f"one of {c.output_size} classes for each sequence, from {pooled}{names}"
