"""Changes a program deliberately while it is captured: replaces outputs of chosen calls by those of
a reference run, or plants a fault.

Used only in captures with a patch, a fault or forced tokens. Every patched call carries a note in
the run. What could not be changed becomes a note with the reason, never an error in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from whence.display import listed
from whence.errors import WhenceError
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_trees import rebuilt, rebuilt_from
from whence.instrument.patch_points import outputs_of, parse_fault, parse_point
from whence.instrument.session import Session
from whence.instrument.torch import faults
from whence.instrument.torch.forced_tokens import ForcedTokens
from whence.instrument.torch.modes import ModesOff, NoFunctions
from whence.records import PATCHED, Call, Ref, Run

Recompute = Callable[[Run, Call, Mapping[str, Any]], Mapping[str, Any]]


class Interventions:
    """The changes of one capture. points: as given to `--patch`, read from `reference`; fault: as
    given to `--inject`, or "".

    computed: (run, call, inputs by slot) -> outputs by slot, the call's program run again; None to
    take what the reference recorded. forced: tokens that replace those the program chooses, None to
    leave them alone.
    """

    def __init__(
        self,
        session: Session,
        reference: Run | None,
        points: Sequence[str],
        fault: str,
        forced: ForcedTokens | None = None,
        computed: Recompute | None = None,
    ) -> None:
        self._session, self._reference, self._forced = session, reference, forced
        self._computed = computed
        self._points = [parse_point(p) for p in points]
        self._fault = parse_fault(fault) if fault else None
        self._undo: list[Callable[[], None]] = []
        self._applied: Counter[str] = Counter()
        self._noted: set[str] = set()
        self._calls: dict[tuple[Any, ...], Call] = {}
        if reference is not None:
            self._calls = {
                c.key()[:8]: c for c in reference.calls if any(p.fits_call(c) for p in self._points)
            }

    def met(self, root: str, module: Any) -> None:
        """Called for a new root before its first call: plants the fault if its site is in this
        root.
        """
        fault = self._fault
        if fault is None or self._undo or fault.root not in ("", root):
            return
        try:
            site = module.get_submodule(fault.site)
        except AttributeError:
            return
        try:
            words, undo = faults.plant(
                site, fault.kind, fault.strength, Random(f"{fault.kind} {fault.site}")
            )
        except (faults.NotPlanted, AttributeError, RuntimeError, ValueError) as error:
            self._tell("fault-refused", f"{fault.kind} was not planted: {error}", fault.site)
            return
        self._undo.append(undo)
        self._session.note("fault", f"{fault.kind} planted in {fault.site}: {words}", fault.site)

    def left(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The value that a call returns in place of `out`, patched if it was chosen. frame: the
        call that ends, as the listener keeps it. args, kwargs: what it was given.
        """
        if self._reference is None:
            return out
        key = (
            self._session.rank,
            frame.root.name,
            frame.step,
            frame.micro,
            frame.phase,
            frame.scope,
            "",
            frame.occurrence,
        )
        call = self._calls.get(key)
        if call is None:
            if any(
                p.fits(frame.root.name, frame.scope, frame.step, frame.occurrence)
                for p in self._points
            ):
                self._refuse(frame, "the reference has no call of this step and occurrence")
            return out
        try:
            with ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                values = self._values(call, args, kwargs)
                replaced = self._replaced(call, out, values)
        except (WhenceError, _Refused, RuntimeError, TypeError, ValueError) as error:
            self._refuse(frame, str(error))
            return out
        name = frame.scope or frame.root.name
        self._applied[name] += 1
        if frame.selected:
            frame.note = "; ".join(n for n in (frame.note, PATCHED + self._reference.path) if n)
        if call.slots("mutated"):
            self._tell(
                "patch",
                f"{name}: what it changes in place (a cache, a buffer) is not replaced, only "
                "what it returns",
                name,
            )
        return replaced

    def taken(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The value that the program gets in place of `out`, after `out` was recorded: where tokens
        are forced, logits that allow only the forced token.
        """
        return out if self._forced is None else self._forced.left(frame, args, kwargs, out)

    def undo(self) -> None:
        """Remove the planted fault. Idempotent, since a forked child calls it a second time."""
        while self._undo:
            self._undo.pop()()

    def finish(self) -> None:
        """Remove the planted fault, and note what was changed and what could not be changed."""
        planted = bool(self._undo)
        self.undo()
        if self._forced is not None:
            self._forced.finish()
        if self._fault is not None and not planted and not self._noted:
            self._tell(
                "fault-refused",
                f"{self._fault.kind} was not planted: no module {self._fault.site} was called",
                self._fault.site,
            )
        for name, count in self._applied.items():
            self._session.note(
                "patch", f"{name}: {count} {'call' if count == 1 else 'calls'} patched", name
            )

    def _values(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Ref], Any]:
        """What gives the elements of an output of the reference's call: its record, or what its
        program makes of the inputs here.
        """
        run = self._reference
        assert run is not None
        if self._computed is None:
            return lambda ref: run.array(ref.record)
        inputs: dict[str, Any] = {}

        def collect(slot: str, tensor: Any) -> Any:
            inputs[slot] = tensors.to_host(tensor.detach())
            return tensor

        for slot, value in (*enumerate(args), *kwargs.items()):
            rebuilt_from(value, f"input.{slot}", collect)
        outputs = self._computed(run, call, inputs)

        def output(ref: Ref) -> Any:
            if ref.slot not in outputs:
                raise _Refused(f"the reference's program does not compute {ref.slot}")
            return outputs[ref.slot]

        return output

    def _replaced(self, call: Call, out: Any, values: Callable[[Ref], Any]) -> Any:
        assert self._reference is not None
        chosen = {p.slot for p in self._points if p.fits_call(call)}
        records = {
            r.slot: r
            for r in call.slots("output")
            if r.slot in outputs_of(call) and ("" in chosen or r.slot in chosen)
        }
        new: dict[str, Any] = {}

        def check(slot: str, tensor: Any) -> Any:
            if slot in records:
                new[slot] = self._tensor(records[slot], tensor, values)
            return tensor

        rebuilt(out, check)
        missing = [slot for slot in records if slot not in new]
        if missing and not new:
            raise _Refused(f"the target returns no {missing[0]}")
        if missing:
            name = call.scope or call.root
            self._tell(
                "patch",
                f"{name}: {listed(missing, 1)} could not be replaced, only what else it returns",
                name,
            )
        return rebuilt(out, lambda slot, tensor: new.get(slot, tensor))

    def _tensor(self, ref: Ref, tensor: Any, values: Callable[[Ref], Any]) -> Any:
        """An output of the reference's call as a tensor of the target's dtype, device and
        layout.
        """
        assert self._reference is not None
        record, slot = self._reference.records[ref.record], ref.slot
        if record.shape != tuple(tensor.shape):
            raise _Refused(
                f"{slot} has shape {list(record.shape)} in the reference and "
                f"{list(tensor.shape)} here"
            )
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            raise _Refused(
                f"{slot} is a {type(tensor).__name__}; only plain tensors can be replaced"
            )
        value = tensors.from_host(values(ref))
        if value.dtype != tensor.dtype and not (
            value.is_floating_point() and tensor.is_floating_point()
        ):
            raise _Refused(
                f"{slot} is {record.dtype} in the reference and "
                f"{tensors.dtype_name(tensor) or tensor.dtype} here"
            )
        patched = torch.empty_like(tensor.detach())
        patched.copy_(value)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _StraightThrough.apply(tensor, patched)
        return patched

    def _refuse(self, frame: Any, why: str) -> None:
        name = frame.scope or frame.root.name
        self._tell(
            "patch-refused", f"{name} at step {frame.step} was not patched: {why}", name, frame.step
        )

    def _tell(self, kind: str, text: str, scope: str, step: int = -1) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._session.note(kind, text, scope, step)


class _Refused(Exception):
    pass


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc]
    """Gives the reference's values in the forward pass, and passes the gradient to the replaced
    tensor in the backward pass.
    """

    @staticmethod
    def forward(_context: Any, _tensor: Any, value: Any) -> Any:
        return value

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return gradients[0], None
