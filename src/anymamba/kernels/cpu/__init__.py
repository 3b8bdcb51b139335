"""The compiled kernels for CPUs: C++ sources in `csrc/`, and the operators that they implement."""

from anymamba.ground.operators import implement
from anymamba.kernels.cpu import around, scan

for _name, _implementation in {**scan.IMPLEMENTATIONS, **around.IMPLEMENTATIONS}.items():
    implement(_name, "cpu", _implementation)
