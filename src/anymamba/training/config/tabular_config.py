"""The configuration of a run on files of numbers, labels or texts: `anymamba train --task ...`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import CheckpointSection, EvaluationSection, block_fields, check_at_least, option

Kind = Literal["classification", "regression", "masked-lm", "next-value"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class SequenceModelSection:
    """The model, by its sizes."""

    family: str = option("Mamba3", "family of the blocks: Mamba1, Mamba2, Mamba3 or a registered one")
    n_layer: int = option(2, "number of layers, those of both directions counted")
    d_model: int = option(64, "width of the residual stream")
    d_state: int | None = option(None, "state size of a head", default_text="32, or 16 for Mamba1's channels")
    headdim: int | None = option(
        None, "width of a head", default_text="16, or a smaller power of two that divides the inner width"
    )
    bidirectional: bool | None = option(
        None, "read in both directions", default_text="true, except for next-value, which cannot"
    )
    pooling: Literal["last", "mean", "class_token"] = option("mean", "what represents a sequence with one output")
    block: dict[str, Any] = option(dict, "table of further fields of the blocks' config: '{rope_fraction = 0.25}'")
    stack: dict[str, Any] = option(dict, "table of how layers are put together: '{dropout = 0.1}'")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "n_layer", "d_model", "d_state", "headdim")

    def stack_fields(self) -> dict[str, Any]:
        """Return the fields of the stack."""
        block = block_fields(self, self.family, self.d_model, d_state=32, headdim=16)
        return {"d_model": self.d_model, "n_layer": self.n_layer, "ssm_cfg": block, **self.stack}


@dataclass(frozen=True, kw_only=True)
class TabularDataSection:
    """Where the sequences come from."""

    sources: tuple[str, ...] = option((), "files to read, .csv, .jsonl or .npy; several are read one after another")
    targets: tuple[str, ...] = option(
        (), "what to predict: columns of a table, fields of JSON lines, or another .npy with a row for each sequence"
    )
    inputs: tuple[str, ...] = option(
        (),
        "columns of a table, or field of JSON lines, to read",
        default_text="all other columns, or the only other field",
    )
    sequence: str | None = option(
        None,
        "column of a table that names the sequence of which a row is a step",
        default_text="a row is a sequence, or for next-value a step",
    )
    labels: tuple[str, ...] = option((), "names of the classes, in order", default_text="those in the files, sorted")
    held_out: float = option(0.1, "fraction to hold out: of the sequences, or for next-value the end of each")
    standardize: bool = option(True, "scale numbers to mean 0 and deviation 1 over the training data")

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be above 0 and below 1, got {self.held_out}")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels must all be different, got {' '.join(self.labels)}")


@dataclass(frozen=True, kw_only=True)
class TabularBatchSection:
    """The sequences of a step."""

    rows: int = option(32, "sequences per step")
    length: int = option(1024, "largest number of steps of a sequence; longer ones are cut")
    accumulation: int = option(1, "microbatches per step, whose gradients are summed, to save memory")
    hidden: float = option(0.15, "fraction of the tokens that are masked, which a masked language model must predict")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "rows", "length", "accumulation")
        if self.rows % self.accumulation:
            raise ValueError(f"rows must be a multiple of accumulation = {self.accumulation}, got {self.rows}")
        if not 0 < self.hidden < 1:
            raise ValueError(f"hidden must be above 0 and below 1, got {self.hidden}")


@dataclass(frozen=True, kw_only=True)
class TabularConfig(RunConfig):
    """A run that learns from files."""

    task: Kind = option("classification", "what is learned")
    model: SequenceModelSection = field(default_factory=SequenceModelSection)
    data: TabularDataSection = field(default_factory=TabularDataSection)
    batch: TabularBatchSection = field(default_factory=TabularBatchSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)

    def __post_init__(self) -> None:
        """Validate the fields."""
        super().__post_init__()
        if self.task not in KINDS:
            raise ValueError(f"task must be language or one of {', '.join(KINDS)}, got {self.task!r}")
        if self.task in ("classification", "regression") and not self.data.targets:
            raise ValueError(f"data.targets must name what {self.task} predicts, got nothing")
        names = " ".join(self.data.targets)
        if self.task == "classification" and len(self.data.targets) > 1:
            raise ValueError(f"data.targets must name one column, the class, got {names}")
        if self.task in ("masked-lm", "next-value") and self.data.targets:
            raise ValueError(f"data.targets: {self.task} predicts its own inputs, got {names}")
        if self.task == "next-value" and self.model.bidirectional:
            raise ValueError("model.bidirectional: a model that reads both ways sees the next value, got true")
        if self.task == "masked-lm" and self.model.bidirectional is False:
            raise ValueError("model.bidirectional: a masked language model reads in both directions, got false")
        self._check_stack()

    def _check_stack(self) -> None:
        """Validate the stack before files are read."""
        # Models import torch, for which the help and mistakes in options do not wait.
        from anymamba.models import BidirectionalConfig, StackConfig

        kind = BidirectionalConfig if self.is_bidirectional else StackConfig
        stack = kind.from_dict(self.model.stack_fields())
        if stack.has_class_tokens():
            raise ValueError(
                f"model.stack: {self.task} has one output per step or sequence, so its stack cannot have class tokens; "
                'model.pooling = "class_token" puts one after each sequence'
            )

    @property
    def is_bidirectional(self) -> bool:
        """Return whether the model reads in both directions."""
        return self.task != "next-value" if self.model.bidirectional is None else self.model.bidirectional
