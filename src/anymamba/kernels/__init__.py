"""Implementations of the operators by device: found at import, never required."""

from anymamba.core.registry import describe_kernels as describe_kernels
from anymamba.core.registry import missing_kernel as missing_kernel
from anymamba.kernels import cpu as _cpu  # noqa: F401  registers its operators
