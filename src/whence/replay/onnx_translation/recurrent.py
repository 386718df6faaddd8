"""Recurrent layers, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.replay.onnx_translation.activations import TAKES, activated
from whence.replay.onnx_translation.quantised import coded_product
from whence.replay.onnx_translation.writer import Value, Writer, Writes

_MOST = 18_000  # operations, of the 20,000 that a program may have


@dataclass(slots=True)
class _Cell:
    """One direction of a layer. functions: (name, parameters) of its activations. products: of all
    steps with the weights of the input. factors: scale and zero point of recurrent weights that are
    codes.
    """

    w: Writer
    hidden: int
    functions: list[tuple[str, list[float]]]
    products: Value
    recurrent: Value
    bias: Value | None
    recurrent_bias: Value | None
    peepholes: Value | None
    factors: tuple[Value, Value] | None = None

    def gate(self, value: Value, place: int) -> Value:
        """The part of a gate, along the last axis."""
        return self.w.part(value, -1, place * self.hidden, (place + 1) * self.hidden)

    def clipped(self, value: Value) -> Value:
        limit = self.w.number("clip", 0.0)
        return self.w.do("clamp.default", value, -limit, limit) if limit > 0 else value

    def active(self, which: int, value: Value) -> Value:
        name, parameters = self.functions[which]
        return activated(self.w, self.clipped(value), name, parameters)

    def recurred(self, h: Value) -> Value:
        """What the state adds to all gates."""
        if self.factors is None:
            return self.w.matmul(h, self.recurrent)
        return coded_product(self.w, h, self.recurrent, *self.factors)

    def driven(self, step: int) -> Value:
        """What the input of one step adds to all gates."""
        return self.w.do("select.int", self.products, 0, step)


def _simple(cell: _Cell, step: int, state: list[Value]) -> list[Value]:
    w = cell.w
    total = w.add(cell.driven(step), w.matmul(state[0], cell.recurrent))
    for bias in (cell.bias, cell.recurrent_bias):
        total = w.add(total, bias) if bias is not None else total
    return [cell.active(0, total)]


def _long_short(cell: _Cell, step: int, state: list[Value]) -> list[Value]:
    w, (h, c) = cell.w, state
    total = w.add(cell.driven(step), cell.recurred(h))
    for bias in (cell.bias, cell.recurrent_bias):
        total = w.add(total, bias) if bias is not None else total

    def gate(place: int, seen: Value, peephole: int) -> Value:
        value = cell.gate(total, place)
        if cell.peepholes is None:
            return value
        return w.add(value, w.mul(cell.gate(cell.peepholes, peephole), seen))

    entering = cell.active(0, gate(0, c, 0))
    if w.whole("input_forget", 0):
        kept = w.do("rsub.Scalar", entering, 1)
    else:
        kept = cell.active(0, gate(2, c, 2))
    new = w.add(w.mul(kept, c), w.mul(entering, cell.active(1, cell.gate(total, 3))))
    leaving = cell.active(0, gate(1, new, 1))
    name, parameters = cell.functions[2]
    return [w.mul(leaving, activated(w, new, name, parameters)), new]


def _gated(cell: _Cell, step: int, state: list[Value]) -> list[Value]:
    w, h = cell.w, state[0]
    driven = cell.driven(step)
    driven = w.add(driven, cell.bias) if cell.bias is not None else driven
    recurrent = cell.recurrent_bias
    hidden = cell.hidden
    gates = w.matmul(h, w.part(cell.recurrent, 1, 0, 2 * hidden))
    if recurrent is not None:
        gates = w.add(gates, w.part(recurrent, -1, 0, 2 * hidden))
    gates = w.add(w.part(driven, -1, 0, 2 * hidden), gates)
    update, reset = (cell.active(0, cell.gate(gates, i)) for i in range(2))
    own = w.part(cell.recurrent, 1, 2 * hidden, 3 * hidden)
    linear = w.whole("linear_before_reset", 0)
    seen = w.matmul(h if linear else w.mul(reset, h), own)
    if recurrent is not None:
        seen = w.add(seen, cell.gate(recurrent, 2))
    seen = w.mul(reset, seen) if linear else seen
    new = cell.active(1, w.add(cell.gate(driven, 2), seen))
    return [w.add(w.mul(w.do("rsub.Scalar", update, 1), new), w.mul(update, h))]


def _functions(w: Writer, defaults: Sequence[str], count: int) -> list[tuple[str, list[float]]]:
    """(name, parameters) of all activations; parameters are taken in order by those that have
    some.
    """
    names = w.attribute("activations", None) or list(defaults) * count
    if len(names) != len(defaults) * count:
        raise w.refuse(f"{len(names)} activations for {count} directions")
    alphas, betas = (list(w.attribute(f"activation_{n}", None) or ()) for n in ("alpha", "beta"))
    known = {name.lower(): name for name in (*TAKES, "Relu", "Tanh", "Sigmoid", "Softsign",
                                             "Softplus")}  # fmt: skip
    functions = []
    for name in names:
        name = known.get(str(name).lower(), str(name))
        parameters = [float(n.pop(0)) for n in (alphas, betas)[: TAKES.get(name, 0)] if n]
        functions.append((name, parameters))
    return functions


def _recurrence(kind: Any, gates: int, states: int, defaults: Sequence[str]) -> Writes:
    def write(w: Writer) -> list[Value | None]:
        coded = w.node.op_type == "DynamicQuantizeLSTM"
        layout = w.whole("layout", 0)
        direction = w.text("direction", "forward")
        directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        if direction not in directions:
            raise w.refuse(f"direction {direction[:40]} is not known to whence")
        x = w.permute(w(0), [1, 0, 2]) if layout else w(0)
        steps = w.extent(0, 1 if layout else 0)
        batch, hidden = w.extent(0, 0 if layout else 1), w.extent(2, 1 if coded else 2)
        turns = directions[direction]
        functions = _functions(w, defaults, len(turns))
        results = []
        for d, backwards in enumerate(turns):
            own = functions[d * len(defaults) : (d + 1) * len(defaults)]
            cell = (_coded_cell if coded else _cell)(w, d, x, own, (gates, hidden))
            given = [_initial(w, d, i, batch, hidden) for i in range(states)]
            results.append(_run(w, cell, kind, given, (steps, backwards)))
        return _joined(w, results, layout)

    return write


def _biases(w: Writer, d: int, half: int) -> tuple[Value | None, Value | None]:
    """Biases of what the input and what the state adds."""
    if not w.has(3):
        return None, None
    bias = w.do("select.int", w(3), 0, d)
    return w.part(bias, 0, 0, half), w.part(bias, 0, half, 2 * half)


def _cell(
    w: Writer, d: int, x: Value, functions: list[tuple[str, list[float]]], sizes: tuple[int, int]
) -> _Cell:
    gates, hidden = sizes
    weights = [w.do("t.default", w.do("select.int", w(place), 0, d)) for place in (1, 2)]
    biases = _biases(w, d, gates * hidden)
    peepholes = w.do("select.int", w(7), 0, d) if w.has(7) else None
    products = w.matmul(x, weights[0])
    return _Cell(w, hidden, functions, products, weights[1], *biases, peepholes)


def _coded_cell(
    w: Writer, d: int, x: Value, functions: list[tuple[str, list[float]]], sizes: tuple[int, int]
) -> _Cell:
    """One whose weights are codes, and whose inputs and states become codes as they come."""
    gates, hidden = sizes
    own = {place: w.do("select.int", w(place), 0, d) for place in (1, 2, 8, 9, 10, 11)}
    biases = _biases(w, d, gates * hidden)
    peepholes = w.do("select.int", w(7), 0, d) if w.has(7) else None
    products = coded_product(w, x, own[1], own[8], own[9])
    factors = own[10], own[11]
    return _Cell(w, hidden, functions, products, own[2], *biases, peepholes, factors)


def _initial(w: Writer, d: int, state: int, batch: int, hidden: int) -> Value:
    if w.has(5 + state):
        return w.do("select.int", w(5 + state), 1 if w.whole("layout", 0) else 0, d)
    return w.do("zeros.default", [batch, hidden], dtype={"dtype": w.dtype(0)})


def _run(
    w: Writer, cell: _Cell, kind: Any, state: list[Value], order: tuple[int, bool]
) -> tuple[Value, list[Value]]:
    """(the hidden states of all steps, the last states)"""
    steps, backwards = order
    rows: list[Value] = []
    lengths = w.reshape(w(4), [-1, 1]) if w.has(4) else None
    for step in reversed(range(steps)) if backwards else range(steps):
        new = kind(cell, step, state)
        if lengths is None:
            state, row = new, new[0]
        else:  # behind its end a sequence keeps its state, and gives zeros
            inside = w.do("gt.Scalar", lengths, step)
            state = [w.where(inside, a, b) for a, b in zip(new, state)]
            row = w.where(inside, new[0], w.do("zeros_like.default", new[0]))
        rows.append(row)
        if len(w.operations) > _MOST:
            raise w.refuse(f"{steps} steps are too many to write out")
    if not rows:
        raise w.refuse("no step")
    return w.do("stack.default", rows[::-1] if backwards else rows), state


def _joined(w: Writer, results: list[tuple[Value, list[Value]]], layout: int) -> list[Value | None]:
    outputs = w.do("stack.default", [rows for rows, _ in results], 1)
    last = [w.do("stack.default", list(states)) for states in zip(*(s for _, s in results))]
    if layout:
        outputs = w.permute(outputs, [2, 0, 1, 3])
        last = [w.permute(state, [1, 0, 2]) for state in last]
    return [outputs, *last]


KNOWN: dict[str, Writes] = {
    "RNN": _recurrence(_simple, 1, 1, ["Tanh"]),
    "GRU": _recurrence(_gated, 3, 1, ["Sigmoid", "Tanh"]),
    "com.microsoft.DynamicQuantizeLSTM": _recurrence(
        _long_short, 4, 2, ["Sigmoid", "Tanh", "Tanh"]
    ),
    "LSTM": _recurrence(_long_short, 4, 2, ["Sigmoid", "Tanh", "Tanh"]),
}
