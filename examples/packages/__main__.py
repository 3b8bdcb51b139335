"""Train a model that reads in both directions to predict the package a chunk of source code is from.

    python -m examples.packages [--seed 0] [--out runs/packages]

The chunks are those of the running Python's library. The model is compared with TF-IDF and logistic regression on the
same chunks; both are evaluated on chunks of files that neither has seen. A run that was stopped continues when the
command is given again. The table is printed and written to OUT/packages.md, and the confusion matrix to
OUT/packages.png.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anymamba.training import TabularConfig, make_task
from examples.command import Arguments, markdown_table, predict_labels, print_progress, run_command, tabular_config
from examples.packages.chunks import PACKAGES, Chunk, read_chunks, write_chunks


def predict_by_tf_idf(training: list[Chunk], test: list[Chunk], characters: bool) -> list[str]:
    """Return the predictions of logistic regression on TF-IDF of words, or of up to four characters.

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
    predictions: list[str] = fitted.predict(vectors.transform([chunk.text for chunk in test])).tolist()
    return predictions


def accuracy(predictions: list[str], test: list[Chunk]) -> float:
    """Return the fraction of correct predictions."""
    return sum(a == chunk.package for a, chunk in zip(predictions, test, strict=True)) / len(test)


def run_config(arguments: Arguments, source: Path) -> TabularConfig:
    """Return the config of a run on the chunks."""
    sizes = {"n_layer": 2, "d_model": 64, "d_state": 16, "headdim": 32}
    return tabular_config(
        arguments,
        arguments.seeds[0],
        "classification",
        250,
        model={"family": "Mamba2", **sizes, "stack": {"dropout": 0.1, "merge": "linear"}},
        data={"sources": [str(source)], "targets": ["package"], "inputs": ["text"], "labels": list(PACKAGES)},
        batch={"rows": 32, "length": 256},
        optimizer={"lr": 3e-3, "weight_decay": 0.1},
    )


def plot(figure: Any, predictions: list[str], test: list[Chunk]) -> None:
    """Draw the confusion matrix of the packages."""
    counts = np.zeros((len(PACKAGES), len(PACKAGES)), dtype=int)
    for name, chunk in zip(predictions, test, strict=True):
        counts[PACKAGES.index(chunk.package), PACKAGES.index(name)] += 1
    axes = figure.add_subplot(xlabel="predicted", ylabel="actual")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=45, ha="right")
    axes.set_yticks(range(len(PACKAGES)), PACKAGES)
    for i, j in np.argwhere(counts):
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=8)


def run(arguments: Arguments) -> None:
    """Fit the baselines, train, and predict the packages of chunks of other files."""
    training, test = read_chunks()
    files = {"training": training, "test": test}
    for name, chunks in files.items():
        write_chunks(chunks, arguments.out / f"{name}.jsonl")
    rows: list[list[object]] = []
    for name, characters in (("words", False), ("up to four characters", True)):
        fraction = accuracy(predict_by_tf_idf(training, test, characters), test)
        rows.append([f"TF-IDF of {name}, logistic regression", "", f"{100 * fraction:.1f} %", ""])
    finished = arguments.train(make_task(run_config(arguments, arguments.out / "training.jsonl"), print_progress))
    predictions = predict_labels(finished, arguments.out / "test.jsonl")
    fraction = accuracy(predictions, test)
    rows.append(
        ["Mamba-2 in both directions, bytes", finished.parameters, f"{100 * fraction:.1f} %", f"{finished.seconds:.0f}"]
    )
    arguments.draw("packages", (6.5, 6), lambda figure: plot(figure, predictions, test))
    sizes = f"{len(training)} chunks to train on, {len(test)} to evaluate on, of {len(PACKAGES)} packages"
    table = markdown_table(["", "parameters", "accuracy on chunks of other files", "seconds"], rows)
    arguments.write("packages", f"{table}\n{sizes}\n")


main = partial(run_command, "packages", __doc__, run)


if __name__ == "__main__":
    raise SystemExit(main())
