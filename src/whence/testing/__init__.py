"""Parity in tests: two models, or a model and a run kept from before, must compute the same.

    from whence.testing import assert_parity

    def test_the_port(model, ported, batch):
        assert_parity(model, ported, batch)

The fixture `whence_compare` of the pytest plugin is the same and keeps what it captured below the
test's `tmp_path`. What one model must hold by itself is asserted by `properties`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whence.testing.properties import (
    assert_batch_invariant,
    assert_causal,
    assert_equivariant,
    assert_packing_invariant,
    assert_padding_invariant,
    assert_repeatable,
)

if TYPE_CHECKING:
    from whence.results import Acceptance, Comparison
    from whence.results import ParityError as ParityError

__all__ = [
    "ParityError",
    "assert_accepted",
    "assert_batch_invariant",
    "assert_causal",
    "assert_equivariant",
    "assert_kernel",
    "assert_packing_invariant",
    "assert_padding_invariant",
    "assert_parity",
    "assert_repeatable",
]


def __getattr__(name: str) -> Any:
    # every test session loads this file with the plugin: what it needs is imported on first use
    if name != "ParityError":
        raise AttributeError(f"module 'whence.testing' has no attribute {name!r}")
    from whence.results import ParityError

    return ParityError


def assert_parity(
    model_a: Any,
    model_b: Any,
    inputs: Any = None,
    folder: str | os.PathLike[str] | None = None,
    **how: Any,
) -> Comparison:
    """Call both models on the same inputs and raise ParityError unless every difference is
    rounding; `model_a` is the reference.

    model_a, model_b: torch modules, Paddle layers or predictors, or paths of runs. inputs: a tuple
    is the positional arguments, a mapping the named ones, anything else the only one. folder: for
    the runs and the comparison; None: a temporary one, which stays when the assertion fails and is
    named in its message. how: arguments of `whence.compare` (strict, policy, mapping, ...), and
    options=, of the captures. Returns the comparison. What cannot be compared fails too. Raises
    also what the models raise, and WhenceError.
    """
    __tracebackhide__ = True
    from whence.api import parity
    from whence.report.assertion import disparity
    from whence.results import ParityError, Status

    place = os.fspath(folder) if folder is not None else tempfile.mkdtemp(prefix="whence-parity-")
    keep = folder is not None
    try:
        result = parity(model_a, model_b, inputs, place, **how)
        if result.status != Status.SAME:
            keep = True
            raise ParityError(disparity(result, place), result)
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    return result


def assert_accepted(
    expected: Any, actual: Any = None, *, write: bool = False, **how: Any
) -> Acceptance:
    """Raise AssertionError unless values are those expected, or differ from them by no more than
    rounding.

    expected, actual, how: as of `whence.accept`. write: renew the file where it may be renewed.
    What cannot be told fails too. Returns the answer.
    """
    __tracebackhide__ = True
    from whence.api import accept, renew_expectation
    from whence.report.accept import accepted_text
    from whence.results import Status

    answer = accept(expected, actual, **how)
    if answer.status != Status.SAME:
        raise AssertionError(accepted_text(answer))
    return renew_expectation(expected, answer) if write else answer


def assert_kernel(kernel: str, reference: str, inputs: Mapping[str, Any], **call: Any) -> None:
    """Raise AssertionError where a kernel is further from its reference in float64 than rounding
    explains, as the tests ask that `whence ops fuzz --tests` writes.

    kernel, reference: as of `whence.fuzz`. inputs: by name (dtype, shape, elements in order).
    call: arguments, layout, forms, outputs, order; before: inputs of calls that come first.
    """
    __tracebackhide__ = True
    from whence.api import check_kernel

    fault = check_kernel(kernel, reference, inputs, **call)
    if fault is not None:
        there = f" at {fault.output} {list(fault.index)}: {fault.got!r}, exactly {fault.exact!r}"
        where = there if fault.got is not None else ""
        raise AssertionError(f"{kernel}: {fault.kind}: {fault.words}{where}")
