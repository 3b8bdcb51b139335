"""An autoencoder of images on two bidirectional stacks.

    patches -> input + position -> stack -> mean -> z
    queries (1 + scale(z)) position + shift(z) -> stack -> patches

Letters: b images, t patches, c pixels of a patch, d width, z numbers of the code.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anymamba import BidirectionalStack

SIDE, PATCH = 8, 2
PATCHES, PIXELS = (SIDE // PATCH) ** 2, PATCH**2


def to_patches(images: Float[Tensor, "b p"]) -> Float[Tensor, "b t c"]:
    """Cut images in reading order into square patches in reading order."""
    n = SIDE // PATCH
    squares = images.view(-1, n, PATCH, n, PATCH).transpose(2, 3)
    return squares.reshape(len(images), PATCHES, PIXELS)


def to_images(patches: Float[Tensor, "b t c"]) -> Float[Tensor, "b p"]:
    """Put the patches back together: the inverse of `to_patches`."""
    n = SIDE // PATCH
    return patches.view(-1, n, n, PATCH, PATCH).transpose(2, 3).reshape(len(patches), SIDE * SIDE)


class Autoencoder(nn.Module):
    """An encoder of images into a few numbers, and a decoder."""

    def __init__(self, code: int, d_model: int, n_layer: int, family: str, d_state: int, headdim: int) -> None:
        """Create the parameters."""
        super().__init__()
        block = {"layer": family, "d_state": d_state, "headdim": headdim}
        self.input = nn.Linear(PIXELS, d_model)
        self.positions = nn.Parameter(torch.randn(PATCHES, d_model) / d_model**0.5)
        self.encoder = BidirectionalStack(d_model=d_model, n_layer=n_layer, ssm_cfg=block, merge="linear")
        self.to_code = nn.Linear(d_model, code)
        self.queries = nn.Parameter(torch.randn(PATCHES, d_model) / d_model**0.5)
        self.scale = nn.Linear(code, d_model)
        self.shift = nn.Linear(code, d_model)
        self.decoder = BidirectionalStack(d_model=d_model, n_layer=n_layer, ssm_cfg=block, merge="linear")
        self.output = nn.Linear(d_model, PIXELS)

    def encode(self, images: Float[Tensor, "b p"]) -> Float[Tensor, "b z"]:
        """Return the code of each image, whose pixels are from 0 to 1."""
        return self.to_code(self.encoder(self.input(to_patches(images)) + self.positions).mean(1))

    def decode(self, code: Float[Tensor, "b z"]) -> Float[Tensor, "b p"]:
        """Return the logits of the pixels."""
        scale, shift = self.scale(code).unsqueeze(1), self.shift(code).unsqueeze(1)
        return to_images(self.output(self.decoder((1 + scale) * self.queries + shift)))

    def forward(self, images: Float[Tensor, "b p"]) -> Float[Tensor, "b p"]:
        """Return the logits of the pixels of images that went through the code."""
        return self.decode(self.encode(images))
