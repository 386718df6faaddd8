"""Replaces tensors in a running predictor by those of a reference run: the output of an operator is
overwritten before anything reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from whence.errors import WhenceError
from whence.frameworks import paddle_arrays as tensors
from whence.instrument.patch_points import parse_point
from whence.instrument.session import Session
from whence.records import PATCHED, PATCHED_AS, Call, Run

_WRITES = "writes "


class Interventions:
    """The changes of one capture. points: as given to `--patch`, read from `reference`."""

    def __init__(self, session: Session, reference: Run, points: Sequence[str]) -> None:
        self._session, self._reference = session, reference
        self._points = [parse_point(p) for p in points]
        self._records: dict[tuple[str, int, str, int, str], int] = {}
        self._slots: dict[tuple[str, int, str, int], str] = {}
        self._places: dict[tuple[str, int, str, str], Call] = {}
        self._types: dict[tuple[str, int, str, int], str] = {}
        self._applied: Counter[str] = Counter()
        self._noted: set[str] = set()
        for call in reference.calls:
            if call.kind == "module":
                for ref in call.slots("output"):
                    self._records[
                        call.root, call.step, call.scope or call.root, call.occurrence, ref.slot
                    ] = ref.record
                continue
            names = [
                call.scope,
                *(note.removeprefix(_WRITES) for note in call.notes if note.startswith(_WRITES)),
            ]
            for name, ref in zip(names, call.slots("output")):
                key = (call.root, call.step, name, call.occurrence)
                self._records[*key, ""], self._slots[key], self._types[key] = (
                    ref.record,
                    ref.slot,
                    call.op_type,
                )
            if len(call.slots("output")) == 1:
                self._places[call.root, call.step, call.number, call.op_type] = call

    def operator_wrote(
        self,
        root: str,
        step: int,
        number: str,
        op_type: str,
        name: str,
        occurrence: int,
        tensor: Any,
    ) -> str:
        """`wrote` of an operator: the reference's at the same place in the program, since variables
        of PIR may be numbered otherwise.
        """
        place = self._places.get((root, step, number, op_type))
        if place is not None:
            note = self.wrote(root, step, place.scope, place.occurrence, tensor)
            return f"{note}{PATCHED_AS}{place.scope}" if note and place.scope != name else note
        if self._types.get((root, step, name, occurrence), op_type) != op_type:
            return ""
        return self.wrote(root, step, name, occurrence, tensor)

    def wrote(
        self, root: str, step: int, name: str, occurrence: int, tensor: Any, slot: str = ""
    ) -> str:
        """An operator wrote `tensor`, called `name`, or a layer of that name returned it in `slot`.

        Replaces its elements where that was asked for; returns the note of its call, or "".
        """
        fitting = [p for p in self._points if p.fits(root, name, step, occurrence)]
        call_slot = slot or self._slots.get((root, step, name, occurrence), "")
        if not any(not call_slot or p.slot in ("", call_slot) for p in fitting):
            return ""
        number = self._records.get((root, step, name, occurrence, slot))
        if number is None:
            self._refuse(
                name, step, "the reference has no tensor of this name, step and occurrence"
            )
            return ""
        try:
            tensors.fill(tensor, self._reference.array(number))
        except (WhenceError, ValueError, RuntimeError, TypeError) as error:
            self._refuse(name, step, str(error))
            return ""
        self._applied[name] += 1
        return PATCHED + self._reference.path

    def finish(self) -> None:
        """Say what was done."""
        for name, count in self._applied.items():
            self._session.note(
                "patch", f"{name}: {count} {'call' if count == 1 else 'calls'} patched", name
            )
        self._applied.clear()

    def _refuse(self, name: str, step: int, why: str) -> None:
        text = f"{name} at step {step} was not patched: {why}"
        if text not in self._noted:
            self._noted.add(text)
            self._session.note("patch-refused", text, name, step)
