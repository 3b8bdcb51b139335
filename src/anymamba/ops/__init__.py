"""The parts of a block around its scan, each an operator: convolution, norms, gates, discretization and rotation."""

from anymamba import kernels as _kernels  # noqa: F401  registers what devices bring
