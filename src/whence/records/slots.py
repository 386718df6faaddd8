"""The slots of a call: the text form, what it consists of, and the questions that code asks of it.

A slot is written "input.0", "param.weight", "mutated.1"; a tensor of the k-th child of a container
is written "k:output.0". `Ref.slot` holds the text, since a run has a million of them. The functions
beside `parse` answer one question about the text without building anything; each takes any text.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import NamedTuple

# A run asks about 10^6 slots that are written in some hundred ways: looking the answer up is
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
    """What a tensor is to its call."""

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
    """The slot that the text names. Raises ValueError when it names none."""
    child, inner = split_child(text) if is_of_child(text) else (None, text)
    kind, dot, name = inner.partition(".")
    if not dot or kind not in _KINDS:
        raise ValueError(
            f"{text[:100]!r} is not a slot: it starts with none of {', '.join(SlotKind)}"
        )
    return Slot(_KINDS[kind], name, child)


def split_slot(text: str) -> tuple[str, str]:
    """(kind, name) of a slot as they are written, without asking whether there is such a kind."""
    kind, _, name = text.partition(".")
    return kind, name


@_remember
def slot_kind(text: str) -> str:
    """The kind of a slot as it is written; one that `SlotKind` lacks for a slot of a child."""
    return text.partition(".")[0]


_GRADIENTS = ("input.grad.", "output.grad.")


@_remember
def slot_family(text: str) -> str:
    """What a slot shares with those of its call that may stand for it under another name: its kind,
    and of a gradient also whose it is, of the call's own inputs and outputs or of which child's.
    """
    if not text.startswith(_GRADIENTS):
        return slot_kind(text)
    kind, gradient, owner = text.split(".", 2)
    return f"{kind}.{gradient}.{owner.partition(':')[0] if ':' in owner else slot_kind(owner)}"


def slot_of_kind(text: str, kind: SlotKind) -> str:
    """The slot of another kind with the same name: the input that "mutated.0" was written to."""
    return f"{kind}{text[len(slot_kind(text)) :]}"


@_remember
def is_input(text: str) -> bool:
    """Is it what the call was given?"""
    return text.startswith("input")


DRAWN = f"{SlotKind.INPUT}.drawn."
"""Before the number of a tensor of random numbers that the call drew, in the order of drawing."""


@_remember
def is_drawn(text: str) -> bool:
    """Is it random numbers that the call drew?"""
    return text.startswith(DRAWN)


INVERSE_SCALE = f"{SlotKind.INPUT}.inverse_scale"
"""What a loss scaler multiplies gradients by."""
GRAD_SCALE = f"{SlotKind.INPUT}.grad_scale"
"""What a fused step divides gradients by, where a loss scaler leaves that to it."""
FOUND_INF = f"{SlotKind.INPUT}.found_inf"
"""Whether a fused step does nothing, because a gradient is not finite: more than 0."""
_OF_LOSS_SCALERS = frozenset({INVERSE_SCALE, GRAD_SCALE, FOUND_INF})


def is_of_loss_scaler(text: str) -> bool:
    """Is it a setting of a loss scaler?"""
    return text in _OF_LOSS_SCALERS


READ_BESIDE = f"{SlotKind.INPUT}.beside."
"""Before the name of a parameter that code reads which changes gradients: weight decay by hand."""


@_remember
def is_read_beside(text: str) -> bool:
    """Is it a parameter that code reads which changes gradients?"""
    return text.startswith(READ_BESIDE)


def is_own_input(text: str) -> bool:
    """Is it an input that no other call makes or hands on: what the call draws, or a setting of
    its tool?
    """
    return text.startswith(DRAWN) or text in _OF_LOSS_SCALERS


@_remember
def is_output(text: str) -> bool:
    """Is it what the call returned?"""
    return text.startswith("output")


@_remember
def is_param(text: str) -> bool:
    """Is it a parameter or buffer of the call's module?"""
    return text.startswith("param")


def is_mutated(text: str) -> bool:
    """Is it what the call left in a tensor that it was given?"""
    return text.startswith("mutated")


@_remember
def is_read(text: str) -> bool:
    """Is it what the call could read: an input or a parameter?"""
    return text.startswith(("input", "param"))


@_remember
def is_written(text: str) -> bool:
    """Is it what the call wrote: an output, or a tensor that it changed in place?"""
    return text.startswith(("output", "mutated"))


def is_state(text: str) -> bool:
    """Is it a setting outside of the call that it depends on?"""
    return text.startswith("state.")


def is_inside(text: str) -> bool:
    """Is it the result of an operator inside of the call?"""
    return text.startswith("inside.")


def input_name(text: str) -> str:
    """The name of an input; the text as it is for anything else."""
    return text.removeprefix("input.")


def param_name(text: str) -> str:
    """The name of a parameter; the text as it is for anything else."""
    return text.removeprefix("param.")


def is_cache(text: str) -> bool:
    """Does its name say a cache ("output.past_key_values.layers.0.keys")?"""
    return text.split(".")[1] in CACHES if "." in text else False


def is_of_child(text: str) -> bool:
    """Is it a tensor of a child of the call, as "3:output.0" is?"""
    return text[:1].isdigit()


def split_child(text: str) -> tuple[int, str]:
    """(which child, its own slot) of a slot of a child."""
    child, _, inner = text.partition(":")
    return int(child), inner
