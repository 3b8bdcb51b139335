"""The matrix of a small block, and the two factors it is made of."""

from __future__ import annotations

import torch
from style import DIM, heat, plt, save

from anymamba import Mamba1, Mamba2
from anymamba.analysis import dual_matrix, recurrence


def draw() -> None:
    """Draw the mask, the products of queries and keys, and the matrix of a head of Mamba-2."""
    torch.manual_seed(0)
    block, x = Mamba2(d_model=32, d_state=16, headdim=16).double(), torch.randn(1, 48, 32, dtype=torch.float64)
    with torch.no_grad():
        block.dt_bias += torch.tensor([0.0, 0.4, 0.8, 1.2])
        block.in_proj.weight[-4:] *= 3  # step sizes that depend on the token
        terms, matrix = recurrence(block, x), dual_matrix(block, x)[0]
    head = 1
    lam = terms.log_decay[0, :, head].cumsum(0)
    mask = (lam.unsqueeze(1) - lam).clamp(max=0).exp().tril()
    products = terms.q[0, :, 0, head] @ terms.k[0, :, 0, head].T
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6))
    heat(axes[0], mask, "L: how much is left", signed=False)
    heat(axes[1], products, "C Bᵀ: how well they match", root=True)
    heat(axes[2], matrix[head], "M = L ∘ C Bᵀ, times Δ", root=True)
    axes[0].set_ylabel("t, the token that reads")
    for panel in axes:
        panel.set_xlabel("s, the token that is read")
    for panel, sign in ((axes[1], "∘"), (axes[2], "=")):
        panel.text(-0.075, 0.5, sign, transform=panel.transAxes, ha="center", va="center", fontsize=16, color=DIM)
    save(figure, "duality.png")

    torch.manual_seed(0)
    channels = Mamba1(d_model=32, d_state=16).double()
    with torch.no_grad():
        many = dual_matrix(channels, x)[0]
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.8))
    order = many.abs().sum((1, 2)).argsort()
    for panel, channel in zip(axes, order[[0, 20, 40, 63]].tolist(), strict=True):
        heat(panel, many[channel], f"channel {channel}", root=True)
    axes[0].set_ylabel("t, the token that reads")
    save(figure, "channels.png")


if __name__ == "__main__":
    draw()
