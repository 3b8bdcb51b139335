"""Checks before the mixers of transformers are replaced: its version, and the same outputs."""

from __future__ import annotations

import copy
import re
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.integrations.transformers.accelerated_classes import own_class_of
from anymamba.integrations.transformers.mixer import AcceleratedMixer, Options
from anymamba.integrations.transformers.model_step import compiled_stack

FLOOR = (5, 16)
TOKENS = 7
# Largest difference from transformers' own forward, relative to its largest output.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def require_transformers() -> None:
    """Raise `ImportError` unless a supported version of transformers is installed."""
    needs = f"anymamba.integrations.transformers needs transformers >= {FLOOR[0]}.{FLOOR[1]}"
    try:
        version = str(import_module("transformers").__version__)
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        raise ImportError(f"{needs}, which is not installed: pip install 'anymamba[interop]'") from None
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < FLOOR:
        raise ImportError(f"{needs}, found {version}: pip install --upgrade 'anymamba[interop]'")


@torch.no_grad()
def difference(mixer: AcceleratedMixer) -> str:
    """How an accelerated mixer differs from transformers' own forward on a few tokens; empty if it agrees."""
    weight = mixer.conv1d.weight
    if weight.device.type != "cpu":
        return ""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, TOKENS, mixer.hidden_size, generator=generator).to(weight.dtype)
    if mixer.not_covered(x):
        return ""
    try:
        expected = own_class_of(mixer).forward(mixer, x)
        options, mixer._anymamba = mixer._anymamba, Options()
        try:
            found = type(mixer).forward(mixer, x)
        finally:
            mixer._anymamba = options
    except Exception as error:
        return f"the comparison with transformers' own forward failed: {_first_line(error)}"
    return _difference(found, expected, weight.dtype)


@torch.no_grad()
def difference_of_stack(stack: Any, accelerated: type[Any]) -> str:
    """How one token of a model in one call differs from its own forward, with its first two layers; empty if not."""
    made, own, weight = copy.copy(stack), type(stack), stack.norm_f.weight
    made.__dict__ |= {"_modules": {**stack._modules, "layers": nn.ModuleList(stack.layers[:2])}, "training": False}
    x = torch.tensor([[1], [2], [0]]) % stack.config.vocab_size
    if weight.device.type != "cpu":
        return ""
    try:
        cache = own.forward(made, x.repeat(1, 3), use_cache=True, return_dict=True).cache_params
        branch = copy.deepcopy(cache)
        expected = own.forward(made, x, cache_params=cache, return_dict=True)
        made.__class__ = accelerated
        if compiled_stack(made).executable is None:
            return ""
        found = accelerated.forward(made, x, cache_params=branch, return_dict=True)
    except Exception as error:
        return f"the comparison with transformers' own forward failed: {_first_line(error)}"
    return _difference(found.last_hidden_state, expected.last_hidden_state, weight.dtype)


def _difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    if found.shape != expected.shape:
        return f"its output has shape {tuple(found.shape)}, transformers' own {tuple(expected.shape)}"
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return "" if bool((torch.isfinite(found) == torch.isfinite(expected)).all()) else "its outputs are not finite"
    gap = (found.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    if gap <= TOLERANCE.get(dtype, 5e-2) * size:
        return ""
    return f"its outputs differ from transformers' own by {gap:.2g}, where the largest is {size:.2g}"


def _first_line(error: Any) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
