"""What generated tests stand on. It travels with them as `operator_support/`, with the two files of
whence that it shares rules with; it needs torch, and pytest where a test is skipped.
"""

from whence.frameworks.torch_schema import CREATION, PLAIN, RANDOM, VIEW, kind
from whence.replay.export.support.check import Check
from whence.replay.export.support.measure import Figures, kolmogorov_smirnov, measure
from whence.replay.export.support.operators import (
    WRITTEN_OUT,
    Operators,
    invoke,
    overload,
    reduction_length,
    written,
)
from whence.replay.export.support.pytest_plugin import add_options, check_for, configure
from whence.replay.export.support.tensors import DTYPES, Built, Data, Elements, Settings, tensor

__all__ = [
    "CREATION", "DTYPES", "PLAIN", "RANDOM", "VIEW", "WRITTEN_OUT", "Built", "Check", "Data",
    "Elements", "Figures", "Operators", "Settings", "add_options", "check_for", "configure",
    "invoke", "kind", "kolmogorov_smirnov", "measure", "overload", "reduction_length", "tensor",
    "written",
]  # fmt: skip
