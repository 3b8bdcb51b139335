"""Detect which activation a Mamba-3's decay rates were trained with, where the checkpoint does not record it.

The wrong one changes the output of every block by a fifth, and a trained model predicts worse with it. So a few sample
texts are scored with both, and the better one is used if all texts agree and the difference is clear.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from anymamba.generation.scoring import TextScore, score_text
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.config import ACTIVATIONS, is_ambiguous, set_activation
from anymamba.models.lm import MambaLM

_MIN_DIFFERENCE = 0.01  # relative difference in bits per byte that is clear

# Several kinds of text, since it is unknown what the model was trained on.
PROBE_TEXTS = (
    "The village lies at the end of a narrow valley, where the river turns to the south. In the summer the farmers "
    "take their cattle up to the high meadows, and they do not come back before the first snow has fallen on the "
    "mountains. There is one shop, which is also the post office, and a small school with two teachers. Most of the "
    "young people leave when they are eighteen, because there is not much work, but some of them return after a few "
    "years with a family of their own.",
    '"I do not know what you want me to say," she said, and put the letter back on the table. "You have read it, and '
    'you know as much as I do." He did not answer at once. He looked out of the window, where it had begun to rain, '
    'and then he said: "You could have told me last week." She shook her head. "No, I could not. That was before I had '
    'spoken to your brother."',
    "def read_table(path, separator=','):\n    rows = []\n    with open(path) as file:\n        for line in file:\n"
    "            line = line.strip()\n            if not line or line.startswith('#'):\n                continue\n"
    "            rows.append(line.split(separator))\n    return rows\n\n\nclass Counter:\n    def __init__(self):\n"
    "        self.total = 0\n\n    def add(self, value):\n        self.total += value\n        return self.total\n",
    "Water boils at a lower temperature when the pressure of the air is lower. At the level of the sea this happens at "
    "100 degrees, and on a mountain of 3,000 metres at about 90. The reason is that the particles of a liquid need "
    "less energy to escape from its surface if fewer particles of air push against it. For the same reason it takes "
    "longer to cook an egg in the mountains than on the coast.",
)


class DetectionResult(NamedTuple):
    """Scores of the sample texts.

    Attributes:
        bits: Bits per byte over all texts, by activation.
        activation: Activation that was detected; empty if the texts do not agree or the difference is not clear.
    """

    bits: dict[str, float]
    activation: str

    def __str__(self) -> str:
        """Return one line for the user."""
        first, second = sorted(self.bits, key=self.bits.__getitem__)
        figures = f"{self.bits[first]:.3f} bits per byte of sample texts, {self.bits[second]:.3f} with {second}"
        if self.activation:
            return (
                f"the config does not name the activation of Mamba-3's decay rates: using {first} ({figures}); "
                f"override with --block a_activation={second}"
            )
        return (
            "the config does not name the activation of Mamba-3's decay rates, and scoring sample texts was "
            f"inconclusive ({first}: {figures}); using heavy_tail, official since June 2026. Choose one with --block "
            "a_activation=softplus or heavy_tail"
        )


def detect_activation(model: MambaLM, tokenizer: Tokenizer) -> DetectionResult | None:
    """Detect and set the activation of a model; return None if its config names one.

    If the sample texts are inconclusive, the model gets the official activation, and its config still names none.
    """
    if not is_ambiguous(model.config):
        return None
    original_config = model.config
    scores = {}
    for activation in ACTIVATIONS:
        set_activation(model, activation)
        scores[activation] = [_count_bits(model, tokenizer.encode(text)) for text in PROBE_TEXTS]
    size = sum(len(text.encode()) for text in PROBE_TEXTS)
    bits = {activation: sum(bits_by_text) / size for activation, bits_by_text in scores.items()}
    best, other = sorted(ACTIVATIONS, key=bits.__getitem__)
    agree = all(better < worse for better, worse in zip(scores[best], scores[other], strict=True))
    is_clear = agree and bits[other] - bits[best] > _MIN_DIFFERENCE * bits[best]
    set_activation(model, best if is_clear else ACTIVATIONS[0])
    if not is_clear:
        model.config = original_config
    return DetectionResult(bits, best if is_clear else "")


def _count_bits(model: MambaLM, ids: list[int]) -> float:
    """Return the bits that the model needs for a text."""
    *_, score = TextScore(0.0, 0, 0), *score_text(model, [ids])
    return score.nats / math.log(2)
