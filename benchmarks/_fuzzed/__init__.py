"""Kernels for `fuzzed_kernels.py`: sound ones, and faults that one shape does not show."""
