"""Records the code of a training loop between two events: between a model's return and the backward
pass (the loss), between a backward pass and a step (changes of gradients), and between the
beginning and the end of a step (the optimiser).

Its operators are recorded like those of a module call. One such stretch is recorded at a time.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from whence.frameworks.torch_arrays import tensors_in
from whence.instrument.call_frames import CallFrames
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard
from whence.instrument.torch.list_operators import one_by_one
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.program_recorder import Recorder
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Ref


class CodeRecorder(Recorder):
    """Records code of a training loop. An operator on lists is recorded as one operation for each
    tensor; a message between ranks makes the tensors it changes unknown.
    """

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        if func.namespace == "c10d":
            if not self.over:
                self.forget(tensors_in((args, kwargs)), "a message between ranks changes it")
            return self.run(func, args, kwargs)
        if not self.over and (parts := one_by_one(func, args, kwargs)):
            return self.operator_as(lambda: self.run(func, args, kwargs), parts)
        return super().operator(func, args, kwargs)


class CodeRegion:
    """Holds the recorder of the code that runs now. Only the thread that installed a mode can
    remove it, so only code on the thread that created this object is recorded. Call the methods
    while no mode of the listener is on the thread.
    """

    def __init__(
        self,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        compiled_code: CompiledCodeGuard,
    ) -> None:
        self._frames, self._registry, self._writer = frames, registry, writer
        self._compiled_code = compiled_code
        self._thread = threading.get_ident()
        self._recorder: CodeRecorder | None = None

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose code is recorded."""
        return threading.get_ident() == self._thread

    @property
    def may_begin(self) -> bool:
        """Whether a recording can begin here."""
        return self._frames.active and self.is_here and not torch._C._len_torch_dispatch_stack()

    def begin(self, recorder: CodeRecorder) -> None:
        """Record what runs from here on."""
        self.drop("other code begins")
        self._recorder = recorder
        if unwanted := self._writer.unwanted:
            recorder.abandon(unwanted)
        else:
            self._compiled_code.set()
            recorder.__enter__()

    def runs(self, recorder: CodeRecorder | None) -> bool:
        """Whether this recorder records the code that runs on this thread."""
        return recorder is not None and recorder is self._recorder and self.is_here

    def end(self, recorder: CodeRecorder | None) -> None:
        """End the recording of this recorder, if it runs."""
        if recorder is not None and self.runs(recorder):
            self._recorder = None
            recorder.pause()

    def drop(self, reason: str) -> None:
        """Stop and discard the recording on this thread. reason: why there is no program."""
        if self._recorder is not None and self.is_here:
            recorder, self._recorder = self._recorder, None
            recorder.abandon(reason)

    def read(self, slot: str, tensor: Any, call: Any) -> Ref | None:
        """Record a tensor that the code reads, in its present state. None inside whence's own
        code.
        """
        if self._frames.thread.busy:
            return None
        with self._frames.recording():
            number, edge, _ = self._registry.record_of(tensor, slot, call)
            return Ref(slot, number, edge)
