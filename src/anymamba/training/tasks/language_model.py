"""Training a language model on text: the model, its tokenizer, its rows, its loss, and the held-out text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import open_checkpoint, read_config
from anymamba.checkpoints.save import COMPANION_FILES, copy_companions, save_config
from anymamba.core.io import atomic_write, check_tensor_names
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, write_end_token
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.training.checkpoint.sharded_tensors import TensorShard
from anymamba.training.config.run_config import TrainingConfig
from anymamba.training.data.batches import Batch, Batches
from anymamba.training.data.documents import Text, bpe_vocab_size, train_bpe
from anymamba.training.data.shards import open_corpus, prepare
from anymamba.training.data.sources import find_text
from anymamba.training.distributed.process_group import World
from anymamba.training.evaluation import HeldOut, default_prompt, sample_text, score_held_out
from anymamba.training.metrics.loggers import plot_losses
from anymamba.training.tasks.task import Evaluation, Task, autocast


class LanguageTask(Task[Batch]):
    """A language model on text."""

    METRICS = ("held_out_bits_per_byte",)
    config: TrainingConfig

    def __init__(
        self,
        config: TrainingConfig,
        directory: Path,
        report: Callable[[str], None],
        *,
        begun: Path | None = None,
        world: World | None = None,
        prepared: bool = False,
    ) -> None:
        """Prepare the text of a new run, or open that of a run that has a checkpoint.

        The config is what `resolve_config` returned, `begun` the checkpoint to continue from (None for a new run), and
        `prepared` says whether the main rank has prepared the text.
        """
        self.config = config
        self._directory = directory
        self._world = world = world or World()
        self.held_out: HeldOut | None = None  # result of the last evaluation
        self._init = None if config.model.init is None or begun else open_checkpoint(config.model.init)
        self._begun = None if config.model.init is None or not begun else read_config(begun)
        shards = Path(config.data.shards) if config.data.shards else directory / "data"
        if begun is None and not prepared:
            text = find_text(config.data, report)
            self._tokenizer = self._make_tokenizer(text, report)
            self.corpus = prepare(config.data, shards, self._tokenizer, report, text)
        else:
            self._tokenizer = self._open_tokenizer()
            self.corpus = open_corpus(shards)
        self._batches = Batches(
            self.corpus.train,
            mode=config.data.mode,
            length=config.batch.length,
            rows=config.batch.rows,
            accumulation=config.batch.accumulation,
            seed=config.seed,
            dp_rank=world.dp_rank,
            dp_size=world.dp_size,
            cp_group=world.cp_group,
        )

    @property
    def fingerprint(self) -> str:
        """Checksum of the tokenized text."""
        return self.corpus.checksum

    @property
    def prompt(self) -> str:
        """Return the beginning of samples."""
        if self.config.evaluation.prompt is not None:
            return self.config.evaluation.prompt
        return "def " if self.config.data.sources == ("stdlib",) else default_prompt(self.corpus, self._tokenizer)

    def make_model(self, dtype: torch.dtype) -> MambaLM:
        """Create the language model to start from, or a new one for the tokenizer's vocabulary."""
        if self._init is None:
            config = self._begun or self.config.model.lm_config(self._tokenizer.vocab_size)
            return MambaLM(config, dtype=dtype)
        model = MambaLM(self._init.config, dtype=dtype)
        model.load_state_dict(load_model(self._init.directory, dtype=dtype).state_dict())
        return model

    def batches(self, step: int) -> list[Batch]:
        """Return the rows of text of a step."""
        return self._batches.step(step)

    def loss(
        self, model: MambaLM, batch: Batch, carried: LMCache | None, dtype: torch.dtype
    ) -> tuple[Tensor, LMCache | None]:
        """Compute the summed loss in nats, and the state after each row of a stream."""
        return batch_loss_sum(model, batch, carried, dtype, return_state=self.config.data.mode == "stream")

    def evaluate(self, model: MambaLM, step: int, dtype: torch.dtype) -> Evaluation:
        """Score the held-out text, and write a sample."""

        def loss_sum(batch: Batch, carried: LMCache | None) -> tuple[Tensor, LMCache | None]:
            return batch_loss_sum(model, batch.to(model.device), carried, dtype)

        self.held_out = held_out = score_held_out(loss_sum, self.corpus, self._world)
        baselines = "; ".join(f"{name}: {bits:.4f}" for name, bits in held_out.baselines.items())
        lines = [f"step {step}: held out {held_out.bits_per_byte:.4f} bits per byte, lower is better ({baselines})"]
        text = sample_text(model, self._tokenizer, self.prompt, self.config.evaluation, self.config.seed)
        if text and self._world.is_main:
            samples = self._directory / "samples"
            samples.mkdir(exist_ok=True)
            with atomic_write(samples / f"step-{step:08d}.txt") as temporary:
                temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
            lines += [f"  | {line}" for line in text.splitlines()]
        return Evaluation({"held_out_bits_per_byte": held_out.bits_per_byte}, "\n".join(lines))

    def write_model(self, model: MambaLM, directory: Path) -> None:
        """Write config, weights and tokenizer, as `MambaLM.from_pretrained` and `anymamba generate` open them."""
        model.save_pretrained(directory)
        self._copy_tokenizer(directory)

    def write_description(self, model: MambaLM, directory: Path) -> None:
        """Write the config and the tokenizer's files."""
        save_config(model, directory)
        self._copy_tokenizer(directory)

    def _copy_tokenizer(self, directory: Path) -> None:
        if self.config.data.tokenizer != "bytes":
            copy_companions(self._directory, directory)

    def carried_tensors(self, parts: Sequence[LMCache]) -> dict[str, Tensor | TensorShard]:
        """Return the states of the streams that this rank reads, as one cache."""
        tensors = LMCache.cat(list(parts)).tensors()
        if self._world.dp_size == 1:
            return dict(tensors)
        spans = tuple((rows.start, rows.stop) for rows in self._batches.local_rows())
        return {name: TensorShard(x, spans, self.config.batch.rows) for name, x in tensors.items()}

    def carried_from(self, model: MambaLM, tensors: Mapping[str, Any]) -> list[Any]:
        """Read the states of the streams that this rank reads, for each microbatch, of which nothing else is read."""
        zero_state = model.init_cache(1)
        expected = zero_state.tensors()
        check_tensor_names("carried: the state", tensors, expected)
        for name, x in expected.items():
            if tuple(tensors[name].shape) != (shape := (self.config.batch.rows, *x.shape[1:])):
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensors[name].shape)}")
        return [
            zero_state.with_tensors(tensors[name][rows].to(model.device) for name in expected)
            for rows in self._batches.local_rows()
        ]

    def plot(self, directory: Path) -> None:
        """Draw `loss.png`."""
        if self.held_out is not None:
            text = self.corpus.train
            bytes_per_token = int(text.sizes.sum()) / text.total
            plot_losses(directory / "metrics.csv", directory / "loss.png", self.held_out.baselines, bytes_per_token)

    def _open_tokenizer(self) -> Tokenizer:
        """Open the run's own tokenizer file."""
        if self.config.data.tokenizer == "bytes":
            return ByteTokenizer()
        return FileTokenizer(self._directory / "tokenizer.json", self.config.data.end_token)

    def _make_tokenizer(self, text: Text, report: Callable[[str], None]) -> Tokenizer:
        """Copy the tokenizer's files into the run, or train one; remove those that a failed attempt has left."""
        name, used = self.config.data.tokenizer or "bytes", list[str]()
        target = self._directory / "tokenizer.json"
        if (size := bpe_vocab_size(name)) is not None:
            train_bpe(text, size, target)
            used = [target.name]
        elif name != "bytes":
            used = [*copy_companions(Path(name).parent, self._directory), target.name]
            with atomic_write(target) as temporary:
                shutil.copyfile(name, temporary)
        for other in set(COMPANION_FILES) - set(used):
            (self._directory / other).unlink(missing_ok=True)
        tokenizer = self._open_tokenizer()
        if isinstance(tokenizer, FileTokenizer):
            write_end_token(tokenizer, self._directory)
            if not tokenizer.end:
                report(
                    f"{name}: no token that ends a document is known, so the model will not learn where one ends; name "
                    "it with --data.end_token TOKEN"
                )
        return tokenizer


def batch_loss_sum(
    model: MambaLM, batch: Batch, carried: LMCache | None, dtype: torch.dtype, *, return_state: bool = True
) -> tuple[Tensor, LMCache | None]:
    """Compute the summed negative log-likelihood of a batch's targets, and the detached state after each of its rows.

    `carried` is the state of each row after the step before, or None if all rows start from a zero state. The loss is
    in float32 or float64.
    """
    with autocast(model, dtype):
        cache = None
        if carried is not None and bool((batch.carried < len(batch.last)).any()):
            zero_state = model.init_cache(1).to(dtype=dtype)
            cache = LMCache.cat([carried, zero_state]).rows(batch.carried)
        output = model(
            batch.inputs,
            cache,
            targets=batch.targets,
            cu_seqlens=batch.cu_seqlens,
            logits="none",
            context=batch.context,
        )
    assert output.nats is not None
    return output.nats, _states_of_rows(output.cache.detach(), batch) if return_state else None


def _states_of_rows(cache: LMCache, batch: Batch) -> LMCache:
    """Return the state after each row of a batch, also of rows that end on another rank."""
    states = cache.rows(batch.last.clamp(min=0))
    if batch.context is None:
        return states
    cp_group, is_local = batch.context.cp_group, batch.last >= 0
    return states.with_tensors(cp_group.broadcast_rows(x, is_local) for x in states.leaves())
