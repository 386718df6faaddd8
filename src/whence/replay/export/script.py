"""A piece of a run as one file that shows its fault: operators in plain torch, their tensors beside
it, and the three-way check.

What comes from a run gets into the text in three forms only: names of operators and optimisers
that passed the lists of `allowed_operators` and exist in torch, with names of their arguments;
literals written by `literal`; and words in the docstring, of which nothing can leave it. The text
is parsed again before it is returned.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.errors import ReplayRefused
from whence.records.program import OPTIMIZER_STEP
from whence.replay.export import three_way
from whence.replay.export.isolate import terms
from whence.replay.export.script_data import stored
from whence.replay.export.script_functions import WIDTH, argument_names, function_body, literal
from whence.replay.export.script_template import CHECK, EXACT, IMPORTS, MADE, MAIN
from whence.replay.export.trace import Piece
from whence.replay.export.ways import Way
from whence.replay.optimizers import step_alone

FILES = ("repro.py", "repro.safetensors")
LIMITS = "\nRHO, RHO_16, Z, Z_16 = "
"""In front of the limits of rounding, in every script."""


@dataclass
class Case:
    """What a script shows. good: what the reference ran; bad: what the target ran, where that is another piece. equal: input of `bad`
    -> input of `good` that is the same tensor. recorded: by place in the results, what the target recorded. default: the side that is
    judged when none is asked for. differs: what `bad` does otherwise, in words. missing: why
    this machine cannot run as the target did. title, story: docstring, the first line and the rest.
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
    """(the text of repro.py, its tensors by name)."""
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
        """A function of the tensors by name, as code."""
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
        """The function that runs one side, as code."""
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
    """Statements that put torch's switches where they were, from the few that are known here."""
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
    """One line of printable text."""
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
