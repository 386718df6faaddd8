"""The slots of a call: the text form, its parts, and predicates on it.

A slot is written "input.0", "param.weight", "mutated.1"; a tensor of the k-th child of a container
is written "k:output.0". `Ref.slot` holds the text, since a run has a million of them. The functions
beside `parse` answer one question about the text without building an object; each accepts any text.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import NamedTuple

# A run has about 10^6 slots but only some hundred distinct texts: looking the answer up is
# faster than cutting the text.
_remember = functools.lru_cache(maxsize=1 << 16)

CACHES = (
    "past_key_values",
    "past_key_value",
    "cache",
    "cache_params",
    "kv_cache",
    "kv_caches",
    "past",
)
"""Names that models give a cache of keys and values, or of states."""


class SlotKind(StrEnum):
    """The role of a tensor in its call."""

    INPUT = "input"
    OUTPUT = "output"
    PARAM = "param"
    MUTATED = "mutated"
    GRAD = "grad"
    STATE = "state"
    INSIDE = "inside"


_KINDS = {kind.value: kind for kind in SlotKind}


class Slot(NamedTuple):
    """A tensor of a call: its kind, its name, and for a container the child it belongs to."""

    kind: SlotKind
    name: str
    child: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind}.{self.name}"
        return text if self.child is None else f"{self.child}:{text}"


@_remember
def parse(text: str) -> Slot:
    """Returns the slot that the text names. Raises ValueError when it names none."""
    child, inner = split_child(text) if is_of_child(text) else (None, text)
    kind, dot, name = inner.partition(".")
    if not dot or kind not in _KINDS:
        raise ValueError(
            f"{text[:100]!r} is not a slot: it starts with none of {', '.join(SlotKind)}"
        )
    return Slot(_KINDS[kind], name, child)


def split_slot(text: str) -> tuple[str, str]:
    """Returns (kind, name) of a slot as written, without checking the kind."""
    kind, _, name = text.partition(".")
    return kind, name


@_remember
def slot_kind(text: str) -> str:
    """Returns the kind of a slot as written; for a slot of a child, a kind that
    `SlotKind` lacks.
    """
    return text.partition(".")[0]


_GRADIENTS = ("input.grad.", "output.grad.")


@_remember
def slot_family(text: str) -> str:
    """Returns a key that a slot shares with those slots of its call that may replace it under
    another name: its kind, and for a gradient also whether it belongs to an input or output of the
    call or to which child.
    """
    if not text.startswith(_GRADIENTS):
        return slot_kind(text)
    kind, gradient, owner = text.split(".", 2)
    return f"{kind}.{gradient}.{owner.partition(':')[0] if ':' in owner else slot_kind(owner)}"


def slot_of_kind(text: str, kind: SlotKind) -> str:
    """Returns the slot of another kind with the same name: the input that "mutated.0" was written
    to.
    """
    return f"{kind}{text[len(slot_kind(text)) :]}"


@_remember
def is_input(text: str) -> bool:
    """Whether it is an input of the call."""
    return text.startswith("input")


DRAWN = f"{SlotKind.INPUT}.drawn."
"""Prefix of tensors of random numbers that the call drew, numbered in the order of drawing."""


@_remember
def is_drawn(text: str) -> bool:
    """Whether it holds random numbers that the call drew."""
    return text.startswith(DRAWN)


INVERSE_SCALE = f"{SlotKind.INPUT}.inverse_scale"
"""The factor by which a loss scaler multiplies gradients."""
GRAD_SCALE = f"{SlotKind.INPUT}.grad_scale"
"""The number by which a fused step divides gradients, where a loss scaler leaves that to it."""
FOUND_INF = f"{SlotKind.INPUT}.found_inf"
"""More than 0 where a fused step does nothing because a gradient is not finite."""
_OF_LOSS_SCALERS = frozenset({INVERSE_SCALE, GRAD_SCALE, FOUND_INF})


def is_of_loss_scaler(text: str) -> bool:
    """Whether it is a setting of a loss scaler."""
    return text in _OF_LOSS_SCALERS


READ_BESIDE = f"{SlotKind.INPUT}.beside."
"""Prefix of the name of a parameter that code reads while it changes gradients: weight decay by
hand.
"""


@_remember
def is_read_beside(text: str) -> bool:
    """Whether it is a parameter that code reads while it changes gradients."""
    return text.startswith(READ_BESIDE)


def is_own_input(text: str) -> bool:
    """Whether it is an input that no other call computes or passes on: random numbers, or a setting
    of a loss scaler.
    """
    return text.startswith(DRAWN) or text in _OF_LOSS_SCALERS


@_remember
def is_output(text: str) -> bool:
    """Whether it is an output of the call."""
    return text.startswith("output")


@_remember
def is_param(text: str) -> bool:
    """Whether it is a parameter or buffer of the call's module."""
    return text.startswith("param")


def is_mutated(text: str) -> bool:
    """Whether it is the state of an argument after the call changed it in place."""
    return text.startswith("mutated")


@_remember
def is_read(text: str) -> bool:
    """Whether the call can read it: an input or a parameter."""
    return text.startswith(("input", "param"))


@_remember
def is_written(text: str) -> bool:
    """Whether the call wrote it: an output, or a tensor that it changed in place."""
    return text.startswith(("output", "mutated"))


def is_state(text: str) -> bool:
    """Whether it is a setting outside of the call that the call depends on."""
    return text.startswith("state.")


def is_inside(text: str) -> bool:
    """Whether it is the result of an operator inside of the call."""
    return text.startswith("inside.")


def input_name(text: str) -> str:
    """Returns the name of an input; any other text unchanged."""
    return text.removeprefix("input.")


def param_name(text: str) -> str:
    """Returns the name of a parameter; any other text unchanged."""
    return text.removeprefix("param.")


def parameter_path(scope: str, text: str) -> str:
    """Returns the name that a model gives a parameter: the module's and its own."""
    return f"{scope}.{param_name(text)}".removeprefix(".")


def is_cache(text: str) -> bool:
    """Whether its name is that of a cache ("output.past_key_values.layers.0.keys")."""
    return text.split(".")[1] in CACHES if "." in text else False


def is_of_child(text: str) -> bool:
    """Whether it is a tensor of a child of the call, such as "3:output.0"."""
    return text[:1].isdigit()


def split_child(text: str) -> tuple[int, str]:
    """Returns (number of the child, its own slot) of a slot of a child."""
    child, _, inner = text.partition(":")
    return int(child), inner
