"""Which steps of a comparison change an answer: the evidence that each of them is needed.

A step is a stage of the verdict, a form that both runs are brought to, or a rule that pairs calls.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from whence.comparison import pipeline
from whence.comparison.context import Context
from whence.comparison.pipeline import Stage, Verdicts


class Step(NamedTuple):
    """A function by module and name, and what stands in its place: called with its arguments, it
    gives what the function gives where it has nothing to do. mutates: the argument that it changes,
    in place of giving something.
    """

    module: str
    name: str
    neutral: Callable[..., Any]
    mutates: int | None = None


def _both(reference: Any, target: Any, *more: Any, **how: Any) -> Any:
    return reference, target


def _both_and_notes(reference: Any, target: Any, *more: Any, **how: Any) -> Any:
    return reference, target, []


def _both_and_sentences(reference: Any, target: Any, *more: Any, **how: Any) -> Any:
    return reference, target, ()


def _first(one: Any, *more: Any, **how: Any) -> Any:
    return one


def _target_and_plan(reference: Any, target: Any, plan: Any, *more: Any) -> Any:
    return target, plan


def _nothing(*arguments: Any) -> None:
    return None


def _never(*arguments: Any) -> bool:
    return False


def _batches(reference: Any, target: Any) -> Any:
    from whence.align.batches import align

    return align.AlignedBatches(reference, target)


def _unfused(reference: Any, target: Any) -> Any:
    from whence.align.calls.fused_operators import Fused

    return Fused(reference, target)


_COMPARE, _CONTEXT = "whence.workflows.compare", "whence.comparison.context"
_ALIGN, _MATCH = "whence.align.pipeline", "whence.align.calls.match"
FORMS: dict[str, Step] = {
    "agreeing inputs": Step(
        "whence.comparison.programs.program_flow", "with_agreeing_inputs", _both
    ),
    "partial prints": Step("whence.comparison.prepare.partial_prints", "alike", _both),
    "labels": Step(_CONTEXT, "plain", _both_and_notes),
    "figures": Step(_CONTEXT, "with_figures", _first),
    "training form": Step(_CONTEXT, "in_one_form", _both_and_sentences),
    "bits of bfloat16": Step(_CONTEXT, "with_numbers", _both_and_sentences),
    "stored precision": Step(_CONTEXT, "as_computed", _first),
    "one level": Step(_ALIGN, "one_level", _both_and_notes),
    "graphs and modules": Step(_ALIGN, "graphs_in_one", _never),
    "graphs cut alike": Step(_ALIGN, "cut_alike", _both_and_notes),
    "root moved": Step(_ALIGN, "rebased", lambda reference, target: (target, [])),
    "ranks joined": Step("whence.align.ranks.join", "joined", _both_and_notes),
    "padding left out": Step("whence.align.batches.padding", "dense", _first),
    "batches": Step("whence.align.batches.align", "align_batches", _batches),
    "quantised layers": Step("whence.align.quantised.layers", "applies", _never),
    "nameless values": Step("whence.align.values.groups", "applies", _never),
    "fused operators": Step("whence.align.calls.fused_operators", "joined", _unfused),
    "moved operators": Step("whence.align.calls.layout_operators", "pair_moves", _first),
    "fused projections": Step(_ALIGN, "fused", _target_and_plan),
    "layouts": Step(_ALIGN, "laid_out", _target_and_plan),
    "tensors by content": Step(
        "whence.align.tensors.match",
        "pair_tensors",
        lambda reference, target, plan, *more: (reference, target, plan),
    ),
    "padding filled": Step("whence.align.batches.padding", "fill_padding", _target_and_plan),
    "rewritten modules": Step(
        "whence.comparison.prepare.rewritten_modules", "judged_by_module", _first
    ),
    "whole model": Step(_CONTEXT, "put_together", _first),
}
"""What brings two runs to one form, in the order in which it is done."""
RULES: dict[str, Step] = {
    "exact key": Step(_MATCH, "exact", _nothing, 0),
    "normalised name": Step(_MATCH, "normalised", _nothing, 0),
    "shifted index": Step(_MATCH, "shifted", _nothing, 0),
    "counted calls": Step(_MATCH, "counted", _nothing, 0),
    "similar name": Step(_MATCH, "spelt_alike", _nothing, 0),
    "structure": Step(_MATCH, "structure", _nothing, 0),
    "leaves": Step(_MATCH, "leaves", _nothing, 0),
    "containers": Step(_MATCH, "containers", _nothing, 0),
    "learnt names": Step(_MATCH, "learn", _nothing, 0),
    "data flow": Step(_MATCH, "between_partners", _nothing, 0),
    "content": Step(_MATCH, "same_content", _nothing, 0),
    "order": Step(_MATCH, "realign", lambda pairing, pairs: {}, 1),
    "arguments": Step(_MATCH, "by_arguments", _nothing, 1),
}
"""What pairs calls."""
SHORTCUTS: dict[str, Step] = {
    "equal runs": Step("whence.comparison.equal_runs", "answer", _nothing),
    "differing part": Step("whence.comparison.pipeline", "differing_part", _nothing),
}
"""What saves work: taken out, it must change no answer."""
STEPS = FORMS | RULES | SHORTCUTS


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the stages that change a verdict while this lasts; filled as they do."""
    changing: set[str] = set()
    stages = dict(pipeline.STAGES)

    def watching(name: str, stage: Stage) -> Stage:
        def run(verdicts: Verdicts, context: Context) -> Verdicts:
            after = stage(verdicts, context)
            if after is not verdicts and after != verdicts:
                changing.add(name)
            return after

        return run

    pipeline.STAGES.update({name: watching(name, stage) for name, stage in stages.items()})
    try:
        yield changing
    finally:
        pipeline.STAGES.update(stages)


@contextlib.contextmanager
def steps_watched() -> Iterator[set[str]]:
    """As `watched`, of `STEPS` too: those that do something, if nothing for the answer."""
    with watched() as acting, contextlib.ExitStack() as stack:
        for name, step in STEPS.items():
            stack.enter_context(_in_place(step, _watching(name, step, acting)))
        yield acting


def _watching(name: str, step: Step, acting: set[str]) -> Callable[..., Any]:
    inner = getattr(importlib.import_module(step.module), step.name)

    def run(*arguments: Any, **how: Any) -> Any:
        if step.mutates is not None:
            before = _held(arguments[step.mutates])
            found = inner(*arguments, **how)
            if _held(arguments[step.mutates]) != before:
                acting.add(name)
            return found
        found = inner(*arguments, **how)
        if _differ(found, step.neutral(*arguments, **how)):
            acting.add(name)
        return found

    return run


def _held(pairing: Any) -> Any:
    """A copy of the pairs so far."""
    return dict(pairing if isinstance(pairing, dict) else pairing.partners)


def _differ(found: Any, neutral: Any) -> bool:
    if found is neutral:
        return False
    if isinstance(found, tuple) and isinstance(neutral, tuple) and type(found) is tuple:
        return any(map(_differ, found, neutral))
    if isinstance(found, (list, bool, type(None))) or type(found) is tuple:
        return bool(found != neutral)
    return True


@contextlib.contextmanager
def _in_place(step: Step, function: Callable[..., Any]) -> Iterator[None]:
    module = importlib.import_module(step.module)
    inner = getattr(module, step.name)
    setattr(module, step.name, function)
    try:
        yield
    finally:
        setattr(module, step.name, inner)


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """whence without one stage of the verdict, or one of `STEPS`."""
    if name in STEPS:
        with _in_place(STEPS[name], STEPS[name].neutral):
            yield
        return
    stage = pipeline.STAGES[name]
    pipeline.STAGES[name] = lambda verdicts, context: verdicts
    try:
        yield
    finally:
        pipeline.STAGES[name] = stage
