"""Slots: the text form and back, and every question that is asked of the text."""

import pytest

from whence.records import slots
from whence.records.slots import Slot, SlotKind

TEXTS = {
    "input.0": Slot(SlotKind.INPUT, "0"),
    "input.attention_mask": Slot(SlotKind.INPUT, "attention_mask"),
    "output.past.0.key": Slot(SlotKind.OUTPUT, "past.0.key"),
    "param.layers.0.weight": Slot(SlotKind.PARAM, "layers.0.weight"),
    "mutated.1": Slot(SlotKind.MUTATED, "1"),
    "grad.0": Slot(SlotKind.GRAD, "0"),
    "state.DEVICE": Slot(SlotKind.STATE, "DEVICE"),
    "inside.4": Slot(SlotKind.INSIDE, "4"),
    "12:output.a:b.c": Slot(SlotKind.OUTPUT, "a:b.c", 12),
}


@pytest.mark.parametrize(("text", "slot"), TEXTS.items())
def test_a_slot_is_read_and_written_back(text, slot):
    assert slots.parse(text) == slot
    assert str(slot) == text


@pytest.mark.parametrize("text", ["", "output", "outputs.0", ".0", "3:", "3:0", "3:4:output.0"])
def test_what_names_no_slot_is_refused(text):
    with pytest.raises(ValueError):
        slots.parse(text)


@pytest.mark.parametrize(("text", "slot"), TEXTS.items())
def test_every_question_agrees_with_the_parsed_slot(text, slot):
    own = slot.kind if slot.child is None else None
    assert slots.is_input(text) is (own is SlotKind.INPUT)
    assert slots.is_output(text) is (own is SlotKind.OUTPUT)
    assert slots.is_param(text) is (own is SlotKind.PARAM)
    assert slots.is_mutated(text) is (own is SlotKind.MUTATED)
    assert slots.is_state(text) is (own is SlotKind.STATE)
    assert slots.is_inside(text) is (own is SlotKind.INSIDE)
    assert slots.is_read(text) is (own in (SlotKind.INPUT, SlotKind.PARAM))
    assert slots.is_written(text) is (own in (SlotKind.OUTPUT, SlotKind.MUTATED))
    assert slots.is_of_child(text) is (slot.child is not None)
    if own is not None:
        assert slots.slot_kind(text) == own
        assert slots.split_slot(text) == (own, slot.name)


def test_names_of_one_kind_leave_other_slots_alone():
    assert slots.input_name("input.x.y") == slots.param_name("param.x.y") == "x.y"
    assert slots.input_name("param.x") == "param.x"
    assert slots.param_name("input.x") == "input.x"


def test_the_input_behind_a_mutated_slot():
    assert slots.slot_of_kind("mutated.past.0", SlotKind.INPUT) == "input.past.0"


def test_a_slot_of_a_child_is_split():
    assert slots.split_child("3:output.0") == (3, "output.0")
    assert slots.split_child("3:4:output.0") == (3, "4:output.0")


def test_gradients_stand_for_gradients_of_the_same_owner():
    family = slots.slot_family
    assert family("input.0") == "input"
    assert family("input.grad") == "input"  # what an optimiser takes
    assert family("input.3:output.0") == "input"
    assert family("input.grad.output.logits") == family("input.grad.output.0")
    assert family("input.grad.1:input.0") == family("input.grad.1:input.0.1")
    assert family("input.grad.1:input.0") != family("input.grad.2:input.0")
    assert family("output.grad.input.0") != family("output.grad.param.weight")
    assert family("output.grad.input.0") != family("output")
