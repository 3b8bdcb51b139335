"""What the config of a language model leaves open, and whether it can work, before any text is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anymamba.checkpoints.open import open_checkpoint
from anymamba.core.dtypes import parse_device
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer
from anymamba.models.mamba3_activation import warn_if_ambiguous
from anymamba.training.compile import check_compiler
from anymamba.training.config.run_config import TrainingConfig
from anymamba.training.data.run_tokenizer import bpe_vocab_size
from anymamba.training.distributed.process_group import World


def validate_mesh(config: TrainingConfig, world: World) -> TrainingConfig:
    """Let the workers take their places in a config's mesh, and check that its rows and layers fit the mesh.

    Raises:
        ValueError: they do not fit.
    """
    device = parse_device(world.local_device(config.device), "device =")
    c, p = config.batch, config.parallel
    world.set_mesh(p, device)
    if c.rows % (c.accumulation * world.dp_size):
        raise ValueError(
            f"batch: the rows of a part of a step, {c.rows // c.accumulation} (tokens / length / accumulation), must "
            f"be a multiple of the ranks that divide them, parallel.replicate · shard = {world.dp_size}"
        )
    if p.context > 1:
        if config.precision.compile:
            raise ValueError("precision.compile = true: torch cannot compile layers if ranks share a sequence")
        own = c.tokens // c.accumulation // world.dp_size // p.context
        least = 1 if config.model.init else getattr(config.model.lm_config(256).block_config(), "d_conv", 1)
        if own < least:
            raise ValueError(
                f"parallel.context = {p.context}: each rank's part of the rows must have {least} tokens or more, "
                f"got {own}"
            )
    return config


def resolve_config(config: TrainingConfig) -> TrainingConfig:
    """Check what can be checked without reading text, and return the config with a tokenizer if it left that open.

    Raises:
        ValueError: the device, the model, the model to start from or the tokenizer cannot work.
    """
    device, name = parse_device(config.device, "device ="), config.data.tokenizer
    pairs = None if name is None else bpe_vocab_size(name)
    if config.precision.compile:
        check_compiler(device)
    if config.model.init is None:
        config.model.lm_config(256)
        name = name or "bytes"
    elif pairs is not None:
        raise ValueError(
            f"data.tokenizer = {name}: model.init comes with the tokenizer that its weights were trained with"
        )
    else:
        found = open_checkpoint(config.model.init)
        if found.weights is not None:
            raise ValueError(
                f"{config.model.init}: the weights are stored in {found.weights} and cannot be trained; start from the "
                "model that they were made from"
            )
        warn_if_ambiguous(config.model.init, found.config, "--block a_activation=softplus to `anymamba convert` first")
        config.model.expect(found.config)
        tokenizer = load_tokenizer(name, found.directory, found.config.padded_vocab_size)
        beside = "bytes" if isinstance(tokenizer, ByteTokenizer) else str(found.directory / "tokenizer.json")
        name = name or beside
    if pairs is not None:
        return config
    if name != "bytes":
        name = str(Path(name, "tokenizer.json") if Path(name).is_dir() else name)
        FileTokenizer(name, config.data.end_token)
    elif config.data.end_token is not None:
        raise ValueError(f"data.end_token = {config.data.end_token}: bytes have no token that ends a document")
    return replace(config, data=replace(config.data, tokenizer=name))
