"""Writes a piece of a run as one file that shows its fault: operators in plain torch, their tensors
beside it, and the three-way check.

Data of a run enters the text in three forms only: names of operators and optimisers that passed the
lists of `allowed_operators` and exist in torch, with names of their arguments; literals written by
`literal`; and words in the docstring, which they cannot end. The text is parsed again before it is
returned.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.errors import ReplayRefused
from whence.records.program import GRADIENTS, OPTIMIZER_STEP
from whence.replay.export import three_way
from whence.replay.export.isolate import terms
from whence.replay.export.script_data import stored
from whence.replay.export.trace import Piece, Step, Value, overload
from whence.replay.export.ways import Way
from whence.replay.optimizers import optimizer_class, step_alone
from whence.replay.validation import operator_name

FILES = ("repro.py", "repro.safetensors")
LIMITS = "\nRHO, RHO_16, Z, Z_16 = "
"""Text that precedes the limits of rounding in every script."""


@dataclass
class Case:
    """What a script shows.

    good: the piece that the reference ran. bad: the piece that the target ran, where it is another
    one. equal: input of `bad` -> input of `good` that is the same tensor. recorded: place in the
    results -> what the target recorded. default: the side that is judged when none is named.
    differs: what `bad` does differently, in words. missing: why this machine cannot run it as the
    target did. title, story: docstring, the first line and the rest.
    """

    good: Piece
    bad: Piece | None
    way: Way
    reference: Way
    equal: Mapping[int, int] = field(default_factory=dict)
    recorded: Mapping[int, Any] = field(default_factory=dict)
    default: str = "target"
    differs: str = ""
    missing: str = ""
    title: str = ""
    story: Sequence[str] = ()


def script(case: Case) -> tuple[str, dict[str, Any]]:
    """Returns (the text of repro.py, its tensors by name)."""
    writer = _Writer(case)
    text = writer.text()
    tree = ast.parse(text)
    if ast.get_docstring(tree, clean=False) != writer.docstring:
        raise ReplayRefused("the script could not be written: its docstring does not read back")
    return text, writer.tensors


class _Writer:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.tensors: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # of inputs of the good piece
        self.docstring = ""
        self.uses_default_device = False

    def text(self) -> str:
        case = self.case
        if case.bad is None:
            functions = [self.function("operator", case.good, {})]
            good = bad = "operator"
        else:
            good, bad = "reference", "target"
            functions = [
                self.function(good, case.good, {}),
                self.function(bad, case.bad, case.equal),
            ]
        for place, tensor in case.recorded.items():
            self.tensors[f"recorded.{place}"] = tensor
        sides = ["target", "reference"] + (["recorded"] if case.recorded else [])
        self.docstring = self._docstring(sides)
        dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in self.tensors.values())
        table = ", ".join(f'"{stored(d)}": torch.{d}' for d in dtypes)
        runs = [
            self.runner("target", bad, case.way),
            self.runner("reference", good, case.reference),
        ]
        pieces = [case.good, *([case.bad] if case.bad is not None else [])]
        steps = [step for p in pieces for step in p.steps]
        helpers = [_source(step_alone)] if any(s.name == OPTIMIZER_STEP for s in steps) else []
        code = "\n\n\n".join(
            [
                *functions,
                *helpers,
                *runs,
                CHECK.format(
                    good=good,
                    terms=terms(steps),
                    default=case.default,
                    sides=", ".join(f'"{s}"' for s in sides),
                    made=MADE[bool(case.recorded)],
                    exact=EXACT.format(bad=bad, differs=literal(case.differs[:1000]))
                    if case.bad is not None
                    else "",
                ),
                *(_source(s) for s in three_way.SOURCES),
                MAIN,
            ]
        )
        config = ""
        if case.way.backend or case.reference.backend:
            config = "import torch._dynamo.config\nimport torch._inductor.config\n"
        head = f'"""{_quoted(self.docstring)}"""\n\n' + IMPORTS.format(config=config)
        return f"{head}\naten = torch.ops.aten\nDTYPES = {{{table}}}{LIMITS}{_limits()}\n\n\n{code}"

    # ---- operators

    def function(self, name: str, p: Piece, equal: Mapping[int, int]) -> str:
        """Returns the source of a function that takes the tensors by name."""
        env: dict[int, str] = {}
        used_names: set[str] = set(self.tensors)
        preferred = argument_names(p)
        for n, tensor in p.inputs.items():
            if n in equal and equal[n] in self.names:
                env[n] = self.names[equal[n]]
                continue
            base = preferred.get(n, "x") if name != "target" else f"target_{preferred.get(n, 'x')}"
            free = (
                base
                if base not in used_names
                else next(f"{base}{k}" for k in range(2, 100_000) if f"{base}{k}" not in used_names)
            )
            env[n] = free
            used_names.add(free)
            self.tensors[free] = tensor
        if name != "target":
            self.names = dict(env)
        used = list(dict.fromkeys(env.values()))
        signature = ", ".join([*used, "**_"] if name != "operator" else used)
        lines = [f"def {name}({signature}):"]
        if self.case.bad is not None:
            lines.append(f'    """What the {name} ran."""')
        return "\n".join([*lines, *function_body(p, env)])

    # ---- running

    def runner(self, side: str, function: str, way: Way) -> str:
        """Returns the source of the function that runs one side."""
        words = "as the target ran it" if side == "target" else "as the reference ran it"
        lines = [f"def as_{side}(tensors):", f'    """The operators {words}: {_how(way)}."""']
        lines += [f"    {line}" for line in _set_up(way)]
        if way.device != "cpu":
            lines.append(
                f"    tensors = {{name: tensor.to({way.device!r}) for name, tensor in "
                f"tensors.items()}}"
            )
        run = f"{function}(**tensors)"
        with_ = [f"torch.{way.mode}()"]
        if way.device != "cpu":
            with_.append(f"torch.device({way.device!r})")
        if way.backend:
            for module, values in (("_inductor", way.inductor), ("_dynamo", way.dynamo)):
                if values:
                    settings = ", ".join(f"{k!r}: {literal(v)}" for k, v in values.items())
                    lines.append(
                        f"    {module[1:]} = {{{settings}}}  # what was not at its default"
                    )
                    with_.append(f"torch.{module}.config.patch({module[1:]})")
            dynamic = "" if way.dynamic is None else f", dynamic={way.dynamic}"
            lines.append(
                f"    compiled = torch.compile({function}, backend={way.backend!r}, "
                f"fullgraph=True{dynamic})"
            )
            run = "compiled(**tensors)"
        lines += [f"    with {', '.join(with_)}:", f"        return {run}"]
        return "\n".join(lines)

    def _docstring(self, sides: Sequence[str]) -> str:
        case = self.case
        first = case.default
        others = [s for s in sides if s != first]
        fails = {
            "target": "as the target ran",
            "reference": "as the reference ran",
            "recorded": "what the target recorded",
        }
        width = max(len(s) for s in others) + 28
        usage = [f"    {'python repro.py':<{width}}{fails[first]}: fails"]
        outcome_here = (
            "not run, for want of it on the machine that wrote this"
            if case.missing
            else "passes on the machine that wrote this"
        )
        for side in others:
            ends = (
                "passes" if side == "reference" else outcome_here if side == "target" else "fails"
            )
            usage.append(f"    {'python repro.py --side ' + side:<{width}}{fails[side]}: {ends}")
        usage.append(
            f"    {'pytest repro.py':<{width}}the same as a test; SIDE=reference in the "
            "environment for the other side"
        )
        lines = [
            *_folded(case.title),
            "",
            *(line for text in case.story[:1] for line in _folded(text)),
            "",
            *usage,
            "",
            "It needs torch alone, and repro.safetensors beside it. What is wrong is more than "
            "rounding: the result is held",
            "against the same operators in float64, in units of what they round in their own dtype.",
            "",
            *(line for text in case.story[1:] for line in _folded(text, " " * 11)),
        ]
        return "\n".join(lines) + "\n"


def _how(way: Way) -> str:
    parts = [
        f"torch.compile, backend {_plain(way.backend)}" if way.backend else "eagerly",
        f"on {_plain(way.device)}",
    ]
    return " ".join(parts)


def _set_up(way: Way) -> list[str]:
    """Returns statements that restore torch's switches, for the few switches that are
    listed here.
    """
    s, lines = way.settings, []
    if type(s.get("threads")) is int and 0 < s["threads"] <= 4096:
        lines.append(f"torch.set_num_threads({s['threads']})")
    if s.get("default_dtype") in ("float64", "float16", "bfloat16"):
        lines.append(f"torch.set_default_dtype(torch.{s['default_dtype']})")
    if s.get("matmul_precision") in ("high", "medium"):
        lines.append(f"torch.set_float32_matmul_precision({s['matmul_precision']!r})")
    if s.get("mkldnn") is False:
        lines.append("torch._C._set_mkldnn_enabled(False)  # oneDNN")
    if s.get("deterministic") is True:
        lines.append("torch.use_deterministic_algorithms(True)")
    if way.device != "cpu":
        for name, default, statement in (
            ("cudnn", True, "torch.backends.cudnn.enabled"),
            ("cudnn_benchmark", False, "torch.backends.cudnn.benchmark"),
            ("cudnn_deterministic", False, "torch.backends.cudnn.deterministic"),
            ("cudnn_tf32", True, "torch.backends.cudnn.allow_tf32"),
        ):
            if type(s.get(name)) is bool and s[name] is not default:
                lines.append(f"{statement} = {s[name]}")
    return lines


def _source(item: Any) -> str:
    text = inspect.getsource(item).rstrip()
    return re.sub(r"  # type: ignore\[[\w-]+\]", "", text)


def _limits() -> str:
    return f"{three_way.RHO}, {three_way.RHO_16}, {three_way.Z}, {three_way.Z_16}"


def _plain(text: str) -> str:
    """Returns the text as one printable line."""
    return "".join(c if c.isprintable() else " " for c in text)


def _folded(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        _plain(text),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


# Operators as the body of a function in plain torch.
#
# Data of a run enters as names of operators and optimisers that are on the lists of what may be
# replayed and exist in torch, as names of their arguments, and as literals.

WIDTH = 110
_SIMPLE = re.compile(r"[a-z][a-z0-9_]{0,30}")
_STEP_ALONE, _KEPT = step_alone.__name__, "kept"
_TAKEN = ("aten", "torch", "recorded", "memory", _STEP_ALONE, _KEPT)


def function_body(p: Piece, names: Mapping[int, str]) -> list[str]:
    """Returns the statements that run a piece and return its results. names: of its inputs."""
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
    """Builds the statements of one piece.

    env: number of a tensor -> its name so far. leaf_of: number of a differentiated tensor -> name
    of its leaf.
    """

    def __init__(self, p: Piece, env: dict[int, str]) -> None:
        self._piece, self._env = p, env
        self._read = {n for step in p.steps for n in step.reads} | set(p.results)
        self._fresh = 0
        self.leaf_of: dict[int, str] = {}

    def leaves(self) -> list[str]:
        """Returns statements that make autograd record the differentiated tensors, one for each."""
        lines, copies = [], []
        for n in self._piece.differentiated:
            name = self._env[n]
            leaf = self.leaf_of[n] = f"{name}_leaf" if self._piece.writes else name
            lines.append(f"{leaf} = {name}.detach().requires_grad_()")
            if leaf != name:
                copies.append(f"{name} = {leaf}.clone()  # torch writes into no leaf")
        return lines + copies

    def statements(self, step: Step) -> list[str]:
        """Returns one step as source and names its results."""
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
    """Returns a list as source."""
    return f"[{', '.join(parts)}]"


def _keyword(name: str, text: str) -> str:
    """Returns a named argument as source."""
    return f"**{{{name!r}: {text}}}" if keyword.iskeyword(name) else f"{name}={text}"


def _returns_one(name: str) -> bool:
    """Whether this operator returns one tensor, not several or a list."""
    returns = overload(name)._schema.returns
    return len(returns) == 1 and not str(returns[0].type).startswith("List")


def literal(value: Any) -> str:
    """Returns a plain value as source that evaluates to it. Raises ReplayRefused for
    anything else.
    """
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
    """Returns a name for every input: a parameter keeps its own; any other input takes the name of
    the first argument that it is passed to.
    """
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
    """Returns (name, value) of the arguments of a step; for a backward pass only its incoming
    gradients.
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


# The parts of a script that are the same in every script.

IMPORTS = """import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
{config}from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
"""
MADE = {
    False: """made = (as_target if side == "target" else as_reference)(inputs())""",
    True: """made = [t for name, t in load(DATA, DTYPES).items() if name.startswith("recorded.")]
    if side != "recorded":
        made = (as_target if side == "target" else as_reference)(inputs())""",
}
EXACT = """
    if side == "target":
        for y, r in zip(wide({bad}, inputs()), right):
            alike = y.shape == r.shape and y.dtype == r.dtype
            if alike and r.numel() and (r.is_floating_point() or r.is_complex()):
                alike = torch.allclose(y, r, rtol=1e-6, atol=1e-6 * float(r.abs().max()), equal_nan=True)
            elif alike:
                alike = torch.equal(y, r)
            print("in float64, without rounding:", "target and reference are the same" if alike else "the target computes something else")
            good &= alike
        print("what differs:", {differs})"""
CHECK = '''DATA = Path(__file__).with_name("repro.safetensors")
SIDE = os.environ.get("SIDE", "{default}")


def inputs():
    """The tensors as they came in, made anew."""
    return {{name: tensor for name, tensor in load(DATA, DTYPES).items() if not name.startswith(("recorded.", "memory."))}}


def check(side):
    """Is what this side gives explained by rounding? Prints why."""
    right = wide({good}, inputs())
    with torch.no_grad():
        noise = {good}(**inputs())
    {made}
    good = True
    for k, (y, r, w) in enumerate(zip(made, right, noise)):
        score, words = beyond_rounding(y, r, w, terms={terms})
        print(f"{{side}}, result {{k}}: {{words}}: {{'WRONG' if score > 1 else 'rounding'}}")
        good &= score <= 1{exact}
    return good


def test_operator():
    assert check(SIDE), f"{{SIDE}}: wrong by more than rounding"'''
MAIN = """if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["target", "reference", "recorded"], default=SIDE)
    side = parser.parse_args().side
    good = check(side)
    print("PASS" if good else "FAIL", f"({side})")
    sys.exit(not good)
"""
