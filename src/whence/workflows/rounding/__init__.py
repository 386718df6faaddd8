"""Runs a program in several ways of rounding and collects the results as evidence for a
noise band.
"""

from whence.workflows.rounding.named_values import named_arrays
from whence.workflows.rounding.ways import Ways, run_exact, run_ways, with_leaves

__all__ = ["Ways", "named_arrays", "run_exact", "run_ways", "with_leaves"]
