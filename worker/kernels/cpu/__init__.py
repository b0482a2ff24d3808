"""Kernels for CPUs in Numba: float32 arithmetic on weights in the format they were stored in."""
