"""Checks whether each input, adapter and expert of a model affects an output.

One item is changed at a time, and outputs are compared bit for bit. An item is dead when no change
of it alters any output: it was dropped, multiplied by zero, or never read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from whence.display import listed
from whence.results.probe import Held, OperatorPlace, Property, PropertyAnswer, Variant
from whence.workflows.probe.torch.answering import Unanswered
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, said
from whence.workflows.probe.torch.outputs import Outputs, equal_outputs, flattened, same_bits
from whence.workflows.probe.torch.trace import hooked

_MOST_POSITIONS = 64
_MOST_WEIGHTS = 64  # adapters and experts, each
_SEEDS = (3, 17, 29)
_ADAPTER = re.compile(r"^(?:(?P<owner>.*)\.)?(?:lora_\w+|adapters?)(?:\.(?P<name>\w+))?\.\w+$")
_UNREAD = re.compile(r"cache_position$|_")  # by the model's own word: places of a cache, "_name"


class _Changed(NamedTuple):
    """One item that is changed alone.

    ways: runs of the model, each with another change of the item. of: the group to which the item
    belongs: a router may leave out each expert of a block, but not all of them.
    """

    name: str
    kind: str
    ways: Sequence[Callable[..., Outputs]]
    of: str = ""


def sensitivity(judge: Judge, inputs: CallInputs) -> PropertyAnswer:
    """Change each tensor argument, position, adapter and expert, one at a time."""
    base = judge.base(inputs)
    if not any(tensor.is_floating_point() for tensor in base.values()):
        raise Unanswered("the call returns no floating tensor", Held.UNKNOWN)
    if not equal_outputs(base, judge.subject.run(inputs)):
        raise Unanswered("the call does not repeat: see repeat", Held.UNKNOWN)
    notes: list[str] = []
    items = [*_arguments(judge, inputs, notes), *_positions(judge, inputs, notes)]
    items += [*_adapters(judge, inputs, notes), *_experts(judge, inputs, notes)]
    variants = [_variant(judge, inputs, base, item) for item in items]
    alive = {
        item.of
        for item, variant in zip(items, variants, strict=True)
        if variant.held == Held.REACHED
    }
    spared = [
        item.name
        for item, variant in zip(items, variants, strict=True)
        if item.of and item.of in alive and variant.held == Held.VIOLATED
    ]
    if spared:
        why = "not tested, since no token of this call may have chosen them"
        notes.append(f"{why}: {listed(spared, 3)}")
    kept = [
        (item, variant)
        for item, variant in zip(items, variants, strict=True)
        if item.name not in spared
    ]
    return _answer(kept, notes)


def _answer(tested: Sequence[tuple[_Changed, Variant]], notes: Sequence[str]) -> PropertyAnswer:
    variants = tuple(variant for _, variant in tested)
    dead = [v for v in variants if v.held == Held.VIOLATED]
    unknown = [v for v in variants if v.held == Held.UNKNOWN]
    counts: dict[str, int] = defaultdict(int)
    for item, variant in tested:
        counts[item.kind] += variant.held != Held.UNKNOWN
    words = ", ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in counts.items() if n)
    held = Held.VIOLATED if dead else Held.REACHED if len(unknown) < len(variants) else Held.UNKNOWN
    cause = (
        f"{listed([v.name for v in dead], 4)} {'reaches' if len(dead) == 1 else 'reach'} no output"
    )
    if dead and dead[0].why:
        cause += f": {dead[0].why}"
    return PropertyAnswer(
        Property.SENSITIVITY,
        held,
        variants,
        cause=cause if dead else "",
        why=(unknown[0].why if unknown else "nothing could be changed")
        if held == Held.UNKNOWN
        else "",
        power=f"{words} changed alone, in up to {len(_SEEDS)} ways each: a change of one bit in "
        "any output would be seen"
        if words
        else "",
        notes=(*notes, *(f"not tried: {v.name} ({v.why})" for v in unknown)),
    )


def _variant(judge: Judge, inputs: CallInputs, base: Outputs, item: _Changed) -> Variant:
    """Whether any change of an item alters an output."""
    problem, ran = "", None
    for way in item.ways:
        try:
            changed = way()
        except Exception as error:  # noqa: BLE001 - a value that the model refuses is no answer
            problem = said(error)
            continue
        ran = way
        if not equal_outputs(base, changed):
            return Variant(item.name, Held.REACHED, differing=1)
    if ran is None:
        return Variant(item.name, Held.UNKNOWN, why=problem or "it cannot be changed")
    place = _end(judge, inputs, ran)
    why = (
        f"the last module that it changes is {place.scope} ({place.op_type})"
        if place is not None
        else "no module inside is given it"
    )
    return Variant(item.name, Held.VIOLATED, first=place, why=why)


def _end(judge: Judge, inputs: CallInputs, way: Callable[..., Outputs]) -> OperatorPlace | None:
    """The last module call whose result a change alters; None when it alters none."""
    results: list[list[tuple[str, str, list[torch.Tensor]]]] = []
    as_it_is: Callable[..., Outputs] = lambda *modes: judge.subject.run(inputs, *modes)  # noqa: E731
    for run in (as_it_is, way):
        results.append([])
        try:
            modules = [(n, m) for n, m in judge.subject.model.named_modules() if n]
            run(hooked(modules, after=partial(_note, results[-1])))
        except Exception:  # noqa: BLE001 - a mode that the model refuses leaves the place unknown
            return None
    last = None
    for (scope, kind, before), (other, _, after) in zip(*results, strict=False):
        if scope != other:
            break
        if len(before) != len(after) or not all(map(same_bits, before, after)):
            last = OperatorPlace("", scope, kind)
    return last


def _note(
    results: list[tuple[str, str, list[torch.Tensor]]],
    scope: str,
    module: Any,
    args: Any,
    kwargs: Any,
    out: Any,
) -> None:
    results.append((scope, type(module).__name__, list(flattened(out).values())))


def _run(judge: Judge, inputs: CallInputs, name: str, value: Any) -> Callable[..., Outputs]:
    return lambda *modes: judge.subject.run(inputs.changed(**{name: value}), *modes)


def _arguments(judge: Judge, inputs: CallInputs, notes: list[str]) -> Iterator[_Changed]:
    """Items: each tensor argument as a whole."""
    for name, value in inputs.values.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if _UNREAD.match(name) or (inputs.taken and not name.isdigit() and not inputs.takes(name)):
            notes.append(f"not tested: {name}, which the signature of forward declares unused")
            continue
        kind = "tensor argument"
        yield _Changed(name, kind, [_run(judge, inputs, name, v) for v in _others(name, value)])


def _others(name: str, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Different values for a tensor argument."""
    if value.dtype == torch.bool or ("mask" in name and not value.is_floating_point()):
        for place in (0, value.numel() // 2):
            twin = value.clone()
            flat = twin.view(-1) if twin.is_contiguous() else (twin := twin.contiguous()).view(-1)
            flat[place] = flat[place] == 0
            yield twin
        yield (value == 0).to(value.dtype)
        return
    for seed in _SEEDS:
        yield other_tokens(value, seed)


def _positions(judge: Judge, inputs: CallInputs, notes: list[str]) -> Iterator[_Changed]:
    """Items: each position of the sequence that no mask hides."""
    if inputs.length_axis is None or inputs.length < 2:
        return
    mask = inputs.given(inputs.mask) if inputs.mask else None
    real = list(range(inputs.length))
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == inputs.length:
        real = [t for t in real if bool((mask[:, t] != 0).any())]
    step = -(-len(real) // _MOST_POSITIONS) or 1
    if step > 1:
        notes.append(f"of {len(real)} positions every {step}th is changed")
    others = [other_tokens(inputs.tensor, seed) for seed in _SEEDS]
    for t in real[::step]:
        ways = []
        for other in others:
            twin = inputs.tensor.clone()
            twin.select(inputs.length_axis, t).copy_(other.select(inputs.length_axis, t))
            ways.append(_run(judge, inputs, inputs.main, twin))
        yield _Changed(f"{inputs.main} at position {t}", "position", ways)


def _with_weights(
    judge: Judge, inputs: CallInputs, weights: Sequence[torch.Tensor]
) -> list[Callable[..., Outputs]]:
    """Runs with changed weights, which are restored afterwards."""

    def way(seed: int) -> Callable[..., Outputs]:
        def run(*modes: Any) -> Outputs:
            before = [weight.detach().clone() for weight in weights]
            try:
                with torch.no_grad():
                    for weight in weights:
                        weight.copy_(other_tokens(weight, seed) + 0.1)
                return judge.subject.run(inputs, *modes)
            finally:
                with torch.no_grad():
                    for weight, content in zip(weights, before, strict=True):
                        weight.copy_(content)

        return run

    return [way(seed) for seed in _SEEDS]


def _adapters(judge: Judge, inputs: CallInputs, notes: list[str]) -> Iterator[_Changed]:
    """Items: each adapter of each module. Its weights are changed together, because one of two is
    often zero.
    """
    groups: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    model = judge.subject.model
    for name, weight in model.named_parameters():
        if (found := _ADAPTER.match(name)) and weight.is_floating_point():
            groups[found["owner"] or "", found["name"] or ""].append(weight)
    inactive = 0
    for (owner, adapter), weights in list(groups.items())[:_MOST_WEIGHTS]:
        active = getattr(model.get_submodule(owner), "active_adapters", None)
        if isinstance(active, (list, tuple)) and adapter not in active:
            inactive += 1
            continue
        name = f"adapter {adapter or '(one)'} of {owner or 'the model'}"
        yield _Changed(name, "adapter", _with_weights(judge, inputs, weights))
    if inactive:
        notes.append(f"not tested: {inactive} adapters that are not active")
    if len(groups) > _MOST_WEIGHTS:
        notes.append(f"{_MOST_WEIGHTS} of {len(groups)} adapters are changed")


def _experts(judge: Judge, inputs: CallInputs, notes: list[str]) -> Iterator[_Changed]:
    """Items: each expert, which is a module in a list or a slice of a weight."""
    units: list[tuple[str, str, list[torch.Tensor]]] = []
    for scope, block in judge.subject.model.named_modules():
        leaf = scope.rpartition(".")[2]
        if "expert" not in leaf or "shared" in leaf:
            continue
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            units += [
                (scope, f"{scope}.{name}", list(expert.parameters()))
                for name, expert in block.named_children()
            ]
            continue
        stacked = [weight for _, weight in block.named_parameters(recurse=False) if weight.ndim > 2]
        counts = {weight.shape[0] for weight in stacked}
        if len(counts) == 1:
            units += [
                (scope, f"{scope}[{n}]", [weight[n] for weight in stacked])
                for n in range(counts.pop())
            ]
    if len(units) > _MOST_WEIGHTS:
        notes.append(f"{_MOST_WEIGHTS} of {len(units)} experts are changed")
    for of, name, weights in units[:_MOST_WEIGHTS]:
        floating = [weight.detach() for weight in weights if weight.is_floating_point()]
        if floating:
            yield _Changed(name, "expert", _with_weights(judge, inputs, floating), of)
