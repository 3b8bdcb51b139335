"""Colors, sizes and the way in which all figures are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.colors import LinearSegmentedColormap

mpl.use("Agg")
import matplotlib.pyplot as plt

PLUS, MINUS, ACCENT, VIOLET, INK, DIM = "#c2410c", "#1d4ed8", "#0f766e", "#7c3aed", "#1d2125", "#667079"
SIGNED = LinearSegmentedColormap.from_list("signed", [MINUS, "#ffffff", PLUS])
FADING = LinearSegmentedColormap.from_list("fading", ["#ffffff", ACCENT])

plt.rcParams.update(
    {
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": DIM,
        "axes.labelcolor": DIM,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": DIM,
        "ytick.color": DIM,
        "text.color": INK,
        "legend.frameon": False,
        "savefig.dpi": 150,
        "svg.hashsalt": "anymamba",
    }
)


def save(figure: Any, name: str) -> None:
    """Write a figure beside the pages, without the time at which it was made."""
    path = Path(__file__).parent.parent / name
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)
    print(path)


def plain_log(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def heat(axes: Any, matrix: torch.Tensor, title: str, *, signed: bool = True, root: bool = False) -> None:
    """Draw a matrix as a picture, without what is above the diagonal of a causal one."""
    shown = matrix.detach().double()
    shown = shown.sign() * shown.abs().pow(1 / 3) if root else shown
    most = shown.abs().max().item() or 1.0
    axes.imshow(shown.numpy(), cmap=SIGNED if signed else FADING, vmin=-most if signed else 0, vmax=most)
    axes.set_title(title)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color("#d6d3cd")
