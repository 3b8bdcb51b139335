"""Train a model that reads in both directions to name the package a piece of source is from.

    python -m examples.packages [--seed 0] [--out runs/packages]

The pieces are those of the running Python's library. The model is compared with TF-IDF and logistic regression on the
same pieces; both are judged by pieces of files that neither has seen. A run that was stopped continues when the command
is given again. The table is printed and written to OUT/packages.md, and a picture of what is taken for what to
OUT/packages.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.tasks.tabular_tasks import make_task
from examples.packages.chunks import PACKAGES, Chunk, read_chunks, write_chunks
from examples.runs import Given, command, file_config, labels_of, markdown, report


def by_words(training: list[Chunk], test: list[Chunk], characters: bool) -> list[str]:
    """The predictions of TF-IDF of words, or of up to four characters, and logistic regression.

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
    """The share of correct predictions."""
    return sum(a == chunk.package for a, chunk in zip(found, test, strict=True)) / len(test)


def config_of(given: Given, source: Path) -> TabularConfig:
    """A run on the pieces."""
    sizes = {"n_layer": 2, "d_model": 64, "d_state": 16, "headdim": 32}
    return file_config(
        given,
        given.seeds[0],
        "classification",
        250,
        model={"family": "Mamba2", **sizes, "stack": {"dropout": 0.1, "merge": "linear"}},
        data={"sources": [str(source)], "targets": ["package"], "inputs": ["text"], "labels": list(PACKAGES)},
        batch={"rows": 32, "length": 256},
        optimizer={"lr": 3e-3, "weight_decay": 0.1},
    )


def plot(figure: Any, said: list[str], test: list[Chunk]) -> None:
    """How many pieces of each package are taken for which."""
    counts = np.zeros((len(PACKAGES), len(PACKAGES)), dtype=int)
    for name, chunk in zip(said, test, strict=True):
        counts[PACKAGES.index(chunk.package), PACKAGES.index(name)] += 1
    axes = figure.add_subplot(xlabel="said", ylabel="is")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=45, ha="right")
    axes.set_yticks(range(len(PACKAGES)), PACKAGES)
    for i, j in np.argwhere(counts):
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=8)


def run(given: Given) -> None:
    """Fit the comparisons, train, and name the packages of the pieces of other files."""
    training, test = read_chunks()
    files = {"training": training, "test": test}
    for name, chunks in files.items():
        write_chunks(chunks, given.out / f"{name}.jsonl")
    rows: list[list[object]] = []
    for name, characters in (("words", False), ("up to four characters", True)):
        share = accuracy(by_words(training, test, characters), test)
        rows.append([f"TF-IDF of {name}, logistic regression", "", f"{100 * share:.1f} %", ""])
    found = given.trained(make_task(config_of(given, given.out / "training.jsonl"), report))
    said = labels_of(found, given.out / "test.jsonl")
    share, name = accuracy(said, test), "Mamba-2 in both directions, bytes"
    rows.append([name, found.parameters, f"{100 * share:.1f} %", f"{found.seconds:.0f}"])
    given.draw("packages", (6.5, 6), lambda figure: plot(figure, said, test))
    sizes = f"{len(training)} pieces to train on, {len(test)} to judge by, of {len(PACKAGES)} packages"
    table = markdown(["", "parameters", "accuracy on pieces of other files", "seconds"], rows)
    given.write("packages", f"{table}\n{sizes}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("packages", __doc__, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
