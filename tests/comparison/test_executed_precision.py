"""Calls that an engine executed in bfloat16 and whose results it hands out as float32."""

import ml_dtypes
import msgspec
import numpy as np
import pytest

import whence
from handmade import Builder
from whence.records import MemoryRun
from whence.records.marks import Mark, mark

pytestmark = pytest.mark.torch
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 32, 64)).astype(np.float32)
FIRST, SECOND = ((RANDOM.standard_normal((64, 64)) / 8).astype(np.float32) for _ in range(2))


def rounded(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def run(*, narrow, fault=lambda made: made, keeps_last=False):
    """x @ first -> relu -> @ second. fault: of the first product. keeps_last: the last result is
    not rounded.
    """
    held = rounded if narrow else lambda array: array
    made = held(fault(held(held(X) @ held(FIRST))))
    positive = np.maximum(made, 0)
    out = held(positive) @ held(SECOND)
    out = out if keeps_last else held(out)
    graph = Builder()
    graph.call("", {"input.x": X, "output.y": out}, op_type="CompiledModel", leaf=False)
    for scope, op_type, reads, weight, makes in (
        ("m", "MatMul", X, FIRST, made),
        ("t", "Relu", made, None, positive),
        ("o", "MatMul", positive, SECOND, out),
    ):
        slots = {"input.0": reads, "output.0": makes}
        notes = [mark(Mark.EXECUTED_IN, "bfloat16") if narrow else mark(Mark.OPSET, 17)]
        if weight is not None:
            slots["param.w"] = weight
            notes.append(mark(Mark.TAKES, "w as 1"))
        graph.call(scope, slots, op_type=op_type, parent=0)
        graph.calls[-1] = msgspec.structs.replace(
            graph.calls[-1], kind="operator", notes=tuple(notes), leaf=True
        )
    return graph.run()


@pytest.mark.parametrize("keeps_last", [False, True])
def test_an_even_error_of_reduced_precision_is_no_fault(keeps_last):
    result = whence.compare(run(narrow=False), run(narrow=True, keeps_last=keeps_last))
    assert result.status == "same"
    assert result.coverage.replayed == result.coverage.paired


def _scaled(made):
    return made * np.float32(1.02)


def _one_element(made):
    changed = made.copy()
    changed[1, 3, 7] += 0.5
    return changed


@pytest.mark.parametrize("fault", [_scaled, _one_element])
def test_a_fault_beyond_that_precision_is_named(fault):
    result = whence.compare(run(narrow=False), run(narrow=True, fault=fault))
    assert [finding.name for finding in result.findings] == ["m"]


UNSHOWN = {"m": ("output",), "t": ("input", "output"), "o": ("input",)}


def unshown(**how):
    """The run of an engine that cannot show what its first two nodes make without changing it."""
    calls = []
    whole = run(narrow=True, **how)
    for call in whole.calls:
        kept = (r for r in call.refs if not r.slot.startswith(UNSHOWN.get(call.scope, ("-",))))
        calls.append(msgspec.structs.replace(call, refs=tuple(kept)))
    return MemoryRun(calls, whole.records, {r.id: whole.array(r.id) for r in whole.records})


def test_between_shown_values_all_is_one():
    result = whence.compare(run(narrow=False), unshown())
    assert result.status == "same"
    assert result.unmatched == 0
    assert result.coverage.replayed == result.coverage.paired


def test_a_fault_between_shown_values_is_not_taken_for_another_input():
    result = whence.compare(run(narrow=False), unshown(fault=_scaled))
    assert [finding.name for finding in result.findings] == ["m+t+o"]
