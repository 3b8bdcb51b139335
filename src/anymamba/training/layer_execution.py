"""How the residual layers of a model run during training: compiled, or recomputed in the backward pass."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anymamba.models.stack.residual_layer import ResidualLayer


def check_compiler(device: torch.device) -> None:
    """Raise `ValueError` if there is no compiler with which torch can compile for a device."""
    if device.type == "cpu":
        name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        missing = "" if shutil.which(name) else f"a C++ compiler: {name} was not found (CXX may name another)"
    else:
        missing = "" if importlib.util.find_spec("triton") else "Triton, which is not installed"
    if missing:
        raise ValueError(f"precision.compile = true needs {missing}")


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Let torch compile each residual layer for training steps; without gradients a layer runs as it is.

    All layers of a model share the compiled code, for any number of packed sequences (torch compiles once more for a
    single one).
    """
    check_compiler(device)
    for layer in _layers(model, "precision.compile"):
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_run, compiled, layer.forward)  # type: ignore[method-assign]


def recompute_layers(model: nn.Module) -> None:
    """Store only the inputs of each residual layer; the backward pass recomputes the rest, bit for bit."""
    for layer in _layers(model, "precision.activation_checkpointing"):
        draws = layer.dropout > 0  # random numbers, which must be the same when they are drawn again
        forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=draws)
        layer.forward = forward  # type: ignore[method-assign]


def _run(compiled: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*inputs, **options)


def _layers(model: nn.Module, field: str) -> list[ResidualLayer]:
    """Return the residual layers of a model; raise `ValueError` with the field of the config if there are none."""
    layers = [module for module in model.modules() if isinstance(module, ResidualLayer)]
    if not layers:
        raise ValueError(f"{field} = true needs residual layers, got {type(model).__name__}")
    return layers
