"""Labels in runs that `whence compare` reads: renamed so that they can be paired, or left out and
compared by `whence labels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from whence.records import Call, Over, Run
from whence.records.region import renumbered


def plain(reference: Run, target: Run) -> tuple[Run, Run, tuple[str, ...]]:
    """(reference, target, sentences) with labels that can be paired.

    If both runs have calls of modules, labels are left out, since a module's outputs are judged
    where they are computed. If a run has labels only, they are paired by name, task and occurrence,
    and by side too if both runs have labels of both sides.
    """
    runs = reference, target
    labels = [_labels(run) for run in runs]
    if not any(labels):
        return reference, target, ()
    others = [len(run.calls) > len(calls) for run, calls in zip(runs, labels)]
    if all(others):
        counts = " and ".join(
            f"{len(calls)} of {run.path}" for run, calls in zip(runs, labels) if calls
        )
        sentence = (
            f"labels ({counts}) are not part of this comparison: whence labels "
            f"{reference.path} {target.path} compares them"
        )
        return _without(reference), _without(target), (sentence,)
    name_sides = all(len({call.root for call in calls}) > 1 for calls in labels)
    renamed_reference, renamed_target = (
        _renamed(run, name_sides) if calls else run for run, calls in zip(runs, labels)
    )
    return renamed_reference, renamed_target, ()


def _labels(run: Run) -> list[Call]:
    """The calls of labels. Recorded arrays (also of kind "label") do not count."""
    return [call for call in run.calls if call.kind == "label" and "at" in call.arguments]


def _without(run: Run) -> Run:
    others = [call for call in run.calls if call.kind != "label" or "at" not in call.arguments]
    if len(others) == len(run.calls):
        return run
    return Over(run, renumbered(others))


def _renamed(run: Run, sides: bool) -> Run:
    counts: Counter[tuple[int, int, str, str]] = Counter()
    times: Sequence[Call] = sorted(_labels(run), key=lambda call: call.arguments["at"])
    renamed: dict[int, Call] = {}
    for call in times:
        root = call.root if sides else ""
        key = call.rank, call.step, root, call.scope
        renamed[call.id] = msgspec.structs.replace(
            call, root=root, occurrence=counts[key], arguments={}
        )
        counts[key] += 1
    return Over(run, [renamed.get(call.id, call) for call in run.calls])
