"""A small Mamba-3 that learns parity within a minute, for the page on Mamba-3.

python docs/learn/figures/parity.py       # trains it and prints how far its rotations are from half a circle
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from anymamba import MambaLM
from anymamba.analysis import layers, rotation_angles


def bits(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random bits, and return after each of them whether the number of ones so far is odd."""
    drawn = torch.randint(2, (rows, length), generator=torch.Generator().manual_seed(seed))
    return drawn, drawn.cumsum(1) % 2


def trained(steps: int = 400, length: int = 64) -> MambaLM:
    """Train one layer with heads of 16 channels, whose states may rotate by half a circle per token."""
    torch.manual_seed(0)
    block = {"layer": "Mamba3", "d_state": 16, "headdim": 16, "a_activation": "softplus", "dt_min": 0.1, "dt_max": 1.0}
    model = MambaLM(d_model=32, n_layer=1, vocab_size=2, ssm_cfg=block, tie_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        drawn, odd = bits(32, length, seed=step)
        loss = F.cross_entropy(model(drawn).logits[..., :2].flatten(0, 1), odd.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    return model.eval()


if __name__ == "__main__":
    model = trained()
    with torch.no_grad():
        for length in (32, 64, 128):
            drawn, odd = bits(256, length, seed=-1)
            right = (model(drawn).logits[:, -1, :2].argmax(-1) == odd[:, -1]).float().mean()
            print(f"right after {length} bits: {100 * right:.1f} %")
        drawn, _ = bits(1, 64, seed=-1)
        ((block, x),) = layers(model, drawn)
        half = rotation_angles(block, x)[0] / math.pi
        for bit in (0, 1):
            print(f"half circles at a {bit}, by head and pair:\n{half[drawn[0] == bit].mean(0)}")
