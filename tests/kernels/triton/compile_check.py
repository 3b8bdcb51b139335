"""Compile every kernel for GPUs that are not here: `make compile-triton`.

The operators run on the meta device at the shapes of released models, their launches are recorded, and every kernel is
compiled to a binary. A table lists registers and spilled bytes per thread, and shared memory per program. It is a
failure if the compiler raises or writes a diagnostic, if a forward kernel spills registers, or if a kernel takes more
shared memory than a consumer card has.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import torch

from anymamba.core.operators import OPERATORS
from anymamba.kernels import triton as registered
from anymamba.kernels.triton.launch import Target, recording
from tests.kernels.triton.model_shapes import CASES

NVIDIA = [Target("cuda", arch) for arch in (80, 86, 89, 90, 100, 120)]
AMD = [Target("hip", arch) for arch in ("gfx942", "gfx1100", "gfx1201")]
QUICK = [NVIDIA[1], AMD[1]]
SHARED_BYTES = {"cuda": 99 * 1024, "hip": 64 * 1024}
# Backward kernels that may spill registers, and why.
SPILLING = {
    "scan_channels_backward": "holds a state, its gradient and that of the rates; 8 bytes in float32 on sm_80",
    "rotate_keys_backward": "reduces large angles for sine and cosine; 8 to 24 bytes on sm_80 and sm_100",
    "write_key_query_gradients": "adds up two gradients over heads, next to two squares of a chunk's rows",
}
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def record(case, dtype, target):
    """Return the launches of an operator's forward and backward, described, and whether each is of the forward."""
    operator, inputs = CASES[case](dtype)
    module = import_module(f"{registered.__name__}.{registered._MODULES[operator]}")
    kernel = module.KERNELS[operator]
    with recording(target) as forward:
        outputs = kernel.forward(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    with recording(target) as backward:
        kernel.backward(*(torch.empty_like(y) for y in outputs), *inputs)
    assert len(outputs) == len(OPERATORS[operator].results)
    return [(describe(launch), launches is forward) for launches in (forward, backward) for launch in launches]


def describe(launch):
    """Return a launch as plain values: the kernel's module and name, signature, constants, attributes and options."""
    names = launch.kernel.arg_names
    options = {name: launch.constants[name] for name in ("num_warps", "num_stages") if name in launch.constants}
    constants = {name: x for name, x in launch.constants.items() if name not in options}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        x = constants[name] if name in constants else launch.arguments[i]
        if name in constants or x is None or (isinstance(x, int) and x == 1):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = "*" + TYPES[x.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if x < 2**31 else "i64"
            if x % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    return launch.kernel.fn.__module__, launch.kernel.fn.__name__, signature, constants, attributes, options


def compile_launch(description, target):
    """Compile a described launch; return registers, spilled bytes, shared bytes, and what the compiler wrote."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, signature, constants, attributes, options = description
    warp = 64 if target.arch == "gfx942" else 32
    source = ASTSource(getattr(import_module(module), name), signature, constants, attributes)
    with tempfile.TemporaryFile("w+") as written:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            binary = triton.compile(source, target=GPUTarget(*target, warp), options=options)
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            os.dup2(before, 2)
            os.close(before)
        written.seek(0)
        diagnostics = (problem + written.read()).strip()
    if problem:
        return 0, 0, 0, diagnostics
    registers, spilled = measure_cuda(binary, target.arch) if target.backend == "cuda" else measure_hip(binary)
    return registers, spilled, binary.metadata.shared, diagnostics


def measure_cuda(binary, arch):
    """Return registers per thread and bytes of spilled ones."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.cubin")
        file.write_bytes(binary.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
        if not stack:
            return registers, 0
        # The stack also holds what sines and cosines need: the assembler tells the two apart.
        file = file.with_suffix(".ptx")
        file.write_text(binary.asm["ptx"])
        assembler = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
        name = re.search(r"\.target (\w+)", binary.asm["ptx"])[1]
        command = [assembler.path, "-v", f"--gpu-name={name}", str(file), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return registers, int(re.search(r"(\d+) bytes spill stores", report)[1])


def measure_hip(binary):
    """Return vector registers per thread and bytes of spilled ones; scalar registers spill into vector ones."""
    text = binary.asm["amdgcn"]
    fields = {name: int(number) for name, number in re.findall(r"\.(\w+_count): +(\d+)", text)}
    return fields["vgpr_count"], 4 * fields["vgpr_spill_count"]


def check(task):
    """Compile one kernel and return its line of the table, and what is wrong with it."""
    description, target, forward, where = task
    registers, spilled, shared, diagnostics = compile_launch(description, target)
    name, wrong = description[1], []
    if diagnostics:
        wrong.append(f"the compiler wrote: {diagnostics[:2000]}")
    if spilled and (forward or name not in SPILLING):
        wrong.append(f"{spilled} bytes of registers spilled")
    if shared > SHARED_BYTES[target.backend]:
        wrong.append(f"{shared} bytes of shared memory")
    line = f"{name:28} {where:42} {target.arch!s:8} {registers:5} {spilled:7} {shared:8}"
    return line, wrong


def collect(targets, cases, dtypes):
    """Return every different kernel of the cases, with the first case that launches it."""
    tasks, seen = [], set()
    for target in targets:
        for case in cases:
            for dtype in dtypes:
                for description, forward in record(case, dtype, target):
                    key = (repr(description), target)
                    if key not in seen:
                        seen.add(key)
                        tasks.append((description, target, forward, f"{case}, {str(dtype).removeprefix('torch.')}"))
    return tasks


def main():
    """Compile, print the table, and return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two architectures and one model of each operator")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--arch", nargs="*", help="only these architectures, such as 90 gfx942")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    targets = QUICK if args.quick else NVIDIA + AMD
    if args.arch:
        targets = [target for target in NVIDIA + AMD if str(target.arch) in args.arch]
    cases = [case for case in CASES if not args.case or args.case in case]
    if args.quick:
        cases = list({CASES[case](torch.bfloat16)[0]: case for case in reversed(cases)}.values())
        args.dtype = ["bfloat16"]
    tasks = collect(targets, cases, [getattr(torch, name) for name in args.dtype])
    print(f"{'kernel':28} {'case':42} {'arch':8} {'regs':>5} {'spilled':>7} {'shared':>8}", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # a kernel that was compiled before would say nothing
        with ProcessPoolExecutor(args.jobs) as pool:
            for line, wrong in pool.map(check, tasks):
                print(line, *(f"\n  FAILURE: {problem}" for problem in wrong), flush=True)
                failures += len(wrong)
    print(f"{len(tasks)} kernels, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
