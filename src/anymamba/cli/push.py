"""`anymamba push`: a model to the hub."""

from __future__ import annotations

import argparse

from anymamba.cli.common import name_end
from anymamba.models.opening import resolve
from anymamba.models.pretrained import load_model


def run(args: argparse.Namespace) -> None:
    """Push the model and its tokenizer, and say where they are."""
    directory = resolve(args.model)
    model = load_model(directory, mapped=True)
    if args.format == "transformers":
        name_end(model, directory)
    where = model.push_to_hub(args.name, companions=directory, format=args.format, private=args.private or None)
    print(where)
