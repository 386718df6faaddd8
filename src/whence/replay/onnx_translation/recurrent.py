"""Recurrent layers, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.replay.onnx_translation.activations import NAMES, activated, takes
from whence.replay.onnx_translation.quantised import coded_product
from whence.replay.onnx_translation.writer import Writer, Writes
from whence.replay.program_writing import Tensor

_MOST = 18_000  # operations, of the 20,000 that a program may have


@dataclass(slots=True)
class _Cell:
    """One direction of a layer.

    functions: (name, parameters) of its activations. products: input of all steps times the input
    weights. factors: scale and zero point of quantised recurrent weights.
    """

    w: Writer
    hidden: int
    functions: list[tuple[str, list[float]]]
    products: Tensor
    recurrent: Tensor
    bias: Tensor | None
    recurrent_bias: Tensor | None
    peepholes: Tensor | None
    factors: tuple[Tensor, Tensor] | None = None

    def gate(self, value: Tensor, place: int) -> Tensor:
        """Returns the part of one gate, along the last axis."""
        return value.part(-1, place * self.hidden, (place + 1) * self.hidden)

    def clipped(self, value: Tensor) -> Tensor:
        limit = self.w.number("clip", 0.0)
        return value.clamp(-limit, limit) if limit > 0 else value

    def active(self, which: int, value: Tensor) -> Tensor:
        name, parameters = self.functions[which]
        return activated(self.w, self.clipped(value), name, parameters)

    def recurred(self, h: Tensor) -> Tensor:
        """Returns the contribution of the state to all gates."""
        if self.factors is None:
            return h @ self.recurrent
        return coded_product(self.w, h, self.recurrent, *self.factors)

    def driven(self, step: int) -> Tensor:
        """Returns the contribution of one step's input to all gates."""
        return self.products.select(0, step)


def _simple(cell: _Cell, step: int, state: list[Tensor]) -> list[Tensor]:
    total = cell.driven(step) + state[0] @ cell.recurrent
    for bias in (cell.bias, cell.recurrent_bias):
        total = total + bias if bias is not None else total
    return [cell.active(0, total)]


def _long_short(cell: _Cell, step: int, state: list[Tensor]) -> list[Tensor]:
    w, (h, c) = cell.w, state
    total = cell.driven(step) + cell.recurred(h)
    for bias in (cell.bias, cell.recurrent_bias):
        total = total + bias if bias is not None else total

    def gate(place: int, seen: Tensor, peephole: int) -> Tensor:
        value = cell.gate(total, place)
        if cell.peepholes is None:
            return value
        return value + cell.gate(cell.peepholes, peephole) * seen

    entering = cell.active(0, gate(0, c, 0))
    if w.whole("input_forget", 0):
        kept = 1 - entering
    else:
        kept = cell.active(0, gate(2, c, 2))
    new = kept * c + entering * cell.active(1, cell.gate(total, 3))
    leaving = cell.active(0, gate(1, new, 1))
    name, parameters = cell.functions[2]
    return [leaving * activated(w, new, name, parameters), new]


def _gated(cell: _Cell, step: int, state: list[Tensor]) -> list[Tensor]:
    w, h = cell.w, state[0]
    driven = cell.driven(step)
    driven = driven + cell.bias if cell.bias is not None else driven
    recurrent = cell.recurrent_bias
    hidden = cell.hidden
    gates = h @ cell.recurrent.part(1, 0, 2 * hidden)
    if recurrent is not None:
        gates = gates + recurrent.part(-1, 0, 2 * hidden)
    gates = driven.part(-1, 0, 2 * hidden) + gates
    update, reset = (cell.active(0, cell.gate(gates, i)) for i in range(2))
    own = cell.recurrent.part(1, 2 * hidden, 3 * hidden)
    linear = w.whole("linear_before_reset", 0)
    seen = (h if linear else reset * h) @ own
    if recurrent is not None:
        seen = seen + cell.gate(recurrent, 2)
    seen = reset * seen if linear else seen
    new = cell.active(1, cell.gate(driven, 2) + seen)
    return [(1 - update) * new + update * h]


def _functions(w: Writer, defaults: Sequence[str], count: int) -> list[tuple[str, list[float]]]:
    """Returns (name, parameters) of all activations; those that take parameters consume them in
    order.
    """
    names = w.attribute("activations", None) or list(defaults) * count
    if len(names) != len(defaults) * count:
        raise w.refuse(f"{len(names)} activations for {count} directions")
    alphas, betas = (list(w.attribute(f"activation_{n}", None) or ()) for n in ("alpha", "beta"))
    functions = []
    for name in names:
        name = NAMES.get(str(name).lower(), str(name))
        parameters = [float(n.pop(0)) for n in (alphas, betas)[: takes(name)] if n]
        functions.append((name, parameters))
    return functions


def _recurrence(kind: Any, gates: int, states: int, defaults: Sequence[str]) -> Writes:
    def write(w: Writer) -> list[Tensor | None]:
        layout = w.whole("layout", 0)
        direction = w.text("direction", "forward")
        directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        if direction not in directions:
            raise w.refuse(f"direction {direction[:40]} is not known to whence")
        x = w(0).permute([1, 0, 2]) if layout else w(0)
        steps = w.extent(0, 1 if layout else 0)
        batch, hidden = w.extent(0, 0 if layout else 1), w.extent(2, 1 if _is_coded(w) else 2)
        turns = directions[direction]
        functions = _functions(w, defaults, len(turns))
        results = []
        for d, backwards in enumerate(turns):
            own = functions[d * len(defaults) : (d + 1) * len(defaults)]
            cell = _cell(w, d, x, own, (gates, hidden))
            given = [_initial(w, d, i, batch, hidden) for i in range(states)]
            results.append(_run(w, cell, kind, given, (steps, backwards)))
        return _joined(w, results, layout)

    return write


def _cell(
    w: Writer, d: int, x: Tensor, functions: list[tuple[str, list[float]]], sizes: tuple[int, int]
) -> _Cell:
    """Returns the cell of direction d. For quantised weights, inputs and states are quantised at
    run time.
    """

    def own(place: int) -> Tensor:
        return w(place).select(0, d)

    gates, hidden = sizes
    factors: tuple[Tensor, Tensor] | None = None
    if _is_coded(w):
        weight, recurrent, scale, zero, *rest = (own(place) for place in (1, 2, 8, 9, 10, 11))
        factors = rest[0], rest[1]
    else:
        weight, recurrent = (own(place).t() for place in (1, 2))
    biases: list[Tensor | None] = [None, None]
    if w.has(3):
        bias, half = own(3), gates * hidden
        biases = [bias.part(0, 0, half), bias.part(0, half, 2 * half)]
    peepholes = own(7) if w.has(7) else None
    products = coded_product(w, x, weight, scale, zero) if factors else x @ weight
    return _Cell(
        w, hidden, functions, products, recurrent, biases[0], biases[1], peepholes, factors
    )


def _is_coded(w: Writer) -> bool:
    return w.node.op_type == "DynamicQuantizeLSTM"


def _initial(w: Writer, d: int, state: int, batch: int, hidden: int) -> Tensor:
    if w.has(5 + state):
        return w(5 + state).select(1 if w.whole("layout", 0) else 0, d)
    return w.do("zeros", [batch, hidden], dtype=w.dtype(0))


def _run(
    w: Writer, cell: _Cell, kind: Any, state: list[Tensor], order: tuple[int, bool]
) -> tuple[Tensor, list[Tensor]]:
    """Returns (the hidden states of all steps, the last states)."""
    steps, backwards = order
    rows: list[Tensor] = []
    lengths = w(4).reshape([-1, 1]) if w.has(4) else None
    for step in reversed(range(steps)) if backwards else range(steps):
        new = kind(cell, step, state)
        if lengths is None:
            state, row = new, new[0]
        else:  # behind its end a sequence keeps its state, and gives zeros
            inside = lengths > step
            state = [w.where(inside, a, b) for a, b in zip(new, state)]
            row = w.where(inside, new[0], new[0].zeros_like())
        rows.append(row)
        if w.length > _MOST:
            raise w.refuse(f"{steps} steps are too many to write out")
    if not rows:
        raise w.refuse("no step")
    return (w.do("stack", rows[::-1] if backwards else rows), state)


def _joined(
    w: Writer, results: list[tuple[Tensor, list[Tensor]]], layout: int
) -> list[Tensor | None]:
    outputs = w.do("stack", [rows for rows, _ in results], 1)
    last = [w.do("stack", list(states)) for states in zip(*(s for _, s in results))]
    if layout:
        outputs = outputs.permute([2, 0, 1, 3])
        last = [state.permute([1, 0, 2]) for state in last]
    return [outputs, *last]


KNOWN: dict[str, Writes] = {
    "RNN": _recurrence(_simple, 1, 1, ["Tanh"]),
    "GRU": _recurrence(_gated, 3, 1, ["Sigmoid", "Tanh"]),
    "com.microsoft.DynamicQuantizeLSTM": _recurrence(
        _long_short, 4, 2, ["Sigmoid", "Tanh", "Tanh"]
    ),
    "LSTM": _recurrence(_long_short, 4, 2, ["Sigmoid", "Tanh", "Tanh"]),
}
