"""A report of how each layer of a model runs, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anymamba.core.registry import missing_kernel
from anymamba.integrations.transformers import linear_layers
from anymamba.integrations.transformers.accelerate import REJECTED, mixers
from anymamba.integrations.transformers.architectures import STACKS, original_class
from anymamba.integrations.transformers.mixer import FALLBACKS, AcceleratedMixer, compiled_mixer
from anymamba.integrations.transformers.model_step import AcceleratedStack, compiled_stack


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Report on one mixer.

    Attributes:
        name: Name of the module.
        mixer: Class that transformers has for it.
        accelerated: Whether it runs on this library's operators.
        sequence: Implementation that computes sequences.
        token: Implementation that computes one token.
        reason: Reason why something does not run in the fastest way; empty if everything does.
        last_fallback: Reason of the last fallback to the forward of transformers; empty if there was none.
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
    """Report on one token of a model that consists of mixers only.

    Attributes:
        name: Name of the module.
        model: Class that transformers has for it.
        token: Implementation that computes one token.
        reason: Reason why it is not one call; empty if it is.
    """

    name: str
    model: str
    token: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report on a model; as text, one line per mixer.

    Attributes:
        layers: Reports on the mixers.
        models: Reports on models that consist of an embedding, mixers and norms only.
        projections: Number of other projections (of attention, of MLPs, the head) that are faster for few rows.
    """

    layers: tuple[LayerReport, ...]
    models: tuple[ModelReport, ...] = ()
    projections: int = 0

    def __str__(self) -> str:
        """Return the report as a table."""
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
    """Return a report on the mixers of a model, accelerated or not.

    Raises:
        TypeError: The argument is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report: model must be a torch module, got {type(model).__name__}")
    return Report(
        layers=tuple(_layer(name, mixer) for name, mixer in mixers(model)),
        models=tuple(
            _model(name, part)
            for name, part in model.named_modules()
            if type(part).__name__ in STACKS and isinstance(part, original_class(type(part).__name__))
        ),
        projections=linear_layers.count_linears(model),
    )


def _model(name: str, model: nn.Module) -> ModelReport:
    reason = REJECTED.get(model, "it was not accelerated")
    if isinstance(model, AcceleratedStack):
        reason = "" if "forward" not in model.__dict__ else "this module was given its own forward"
        reason = reason or compiled_stack(model).reason
    how = "mixer by mixer" if reason else "one call for all layers"
    return ModelReport(name=name, model=type(model).__name__, token=how, reason=reason)


def _layer(name: str, mixer: nn.Module) -> LayerReport:
    kind, reason = type(mixer).__name__, ""
    if not isinstance(mixer, AcceleratedMixer):
        reason = REJECTED.get(mixer, "it was not accelerated")
    elif (device := mixer.conv1d.weight.device.type) != "cpu":
        reason = f"its weights are on {device}, not on a CPU"
    elif "forward" in mixer.__dict__:
        reason = "this module was given its own forward"
    if reason or not isinstance(mixer, AcceleratedMixer):
        return LayerReport(
            name=name, mixer=kind, accelerated=False, sequence="transformers", token="transformers", reason=reason
        )
    compiled = compiled_mixer(mixer)
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
