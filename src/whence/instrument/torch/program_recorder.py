"""Records what one region of an eager torch program ran, as a program: operators, argument graph,
constants; data, never code.

Listening happens at the dispatcher, below autograd and autocast, where an operator is an overload
with a schema. One thing is not visible there: `x.float()` on a tensor that is float32 already runs
no operator, yet in a 16-bit run of the same code it would widen. Such cast points are seen one
level up, at the torch-function level, and become the operation "whence.cast".

What cannot be followed (a tensor from nowhere, a random draw, a number taken out of a tensor past
the dispatcher) ends the recording with a reason: the program of a region is whole or there is none.
Nothing here changes the recorded code: every operator runs exactly once, also when the recorder
fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode

from whence.frameworks.torch_schema import restored
from whence.instrument.torch.cast_points import CastPoints
from whence.instrument.torch.list_operators import OneOfList
from whence.instrument.torch.operand_table import OperandTable, Stop
from whence.instrument.torch.operator_listener import OperatorListener
from whence.instrument.torch.operator_recording import OperatorRecording
from whence.instrument.torch.program_writer import ChildCalls, write_program
from whence.instrument.torch.split_recording import SplitRecording, Wanted
from whence.records import Program

# Torch functions whose `dtype=float32` widens their operand first, without an operator when it is
# float32 already.
_WIDENING = {
    "softmax",
    "log_softmax",
    "softmin",
    "sum",
    "nansum",
    "mean",
    "cumsum",
    "cumprod",
    "prod",
    "norm",
    "logsumexp",
}
_NUMBERS_TAKEN = {
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "__reduce_ex__",
    "__cuda_array_interface__",
}
_PROFILER = "profiler"  # operators that compute nothing: they mark where a stretch begins and ends
_PRINTING = {"__repr__", "__str__", "__format__"}
_WATCHED = {"to", "float", "type", "type_as", "__set__"} | _WIDENING | _NUMBERS_TAKEN | _PRINTING


class Recording(NamedTuple):
    """What came of recording one call: a program with the tensors of its constants, in order, or
    the reason why there is none.

    program.constants is empty: whoever stores the constants puts their record ids there
    (msgspec.structs.replace).
    """

    program: Program | None
    constants: list[Any]
    reason: str


class _Function(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _WATCHED or self._recorder.over:
            return func(*args, **(kwargs or {}))
        return self._recorder.function(func, args, kwargs or {})


class Recorder(OperatorListener):
    """Records what runs inside its `with` block, the calls of other modules left out (`pause`
    before them, `resume` after).

    inputs, params: the tensors that are visible to the call, by slot ("input.0",
    "input.hidden_states", "param.weight", "param.running_mean"); a tensor that is both is an input.
    casts: listen at the torch-function level too; False for code that asks `has_torch_function` and
    would decide otherwise while someone listens (`asks_for_listeners`). find: gives the slot of a
    tensor that is visible in another way (it hangs in a cache, it is a parameter of a module
    below), "" when it is not. drawn: gives the slot of a tensor of random numbers that was just
    drawn; without it what draws has no program. most: so many operators are recorded.
    watch_versions: as `OperandTable` takes it.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Any]],
        params: Sequence[tuple[str, Any]],
        *,
        casts: bool = True,
        find: Callable[[Any], str] | None = None,
        drawn: Callable[[Any], str] | None = None,
        most: int | None = None,
        watch_versions: bool = True,
    ) -> None:
        super().__init__()
        self._most = most
        self._paused = False
        self._casts = casts
        self._table = OperandTable(find, watch_versions=watch_versions)
        self._cast_points = CastPoints(self._table)
        self._operators = OperatorRecording(self._table, self._cast_points, drawn)
        self._children = ChildCalls(self._table)
        with self._guarded("reading the region's inputs"):
            for slot, tensor in inputs:
                self._table.new_input(slot, tensor)
            for slot, tensor in params:
                self._table.new_param(slot, tensor)

    def __enter__(self) -> Self:
        with self._guarded("starting to listen"):
            if torch.is_inference_mode_enabled() and torch._C._is_any_autocast_enabled():
                # Composite operators arrive whole there, and whether autocast was on for what they
                # call cannot be known.
                raise Stop(
                    "autocast under inference_mode cannot be listened to without changing it"
                )
        return super().__enter__()

    def function_mode(self) -> TorchFunctionMode | None:
        """Casts that run no operator are seen there."""
        return _Function(self) if self._casts else None

    def knows(self, tensor: Any) -> bool:
        """Was something over this tensor's memory met in the recording?"""
        return self._table.is_plain(tensor) and (
            tensor.untyped_storage()._cdata in self._table.alive
        )

    def forget(self, tensors: Iterable[Any], reason: str) -> None:
        """Something that cannot be followed may change these tensors."""
        with self._guarded("looking at what a message changes"):
            for tensor in tensors:
                self._table.poison(tensor.untyped_storage()._cdata, reason)

    def child_enters(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is called with these tensors (slot, tensor): outputs "k:slot" of this
        call's own operators.
        """
        if not self.over:
            with self._guarded("looking at what a module was given"):
                self._children.enter(k, tensors)

    def child_leaves(self, k: int, tensors: Sequence[tuple[str, Any]]) -> None:
        """Child number k is over and left these tensors (outputs, and what it changed): inputs
        "k:slot" of what follows.
        """
        if not self.over:
            with self._guarded("looking at what a module returned"):
                self._children.leave(k, tensors)

    def finish(self, outputs: Sequence[tuple[str, Any]]) -> Recording:
        """The program that computes `outputs` (slot, tensor after the call) from inputs and params,
        or the reason why there is none.

        A tensor the call changed is given as an output too ("mutated.input.0", tensor after the
        call). What other modules were given are outputs as well. An output that cannot be followed
        is left out where there are others between modules.
        """
        recording = self.so_far(outputs)
        self.over = True
        self._table.forget_tensors()
        return recording

    def finish_each(self, parts: Sequence[Wanted]) -> list[Recording]:
        """As `finish`, a program for each of these parts of what ran, or the reason why it has
        none.
        """
        recordings: list[Recording] = []
        reason = self.reason
        if not reason:
            with self._guarded("dividing what ran into programs"):
                split = SplitRecording(self._table, self._operators.lines)
                recordings = [_recording_of(split, part) for part in parts]
            reason = self.reason
        self.over = True
        self._table.forget_tensors()
        return [Recording(None, [], reason) for _ in parts] if reason else recordings

    def so_far(self, outputs: Sequence[tuple[str, Any]], *, alone: bool = False) -> Recording:
        """As `finish`, of a recording that may go on. alone: the program reads only what these
        outputs depend on.
        """
        program: Program | None = None
        constants: list[Any] = []
        if not self.reason:
            paused, self._paused = self._paused, True
            with self._guarded("writing the program"):
                program, constants = write_program(
                    self._table,
                    self._children,
                    self._operators.lines,
                    self._operators.detached,
                    self._operators.draws,
                    outputs,
                    alone=alone,
                )
            self._paused = paused
        return Recording(program, constants, self.reason)

    def give_up(self, reason: str) -> None:
        """Listen no more; nothing is kept of a recording that failed."""
        super().give_up(reason)
        self._table.operations, self._table.constants = [], []

    def _guarded(self, doing: str, subject: Any = None) -> _Guarded:
        """A block that may end the recording, and never breaks the recorded program."""
        return _Guarded(self.give_up, doing, subject)

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        around: Any = contextlib.nullcontext()
        ready = None
        with self._guarded("looking at {}", func):
            around = restored(func, self.autocast)
            if not self.over and not self._paused and func.namespace != _PROFILER:
                if self._most is not None and len(self._table.operations) >= self._most:
                    raise Stop(f"runs more than {self._most} operators")
                ready = self._operators.before(func, args, kwargs)
        with around:
            out = func(*args, **kwargs)
        if ready is not None:
            with self._guarded("looking at what {} returned", func):
                self._operators.after(out, *ready)
        return out

    def operator_as(self, run: Callable[[], Any], parts: Sequence[OneOfList]) -> Any:
        """An operator on lists: runs it exactly once, and records what it does for each place of
        them.
        """
        ready: list[Any] = []
        with self._guarded("looking at {}", parts[0].func):
            if not self.over and not self._paused:
                ready = [self._operators.before(*part) for part in parts]
        out = run()
        with self._guarded("looking at what {} left", parts[0].func):
            for place, before in enumerate(ready):
                self._operators.after(parts[place].result(place, out), *before)
        return out

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One watched call at the torch-function level."""
        name, points, table = func.__name__, self._cast_points, self._table
        position, undo = len(table.operations), None
        explicit, paused = points.explicit, self._paused
        with self._guarded("looking at {}", name):
            if name in _NUMBERS_TAKEN or (name == "__set__" and func == torch.Tensor.data.__set__):
                raise Stop(f"reads or replaces a tensor's memory outside any operator ({name})")
            if name in _PRINTING:
                self._paused = True
            elif name == "float":
                points.explicit = True
            elif name in _WIDENING:
                undo = points.widened(args, kwargs)
                position = len(table.operations)
        try:
            out = func(*args, **kwargs)
        finally:
            points.explicit, self._paused = explicit, paused
        if self.over:
            return out
        with self._guarded("looking at {}", name):
            if undo is not None:
                key, operand = undo
                table.operands[key] = operand
                table.pinned.discard(key)
            if (
                name in ("to", "float", "type", "type_as")
                and out is args[0]
                and len(table.operations) == position
            ):
                points.unmoved(name, args, kwargs, sys._getframe(2))
        return out


def _recording_of(split: SplitRecording, part: Wanted) -> Recording:
    try:
        return Recording(*split.program(part), "")
    except Stop as stop:
        return Recording(None, [], str(stop))


class _Guarded:
    """A block of the recorder's own code: what it raises ends the recording, with the reason.

    doing: what the block does, with {} for `subject`.
    """

    def __init__(self, give_up: Callable[[str], None], doing: str, subject: Any) -> None:
        self._give_up, self._doing, self._subject = give_up, doing, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Stop):
            self._give_up(str(error))
        elif isinstance(error, Exception):
            text = f"{type(error).__name__}: {str(error)[:200]}"
            doing = self._doing.format(self._subject)
            self._give_up(f"the recorder failed while {doing}: {text}")
        return isinstance(error, Exception)
