"""Which layer of a model runs how, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anymamba.core.registry import missing_kernel
from anymamba.integrations.transformers import linear_layers, mixer_step, model_step
from anymamba.integrations.transformers.accelerate import REFUSED, mixers
from anymamba.integrations.transformers.architectures import STACKS, own_class
from anymamba.integrations.transformers.mixer import FALLBACKS, AcceleratedMixer
from anymamba.integrations.transformers.model_step import AcceleratedStack


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """How one mixer runs.

    Attributes:
        name: of the module.
        mixer: the class that transformers has for it.
        accelerated: whether it runs on this library's operators.
        sequence: who computes sequences.
        token: how one token is computed.
        reason: why something does not run the fastest way; empty if everything does.
        last_fallback: why it last fell back to transformers' own forward; empty if it never did.
    """

    name: str
    mixer: str
    accelerated: bool
    sequence: str
    token: str
    reason: str = ""
    last_fallback: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """How one token runs through a model that is nothing but mixers.

    Attributes:
        name: of the module.
        model: the class that transformers has for it.
        token: how one token is computed.
        reason: why not in one call; empty if it is.
    """

    name: str
    model: str
    token: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a model runs; as text, a line for each mixer.

    Attributes:
        layers: the mixers.
        models: models that are nothing but mixers, with an embedding and norms.
        projections: how many others, such as those of attention, of MLPs and the head, have a faster way for few rows.
    """

    layers: tuple[LayerReport, ...]
    models: tuple[ModelReport, ...] = ()
    projections: int = 0

    def __str__(self) -> str:
        """A table."""
        accelerated = sum(layer.accelerated for layer in self.layers)
        lines = [f"{accelerated} of {len(self.layers)} mixers are accelerated"]
        if self.projections:
            lines[0] += f", and {self.projections} other projections for few rows"
        for model in self.models:
            because = f"; because {model.reason}" if model.reason else ""
            lines.append(f"  {model.name or '(itself)'} ({model.model}): a token: {model.token}{because}")
        for layer in self.layers:
            notes = [f"sequences: {layer.sequence}", f"a token: {layer.token}"]
            notes += [f"because {layer.reason}"] if layer.reason else []
            notes += [f"last fell back because {layer.last_fallback}"] if layer.last_fallback else []
            lines.append(f"  {layer.name or '(itself)'} ({layer.mixer}): " + "; ".join(notes))
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Look at the mixers of a model, accelerated or not.

    Raises:
        TypeError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report: model must be a torch module, got {type(model).__name__}")
    return Report(
        layers=tuple(_layer(name, mixer) for name, mixer in mixers(model)),
        models=tuple(
            _model(name, part)
            for name, part in model.named_modules()
            if type(part).__name__ in STACKS and isinstance(part, own_class(type(part).__name__))
        ),
        projections=linear_layers.count(model),
    )


def _model(name: str, model: nn.Module) -> ModelReport:
    reason = REFUSED.get(model, "it was not accelerated")
    if isinstance(model, AcceleratedStack):
        reason = "" if "forward" not in model.__dict__ else "this module was given its own forward"
        reason = reason or model_step.compiled_stack(model).reason
    how = "mixer by mixer" if reason else "one call for all layers"
    return ModelReport(name=name, model=type(model).__name__, token=how, reason=reason)


def _layer(name: str, mixer: nn.Module) -> LayerReport:
    kind, reason = type(mixer).__name__, ""
    if not isinstance(mixer, AcceleratedMixer):
        reason = REFUSED.get(mixer, "it was not accelerated")
    elif (device := mixer.conv1d.weight.device.type) != "cpu":
        reason = f"its weights are on {device}, not on a CPU"
    elif "forward" in mixer.__dict__:
        reason = "this module was given its own forward"
    if reason or not isinstance(mixer, AcceleratedMixer):
        return LayerReport(
            name=name, mixer=kind, accelerated=False, sequence="transformers", token="transformers", reason=reason
        )
    compiled = mixer_step.compiled_mixer(mixer)
    whole = "one call" if compiled.is_whole else "one call, projections apart"
    operators = "portable" if missing_kernel("causal_conv", mixer.conv1d.weight) else "compiled"
    return LayerReport(
        name=name,
        mixer=kind,
        accelerated=True,
        sequence=f"anymamba, {operators}",
        token="operators" if compiled.step.executable is None else whole,
        reason=compiled.reason,
        last_fallback=FALLBACKS.get(mixer, ""),
    )
