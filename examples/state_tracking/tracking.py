"""Learn a language: models, the curriculum, and the evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba import MambaLM, MambaLMConfig
from anymamba.training import Evaluation, RunConfig, Task, autocast, check_at_least, option
from examples.state_tracking.languages import LANGUAGES, NONE, Sequences
from examples.state_tracking.rotation_penalty import collect_penalties

# Options of the variants apart from their sizes. The activation of decay rates is the paper's: with the heavy tail a
# rate only falls with the inverse of its input, and a state that lasts for hundreds of tokens is not learned in time.
_MAMBA3 = {"layer": "Mamba3", "a_activation": "softplus"}
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba3": _MAMBA3,
    "mamba3-fixed-rotation": {**_MAMBA3, "rotation": "fixed"},
    "mamba3-no-rotation": {**_MAMBA3, "rope_fraction": 0.0},
    "mamba2": {"layer": "Mamba2"},
}
ROTATING = ("mamba3", "mamba3-fixed-rotation")
_TRAINING, _VALIDATION, _TEST = range(3)  # streams of random numbers


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """The section of the language, the model and the lengths."""

    language: Literal["parity", "arithmetic", "brackets"] = option("parity", "what is learned")
    variant: Literal["mamba3", "mamba3-fixed-rotation", "mamba3-no-rotation", "mamba2"] = option("mamba3", "the blocks")
    n_layer: int = option(1, "layers")
    d_model: int = option(32, "width of the residual stream")
    d_state: int = option(64, "state size of a head")
    headdim: int = option(16, "width of a head")
    rotating: float = option(0.5, "fraction of the state that rotates, in the variants with a rotation")
    block: dict[str, Any] = option(dict, "table of further fields of the block's config")
    labels: Literal["end", "every"] = option(
        "every", "answers that are learned: that of a sequence, or those of its prefixes too"
    )
    rows: int = option(256, "maximum number of sequences of a step")
    tokens: int | None = option(
        None, "maximum number of tokens of a step: longer sequences are fewer", default_text="any number"
    )
    shortest: int = option(3, "tokens of the shortest sequence")
    longest_first: int = option(40, "tokens of the longest sequence when the curriculum begins")
    longest_last: int = option(160, "tokens of the longest sequence when it ends")
    grows_from: float = option(0.2, "fraction of the steps after which the longest sequence begins to grow")
    grows_to: float = option(0.5, "fraction of the steps after which it has grown, by the same factor at each step")
    rotation_penalty: float = option(0.0, "weight of the penalty that makes rotations exact (rotation_penalty.py)")
    penalty_from: float = option(0.5, "fraction of the steps after which that weight begins to rise from zero")
    penalty_to: float = option(0.6, "fraction of the steps after which it has risen")
    judged: int = option(256, "tokens of the sequences that a model is evaluated on")
    validation_rows: int = option(512, "sequences of an evaluation during training")
    solved: float = option(0.999, "scaled accuracy of an evaluation that ends the run early")

    def __post_init__(self) -> None:
        """Raise for values that cannot work."""
        check_at_least(
            self, 1, "n_layer", "d_model", "d_state", "headdim", "rows", "shortest", "validation_rows", "tokens"
        )
        if not self.shortest <= self.longest_first <= self.longest_last:
            raise ValueError(
                "shortest <= longest_first <= longest_last must hold, "
                f"got {self.shortest}, {self.longest_first} and {self.longest_last}"
            )
        if not 0 <= self.grows_from <= self.grows_to <= 1:
            raise ValueError(f"0 <= grows_from <= grows_to <= 1 must hold, got {self.grows_from} and {self.grows_to}")
        if not 0 <= self.penalty_from <= self.penalty_to <= 1:
            raise ValueError(
                f"0 <= penalty_from <= penalty_to <= 1 must hold, got {self.penalty_from} and {self.penalty_to}"
            )
        if not 0 <= self.rotation_penalty < math.inf:
            raise ValueError(f"rotation_penalty must be a weight of at least 0, got {self.rotation_penalty}")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(RunConfig):
    """The config of a run that learns a language."""

    tracking: TrackingSection = field(default_factory=TrackingSection)


class TrackingBatch(NamedTuple):
    """Packed sequences with the answers to predict.

    Attributes:
        inputs: Tokens (1, t).
        bounds: First positions of the sequences, and t, (s + 1,).
        positions: Positions of the tokens after which an answer is predicted, (m,).
        answers: Answers at these positions, (m,).
        penalty_weight: Weight of the rotation penalty, ().
    """

    inputs: Tensor
    bounds: Tensor
    positions: Tensor
    answers: Tensor
    penalty_weight: Tensor

    @staticmethod
    def of(sequences: Sequences, labels: str = "end", penalty_weight: float = 0.0) -> TrackingBatch:
        """Return a batch of sequences with their answers ("end"), or also those of their prefixes ("every")."""
        ends = sequences.lengths.cumsum()
        positions = ends - 1 if labels == "end" else np.flatnonzero(sequences.answers != NONE)
        parts = (sequences.tokens[None], np.concatenate([[0], ends]), positions, sequences.answers[positions])
        return TrackingBatch(*map(torch.from_numpy, (*parts, np.array(penalty_weight, dtype=np.float32))))

    @property
    def tokens(self) -> int:
        """Return the number of tokens that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Return the number of answers."""
        return self.answers.numel()

    def to(self, device: torch.device) -> TrackingBatch:
        """Return the batch on another device."""
        return TrackingBatch(*(x.to(device) for x in self))


class TrackingTask(Task[TrackingBatch]):
    """Prediction of the answer of a sequence after its last token."""

    METRICS = ("scaled_accuracy",)
    config: TrackingConfig

    def __init__(self, config: TrackingConfig) -> None:
        """Draw the sequences for evaluations during training."""
        self.config = config
        c = config.tracking
        self.language = LANGUAGES[c.language]
        self._validation = self.draw(_VALIDATION, 0, c.validation_rows, c.judged)

    @property
    def fingerprint(self) -> str:
        """Return the language, and how its answers are drawn: everything else is in the config."""
        return self.language.name + self.language.answered

    def make_model(self, dtype: torch.dtype) -> MambaLM:
        """Return a language model whose head is not tied to the embedding."""
        c = self.config.tracking
        sizes: dict[str, Any] = {"d_state": c.d_state, "headdim": c.headdim}
        if c.variant in ROTATING:
            sizes["rope_fraction"] = c.rotating
        config = MambaLMConfig(
            d_model=c.d_model,
            n_layer=c.n_layer,
            vocab_size=self.language.vocab_size,
            tie_embeddings=False,
            ssm_cfg={**VARIANTS[c.variant], **sizes, **c.block},
        )
        return MambaLM(config, dtype=dtype)

    def longest(self, step: int) -> int:
        """Return the tokens of the longest sequence of step 0, 1, ..."""
        c = self.config.tracking
        return round(c.longest_first * (c.longest_last / c.longest_first) ** self._ramp(step, c.grows_from, c.grows_to))

    def penalty_weight(self, step: int) -> float:
        """Return the weight of the rotation penalty at step 0, 1, ..."""
        c = self.config.tracking
        return c.rotation_penalty * self._ramp(step, c.penalty_from, c.penalty_to)

    def _ramp(self, step: int, begins: float, ends: float) -> float:
        """Return a value that rises from 0 to 1 between two fractions of the steps."""
        steps = self.config.schedule.steps
        return min(1.0, max(0.0, (step - begins * steps) / max(1.0, (ends - begins) * steps)))

    def batches(self, step: int) -> list[TrackingBatch]:
        """Draw sequences of all lengths up to the longest."""
        c, chance, longest = self.config.tracking, self._chance(_TRAINING, step), self.longest(step)
        rows = c.rows if c.tokens is None else max(1, min(c.rows, c.tokens // longest))
        drawn = self.language.sample(chance, rows, c.shortest, longest)
        return [TrackingBatch.of(drawn, c.labels, self.penalty_weight(step))]

    def loss(self, model: MambaLM, batch: TrackingBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Return the summed negative log-likelihood of the answers plus the penalty times their number."""
        if batch.penalty_weight == 0:
            return self._likelihood(model, batch, dtype), None
        with collect_penalties(model) as penalties:
            cost = self._likelihood(model, batch, dtype)
        return cost + batch.penalty_weight * batch.loss_terms * torch.stack(penalties).mean(), None

    def _likelihood(self, model: MambaLM, batch: TrackingBatch, dtype: torch.dtype) -> Tensor:
        return F.cross_entropy(self._logits(model, batch, dtype), batch.answers, reduction="sum")

    def evaluate(self, model: MambaLM, step: int, dtype: torch.dtype) -> Evaluation:
        """Return the scaled accuracy on the validation sequences."""
        accuracy = self.accuracy(model, self._validation, dtype)
        text = f"step {step}: scaled accuracy {100 * accuracy:.1f} at {self.config.tracking.judged} tokens"
        return Evaluation({"scaled_accuracy": accuracy}, text, accuracy >= self.config.tracking.solved)

    def test(self, model: MambaLM, length: int, rows: int, dtype: torch.dtype = torch.float32) -> float:
        """Return the scaled accuracy on new sequences of a length (or the next below it that has any)."""
        return self.accuracy(model, self.draw(_TEST, length, rows, length), dtype)

    def draw(self, stream: int, number: int, rows: int, length: int) -> list[TrackingBatch]:
        """Draw sequences of one length (or the next below it that has any), in several batches."""
        chance, length = self._chance(stream, number), int(self.language.lengths(1, length)[-1])
        sizes = [len(part) for part in np.array_split(np.arange(rows), -(-rows * length // 2**14))]
        return [TrackingBatch.of(self.language.sample(chance, size, length, length)) for size in sizes]

    @torch.no_grad()
    def accuracy(self, model: MambaLM, batches: list[TrackingBatch], dtype: torch.dtype) -> float:
        """Return the scaled accuracy on some batches."""
        device = model.device
        predicted = [self._logits(model, batch.to(device), dtype).argmax(-1).cpu() for batch in batches]
        answers = torch.cat([batch.answers for batch in batches])
        return scaled_accuracy(torch.cat(predicted), answers, self.language.classes)

    def _logits(self, model: MambaLM, batch: TrackingBatch, dtype: torch.dtype) -> Tensor:
        """Return the logits of the answers (m, classes), in float32 or float64."""
        with autocast(model, dtype):
            hidden_1td, _ = model.backbone(batch.inputs, cu_seqlens=batch.bounds)
            logits = model.lm_head(hidden_1td[0, batch.positions])[:, : self.language.classes]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _chance(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, stream, number])


def scaled_accuracy(predicted: Tensor, answers: Tensor, classes: int) -> float:
    """Return the accuracy on a scale where guessing evenly is 0 and no mistake is 1."""
    accuracy = (predicted == answers).double().mean().item()
    return (accuracy - 1 / classes) / (1 - 1 / classes)


@torch.no_grad()
def nearest_half_circle(model: MambaLM) -> list[float]:
    """Return the rotation of a pair of the first layer's states by tokens 0, 1, ..., in half circles.

    It is the pair for which a 1 is nearest to one half circle and a 0 nearest to none, in the sum of both. After the
    first token of a sequence, the cache holds the rotation by that token.
    """
    layer = model.backbone.layers[0]
    x_vd = layer.norm(model.backbone.embedding.weight)  # type: ignore[operator]
    _, cache = layer.mixer.prefill(x_vd.unsqueeze(1))  # type: ignore[operator, union-attr]
    rotation_vs = cache.rotation.flatten(1) / torch.pi  # from 0 to 2
    distance_vs = (rotation_vs - 1).abs()
    rotation_v = rotation_vs[:, (distance_vs[1] + 1 - distance_vs[0]).argmin()]
    return torch.where(rotation_v > 1.5, rotation_v - 2, rotation_v).tolist()
