"""Every kernel with four threads, for ThreadSanitizer: `make tsan`. It reports races itself, and sets the exit code."""

from __future__ import annotations

import tempfile

import torch

from anymamba import Mamba1, Mamba2, Mamba3, MambaLM, decoder
from anymamba.core.weight_formats import FORMAT_SPECS
from anymamba.kernels import describe_kernels

BLOCKS = {
    "mamba1": (Mamba1, {"d_state": 21, "dt_rank": 5}),
    "mamba2": (Mamba2, {"d_state": 21, "headdim": 17, "ngroups": 3}),
    "mamba3": (Mamba3, {"d_state": 22, "headdim": 17, "ngroups": 3}),
    "mamba3 quaternion": (Mamba3, {"d_state": 24, "headdim": 17, "rotation": "quaternion"}),
    "mamba3 mimo": (Mamba3, {"d_state": 22, "headdim": 17, "is_mimo": True, "mimo_rank": 3}),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYERS = {"Mamba1": {}, "Mamba2": {"headdim": 16, "d_state": 32}, "Mamba3": {"headdim": 16, "d_state": 32}}
STEPS = 6


def run_blocks() -> None:
    """Run sequences with gradients, and steps, of every family and dtype."""
    for name, (family, fields) in BLOCKS.items():
        for dtype in DTYPES:
            block = family(102, **fields, dtype=dtype)
            x = torch.randn(2, 70, 102, dtype=dtype, requires_grad=True)
            block(x).float().square().mean().backward()
            with torch.no_grad():
                cache = None
                for t in range(STEPS):
                    _, cache = block.step(x[:, t], cache)
        print(name, flush=True)


def run_models() -> None:
    """Run whole-model steps with every weight format, large enough that all threads take part."""
    for layer, fields in LAYERS.items():
        model = MambaLM(d_model=256, n_layer=2, vocab_size=700, ssm_cfg={"layer": layer, **fields}, d_intermediate=96)
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            for weights in (None, *FORMAT_SPECS):
                decode = decoder(MambaLM.from_pretrained(directory, weights=weights))
                for rows in (1, 3, 65):
                    cache = None
                    for _ in range(STEPS):
                        _, cache = decode.step(torch.randint(700, (rows,)), cache)
                    decode.step_window(torch.randint(700, (rows, STEPS)), cache).cache_after(STEPS - 1)
        print(layer, *FORMAT_SPECS, flush=True)


if __name__ == "__main__":
    kernels = describe_kernels()["cpu"]
    assert kernels.startswith("built"), f"expected kernels, got {kernels}"
    print(kernels, flush=True)
    torch.set_num_threads(4)
    run_blocks()
    run_models()
