"""What a listener of modules needs to follow a training run: backward passes, gradients of
parameters, what changes them, and steps of optimisers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whence.instrument.call_frames import CallFrames
from whence.instrument.session import Session
from whence.instrument.torch.before_steps import call_before_steps
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.module_registry import ModuleRegistry
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.instrument.torch.training.backward_calls import BackwardCalls
from whence.instrument.torch.training.backward_pass import BackwardPasses
from whence.instrument.torch.training.code_region import CodeRegion
from whence.instrument.torch.training.gradient_changes import GradientChanges
from whence.instrument.torch.training.gradient_sums import GradientSums
from whence.instrument.torch.training.loss_code import LossCode
from whence.instrument.torch.training.optimizer_steps import OptimizerSteps
from whence.instrument.torch.training.parameter_names import ParameterNames
from whence.instrument.torch.training.sharded_parameters import ShardedParameters


def training_of(
    session: Session,
    frames: CallFrames,
    registry: TensorRegistry,
    writer: ProgramWriter,
    modules: ModuleRegistry,
    compiled_code: CompiledCodeGuard,
) -> Training | None:
    """What follows the training of the models of a listener, None where that is not wanted."""
    options = session.options
    if options.level != "modules" or options.slots != "both" or not options.gradients:
        return None
    return Training(session, frames, registry, writer, modules.roots, compiled_code)


class Training:
    """Follows the training of the models that a listener listens to. roots: by name."""

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        roots: Mapping[str, ModuleRoot],
        compiled_code: CompiledCodeGuard,
    ) -> None:
        self._frames = frames
        self._region = region = CodeRegion(frames, registry, writer, compiled_code)
        self.loss = LossCode(session, registry, writer, region)
        sharded = ShardedParameters(roots)
        names = ParameterNames(roots, sharded)
        self._changes = GradientChanges(session, frames, registry, writer, region)
        sums = GradientSums(session, registry, writer, names, self._changes)
        calls = BackwardCalls(session, registry, writer)
        self._passes = BackwardPasses(
            session, frames, calls, sums, self.loss, sharded, self._changes
        )
        self._steps = OptimizerSteps(session, registry, writer, names, self._changes, region)
        self._undo: list[Any] = []

    def install(self) -> None:
        """Begin to listen."""
        self._passes.install()
        self._changes.install()
        self._undo.append(call_before_steps(self._step_begins))

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        self._region.drop("the capture has ended")
        self.loss.clear()
        self._passes.remove()
        self._changes.remove()
        while self._undo:
            self._undo.pop().remove()

    def entered(self, frame: ModuleFrame, inputs: list[tuple[str, Any]]) -> None:
        """A module is called with these tensors (slot, tensor), with a graph or, as a checkpoint
        calls it at first, without one below a call that has it.
        """
        self._passes.entered(frame, inputs)

    def left(self, frame: ModuleFrame, program: str, *, failed: bool) -> tuple[str, ...]:
        """A module has returned, and ran this program. failed: it raised. Returns the slots of its
        tensors that have a gradient.
        """
        return self._passes.left(frame, program, failed=failed)

    def run_again(self) -> tuple[int, int] | None:
        """Step and micro-batch of what a backward pass on this thread runs again, if it does."""
        return self._passes.run_again()

    def drop(self, reason: str) -> None:
        """Record the code outside of modules that runs now no longer."""
        self._region.drop(reason)

    def model_begins(self) -> Training:
        """An outermost call begins; nothing of the listener is on the thread. Returns itself."""
        self._changes.stop_listening()
        self.loss.model_begins()
        return self

    def _step_begins(self, optimizer: Any) -> None:
        self.loss.step_begins()
        self._changes.stop_listening()
        self._region.drop("steps another optimiser")
        if self._frames.active and not self._frames.thread.busy:
            self._frames.guarded(self._steps.begins, optimizer)
            self._steps.listen()

    def stepped(self, optimizer: Any, is_skipped: bool) -> None:
        """An optimiser has stepped, or a loss scaler left its step out. Called before its roots go
        on to their next step.
        """
        self._steps.stop_listening()
        if is_skipped:
            self.loss.step_begins()
            self._changes.stop_listening()
        if self._frames.active and not self._frames.thread.busy:
            ended = self._steps.skipped if is_skipped else self._steps.ended
            self._frames.guarded(ended, optimizer)
