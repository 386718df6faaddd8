"""Kernels for `fuzzed_kernels.py`: sound ones, and ones with a fault that one shape does not show."""
