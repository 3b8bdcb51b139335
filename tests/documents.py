"""Runs the code blocks of a page in order, as a reader who pastes them would.

`python -m tests.documents PAGE DIRECTORY` runs those of one page in a directory that has what the documents speak of:
a model, texts, a config. Python blocks of a page share their names. Of a shell block, commands of `anymamba` run in the
same process, with sizes that take a moment; of `make` and `python -m`, the target or module must exist; others must be
bash. TOML must be a config, JSON must be JSON. A block whose first line is a comment "# needs ..." or "# takes ..." is
for readers who have that: it is checked and not run.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"# (needs|takes) \S")
SECONDS = 60  # of the processor, for a block; one that takes longer has to say so
SHELL = {
    "anymamba",
    "pip",
    "make",
    "python",
    "python3",
    ".venv/bin/python",
    "torchrun",
    "git",
    "curl",
    "cmake",
    "docker",
}
ENDLESS = {"serve"}  # commands that run until they are stopped
REMOTE = {"push"}  # commands that write to somebody's hub
SIZES = {
    "schedule.steps": 2,
    "schedule.warmup": 1,
    "batch.tokens": 64,
    "batch.length": 32,
    "evaluation.sample_tokens": 2,
    "data.held_out_bytes": 200,
}
MODEL_SIZES = {"model.n_layer": 1, "model.d_model": 16, "model.d_state": 8, "model.headdim": 8}


class Block(NamedTuple):
    """A fenced block: its page, the line of its first line of code, its language and its code."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def marked(self):
        """Return whether the block is marked as one that is checked and not run."""
        return bool(MARK.match(self.code))

    @property
    def location(self):
        """Return the page and line for messages."""
        return f"{self.page.name}, line {self.line}"

    @property
    def lines(self):
        """Return the commands of a shell block, each on one line."""
        return [line for line in self.code.replace("\\\n", " ").splitlines() if line.strip() and line[:1] != "#"]


def pages():
    """Return every page whose code must run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    """Return the blocks of a page. One without a language is shell code if it begins with a command, else no code."""
    page_blocks, opened = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*(```+)\s*([\w+-]*)", line)
        if opened is None and fence:
            opened = (number, fence[1], fence[2], [])
        elif opened is not None and line.strip() == opened[1]:
            begin, _, language, code = opened
            text = "\n".join(code)
            first = next((words for line in code if (words := line.split()) and words[0] != "#"), [""])[0]
            language = language or ("shell" if first in SHELL else "")
            page_blocks.append(Block(page, begin + 1, {"bash": "shell", "sh": "shell"}.get(language, language), text))
            opened = None
        elif opened is not None:
            opened[3].append(line)
    assert opened is None, f"{page.name}: the block of line {opened[0]} has no end"
    return page_blocks


def check(block):
    """Raise for a block that cannot be run."""
    if block.language == "python":
        tree = ast.parse(block.code, block.location)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "anymamba":
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
    elif block.language == "toml":
        from anymamba.training.config.run_config import TrainingConfig, tomllib

        TrainingConfig.from_dict(tomllib.loads(block.code), block.location)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "shell":
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        for line in block.lines:
            check_command(line)


def check_command(line):
    """Raise for a command with an option, target or module that does not exist."""
    words = shlex.split(line, comments=True)
    words = words[next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), 0) :]
    if words[:1] == ["anymamba"] and "|" not in words:
        from anymamba.cli.main import parse

        parse(arguments(words))
    elif words[:1] == ["make"]:
        targets = re.findall(r"^([\w$()./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words[1:]:
            name = word.replace(".venv", "$(VENV)")
            assert "=" in word or word.startswith("-") or name in targets, f"{line}: the Makefile has no {word}"
    elif len(words) > 2 and Path(words[0]).name.startswith("python") and words[1] == "-m":
        assert importlib.util.find_spec(words[2]), f"{line}: no module {words[2]}"


def arguments(words):
    """Return the arguments of an anymamba command line, without the shell's own."""
    arguments_of_line = []
    for word in words[1:]:
        if word in (">", "2>", "<", "&", "&&", ";"):
            break
        arguments_of_line += (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]
    return arguments_of_line


def run_shell(block):
    """Run the commands of anymamba."""
    from anymamba.cli.main import main

    for line in block.lines:
        words = shlex.split(line, comments=True)
        if words[:1] != ["anymamba"] or "|" in words or words[1] in ENDLESS | REMOTE:
            continue
        command_line, printed = arguments(words), io.TextIOWrapper(io.BytesIO())
        if command_line[0] == "train":
            sizes = (
                {} if "--resume" in command_line else SIZES | ({} if "--model.init" in command_line else MODEL_SIZES)
            )
            command_line += [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        with contextlib.redirect_stdout(printed):
            code = main(command_line)
        assert code == 0, f"{line}: exit code {code}"
        printed.seek(0)
        if ">" in words:
            Path(words[words.index(">") + 1]).write_text(printed.read())


def prepare(directory):
    """Write the files that the documents use into a directory: models, texts, prompts, configs."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from anymamba import MambaLM

    text = "Once upon a time there was a model. It read 1 < 2, and wrote: def f(x):\n    return x\n"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    torch.manual_seed(0)
    ssm = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
    model = MambaLM(d_model=16, n_layer=1, vocab_size=tokenizer.get_vocab_size(), ssm_cfg=ssm)
    for name in ("MODEL", "SRC", "path/to/model", "path/to/checkpoint"):
        model.save_pretrained(directory / name)
        tokenizer.save(str(directory / name / "tokenizer.json"))
    for folder in ("books", "notes", "letters", "text"):
        (directory / folder).mkdir()
        for i in range(6):
            (directory / folder / f"{i}.txt").write_text(text * (i + 3))
    for name in ("some.py", "text.txt", "story.txt", "questions.txt", "prompts.txt"):
        (directory / name).write_text(text)
    (directory / "articles.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for _ in range(6)))
    (directory / "questions.jsonl").write_text(json.dumps({"prompt": "Once"}) + "\n")
    values = {"data.sources": ["books"], **SIZES, **MODEL_SIZES}
    config = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    for name in ("CONFIG.toml", "mine.toml"):
        (directory / name).write_text(config)


def run_page(page, directory):
    """Run the blocks of a page."""
    prepare(directory)
    os.chdir(directory)
    sys.path.insert(0, str(ROOT))  # for the examples
    names = {"__name__": "__main__"}
    for block in blocks(page):
        print(f"{block.location}: {block.language or 'no code'}{', only checked' if block.marked else ''}", flush=True)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        check(block)
        if not block.marked and block.language == "python":
            exec(compile(block.code, block.location, "exec"), names)
        elif not block.marked and block.language == "shell":
            run_shell(block)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"`torch.jit.script_method` is deprecated")
    run_page(Path(sys.argv[1]), Path(sys.argv[2]))
