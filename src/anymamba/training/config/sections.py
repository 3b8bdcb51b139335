"""The sections of a run's configuration: fields are declared here, and files, options and help follow from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from anymamba.core.config_fields import suggest

if TYPE_CHECKING:
    from anymamba.models.config import MambaLMConfig


def option(
    default: Any, help: str, *, default_text: str = "", ignored_on_resume: bool = False, mutable_on_resume: bool = False
) -> Any:
    """Return a field of a config section.

    Args:
        default: Default value, or a type whose empty instance is the default.
        help: Phrase for the command line.
        default_text: Meaning of a default of None, for the command line.
        ignored_on_resume: Whether a resumed run may have another value, because it changes no weight.
        mutable_on_resume: Whether a resumed run may have another value, which then applies to its remaining steps.
    """
    metadata = {
        "help": help,
        "default": default_text,
        "ignored_on_resume": ignored_on_resume,
        "mutable_on_resume": mutable_on_resume,
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_at_least(section: Any, least: int, *names: str) -> None:
    """Check that fields of a section are not below a limit.

    Raises:
        ValueError: One of them is.
    """
    for name in names:
        if (value := getattr(section, name)) is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def block_fields(section: Any, family: str, width: int, *, d_state: int, headdim: int) -> dict[str, Any]:
    """Return the family of a model's blocks and the fields of their config, with default sizes.

    Raise `ValueError` for an unknown family, or a field that it does not have. `section` has `d_state`, `headdim` and
    `block`; `width` is that of the residual stream. A family without heads has a state of 16 per channel, not the
    default `d_state`; a registered family has its own defaults, if any. The default `headdim` is halved until it
    divides the inner width.
    """
    from anymamba.models.families import BUILT_IN, get_family  # which imports torch

    kind = get_family(family, "model.family").CONFIG
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    default_sizes = {"d_state": d_state if "headdim" in defaults else 16, "headdim": headdim}
    if family not in BUILT_IN:
        own_defaults = {size: defaults.get(size) for size in default_sizes}
        default_sizes |= {size: x for size, x in own_defaults.items() if isinstance(x, int) and x > 0}
    expand = section.block.get("expand", defaults.get("expand", 1))
    inner_width = int(expand * width) if isinstance(expand, int | float) and 0 < expand < 2**16 else width
    while inner_width % default_sizes["headdim"]:
        default_sizes["headdim"] //= 2
    for size in default_sizes:
        if size not in defaults and getattr(section, size) is not None:
            raise ValueError(f"model.{size}: {family} has none, got {getattr(section, size)}")
    sizes = {size: getattr(section, size) or x for size, x in default_sizes.items() if size in defaults}
    for name in set(section.block) - set(defaults):
        if suggestion := suggest(name, defaults):  # other unknown names are errors of the model's own config
            raise ValueError(f"model.block.{name}: no such field of {family}{suggestion}")
    return {"layer": family, **sizes, **section.block}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The language model: one to start from, or a new one by a single size setting or by its sizes."""

    init: str | None = option(
        None, "directory or hub id of a model to start from: its weights, sizes and, unless another is named, tokenizer"
    )
    family: str | None = option(
        None, "family of the blocks: Mamba1, Mamba2, Mamba3 or a registered one", default_text="Mamba3"
    )
    depth: int | None = option(
        None, "one number that sets the size: layers; the width is 64 times that, in heads of 64", default_text="4"
    )
    n_layer: int | None = option(None, "number of layers, in place of model.depth", default_text="model.depth")
    d_model: int | None = option(None, "width of the residual stream", default_text="64 times model.depth")
    d_state: int | None = option(None, "state size of a head", default_text="64, or 16 for Mamba1's channels")
    headdim: int | None = option(
        None, "width of a head", default_text="64, or a smaller power of two that divides the inner width"
    )
    d_intermediate: int | None = option(None, "width of an MLP after each block", default_text="0, no MLP")
    tie_embeddings: bool | None = option(None, "use the embedding as the head as well", default_text="true")
    block: dict[str, Any] = option(dict, "table of further fields of the blocks' config: '{rope_fraction = 0.25}'")
    stack: dict[str, Any] = option(dict, "table of how layers are put together: '{n_virtual = 12, streams = 2}'")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "depth", "n_layer", "d_model", "d_state", "headdim")

    def lm_config(self, vocab_size: int) -> MambaLMConfig:
        """Return the config of a new model, for a tokenizer of `vocab_size` tokens."""
        from anymamba.models.config import MambaLMConfig  # which imports torch

        depth = self.depth or 4
        width = self.d_model or 64 * depth
        return MambaLMConfig(
            d_model=width,
            n_layer=self.n_layer or depth,
            vocab_size=vocab_size,
            d_intermediate=self.d_intermediate or 0,
            tie_embeddings=self.tie_embeddings is not False,
            ssm_cfg=block_fields(self, self.family or "Mamba3", width, d_state=64, headdim=64),
            stack=self.stack,
        )

    def check_matches(self, config: MambaLMConfig) -> None:
        """Raise `ValueError` if the config of a model to start from differs from this section."""
        block, depth = config.block_config(), self.depth
        pairs = {
            "family": (self.family, config.layer),
            "n_layer": (self.n_layer or depth, config.n_layer),
            "d_model": (self.d_model or (depth and 64 * depth), config.d_model),
            "d_intermediate": (self.d_intermediate, config.d_intermediate),
            "tie_embeddings": (self.tie_embeddings, config.tie_embeddings),
            "stack": (self.stack or None, config.stack),
            **{
                name: (value, getattr(block, name, None))
                for name, value in {"d_state": self.d_state, "headdim": self.headdim, **self.block}.items()
            },
        }
        differences = [
            f"{name} (expected {expected!r}, got {actual!r})"
            for name, (expected, actual) in pairs.items()
            if expected is not None and actual != (tuple(expected) if isinstance(expected, list) else expected)
        ]
        if differences:
            raise ValueError(f"model.init = {self.init}: the model differs from the config: {', '.join(differences)}")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where the text comes from and how it becomes rows."""

    sources: tuple[str, ...] = option(("stdlib",), 'files, directories, glob patterns, "-" for stdin, or "stdlib"')
    format: Literal["auto", "text", "jsonl"] = option(
        "auto", "a document is a whole file, or a line of JSON; auto: by the name, .jsonl and .ndjson for lines"
    )
    exclude: tuple[str, ...] = option((), "patterns of files and directories to leave out: '*.log' drafts")
    on_error: Literal["stop", "skip"] = option(
        "stop", "if files are not text: stop and list them, or skip and list them"
    )
    tokenizer: str | None = option(
        None,
        '"bytes", a tokenizer.json, a directory with one, or "bpe:1024" to train one with that many byte pairs',
        default_text="the one of model.init, or bytes",
    )
    end_token: str | None = option(None, "token that ends a document", default_text="the tokenizer's")
    jsonl_field: str = option("text", "field of a JSON line that holds the text")
    mode: Literal["packed", "stream"] = option(
        "packed", "rows in random order, or contiguous streams that carry their state from step to step"
    )
    held_out: float = option(0.02, "largest fraction of the text to hold out from training")
    held_out_bytes: int = option(65536, "largest number of bytes of held-out text to evaluate on")
    shards: str | None = option(None, "directory of the tokenized text", default_text="data/ in the run's directory")
    shard_tokens: int = option(2**24, "tokens in a shard, roughly")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "shard_tokens")
        check_at_least(self, 2, "held_out_bytes")
        if not self.sources:
            raise ValueError("sources must name some text, got none")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be above 0 and below 1, got {self.held_out}")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = option(
        "adamw", "muon: Muon for the projections between embedding and head, AdamW for the rest"
    )
    lr: float = option(3e-3, "the largest learning rate", mutable_on_resume=True)
    beta1: float = option(0.9, "decay of the mean of the gradients")
    beta2: float = option(0.95, "decay of the mean of their squares")
    eps: float = option(1e-8, "added to the root of that mean")
    weight_decay: float = option(
        0.1, "weight decay of matrices; dt_bias, A_log, D, norms and biases never decay", mutable_on_resume=True
    )
    decay_embeddings: bool = option(False, "also decay the embedding and the head")
    clip: float = option(1.0, "the largest norm of the gradient; 0: no clipping", mutable_on_resume=True)
    muon_lr: float | None = option(
        None, "the largest learning rate of Muon's matrices", default_text="optimizer.lr", mutable_on_resume=True
    )
    momentum: float = option(0.95, "momentum of Muon")
    muon_exclude: tuple[str, ...] = option(
        ("dt_proj",), "projections, or parts of them (in_proj[z]), to leave to AdamW"
    )

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 0, "lr", "eps", "weight_decay", "clip", "beta1", "beta2", "momentum", "muon_lr")
        for name in ("beta1", "beta2", "momentum"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The number of steps, and the learning rate over them."""

    steps: int = option(1000, "number of steps")
    kind: Literal["cosine", "wsd", "constant"] = option(
        "cosine", "after the warm-up: a half cosine, constant with a linear decay at the end, or constant"
    )
    warmup: int = option(50, "steps of linear warm-up")
    decay: float = option(0.2, "fraction of the steps over which a wsd schedule decays")
    final: float = option(0.1, "learning rate at the end, as a fraction of the largest")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "steps")
        check_at_least(self, 0, "warmup")
        for name in ("decay", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """The tokens of a step."""

    tokens: int = option(4096, "tokens per step")
    length: int = option(256, "tokens per row")
    accumulation: int = option(1, "microbatches per step, whose gradients are summed, to save memory")

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "tokens", "length", "accumulation")
        if self.tokens % (self.length * self.accumulation):
            raise ValueError(
                f"tokens must be a multiple of length · accumulation = {self.length} · {self.accumulation}, "
                f"got {self.tokens}"
            )

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.tokens // self.length


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """The dtype of the computation, and what is stored for the backward pass."""

    dtype: Literal["float32", "bfloat16", "float64"] = option(
        "float32", "dtype to compute in; bfloat16: autocast, with weights in float32"
    )
    compile: bool = option(False, "have torch compile the layers; needs a C++ compiler")
    activation_checkpointing: bool = option(False, "recompute each layer in the backward pass, to save memory")


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the ranks that torchrun starts divide the work; there must be replicate · shard · context of them."""

    replicate: int | None = option(
        None,
        "copies of the model that read different rows",
        default_text="as many as shard and context leave",
        ignored_on_resume=True,
    )
    shard: int = option(
        1, "ranks that divide the weights between them and read different rows (FSDP)", ignored_on_resume=True
    )
    context: int = option(1, "ranks that divide every row between them", ignored_on_resume=True)
    reduce: Literal["float32", "bfloat16"] = option(
        "float32", "dtype in which gradients are summed over ranks", mutable_on_resume=True
    )
    timeout: int = option(600, "seconds after which a rank that does not answer ends the run", ignored_on_resume=True)

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "replicate", "shard", "context", "timeout")


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """When a run is evaluated, and where it is logged."""

    every: int = option(100, "steps between evaluations; 0: only at the end", ignored_on_resume=True)
    log_every: int = option(10, "steps between lines of progress, if stderr is not a terminal", ignored_on_resume=True)
    tensorboard: bool = option(False, "write TensorBoard logs (pip install 'anymamba[train]')", ignored_on_resume=True)
    wandb: str | None = option(
        None,
        "Weights & Biases project to log to (pip install 'anymamba[wandb]')",
        default_text="no log",
        ignored_on_resume=True,
    )

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 0, "every")
        check_at_least(self, 1, "log_every")


@dataclass(frozen=True, kw_only=True)
class TextEvaluationSection(EvaluationSection):
    """When a run is evaluated, and where it is logged, with a sample of text."""

    prompt: str | None = option(
        None,
        "text that the sample of each evaluation starts with",
        default_text='"def " for stdlib, or the first words of the held-out text',
        ignored_on_resume=True,
    )
    sample_tokens: int = option(200, "tokens of the sample; 0: no sample", ignored_on_resume=True)
    temperature: float = option(0.8, "temperature of the sample", ignored_on_resume=True)

    def __post_init__(self) -> None:
        """Validate the fields."""
        super().__post_init__()
        check_at_least(self, 0, "sample_tokens", "temperature")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When the run is saved."""

    every: int = option(100, "steps between checkpoints; 0: only at the end", ignored_on_resume=True)
    keep: int = option(2, "checkpoints to keep", ignored_on_resume=True)

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 0, "every")
        check_at_least(self, 1, "keep")
