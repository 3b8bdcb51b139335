"""Let a text decide what a Mamba-3 checkpoint does not record: which activation its decay rates were trained with.

The wrong one changes every block by a fifth, and a trained model predicts worse with it. So a short text is scored with
both, piece by piece, and the better one is taken if all pieces agree and the difference is clear.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from anymamba.generation.scoring import Likelihood, likelihood
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.models.mamba3_activation import CHOICES, is_ambiguous, set_activation

_CLEARLY = 0.01  # of the bits per byte

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
    """The evidence of a text.

    Attributes:
        bits: bits per byte over all pieces, by activation.
        taken: the activation that was chosen; empty if the pieces do not agree or the difference is not clear.
    """

    bits: dict[str, float]
    taken: str

    def __str__(self) -> str:
        """One line for the user."""
        first, second = sorted(self.bits, key=self.bits.__getitem__)
        figures = f"{self.bits[first]:.3f} bits per byte of a short text, {self.bits[second]:.3f} with {second}"
        if self.taken:
            return (
                f"the config does not name the activation of Mamba-3's decay rates: using {first} ({figures}); "
                f"override with --block a_activation={second}"
            )
        return (
            "the config does not name the activation of Mamba-3's decay rates, and a short text does not settle it "
            f"({first}: {figures}); using heavy_tail, official since June 2026. Choose one with --block "
            "a_activation=softplus or heavy_tail"
        )


def detect_activation(model: MambaLM, tokenizer: Tokenizer) -> DetectionResult | None:
    """Choose the activation of an undecided model's decay rates; if the text does not settle it, leave it undecided.

    Returns:
        The evidence; None for a model that is not undecided.
    """
    if not is_ambiguous(model.config):
        return None
    silent, scores = model.config, {}
    for activation in CHOICES:
        set_activation(model, activation)
        scores[activation] = [_bits(model, tokenizer.encode(piece)) for piece in PROBE_TEXTS]
    size = sum(len(piece.encode()) for piece in PROBE_TEXTS)
    bits = {activation: sum(costs) / size for activation, costs in scores.items()}
    best, other = sorted(CHOICES, key=bits.__getitem__)
    agree = all(mine < theirs for mine, theirs in zip(scores[best], scores[other], strict=True))
    is_clear = agree and bits[other] - bits[best] > _CLEARLY * bits[best]
    set_activation(model, best if is_clear else CHOICES[0])
    if not is_clear:
        model.config = silent
    return DetectionResult(bits, best if is_clear else "")


def _bits(model: MambaLM, ids: list[int]) -> float:
    """What a text costs."""
    *_, last = Likelihood(0.0, 0, 0), *likelihood(model, [ids])
    return last.nats / math.log(2)
