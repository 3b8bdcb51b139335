"""The compiled kernels for CPUs: C++ sources in `csrc/`, and the operators that they implement."""

from anymamba.ground.operators import implement
from anymamba.kernels.cpu import around, narrow, scan

for _name, _implementation in {**scan.IMPLEMENTATIONS, **around.IMPLEMENTATIONS, **narrow.IMPLEMENTATIONS}.items():
    implement(_name, "cpu", _implementation)
