"""Programs of module calls, by signature, family and code: each is recorded once and reused for
calls that must run the same operators.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import torch

from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.caller_code import asks_for_listeners, compiled_inside, tensors_of
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import HeldTensor, home_of
from whence.instrument.torch.operand_table import layout
from whence.instrument.torch.pool_rows import Pools
from whence.instrument.torch.program_recorder import Recorder, Recording
from whence.instrument.torch.random_draws import DrawListener
from whence.instrument.torch.tensor_content import StorageRef, storage_ref
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Program, Ref
from whence.records.slots import DRAWN

# Number of identical programs in a row after which further extents of a family are not recorded.
_SETTLED = 3
# Most programs of one module. A program with fixed extents serves no other extents, and each new
# one costs the time to record it.
_MOST_PROGRAMS = 16

_grad, _inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_autocast = torch._C._is_any_autocast_enabled


class _Outcome(NamedTuple):
    """What calls of one signature run: a program, or the reason why there is none. reads: slots
    read out of objects. draws: number of tensors of random numbers and of pool rows that it reads
    and writes. is_guarded: whether it depends on numbers that the code took out of tensors.
    """

    program: str
    reason: str
    reads: tuple[str, ...] = ()
    draws: int = 0
    is_guarded: bool = False


class ProgramWriter:
    """Passes programs to the session, each once, after the records of its constants. unwanted: why
    the capture records no programs, "" where it does.
    """

    def __init__(self, session: Session, registry: TensorRegistry) -> None:
        self._session, self._registry = session, registry
        self._programs: dict[str, tuple[Program, tuple[Any, ...]]] = {}
        wanted = session.options.programs and session.options.keep == "full"
        self.unwanted = "" if wanted else "programs were not recorded"

    def has(self, program: Program) -> bool:
        """Whether this program was written already."""
        return program.id in self._programs

    def program(self, name: str) -> Program:
        """The program with this id, which was written before."""
        return self._programs[name][0]

    def constants(self, name: str) -> tuple[Any, ...]:
        """Record ids of the constants of a written program; `Pending` for those not arrived yet."""
        return self._programs[name][1]

    def put(self, program: Program | None, reason: str) -> tuple[str, str]:
        """Write a program if it is new. Returns (its id, "") or ("", the reason why there is
        none).
        """
        if program is None:
            return "", reason
        if program.id not in self._programs:
            self.write(program)
        return program.id, ""

    def put_recording(self, recording: Recording, call: Any) -> tuple[str, str]:
        """Like `put`, for the recording of a call, with the constants recorded first."""
        program, constants, reason = recording
        if program is not None and program.id not in self._programs:
            records = [
                self._registry.record_of(tensor, f"constant.{k}", call)[0]
                for k, tensor in enumerate(constants)
            ]
            self.write(program, records)
        return self.put(program, reason)

    def write(self, program: Program, constants: Iterable[Any] | None = None) -> None:
        """Write a program if it is new. constants: record ids that replace its own; `Pending` for
        those not arrived yet.
        """
        if program.id in self._programs:
            return
        ids = tuple(program.constants if constants is None else constants)
        self._programs[program.id] = program, ids
        self._registry.staging.emit(
            lambda: self._session.program(
                msgspec.structs.replace(
                    program, constants=tuple(int(getattr(c, "id", c)) for c in ids)
                )
            )
        )


class NoPrograms:
    """Replaces a `ProgramCache` where module calls have no programs.

    reason: why they have none. always: give this reason even if the call has a note.
    """

    def __init__(self, reason: str, *, always: bool = False) -> None:
        self._reason, self._always = reason, always

    def expect(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """Nothing is recorded."""

    def program_of(self, frame: ModuleFrame, error: str) -> tuple[str, str]:
        """("", the reason why there is no program)."""
        return "", self._reason if self._always else frame.note or self._reason

    def close(self) -> None:
        """Nothing to note."""


class ProgramCache:
    """Records what module calls run, unless it is known already: once per signature, a few times
    per family.

    A signature contains everything the code may branch on: modes, arguments, dtypes, shapes,
    strides. A family is a signature without extents: once several of its programs are identical,
    their sizes follow the extents, and further extents are not recorded. What is known of one
    module holds for all modules with the same code.
    """

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        frames: CallFrames,
        compiled_code: CompiledCodeGuard,
        writer: ProgramWriter,
    ) -> None:
        self._session, self._registry, self._frames = session, registry, frames
        self._compiled_code, self._writer = compiled_code, writer
        self._outcomes: dict[tuple[Any, ...], _Outcome] = {}
        self._families: dict[tuple[Any, ...], list[_Outcome]] = {}
        self._of_codes: dict[tuple[Any, ...], _Outcome] = {}
        options = session.options
        self._records = (
            options.programs and options.keep == "full" and session.selector.slots("input")
        )
        self._recorded = 0
        self._seconds = 0.0

    def close(self) -> None:
        """Note the time spent recording, and forget all signatures."""
        if self._recorded:
            spent = f"{self._seconds:.3f} s with what they ran, once per signature"
            self._session.note("programs", f"{self._recorded} calls recorded in {spent}")
        self._outcomes.clear()
        self._families.clear()
        self._of_codes.clear()

    def expect(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """Start listening to this call if its program is not known. inputs: (slot, tensor)."""
        if frame.note or not self._records:
            return
        frame.signature = signature = _signature(frame)
        outcome = self._outcomes.get(signature) or self._of_code(frame, signature)
        if outcome is not None:
            for slot in outcome.reads:
                self._read(frame, slot)
            if outcome.draws and frame.keep:
                self._compiled_code.set()
                frame.recorder = DrawListener(
                    lambda tensor: self._taken(frame, DRAWN, tensor), self._pools(frame)
                )
        elif self._session.elements_on:
            self._record(frame, inputs, signature)

    def _of_code(self, frame: ModuleFrame, signature: tuple[Any, ...]) -> _Outcome | None:
        """The outcome of a call with a new signature, if a module of the same code, the family or
        the module itself determines it.
        """
        code, (modes, *rest) = code_of(frame.module), signature
        frame.code = (code, *modes[1:], *rest) if code is not None else None
        outcome = self._of_codes.get(frame.code) if frame.code is not None else None
        if outcome is None:
            return self._of_family(frame, signature)
        self._outcomes[signature] = outcome
        return outcome

    def _of_family(self, frame: ModuleFrame, signature: tuple[Any, ...]) -> _Outcome | None:
        """The outcome of a call with a new signature, if its family or its module determines it."""
        # An extent of one broadcasts, so it is not followed.
        kinds = tuple(
            (slot, form[0], tuple(n == 1 for n in form[1]), bool(form[2]))
            for slot, form in frame.forms
        )
        frame.family = family = (signature[0], kinds)
        history = self._families.setdefault(family, [])
        outcome: _Outcome | None = None
        if (
            len(history) >= _SETTLED
            and history[-1].program
            and all(earlier == history[-1] for earlier in history[-_SETTLED:])
        ):
            outcome = self._outcomes[signature] = history[-1]
            self._share(frame, outcome)
        elif frame.info.programs >= _MOST_PROGRAMS:
            reason = f"other extents than in its first {_MOST_PROGRAMS} programs"
            outcome = self._outcomes[signature] = _Outcome("", reason)
        return outcome

    def _share(self, frame: ModuleFrame, outcome: _Outcome) -> None:
        """Reuse an outcome for modules of the same code, unless it depends on numbers in tensors,
        which may differ between them.
        """
        if frame.code is not None and not outcome.is_guarded:
            self._of_codes[frame.code] = outcome

    def _record(
        self, frame: ModuleFrame, inputs: list[tuple[str, Any]], signature: tuple[Any, ...]
    ) -> None:
        module = frame.module
        hidden = compiled_inside(module)
        if hidden:
            self._outcomes[signature] = _Outcome("", f"compiled ({hidden}): inside not seen")
            return
        self._compiled_code.set()
        params = [
            (entry.slot, tensor)
            for entry in frame.info.entries or ()
            if (tensor := entry.tensor()) is not None
        ]
        frame.started = time.perf_counter()
        frame.reads = []
        # Taken before the call: tensors that the call itself puts there are not inputs.
        hanging = {
            layout(tensor): (slot + path, storage_ref(tensor))
            for slot, holder in frame.objects
            for path, tensor in holder.items()
        }
        frame.recorder = Recorder(
            inputs,
            params,
            casts=not asks_for_listeners(module),
            find=lambda tensor: self._find(frame, hanging, tensor),
            drawn=lambda tensor: self._taken(frame, DRAWN, tensor),
        )
        frame.recorder.pools = self._pools(frame)

    def _pools(self, frame: ModuleFrame) -> Pools:
        return Pools(frame.objects, lambda prefix, tensor: self._taken(frame, prefix, tensor))

    def _taken(self, frame: ModuleFrame, prefix: str, tensor: Any) -> str:
        """Record random numbers that a call has just drawn, or pool rows that it read or wrote, and
        return their slot. They are recorded at once, since the operator that drew them may then
        scale them in place.
        """
        with self._frames.recording():
            slot = f"{prefix}{frame.draws}"
            frame.draws += 1
            number, edge, _ = self._registry.record_of(tensor, slot, frame)
            frame.refs.append(Ref(slot, number, edge))
            return slot

    def _find(
        self,
        frame: ModuleFrame,
        hanging: dict[tuple[Any, ...], tuple[str, StorageRef]],
        tensor: Any,
    ) -> str:
        """Record a tensor that a call uses without getting it as an argument: one in an object of
        its arguments, or held by a module below. Returns its slot, "" for any other.
        """
        with self._frames.recording():
            place = layout(tensor)
            if (hung := hanging.get(place)) is not None:
                slot = hung[0]
                frame.reads.append(slot)
                number, edge, _ = self._registry.record_of(tensor, slot, frame)
                frame.refs.append(Ref(slot, number, edge))
                return slot
            held = frame.held
            if held is None:
                held = _by_place(frame.module)
                if frame.ended:  # nothing of the program runs now that would change them
                    frame.held = held
            if place not in held:
                return ""
            slot, attribute = held[place]
            self._hold(frame, slot, attribute)
            return slot

    def _hold(self, frame: ModuleFrame, slot: str, tensor: Any) -> None:
        """Treat a tensor of a module below as a parameter of this call's module from now on."""
        frame.code = None  # modules of its code have no such parameter
        entry = HeldTensor(slot, tensor, home_of(frame.module, slot[6:]))
        number, edge, _ = self._registry.record_of(tensor, slot, frame, parameter=True)
        entry.last_ref = Ref(slot, number, edge)
        entry.version = None if tensor.is_inference() else tensor._version
        entry.remember(tensor)
        frame.refs.append(entry.last_ref)
        if frame.info.entries is not None:
            frame.info.entries.append(entry)

    def _read(self, frame: ModuleFrame, slot: str) -> None:
        """Record a tensor inside an object of this call's arguments as an input of the call."""
        if any(ref.slot == slot for ref in frame.refs):
            return
        for prefix, holder in frame.objects:
            if slot.startswith(prefix) and (tensor := holder.get(slot[len(prefix) :])) is not None:
                number, edge, _ = self._registry.record_of(tensor, slot, frame)
                frame.refs.append(Ref(slot, number, edge))
                return

    def program_of(self, frame: ModuleFrame, error: str) -> tuple[str, str]:
        """(program id, reason why there is none) of a call that ends now."""
        recorder = frame.recorder
        if frame.note:
            return "", frame.note
        if frame.signature is None:
            return "", "programs were not recorded"
        if not isinstance(recorder, Recorder):
            outcome = self._outcomes.get(frame.signature)
            if outcome is None:
                return "", "first seen when elements were no longer kept"
            if recorder is not None and (recorder.reason or frame.draws != outcome.draws):
                return "", recorder.reason or "draws or reads other tensors than at its first call"
            return outcome.program, outcome.reason
        if error:
            recorder.abandon()
            return "", "the call raised"
        frame.ended = True
        recording = recorder.finish(frame.results)
        frame.held = None
        self._recorded += 1
        self._seconds += time.perf_counter() - frame.started
        if recording.program is None:
            outcome = _Outcome("", recording.reason)
        else:
            frame.info.programs += not self._writer.has(recording.program)
            program, _ = self._writer.put_recording(recording, frame)
            is_guarded = any(op.guard is not None for op in recording.program.operations)
            outcome = _Outcome(program, "", tuple(frame.reads), frame.draws, is_guarded)
            self._share(frame, outcome)
        self._outcomes[frame.signature] = outcome
        if frame.family is not None:
            self._families[frame.family].append(outcome)
        return outcome.program, outcome.reason


def _by_place(module: Any) -> dict[tuple[Any, ...], tuple[str, Any]]:
    """(slot, tensor) of everything that a module and those below it hold, by layout."""
    held: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for slot, tensor in tensors_of(module):
        held.setdefault(layout(tensor), (slot, tensor))
    return held


def _signature(frame: ModuleFrame) -> tuple[Any, ...]:
    # The signature includes which inputs are the same tensor: a program may read one for both.
    alike: tuple[int, ...] = ()
    if len(frame.inputs) > 1:
        numbers = [number for _, _, _, number in frame.inputs]
        if len(set(numbers)) != len(numbers):
            alike = tuple(numbers.index(number) for number in numbers)
    modes = (
        frame.info.serial,
        alike,
        tuple(frame.arguments.items()) if frame.arguments else (),
        frame.training,
        _grad(),
        _inference(),
        _autocast(),
    )
    objects = tuple([holder.form for _, holder in frame.objects]) if frame.objects else ()
    return modes, tuple(frame.forms), objects


# Besides its arguments, the class of a module and what it holds determine which operators it runs.
#
# Modules that agree in these run the same operators on their own tensors, like the layers of a
# model. Tensors agree in dtype, shape, strides and device; objects that are not plain values agree
# only if they are identical.

Code = tuple[Any, ...]

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MOST = 64  # values in a list of a module that are looked at
_OF_FILES = ("_state_dict", "_load_state_dict")  # what only saving and loading asks


def code_of(module: Any) -> Code | None:
    """A key that is equal for two modules that run the same code. None for a module where that is
    uncertain: it has hooks, more than two levels, is compiled, or holds one tensor twice.
    """
    children = [child for child in module._modules.values() if child is not None]
    if any(child._modules for child in children):
        return None
    try:
        return _Likeness().of_module(module, is_called=True)
    except (_UnlikeAnyError, TypeError, RuntimeError):  # of a tensor without memory, an object
        # without weak references
        return None


class _UnlikeAnyError(Exception):
    """It cannot be told what this module runs."""


class _Likeness:
    """Builds comparable keys of what one module holds. Keeps the addresses of tensors it has
    seen.
    """

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def of_module(self, module: Any, *, is_called: bool = False) -> Code:
        """The key of a module. is_called: it is the called module, whose `training` is already part
        of the signature.
        """
        if isinstance(module, torch.jit.ScriptModule):
            raise _UnlikeAnyError
        held = []
        for name, value in vars(module).items():
            if name.startswith(_OF_FILES) or (is_called and name == "training"):
                continue
            if "hooks" in name and value:
                raise _UnlikeAnyError
            held.append((name, self.of(value)))
        return (type(module), *held)

    def of(self, value: Any) -> Any:
        """The key of one value."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 is no -0.0
        if kind in _TENSORS:
            return self._of_tensor(value)
        if isinstance(value, torch.nn.Module):
            return self.of_module(value)
        if kind in (tuple, list, set, dict, OrderedDict):
            if len(value) > _MOST:
                raise _UnlikeAnyError
            items = value.items() if isinstance(value, dict) else value
            return kind, tuple([self.of(item) for item in items])
        if isinstance(value, torch.Tensor):
            raise _UnlikeAnyError
        return _VerySame(value)

    def _of_tensor(self, tensor: Any) -> Code:
        address = tensor.data_ptr()
        if address in self._addresses and address:
            raise _UnlikeAnyError
        self._addresses.add(address)
        return (
            type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device,
            tensor.requires_grad, tensor.is_inference(),
        )  # fmt: skip


class _VerySame:
    """Compares equal to another wrapper of the same object while that lives; does not keep it
    alive.
    """

    def __init__(self, value: Any) -> None:
        self._ref, self._hash = weakref.ref(value), id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, across: object) -> bool:
        value = self._ref()
        return value is not None and isinstance(across, _VerySame) and across._ref() is value
