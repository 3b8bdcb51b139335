"""The usage part of mamba_ssm's README: one block of each family."""

import sys

import torch
from mamba_ssm import Mamba, Mamba2, Mamba3

assert sys.argv[2:] == ["--quiet"], sys.argv
batch, length, dim = 2, 64, 16
x = torch.randn(batch, length, dim)

model = Mamba(
    d_model=dim,  # Model dimension d_model
    d_state=16,  # SSM state expansion factor
    d_conv=4,  # Local convolution width
    expand=2,  # Block expansion factor
)
y = model(x)
assert y.shape == x.shape

model = Mamba2(d_model=dim, d_state=64, d_conv=4, expand=2, headdim=8)
y = model(x)
assert y.shape == x.shape

model = Mamba3(d_model=dim, d_state=32, headdim=8, is_mimo=True, mimo_rank=4, chunk_size=16, is_outproj_norm=False)
y = model(x)
y.sum().backward()
assert y.shape == x.shape
print("done")
