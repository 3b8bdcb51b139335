"""`anymamba info`: this machine, or a model, without keeping its weights."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import torch

from anymamba.cli.common import DTYPES, readable_bytes
from anymamba.cli.info_stack import kind_of, sequence_model_rows, stack_rows
from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.ground.operators import missing_kernel
from anymamba.ground.products import multiplies_bfloat16, product_library
from anymamba.kernels.cpu.library import LIBRARY
from anymamba.models.activation import is_undecided
from anymamba.models.lm import MambaLM
from anymamba.models.opening import non_finite_values, open_checkpoint
from anymamba.models.pretrained import expect_weights
from anymamba.models.skeleton import parameter_count, skeleton
from anymamba.version import __version__


def run(args: argparse.Namespace) -> None:
    """Print a table."""
    rows = _machine() if args.model is None else _model(args)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _machine() -> list[tuple[str, str]]:
    return [
        ("anymamba", __version__),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("threads", str(torch.get_num_threads())),
        ("kernels", _kernels()),
        ("products", _products()),
        *_default_paths(),
    ]


def _products() -> str:
    """Which library multiplies float32 matrices on a CPU."""
    if product_library() == "torch":
        return "torch's own"
    return "by oneDNN: torch's own leaves AVX-512 unused on this processor"


def _narrow_products(format: str, dtype: torch.dtype) -> str:
    """How prompts are multiplied with weights in a narrow format."""
    if missing_kernel("narrow_linear", torch.empty(0, dtype=dtype)):
        return "of weights widened to float32"
    if format != "bfloat16" or dtype != torch.bfloat16:
        return "of prompts in float32, with some rows of the weights widened at a time"
    if multiplies_bfloat16():
        return "of prompts in bfloat16, for which this processor has units"
    return "of prompts in float32: no units for bfloat16 are known here"


def _default_paths() -> list[tuple[str, str]]:
    """Which algorithm computes the scan by default, by device and dtype."""
    devices = ["cpu"]
    devices += ["cuda"] if torch.cuda.is_available() else []
    devices += ["mps"] if torch.backends.mps.is_available() else []
    rows = []
    for device in devices:
        by_algorithm: dict[str, list[str]] = {}
        for name, dtype in DTYPES.items():
            missing = missing_kernel("scan", torch.empty(0, dtype=dtype, device=device))
            by_algorithm.setdefault("serial_recalculated" if missing else "fused", []).append(name)
        choices = (f"{algorithm} for {', '.join(names)}" for algorithm, names in by_algorithm.items())
        rows.append((f"scan on {device}", "; ".join(choices)))
    return rows


def _kernels() -> str:
    """Whether the compiled kernels are there, with which vector instructions, or why not."""
    if LIBRARY.handle is None:
        return f"none: {LIBRARY.reason}"
    return f"built, using {LIBRARY.isa}" + ("" if LIBRARY.threads else ", on one thread: built without OpenMP")


def _model(args: argparse.Namespace) -> list[tuple[str, str]]:
    if (kind := kind_of(Path(args.model))) is not None:
        if given := [f"--{name}" for name in ("dtype", "weights", "block") if getattr(args, name)]:
            raise ValueError(f"{args.model}: {' '.join(given)}: only for language models, got a {kind.__name__}")
        return sequence_model_rows(Path(args.model), kind)
    checkpoint, dtype = open_checkpoint(args.model, dict(args.block)), DTYPES.get(args.dtype)
    config, stack = checkpoint.config, checkpoint.config.stack_config()
    narrow = expect_weights(checkpoint, args.weights, dtype)
    model = skeleton(config, dtype or checkpoint.dtype, narrow)
    parameters = parameter_count(config)
    weights = sum(p.nbytes for p in model.parameters())
    state = model.init_cache(1).nbytes
    working = _working_bytes(model)
    stored = checkpoint.weights or checkpoint.dtype
    kept = f"in {narrow}, computing in {model.dtype}" if narrow else f"in {model.dtype}"
    padding = config.padded_vocab_size - config.vocab_size
    return [
        ("model", f"{stack.layer}, {checkpoint.format.name} format, in {checkpoint.directory}"),
        *stack_rows(stack),
        *([("activation", "not given in the config: heavy_tail or softplus")] if is_undecided(config) else []),
        ("vocabulary", f"{config.vocab_size:,}" + (f" (+ {padding} of padding)" if padding else "")),
        ("head", "tied to the embedding" if config.tie_embeddings else "untied"),
        ("parameters", f"{parameters:,}"),
        ("stored as", f"{stored}, {readable_bytes(sum(f.stat().st_size for f in checkpoint.files))}"),
        ("weights", f"{readable_bytes(weights)}, {8 * weights / parameters:.2f} bits each, {kept}"),
        ("state", f"{readable_bytes(state)} per sequence, at any length"),
        ("memory", f"about {readable_bytes(weights + state + working)} to generate from one sequence"),
        *([("products", _narrow_products(narrow, model.dtype))] if narrow else []),
        ("values", non_finite_values(checkpoint) or "all finite"),
    ]


def _working_bytes(model: MambaLM) -> int:
    """Roughly what a segment needs in a layer, as measured: a few times its widest tensors, and the logits."""
    mixer: Any = model.backbone.layers[0].mixer
    keys = getattr(mixer.init_cache(1), "k", None)  # Mamba-3 has keys and queries for every head
    floats = 4 * mixer.in_proj.out_features + 4 * model.config.d_model + (0 if keys is None else 10 * keys.numel())
    return 4 * (SEGMENT_LEN * floats + 2 * model.config.padded_vocab_size)
