"""Train a model that reads in both directions to name the package a piece of source is from.

    python -m examples.packages [--seed 0] [--out runs/packages]

The pieces are those of the running Python's library. The model is compared with TF-IDF and logistic regression on the
same pieces; both are judged by pieces of files that neither has seen. A run that was stopped continues when the command
is given again. The table is printed and written to OUT/packages.md, and a picture of what is taken for what to
OUT/packages.png.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import numpy as np

from anymamba.training.file_config import FileConfig
from anymamba.training.file_task import file_task
from anymamba.training.predictions import Predictor
from anymamba.training.report import can_plot
from examples.packages.chunks import PACKAGES, Chunk, read_chunks, write_chunks
from examples.runs import parameters_of, report, seconds_of, trained, write_figure, write_text


def by_words(training: list[Chunk], test: list[Chunk], characters: bool) -> list[str]:
    """What TF-IDF of words, or of up to four characters, and logistic regression say.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
        from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("the comparison needs scikit-learn: pip install 'anymamba[examples]'") from error
    kind = {"analyzer": "char", "ngram_range": (1, 4), "min_df": 2} if characters else {"token_pattern": r"\w+"}
    vectors = TfidfVectorizer(sublinear_tf=True, **kind)
    x = vectors.fit_transform([chunk.text for chunk in training])
    fitted = LogisticRegression(C=10.0, max_iter=1000).fit(x, [chunk.package for chunk in training])
    found: list[str] = fitted.predict(vectors.transform([chunk.text for chunk in test])).tolist()
    return found


def accuracy(found: list[str], test: list[Chunk]) -> float:
    """The share that is right."""
    return sum(a == chunk.package for a, chunk in zip(found, test, strict=True)) / len(test)


def config_of(source: Path, seed: int, steps: int) -> FileConfig:
    """A run on the pieces."""
    return FileConfig.from_dict(
        {
            "task": "classification",
            "model": {
                "family": "Mamba2",
                "n_layer": 2,
                "d_model": 64,
                "d_state": 16,
                "headdim": 32,
                "stack": {"dropout": 0.1, "merge": "linear"},
            },
            "data": {"sources": [str(source)], "targets": ["package"], "inputs": ["text"], "labels": list(PACKAGES)},
            "batch": {"rows": 32, "length": 256},
            "optimiser": {"lr": 3e-3, "weight_decay": 0.1},
            "schedule": {"steps": steps, "final": 0.01},
            "evaluation": {"every": 100, "log_every": 50},
            "checkpoints": {"every": 100, "keep": 1},
            "seed": seed,
            "threads": 1,
        }
    )


def draw(found: list[str], test: list[Chunk], target: Path) -> None:
    """How many pieces of each package are taken for which."""
    from matplotlib.figure import Figure

    counts = np.zeros((len(PACKAGES), len(PACKAGES)), dtype=int)
    for said, chunk in zip(found, test, strict=True):
        counts[PACKAGES.index(chunk.package), PACKAGES.index(said)] += 1
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="said", ylabel="is")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=45, ha="right")
    axes.set_yticks(range(len(PACKAGES)), PACKAGES)
    for i, j in np.argwhere(counts):
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=8)
    write_figure(figure, target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.packages", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/packages"), help="directory of the run and results")
    parser.add_argument("--steps", type=int, default=250)
    given = parser.parse_args(arguments)
    directory = given.out / f"seed-{given.seed}"
    try:
        training, test = read_chunks()
        write_chunks(training, given.out / "training.jsonl")
        write_chunks(test, given.out / "test.jsonl")
        lines = ["| | parameters | right, of pieces of other files | seconds |", "|---|---|---|---|"]
        for name, characters in (("words", False), ("up to four characters", True)):
            share = accuracy(by_words(training, test, characters), test)
            lines.append(f"| TF-IDF of {name}, logistic regression | | {100 * share:.1f} % | |")
        config = config_of(given.out / "training.jsonl", given.seed, given.steps)
        if (trainer := trained(file_task(config, report), directory)) is None:
            return 130
        predictor = Predictor(directory)
        said = predictor.predict(predictor.read(str(given.out / "test.jsonl")))
        found = [line["label"] for line in said]
    except ValueError as error:
        parser.error(str(error))
    facts = f"{100 * accuracy(found, test):.1f} % | {seconds_of(directory):.0f}"
    lines.append(f"| Mamba-2 in both directions, bytes | {parameters_of(trainer.model)} | {facts} |")
    if can_plot():
        draw(found, test, given.out / "packages.png")
    sizes = f"{len(training)} pieces to train on, {len(test)} to judge by, of {len(PACKAGES)} packages"
    write_text("\n".join(lines) + f"\n\n{sizes}\n", given.out / "packages.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
