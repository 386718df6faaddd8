"""Programs are untrusted data: checks their form and turns a `Program` into an executable one.

Checked here without any framework: names, indices, literals and all sizes. `binding` checks the
schema of each operator when the program is loaded; `self_check` checks the results against the
program's own recording.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from whence import dtypes, extras
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Operation, Program
from whence.records.program import GRADIENTS, OPTIMIZER_STEP
from whence.replay import allowed_operators
from whence.replay.allowed_operators import OperatorName

if TYPE_CHECKING:
    from whence.replay.engine import Loaded

MAX_OPERATIONS = 20_000
MAX_VALUES = 1_000_000
MAX_TEXT = 1_000
MAX_DEPTH = 6
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

_NAME = re.compile(r"([a-z][a-z0-9_]{0,63})\.([A-Za-z0-9_]{1,100})\.([A-Za-z0-9_]{1,60})")


def load(
    program: Program,
    constants: Sequence[Array] = (),
    *,
    allow: tuple[str, ...] = (),
    max_bytes: int = 4 << 30,
) -> Loaded:
    """Returns a program ready to run.

    constants: elements of `program.constants`, in order. allow: vendor namespaces the user vouches
    for ("vendor::"). max_bytes: the most that one operator may allocate (computed before the
    operator runs). Raises ReplayRefused with the reason when the program is malformed or uses an
    operator that is not on the list.
    """
    names = validate(program, len(constants), allow=allow)
    try:
        from whence.replay.engine import Loaded
    except (ImportError, OSError) as error:  # OSError: a library of torch does not load
        raise ReplayRefused(str(extras.missing("torch", "replay", error))) from error
    return Loaded(program, constants, names, max_bytes=max_bytes)


def validate(
    program: Program, constants: int, *, allow: tuple[str, ...] = ()
) -> list[OperatorName | None]:
    """Returns the operator names, None for each of whence's own operations. Raises ReplayRefused
    when the program is malformed: `records.Operation` describes the form.
    """
    if len(program.operations) > MAX_OPERATIONS:
        raise ReplayRefused(
            f"program has {len(program.operations)} operations; at most {MAX_OPERATIONS} are run"
        )
    if not program.outputs:
        raise ReplayRefused("program has no outputs")
    if constants < 0 or constants > MAX_OPERATIONS:
        raise ReplayRefused(f"program has {constants} constants")
    if not all(
        0 <= k < MAX_OPERATIONS and 0 <= place <= len(program.operations)
        for k, place in program.calls
    ):
        raise ReplayRefused("program calls children at places that are not in it")
    if [place for _, place in program.calls] != sorted(place for _, place in program.calls) or len(
        {k for k, _ in program.calls}
    ) != len(program.calls):
        raise ReplayRefused("program calls children out of order or twice")
    for names in (program.inputs, program.params, tuple(slot for slot, _ in program.outputs)):
        if len(set(names)) != len(names) or not all(0 < len(n) <= MAX_TEXT for n in names):
            raise ReplayRefused("program has slots that are empty, too long or named twice")
    reader = _Reader(program, constants)
    operators = []
    for place, operation in enumerate(program.operations):
        reader.place = place
        operators.append(reader.operation(operation, allow))
    reader.place = len(program.operations)
    for slot, operand in program.outputs:
        if not (
            isinstance(operand, dict)
            and len(operand) == 1
            and next(iter(operand)) in ("in", "param", "op", "const")
        ):
            raise ReplayRefused(f"output {slot[:100]!r} does not name a tensor")
        reader.value(operand, 0)
    return operators


def operator_name(name: str, allow: tuple[str, ...] = ()) -> OperatorName:
    """Returns the parts of the name of an operator that a program may use.

    name: "aten.add.Tensor". allow: vendor namespaces the user vouches for, "vendor::". Raises
    ReplayRefused for any other name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ReplayRefused(f"{name[:100]!r} is not the name of an operator")
    namespace, base, overload = match.groups()
    listed = {"aten": allowed_operators.LISTED, "prims": allowed_operators.LISTED_PRIMS}
    if (
        base in listed.get(namespace, ())
        or (base.endswith("_") and base[:-1] in allowed_operators.IN_PLACE)
        or (namespace not in ("aten", "prims", "whence") and f"{namespace}::" in allow)
    ):
        return OperatorName(namespace, base, overload)
    hint = (
        ""
        if namespace in ("aten", "prims")
        else f'; allow=("{namespace}::",) trusts that namespace'
    )
    raise ReplayRefused(f"operator {name} is not on the list of replayable operators{hint}")


class _Reader:
    """Walks over one program. place: the operation whose arguments are being read; they may refer
    to earlier operations only.
    """

    def __init__(self, program: Program, constants: int) -> None:
        self.program, self.constants, self.place, self.values = program, constants, 0, 0

    def operation(self, operation: Operation, allow: tuple[str, ...]) -> OperatorName | None:
        """Returns the name of the operator, None for one of whence's own operations."""
        name = None
        if operation.name == allowed_operators.CAST:
            a = operation.args
            if (
                len(a) != 3
                or operation.kwargs
                or operation.guard is not None
                or a[1] != {"dtype": "float32"}
                or a[2] not in ("up", "back")
            ):
                self.refuse("whence.cast with other arguments than (tensor, float32, up or back)")
            if not isinstance(a[0], dict):
                self.refuse("whence.cast of something that is not a tensor")
        elif operation.name == GRADIENTS:
            self.gradients(operation)
        elif operation.name == OPTIMIZER_STEP:
            self.optimizer_step(operation)
        else:
            name = operator_name(operation.name, allow)
        for value in operation.args:
            self.value(value, 0)
        for key, value in operation.kwargs.items():
            if not (key.isidentifier() and len(key) < 64):
                self.refuse("a keyword that is not a name")
            self.value(value, 0)
        return name

    def gradients(self, operation: Operation) -> None:
        """Refuses a backward pass that does not have the form described at `GRADIENTS`."""
        lists = operation.args
        if (
            len(lists) != 3
            or operation.kwargs
            or operation.guard is not None
            or not all(isinstance(items, (list, tuple)) and items for items in lists)
            or len(lists[0]) != len(lists[1])
        ):
            self.refuse("other arguments than results, gradients and what to differentiate")
        tensors = [item for items in lists for item in items]
        if not all(isinstance(t, dict) and len(t) == 1 for t in tensors):
            self.refuse("something that is not a tensor")
        if not all(next(iter(wanted)) in ("in", "param") for wanted in lists[2]):
            self.refuse("a gradient of what is neither an input nor a parameter")

    def optimizer_step(self, operation: Operation) -> None:
        """Refuses an optimiser step that does not have the form described at `OPTIMIZER_STEP`."""
        a = operation.args
        if (
            len(a) != 6
            or operation.guard is not None
            or a[0] not in allowed_operators.OPTIMIZERS
            or not all(isinstance(names, (list, tuple)) for names in a[3:])
            or len(a[3]) != len(a[4])
            or not all(isinstance(name, str) and name.isidentifier() for name in (*a[3], *a[5]))
        ):
            self.refuse("other arguments than optimiser, parameter, gradient and state")
        if not all(isinstance(t, dict) and len(t) == 1 for t in (a[1], a[2], *a[4])):
            self.refuse("something that is not a tensor")
        if any(isinstance(value, dict) for value in operation.kwargs.values()):
            self.refuse("a hyper-parameter that is not a number")

    def refuse(self, fault: str) -> None:
        name = (
            self.program.operations[self.place].name
            if self.place < len(self.program.operations)
            else "the outputs"
        )
        raise ReplayRefused(f"malformed program: operation {self.place} ({name[:100]}) has {fault}")

    def value(self, value: Any, depth: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            self.refuse("too many or too deeply nested arguments")
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                self.refuse("an integer beyond 64 bits")
        elif isinstance(value, float):
            if not math.isfinite(value):
                self.refuse("a number that JSON cannot hold")
        elif isinstance(value, str):
            if len(value) > MAX_TEXT:
                self.refuse("a text that is too long")
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.value(item, depth + 1)
        elif isinstance(value, dict) and len(value) == 1:
            kind, content = next(iter(value.items()))
            self.operand(kind, content, depth)
        else:
            self.refuse(f"an argument of an unknown form ({type(value).__name__})")

    def operand(self, kind: Any, content: Any, depth: int) -> None:
        if not self._means_something(kind, content):
            self.refuse(
                f"an argument that means nothing: {{{str(kind)[:40]!r}: {str(content)[:60]}}}"
            )
        for part in content if kind in ("mul", "complex") else ():
            self.value(part, depth + 1)

    def _means_something(self, kind: Any, content: Any) -> bool:
        if kind in _WORDS:
            return isinstance(content, str) and content in _WORDS[kind]
        if kind == "in":
            return _index(content, len(self.program.inputs))
        if kind == "param":
            return isinstance(content, str) and content in self.program.params
        if kind == "const":
            return _index(content, self.constants)
        if kind == "op":
            return _pair(content) and _index(content[0], self.place) and _index(content[1], 1 << 16)
        if kind == "dim":
            return (
                _pair(content)
                and _index(content[0], len(self.program.inputs))
                and _index(content[1], 64)
            )
        if kind == "mul":
            few = isinstance(content, (list, tuple)) and 1 <= len(content) <= 8
            return few and all(type(f) is int or _tagged(f, "dim") for f in content)
        return kind == "complex" and _pair(content) and all(map(_is_number, content))


# Kinds whose value must be one of these words.
_WORDS: dict[str, Collection[str]] = {
    "dtype": dtypes.DTYPES, "device": ("",), "layout": ("strided",),
    "memory_format": MEMORY_FORMATS, "float": ("inf", "-inf", "nan"),
}  # fmt: skip


def _tagged(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and set(value) == {kind}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or _tagged(value, "float")


def _index(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def _pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2
