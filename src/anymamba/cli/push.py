"""`anymamba push`: a model to the hub."""

from __future__ import annotations

import argparse

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.cli.common import name_end


def run(args: argparse.Namespace) -> None:
    """Push the model and its tokenizer, and say where they are."""
    directory = resolve_source(args.model)
    model = load_model(directory, mapped=True)
    if args.format == "transformers":
        name_end(model, directory)
    where = model.push_to_hub(args.name, companions=directory, format=args.format, private=args.private or None)
    print(where)
