"""The configuration of models around a stack that do not generate text: their inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from anymamba.models.bidirectional import BidirectionalConfig
from anymamba.models.class_tokens import Position, expect_positions
from anymamba.models.stack_config import StackConfig

POOLINGS = ("last", "mean", "class_token")


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """A stack, with its inputs and outputs."""

    stack: dict[str, Any]  # fields of `StackConfig`, or of `BidirectionalConfig`
    bidirectional: bool = False
    vocab_size: int | None = None  # token ids come in; or
    input_size: int | None = None  # vectors of this many numbers
    output_size: int = 1  # numbers that come out: of each step, or of the sequence
    pooling: Literal["last", "mean", "class_token"] = "mean"  # what represents a sequence, where one vector does
    labels: list[str] = field(default_factory=list)  # names of the classes, if they have any
    class_tokens: list[Position] = field(default_factory=list)  # learned rows before the input projection, by places

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("stack", "labels", "class_tokens"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        if not isinstance(self.stack, dict):
            raise ValueError(f"SequenceConfig: stack must be a table of its fields, got {self.stack!r}")
        if not isinstance(self.bidirectional, bool):
            raise ValueError(f"SequenceConfig: bidirectional must be true or false, got {self.bidirectional!r}")
        if (self.vocab_size is None) == (self.input_size is None):
            both = f"vocab_size = {self.vocab_size}, input_size = {self.input_size}"
            raise ValueError(f"SequenceConfig: give vocab_size for tokens, or input_size for numbers, got {both}")
        for name in ("vocab_size", "input_size", "output_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 2**31):
                raise ValueError(f"SequenceConfig: {name} must be a whole number, at least 1, got {value!r}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"SequenceConfig: pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if not isinstance(self.labels, list) or len(self.labels) not in (0, self.output_size):
            raise ValueError(f"SequenceConfig: labels must name all {self.output_size} outputs, got {self.labels!r}")
        expect_positions("SequenceConfig: class_tokens", self.class_tokens)
        self.stack_config()

    def stack_config(self) -> StackConfig:
        """The config of the stack.

        Raises:
            ValueError: `stack` has entries that are not its fields, or values that cannot work.
        """
        kind = BidirectionalConfig if self.bidirectional else StackConfig
        found: StackConfig = kind.from_dict(self.stack)
        return found

    def has_class_tokens(self) -> bool:
        """Whether there are any, at any level."""
        return bool(self.class_tokens) or self.stack_config().has_class_tokens()

    @property
    def d_model(self) -> int:
        """Width of the stack."""
        return int(self.stack["d_model"])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SequenceConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown field, or no stack.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"SequenceConfig: expected fields among {sorted(known)}, got {unknown}")
        if "stack" not in values:
            raise ValueError("SequenceConfig: stack must be given: a table with d_model, n_layer and more")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return dataclasses.asdict(self)
