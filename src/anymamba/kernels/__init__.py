"""Faster implementations of the operators and of decode steps, by device: found at import, never required.

Every computation has a portable implementation in torch (`scan/`, `ops/`, `quantization/`), so a machine without
kernels computes the same functions. A device's folder adds faster implementations with the same signatures and
registers them (`core/registry.py`); nothing outside this package imports a device's folder.

Reading order:

1. `step_description.py`: the device-neutral description of one decode step, which modules fill in.
2. `compiled_step.py`: whether a compiled step may run, and the table of compiled steps.
3. `cpu/`: the C++ kernels, and the compiler that turns a description into a table of C structures.
4. `triton/`: the operators on a GPU, for NVIDIA and AMD.

One token through a block, `Mamba2.step(x, cache)` without gradients:

1. `usable_step(block, (x, *cache), source)` asks `may_run`, then looks for the block's compiled step. The first time,
   it calls `Block.describe_step`, which adds phases (`linear`, `conv`, `mamba2`, …) to a `StepBuilder`.
2. `CompiledStep` hands the `StepProgram` to the compiler that is registered for the device: `cpu/step_compiler.py`.
3. `CompiledStep.run` calls the executable, which makes one call to C++ for all phases. Larger batches than it takes are
   split into groups, so that a row has the same bits in a batch of any size.

To add a phase, follow the recipe in `kernels/cpu/__init__.py`.

To add a device: create `kernels/<device>/`, call `register_library` and `register` in its `__init__.py`, and import it
here. An implementation that is not complete says so in its `missing`, and the next one runs.
"""

from anymamba.core.registry import describe_kernels as describe_kernels
from anymamba.core.registry import missing_kernel as missing_kernel
from anymamba.kernels import cpu as _cpu  # noqa: F401  registers its operators
from anymamba.kernels import triton as _triton  # noqa: F401  registers its operators, and imports them when one is used
