"""Implementations of the operators by device: found at import, never required."""

from anymamba.kernels import cpu as cpu
