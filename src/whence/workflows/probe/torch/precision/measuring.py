"""Runs a model with some of its modules in a narrower type, and measures what its outputs say.

Discrete decisions that a run takes from computed numbers: which experts, what is above a limit.

Where a rounding changes one, the outputs jump; no sum of small errors says how far.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from whence.display import listed
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.measuring import relative_rms
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.precision.narrowing import Narrowed
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.trace import Key, Trace

Errors = npt.NDArray[np.float64]
"""||y' - y|| / ||y|| of each output; infinite where one has NaN, Inf or another shape."""


class Moved(NamedTuple):
    """The outputs of a mixed model beside those of the model as it is. flips: rows of the first
    output of two axes or more whose largest element is another, of `rows`. decided: rows of
    discrete decisions inside the model that came out otherwise.
    """

    errors: Errors
    flips: int
    rows: int
    decided: int

    @property
    def worst(self) -> float:
        """The largest error of an output."""
        return float(self.errors.max(initial=0.0))


class Mixing:
    """Measures mixed models on some calls, by number: 0 is the one that is asked about. The model
    as it is runs once for each of them. names: of the outputs that are measured, those of
    floating-point numbers. unit: unit roundoff of the model. decides: what takes discrete decisions
    in the call, in words. runs: how often the model was called. Raises what the model raises.
    """

    def __init__(self, subject: Subject, inputs: CallInputs, unit: float) -> None:
        self.subject, self.unit, self.runs = subject, unit, 0
        self._inputs = [inputs]
        self._bases: dict[int, tuple[Outputs, _Taken]] = {}
        first, taken = self._base(0)
        self.decides = _decision_words(taken)
        self.names = [n for n, t in first.items() if t.is_floating_point() and t.numel()]

    def add(self, inputs: CallInputs) -> int:
        """The number of a further call of the same kind."""
        self._inputs.append(inputs)
        return len(self._inputs) - 1

    def runs_on(self, call: int) -> bool:
        """Does the model as it is take this call? Ids may be marks that it counts."""
        try:
            outputs, _ = self._base(call)
        except Exception:  # noqa: BLE001 - whatever the user's model raises
            return False
        return all(bool(outputs[name].isfinite().all()) for name in self.names if name in outputs)

    @property
    def least_elements(self) -> int:
        """How many numbers the smallest output has."""
        return min(int(self._base(0)[0][name].numel()) for name in self.names)

    def _base(self, call: int) -> tuple[Outputs, _Taken]:
        if call not in self._bases:
            self._bases[call] = self._run(self._inputs[call])
        return self._bases[call]

    def moved(self, paths: Collection[str], to: str, call: int = 0) -> Moved:
        """The outputs on one of the calls with these modules in a narrower type. Raises what the
        model raises so.
        """
        base, before = self._base(call)
        with Narrowed(self.subject.model, dict.fromkeys(paths, to)):
            outputs, after = self._run(self._inputs[call])
        errors = np.array([_error(base[n], outputs.get(n)) for n in self.names])
        return Moved(errors, *self._flips(base, outputs), _changed_decisions(before, after))

    def _run(self, call: CallInputs) -> tuple[Outputs, _Taken]:
        self.runs += 1
        if self._bases and not self.decides:
            return self.subject.run(call), {}
        deciding = _Deciding(self.subject.model)
        return self.subject.run(call, deciding.listening()), deciding.taken

    def _flips(self, base: Outputs, outputs: Outputs) -> tuple[int, int]:
        name = next((n for n in self.names if base[n].dim() >= 2 and base[n].shape[-1] > 1), None)
        if name is None or name not in outputs or base[name].shape != outputs[name].shape:
            return 0, 0
        before, after = base[name].argmax(-1), outputs[name].argmax(-1)
        return int((before != after).sum()), before.numel()


def _error(base: Any, other: Any) -> float:
    if other is None or other.shape != base.shape:
        return float("inf")
    return relative_rms(base, other)


_DECIDE = (
    "topk", "argmax", "argmin", "max.dim", "min.dim", "kthvalue", "multinomial", "gt.", "ge.",
    "lt.", "le.",
)  # fmt: skip

_Taken = dict[Key, torch.Tensor]
"""What each deciding operator chose: indices, or whether each element is above a limit."""


class _Deciding(Trace):
    """A trace that keeps what a run decides, in `taken`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, begin=1 << 60, change=self._decided)
        self.taken: _Taken = {}

    def _decided(self, key: Key, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        name = str(func).partition(".")[2]
        if name.startswith(_DECIDE) and args and args[0].is_floating_point():
            indices = out[-1] if isinstance(out, tuple) else out
            self.taken[key] = indices.detach().clone()
        return out


def _changed_decisions(before: _Taken, after: _Taken) -> int:
    """How many rows chose otherwise; the order of what was chosen does not count."""
    count = 0
    for key, indices in before.items():
        other = after.get(key)
        if other is None or other.shape != indices.shape:
            count += 1
        elif indices.dim() and key[2].startswith("aten.topk"):
            a, b = indices.sort(-1).values, other.sort(-1).values
            count += int((a != b).any(-1).sum())
        else:
            count += int((indices != other).sum())
    return count


def _decision_words(taken: _Taken) -> str:
    """ "aten.topk in model.layers.0.mlp.gate and 3 more": what decides, "" for nothing."""
    places = dict.fromkeys((key[2].removesuffix(".default"), key[0]) for key in taken)
    words = [f"{operator} in {scope or 'the model itself'}" for operator, scope in places]
    return listed(words, 1)
