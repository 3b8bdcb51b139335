"""A small corpus and a config that trains on it in a moment."""

import numpy as np

from anymamba.training import TrainingConfig
from anymamba.training.tasks.language_model import LanguageTask
from anymamba.training.tasks.tabular_base import TabularTask

# Documents of awkward lengths: shorter than a row, one token, longer than several rows.
LENGTHS = [700, 5, 1, 130, 64, 257, 400, 33, 90, 610]


def write_corpus(directory):
    """Write files of words that repeat, so that there is something to learn."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [b"alpha ", b"beta ", b"gamma\n", b"delta ", b"eps\n"]
    for i, length in enumerate(LENGTHS):
        numbers = np.random.RandomState(i).randint(0, len(words), 300)
        (directory / f"document{i}.txt").write_bytes(b"".join(words[n] for n in numbers)[:length])
    return directory


def tiny(corpus, **sections):
    """Return a config; keywords replace fields of its sections."""
    values = {
        "model": {"n_layer": 2, "d_model": 16, "d_state": 8, "headdim": 8},
        "data": {"sources": [str(corpus)], "held_out": 0.1},
        "batch": {"tokens": 128, "length": 32},
        "schedule": {"steps": 6, "warmup": 2},
        "evaluation": {"every": 3, "sample_tokens": 4},
        "checkpoints": {"every": 2},
        "threads": 1,
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return TrainingConfig.from_dict(values)


def draw_nothing(setattr=setattr):
    """Let runs draw no plots: each takes longer than a small run. A test passes the `setattr` of its monkeypatch."""
    for task in (LanguageTask, TabularTask):
        setattr(task, "plot", lambda task, directory: None)


def silent(message):
    """Ignore a report."""
