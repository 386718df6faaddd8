"""Shifts the step numbers of one run so that steps with equal inputs are paired (warm-up steps,
other counting).
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from whence.align.call_sites import coarsened, coarser_input, match_roots
from whence.align.derived_run import Derived
from whence.dtypes import Array, is_floating, is_whole
from whence.errors import ElementsMissing
from whence.records import Call, Over, Run
from whence.records.training import OPTIMIZER


def rebased(reference: Run, target: Run) -> tuple[Run, tuple[str, ...]]:
    """(the target with steps numbered as in the reference, notes).

    A run with a warm-up or calibration before the actual work has later step numbers, and some
    tools count from 1. The steps of a model are shifted if no step has the same inputs (in any
    order of rows) as the reference's step of that number, and at least half of the common steps do
    after the shift. Steps that read a beginning of later inputs lead up to these and are no
    warm-up. If all models have the same shift, losses and optimisers get it too. Inputs in another
    floating dtype are the same if they are once both are rounded to the coarser one. Every step of
    a training has parameters of its own, so one training has to lie wholly within the other.
    """
    outermost = ((run, [c for c in run.calls if c.parent == -1]) for run in (reference, target))
    coarse = coarser_input(tuple(outermost))
    inputs, target_inputs = _root_inputs(reference, coarse), _root_inputs(target, coarse)
    roots = match_roots(reference.calls, target.calls)
    learn = any(call.phase == OPTIMIZER for run in (reference, target) for call in run.calls)
    shifts: dict[str, int] = {}
    for root, steps in inputs.items():
        target_root = roots.get(root, root)
        across = target_inputs.get(target_root, {})
        if _agreeing(steps, across, 0):
            continue
        for shift in _shifts(steps, across):
            common = [step for step in steps if step + shift in across]
            fewest = min(len(steps), len(across)) if learn else len(common) / 2
            if (
                common
                and _agreeing(steps, across, shift) >= fewest
                and not _leads_up(reference, root, steps.keys() - common, common[0])
                and not _leads_up(
                    target,
                    target_root,
                    across.keys() - {step + shift for step in common},
                    common[0] + shift,
                )
                and not _same_rows(reference, root, target, target_root, coarse)
            ):
                shifts[target_root] = shift
                break
    if not shifts:
        return target, ()
    alike = set(shifts.values())
    others = alike.pop() if len(alike) == 1 else 0
    calls = [replace(c, step=c.step - shifts.get(c.root, others)) for c in target.calls]
    words = (
        f"steps of {root} of the target are moved by {-shift}: then what comes in is the same"
        for root, shift in shifts.items()
    )
    return Derived(target, (), (), calls), tuple(words)


def _same_rows(reference: Run, root: str, target: Run, target_root: str, coarse: str) -> bool:
    """Whether some step has the same batch in both runs, in any order of rows."""
    calls, calls_across = _calls_by_step(reference, root), _calls_by_step(target, target_root)
    return any(
        _batches(reference, calls[step], coarse) & _batches(target, calls_across[step], coarse)
        for step in calls.keys() & calls_across.keys()
    )


def _batches(run: Run, calls: Iterable[Call], coarse: str) -> set[Hashable]:
    """A key, (shape, sorted rows as bytes), of each input of these calls with different rows."""
    arrays = (coarsened(array, coarse) for array in _given(run, calls))
    rows = ((a.shape, sorted(row.tobytes() for row in a)) for a in arrays)
    return {(shape, *ordered) for shape, ordered in rows if len(set(ordered)) > 1}


def _calls_by_step(run: Run, root: str) -> dict[int, list[Call]]:
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in run.calls:
        if call.parent == -1 and call.root == root:
            calls[call.step].append(call)
    return calls


def _leads_up(run: Run, root: str, steps: Iterable[int], to: int) -> bool:
    """Whether the model read, at one of these steps, the first tokens of its input at step `to`."""
    calls = _calls_by_step(run, root)
    whole = list(_given(run, calls[to], only_whole=True))
    return any(
        part.shape[:-1] == tokens.shape[:-1]
        and part.shape[-1] < tokens.shape[-1]
        and np.array_equal(part, tokens[..., : part.shape[-1]])
        for step in steps
        for part in _given(run, calls[step], only_whole=True)
        for tokens in whole
    )


def _given(run: Run, calls: Iterable[Call], *, only_whole: bool = False) -> Iterator[Array]:
    """The inputs of these calls that have axes. only_whole: only integer tensors."""
    for record in sorted({r.record for call in calls for r in call.slots("input")}):
        about = run.records[record]
        if about.shape and (is_whole(about.dtype) or not only_whole):
            with contextlib.suppress(ElementsMissing):
                yield run.array(record)


def _shifts(
    steps: Mapping[int, set[Hashable]], across: Mapping[int, set[Hashable]]
) -> Iterable[int]:
    """The differences of step numbers between equal inputs of both runs, most frequent first."""
    places = {content: step for step, contents in across.items() for content in contents}
    counts = Counter(
        places[content] - step
        for step, contents in steps.items()
        for content in contents
        if content in places
    )
    return (shift for shift, _ in counts.most_common())


def _root_inputs(run: Run, coarse: str) -> Mapping[str, Mapping[int, set[Hashable]]]:
    """The contents of root inputs by root and step, without those that occur at several steps;
    floating ones as rounded to the dtype `coarse`, "" for no rounding.
    """
    steps_with: dict[str, dict[Hashable, set[int]]] = defaultdict(lambda: defaultdict(set))
    out: dict[str, dict[int, set[Hashable]]] = defaultdict(lambda: defaultdict(set))
    for call in run.calls:
        if call.parent == -1:
            out[call.root][call.step] |= set()
            for ref in call.slots("input"):
                record = run.records[ref.record]
                if record.hash and record.count:
                    content = _content(run, ref.record, coarse)
                    steps_with[call.root][content].add(call.step)
                    out[call.root][call.step].add(content)
    return {
        root: {
            step: {c for c in contents if len(steps_with[root][c]) == 1}
            for step, contents in steps.items()
        }
        for root, steps in out.items()
    }


def _content(run: Run, number: int, coarse: str) -> Hashable:
    record = run.records[number]
    if coarse and is_floating(record.dtype):
        with contextlib.suppress(ElementsMissing):
            return hash(coarsened(run.array(number), coarse).tobytes()), record.shape
    return record.hash, record.dtype, record.shape


def _agreeing(
    steps: Mapping[int, set[Hashable]], across: Mapping[int, set[Hashable]], shift: int
) -> int:
    return sum(bool(contents & across.get(step + shift, set())) for step, contents in steps.items())


_OPERATORS = ("operator", "region")


def one_level(reference: Run, target: Run) -> tuple[Run, Run, list[str]]:
    """(reference, target, notes) without operators if only one run captured them."""
    notes = []
    if has_operators(reference) and not _any_operator(target):
        reference = _modules_of(reference)
        notes.append("the operators of the reference are left out: the target was captured without")
    elif has_operators(target) and not _any_operator(reference):
        target = _modules_of(target)
        notes.append("the operators of the target are left out: the reference was captured without")
    return reference, target, notes


def has_operators(run: Run) -> bool:
    """Whether this is a capture of operators below modules; dumps of other tools are not."""
    return run.info.options.get("level") == "op"


def _any_operator(run: Run) -> bool:
    return any(call.kind in _OPERATORS for call in run.calls)


def _modules_of(run: Run) -> Run:
    modules = [call for call in run.calls if call.kind not in _OPERATORS]
    if not modules:  # a region without a model: its operators are all there is
        return run
    number = {call.id: i for i, call in enumerate(modules)}
    parents = {call.parent for call in modules}
    calls: list[Call] = [
        replace(c, id=number[c.id], parent=number.get(c.parent, -1), leaf=c.id not in parents)
        for c in modules
    ]
    return Over(run, calls)
