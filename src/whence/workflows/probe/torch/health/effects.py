"""What the outputs of a model see of an operator's loss: the loss is put into a run in float64,
and the outputs are compared with those of a run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from whence.workflows.probe.torch.health.figures import Figures, inputs_within
from whence.workflows.probe.torch.health.operands import Operands, Reading
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge
from whence.workflows.probe.torch.outputs import Outputs, same_bits
from whence.workflows.probe.torch.trace import Key

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class Effects:
    """Runs one call with losses put in. Raises, when made, what a copy in float64 raises."""

    def __init__(self, judge: Judge, inputs: CallInputs) -> None:
        self._judge, self._inputs = judge, inputs

    def of(self, losses: Mapping[Key, Figures]) -> float | None:
        """How far these losses together move the outputs, in root mean squares of each, the largest
        of all; infinite where they make one NaN or Inf. None where the model has no float64, or
        none of these operators runs there.
        """
        subject = self._judge.wide()
        if subject is None:
            return None
        met: set[Key] = set()

        def look(key: Key, read: Operands, results: list[Any]) -> Any:
            if key not in losses:
                return None
            met.add(key)
            return _with_loss(losses[key], read, results[0])

        try:
            base = self._judge.base(self._inputs, wide=True)
            reading = Reading(subject.model, look)
            changed = subject.run(self._inputs, reading.listening())
        except Exception:  # noqa: BLE001 - whatever the user's model raises in float64
            return None
        finally:
            self._judge.subject.restore()  # what both share, as a closure may
        return outputs_apart(base, changed) if met else None

    def without_births(self, spared: Key | None = None) -> Outputs:
        """What the model returns where NaN and Inf that an operator makes of finite inputs are 0
        and the largest finite numbers instead. spared: an operator that may make them. Raises what
        the model raises.
        """

        def look(key: Key, read: Operands, results: list[Any]) -> Any:
            if key == spared or bool(results[0].isfinite().all()) or not inputs_within(read, 1.0):
                return None
            return results[0].nan_to_num()

        subject = self._judge.subject
        return subject.run(self._inputs, Reading(subject.model, look).listening())

    def as_it_runs(self) -> Outputs:
        """What the model returns."""
        return self._judge.base(self._inputs)


def _with_loss(lost: Figures, read: Operands, result: torch.Tensor) -> torch.Tensor:
    """The result in float64 as the operator's own dtype leaves it: of inputs that are rounded
    otherwise, and without what is too small for the dtype.
    """
    changed = (
        read.in_float64(1, lost.unit)[0].reshape(result.shape) if lost.amplification else result
    )
    if not lost.underflow:
        return changed
    info = torch.finfo(DTYPES[lost.dtype])
    step = info.smallest_normal * info.eps  # between subnormal numbers
    is_small = changed.abs() < info.smallest_normal
    return torch.where(is_small, (changed / step).round() * step, changed)


def equal(a: Outputs, b: Outputs) -> bool:
    """Are the outputs of two runs equal bit for bit?"""
    return all(name in b and same_bits(a[name], b[name]) for name in a)


def outputs_apart(base: Outputs, changed: Outputs) -> float:
    """Root mean square of the difference over that of the base, of the output where it is largest;
    0 where no output holds numbers.
    """
    most = 0.0
    for name, tensor in base.items():
        other = changed.get(name)
        if other is None or not tensor.is_floating_point() or tensor.shape != other.shape:
            continue
        a, b = tensor.double(), other.double()
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        kept = a.isfinite()
        d = (a - b).masked_fill(same, 0.0)
        if not bool(d.isfinite().all()):
            return float("inf")
        size = float(a[kept].square().mean().sqrt()) or 1.0
        most = max(most, float(d.square().mean().sqrt()) / size)
    return most
