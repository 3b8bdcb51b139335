"""transformers' own models and mixers, plain and accelerated, at the shapes of published models.

The same module is timed twice, once before and once after `accelerate`, compared with its projections alone where the
case is a mixer, and our own language model on the same weights where there is one.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anymamba import MambaLM
from anymamba.core.linear import apply_linear
from anymamba.integrations.transformers import accelerate
from benchmarks.generation import set_up_steps
from benchmarks.harness import Call, Case, Contender, forward, forward_backward

Variant = Literal["transformers", "accelerated", "projections alone", "MambaLM"]

# Sizes of published models, except the layers of whole models: a few are enough to weigh a layer.
_VOCABULARY = 32_000
_BAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
_FALCON_H1 = {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-130m": ("Mamba2", {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128}),
    "mamba-130m": ("Mamba", {"hidden_size": 768, "state_size": 16}),
    "bamba-like": ("Bamba", {"hidden_size": 1024, **_BAMBA, "intermediate_size": 2816, "num_attention_heads": 16}),
    "falcon-h1-0.5b-like": (
        "FalconH1",
        {"hidden_size": 1024, **_FALCON_H1, "intermediate_size": 2048, "num_attention_heads": 8},
    ),
}
_LAYERS: dict[str, dict[str, Any]] = {
    "bamba-like": {"num_hidden_layers": 6, "attn_layer_indices": [3], "num_key_value_heads": 4},
    "falcon-h1-0.5b-like": {"num_hidden_layers": 4, "num_key_value_heads": 2},
}
_TINY: dict[str, dict[str, Any]] = {
    "mamba2-130m": {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 1},
    "mamba-130m": {"hidden_size": 64, "num_hidden_layers": 1},
    "bamba-like": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "falcon-h1-0.5b-like": {"num_hidden_layers": 1},
}


@functools.cache
def _model(shape: str, tiny: bool) -> Any:
    """Return a language model of transformers with random weights, the same at every call."""
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    name, sizes = SHAPES[shape]
    layers = _LAYERS.get(shape, {"num_hidden_layers": 6})
    fields = {"vocab_size": _VOCABULARY, **sizes, **layers, **(_TINY[shape] if tiny else {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**fields)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def _ids(batch: int, t: int) -> Tensor:
    return torch.randint(0, _VOCABULARY, (batch, t), generator=torch.Generator().manual_seed(3))


@functools.cache
def _our_model(shape: str, tiny: bool) -> MambaLM:
    """Return our own language model with the same weights, through transformers' files."""
    with tempfile.TemporaryDirectory() as directory:
        _model(shape, tiny).save_pretrained(directory)
        return MambaLM.from_pretrained(directory).eval()


def _variant(shape: str, variant: Variant, tiny: bool) -> Any:
    model = copy.deepcopy(_model(shape, tiny))
    return accelerate(model) if variant == "accelerated" else model


class Projections(nn.Module):
    """The outer projections of a mixer with nothing between them: (b, t, d) -> (b, t, d)."""

    def __init__(self, mixer: Any) -> None:
        """Keep the projections of a mixer."""
        super().__init__()
        self.in_proj = mixer.in_proj
        self.out_proj = mixer.out_proj
        self.width = int(mixer.intermediate_size)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Project in and out."""
        return apply_linear(self.out_proj, apply_linear(self.in_proj, x)[..., : self.width])


def _mixer(shape: str, variant: Variant, tiny: bool) -> tuple[Any, Any]:
    """Return the first mixer of the model, and the model's config."""
    model = _variant(shape, variant, tiny)
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    return (Projections(mixer) if variant == "projections alone" else mixer), model.config


def set_up_mixer(shape: str, mode: str, t: int, variant: Variant, tiny: bool = False) -> Call:
    """Return a call of a mixer over a sequence."""
    mixer, _ = _mixer(shape, variant, tiny)
    width = mixer.in_proj.in_features
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 8 if tiny else t, width, generator=generator, requires_grad=mode != "forward")
    head = torch.randn(x.shape, generator=generator)
    if mode == "forward":
        return forward(lambda: {"y": mixer(x)})
    return forward_backward(lambda: mixer(x), head, {"x": x, **dict(mixer.named_parameters())})


def _cache_of(transformers: Any, config: Any) -> Any:
    return transformers.DynamicCache(config=config)


def set_up_mixer_token(shape: str, batch: int, variant: Variant, tiny: bool = False) -> Call:
    """Return a call of a mixer for one token; the cache is not reset, as its values keep their magnitude."""
    mixer, config = _mixer(shape, variant, tiny)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 5, mixer.in_proj.in_features, generator=generator)
    if variant == "projections alone":
        return forward(lambda: {"y": mixer(x[:, 4:])})
    cache = _cache_of(import_module("transformers"), config)
    with torch.no_grad():
        mixer(x[:, :4], cache_params=cache)
    return forward(lambda: {"y": mixer(x[:, 4:], cache_params=cache)})


def set_up_model(shape: str, mode: str, t: int, variant: Variant, tiny: bool = False) -> Call:
    """Return a call of a model over a sequence: the last logits, or the loss and the gradient of the embeddings."""
    ids = _ids(1, 8 if tiny else t)
    if variant == "MambaLM":
        ours = _our_model(shape, tiny)
        return forward(lambda: {"logits": ours(ids, logits="last").logits})
    model = _variant(shape, variant, tiny)
    if mode == "forward":
        return forward(lambda: {"logits": model(ids, use_cache=False, logits_to_keep=1).logits})
    embeddings = {name: p for name, p in model.named_parameters() if "embed" in name}

    def call() -> Mapping[str, Tensor]:
        loss = model(ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in embeddings.items()}}

    return call


def set_up_model_token(shape: str, batch: int, variant: Variant, tiny: bool = False) -> Call:
    """Return a call of a model for one token per row, after a short prompt; the cache advances with every call."""
    if variant == "MambaLM":
        ids = _ids(batch, 17)
        return set_up_steps(_our_model(shape, tiny), ids[:, :16], ids[:, 16])
    model = _variant(shape, variant, tiny)
    ids = _ids(batch, 17)
    name = "cache_params" if SHAPES[shape][0] in ("Mamba", "Mamba2") else "past_key_values"
    with torch.no_grad():
        cache = getattr(model(ids[:, :16], use_cache=True), name)

    return forward(lambda: {"logits": model(ids[:, 16:], use_cache=True, **{name: cache}).logits[:, -1]})


def _case(name: str, setup: Callable[..., Call], variants: tuple[Variant, ...], heavy: bool, *args: Any) -> Case:
    contenders = tuple(
        Contender(
            name=variant,
            setup=partial(setup, *args, variant),
            tiny=partial(setup, *args, variant, True),
            computes="projections" if variant == "projections alone" else "the same",
            library="transformers",
            heavy=heavy and variant == "transformers",
        )
        for variant in variants
    )
    long = name.startswith("model/mamba-130m") and name.endswith("backward")  # 32 s a layer and call, at 512 tokens
    return Case(
        name=f"transformers/{name}", contenders=contenders, baseline="accelerated", tolerance=2e-4, on_request=long
    )


_MIXER: tuple[Variant, ...] = ("accelerated", "transformers", "projections alone")
_MODEL: tuple[Variant, ...] = ("accelerated", "transformers")
_WITH_OURS: tuple[Variant, ...] = (*_MODEL, "MambaLM")


def _cases() -> tuple[Case, ...]:
    cases = []
    for shape in SHAPES:
        models = _WITH_OURS if shape in ("mamba2-130m", "mamba-130m") else _MODEL
        for mode, t in (("forward", 512), ("forward", 2048), ("forward+backward", 512)):
            # Mamba-1's training takes time with the square of the length there.
            heavy = shape == "mamba-130m" and mode != "forward"
            cases.append(_case(f"mixer/{shape}/t{t}/{mode}", set_up_mixer, _MIXER, heavy, shape, mode, t))
            variants = models if mode == "forward" else _MODEL
            cases.append(_case(f"model/{shape}/t{t}/{mode}", set_up_model, variants, True, shape, mode, t))
        for batch in (1, 8):
            cases.append(_case(f"mixer/{shape}/token/batch{batch}", set_up_mixer_token, _MIXER, False, shape, batch))
            cases.append(_case(f"model/{shape}/token/batch{batch}", set_up_model_token, models, False, shape, batch))
    return tuple(cases)


CASES = _cases()
