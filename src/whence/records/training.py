"""The parts of a training step that are not calls of modules, and which of their tensors are
gradients: the names are defined here once, for writers and readers.
"""

from __future__ import annotations

from whence.records.slots import is_input, is_output

LOSS = "loss"
"""`op` of the call from the outputs of models to the tensor at which a backward pass begins."""
GRADIENTS = "gradients"
"""`op` of the call from the gradients that a backward pass left to those that an optimiser reads,
or that the next backward pass adds to: its `phase` tells which.
"""
BACKWARD = "backward"
"""`phase` of the calls of a backward pass."""
OPTIMIZER = "optimizer"
"""`phase` of the calls of an optimiser's step."""
TAKEN_GRADIENT = "input.grad"
"""Slot of the gradient that an optimiser's step of one parameter reads."""
_SUM_OF = "sum of "
_BACKWARD_OF = "backward of "


def is_of_step(phase: str, op: str) -> bool:
    """Whether a call is a part of a training step that is not a call of a module."""
    return phase in (BACKWARD, OPTIMIZER) or op in (LOSS, GRADIENTS)


def sum_of(parameter: str) -> str:
    """Returns the `op` of the call that sums the gradients of a parameter."""
    return f"{_SUM_OF}{parameter}.grad"


def is_sum(op: str) -> bool:
    """Whether a call sums the gradients of a parameter."""
    return op.startswith(_SUM_OF)


def backward_of(child: int) -> str:
    """Returns the `op` of the part of a container's backward pass that computes the gradient of the
    output of a child, given by its place.
    """
    return f"{_BACKWARD_OF}{child}"


def backward_child(op: str) -> int | None:
    """Returns the place of the child in such an `op`; None for any other."""
    place = op.removeprefix(_BACKWARD_OF)
    return int(place) if place != op and place.isdigit() else None


def is_left(phase: str, op: str, slot: str) -> bool:
    """Whether a tensor of a call is a gradient that a backward pass computed or left."""
    if phase != BACKWARD:
        return op == GRADIENTS and is_input(slot)
    return op == GRADIENTS or is_sum(op) or slot.startswith(("input.grad.", "output.grad."))


def is_taken(phase: str, op: str, slot: str) -> bool:
    """Whether a tensor of a call is a gradient that an optimiser reads."""
    if phase != OPTIMIZER:
        return False
    return is_output(slot) if op == GRADIENTS else slot == TAKEN_GRADIENT
