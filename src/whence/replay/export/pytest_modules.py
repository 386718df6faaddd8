"""Writes leaf modules of a run as tests: their recorded programs, as functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from whence.errors import ReplayRefused
from whence.records import Call, Program, Run
from whence.records.program import GRADIENTS, OPTIMIZER_STEP
from whence.records.slots import is_read
from whence.replay import allowed_operators, validation
from whence.replay.export import support
from whence.replay.export.pytest_files import Folder, spread_over
from whence.replay.export.pytest_operators import Arguments
from whence.replay.export.pytest_text import (
    comment_text,
    number_text,
    origin_note,
    plain_text,
    source_of_test,
    tagged_source,
)

_NOT_RUN = {GRADIENTS: "a backward pass", OPTIMIZER_STEP: "a step of an optimiser"}


def write_modules(run: Run, folder: Folder, calls: Sequence[Call]) -> None:
    """Adds one test for each program and form (dtypes, shapes) of the tensors of leaf modules.
    calls: of modules.
    """
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        if call.error:
            folder.leave_out("it raised", call.module_name)
        elif not call.program or call.program not in run.programs:
            folder.leave_out(
                f"no program: {comment_text(call.no_program) or 'none was recorded'}",
                call.module_name,
            )
        else:
            forms = tuple((r.slot, *_form(run, r.record)) for r in call.refs if is_read(r.slot))
            groups.setdefault((call.op_type, call.program, forms), []).append(call)
    for members in groups.values():
        first = members[0]
        try:
            _write_module(run, run.programs[first.program], members, folder)
        except ReplayRefused as reason:
            folder.leave_out(str(reason), first.module_name)


def _form(run: Run, record: int) -> tuple[Any, ...]:
    tensor = run.records[record]
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride)


def _write_module(run: Run, program: Program, members: Sequence[Call], folder: Folder) -> None:
    if own := next((op.name for op in program.operations if op.name in _NOT_RUN), None):
        raise ReplayRefused(
            f"{_NOT_RUN[own]}, which these tests do not run; whence repro writes a script of one "
            "that is a finding"
        )
    allow = tuple({f"{op.name.partition('.')[0]}::" for op in program.operations})
    validation.validate(program, len(program.constants), allow=allow)
    if program.calls:
        raise ReplayRefused("it calls other modules")
    if program.default_dtype not in ("", "float32"):
        raise ReplayRefused(f"recorded with the default dtype {program.default_dtype}")
    ids = spread_over([c.id for c in members], folder.samples)
    calls = [run.calls[i] for i in ids]
    names = _Names(program)
    arguments = Arguments(run, calls, None, folder)
    slots = {r.slot for r in calls[0].refs}
    tensors: dict[str, str] = {}
    for slot, name in names.slots.items():
        if slot not in slots:
            raise ReplayRefused(f"its program reads {comment_text(slot)}, which was not recorded")
        tensors[name] = arguments.slot(slot)
    for k, record in enumerate(program.constants):
        tensors[f"const_{k}"] = arguments.tensor(dict.fromkeys(ids, record))
    body = _run_source(program, names, tensors)
    samples = [
        i
        for i in ids
        if all(folder.element(r.record) for r in run.calls[i].refs if r.slot in names.slots)
    ]
    base = re.sub(r"\W", "_", members[0].op_type, flags=re.ASCII) or "module"
    file = f"test_{base}"
    scopes: dict[str, int] = {}
    for call in members:
        scopes[call.module_name] = scopes.get(call.module_name, 0) + 1
    note = origin_note(len(members), scopes, members[0].source)
    keywords = [f"{name}={text}," for name, text in tensors.items()]
    head = [repr(plain_text(members[0].module_name)), "run"]
    text = source_of_test(
        f"{file}_{folder.taken(file)}", note, "check.module", head, keywords, samples, inner=body
    )
    folder.add(
        file,
        f"{comment_text(members[0].op_type)} as the run called it.",
        text,
        max(1, len(samples)),
    )


class _Names:
    """Assigns identifiers to a program's tensors."""

    def __init__(self, program: Program) -> None:
        self.inputs: list[str] = []
        self.params: dict[str, str] = {}
        self.slots: dict[str, str] = {}
        for slot in (*program.inputs, *program.params):
            name = re.sub(r"\W", "_", slot, flags=re.ASCII)
            while name in self.slots.values():
                name += "_"
            self.slots[slot] = name
        self.inputs = [self.slots[s] for s in program.inputs]
        self.params = {s: self.slots[s] for s in program.params}


def _run_source(program: Program, names: _Names, tensors: Mapping[str, str]) -> list[str]:
    """Returns the program as the lines of a function."""
    single: list[bool] = []

    def value(v: Any) -> str:
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(value(item) for item in v) + "]"
        if not isinstance(v, dict):
            return number_text(v, exact=False) if isinstance(v, float) else repr(v)
        kind, content = next(iter(v.items()))
        if kind == "in":
            return names.inputs[content]
        if kind == "param":
            return names.params[content]
        if kind == "const":
            return f"const_{content}"
        if kind == "op":
            return (
                f"v{content[0]}"
                if single[content[0]] and not content[1]
                else f"v{content[0]}[{content[1]}]"
            )
        if kind == "dim":
            return f"{names.inputs[content[0]]}.shape[{content[1]}]"
        if kind == "mul":
            return " * ".join(value(f) for f in content)
        if kind == "device":
            return "ops.device"
        text = tagged_source(kind, content)
        if not text:
            raise ReplayRefused(f"an argument that cannot be written down: {comment_text(v)[:60]}")
        return text

    lines = [f"def run(ops, {', '.join(tensors)}):"]
    for k, operation in enumerate(program.operations):
        args = [value(a) for a in operation.args]
        if operation.name == allowed_operators.CAST:
            single.append(True)
            lines.append(f"    v{k} = ops.cast({args[0]}, {args[2]})")
            continue
        try:
            returns = support.overload(operation.name)._schema.returns
        except LookupError as reason:
            raise ReplayRefused(str(reason)) from None
        single.append(len(returns) == 1 and str(returns[0].type) == "Tensor")
        args += [
            f"{name}={value(v)}" for name, v in operation.kwargs.items() if name != "pin_memory"
        ]
        text = f"ops.{operation.name}({', '.join(args)})"
        lines.append(
            f"    v{k} = ops.guard({text}, {operation.guard!r})"
            if operation.guard is not None
            else f"    v{k} = {text}"
        )
    outputs = ", ".join(
        f"{plain_text(slot)!r}: {value(operand)}" for slot, operand in program.outputs
    )
    return [*lines, f"    return {{{outputs}}}"]
