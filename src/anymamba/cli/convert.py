"""`anymamba convert`: a checkpoint from any format to one that we write, completely or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from anymamba.checkpoints.empty_model import parameter_count
from anymamba.checkpoints.formats import get_format
from anymamba.checkpoints.load import check_no_other_format, copy_companions, load_model, save_model, warn_of_non_finite
from anymamba.checkpoints.open import open_checkpoint, resolve_source
from anymamba.cli.common import DTYPES, name_end, report_activation
from anymamba.generation.tokenizers import Tokenizer, load_tokenizer
from anymamba.models.lm import MambaLM
from anymamba.quantization.quantize import weight_format


def run(args: argparse.Namespace) -> None:
    """Convert in a directory beside the target, then move what is complete."""
    source, target = resolve_source(args.source), Path(args.target)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a directory, got a file")
    if target.is_dir() and any(target.iterdir()) and not args.force:
        raise ValueError(f"{target}: the directory is not empty; pass --force to write into it")
    check_no_other_format(target, get_format(args.format))
    checkpoint = open_checkpoint(source, dict(args.block))
    options = {"weights": args.weights, "ssm_cfg": dict(args.block)}
    model = load_model(source, dtype=DTYPES.get(args.dtype), mapped=True, **options)
    warn_of_non_finite(source, model.state_dict())
    report_activation(model, _tokenizer(model, source))
    if args.format == "transformers":
        name_end(model, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_model(model, temporary, args.format)
        copied = copy_companions(source, temporary)
        target.mkdir(exist_ok=True)
        # The config goes last: a directory with a config is complete.
        for file in sorted(temporary.iterdir(), key=lambda path: path.name in ("config.json", "params.json")):
            file.replace(target / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    stored = weight_format(model) or model.dtype
    print(
        f"{checkpoint.format.name} -> {args.format}: {parameter_count(model.config):,} parameters, {stored} in {target}"
    )
    if copied:
        print(f"copied {', '.join(copied)}")


def _tokenizer(model: MambaLM, source: Path) -> Tokenizer | None:
    """The model's tokenizer, if there is one and it can be read."""
    try:
        return load_tokenizer(None, source, model.config.padded_vocab_size)
    except ValueError:
        return None
