"""Writes a run's operators, or its leaf modules, as pytest files that need pytest and torch only.

A test names what is called on what; the elements lie beside it in one safetensors file;
`export.support`, copied as `operator_support`, does the work. Names and texts of a run are
untrusted: they get into the files as identifiers of letters and digits, as literals by `repr`, and
in comments without line breaks.
"""

from __future__ import annotations

import json
import keyword
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from whence import dtypes
from whence.errors import ElementsMissing, OutputExists, ReplayRefused, UsageError
from whence.frameworks import operator_names, torch_schema
from whence.records import Call, Program, Run
from whence.replay import allowed_operators, stepwise, validation
from whence.replay.export import support

FACTORIES = ("load", "random", "special")
SUPPORT = "operator_support"
_FROM_WHENCE = re.compile(
    r"^from whence\.(?:replay\.export\.support|replay|frameworks)(\.\w+)? import", re.MULTILINE
)
_OPERATOR = re.compile(r"[A-Za-z_]\w*(\.\w+){2}", re.ASCII)
_PLAIN_CLASSES = ("", "Parameter", "Buffer")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


@dataclass(frozen=True)
class Written:
    """What was written. left_out: reason -> names, each once; what is in none of the tests is here.
    nbytes: of the elements.
    """

    folder: str
    tests: int
    files: int
    names: int
    nbytes: int
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Folder:
    """Collects tests and elements, then writes them."""

    def __init__(self, run: Run, samples: int) -> None:
        self.run, self.samples = run, samples
        self.tests = 0
        self.left_out: dict[str, dict[str, None]] = {}
        self._texts: dict[str, list[str]] = {}
        self._titles: dict[str, str] = {}
        self._elements: dict[int, str] = {}
        self._by_content: dict[tuple[str, str], str] = {}
        self._stored: dict[str, int] = {}

    def leave_out(self, reason: str, name: str) -> None:
        """Remember what gets no test, and why."""
        self.left_out.setdefault(reason, {})[name] = None

    def add(self, file: str, title: str, text: str, count: int) -> None:
        """Add a test function, which is `count` tests, to a file of this name."""
        self._titles[file] = title
        self._texts.setdefault(file, []).append(text)
        self.tests += count

    def taken(self, file: str) -> int:
        """How many functions a file has so far."""
        return len(self._texts.get(file, ()))

    def element(self, record: int) -> str:
        """The name in the data file of a record's elements, "" when they were not kept. Equal
        tensors are stored once.
        """
        if record not in self._elements:
            found = self.run.records[record]
            try:
                self.run.array(record)
                content = (found.dtype, found.hash or f"record {record}")
                self._elements[record] = self._by_content.setdefault(content, f"r{record}")
                self._stored.setdefault(self._elements[record], record)
            except ElementsMissing:
                self._elements[record] = ""
        return self._elements[record]

    def write(self, path: Path, *, factory: str, cpu_init: bool, force: bool) -> Written:
        """Write everything into a new folder. Raises OutputExists unless it may be replaced."""
        if path.exists():
            if not force:
                raise OutputExists(
                    f"{path} exists; --force replaces tests that were written before"
                )
            ours = (path / SUPPORT).exists() or (path / f"{SUPPORT}.py").exists()
            if not ours and (not path.is_dir() or any(path.iterdir())):
                raise OutputExists(
                    f"{path} holds something else than tests written by whence; choose another "
                    "folder"
                )
            if path.is_dir():
                shutil.rmtree(path)
        path.mkdir(parents=True)
        for file, texts in self._texts.items():
            imports = ("import pytest\n" if any("pytest." in t for t in texts) else "") + (
                "import torch\n" if _uses_torch(texts) else ""
            )
            head = (
                f'"""{self._titles[file]}"""\n\n{imports}\nfrom {SUPPORT} import tensor\n'.replace(
                    '"""\n\n\n', '"""\n\n'
                )
            )
            (path / f"{file}.py").write_text("\n\n".join([head, *texts]), encoding="utf-8")
        _copy_support(path / SUPPORT)
        versions = ", ".join(
            f"{k} {v}"
            for k, v in self.run.info.versions.items()
            if k in ("torch", "whence", "python")
        )
        (path / "conftest.py").write_text(
            _CONFTEST.format(versions=_comment(versions), factory=factory, cpu_init=cpu_init),
            encoding="utf-8",
        )
        nbytes = self._write_data(path / "data.safetensors")
        left = {reason: tuple(names) for reason, names in self.left_out.items()}
        return Written(
            str(path),
            self.tests,
            len(self._texts),
            sum(map(len, self._texts.values())),
            nbytes,
            left,
        )

    def _write_data(self, path: Path) -> int:
        header: dict[str, Any] = {}
        at = 0
        for name, record in self._stored.items():
            found, kind = self.run.records[record], dtypes.named(self.run.records[record].dtype)
            size = found.count * kind.itemsize
            shape = [*found.shape, 2] if kind.name == "complex128" else list(found.shape)
            header[name] = {
                "dtype": kind.safetensors,
                "shape": shape,
                "data_offsets": [at, at + size],
            }
            at += size
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as out:
            out.write(len(head).to_bytes(8, "little") + head)
            for record in self._stored.values():
                out.write(self.run.array(record).tobytes())
        return at


_CONFTEST = '''"""Tests of operators as a run called them; `{versions}`.

    pytest . --device cuda:0 --seed 42 --detail_compare_path out.csv

Each operator runs on the device, and on the CPU in float64 and in its own dtype; operator_support says how they are compared.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import operator_support as support

DEFAULTS = support.Settings(Path(__file__).parent, factory="{factory}", cpu_init={cpu_init})


def pytest_addoption(parser):
    support.add_options(parser, DEFAULTS)


def pytest_configure(config):
    support.configure(config)


@pytest.fixture
def check(request):
    return support.check_for(request)
'''


# ---- operators


def write_operators(
    run: Run, groups: Sequence[Any], folder: Folder, *, keep_trivial: bool = False
) -> None:
    """A test of each signature. groups: of `api.operators.signatures`. keep_trivial: random,
    creation and view operators too.
    """
    backward: dict[tuple[int, int], list[Call]] = {}
    for call in run.calls:
        if call.kind == "operator" and call.forward >= 0:
            backward.setdefault((call.rank, call.forward), []).append(call)
    for group in groups:
        if not _OPERATOR.fullmatch(group.op):
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
    schema: Any = None
    func: Any = None
    try:
        func = support.overload(group.op)
        schema = func._schema
    except LookupError:
        if group.op.startswith(("aten.", "prims.")):
            folder.leave_out(f"torch {torch.__version__} has no such operator", group.op)
            return
    if schema is not None and any(a.name in ("filename", "file_name") for a in schema.arguments):
        folder.leave_out("it reads or writes files", group.op)
        return
    chosen = _spread(group.with_elements, folder.samples) or group.calls[:1]
    calls = [run.calls[i] for i in chosen]
    calls = [c for c in calls if c.aliases == calls[0].aliases]
    try:
        arguments = _Arguments(run, calls, group, folder)
        named = arguments.of_operator(schema)
    except ReplayRefused as reason:
        folder.leave_out(str(reason), group.op)
        return
    sort = (
        support.PLAIN
        if func is None
        else support.kind(func, dict(calls[0].arguments) | dict.fromkeys(arguments.tensors, True))
    )
    makes = (
        schema is None
        or any("Tensor" in str(r.type) for r in schema.returns)
        or support.written(func, dict.fromkeys(arguments.tensors, True))
    )
    if sort == support.PLAIN and not makes:
        folder.leave_out("makes no tensor", group.op)
        return
    if sort != support.PLAIN and not keep_trivial:
        folder.leave_out(f"{sort} operator (--keep-trivial)", group.op)
        return
    namespace, base, over = group.op.split(".")
    stem = f"{base}_{over}" if namespace == "aten" else f"{namespace}_{base}_{over}"
    file = f"test_{stem}"
    count = folder.taken(file)
    samples = [c.id for c in calls if c.id in group.with_elements]
    title = f"{group.op} as the run called it."
    states = {} if sort != support.RANDOM else arguments.states()
    body = [_argument(name, value) for name, value in {**states, **named}.items()]
    note = _where(group.count, group.scopes, group.source)
    folder.add(
        file,
        title,
        _function(f"{file}_{count}", note, "check", [repr(group.op)], body, samples),
        max(1, len(samples)),
    )
    grads = [backward[c.rank, c.order] for c in calls if (c.rank, c.order) in backward]
    if grads and func is not None and sort == support.PLAIN:
        incoming = _incoming(run, calls, backward)
        shown = ", ".join(f"{k}: {arguments.tensor(refs)}" for k, refs in incoming.items())
        body = [_argument(name, value) for name, value in named.items()]
        text = _function(
            f"{file}_{count}_backward",
            note,
            "check.gradient",
            [repr(group.op)],
            body,
            samples,
            extra="{" + shown + "}",
        )
        folder.add(
            f"{file}_backward",
            f"{group.op} and its backward, by autograd.",
            text,
            max(1, len(samples)),
        )


def _incoming(
    run: Run, calls: Sequence[Call], backward: Mapping[tuple[int, int], list[Call]]
) -> dict[int, dict[int, int]]:
    """Output number -> {call: record of the gradient that came into it}: the first tensor of its
    form that its backward reads.
    """
    found: dict[int, dict[int, int]] = {}
    for call in calls:
        own = {r.record for r in call.refs}
        outputs = [
            r
            for r in call.refs
            if re.fullmatch(r"output\.\d+", r.slot) or r.slot.startswith("mutated.")
        ]
        for k, out in enumerate(outputs):
            form = run.records[out.record]
            for later in sorted(backward.get((call.rank, call.order), ()), key=lambda c: c.order):
                reads = [
                    r.record
                    for r in later.refs
                    if r.slot.startswith("input.") and r.record not in own
                ]
                like = [
                    r
                    for r in reads
                    if (run.records[r].shape, run.records[r].dtype) == (form.shape, form.dtype)
                ]
                if like:
                    found.setdefault(k, {})[call.id] = like[0]
                    break
            if found:
                break
    return found


class _Arguments:
    """The arguments of several calls of one signature as source text."""

    def __init__(self, run: Run, calls: Sequence[Call], group: Any, folder: Folder) -> None:
        self.run, self.calls, self.folder = run, calls, folder
        self.ranges = {
            slot: (r.min, r.max) for slot, r in (group.ranges if group is not None else {}).items()
        }
        self.storages = _storages(calls[0].aliases)
        self.tensors: list[str] = []

    def of_operator(self, schema: Any) -> dict[str, str]:
        """Schema name -> source. Raises ReplayRefused for what cannot be written down."""
        first = self.calls[0]
        texts: dict[str, str] = {}
        lists: dict[str, dict[int, str]] = {}
        given = {r.slot for r in first.refs}
        for ref in first.refs:
            kind, _, name = ref.slot.partition(".")
            if (
                kind == "mutated" and f"input.{name}" not in given
            ):  # out=: what it held before does not matter
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
        """Generator states before the call, by name."""
        return {
            r.slot: self.slot(r.slot) for r in self.calls[0].refs if r.slot.startswith("state.")
        }

    def slot(self, slot: str) -> str:
        """A tensor by its slot."""
        return self.tensor(
            {c.id: r.record for c in self.calls for r in c.refs if r.slot == slot}, slot=slot
        )

    def tensor(self, records: Mapping[int, int], *, slot: str = "", blank: bool = False) -> str:
        """A tensor as `tensor(...)`. records: by call. blank: its elements do not matter."""
        record = self.run.records[next(iter(records.values()))]
        if record.dtype not in support.DTYPES:
            raise ReplayRefused(f"a tensor of dtype {_comment(record.dtype)} cannot be made")
        if record.subclass not in _PLAIN_CLASSES:
            raise ReplayRefused(f"a tensor of class {_comment(record.subclass)} cannot be made")
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
            least, most = (low, high) if exact else _readable(low, high)
            parts.append(f"values=({_number(least, exact=exact)}, {_number(most, exact=exact)})")
        data = {} if blank else {call: self.folder.element(r) for call, r in records.items()}
        if any(data.values()):
            parts.append(f"data={ {c: n for c, n in data.items() if n}!r}")
        if storage:
            parts.append(f"storage={storage!r}")
        return f"tensor({', '.join(parts)})"

    def _range(self, records: Mapping[int, int]) -> tuple[float | None, float | None]:
        known = [
            s
            for r in records.values()
            if (s := self.run.records[r].statistics) is not None
            and s.min is not None
            and s.max is not None
        ]
        return min((s.min for s in known if s.min is not None), default=None), max(
            (s.max for s in known if s.max is not None), default=None
        )

    def literal(self, value: Any) -> str:
        """A recorded argument as source."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return _number(value, exact=False) if isinstance(value, float) else repr(value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.literal(item) for item in value) + "]"
        if isinstance(value, dict) and len(value) == 1:
            name, at = next(iter(value.items()))
            if name == "slot" and any(r.slot == at for r in self.calls[0].refs):
                return self.slot(at)
            text = _tagged(name, at)
            if text:
                return text
        raise ReplayRefused(f"an argument that cannot be written down: {_comment(value)[:60]}")


def _has_slots(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        item is None or (isinstance(item, dict) and "slot" in item) for item in value
    )


def _tagged(name: str, at: Any) -> str:
    """Source of {"dtype": ...} and the like, "" for what is none."""
    if name == "dtype" and at in support.DTYPES:
        return f"torch.{at}"
    if name == "device":
        return 'torch.device("cpu")'  # on another device, that one
    if name == "layout" and at in ("strided", "torch.strided"):
        return "torch.strided"
    if name == "memory_format" and str(at).removeprefix("torch.") in _MEMORY_FORMATS:
        return f"torch.{str(at).removeprefix('torch.')}"
    if name == "float" and at in ("inf", "-inf", "nan"):
        return f'float("{at}")'
    if name == "complex" and isinstance(at, (list, tuple)) and len(at) == 2:
        parts = [float(p["float"]) if isinstance(p, dict) else p for p in at]
        if all(isinstance(p, (int, float)) for p in parts):
            return f"complex({', '.join(_number(p, exact=False) for p in parts)})"
    return ""


def _storages(aliases: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Input slots that share memory -> a name for it."""
    owner: dict[str, str] = {}

    def root(slot: str) -> str:
        while owner.setdefault(slot, slot) != slot:
            slot = owner[slot]
        return slot

    pairs = [(a, b) for a, b in aliases if a.startswith("input.") and b.startswith("input.")]
    for a, b in pairs:
        owner[root(b)] = root(a)
    names = {
        r: f"memory {k}"
        for k, r in enumerate(dict.fromkeys(root(s) for pair in pairs for s in pair))
    }
    return {slot: names[root(slot)] for pair in pairs for slot in pair}


# ---- modules


def write_modules(run: Run, folder: Folder, calls: Sequence[Call]) -> None:
    """A test of each leaf module by program and form of its tensors. calls: of modules."""
    groups: dict[Any, list[Call]] = {}
    for call in calls:
        if call.error:
            folder.leave_out("it raised", call.scope or call.root)
        elif not call.program or call.program not in run.programs:
            folder.leave_out(
                f"no program: {_comment(call.no_program) or 'none was recorded'}",
                call.scope or call.root,
            )
        else:
            forms = tuple(
                (r.slot, *_form(run, r.record))
                for r in call.refs
                if r.slot.startswith(("input", "param"))
            )
            groups.setdefault((call.op_type, call.program, forms), []).append(call)
    for members in groups.values():
        first = members[0]
        try:
            _write_module(run, run.programs[first.program], members, folder)
        except ReplayRefused as reason:
            folder.leave_out(str(reason), first.scope or first.root)


def _form(run: Run, record: int) -> tuple[Any, ...]:
    found = run.records[record]
    return found.dtype, tuple(found.shape), tuple(found.stride)


def _write_module(run: Run, program: Program, members: Sequence[Call], folder: Folder) -> None:
    allow = tuple({f"{op.name.partition('.')[0]}::" for op in program.operations})
    validation.validate(program, len(program.constants), allow=allow)
    if program.calls:
        raise ReplayRefused("it calls other modules")
    if program.default_dtype not in ("", "float32"):
        raise ReplayRefused(f"recorded with the default dtype {program.default_dtype}")
    ids = _spread([c.id for c in members], folder.samples)
    calls = [run.calls[i] for i in ids]
    names = _Names(program)
    arguments = _Arguments(run, calls, None, folder)
    slots = {r.slot for r in calls[0].refs}
    tensors: dict[str, str] = {}
    for slot, name in names.slots.items():
        if slot not in slots:
            raise ReplayRefused(f"its program reads {_comment(slot)}, which was not recorded")
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
        scopes[call.scope or call.root] = scopes.get(call.scope or call.root, 0) + 1
    note = _where(len(members), scopes, members[0].source)
    given = [f"{name}={text}," for name, text in tensors.items()]
    head = [repr(_plain(members[0].scope or members[0].root)), "run"]
    text = _function(
        f"{file}_{folder.taken(file)}", note, "check.module", head, given, samples, inner=body
    )
    folder.add(
        file, f"{_comment(members[0].op_type)} as the run called it.", text, max(1, len(samples))
    )


class _Names:
    """Identifiers of a program's tensors."""

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
    """The program as the lines of a function."""
    single: list[bool] = []

    def value(v: Any) -> str:
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(value(item) for item in v) + "]"
        if not isinstance(v, dict):
            return _number(v, exact=False) if isinstance(v, float) else repr(v)
        kind, at = next(iter(v.items()))
        if kind == "in":
            return names.inputs[at]
        if kind == "param":
            return names.params[at]
        if kind == "const":
            return f"const_{at}"
        if kind == "op":
            return f"v{at[0]}" if single[at[0]] and not at[1] else f"v{at[0]}[{at[1]}]"
        if kind == "dim":
            return f"{names.inputs[at[0]]}.shape[{at[1]}]"
        if kind == "mul":
            return " * ".join(value(f) for f in at)
        if kind == "device":
            return "ops.device"
        text = _tagged(kind, at)
        if not text:
            raise ReplayRefused(f"an argument that cannot be written down: {_comment(v)[:60]}")
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
    outputs = ", ".join(f"{_plain(slot)!r}: {value(operand)}" for slot, operand in program.outputs)
    return [*lines, f"    return {{{outputs}}}"]


# ---- text


def _function(
    name: str,
    note: str,
    call: str,
    head: Sequence[str],
    body: Sequence[str],
    samples: Sequence[int],
    *,
    inner: Sequence[str] = (),
    extra: str = "",
) -> str:
    lines = [f'@pytest.mark.parametrize("sample", {list(samples)!r})'] if samples else []
    lines.append(f"def {name}(check, sample):" if samples else f"def {name}(check):")
    lines.append(f"    # {note}")
    lines += [f"    {line}" for line in inner] + ([""] if inner else [])
    first = [*head, "sample" if samples else "None", *([extra] if extra else [])]
    lines += [
        f"    {call}(",
        f"        {', '.join(first)},",
        *(f"        {line}" for line in body),
        "    )",
        "",
    ]
    return "\n".join(lines)


def _argument(name: str, text: str) -> str:
    return (
        f"{name}={text},"
        if name.isidentifier() and not keyword.iskeyword(name)
        else f"**{{{name!r}: {text}}},"
    )


def _where(count: int, scopes: Mapping[str, int], source: str) -> str:
    names = [_comment(s or "(root)") for s in list(scopes)[:2]]
    more = f" and {len(scopes) - len(names)} more" if len(scopes) > len(names) else ""
    at = f", {_comment(source)}" if source else ""
    return f"{count} call{'s' if count != 1 else ''} in {', '.join(names)}{more}{at}"[:220]


def _comment(text: Any) -> str:
    """Text of a run that ends no comment and no docstring."""
    return "".join(c if c.isprintable() and c not in '"\\`' else "?" for c in str(text))[:160]


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _number(value: float, *, exact: bool) -> str:
    if exact:
        return repr(int(value))
    return repr(float(value)) if abs(value) < float("inf") else f'float("{value}")'


def _readable(low: float, high: float) -> tuple[float, float]:
    """A range with six significant digits that lies in the one given: -0.99999999 must not become a
    -1 whose log1p is infinite.
    """
    least, most = _six(low, ROUND_CEILING), _six(high, ROUND_FLOOR)
    return (least, most) if least <= most else (low, high)


def _six(value: float, rounding: str) -> float:
    return (
        float(Context(prec=6, rounding=rounding).create_decimal(value))
        if isfinite(value)
        else value
    )


def _uses_torch(texts: Sequence[str]) -> bool:
    return any(
        "torch." in line
        for text in texts
        for line in text.splitlines()
        if not line.lstrip().startswith("#")
    )


def _spread(ids: Sequence[int], count: int) -> list[int]:
    """At most `count` of them: the first, the last, and others evenly between."""
    if len(ids) <= count:
        return list(ids)
    return [ids[round(k * (len(ids) - 1) / max(1, count - 1))] for k in range(count)]


def _copy_support(folder: Path) -> None:
    """Copy what the tests stand on, as a package that finds its own files beside it."""
    folder.mkdir()
    shared = [Path(str(m.__file__)) for m in (operator_names, torch_schema, stepwise)]
    for file in (*Path(str(support.__file__)).parent.glob("*.py"), *shared):
        text = _FROM_WHENCE.sub(rf"from {SUPPORT}\1 import", file.read_text(encoding="utf-8"))
        (folder / file.name).write_text(text, encoding="utf-8")


def checked(factory: str, samples: int) -> None:
    """Raises UsageError for a factory that there is not, or fewer samples than one."""
    if factory not in FACTORIES:
        raise UsageError(f"factory {factory!r} is none of {', '.join(FACTORIES)}")
    if samples < 1:
        raise UsageError(f"{samples} samples of a signature: at least 1")


def leaves(calls: Sequence[Call]) -> Iterator[Call]:
    """Calls of modules that call no module; what operators were recorded inside does not count."""
    parents = {c.parent for c in calls if c.kind == "module"}
    yield from (c for c in calls if c.kind == "module" and c.id not in parents)
