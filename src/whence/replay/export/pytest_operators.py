"""Writes operators of a run as tests: one for each signature, and one for its backward."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whence import dtypes
from whence.errors import ReplayRefused
from whence.records import Call, Run, in_order
from whence.records.slots import is_input, is_mutated, is_state, split_slot
from whence.replay.export import support
from whence.replay.export.pytest_files import OPERATOR, PLAIN_CLASSES, Folder, spread_over
from whence.replay.export.pytest_text import (
    argument_line,
    comment_text,
    number_text,
    origin_note,
    readable_range,
    source_of_test,
    tagged_source,
)


def write_operators(
    run: Run, groups: Sequence[Any], folder: Folder, *, keep_trivial: bool = False
) -> None:
    """Adds a test of each signature. groups: of `api.operators.signatures`. keep_trivial: also
    random, creation and view operators.
    """
    backward: dict[tuple[int, int], list[Call]] = {}
    for call in run.calls:
        if call.kind == "operator" and call.forward >= 0:
            backward.setdefault((call.rank, call.forward), []).append(call)
    for group in groups:
        if not OPERATOR.fullmatch(group.op):
            folder.leave_out("not the name of an operator", group.op)
        elif not group.calls:
            folder.leave_out("none of its calls was written", group.op)
        else:
            _write_operator(run, group, folder, backward, keep_trivial=keep_trivial)


def _write_operator(
    run: Run,
    group: Any,
    folder: Folder,
    backward: Mapping[tuple[int, int], list[Call]],
    *,
    keep_trivial: bool,
) -> None:
    func: Any = None
    try:
        func = support.overload(group.op)
    except LookupError:
        if group.op.startswith(("aten.", "prims.")):
            folder.leave_out(f"torch {torch.__version__} has no such operator", group.op)
            return
    schema = None if func is None else func._schema
    if schema is not None and any(a.name in ("filename", "file_name") for a in schema.arguments):
        folder.leave_out("it reads or writes files", group.op)
        return
    chosen = spread_over(group.with_elements, folder.samples) or group.calls[:1]
    calls = [run.calls[i] for i in chosen]
    calls = [c for c in calls if c.aliases == calls[0].aliases]
    try:
        arguments = Arguments(run, calls, group, folder)
        named = arguments.of_operator(schema)
    except ReplayRefused as reason:
        folder.leave_out(str(reason), group.op)
        return
    tensors = dict.fromkeys(arguments.tensors, True)
    sort = support.PLAIN
    if func is not None:
        sort = support.kind(func, dict(calls[0].arguments) | tensors)
    if sort == support.PLAIN and not _makes_tensors(func, tensors):
        folder.leave_out("makes no tensor", group.op)
        return
    if sort != support.PLAIN and not keep_trivial:
        folder.leave_out(f"{sort} operator (--keep-trivial)", group.op)
        return
    namespace, base, over = group.op.split(".")
    stem = f"{base}_{over}" if namespace == "aten" else f"{namespace}_{base}_{over}"
    name = f"test_{stem}", folder.taken(f"test_{stem}")
    samples = [c.id for c in calls if c.id in group.with_elements]
    states = {} if sort != support.RANDOM else arguments.states()
    _add_test(folder, group, name, samples, {**states, **named})
    has_backward = any((c.rank, c.order) in backward for c in calls)
    if has_backward and func is not None and sort == support.PLAIN:
        incoming = _incoming(run, calls, backward)
        gradients = ", ".join(f"{k}: {arguments.tensor(refs)}" for k, refs in incoming.items())
        _add_test(folder, group, name, samples, named, gradients=f"{{{gradients}}}")


def _makes_tensors(func: Any, tensors: Mapping[str, Any]) -> bool:
    """Whether an operator returns or writes tensors; true for an unknown operator."""
    return (
        func is None
        or any("Tensor" in str(r.type) for r in func._schema.returns)
        or bool(support.written(func, tensors))
    )


def _add_test(
    folder: Folder,
    group: Any,
    name: tuple[str, int],
    samples: Sequence[int],
    arguments: Mapping[str, str],
    *,
    gradients: str = "",
) -> None:
    """Adds the test of a signature; with `gradients`, also of its backward. name: of the file, and
    of the test in it.
    """
    file, number = name
    call, suffix, what = "check", "", "as the run called it"
    if gradients:
        call, suffix, what = "check.gradient", "_backward", "and its backward, by autograd"
    text = source_of_test(
        f"{file}_{number}{suffix}",
        origin_note(group.count, group.scopes, group.source),
        call,
        [repr(group.op)],
        [argument_line(key, value) for key, value in arguments.items()],
        samples,
        extra=gradients,
    )
    folder.add(f"{file}{suffix}", f"{group.op} {what}.", text, max(1, len(samples)))


def _incoming(
    run: Run, calls: Sequence[Call], backward: Mapping[tuple[int, int], list[Call]]
) -> dict[int, dict[int, int]]:
    """Returns output number -> {call: record of its incoming gradient}: the first tensor of the
    output's dtype and shape that the backward reads.
    """
    gradients: dict[int, dict[int, int]] = {}
    for call in calls:
        records = {r.record for r in call.refs}
        outputs = [
            r for r in call.refs if re.fullmatch(r"output\.\d+", r.slot) or is_mutated(r.slot)
        ]
        for k, out in enumerate(outputs):
            form = run.records[out.record]
            for later in in_order(backward.get((call.rank, call.order), ())):
                reads = [
                    r.record for r in later.refs if is_input(r.slot) and r.record not in records
                ]
                like = [
                    r
                    for r in reads
                    if (run.records[r].shape, run.records[r].dtype) == (form.shape, form.dtype)
                ]
                if like:
                    gradients.setdefault(k, {})[call.id] = like[0]
                    break
            if gradients:
                break
    return gradients


class Arguments:
    """The arguments of several calls of one signature as source text."""

    def __init__(self, run: Run, calls: Sequence[Call], group: Any, folder: Folder) -> None:
        self.run, self.calls, self.folder = run, calls, folder
        self.ranges = {
            slot: (r.min, r.max) for slot, r in (group.ranges if group is not None else {}).items()
        }
        self.storages = _storages(calls[0].aliases)
        self.tensors: list[str] = []

    def of_operator(self, schema: Any) -> dict[str, str]:
        """Returns schema name -> source. Raises ReplayRefused for a value that has no
        source form.
        """
        first = self.calls[0]
        texts: dict[str, str] = {}
        lists: dict[str, dict[int, str]] = {}
        slots = {r.slot for r in first.refs}
        for ref in first.refs:
            kind, name = split_slot(ref.slot)
            # out=: its elements before the call do not matter
            if kind == "mutated" and f"input.{name}" not in slots:
                texts[name] = self.tensor(
                    {c.id: r.record for c in self.calls for r in c.refs if r.slot == ref.slot},
                    blank=True,
                )
            if kind != "input":
                continue
            text = self.slot(ref.slot)
            whole, _, place = name.rpartition(".")
            if place.isdigit() and whole:
                lists.setdefault(whole, {})[int(place)] = text
            else:
                texts[name] = text
        for name, value in first.arguments.items():
            if name not in lists or _has_slots(value):
                texts[name] = self.literal(value)
                lists.pop(name, None)
        for name, items in lists.items():
            texts[name] = "[" + ", ".join(items[k] for k in sorted(items)) + "]"
        order = [a.name for a in schema.arguments] if schema is not None else []
        self.tensors = [n for n, t in texts.items() if "tensor(" in t]
        for name in ("pin_memory", "generator"):
            texts.pop(name, None)
        if unknown := [n for n in texts if order and n not in order]:
            raise ReplayRefused(
                f"arguments that torch {torch.__version__} does not have: {', '.join(unknown)}"
            )
        return {n: texts[n] for n in (order or texts) if n in texts}

    def states(self) -> dict[str, str]:
        """Returns slot -> source of the generator states before the call."""
        return {r.slot: self.slot(r.slot) for r in self.calls[0].refs if is_state(r.slot)}

    def slot(self, slot: str) -> str:
        """Returns the source of the tensor in this slot."""
        return self.tensor(
            {c.id: r.record for c in self.calls for r in c.refs if r.slot == slot}, slot=slot
        )

    def tensor(self, records: Mapping[int, int], *, slot: str = "", blank: bool = False) -> str:
        """Returns the source of a tensor, `tensor(...)`. records: by call. blank: its elements do
        not matter.
        """
        record = self.run.records[next(iter(records.values()))]
        if record.dtype not in support.DTYPES:
            raise ReplayRefused(f"a tensor of dtype {comment_text(record.dtype)} cannot be made")
        if record.subclass not in PLAIN_CLASSES:
            raise ReplayRefused(f"a tensor of class {comment_text(record.subclass)} cannot be made")
        parts = [repr(record.dtype), repr(tuple(record.shape))]
        contiguous = tuple(support.tensor(record.dtype, tuple(record.shape)).stride)
        if record.stride and tuple(record.stride) != contiguous:
            if any(s < 0 for s in record.stride) or len(record.stride) != len(record.shape):
                raise ReplayRefused("strides that torch cannot make")
            parts.append(f"stride={tuple(record.stride)!r}")
        storage = self.storages.get(slot, "")
        if storage and record.storage_offset:
            parts.append(f"offset={record.storage_offset}")
        low, high = self.ranges.get(slot) or self._range(records)
        if blank:
            low = high = 0
        if low is not None and high is not None:
            exact = not dtypes.is_floating(record.dtype)
            least, greatest = (low, high) if exact else readable_range(low, high)
            parts.append(
                f"values=({number_text(least, exact=exact)}, {number_text(greatest, exact=exact)})"
            )
        data = {} if blank else {call: self.folder.element(r) for call, r in records.items()}
        if any(data.values()):
            parts.append(f"data={ {c: n for c, n in data.items() if n}!r}")
        if storage:
            parts.append(f"storage={storage!r}")
        return f"tensor({', '.join(parts)})"

    def _range(self, records: Mapping[int, int]) -> tuple[float | None, float | None]:
        statistics = [
            s
            for r in records.values()
            if (s := self.run.records[r].statistics) is not None
            and s.min is not None
            and s.max is not None
        ]
        return min((s.min for s in statistics if s.min is not None), default=None), max(
            (s.max for s in statistics if s.max is not None), default=None
        )

    def literal(self, value: Any) -> str:
        """Returns the source of a recorded argument that is not a tensor."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return number_text(value, exact=False) if isinstance(value, float) else repr(value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.literal(item) for item in value) + "]"
        if isinstance(value, dict) and len(value) == 1:
            name, content = next(iter(value.items()))
            if name == "slot" and any(r.slot == content for r in self.calls[0].refs):
                return self.slot(content)
            text = tagged_source(name, content)
            if text:
                return text
        raise ReplayRefused(f"an argument that cannot be written down: {comment_text(value)[:60]}")


def _has_slots(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        item is None or (isinstance(item, dict) and "slot" in item) for item in value
    )


def _storages(aliases: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Returns input slot -> a name for the memory that it shares with other inputs."""
    owner: dict[str, str] = {}

    def root(slot: str) -> str:
        while owner.setdefault(slot, slot) != slot:
            slot = owner[slot]
        return slot

    pairs = [(a, b) for a, b in aliases if is_input(a) and is_input(b)]
    for a, b in pairs:
        owner[root(b)] = root(a)
    names = {
        r: f"memory {k}"
        for k, r in enumerate(dict.fromkeys(root(s) for pair in pairs for s in pair))
    }
    return {slot: names[root(slot)] for pair in pairs for slot in pair}
