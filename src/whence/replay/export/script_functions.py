"""Operators as the body of a function in plain torch.

What comes from a run gets in as names of operators and optimisers that are on the lists of what is
replayed and exist in torch, as names of their arguments, and as literals.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whence.errors import ReplayRefused
from whence.records.program import GRADIENTS, OPTIMIZER_STEP
from whence.replay.export.trace import Piece, Step, Value, overload
from whence.replay.optimizers import optimizer_class, step_alone
from whence.replay.validation import operator_name

WIDTH = 110
_SIMPLE = re.compile(r"[a-z][a-z0-9_]{0,30}")
_STEP_ALONE, _KEPT = step_alone.__name__, "kept"
_TAKEN = ("aten", "torch", "recorded", "memory", _STEP_ALONE, _KEPT)


def function_body(p: Piece, names: Mapping[int, str]) -> list[str]:
    """The statements that run a piece and return its results. names: of its inputs."""
    env = dict(names)
    body = _Body(p, env)
    lines = body.leaves()
    for step in p.steps:
        lines += body.statements(step)
    lines.append(f"return [{', '.join(env[n] for n in p.results)}]")
    if body.leaf_of:
        first = len(body.leaf_of)
        lines = [*lines[:first], "with torch.enable_grad():", *(f"    {x}" for x in lines[first:])]
    return [part for line in lines for part in _wrapped(f"    {line}")]


class _Body:
    """env: names of the tensors so far, by number. leaf_of: by number of a tensor that is
    differentiated, the name of its leaf.
    """

    def __init__(self, p: Piece, env: dict[int, str]) -> None:
        self._piece, self._env = p, env
        self._read = {n for step in p.steps for n in step.reads} | set(p.results)
        self._fresh = 0
        self.leaf_of: dict[int, str] = {}

    def leaves(self) -> list[str]:
        """Statements that let autograd follow what is differentiated, one for each."""
        lines, copies = [], []
        for n in self._piece.differentiated:
            name = self._env[n]
            leaf = self.leaf_of[n] = f"{name}_leaf" if self._piece.writes else name
            lines.append(f"{leaf} = {name}.detach().requires_grad_()")
            if leaf != name:
                copies.append(f"{name} = {leaf}.clone()  # torch writes into no leaf")
        return lines + copies

    def statements(self, step: Step) -> list[str]:
        """One step as code; names its results."""
        fresh = {n for n in step.results if n not in self._env}
        for n in step.results:
            if n in fresh and n not in self._env:
                self._env[n] = f"v{self._fresh}"
                self._fresh += 1
        targets = [self._env[n] if n in self._read else "_" for n in step.results]
        if step.name == OPTIMIZER_STEP:
            return self._optimizer_step(step, targets)
        if step.name == GRADIENTS:
            call = self._gradients(step)
        else:
            call = self._call(step)
            if len(targets) == 1 and _returns_one(step.name):
                return [f"{self._env[step.results[0]]} = {call}" if fresh else call]
        return [f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {call}"]

    def _call(self, step: Step) -> str:
        name = step.name
        namespace, base, over = operator_name(name, (f"{name.split('.')[0]}::",))
        parameters = {a.name for a in overload(name)._schema.arguments}  # it exists
        parts = [self._value(a) for a in step.args]
        for key, value in step.kwargs.items():
            if key not in parameters or not key.isidentifier():
                raise ReplayRefused(f"{name} has no argument {key!r}")
            parts.append(_keyword(key, self._value(value)))
        where = "aten" if namespace == "aten" else f"torch.ops.{namespace}"
        return f"{where}.{base}.{over}({', '.join(parts)})"

    def _optimizer_step(self, step: Step, targets: Sequence[str]) -> list[str]:
        name, parameter, gradient, keys, state, left = step.args
        optimizer_class(name, step.kwargs)  # it exists, and takes these
        if not all(key.isidentifier() for key in (*keys, *left)):
            raise ReplayRefused(f"state of {name} whose name is none")
        held = ", ".join(_keyword(k, self._value(t)) for k, t in zip(keys, state, strict=True))
        settings = [_keyword(key, literal(value)) for key, value in step.kwargs.items()]
        arguments = [self._value(parameter), self._value(gradient), f"dict({held})", *settings]
        used = [(t, key) for t, key in zip(targets[1:], left, strict=True) if t != "_"]
        kept = _KEPT if used else "_"
        call = f"{_STEP_ALONE}(torch.optim.{name}, {', '.join(arguments)})"
        return [f"{targets[0]}, {kept} = {call}", *(f"{t} = {kept}[{key!r}]" for t, key in used)]

    def _gradients(self, step: Step) -> str:
        results, incoming, wanted = step.args
        pairs = []
        for result, gradient in zip(results, incoming, strict=True):
            tensor, its_gradient = (step.read_tensors[t.number] for t in (result, gradient))
            if tensor.requires_grad:
                is_cast = tensor.dtype != its_gradient.dtype
                cast = f".to({self._value(result)}.dtype)" if is_cast else ""
                pairs.append((self._value(result), f"{self._value(gradient)}{cast}"))
        lists = (
            [result for result, _ in pairs],
            [self.leaf_of[value.number] for value in wanted],
            [gradient for _, gradient in pairs],
        )
        return f"torch.autograd.grad({', '.join(map(_list, lists))})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Value):
            return self._env[value.number]
        if isinstance(value, (list, tuple)):
            return _list([self._value(v) for v in value])
        if isinstance(value, torch.device):
            return "torch.get_default_device()"
        return literal(value)


def _list(parts: Sequence[str]) -> str:
    """A list as code."""
    return f"[{', '.join(parts)}]"


def _keyword(name: str, text: str) -> str:
    """A named argument as code."""
    return f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}"


def _returns_one(name: str) -> bool:
    """Does this operator return a tensor, not several or a list?"""
    returns = overload(name)._schema.returns
    return len(returns) == 1 and not str(returns[0].type).startswith("List")


def literal(value: Any) -> str:
    """A plain value as code that gives it back. Raises ReplayRefused for anything else."""
    if value is None or type(value) in (bool, int):
        return repr(value)
    if type(value) is float:
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if type(value) is complex:
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if type(value) is str and len(value) <= 1000:
        return ascii(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    if type(value) in (list, tuple):
        return f"[{', '.join(literal(v) for v in value)}]"
    raise ReplayRefused(f"an argument that cannot be written down: {type(value).__name__}")


def argument_names(p: Piece) -> dict[int, str]:
    """A name for every input: of a parameter its own, else that of the first argument it is."""
    slot_names = {n: slot.rpartition(".")[2] for n, slot in p.slots.items() if n in p.inputs}
    names = {
        n: name
        for n, name in slot_names.items()
        if _SIMPLE.fullmatch(name) and not keyword.iskeyword(name) and name not in _TAKEN
    }
    for step in p.steps:
        for name, value in _named_arguments(step):
            several = isinstance(value, list)
            numbered = several and len(value) > 1
            for k, item in enumerate(value if several else [value]):
                if isinstance(item, Value):
                    clear = {"self": "x", "input": "x"}.get(name, name)
                    clear = f"{clear}{k}" if numbered else clear
                    names.setdefault(
                        item.number,
                        clear if clear.isidentifier() and not keyword.iskeyword(clear) else "x",
                    )
    return names


def _named_arguments(step: Step) -> list[tuple[str, Any]]:
    """The arguments of a step by name, those of a backward pass after what it is the backward of:
    its gradients alone are named by it.
    """
    if step.name == OPTIMIZER_STEP:
        _, parameter, gradient, names, state, _ = step.args
        return [("param", parameter), ("grad", gradient), *zip(names, state)]
    if step.name == GRADIENTS:
        return [("grad", step.args[1])]
    arguments = [a.name for a in overload(step.name)._schema.arguments]
    return [*zip(arguments, step.args), *step.kwargs.items()]


def _wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    head, _, arguments = line.partition("(")
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    body = textwrap.wrap(
        arguments[:-1], WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    # A string literal may hold blanks where the line was broken.
    if '"' in arguments or "'" in arguments:
        return [line]
    return [f"{head}(", *(indent + part for part in body), f"{indent[4:]})"]
