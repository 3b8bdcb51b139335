"""`anymamba inspect`: an HTML page that shows what a model does with a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anymamba.analysis.page import render_page
from anymamba.analysis.report_data import report_data
from anymamba.cli.common import check_at_least, decode_text, format_bytes, load, read_file, stdin_bytes
from anymamba.core.io import atomic_write


def run(args: argparse.Namespace) -> None:
    """Run the model over the text, and write the page."""
    target = Path(args.out)
    check_at_least(args, 1, "tokens")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(
            f"--out {args.out}: {'it is a directory' if target.is_dir() else 'there is no such directory'}"
        )
    model, tokenizer = load(args)
    if args.prompt is not None:
        text = decode_text("--prompt", args.prompt.encode("utf-8", errors="surrogateescape"), tokenizer)
    elif args.file is not None:
        text = decode_text(args.file, read_file(args.file), tokenizer)
    else:
        text = decode_text("stdin", stdin_bytes().read(), tokenizer)
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the text is empty: pass --prompt, --file, or a text on stdin")
    name = Path(args.model).name or args.model
    content = render_page(report_data(model, tokenizer, ids[: args.tokens], name=name, text_tokens=len(ids))).encode(
        "utf-8"
    )
    with atomic_write(target) as temporary:
        temporary.write_bytes(content)
    cut = f", the first {args.tokens} of {len(ids)} tokens" if len(ids) > args.tokens else ""
    print(f"{target}: {format_bytes(len(content))}{cut}", file=sys.stderr)
