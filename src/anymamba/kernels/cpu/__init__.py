"""The compiled kernels for CPUs: C++ sources in `csrc/`, and their operators."""
