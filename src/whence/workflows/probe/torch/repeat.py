"""Does the same call give the same result: again, later, on other threads, from other memory?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from whence.results.probe import (
    Held,
    OperatorPlace,
    Property,
    PropertyAnswer,
    SpreadShare,
    Variant,
)
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, compared_outputs, traced
from whence.workflows.probe.torch.measuring import Begun, Walk, place
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.regions import Everything
from whence.workflows.probe.torch.spreading import shares_of_threads
from whence.workflows.probe.torch.trace import Trace

_ALL = Everything()
_DROPS = ("dropout", "bernoulli")
_FILLS = (0.0, 7.0)
_SEED = 20_011


def repeat(judge: Judge, inputs: CallInputs, returned: Outputs | None) -> PropertyAnswer:
    """Call the model again, in ways that may not matter. returned: what the program's own call
    gave, None where it is not known.
    """
    memory = _memory(judge, inputs)
    again = judge.variant("when called again", inputs, inputs.changed(), _ALL)
    variants, on_threads = [memory, again], {}
    if again.held == Held.EXACT and memory.held != Held.VIOLATED:
        variants.append(_seeded(judge, inputs))
        variants += [_later(judge, inputs, between=False), _later(judge, inputs, between=True)]
        on_threads = _threads(judge, inputs)
        variants += on_threads.values()
        variants += _laid_out(judge, inputs)
        if returned is not None:
            variants += _as_returned(judge, inputs, returned)
    broken = [v for held in (Held.VIOLATED, Held.OBSERVED) for v in variants if v.held == held]
    cause = ""
    if broken:
        judged = broken[0].in_float64 is not None
        cause = f"another result {broken[0].name}" if judged else broken[0].why
    result = answer(Property.REPEAT, variants, cause=cause)
    return replace(result, shares=_shares(judge, inputs, on_threads))


def _outcome(name: str, far: Any, held: Held, first: OperatorPlace | None, why: str) -> Variant:
    if not far.differing:
        return Variant(name, Held.EXACT, count=far.elements)
    return Variant(
        name,
        held,
        moved=far.moved,
        ulp=far.ulp,
        differing=far.differing,
        count=far.elements,
        first=first,
        why=why,
    )


def _far(a: Outputs, b: Outputs) -> Any:
    return compared_outputs(a, b, _ALL, None)[0]


def _seeded(judge: Judge, inputs: CallInputs) -> Variant:
    """With random numbers that begin elsewhere: a drawn number shows."""
    name = "with another seed"
    try:
        other = judge.subject.run(inputs, seed=_SEED)
        far = _far(judge.base(inputs), other)
        if not far.differing:
            return _outcome(name, far, Held.EXACT, None, "")
        operator = _first_drawn(judge, inputs)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        return Variant(name, Held.UNKNOWN, why=f"{type(error).__name__}: {error}"[:160])
    where = place(operator) if operator is not None else None
    words = f"{where.operator} {where.op_type}".lower() if where is not None else ""
    if any(word in words for word in _DROPS):
        mode = "the model is in training mode: call model.eval()"
        why = mode if judge.subject.model.training else "the model is in evaluation mode"
        return _outcome(name, far, Held.VIOLATED, where, f"dropout is on; {why}")
    return _outcome(name, far, Held.OBSERVED, where, "it draws random numbers: seed it")


def _first_drawn(judge: Judge, inputs: CallInputs) -> Begun | None:
    """The first operator of which another seed changes what it gives."""
    traces = []
    for seed in (None, _SEED):
        trace = Trace(judge.subject.model)
        judge.subject.run(inputs, trace.listening(), seed=seed)
        traces.append(trace)
    walk = Walk(_ALL, lambda far: far.differing > 0)
    return next(iter(walk.over(traces[0], traces[1], None)), None)


def _later(judge: Judge, inputs: CallInputs, *, between: bool) -> Variant:
    """A second call, with the state that the first one left. between: a call with another input
    between them.
    """
    name = "after a call with another input" if between else "when called a second time"
    subject = judge.subject
    try:
        first = subject.run_on(inputs)
        if between:
            other = inputs.changed(**{inputs.main: other_tokens(inputs.tensor, 31)})
            subject.run_on(other)
        second = subject.run_on(inputs)
        state = subject.changed_state()
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        return Variant(name, Held.UNKNOWN, why=f"{type(error).__name__}: {error}"[:160])
    finally:
        subject.restore()
    words = "the model keeps something from one call to the next"
    if state:
        words += f": {', '.join(state[:3])}"
    far = _far(first, second)
    where = _first_after(judge, inputs, between) if far.differing else None
    return _outcome(name, far, Held.VIOLATED, where, words)


def _first_after(judge: Judge, inputs: CallInputs, between: bool) -> OperatorPlace | None:
    """Where the second call begins to differ from the first."""
    subject, traces = judge.subject, []
    other = inputs.changed(**{inputs.main: other_tokens(inputs.tensor, 31)}) if between else None
    try:
        for number in range(2):
            trace = Trace(subject.model)
            subject.run_on(inputs, trace.listening())
            traces.append(trace)
            if other is not None and not number:
                subject.run_on(other)
    except Exception:  # noqa: BLE001 - what cannot be traced has no named operator
        return None
    finally:
        subject.restore()
    walk = Walk(_ALL, lambda far: far.differing > 0)
    first = next(iter(walk.over(traces[0], traces[1], None)), None)
    return place(first) if first is not None else None


def _threads(judge: Judge, inputs: CallInputs) -> dict[int, Variant]:
    """Number of threads -> what comes of it."""
    now = torch.get_num_threads()
    counts = sorted(n for n in {1, 2, os.cpu_count() or 1} - {now} if n <= (os.cpu_count() or 1))
    return {
        count: judge.variant(
            f"on {count} thread{'s' * (count > 1)} in the place of {now}",
            inputs,
            inputs.changed(),
            _ALL,
            modes=[lambda _, count=count: _with_threads(count)],  # type: ignore[misc]
        )
        for count in counts
    }


def _shares(
    judge: Judge, inputs: CallInputs, on_threads: dict[int, Variant]
) -> tuple[SpreadShare, ...]:
    """Where the largest spread over numbers of threads comes from."""
    rounded = {n: v for n, v in on_threads.items() if v.held == Held.ROUNDING}
    if not rounded:
        return ()
    count = max(rounded, key=lambda n: rounded[n].moved)
    return shares_of_threads(judge, inputs, _with_threads, count)


@contextlib.contextmanager
def _with_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _laid_out(judge: Judge, inputs: CallInputs) -> list[Variant]:
    """The same elements, elsewhere in memory or in another order."""
    tensor = inputs.tensor
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    moved = room.copy_(tensor.reshape(-1)).view(tensor.shape)
    layouts = {"from memory one element further": moved}
    if not tensor.is_contiguous():
        layouts["from contiguous memory"] = tensor.contiguous()
    if tensor.ndim == 4 and tensor.is_floating_point():
        layouts["in channels_last"] = tensor.contiguous(memory_format=torch.channels_last)
    elif tensor.ndim > 1 and tensor.shape[0] > 1:
        layouts["from transposed memory"] = (
            tensor.t().contiguous().t()
            if tensor.ndim == 2
            else (tensor.transpose(0, 1).contiguous().transpose(0, 1))
        )
    return [
        judge.variant(name, inputs, inputs.changed(**{inputs.main: twin}), _ALL, copied=False)
        for name, twin in layouts.items()
    ]


class _Fresh(TorchDispatchMode):  # type: ignore[misc]
    """New memory that nothing wrote holds one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name and isinstance(out, torch.Tensor) and not out.is_meta:
            out.fill_(self._value if out.dtype != torch.bool else bool(self._value))
        return out


def _memory(judge: Judge, inputs: CallInputs) -> Variant:
    """With other values in new memory before anything is written to it."""
    name = "with other values in memory that nothing wrote"
    subject = judge.subject
    try:
        low, high = (subject.run(inputs, _Fresh(value)) for value in _FILLS)
        far = _far(low, high)
        if not far.differing:
            return _outcome(name, far, Held.EXACT, None, "")
        where = _first_of_memory(judge, inputs)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        return Variant(name, Held.UNKNOWN, why=f"{type(error).__name__}: {error}"[:160])
    words = "it reads memory that torch.empty made and nothing wrote"
    return _outcome(name, far, Held.VIOLATED, where, words)


def _first_of_memory(judge: Judge, inputs: CallInputs) -> OperatorPlace | None:
    low, high = (
        traced(judge.subject, inputs, modes=[lambda _, value=value: _Fresh(value)])  # type: ignore[misc]
        for value in _FILLS
    )
    walk = Walk(_ALL, lambda far: far.differing > 0)
    first = next(iter(walk.over(low, high, None)), None)
    return place(first) if first is not None else None


def _as_returned(judge: Judge, inputs: CallInputs, returned: Outputs) -> list[Variant]:
    """What the program's own call gave, against a call now."""
    now = judge.base(inputs)
    shared = {name: tensor for name, tensor in returned.items() if name in now}
    if not shared or any(now[n].shape != t.shape for n, t in shared.items()):
        return []
    far = _far(shared, now)
    words = "the program's own call gave something else: state of the model has changed since"
    return [_outcome("in the program's own call", far, Held.OBSERVED, None, words)]
