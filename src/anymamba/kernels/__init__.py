"""Compiled implementations of the library's own functions: found at import, never required."""
