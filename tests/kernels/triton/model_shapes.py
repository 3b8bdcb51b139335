"""Inputs of the operators at the shapes of released models, on the meta device, for the compile check."""

import torch

CASES = {}  # by name: a function of the dtype that returns the operator and its inputs


def empty(dtype, *shape):
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
