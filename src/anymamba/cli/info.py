"""`anymamba info` describes this machine or a model, and `anymamba inspect` what a model does with a text."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from anymamba.analysis.report_data import render_page, report_data
from anymamba.checkpoints.empty_model import empty_model, parameter_count
from anymamba.checkpoints.known import find_known_checkpoint
from anymamba.checkpoints.load import resolve_weight_format
from anymamba.checkpoints.open import describe_non_finite_tensors, open_checkpoint
from anymamba.checkpoints.weight_files import describe_non_finite
from anymamba.cli.common import DTYPES, format_bytes, load, read_text
from anymamba.cli.options import check_at_least
from anymamba.core.dtypes import available_devices
from anymamba.core.io import atomic_write, read_json
from anymamba.core.linear import matmul_library, multiplies_bfloat16
from anymamba.core.registry import describe_kernels, missing_kernel
from anymamba.core.threads import configure_threads
from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models import BidirectionalConfig, LatentModel, MaskedLM, SequenceModel, SequenceRegressor, StackConfig
from anymamba.models.config import is_ambiguous
from anymamba.models.families import BUILT_IN, FAMILIES
from anymamba.models.lm import MambaLM
from anymamba.training.tasks.tabular_base import TASK_FILE
from anymamba.version import __version__

_BLOCK_FIELDS = (
    *("d_state", "dt_width", "headdim", "nheads", "ngroups", "expand", "is_mimo", "mimo_rank"),
    *("num_heads", "kv_heads", "head_width", "window"),
)


def _find_model_type(directory: Path) -> type[SequenceModel] | None:
    """Return the type of a model that is not a language model; None for anything else."""
    if not (directory / "config.json").is_file():
        return None
    return SequenceModel.BY_MODEL_TYPE.get(str(read_json(directory / "config.json").get("model_type")))


def _describe_stack(config: StackConfig) -> list[tuple[str, str]]:
    """Return rows for the shape of a stack and of its blocks."""
    shape = f"{config.n_layer} layers of width {config.d_model}"
    if config.mlp_width:
        shape += f", MLP {config.mlp_width}"
    return [("shape", "; ".join([shape, *_describe_composition(config)])), *_describe_blocks(config)]


def _describe_composition(config: StackConfig) -> list[str]:
    """Return what distinguishes a stack from layers that run once each, in order."""
    ignored = [name for name in ("first", "last") if getattr(config, f"ignore_{name}_residual")]
    class_tokens = len(config.class_tokens) + sum(map(len, config.layer_class_tokens))
    is_named = isinstance(config.schedule, str)
    schedule = config.schedule if is_named else f"layers {' '.join(map(str, config.schedule))}"
    is_scheduled = config.n_virtual is not None or not is_named
    features = {
        f"in both directions, merge {getattr(config, 'merge', '')}": isinstance(config, BidirectionalConfig),
        f"{len(config.layer_order())} passes, {schedule}": is_scheduled,
        f"{' and '.join(ignored)} residual ignored": bool(ignored),
        f"{config.streams} gated streams": bool(config.streams),
        f"{class_tokens} class token{'s' * (class_tokens > 1)}": bool(class_tokens),
        f"dropout {config.dropout}": bool(config.dropout),
        f"gradients through the last {config.grad_horizon}": config.grad_horizon is not None,
    }
    return [text for text, is_used in features.items() if is_used]


def _describe_blocks(config: StackConfig) -> list[tuple[str, str]]:
    """Return a row for all blocks, or one for each layer if they differ."""
    if not config.layer_cfgs:
        return [("block", _describe_block(config.block_config()))]
    return [
        (f"layer {i}", f"{config.family(i).__name__}, {_describe_block(config.block_config(i))}")
        for i in range(config.n_layer)
    ]


def _describe_block(block: Any) -> str:
    is_built_in = any(isinstance(block, FAMILIES[name].CONFIG) for name in BUILT_IN)
    names = _BLOCK_FIELDS if is_built_in else [f.name for f in dataclasses.fields(block) if f.name != "d_model"]
    return ", ".join(f"{name} {getattr(block, name)}" for name in names if getattr(block, name, None) is not None)


def _describe_sequence_model(directory: Path, model_type: type[SequenceModel]) -> list[tuple[str, str]]:
    model = model_type.from_pretrained(directory)
    c = model.config
    stack = c.stack_config()
    weights = sum(p.nbytes for p in model.parameters())
    dtype = next(model.parameters()).dtype
    inputs = f"tokens below {c.vocab_size}" if c.vocab_size is not None else f"{_count_numbers(c.input_size)} per step"
    rows = [
        ("model", f"{model_type.__name__}, {stack.layer}, in {directory}"),
        *_describe_task(directory),
        *_describe_stack(stack),
        ("input", inputs),
        *([("class tokens", f"{len(c.class_tokens)} before the input")] if c.class_tokens else []),
        ("output", _describe_output(model)),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("stored as", f"{dtype}, {format_bytes((directory / 'model.safetensors').stat().st_size)}"),
        ("weights", format_bytes(weights)),
    ]
    if isinstance(model, LatentModel) and not c.bidirectional:
        rows.append(("state", f"{format_bytes(model.init_cache(1).nbytes)} per sequence, at any length"))
    return [*rows, ("values", describe_non_finite(model.state_dict().items()) or "all finite")]


def _describe_task(directory: Path) -> list[tuple[str, str]]:
    """Return what the model was trained for, if a run on files made it."""
    if not (directory / TASK_FILE).is_file():
        return []
    metadata = read_json(directory / TASK_FILE)
    targets, columns = (" ".join(metadata.get(name) or []) for name in ("targets", "columns"))
    of_targets = f" of {targets}" if targets else ""
    from_columns = f", reading {columns}" if columns else ""
    return [("trained for", f"{metadata.get('task')}{of_targets}{from_columns}")]


def _count_numbers(count: int | None) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _describe_output(model: SequenceModel) -> str:
    c = model.config
    numbers = _count_numbers(c.output_size)
    if isinstance(model, MaskedLM):
        return "the token at each position, and an embedding of each sequence"
    if isinstance(model, LatentModel):
        return f"{numbers} for each step"
    pooled = {"mean": "the mean of its steps", "last": "its last step", "class_token": "a class token"}[c.pooling]
    if isinstance(model, SequenceRegressor):
        return f"{numbers} for each sequence, from {pooled}"
    names = f": {', '.join(c.labels)}" if c.labels else ""
    return f"one of {c.output_size} classes for each sequence, from {pooled}{names}"


def run_info(args: argparse.Namespace) -> None:
    """Print the table; the weights of a model are not kept."""
    rows = _describe_machine() if args.model is None else _describe_model(args)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _describe_machine() -> list[tuple[str, str]]:
    settings = configure_threads()
    return [
        ("anymamba", __version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("threads", f"{settings.threads}: {settings.reason}"),
        ("waiting", settings.waiting),
        *([("advice", settings.advice)] if settings.advice else []),
        *_kernels(),
        ("matmul", _describe_matmul()),
        *_default_paths(),
    ]


def _describe_matmul() -> str:
    """Return which library multiplies float32 matrices on a CPU."""
    if matmul_library() == "torch":
        return "torch"
    return "oneDNN: torch does not use AVX-512 on this processor"


def _describe_quantized_matmul(format: str, dtype: torch.dtype) -> str:
    """Return how prompts are multiplied with quantized weights."""
    if missing_kernel("quantized_linear", torch.empty(0, dtype=dtype), None, None, None, format, 0):
        return "prompts in float32, with dequantized weights"
    if format != "bfloat16" or dtype != torch.bfloat16:
        return "prompts in float32, with some rows of the weights dequantized at a time"
    if multiplies_bfloat16():
        return "prompts in bfloat16, for which this processor has instructions"
    return "prompts in float32: this processor has no instructions for bfloat16"


def _default_paths() -> list[tuple[str, str]]:
    """Return the algorithm that computes the scan by default, by device and dtype."""
    rows = []
    for device in reversed(available_devices()):
        by_algorithm: dict[str, list[str]] = {}
        for name, dtype in DTYPES.items():
            missing = missing_kernel("scan", torch.empty(0, dtype=dtype, device=device))
            by_algorithm.setdefault("serial_recalculated" if missing else "fused", []).append(name)
        choices = (f"{algorithm} for {', '.join(names)}" for algorithm, names in by_algorithm.items())
        rows.append((f"scan on {device}", "; ".join(choices)))
    return rows


def _kernels() -> list[tuple[str, str]]:
    """Return a row per library of kernels: whether it was built, and what it uses."""
    descriptions = describe_kernels()
    return [("kernels" if len(descriptions) == 1 else f"kernels/{name}", d) for name, d in descriptions.items()]


def _describe_model(args: argparse.Namespace) -> list[tuple[str, str]]:
    if (model_type := _find_model_type(Path(args.model))) is not None:
        if options := [f"--{name}" for name in ("dtype", "weights", "block") if getattr(args, name)]:
            raise ValueError(
                f"{args.model}: {' '.join(options)}: for language models only, got a {model_type.__name__}"
            )
        return _describe_sequence_model(Path(args.model), model_type)
    checkpoint = open_checkpoint(args.model, dict(args.block))
    dtype = DTYPES.get(args.dtype)
    config = checkpoint.config
    stack = config.stack_config()
    weight_format = resolve_weight_format(checkpoint, args.weights, dtype)
    model = empty_model(config, dtype or checkpoint.dtype, weight_format)
    parameters = parameter_count(config)
    weights = sum(p.nbytes for p in model.parameters())
    state = model.init_cache(1).nbytes
    working = _working_bytes(model)
    known = find_known_checkpoint(config)
    stored = checkpoint.weights or checkpoint.dtype
    in_memory = f"in {weight_format}, computing in {model.dtype}" if weight_format else f"in {model.dtype}"
    padding = config.padded_vocab_size - config.vocab_size
    return [
        ("model", f"{stack.layer}, {checkpoint.format.name} format, in {checkpoint.directory}"),
        *_describe_stack(stack),
        *([("activation", "not given in the config: heavy_tail or softplus")] if is_ambiguous(config) else []),
        *([("sizes of", f"{known.name}, with the tokenizer of {known.tokenizer}")] if known else []),
        ("vocabulary", f"{config.vocab_size:,}" + (f" (+ {padding} of padding)" if padding else "")),
        ("head", "tied to the embedding" if config.tie_embeddings else "untied"),
        ("parameters", f"{parameters:,}"),
        ("stored as", f"{stored}, {format_bytes(sum(f.stat().st_size for f in checkpoint.files))}"),
        ("weights", f"{format_bytes(weights)}, {8 * weights / parameters:.2f} bits each, {in_memory}"),
        ("state", _describe_state(model)),
        ("memory", f"about {format_bytes(weights + state + working)} to generate from one sequence"),
        *([("matmul", _describe_quantized_matmul(weight_format, model.dtype))] if weight_format else []),
        ("values", describe_non_finite_tensors(checkpoint) or "all finite"),
    ]


def _describe_state(model: MambaLM) -> str:
    """Return the size of a state, and by how much it grows with each token if there are attention layers."""
    cache = model.init_cache(1)
    if not cache.bytes_per_step:
        return f"{format_bytes(cache.nbytes)} per sequence, at any length"
    return f"{format_bytes(cache.nbytes)} per sequence, and {format_bytes(cache.bytes_per_step)} more per token"


def _working_bytes(model: MambaLM) -> int:
    """Estimate the memory of a segment in a layer: a few times its largest tensors, as measured, and the logits."""
    mixer: Any = model.backbone.layers[0].mixer
    keys = getattr(mixer.init_cache(1), "k", None)  # Mamba-3 has keys and queries for every head
    width = max((getattr(module, "out_features", 0) for module in mixer.modules()), default=0)
    floats = 4 * width + 4 * model.config.d_model + (0 if keys is None else 10 * keys.numel())
    return 4 * (SEGMENT_LEN * floats + 2 * model.config.padded_vocab_size)


def run_inspect(args: argparse.Namespace) -> None:
    """Run the model over a text, and write the page."""
    target = Path(args.out)
    check_at_least(args, 1, "tokens")
    if target.is_dir() or not target.absolute().parent.is_dir():
        problem = "it is a directory" if target.is_dir() else "there is no such directory"
        raise ValueError(f"--out {args.out}: {problem}")
    model, tokenizer = load(args)
    ids = tokenizer.encode(read_text(args, tokenizer))
    if not ids:
        raise ValueError("the text is empty: pass --prompt, --file, or a text on stdin")
    name = Path(args.model).name or args.model
    page = render_page(report_data(model, tokenizer, ids[: args.tokens], name=name, text_tokens=len(ids)))
    content = page.encode("utf-8")
    with atomic_write(target) as temporary:
        temporary.write_bytes(content)
    cut = f", the first {args.tokens} of {len(ids)} tokens" if len(ids) > args.tokens else ""
    print(f"{target}: {format_bytes(len(content))}{cut}", file=sys.stderr)
