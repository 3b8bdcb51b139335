"""Time and memory of the three portable algorithms over the chunk length, measured here and now.

python docs/learn/figures/chunks.py       # measures, draws chunks.png and prints the table of the page
"""

from __future__ import annotations

from statistics import median
from time import process_time

import torch
from matplotlib.ticker import LogLocator
from style import ACCENT, MINUS, PLUS, plain_log, plt, save

from anymamba import SsdPath, ssd

LENGTHS = (16, 32, 64, 128, 256, 512)
ALGORITHMS = {"minimal": PLUS, "serial": MINUS, "serial_recalculated": ACCENT}
T, HEADS, WIDTH, STATE = 2048, 8, 64, 64


def inputs() -> dict[str, torch.Tensor]:
    """Draw the scan's inputs in a block of d_model 256 for a text of 2,048 tokens."""
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(1, T, HEADS, WIDTH),
        "dt": 0.1 * torch.rand(1, T, HEADS),
        "A": -torch.rand(HEADS),
        "B": torch.randn(1, T, 1, STATE),
        "C": torch.randn(1, T, 1, STATE),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def kept_memory(path: SsdPath) -> float:
    """Return the MiB that are kept from forward to backward."""
    tensors, kept = inputs(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, _ = ssd(**tensors, path=path)
    y.sum().backward()
    return sum(kept.values()) / 2**20


def timed(path: SsdPath) -> float:
    """Return the milliseconds of processor time, which other programs hardly affect, of forward and backward."""
    tensors = inputs()
    began = process_time()
    y, _ = ssd(**tensors, path=path)
    y.sum().backward()
    return 1e3 * (process_time() - began)


def measure(rounds: int = 7) -> dict[str, list[tuple[float, float]]]:
    """Return the median time and the memory by algorithm and chunk length; rounds alternate between all of them."""
    paths = {(name, length): SsdPath(name, length) for name in ALGORITHMS for length in LENGTHS}
    memory = {key: kept_memory(path) for key, path in paths.items()}
    times = [{key: timed(path) for key, path in paths.items()} for _ in range(rounds)]
    medians = {key: median(row[key] for row in times) for key in paths}
    return {name: [(medians[name, length], memory[name, length]) for length in LENGTHS] for name in ALGORITHMS}


def draw() -> None:
    """Measure, print and draw."""
    torch.set_num_threads(1)
    medians = measure()
    print("| chunk length | " + " | ".join(map(str, LENGTHS)) + " |\n|---" + "|---" * len(LENGTHS) + "|")
    for name, pairs in medians.items():
        print(f"| `{name}`, ms | " + " | ".join(f"{time:.0f}" for time, _ in pairs) + " |")
    for name, pairs in medians.items():
        print(f"| `{name}`, MiB kept | " + " | ".join(f"{size:.0f}" for _, size in pairs) + " |")
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    titles = ("Processor time of forward and backward, ms", "Kept from forward to backward, MiB")
    for i, (panel, title) in enumerate(zip(axes, titles, strict=True)):
        for name, color in ALGORITHMS.items():
            panel.plot(LENGTHS, [pair[i] for pair in medians[name]], "o-", color=color, label=name, ms=4)
        panel.set_xscale("log", base=2)
        plain_log(panel)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        panel.set_xlabel("chunk length")
        panel.set_title(title)
        panel.grid(axis="y", color="#e3e1dc", lw=0.7)
    axes[0].legend()
    save(figure, "chunks.png")


if __name__ == "__main__":
    draw()
