"""What a small Mamba-2 selects: trained on the standard library's source, its horizons and its step sizes.

The model is trained once, into runs/learn; the same command then draws at once.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import ACCENT, DIM, INK, PLUS, plain_log, plt, save

from anymamba import MambaLM
from anymamba.analysis import half_lives, horizons, layers
from anymamba.cli.main import main

ROOT = Path(__file__).parents[3]
RUN = ROOT / "runs" / "learn"
TEXT = (
    'def area(self, scale=1.0):\n    """Return it."""\n    width = self.width * scale\n    return width * self.height\n'
)
SIZES = ("--model.family", "Mamba2", "--model.headdim", "16", "--model.d_state", "32", "--data.tokenizer", "bytes")


def trained() -> MambaLM:
    """Train the model of `make demo` for 300 steps, as a Mamba-2 of bytes with more and smaller heads."""
    if not (RUN / "model.safetensors").is_file():
        config = str(ROOT / "examples" / "demo.toml")
        if code := main(["train", config, "--out", str(RUN), *SIZES, "--schedule.steps", "300", "--seed", "0"]):
            raise SystemExit(code)
    model = MambaLM.from_pretrained(RUN)
    if model.config.vocab_size != 256:
        raise SystemExit(f"{RUN}: expected a model of bytes, got {model.config.vocab_size} tokens; remove it")
    return model


@torch.no_grad()
def draw(model: MambaLM) -> None:
    """Draw horizons before and after training, and how half-lives follow a text."""
    torch.manual_seed(0)
    fresh, ids = MambaLM(model.config), torch.tensor([list(TEXT.encode())])
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=(1, 1), sharey=True)
    for i, panel in enumerate(axes):
        for state, color, name in ((fresh, "#b8bec4", "before training"), (model, ACCENT, "trained")):
            lives = horizons(*layers(state, ids)[i])[0].sort().values
            panel.plot(range(1, len(lives) + 1), lives.tolist(), "o-", color=color, label=name, ms=4, lw=1)
        plain_log(panel)
        panel.set_xticks(range(2, len(lives) + 1, 2))
        panel.set_title(f"Layer {i}: horizons of its heads, in tokens")
        panel.set_xlabel("heads, from the shortest horizon to the longest")
        panel.grid(axis="y", color="#e3e1dc", lw=0.7)
    axes[0].legend()
    save(figure, "horizons.png")

    block, x = layers(model, ids)[-1]
    lives = half_lives(block, x)[0]
    order = horizons(block, x)[0].argsort()
    chosen = order[[len(order) // 4, len(order) // 2, -1]].tolist()
    figure, axes = plt.subplots(len(chosen), 1, figsize=(10, 4.8), sharex=True)
    for panel, head in zip(axes, chosen, strict=True):
        low = 0.7 * lives[:, head].min().item()  # so that the shortest bar is one
        panel.vlines(range(len(TEXT)), low, lives[:, head].tolist(), color=ACCENT, lw=3)
        plain_log(panel)
        panel.set_ylim(bottom=low)
        panel.set_title(f"Head {head}: half-life at each character, in tokens")
        panel.tick_params(bottom=False)
    letters = [letter.replace("\n", "⏎").replace(" ", "·") for letter in TEXT]
    axes[-1].set_xticks(range(len(TEXT)), letters, fontsize=7, family="DejaVu Sans Mono")
    for label, letter in zip(axes[-1].get_xticklabels(), TEXT, strict=True):
        label.set_color(INK if letter.isalnum() else PLUS if not letter.isspace() else DIM)
    axes[-1].set_xlim(-1, len(TEXT))
    figure.tight_layout()
    save(figure, "selection.png")
    spread = (lives.log().amax(0) - lives.log().amin(0)) / math.log(10)
    print(
        f"within the text a head's half-life spans {spread.median():.1f} decades (median), {spread.max():.1f} at most"
    )


if __name__ == "__main__":
    draw(trained())
