"""Faults that can be seeded into a Python file: each a small change of one expression or statement.

A fault is named by file, function, kind and its number among those of this kind in the function, so
that renaming a local or moving a function leaves the name valid.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""A comparison -> its boundary moved, where it has one, and its opposite."""
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TELLS = {"warn", "warning", "info", "debug", "error", "log", "tell", "print", "echo", "write_line"}
"""Calls that only say something to the user."""
SYMMETRIC = {"isinstance", "issubclass", "max", "min", "maximum", "minimum", "hypot", "cast"}
"""Calls whose first two arguments may be swapped, or whose swap only raises."""
SHOWN = ("__repr__", "__str__", "_repr_")
"""Functions that only show something."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one node. number: among those of this kind in the function."""

    function: str
    kind: str
    number: int
    line: int
    start: int
    stop: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The source with this fault. Offsets are bytes, as ast counts them."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.stop :]).decode()


class _Finder:
    """Walks a file and collects its mutations, in order."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scopes: list[str] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.mutations: list[Mutation] = []

    def add(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        """Keep the change of a node into other text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        function = ".".join(self.scopes) or "<module>"
        start = self.starts[node.lineno - 1] + node.col_offset
        stop = self.starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.expr):
            after = f"({after})"
        self.counts[function, kind] += 1
        number = self.counts[function, kind]
        before = self.data[start:stop].decode()
        self.mutations.append(
            Mutation(function, kind, number, node.lineno, start, stop, before, after)
        )

    def walk(self, node: ast.AST) -> None:
        """Collect the changes of a node and of what it holds."""
        if _only_speaks(node):
            return
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named:
            self.scopes.append(node.name)
        if (offer := OFFERS.get(type(node))) is not None:
            for kind, after in offer(node):
                self.add(kind, node, after)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            self.negate(node.test)
        for child in _children(node):
            self.walk(child)
        if named:
            self.scopes.pop()

    def negate(self, test: ast.expr) -> None:
        """Offer the opposite of a condition that has no operator of its own."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            self.add("boolean", test, f"not ({ast.unparse(test)})")


def _only_speaks(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith(SHOWN)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    return isinstance(node, ast.Call) and _called(node) in TELLS


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What a node holds, without types and decorators."""
    skipped = {"annotation", "returns", "decorator_list", "bases", "keywords", "type_comment"}
    if not isinstance(node, ast.ClassDef):
        skipped.discard("keywords")
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _compare(node: ast.Compare) -> Iterator[tuple[str, str]]:
    for place, operator in enumerate(node.ops):
        for number, other in enumerate(COMPARED[type(operator)]):
            operators = [*node.ops[:place], other(), *node.ops[place + 1 :]]
            changed = ast.Compare(node.left, operators, node.comparators)
            boundary = number == 0 and len(COMPARED[type(operator)]) == 2
            yield "boundary" if boundary else "comparison", ast.unparse(changed)


def _compute(node: ast.BinOp) -> Iterator[tuple[str, str]]:
    other = COMPUTED.get(type(node.op))
    texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    for side in (node.left, node.right):
        if isinstance(side, texts) or (
            isinstance(side, ast.Constant) and isinstance(side.value, str)
        ):
            return
    if other is not None and "|" not in ast.unparse(node):  # else a union of types, mostly
        yield "arithmetic", ast.unparse(ast.BinOp(node.left, other(), node.right))


def _choose(node: ast.BoolOp) -> Iterator[tuple[str, str]]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "boolean", ast.unparse(ast.BoolOp(other, node.values))


def _deny(node: ast.UnaryOp) -> Iterator[tuple[str, str]]:
    if isinstance(node.op, ast.Not):
        yield "boolean", ast.unparse(node.operand)
    elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "arithmetic", ast.unparse(node.operand)


def _constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", repr(not value)
    elif isinstance(value, int):
        yield "constant", repr(value + 1)
    elif isinstance(value, float):
        yield "constant", repr(value * 2 if value else 1.0)


def _return(node: ast.Return) -> Iterator[tuple[str, str]]:
    if node.value is None or isinstance(node.value, ast.Constant):
        return
    if isinstance(node.value, ast.Compare | ast.BoolOp):
        yield "return", f"return not ({ast.unparse(node.value)})"
    else:
        yield "return", "return None"


def _statement(node: ast.Expr) -> Iterator[tuple[str, str]]:
    call = node.value.value if isinstance(node.value, ast.Await) else node.value
    if isinstance(call, ast.Call) and _called(call) not in TELLS:
        yield "dropped call", "pass"


def _call(node: ast.Call) -> Iterator[tuple[str, str]]:
    if len(node.args) < 2 or _called(node) in SYMMETRIC:
        return
    first, second = node.args[:2]
    constants = (ast.Starred, ast.Constant)
    if isinstance(first, constants) or isinstance(second, constants):
        return
    if ast.dump(first) != ast.dump(second):
        swapped = ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)
        yield "swapped arguments", ast.unparse(swapped)


OFFERS: dict[type[ast.AST], Callable[..., Iterator[tuple[str, str]]]] = {
    ast.Compare: _compare,
    ast.BinOp: _compute,
    ast.BoolOp: _choose,
    ast.UnaryOp: _deny,
    ast.Constant: _constant,
    ast.Return: _return,
    ast.Expr: _statement,
    ast.Call: _call,
}


def mutations(source: str) -> list[Mutation]:
    """Every fault that can be seeded into a file, in order."""
    finder = _Finder(source)
    finder.walk(ast.parse(source))
    return finder.mutations
