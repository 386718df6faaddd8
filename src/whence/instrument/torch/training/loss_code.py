"""Records the code between a model's return and the backward pass: the loss and its scaling.

This code belongs to no module. From the return of an outermost call in training until a backward
pass begins, its operators are recorded as one program and written as a call named "loss". Calls of
models in between are left out: their outputs are inputs of the loss, like labels. Where several
backward passes follow (a pipeline schedule computes the losses of all micro-batches first), each
gets a call with the operators that lead to its own loss.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from whence.instrument.session import Session
from whence.instrument.torch.compiled_boundary import is_compilers
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.modes import NoFunctions
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.regions import Regions, part_of
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.code_region import CodeRecorder, CodeRegion
from whence.instrument.torch.training.forward_calls import ForwardCall, edge_of, next_node
from whence.records import Placement, Ref
from whence.records.backward import DIFFERENTIATES
from whence.records.program import identified
from whence.records.slots import SlotKind, is_output
from whence.records.training import LOSS

_MOST_OPERATORS = 2_000
"""Most operators recorded for one loss; a program that runs more between its models does something
else there.
"""
_MOST_WAITING = 64
"""Most losses that wait for further backward passes."""


class _NoModule:
    """Stands in for a `ModuleInfo` where code belongs to no module."""

    entries: None = None
    source: str = ""


class _Loss:
    """The code after one call of a model, with the attributes that a listener keeps of a running
    module call.
    """

    def __init__(self, frame: ModuleFrame, *, keep: bool) -> None:
        self.scope, self.number = "", LOSS
        self.op = self.op_type = LOSS
        self.occurrence, self.training = 0, True
        self.root, self.step, self.micro, self.keep = frame.root, frame.step, frame.micro, keep
        self.info = _NoModule()
        self.first_node, self.order = next_node(), -1
        self.placements: dict[str, Placement] = {}
        self.refs: list[Ref] = []
        self.arguments: dict[str, Any] = {}
        self.input_edges: list[tuple[str, Any]] = []
        self.results: list[tuple[str, Any]] = []
        self.called: list[Any] = []
        self.recorder: Any = None
        self.models = [_Returned(frame)]

    def may_lead_to(self, tensor: Any) -> bool:
        """Whether the recorded code may have made this tensor. A tensor that a model returned does
        not count as a loss unless it is a scalar, since a module may compute the loss. Whether code
        then changed it, only the recorded operators tell.
        """
        edge = edge_of(tensor)
        if edge is None or edge.node < self.first_node:
            return False
        return not self.has_model_returned(edge) or (not tensor.dim() and not self.recorder.over)

    def has_model_returned(self, edge: Any) -> bool:
        """Whether one of the models before this code returned the tensor at this edge."""
        return any(edge in model.edges for model in self.models)

    def part(self, results: list[tuple[str, Any]], names: Mapping[str, str] | None) -> _Loss:
        """The part of this code that leads to `results` (slot, tensor). names: new slots by the
        input slots that this part reads; None to keep all inputs unchanged.
        """
        part = copy.copy(self)
        part.results, part.placements = results, dict(self.placements)
        if names is None:
            part.refs = [*self.refs]
            return part
        part.refs = [
            Ref(names[ref.slot], ref.record, ref.edge) for ref in self.refs if ref.slot in names
        ]
        part.input_edges = [(names[slot], e) for slot, e in self.input_edges if slot in names]
        read = {id(ref.record) for ref in part.refs}
        part.micro = max((m.micro for m in self.models if m.records & read), default=self.micro)
        return part


class _Returned:
    """What one call of a model returned: its micro-batch, the edges at which gradients arrive, and
    the identities of the output records.
    """

    def __init__(self, frame: ModuleFrame) -> None:
        self.micro = frame.micro
        with NoFunctions():  # a mode of the program sees no attribute that is looked at here
            self.edges = {edge_of(tensor) for _, tensor in frame.results}
        self.held = [ref.record for ref in frame.refs if is_output(ref.slot)]
        self.records = set(map(id, self.held))


class LossCode:
    """Records the code between models and backward passes."""

    def __init__(
        self,
        session: Session,
        registry: TensorRegistry,
        writer: ProgramWriter,
        region: CodeRegion,
    ) -> None:
        self._session, self._registry = session, registry
        self._writer, self._region = writer, region
        self._regions = Regions(session, registry)
        self._loss: _Loss | None = None
        # Losses from which a backward pass has begun, and another one may begin.
        self._stopped: list[_Loss] = []

    # ---- around calls of models; nothing of the listener is on the thread then

    def _running(self) -> _Loss | None:
        """The loss whose code is being recorded on this thread, None if there is none."""
        loss = self._loss
        return loss if loss is not None and self._region.runs(loss.recorder) else None

    def model_begins(self) -> None:
        """Pause the recording: an outermost call begins, and its operators are not part of the
        loss. Drops any other code being recorded.
        """
        loss = self._loss and self._running()  # in inference there is none
        if loss is not None:
            loss.recorder.pause()
        else:
            self._region.drop("calls a model in its step")

    def model_ended(self, frame: ModuleFrame) -> None:
        """Resume or begin the recording: an outermost call has returned, and the code that follows
        may be the loss.
        """
        loss = self._loss and self._running()  # in inference there is none
        if loss is not None and (loss.root, loss.step) == (frame.root, frame.step):
            loss.models.append(_Returned(frame))
            loss.recorder.resume()
            return
        self._region.drop("another model was called")
        if (
            frame.training
            and frame.phase == "forward"
            and frame.selected
            and self._region.may_begin
            and torch.is_grad_enabled()
        ):
            loss = self._loss = _Loss(frame, keep=self._session.elements_on)
            find = functools.partial(self._find, loss)
            # No torch-function mode: it would still be active in the call of `backward`.
            loss.recorder = CodeRecorder(
                [], [], casts=False, find=find, drawn=find, most=_MOST_OPERATORS
            )
            self._region.begin(loss.recorder)

    @contextmanager
    def around_uncaptured(self, module: Any) -> Iterator[None]:
        """Context around an outermost call of a module that is not captured, entered after
        `model_begins`. A module without parameters (`nn.MSELoss()`) counts as code of the loss, any
        other as a model.
        """
        if not is_compilers(module) and next(module.parameters(), None) is None:
            self._resume()
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        loss = self._running()
        if loss is not None:
            loss.recorder.resume()

    def step_begins(self) -> None:
        """An optimiser steps: forget all losses, since none leads to another backward pass."""
        if self._running():
            self._region.drop("an optimiser steps")
        if self._region.is_here:
            self._stopped.clear()

    def stop(self) -> Sequence[_Loss]:
        """Stop recording because a backward pass begins. Returns the recorded losses, for
        `write`.
        """
        if not self._region.is_here:
            return ()
        if (loss := self._running()) is not None:
            self._region.end(loss.recorder)
            self._stopped.append(loss)
            del self._stopped[:-_MOST_WAITING]
        self._region.drop("a backward pass begins")
        return self._stopped

    # ---- what it reads and makes

    def _find(self, loss: _Loss, tensor: Any) -> str:
        """Record a tensor that the code reads and did not make. Returns its slot, "" where that is
        not possible.
        """
        slot = f"{SlotKind.INPUT}.{len(loss.refs)}"
        ref = self._region.read(slot, tensor, loss)
        if ref is None:
            return ""
        loss.refs.append(ref)
        if (arrives := edge_of(tensor)) is not None:
            loss.input_edges.append((slot, arrives))
        return slot

    def write(self, losses: Sequence[_Loss], tensors: list[Any]) -> ForwardCall | None:
        """Write the call of that loss, among `losses`, from which a backward pass starts at these
        tensors. Returns it as a call that waits for its backward pass, None where there is none.
        """
        for place, loss in reversed([*enumerate(losses)]):
            starts = [
                tensor
                for tensor in tensors
                if loss.may_lead_to(tensor)
                and not any(x.has_model_returned(edge_of(tensor)) for x in losses[place + 1 :])
            ]
            if starts and (
                len(losses) == 1 or loss.recorder.over or loss.recorder.knows(starts[0])
            ):
                if len(loss.models) == 1:
                    self._stopped.remove(loss)
                return self._written(loss, starts)
        return None

    def _written(self, loss: _Loss, starts: list[Any]) -> ForwardCall | None:
        results = [(f"output.{k}", tensor) for k, tensor in enumerate(starts)]
        several = len(loss.models) > 1
        recording = loss.recorder.so_far(results, alone=several)
        recorded = recording.program
        names = None
        if recorded is not None:
            if not recorded.operations:
                return None
            if several and not recorded.draws:
                names = {slot: f"input.{place}" for place, slot in enumerate(recorded.inputs)}
                recorded = identified(
                    msgspec.structs.replace(recorded, inputs=tuple(names.values()))
                )
        program, no_program = self._writer.put_recording(recording._replace(program=recorded), loss)
        part = loss.part(results, names)
        if recorded is not None and DIFFERENTIATES in recorded.notes:
            # Gradients for tensors inside the models use a separate edge for each use.
            edges = part.input_edges
            part.input_edges = [(s, edge) for s, edge in edges if loss.has_model_returned(edge)]
        for slot, tensor in results:
            number, edge, _ = self._registry.record_of(tensor, slot, part)
            part.refs.append(Ref(slot, number, edge))
        self._write(part, program, no_program)
        return ForwardCall(part, next_node(), program)

    def _write(self, loss: _Loss, program: str, no_program: str) -> None:
        region = self._regions.enter_counted("region", loss.root, loss.step, loss.micro)
        call = part_of(
            region,
            self._session,
            scope="",
            op=LOSS,
            op_type=LOSS,
            occurrence=region.occurrence,
            number=f"{region.number}_{LOSS}",
            refs=tuple(loss.refs),
            program=program,
            no_program=no_program,
            placements=loss.placements,
        )
        loss.order, loss.occurrence = call.order, call.occurrence
        if region.selected:
            self._registry.call(call)
        self._regions.close()

    def clear(self) -> None:
        """Forget everything; recording does not resume."""
        self._loss = None
        self._stopped.clear()
