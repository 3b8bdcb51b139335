"""The compiled kernels for CPUs: C++ sources in `csrc/`, and the operators that they implement."""

from anymamba.core.registry import register, register_library
from anymamba.kernels.cpu import bindings, block_kernels, linear_kernels, scan_kernels

register_library("cpu", bindings.describe)
for _module in (block_kernels, linear_kernels, scan_kernels):
    for _operator, _implementation in _module.IMPLEMENTATIONS.items():
        register(_operator, "cpu", _implementation, library="cpu")
