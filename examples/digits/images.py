"""The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn, in a fixed split.

Letters: b images, t = 64 pixels in reading order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from examples.labeled import Labeled

SIDE, CLASSES, BRIGHTEST = 8, 10, 16
_TEST, _VALIDATION = 360, 180


class Digits(NamedTuple):
    """The images, with intensities from 0 to 16, and the digits they show."""

    training: Labeled
    validation: Labeled
    test: Labeled


def load_digits() -> Digits:
    """Return the three splits, which are always the same.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("the digits come with scikit-learn: pip install 'anymamba[examples]'") from error
    images, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    everything = Labeled(*(torch.from_numpy(x[order].astype(np.int64)) for x in (images, digits)))
    parts = (slice(_TEST + _VALIDATION, None), slice(_TEST, _TEST + _VALIDATION), slice(_TEST))
    return Digits(*(Labeled(everything.inputs[part], everything.labels[part]) for part in parts))


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shift each image (b, t) by up to one pixel in each direction; new pixels are 0."""
    framed = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(framed, (SIDE, SIDE), axis=(1, 2))
    down, right = rng.integers(3, size=(2, len(images)))
    return windows[np.arange(len(images)), down, right].reshape(images.shape)
