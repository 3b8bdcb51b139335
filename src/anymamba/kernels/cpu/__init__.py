"""The compiled kernels for CPUs: C++ sources in `csrc/`, and the operators that they implement."""

from anymamba.core.operators import implement
from anymamba.kernels.cpu import block_kernels, linear_kernels, scan_kernels

for _module in (block_kernels, linear_kernels, scan_kernels):
    for _name, _implementation in _module.IMPLEMENTATIONS.items():
        implement(_name, "cpu", _implementation)
