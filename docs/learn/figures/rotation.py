"""Mamba-3: the order of its rule, a state that counts by rotating, and the matrix of a MIMO head."""

from __future__ import annotations

import math

import torch
from parity import bits, trained
from style import ACCENT, DIM, MINUS, PLUS, heat, plt, save

from anymamba import Mamba3, MambaLM
from anymamba.analysis import dual_matrix, layers, rotation_angles, step_caches


def draw_rules() -> None:
    """Draw how far two rules are from the integral that they approximate."""
    steps = [2**i for i in range(3, 11)]
    errors: dict[str, list[float]] = {"Mamba-2's rule": [], "trapezoid, λ = 1/2": []}
    for count in steps:
        time = torch.linspace(0, 4, count + 1, dtype=torch.float64)
        size, signal, decay = 4 / count, torch.sin(3 * time) + 0.5, math.exp(-0.7 * 4 / count)
        held = averaged = 0.0
        for before, now in zip(signal[:-1].tolist(), signal[1:].tolist(), strict=True):
            held = decay * held + size * now
            averaged = decay * (averaged + 0.5 * size * before) + 0.5 * size * now
        fine = torch.linspace(0, 4, 200_001, dtype=torch.float64)
        exact = torch.trapezoid(torch.exp(-0.7 * (4 - fine)) * (torch.sin(3 * fine) + 0.5), fine).item()
        for estimate, name in ((held, "Mamba-2's rule"), (averaged, "trapezoid, λ = 1/2")):
            errors[name].append(abs(estimate - exact))
    figure, panel = plt.subplots(figsize=(5, 3.2))
    for (name, values), color in zip(errors.items(), (DIM, ACCENT), strict=True):
        panel.loglog([4 / count for count in steps], values, "o-", color=color, label=name, ms=4)
    panel.set_xlabel("step size Δ")
    panel.set_title("Distance from the integral")
    panel.legend()
    save(figure, "trapezoid.png")


@torch.no_grad()
def draw_parity(model: MambaLM) -> None:
    """Draw the pair of states that counts, as it rotates."""
    drawn, odd = bits(1, 24, seed=7)
    ((block, x),) = layers(model, drawn)
    half = rotation_angles(block, x)[0] / math.pi
    at_one = half[drawn[0] == 1].mean(0)
    head, pair = divmod(int((at_one.abs() - 1).abs().argmin()), at_one.shape[1])
    rotation, states = half[:, head, pair].cumsum(0) * math.pi, [cache.ssm[0, head] for cache in step_caches(block, x)]
    # Keys are rotated as they come, so the cache holds a state that stands still; seen from the next query it rotates.
    still = torch.stack([state[:, 2 * pair : 2 * pair + 2] for state in states])
    direction = torch.linalg.svd(still.flatten(0, 1).T @ still.flatten(0, 1)).U[:, 0]
    values = torch.linalg.svd(torch.einsum("tpn,n->tp", still, direction)).Vh[0]
    u, w = torch.einsum("tpn,p->tn", still, values).unbind(-1)
    seen = torch.polar(torch.hypot(u, w), torch.atan2(w, u) - rotation)
    # Every 1 writes the same again, which moves the center about which the state rotates.
    seen = seen - (seen[odd[0] == 1].mean() + seen[odd[0] == 0].mean()) / 2
    arrow = {"arrowstyle": "-|>", "lw": 2, "shrinkA": 0, "shrinkB": 0}
    figure, axes = plt.subplots(2, 12, figsize=(10, 2.4))
    for t, panel in enumerate(axes.flatten()):
        color, size = (PLUS if odd[0, t] else MINUS), seen.abs().max().item()
        panel.add_patch(plt.Circle((0, 0), 1, fill=False, color="#d6d3cd"))
        tip = (seen[t].real.item() / size, seen[t].imag.item() / size)
        panel.annotate("", xy=tip, xytext=(0, 0), arrowprops=arrow | {"color": color})
        panel.set_title(f"{drawn[0, t].item()}", loc="center", fontweight="bold" if drawn[0, t] else "normal")
        panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
        panel.axis("off")
    figure.suptitle(
        "A pair of states after each bit, drawn from its center (orange: odd so far, blue: even)",
        fontsize=10.5, fontweight="bold", x=0.125, ha="left",
    )  # fmt: skip
    save(figure, "rotation.png")
    print(f"head {head}, pair {pair}: {at_one[head, pair]:.4f} half circles at a 1")
    print(f"{half[drawn[0] == 0].mean(0)[head, pair]:.4f} at a 0")


@torch.no_grad()
def draw_ranks() -> None:
    """Draw a head with one input and output, and one with four."""
    torch.manual_seed(0)
    figure, axes = plt.subplots(1, 2, figsize=(8, 4))
    for panel, rank in zip(axes, (1, 4), strict=True):
        block = Mamba3(d_model=32, d_state=16, headdim=16, is_mimo=rank > 1, mimo_rank=rank)
        block.dt_bias += 2
        block.B_bias += 0.7 * torch.randn_like(block.B_bias)
        block.C_bias += 0.7 * torch.randn_like(block.C_bias)
        matrix = dual_matrix(block, torch.randn(1, 12, 32))[0, 0]
        heat(panel, matrix, "SISO: 12 tokens" if rank == 1 else "MIMO: 12 tokens × 4 ranks", root=True)
        for t in range(1, 12):
            panel.axhline(t * rank - 0.5, color="#e3e1dc", lw=0.6)
            panel.axvline(t * rank - 0.5, color="#e3e1dc", lw=0.6)
    save(figure, "ranks.png")


if __name__ == "__main__":
    draw_rules()
    draw_parity(trained())
    draw_ranks()
