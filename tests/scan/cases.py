"""Inputs for the scan, and one way to run it and collect every output and gradient."""

import torch

from anymamba.kernels import missing_kernel
from anymamba.scan import scan

HAS_KERNELS = not missing_kernel("scan", torch.zeros(1))
ALGORITHMS = ("recurrent", "minimal", "serial", "serial_recalculated", *(["fused"] if HAS_KERNELS else []))
CHUNKED = ALGORITHMS[1:]
BY_HAND = ALGORITHMS[3:]  # their backward is derived by hand
NAMES = ("v", "k", "q", "log_decay", "initial_state")


def make_inputs(b=2, t=13, r=1, h=4, p=3, g=2, n=5, bounds=None, dtype=torch.float64, decay=1.0, seed=0):
    """Draw scan inputs; `decay` scales the log-decays, `bounds` packs sequences (and sets b to 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b = 1 if bounds else b
    rows = len(bounds) - 1 if bounds else b
    log_decay = -decay * torch.rand((b, t, h), generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "v": normal(b, t, r, h, p).to(dtype),
        "k": normal(b, t, r, g, n).to(dtype),
        "q": normal(b, t, r, g, n).to(dtype),
        "log_decay": log_decay.to(wide),
        "initial_state": normal(rows, h, p, n).to(wide),
    }


def run(inputs, path, bounds=None, heads_seed=1):
    """Return outputs, final state, and the gradients of all inputs under a loss on both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    initial_state = leaves.pop("initial_state")
    y, final_state = scan(**leaves, initial_state=initial_state, path=path, cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(heads_seed)
    heads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, final_state)]
    tensors = [*leaves.values(), initial_state]
    grads = torch.autograd.grad([y, final_state], tensors, heads)
    named = {f"grad_{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {"y": y.detach(), "final_state": final_state.detach(), **named}
