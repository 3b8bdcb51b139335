"""Defaults and checks of a language model's config that need more than its fields, before any text is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anymamba.checkpoints.open import open_checkpoint
from anymamba.core.dtypes import parse_device
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer
from anymamba.models.mamba3_activation import warn_if_ambiguous
from anymamba.training.compile import check_compiler
from anymamba.training.config.run_config import RunConfig, TrainingConfig
from anymamba.training.data.run_tokenizer import bpe_vocab_size
from anymamba.training.distributed.process_group import World
from anymamba.training.metrics.loggers import check_loggers


def validate_mesh(config: TrainingConfig, world: World) -> TrainingConfig:
    """Arrange the ranks in the mesh of a config, and check that its rows and layers fit the mesh.

    Raises:
        ValueError: They do not fit.
    """
    device = parse_device(world.local_device(config.device), "device =")
    batch, parallel = config.batch, config.parallel
    world.set_mesh(parallel, device)
    if batch.rows % (batch.accumulation * world.dp_size):
        raise ValueError(
            f"batch: the rows of a microbatch, {batch.rows // batch.accumulation} (tokens / length / accumulation), "
            f"must be a multiple of the ranks that divide them, parallel.replicate · shard = {world.dp_size}"
        )
    if parallel.context > 1:
        if config.precision.compile:
            raise ValueError("precision.compile = true: torch cannot compile layers if ranks share a sequence")
        local_tokens = batch.tokens // batch.accumulation // world.dp_size // parallel.context
        min_tokens = 1 if config.model.init else getattr(config.model.lm_config(256).block_config(), "d_conv", 1)
        if local_tokens < min_tokens:
            raise ValueError(
                f"parallel.context = {parallel.context}: each rank's part of the rows must have {min_tokens} tokens "
                f"or more, got {local_tokens}"
            )
    return config


def validate_run(config: RunConfig) -> None:
    """Check what every run needs: its device, a compiler, and the libraries of its logs.

    Raises:
        ValueError: One of them is missing.
    """
    device = parse_device(config.device, "device =")
    if config.precision.compile:
        check_compiler(device)
    check_loggers(config)


def resolve_config(config: TrainingConfig) -> TrainingConfig:
    """Resolve config defaults and validate the config before reading data.

    Returns:
        The config, with a tokenizer.

    Raises:
        ValueError: The device, the model, the model to start from or the tokenizer cannot work.
    """
    validate_run(config)
    name = config.data.tokenizer
    bpe_size = None if name is None else bpe_vocab_size(name)
    # 1) The model: a new one, or one to start from with its tokenizer.
    if config.model.init is None:
        config.model.lm_config(256)
        name = name or "bytes"
    elif bpe_size is not None:
        raise ValueError(
            f"data.tokenizer = {name}: model.init comes with the tokenizer that its weights were trained with"
        )
    else:
        source = open_checkpoint(config.model.init)
        if source.weights is not None:
            raise ValueError(
                f"{config.model.init}: weights in {source.weights} cannot be trained; start from the model that they "
                "were quantized from"
            )
        hint = "--block a_activation=softplus to `anymamba convert` first"
        warn_if_ambiguous(config.model.init, source.config, hint)
        config.model.check_matches(source.config)
        tokenizer = load_tokenizer(name, source.directory, source.config.padded_vocab_size)
        is_bytes = isinstance(tokenizer, ByteTokenizer)
        name = name or ("bytes" if is_bytes else str(source.directory / "tokenizer.json"))
    # 2) The tokenizer: bytes, a file, or one that will be trained on the text.
    if bpe_size is not None:
        return config
    if name != "bytes":
        name = str(Path(name, "tokenizer.json") if Path(name).is_dir() else name)
        FileTokenizer(name, config.data.end_token)
    elif config.data.end_token is not None:
        raise ValueError(f"data.end_token = {config.data.end_token}: bytes have no token that ends a document")
    return replace(config, data=replace(config.data, tokenizer=name))
