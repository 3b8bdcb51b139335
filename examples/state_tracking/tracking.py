"""Learning a language: models, the curriculum, and how they are judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba import MambaLM
from anymamba.models.config import MambaLMConfig
from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import check_at_least, option
from anymamba.training.tasks.task import Evaluation, Task, autocast
from examples.state_tracking.languages import LANGUAGES, NONE, Sequences
from examples.state_tracking.settle import watching

# What the rows of the table have besides their sizes. Decay rates as at the time of the paper: under today's heavy tail
# a rate only falls with the inverse of its input, and a state that lasts for hundreds of tokens is not learned in time.
_MAMBA3 = {"layer": "Mamba3", "a_activation": "softplus"}
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba3": _MAMBA3,
    "mamba3-fixed-rotation": {**_MAMBA3, "rotation": "fixed"},
    "mamba3-no-rotation": {**_MAMBA3, "rope_fraction": 0.0},
    "mamba2": {"layer": "Mamba2"},
}
TURNING = ("mamba3", "mamba3-fixed-rotation")
_TRAINING, _VALIDATION, _TEST = range(3)  # streams of random numbers


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """A language, a model, and the lengths."""

    language: Literal["parity", "arithmetic", "brackets"] = option("parity", "what is learned")
    variant: Literal["mamba3", "mamba3-fixed-rotation", "mamba3-no-rotation", "mamba2"] = option("mamba3", "the blocks")
    n_layer: int = option(1, "layers")
    d_model: int = option(32, "width of the residual stream")
    d_state: int = option(64, "state size of a head")
    headdim: int = option(16, "width of a head")
    turning: float = option(0.5, "share of the state that turns, in the variants with a rotation")
    block: dict[str, Any] = option(dict, "table of further fields of the block's config")
    labels: Literal["end", "every"] = option(
        "every", "answers that are learned: that of a sequence, or of its beginnings too"
    )
    rows: int = option(256, "the most sequences of a step")
    tokens: int | None = option(
        None, "the most tokens of a step: longer sequences are fewer", default_text="any number"
    )
    shortest: int = option(3, "tokens of the shortest sequence")
    longest_first: int = option(40, "tokens of the longest sequence when the curriculum begins")
    longest_last: int = option(160, "tokens of the longest sequence when it ends")
    grows_from: float = option(0.2, "share of the steps after which the longest sequence begins to grow")
    grows_to: float = option(0.5, "share of the steps after which it has grown, each step by the same factor")
    settle: float = option(0.0, "weight of the penalty that makes turns exact (see settle.py); the loss contains it")
    settles_from: float = option(0.5, "share of the steps after which that weight begins to rise from zero")
    settles_to: float = option(0.6, "share of the steps after which it has risen")
    judged: int = option(256, "tokens of the sequences that a model is judged by")
    validation_rows: int = option(512, "sequences of an evaluation on the way")
    solved: float = option(0.999, "scaled accuracy of an evaluation on the way that ends the run")

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
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
        if not 0 <= self.settles_from <= self.settles_to <= 1:
            raise ValueError(
                f"0 <= settles_from <= settles_to <= 1 must hold, got {self.settles_from} and {self.settles_to}"
            )
        if not 0 <= self.settle < math.inf:
            raise ValueError(f"settle must be a weight of at least 0, got {self.settle}")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(RunConfig):
    """A run that learns a language."""

    tracking: TrackingSection = field(default_factory=TrackingSection)


class TrackingBatch(NamedTuple):
    """Sequences, packed.

    Attributes:
        inputs: tokens, (1, t).
        bounds: where the sequences begin, and t, (s + 1,).
        places: of the tokens after which an answer is predicted, (m,).
        answers: at these places, (m,).
        settle: weight of the penalty on turns that are not exact, ().
    """

    inputs: Tensor
    bounds: Tensor
    places: Tensor
    answers: Tensor
    settle: Tensor

    @staticmethod
    def of(sequences: Sequences, labels: str = "end", settle: float = 0.0) -> TrackingBatch:
        """From drawn sequences, with the answers of the sequences ("end"), or also of their beginnings ("every")."""
        ends = sequences.lengths.cumsum()
        places = ends - 1 if labels == "end" else np.flatnonzero(sequences.answers != NONE)
        parts = (sequences.tokens[None], np.concatenate([[0], ends]), places, sequences.answers[places])
        return TrackingBatch(*map(torch.from_numpy, (*parts, np.array(settle, dtype=np.float32))))

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Answers."""
        return self.answers.numel()

    def to(self, device: torch.device) -> TrackingBatch:
        """On another device."""
        return TrackingBatch(*(x.to(device) for x in self))


class TrackingTask(Task[TrackingBatch]):
    """The answer of a sequence, predicted after its last token."""

    METRICS = ("scaled_accuracy",)
    config: TrackingConfig

    def __init__(self, config: TrackingConfig) -> None:
        """Draw the sequences for the evaluations on the way."""
        self.config, c = config, config.tracking
        self.language = LANGUAGES[c.language]
        self._validation = self.draw(_VALIDATION, 0, c.validation_rows, c.judged)

    @property
    def fingerprint(self) -> str:
        """The language, and how its answers are drawn: everything else is in the config."""
        return self.language.name + self.language.answered

    def make_model(self, dtype: torch.dtype) -> MambaLM:
        """A language model whose head is not tied to the embedding."""
        c = self.config.tracking
        sizes: dict[str, Any] = {"d_state": c.d_state, "headdim": c.headdim}
        if c.variant in TURNING:
            sizes["rope_fraction"] = c.turning
        config = MambaLMConfig(
            d_model=c.d_model,
            n_layer=c.n_layer,
            vocab_size=self.language.vocab_size,
            tie_embeddings=False,
            ssm_cfg={**VARIANTS[c.variant], **sizes, **c.block},
        )
        return MambaLM(config, dtype=dtype)

    def longest(self, step: int) -> int:
        """Tokens of the longest sequence of step 0, 1, ..."""
        c = self.config.tracking
        return round(
            c.longest_first * (c.longest_last / c.longest_first) ** self._risen(step, c.grows_from, c.grows_to)
        )

    def settle(self, step: int) -> float:
        """Weight of the penalty on turns that are not exact, at step 0, 1, ..."""
        c = self.config.tracking
        return c.settle * self._risen(step, c.settles_from, c.settles_to)

    def _risen(self, step: int, begins: float, ends: float) -> float:
        """From 0 to 1 between two shares of the steps."""
        steps = self.config.schedule.steps
        return min(1.0, max(0.0, (step - begins * steps) / max(1.0, (ends - begins) * steps)))

    def batches(self, step: int) -> list[TrackingBatch]:
        """Sequences of all lengths up to the longest."""
        c, chance, longest = self.config.tracking, self._chance(_TRAINING, step), self.longest(step)
        rows = c.rows if c.tokens is None else max(1, min(c.rows, c.tokens // longest))
        drawn = self.language.sample(chance, rows, c.shortest, longest)
        return [TrackingBatch.of(drawn, c.labels, self.settle(step))]

    def loss(self, model: MambaLM, batch: TrackingBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """The negative log-likelihood of the answers, and the penalty, which is a mean, once for each of them."""
        if batch.settle == 0:
            return self._likelihood(model, batch, dtype), None
        with watching(model) as unsettled:
            cost = self._likelihood(model, batch, dtype)
        return cost + batch.settle * batch.loss_terms * torch.stack(unsettled).mean(), None

    def _likelihood(self, model: MambaLM, batch: TrackingBatch, dtype: torch.dtype) -> Tensor:
        return F.cross_entropy(self._logits(model, batch, dtype), batch.answers, reduction="sum")

    def evaluate(self, model: MambaLM, step: int, dtype: torch.dtype) -> Evaluation:
        """Scaled accuracy on sequences longer than any that were trained on."""
        found = self.accuracy(model, self._validation, dtype)
        text = f"step {step}: scaled accuracy {100 * found:.1f} at {self.config.tracking.judged} tokens"
        return Evaluation({"scaled_accuracy": found}, text, found >= self.config.tracking.solved)

    def test(self, model: MambaLM, length: int, rows: int, dtype: torch.dtype = torch.float32) -> float:
        """Scaled accuracy on fresh sequences of a length (or the next below it that has any)."""
        return self.accuracy(model, self.draw(_TEST, length, rows, length), dtype)

    def draw(self, stream: int, number: int, rows: int, length: int) -> list[TrackingBatch]:
        """Sequences of one length (or the next below it that has any), in parts."""
        chance, length = self._chance(stream, number), int(self.language.lengths(1, length)[-1])
        sizes = [len(part) for part in np.array_split(np.arange(rows), -(-rows * length // 2**14))]
        return [TrackingBatch.of(self.language.sample(chance, size, length, length)) for size in sizes]

    @torch.no_grad()
    def accuracy(self, model: MambaLM, batches: list[TrackingBatch], dtype: torch.dtype) -> float:
        """Scaled accuracy on some batches."""
        device = model.device
        predicted = [self._logits(model, batch.to(device), dtype).argmax(-1).cpu() for batch in batches]
        answers = torch.cat([batch.answers for batch in batches])
        return scaled_accuracy(torch.cat(predicted), answers, self.language.classes)

    def _logits(self, model: MambaLM, batch: TrackingBatch, dtype: torch.dtype) -> Tensor:
        """Of the answers, (m, classes), in float32 or wider."""
        with autocast(model, dtype):
            hidden_1td, _ = model.backbone(batch.inputs, cu_seqlens=batch.bounds)
            logits = model.lm_head(hidden_1td[0, batch.places])[:, : self.language.classes]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _chance(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, stream, number])


def scaled_accuracy(predicted: Tensor, answers: Tensor, classes: int) -> float:
    """The share of right answers on a scale where guessing evenly is 0 and all of them 1."""
    right = (predicted == answers).double().mean().item()
    return (right - 1 / classes) / (1 - 1 / classes)


@torch.no_grad()
def nearest_half_turn(model: MambaLM) -> list[float]:
    """By how many half circles tokens 0, 1, ... turn a pair of the first layer's states.

    It is the pair that is turned nearest to one by a 1, and nearest to none by a 0, in the sum of both. The first token
    of a sequence leaves its own turn in the cache.
    """
    layer = model.backbone.layers[0]
    x_vd = layer.norm(model.backbone.embedding.weight)  # type: ignore[operator]
    _, cache = layer.mixer.prefill(x_vd.unsqueeze(1))  # type: ignore[operator, union-attr]
    turns_vs = cache.rotation.flatten(1) / torch.pi  # from 0 to 2
    off_vs = (turns_vs - 1).abs()
    turns_v = turns_vs[:, (off_vs[1] + 1 - off_vs[0]).argmin()]
    return torch.where(turns_v > 1.5, turns_v - 2, turns_v).tolist()
