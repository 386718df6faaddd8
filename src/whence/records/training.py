"""The parts of a training step that are no calls of modules, and which of their tensors are
gradients: names stand here once, with what writes them and what asks for them.
"""

from __future__ import annotations

from whence.records.slots import is_input, is_output

LOSS = "loss"
"""`op` of the call from what models returned to what a backward pass begins at."""
GRADIENTS = "gradients"
"""`op` of the call from gradients that a backward pass left to those that an optimiser takes, or
that the next backward pass adds to: its `phase` says which.
"""
BACKWARD = "backward"
"""`phase` of the calls of a backward pass."""
OPTIMIZER = "optimizer"
"""`phase` of the calls of an optimiser's step."""
TAKEN_GRADIENT = "input.grad"
"""Slot of the gradient that an optimiser's step of one parameter takes."""
_SUM_OF = "sum of "
_BACKWARD_OF = "backward of "


def is_of_step(phase: str, op: str) -> bool:
    """Is a call a part of a training step that is not a call of a module?"""
    return phase in (BACKWARD, OPTIMIZER) or op in (LOSS, GRADIENTS)


def sum_of(parameter: str) -> str:
    """`op` of the call that adds up the gradients of a parameter."""
    return f"{_SUM_OF}{parameter}.grad"


def is_sum(op: str) -> bool:
    """Does a call add up the gradients of a parameter?"""
    return op.startswith(_SUM_OF)


def backward_of(child: int) -> str:
    """`op` of the part of a container's backward pass that makes the gradient of what a child, by
    its place, returned.
    """
    return f"{_BACKWARD_OF}{child}"


def backward_child(op: str) -> int | None:
    """The place of the child in such an `op`; None of others."""
    place = op.removeprefix(_BACKWARD_OF)
    return int(place) if place != op and place.isdigit() else None


def is_left(phase: str, op: str, slot: str) -> bool:
    """Is a tensor of a call a gradient as a backward pass made or left it?"""
    if phase != BACKWARD:
        return op == GRADIENTS and is_input(slot)
    return op == GRADIENTS or is_sum(op) or slot.startswith(("input.grad.", "output.grad."))


def is_taken(phase: str, op: str, slot: str) -> bool:
    """Is a tensor of a call a gradient that an optimiser takes?"""
    if phase != OPTIMIZER:
        return False
    return is_output(slot) if op == GRADIENTS else slot == TAKEN_GRADIENT
