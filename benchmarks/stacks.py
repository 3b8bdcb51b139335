"""The cases of stacks: both directions against blocks and flips by hand, virtual layers, the horizon, a classifier.

A case of the horizon has a contender for each depth, of which only the last passes keep a graph: what they need above
their parameters and inputs should not grow with depth, as it does in the other case, where all passes keep one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from anymamba import BidirectionalStack, SequenceClassifier, Stack
from benchmarks.harness import Call, Case, Contender, forward, forward_backward
from benchmarks.mamba2 import LAYER_130M, MODES, TINY, BlockShape, Mode, set_up_block

DEPTHS = (4, 8, 16)
_SMALL_LAYER = dataclasses.replace(LAYER_130M, d_model=256, t=512)


def _fields(shape: BlockShape) -> dict[str, Any]:
    block = {"layer": "Mamba2", "d_state": shape.d_state, "headdim": shape.headdim}
    return {"d_model": shape.d_model, "ssm_cfg": block, "final_norm": False}


def pair(shape: BlockShape) -> nn.Module:
    """Return one pair of our bidirectional stack, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BidirectionalStack(**_fields(shape), n_layer=2)


class ByHand(nn.Module):
    """The same pair written by hand: two norms and blocks, and flips."""

    def __init__(self, shape: BlockShape) -> None:
        """Keep the layers of the stack."""
        super().__init__()
        self.layers = pair(shape).layers

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, d) to (b, t, d)."""
        there, back = self._parts(0), self._parts(1)
        f, g = there[1](there[0](x)), back[1](back[0](x.flip(1))).flip(1)
        return x + (f + g) / 2

    def _parts(self, index: int) -> tuple[Any, Any]:
        layer: Any = self.layers[index]  # type: ignore[index]
        return layer.norm, layer.mixer


def pair_case(mode: Mode, shape: BlockShape) -> Case:
    """Return the cases of a bidirectional pair, compared with two blocks and flips by hand."""
    builders: dict[str, Callable[[BlockShape], nn.Module]] = {"pair": pair, "by hand": ByHand}
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_block, build, mode, shape),
            tiny=partial(set_up_block, build, mode, TINY),
            computes="pair",
        )
        for name, build in builders.items()
    )
    return Case(name=f"stacks/pair/t{shape.t}/{mode}", contenders=contenders, baseline="by hand")


def deep(depth: int, horizon: int | None, shape: BlockShape) -> nn.Module:
    """Return a stack of virtual layers whose last passes, or all, keep a graph."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Stack(**_fields(shape), n_layer=1, n_virtual=depth, grad_horizon=horizon)


def horizon_case(name: str, horizon: int | None, shape: BlockShape) -> Case:
    """Return the cases of training at several depths."""
    contenders = tuple(
        Contender(
            name=f"{depth} passes",
            setup=partial(set_up_block, partial(deep, depth, horizon), "forward+backward", shape),
            tiny=partial(set_up_block, partial(deep, depth, horizon), "forward+backward", TINY),
            computes=f"stack of {depth}",
        )
        for depth in DEPTHS
    )
    return Case(name=f"stacks/{name}", contenders=contenders, baseline=f"{DEPTHS[0]} passes")


def _set_up_steps(fields: dict[str, Any], shape: BlockShape) -> Call:
    """Return a call of a stack for one token; each call continues from the cache of the previous one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = Stack(**_fields(shape), **fields).eval()
        x_bd = torch.randn(shape.batch, shape.d_model)
    cache = stack.init_cache(shape.batch)

    def step() -> dict[str, Tensor]:
        nonlocal cache
        with torch.no_grad():
            y_bd, cache = stack.step(x_bd, cache)
        return {"y": y_bd}

    return forward(step)


def virtual_case(shape: BlockShape) -> Case:
    """Return the cases of a step of eight virtual layers over two, compared with eight real ones."""
    kinds: dict[str, dict[str, Any]] = {"virtual": {"n_layer": 2, "n_virtual": 8}, "real": {"n_layer": 8}}
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(_set_up_steps, fields, shape),
            tiny=partial(_set_up_steps, fields, TINY),
            computes=f"{name} layers",
        )
        for name, fields in kinds.items()
    )
    return Case(name="stacks/virtual/step", contenders=contenders, baseline="real")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierShape:
    """Sizes of a classifier of Mamba-1 layers, and of its batch."""

    batch: int = 4
    t: int = 256
    d_model: int = 256
    n_layer: int = 4
    vocab: int = 1024
    classes: int = 10


_TINY_CLASSIFIER = ClassifierShape(batch=1, t=8, d_model=64, n_layer=1)


def our_classifier(shape: ClassifierShape) -> Any:
    """Return a classifier with mean pooling, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = {"d_model": shape.d_model, "n_layer": shape.n_layer, "ssm_cfg": {"layer": "Mamba1"}}
        return SequenceClassifier(vocab_size=shape.vocab, output_size=shape.classes, pooling="mean", stack=stack)


class TheirClassifier(nn.Module):
    """A classifier on transformers' Mamba backbone with the same head and weights."""

    def __init__(self, shape: ClassifierShape) -> None:
        """Copy the weights of our classifier."""
        super().__init__()
        transformers, ours = import_module("transformers"), our_classifier(shape)
        transformers.utils.logging.set_verbosity_error()
        config = transformers.MambaConfig(
            vocab_size=shape.vocab, hidden_size=shape.d_model, num_hidden_layers=shape.n_layer, use_cache=False
        )
        self.backbone = transformers.MambaModel(config)
        self.head = ours.head
        names = {"embeddings.weight": "embedding.weight"}
        weights = ours.state_dict()
        state = self.backbone.state_dict()
        self.backbone.load_state_dict({name: weights[names.get(name, f"backbone.{name}")] for name in state})

    def forward(self, ids: Tensor) -> Tensor:
        """Map (b, t) to (b, k)."""
        logits: Tensor = self.head(self.backbone(ids).last_hidden_state.mean(1))
        return logits


def _set_up_classifier(ours: bool, shape: ClassifierShape) -> Call:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab, (shape.batch, shape.t), generator=generator)
    head = torch.randn(shape.batch, shape.classes, generator=generator)
    if ours:
        model = our_classifier(shape)
        return forward_backward(lambda: model(ids).logits, head, {"head": model.head.weight, **_weights(model)})
    other = TheirClassifier(shape)
    return forward_backward(lambda: other(ids), head, {"head": other.head.weight, **_weights(other)})


def _weights(model: Any) -> dict[str, Tensor]:
    """Return the parameters of the embedding and all layers, by names that both models have."""
    embedding = model.embedding if hasattr(model, "embedding") else model.backbone.embeddings
    layers = {name: x for name, x in model.backbone.named_parameters() if name.startswith(("layers", "norm_f"))}
    return {"embedding": embedding.weight, **layers}


def classifier_case(shape: ClassifierShape) -> Case:
    """Return the cases of a classifier's forward and backward pass, compared with transformers' backbone and a head."""
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(_set_up_classifier, ours, shape),
            tiny=partial(_set_up_classifier, ours, _TINY_CLASSIFIER),
            computes="classifier",
            library="anymamba" if ours else "transformers",
        )
        for name, ours in {"SequenceClassifier": True, "transformers": False}.items()
    )
    return Case(name="stacks/classifier", contenders=contenders, baseline="transformers", tolerance=1e-4)


CASES: tuple[Case, ...] = (
    *(pair_case(mode, dataclasses.replace(LAYER_130M, t=512)) for mode in MODES),
    horizon_case("horizon", 2, _SMALL_LAYER),
    horizon_case("whole", None, _SMALL_LAYER),
    virtual_case(_SMALL_LAYER),
    classifier_case(ClassifierShape()),
)
