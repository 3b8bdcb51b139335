"""The compiled kernels for CPUs: C++ sources in `csrc/`, and the operators that they implement."""

from anymamba.ground.operators import implement
from anymamba.kernels.cpu import around, narrow, product, scan

for _module in (around, narrow, product, scan):
    for _name, _implementation in _module.IMPLEMENTATIONS.items():
        implement(_name, "cpu", _implementation)
