"""The compiled kernels for CPUs: C++ in `csrc/` with a plain C interface, called with ctypes.

No header of PyTorch or Python is included, so one library serves every version of both. The vector code is compiled
once per instruction set and chosen when the library is loaded.

Reading order:

1. `schema.py`: the arguments of every kernel, described once; the build prints the C++ structures from it.
2. `bindings.py`: loads the library, checks tensors against the schema, and calls a kernel.
3. `block_kernels.py`, `scan_kernels.py`, `linear_kernels.py`: the operators, each with forward, backward and coverage.
4. `step_compiler.py`: turns the description of a decode step into the table of phases that `csrc/decode/` runs.
5. `csrc/`: `simd/` vectors and dtypes, `threads.h` tasks, then `ops/`, `scan/`, `linear/` and `decode/`;
   `isa_variant.cpp` compiles everything once per instruction set, `interface.cpp` chooses among the results.

To add a kernel for an operator `name`:

1. `schema.py`: describe its arguments in a `Structure`, and enter it in `_KERNELS` (forward and backward) or in
   `FUNCTIONS`.
2. `csrc/<folder>/name.h`: write `template <typename T> bool name_forward(const NameArgs&)`, which returns false if
   memory ran out, and include the header in `isa_variant.cpp`. Its table and the C function follow from the schema.
3. `*_kernels.py`: write the Python side with `bindings.call`, and enter it in the module's `IMPLEMENTATIONS`.
4. `tests/kernels/`: compare values and gradients with the portable implementation, for every dtype and layout.

To add a kind of phase to decode steps:

1. `kernels/step_description.py`: add the kind and its fields to the table, and a method to `StepBuilder` if several
   modules use it. Enter it in `ROW_KINDS`, or in `SEQUENCE_KINDS` if it reads or writes the cache; in neither, steps
   with it take one token of a sequence at a time.
2. `schema.py`: describe its fields in a `Structure` of `_PHASES`, and enter the kind in `PHASE_KINDS`. A field that is
   the name of an option, such as `rotation` or `format`, becomes a number in `_structure` of `step_compiler.py`.
3. `csrc/decode/step_name.h`: overload `phase_scratch<T>(const NamePhase&, batch)` and
   `run_phase(Kind<kName>, context, phase)`, and include the header in `decode.h` (`step_conv.h` comes in through
   `step_linear.h`); the switch follows from `PHASE_KINDS`. A phase with a cache takes it from `context.part`, token by
   token in `context.for_tokens`.
4. Call `builder.phase("name", ...)` in the module's `describe_step` or `describe_core`, and compare with the module's
   own code in `tests/kernels/test_compiled_step.py`.
"""

from anymamba.core.registry import register, register_library
from anymamba.kernels.cpu import bindings, block_kernels, linear_kernels, scan_kernels, step_compiler

register_library("cpu", bindings.describe)
for _module in (block_kernels, linear_kernels, scan_kernels, step_compiler):
    for _operator, _implementation in _module.IMPLEMENTATIONS.items():
        register(_operator, "cpu", _implementation, library="cpu")
