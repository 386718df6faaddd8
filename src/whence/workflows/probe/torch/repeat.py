"""Does the same call give the same result: again, later, on other threads, from other memory?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from whence.results.probe import Held, Property, PropertyAnswer, SpreadShare, Variant
from whence.workflows.probe.torch.answering import answer
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, compared_outputs, said
from whence.workflows.probe.torch.measuring import Begun, Distance, Walk, place
from whence.workflows.probe.torch.outputs import Outputs
from whence.workflows.probe.torch.spreading import shares_of_threads
from whence.workflows.probe.torch.trace import Trace
from whence.workflows.rounding.torch_modes import on_threads

_DROPS = ("dropout", "bernoulli")
_FILLS = (0.0, 7.0)
_SEED = 20_011


def repeat(judge: Judge, inputs: CallInputs, returned: Outputs | None) -> PropertyAnswer:
    """Call the model again, in ways that may not matter. returned: what the program's own call
    gave, None where it is not known.
    """
    memory = _memory(judge, inputs)
    again = judge.variant("when called again", inputs, inputs)
    variants, of_threads = [memory, again], dict[int, Variant]()
    if again.held == Held.EXACT and memory.held != Held.VIOLATED:
        variants.append(_seeded(judge, inputs))
        variants += [_later(judge, inputs, between=False), _later(judge, inputs, between=True)]
        of_threads = _threads(judge, inputs)
        variants += of_threads.values()
        variants += _laid_out(judge, inputs)
        if returned is not None:
            variants += _as_returned(judge, inputs, returned)
    broken = [v for held in (Held.VIOLATED, Held.OBSERVED) for v in variants if v.held == held]
    cause = ""
    if broken:
        judged = broken[0].in_float64 is not None
        cause = f"another result {broken[0].name}" if judged else broken[0].why
    result = answer(Property.REPEAT, variants, cause=cause)
    return replace(result, shares=_shares(judge, inputs, of_threads))


def _outcome(name: str, far: Distance, held: Held, why: str, first: Begun | None = None) -> Variant:
    if not far.differing:
        return Variant(name, Held.EXACT, count=far.count)
    return Variant(
        name, held, first=place(first) if first is not None else None, why=why, **vars(far)
    )


_Run = Callable[..., Any]
"""Runs the model on inputs in some modes, from where a seed begins."""


def _twice(
    judge: Judge,
    name: str,
    runs: Callable[[_Run], None],
    words: Callable[[Begun | None], tuple[Held, str]],
) -> Variant:
    """Two runs of the model, compared bit for bit. runs: makes them by the function that it is
    given. words: what a difference means, by the operator in which it begins.
    """
    subject, outputs, traces = judge.subject, list[Outputs](), list[Trace]()

    def run(inputs: CallInputs, *modes: Any, seed: int | None = None) -> None:
        outputs.append(subject.run_on(inputs, *modes, seed=seed))

    def trace(inputs: CallInputs, *modes: Any, seed: int | None = None) -> None:
        traces.append(Trace(subject.model))
        subject.run_on(inputs, *modes, traces[-1].listening(), seed=seed)

    begun = None
    try:
        runs(run)
        far = compared_outputs(outputs[0], outputs[1])[0]
        held, why = words(None)
        if far.differing:
            subject.restore()
            with contextlib.suppress(Exception):  # what cannot be traced has no named operator
                runs(trace)
                begun = next(iter(Walk().over(traces[0], traces[1], None)), None)
            held, why = words(begun)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        return Variant(name, Held.UNKNOWN, why=said(error))
    finally:
        subject.restore()
    return _outcome(name, far, held, why, begun)


def _seeded(judge: Judge, inputs: CallInputs) -> Variant:
    """With random numbers that begin elsewhere: a drawn number shows."""

    def runs(run: _Run) -> None:
        run(inputs)
        judge.subject.restore()
        run(inputs, seed=_SEED)

    def words(begun: Begun | None) -> tuple[Held, str]:
        at = place(begun) if begun is not None else None
        if at is None or not any(w in f"{at.operator} {at.op_type}".lower() for w in _DROPS):
            return Held.OBSERVED, "it draws random numbers: seed it"
        mode = "the model is in training mode: call model.eval()"
        why = mode if judge.subject.model.training else "the model is in evaluation mode"
        return Held.VIOLATED, f"dropout is on; {why}"

    return _twice(judge, "with another seed", runs, words)


def _later(judge: Judge, inputs: CallInputs, *, between: bool) -> Variant:
    """A second call, with the state that the first one left. between: a call with another input
    between them.
    """
    other = inputs.changed(**{inputs.main: other_tokens(inputs.tensor, 31)})
    state: list[str] = []

    def runs(run: _Run) -> None:
        run(inputs)
        if between:
            judge.subject.run_on(other)
        run(inputs)
        state[:] = judge.subject.changed_state()

    def words(begun: Begun | None) -> tuple[Held, str]:
        why = "the model keeps something from one call to the next"
        return Held.VIOLATED, why + (f": {', '.join(state[:3])}" if state else "")

    name = "after a call with another input" if between else "when called a second time"
    return _twice(judge, name, runs, words)


def _threads(judge: Judge, inputs: CallInputs) -> dict[int, Variant]:
    """Number of threads -> what comes of it."""
    now = torch.get_num_threads()
    counts = sorted(n for n in {1, 2, os.cpu_count() or 1} - {now} if n <= (os.cpu_count() or 1))
    return {
        count: judge.variant(
            f"on {count} thread{'s' * (count > 1)} in the place of {now}",
            inputs,
            inputs,
            modes=[lambda _, count=count: on_threads(count)],  # type: ignore[misc]
        )
        for count in counts
    }


def _shares(
    judge: Judge, inputs: CallInputs, of_threads: dict[int, Variant]
) -> tuple[SpreadShare, ...]:
    """Where the largest spread over numbers of threads comes from."""
    rounded = {n: v for n, v in of_threads.items() if v.held == Held.ROUNDING}
    if not rounded:
        return ()
    count = max(rounded, key=lambda n: rounded[n].moved)
    return shares_of_threads(judge, inputs, count)


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
        judge.variant(name, inputs, inputs.changed(**{inputs.main: twin}), copied=False)
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

    def runs(run: _Run) -> None:
        for value in _FILLS:
            run(inputs, _Fresh(value))
            judge.subject.restore()

    words = Held.VIOLATED, "it reads memory that torch.empty made and nothing wrote"
    name = "with other values in memory that nothing wrote"
    return _twice(judge, name, runs, lambda begun: words)


def _as_returned(judge: Judge, inputs: CallInputs, returned: Outputs) -> list[Variant]:
    """What the program's own call gave, against a call now."""
    now = judge.base(inputs)
    shared = {name: tensor for name, tensor in returned.items() if name in now}
    if not shared or any(now[n].shape != t.shape for n, t in shared.items()):
        return []
    far = compared_outputs(shared, now)[0]
    words = "the program's own call gave something else: state of the model has changed since"
    return [_outcome("in the program's own call", far, Held.OBSERVED, words)]
