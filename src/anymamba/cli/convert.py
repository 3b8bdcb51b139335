"""`anymamba convert` and `anymamba push`: a checkpoint into another format, and to the hub."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anymamba.checkpoints.empty_model import parameter_count
from anymamba.checkpoints.formats import get_format, gguf
from anymamba.checkpoints.load import load_model, warn_of_non_finite
from anymamba.checkpoints.open import open_checkpoint, resolve_source
from anymamba.checkpoints.save import check_no_other_format, copy_companions, save_model
from anymamba.cli.common import DTYPES, add_eos_token_id, report_activation
from anymamba.core.threads import configure_threads
from anymamba.generation.tokenizers import Tokenizer, load_tokenizer
from anymamba.models.config import is_ambiguous
from anymamba.models.lm import MambaLM
from anymamba.quantization.quantize import weight_format


def run_convert(args: argparse.Namespace) -> None:
    """Convert a checkpoint completely or not at all: into a temporary directory, which then becomes the target."""
    # 1) Reject what cannot be written before anything is read.
    source = resolve_source(args.source)
    target = Path(args.target)
    if target.suffix == gguf.SUFFIX:
        raise ValueError(f"{target}: writing GGUF files is not supported; DST is a directory")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a directory, got a file")
    if target.is_dir() and any(target.iterdir()) and not args.force:
        raise ValueError(f"{target}: the directory is not empty; pass --force to write into it")
    check_no_other_format(target, get_format(args.format))
    # 2) Load the model, in the dtype and format of its weights that will be stored.
    configure_threads()
    checkpoint = open_checkpoint(source, dict(args.block))
    dtype = DTYPES.get(args.dtype)
    model = load_model(source, dtype=dtype, mapped=True, weights=args.weights, ssm_cfg=dict(args.block))
    warn_of_non_finite(source, model.state_dict())
    if is_ambiguous(model.config):
        report_activation(model, _load_tokenizer(model, source))
    if args.format == "transformers":
        add_eos_token_id(model, source)
    # 3) Write it, and move the files. The config goes last: a directory with a config is complete.
    with _temporary_directory(target) as temporary:
        save_model(model, temporary, args.format)
        copied = copy_companions(source, temporary)
        target.mkdir(exist_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda path: path.name in ("config.json", "params.json")):
            file.replace(target / file.name)
    stored = weight_format(model) or model.dtype
    print(
        f"{checkpoint.format.name} -> {args.format}: {parameter_count(model.config):,} parameters, {stored} in {target}"
    )
    if copied:
        print(f"copied {', '.join(copied)}")


def run_push(args: argparse.Namespace) -> None:
    """Push a model and its tokenizer, and print the address of the commit."""
    directory = resolve_source(args.model)
    model = load_model(directory, mapped=True)
    if args.format == "transformers":
        add_eos_token_id(model, directory)
    print(model.push_to_hub(args.name, companions=directory, format=args.format, private=args.private or None))


@contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    """Yield the name of a directory next to the target; after an error, no new directory is left."""
    missing = [directory for directory in target.parents if not directory.exists()]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for directory in missing:
            with suppress(OSError):  # it is not empty, or was not made
                directory.rmdir()
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def _load_tokenizer(model: MambaLM, source: Path) -> Tokenizer | None:
    """Return the model's tokenizer, if there is one and it can be read."""
    try:
        return load_tokenizer(None, source, model.config.padded_vocab_size)
    except ValueError:
        return None
