"""The official Triton kernels of Mamba-3, forward and backward, in Triton's interpreter on a CPU.

The kernels are imported from the clone in a process of their own, and changed there as little as it takes: tensors
stay in float32 where they would be rounded to bfloat16, instructions of a GPU for sines and the like become numpy's
functions, one configuration stands for those that a GPU would choose from, and assertions that tensors are on a GPU are
off (`python -O`). So both sides compute the same function and differ by the rounding of float32 alone. It needs the
packages triton and einops.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.published.captures import run_capture
from tests.published.clone import Clone
from tests.published.row import Figure, Options, Row
from tests.support import FLOOR, relative_error

COMMIT = "e9594ce1c732d97440f0332fdc43170a2294dbfa"
PACKAGE = "mamba_ssm/ops/triton/mamba3/"
NEEDS = ("triton", "einops")
# Batch, time, heads, head width, state; the length is not a multiple of the chunk.
CASES = ((1, 40, 2, 16, 32), (2, 33, 4, 32, 16))
CHUNK = 16


def compare(clone: Clone, options: Options) -> list[Figure]:
    """Compare outputs and gradients."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        return [Figure("kernels", "", "not run", None, f"needs {' and '.join(missing)} (pip install)")]
    dtype = options.dtype or torch.float32
    with TemporaryDirectory() as directory:
        extract_package(clone, Path(directory))
        command = [sys.executable, "-O", "-m", "tests.published.interpreted", directory, str(dtype).split(".")[1]]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{PACKAGE}: the kernels cannot be run here ({last})")
    errors = json.loads(process.stdout.splitlines()[-1])
    floor = FLOOR[torch.float32]
    return [
        Figure(name, "official kernels", f"differs by {error:.1e}", error <= floor, f"{floor:.1e} of the largest entry")
        for name, error in errors.items()
    ]


def extract_package(clone: Clone, directory: Path) -> None:
    """Write the kernels of a clone into a package that imports nothing else."""
    files = [path for path in clone.list_files(PACKAGE) if path.endswith(".py")]
    if f"{PACKAGE}mamba3_siso_combined.py" not in files:
        raise ValueError(f"{PACKAGE}: expected mamba3_siso_combined.py, found {len(files)} other files")
    for path in files:
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(clone.read(path))
    for parent in Path(PACKAGE).parents[:-1]:
        (directory / parent / "__init__.py").touch()


def import_kernels(directory: Path) -> Any:
    """Import the extracted kernels for the interpreter, in float32."""
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    class InlineAssembly:
        """The result of a GPU's instruction, which is named first in its code: cos, sin or tanh."""

        def __init__(self, _builder: Any, code: str, _constraints: str, values: Any, *_: Any) -> None:
            function = {"cos": np.cos, "sin": np.sin, "tanh": np.tanh}[code.split(".")[0]]
            self.value = interpreter.TensorHandle(function(values[0].data), tl.float32)

        def get_result(self, _index: int) -> Any:
            return self.value

    class Float32Torch:
        """torch, where bfloat16 is float32."""

        bfloat16 = torch.float32

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    autotune = triton.autotune
    triton.autotune = lambda configs, key, **options: autotune(configs[:1], key, **options)
    interpreter.InterpreterBuilder.create_inline_asm = lambda *arguments: InlineAssembly(*arguments)
    sys.path.insert(0, str(directory))
    from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined, mamba3_siso_fwd

    mamba3_siso_combined.torch = mamba3_siso_fwd.torch = Float32Torch()
    return mamba3_siso_combined.mamba3_siso_combined


def random_inputs(b: int, t: int, h: int, p: int, n: int) -> dict[str, Tensor]:
    """Return inputs of the kernels, by their names there."""
    inputs = {"Q": torch.randn(b, t, 1, n), "K": torch.randn(b, t, 1, n), "V": torch.randn(b, t, h, p)}
    inputs |= {"ADT": -torch.rand(b, h, t), "DT": 0.01 + 0.2 * torch.rand(b, h, t), "Trap": torch.randn(b, h, t)}
    inputs |= {"Q_bias": torch.randn(h, n), "K_bias": torch.randn(h, n), "D": torch.randn(h)}
    return {**inputs, "Angles": torch.randn(b, t, 1, n // 4).repeat(1, 1, h, 1), "Z": torch.randn(b, t, h, p)}


def main(directory: str, dtype_name: str) -> None:
    """Print the largest relative difference of outputs and of gradients in each case, as JSON."""
    kernel = import_kernels(Path(directory))
    errors = {}
    torch.manual_seed(0)
    for sizes in CASES:
        inputs = random_inputs(*sizes)
        theirs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        expected = kernel(**theirs, chunk_size=CHUNK)
        grad_output = torch.randn_like(expected)
        expected.backward(grad_output)
        dtype = getattr(torch, dtype_name)
        ours = {f"kw_{name}": x.to(dtype).requires_grad_() for name, x in inputs.items()}
        output, _ = run_capture("", {**ours, "out": expected}, dtype)
        output.backward(grad_output.to(dtype))
        # We have one angle for all heads, so gradients of the heads add up.
        gradients = {name: (theirs[name].grad, ours[f"kw_{name}"].grad) for name in inputs}
        gradients["Angles"] = tuple(x.sum(2) for x in gradients["Angles"])
        title = "b={}, t={}, h={}, p={}, n={}".format(*sizes)
        errors[f"{title}: output"] = relative_error(output, expected)
        errors[f"{title}: {len(gradients)} gradients"] = max(relative_error(y, x) for x, y in gradients.values())
    print(json.dumps(errors))


ROW = Row(
    name="interpreted",
    title="The official Triton kernels of Mamba-3 in Triton's interpreter, in float32",
    repository="state-spaces/mamba",
    commit=COMMIT,
    compare=compare,
)

if __name__ == "__main__":
    main(*sys.argv[1:])
