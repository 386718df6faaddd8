"""Notes of a run on compiled and scripted code, whose inside is not seen."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from whence.instrument.session import Session
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import is_optimized
from whence.instrument.torch.settings import Compilers


class CompilerNotes:
    """Notes once per place how what runs there was compiled."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._compilers = Compilers()

    def note_boundary(self, frame: ModuleFrame) -> None:
        """Note of a module whose inside is not seen why that is so."""
        module = frame.module
        if isinstance(module, torch.jit.ScriptModule):
            frame.note = "scripted: inside not seen"
        elif module._compiled_call_impl is not None or is_optimized(module):
            frame.note = "compiled: inside not seen"
            self.note(frame, module)

    def note(self, frame: ModuleFrame, compiled: Any) -> None:
        """Note how `compiled` (a module, or dynamo's callback) was compiled."""
        facts = self._compilers.met(frame.root.name, frame.scope, compiled)
        if facts is not None:
            self._session.note("compiled", msgspec.json.encode(facts).decode(), frame.scope)
