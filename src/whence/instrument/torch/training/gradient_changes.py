"""Records what happens to gradients between a backward pass and their next use, an optimiser's step
or the next backward pass that adds to them. One call leads from the gradients that the pass left to
the gradients that are used, whether or not they changed.

The program of the call is recorded as it runs: clipping, division by a loss scale or by the number
of micro-batches, weight decay by hand. Only operators that use a gradient, or a value computed from
one, are included, since the rest of a training loop (logging, moving averages) runs there too.
Gradients that change in a way that is not recorded have no program, but are still compared.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from whence.frameworks.torch_arrays import NAMES, tensors_in
from whence.instrument.call_frames import CallFrames
from whence.instrument.guard import Replacements
from whence.instrument.session import Session
from whence.instrument.torch.list_operators import UNSCALES
from whence.instrument.torch.operand_table import layout
from whence.instrument.torch.program_cache import ProgramWriter
from whence.instrument.torch.program_recorder import Recording
from whence.instrument.torch.program_writer import content_digest
from whence.instrument.torch.regions import part_of
from whence.instrument.torch.split_recording import Wanted, is_measured
from whence.instrument.torch.tensor_content import Pending, Sighting
from whence.instrument.torch.tensor_identity import TensorRegistry, resolved
from whence.instrument.torch.training.code_region import CodeRecorder, CodeRegion
from whence.instrument.torch.training.gradient_hooks import Gradient
from whence.instrument.torch.training.parameter_names import ParameterName
from whence.records import Call, Placement, Program, Ref
from whence.records.program import map_operands
from whence.records.slots import FOUND_INF, GRAD_SCALE, INVERSE_SCALE, READ_BESIDE
from whence.records.training import GRADIENTS

_UNRECORDED = "code that is not recorded changed the gradients"
_MOST_OPERATORS = 20_000
"""Most operators recorded; there are a few for each parameter."""
_ITEM = torch.ops.aten._local_scalar_dense.default


class _Left(NamedTuple):
    """The gradient of a parameter as a backward pass left it."""

    tensor: weakref.ref[Any]
    path: str
    gradient: Gradient


class TakenGradients(NamedTuple):
    """How gradients changed until their use: the content of one call. expected: pairs of pending
    records that must turn out equal if the program is complete.
    """

    root: str
    refs: tuple[Ref, ...]
    placements: dict[str, Placement]
    settings: dict[str, Any]
    program: str
    no_program: str
    expected: list[tuple[Any, Any]]


def _settled(expected: list[tuple[Any, Any]], call: Call) -> Call:
    """The call, without its program if two records that were expected to be equal are not."""
    if all(resolved(before) == resolved(now) for before, now in expected):
        return call
    return msgspec.structs.replace(call, program="", no_program=_UNRECORDED)


class _GradientCode(CodeRecorder):
    """Records operators on the gradients of these parameters (path, parameter).

    read: records another tensor that the code reads (slot, tensor) in its present state; returns
    False where that is not possible.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Any]], read: Callable[[str, Any], bool]
    ) -> None:
        super().__init__(
            [], [], casts=False, find=self._find, most=_MOST_OPERATORS, watch_versions=False
        )
        self._parameters, self._read = parameters, read
        self._table.takes_shards = True
        self._has_begun = self._took_number = False
        self._held: dict[tuple[Any, ...], str] = {}

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator at the dispatcher: runs it exactly once."""
        if self.over:
            return self.run(func, args, kwargs)
        self._begin()
        is_number = func is _ITEM and args[0].is_floating_point()
        if is_number or not any(map(self.knows, tensors_in((args, kwargs)))):
            out = self.run(func, args, kwargs)
            self._took_number = self._took_number or is_measured(out)
            return out
        if func is UNSCALES:
            self._held[layout(args[2])] = INVERSE_SCALE
        if self._took_number and any(isinstance(value, float) for value in args):
            # The float may be computed from a number out of a tensor, which varies between runs.
            self.give_up("works on gradients with a number that came out of a tensor")
        return super().operator(func, args, kwargs)

    def _begin(self) -> None:
        """Register the gradients as inputs before the first operator runs, while they are
        unchanged.
        """
        if not self._has_begun:
            self._has_begun = True
            with self._guarded("reading the gradients"):
                for path, parameter in self._parameters:
                    if parameter.grad is not None and self._table.is_plain(parameter.grad):
                        self._table.new_input(f"input.{path}", parameter.grad)

    def _find(self, tensor: Any) -> str:
        """The slot of a tensor that the code reads besides gradients: a parameter or its memory, or
        the inverse scale of a loss scaler. "" for any other.
        """
        for path, parameter in self._parameters:
            self._held.setdefault(layout(parameter), f"{READ_BESIDE}{path}")
        slot = self._held.get(layout(tensor), "")
        return slot if slot and self._read(slot, tensor) else ""

    def set_numbers_aside(self, previous: Callable[[], Any]) -> Any:
        """Call a function whose numeric arguments are recorded as settings, so that numbers it
        takes out of tensors do not end the recording.
        """
        took, self._took_number = self._took_number, False
        try:
            return previous()
        finally:
            self._took_number = self._took_number or took

    def divide(self, gradients: Sequence[Any], scale: Any, found_inf: Any) -> None:
        """Add the division of gradients that a fused step does: by `scale`, unless `found_inf` (a
        tensor or None) says that a gradient is not finite.
        """
        self._begin()
        table = self._table
        with self._guarded("dividing gradients by their scale"):
            before = [table.ref(gradient) for gradient in gradients]
            by = table.new_input(GRAD_SCALE, scale)
            after = [table.add("aten.div.Tensor", gradient, by) for gradient in before]
            if found_inf is not None:
                skips = table.add("aten.gt.Scalar", table.new_input(FOUND_INF, found_inf), 0)
                pairs = zip(before, after, strict=True)
                after = [table.add("aten.where.self", skips, *pair) for pair in pairs]
            table.operands.update(zip(map(layout, gradients), after, strict=True))

    def has_made(self, path: str, gradient: Any) -> bool:
        """Whether the recorded code computed this gradient from what a backward pass left."""
        if not self._has_begun or self.over or not self._table.is_plain(gradient):
            return False
        operand = self._table.operands.get(layout(gradient), {})
        return operand.keys() != {"in"} or self._table.inputs[operand["in"]] != f"input.{path}"

    def form(self, gradients: Sequence[tuple[str, Any]]) -> Any:
        """A key for the program of these gradients (slot, tensor): equal keys mean equal
        programs.
        """
        table = self._table
        ends = [(slot, table.operands.get(layout(gradient))) for slot, gradient in gradients]
        constants = list(map(id, table.constants))
        return table.operations, table.inputs, table.input_dtypes, constants, ends

    def made(self, gradients: Sequence[tuple[str, Any]]) -> Recording:
        """The program of these gradients (slot, tensor)."""
        inputs = {slot: slot for slot in self._table.inputs}
        return self.each([Wanted(inputs, gradients)])[0]


def _program_of(
    code: _GradientCode,
    made: Sequence[tuple[str, Any]],
    kept: Mapping[str, str],
    order: Sequence[str],
) -> Recording:
    """The program of the changes of gradients. made: (slot, tensor) of gradients that the code
    computes; kept: path -> dtype of gradients that stay unchanged; order: the paths in output
    order.
    """
    recording = code.made(made) if made else Recording(None, [], "")
    program = recording.program or Program("", (), (), ())
    read = dict(zip(program.inputs, program.input_dtypes))
    known = read | {f"input.{path}": dtype for path, dtype in kept.items()}
    first = [slot for path in order if (slot := f"input.{path}") in known]
    dtypes = {slot: known[slot] for slot in (*first, *read)}
    places = {slot: {"in": place} for place, slot in enumerate(dtypes)}

    def moved(kind: str, value: Any) -> Any:
        return places[program.inputs[value]] if kind == "in" else {kind: value}

    outputs = {slot: map_operands(moved, operand) for slot, operand in program.outputs}
    outputs |= {f"output.{path}": places[f"input.{path}"] for path in kept}
    if not outputs:
        return Recording(None, [], _UNRECORDED)
    program = msgspec.structs.replace(
        program,
        id="",
        lines=(),
        operations=tuple(o.with_operands(moved) for o in program.operations),
        inputs=tuple(dtypes),
        outputs=tuple((s, outputs[s]) for path in order if (s := f"output.{path}") in outputs),
        base=next(iter(dtypes.values())),
        input_dtypes=tuple(dtypes.values()),
        default_dtype=NAMES[torch.get_default_dtype()],
        notes=(),
    )
    digest = content_digest(program, recording.constants)
    return Recording(msgspec.structs.replace(program, id=digest), recording.constants, "")


class GradientChanges:
    """Records what changes gradients before the optimiser takes them."""

    def __init__(
        self,
        session: Session,
        frames: CallFrames,
        registry: TensorRegistry,
        writer: ProgramWriter,
        region: CodeRegion,
    ) -> None:
        self._session, self._frames, self._registry = session, frames, registry
        self._writer, self._region = writer, region
        self._left: dict[int, _Left] = {}
        # Identities of parameters whose gradients a step has used since the last pass.
        self._stepped: set[int] = set()
        self._settings: dict[str, Any] = {}
        self._code: _GradientCode | None = None
        self._is_new = False
        self._seen = Sighting("", GRADIENTS, keep=False)
        # Pairs of pending records that turn out equal if nothing else changed a gradient.
        self._expected: list[tuple[Any, Any]] = []
        self._beside: dict[str, Ref] = {}
        # The last gradient norm that torch computed, and its order.
        self._norm: tuple[Any, float] = None, 0.0
        # (key, program) of the last step: most steps do the same as the one before.
        self._last: tuple[Any, Recording] = None, Recording(None, [], "")
        self._replaced = Replacements()

    # ---- settings of clipping

    def install(self) -> None:
        """Wrap the functions that clip. Programs hold `clip_grad_norm_` from before, so what it
        calls is wrapped.
        """
        clip_grad, utils = torch.nn.utils.clip_grad, torch.nn.utils
        self._wrap(clip_grad, "_get_total_norm", self._norm_of)
        self._wrap(utils, "get_total_norm", self._norm_of)
        self._wrap(clip_grad, "_clip_grads_with_norm_", self._clips_norm)
        self._wrap(utils, "clip_grads_with_norm_", self._clips_norm)
        self._wrap(clip_grad, "clip_grad_value_", self._clips_values)
        self._wrap(utils, "clip_grad_value_", self._clips_values)

    def _wrap(self, module: Any, name: str, note: Callable[[dict[str, Any], Any], None]) -> None:
        """Call `note` with the arguments of a function and its result."""
        previous = getattr(module, name, None)
        if previous is None:  # of another release of torch
            return
        signature = inspect.signature(previous)

        @functools.wraps(previous)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(previous, *args, **kwargs)
            if not self._frames.active or self._frames.thread.busy:
                return run()
            code = self._code
            out = code.set_numbers_aside(run) if self._region.runs(code) and code else run()
            self._frames.guarded(lambda: note(signature.bind(*args, **kwargs).arguments, out))
            return out

        self._replaced.put(module, name, wrapper)

    def _norm_of(self, given: dict[str, Any], norm: Any) -> None:
        self._norm = norm, float(given.get("norm_type", 2.0))

    # A wrapper of another tool may hide the names of arguments.
    def _clips_norm(self, given: dict[str, Any], _: Any) -> None:
        if "max_norm" in given:
            self._settings["clip_grad_norm_.max_norm"] = float(given["max_norm"])
        if given.get("total_norm") is self._norm[0]:
            self._settings["clip_grad_norm_.norm_type"] = self._norm[1]
        self._norm = None, 0.0

    def _clips_values(self, given: dict[str, Any], _: Any) -> None:
        if "clip_value" in given:
            self._settings["clip_grad_value_.clip_value"] = float(given["clip_value"])

    def remove(self) -> None:
        """Restore the wrapped functions, except those that another tool has wrapped."""
        self._replaced.remove()
        self.clear()
        self._left.clear()

    # ---- what happens between a backward pass and a step

    def clear(self) -> None:
        """Forget recorded changes, because a backward pass has just run."""
        self._code, self._is_new = None, True
        self._expected = []
        self._settings.clear()
        self._beside.clear()
        self._norm = None, 0.0

    def left(self, parameter: Any, path: str, gradient: Gradient) -> None:
        """Remember the gradient of a parameter as a backward pass left it."""
        self._stepped.discard(id(parameter))
        self._left[id(parameter)] = _Left(weakref.ref(parameter), path, gradient)

    def listen(self) -> None:
        """Start recording code that may change the gradients a backward pass left."""
        is_new, self._is_new = self._is_new, False
        if is_new and self._left and self._region.may_begin and not self._writer.unwanted:
            self._seen = Sighting("", GRADIENTS, keep=self._session.elements_on)
            self._code = self._new_code()
            self._region.begin(self._code)

    def stop_listening(self) -> None:
        """Stop recording because a model or a step follows; what was recorded is kept."""
        self._region.end(self._code)

    def _new_code(self) -> _GradientCode:
        parameters = [
            (left.path, parameter)
            for left in self._left.values()
            if (parameter := left.tensor()) is not None
        ]
        return _GradientCode(parameters, self._read)

    def _read(self, slot: str, tensor: Any) -> bool:
        ref = self._region.read(slot, tensor, self._seen)
        if ref is not None:
            self._beside[slot] = ref
        return ref is not None

    def divided_by_step(self, parameters: list[Any], scale: Any, found_inf: Any) -> None:
        """Add the division that a fused step is about to do: the gradients of these parameters by a
        loss scaler's scale, unless `found_inf` (a tensor or None) says that one is not finite.
        """
        code = self._code = self._recorded()
        seen, followed = Sighting("", GRADIENTS, keep=self._session.elements_on), []
        for slot, setting in ((GRAD_SCALE, scale), (FOUND_INF, found_inf)):
            if setting is not None:
                number, edge, _ = self._registry.record_of(setting, slot, seen)
                self._beside[slot] = Ref(slot, number, edge)
        for parameter in parameters:
            if (left := self._left_of(parameter)) is not None:
                record, _, _ = self._registry.record_of(parameter.grad, "output.grad", seen)
                if code.has_made(left.path, parameter.grad) or self._is_kept(left, record):
                    followed.append(parameter.grad)
        code.divide(followed, scale, found_inf)

    def skipped(self) -> None:
        """Note that the optimiser's step is skipped."""
        self._settings["step.skipped"] = True

    # ---- the call

    def _placed(self, inputs: Sequence[Ref]) -> dict[str, Placement]:
        """Placements of those inputs that are gradients of sharded parameters, by slot."""
        placed = {f"input.{one.path}": one.gradient.placement for one in self._left.values()}
        return {ref.slot: p for ref in inputs if (p := placed.get(ref.slot)) is not None}

    def _read_by(self, recording: Recording, known: Collection[str]) -> Iterator[Ref]:
        """Refs of what a program reads besides the slots in `known`: first other gradients, then
        other tensors.
        """
        program = recording.program
        read = [slot for slot in program.inputs if slot not in known] if program else []
        if read:
            left = {f"input.{one.path}": one.gradient for one in self._left.values()}
            yield from (Ref(s, left[s].record, left[s].edge) for s in read if s in left)
            yield from (self._beside[s] for s in read if s not in left)

    def _recorded(self) -> _GradientCode:
        """The recorded code, or an empty recording where the code could not be followed."""
        return self._new_code() if self._code is None or self._code.over else self._code

    def _left_of(self, parameter: Any) -> _Left | None:
        left = self._left.get(id(parameter))
        return left if left is not None and left.tensor() is parameter else None

    def _is_kept(self, left: _Left, record: Any) -> bool:
        """Whether a gradient, now recorded as `record`, is the one that the pass left. If a record
        is pending, this is assumed and checked later (`_settled`).
        """
        before = left.gradient.record
        if isinstance(before, Pending) or isinstance(record, Pending):
            self._expected.append((before, record))
            return True
        return bool(before == record)

    def taken_by_pass(
        self, parameters: Sequence[tuple[ParameterName, Any]]
    ) -> TakenGradients | None:
        """Called before a backward pass adds to the gradients of these parameters. Returns how the
        gradients changed that no step has used since the last pass; None where there are none.
        """
        waiting = [named for named in parameters if id(named[1]) not in self._stepped]
        return self._taken(waiting) if waiting else None

    def write_step(self, stepped: Sequence[tuple[ParameterName, Any]], region: Any) -> None:
        """Called before an optimiser uses the gradients of these parameters: writes how they
        changed, as a part of the step's region.
        """
        if region.selected and (taken := self._taken(stepped)) is not None:
            self.write(taken, region)
        self._stepped.update(id(parameter) for _, parameter in stepped)

    def _taken(self, parameters: Sequence[tuple[ParameterName, Any]]) -> TakenGradients | None:
        """How the gradients of these parameters changed since a pass left them; None where no pass
        left any.
        """
        known = {
            f"output.{left.path}": (left, parameter.grad)
            for _, parameter in parameters
            if (left := self._left_of(parameter)) is not None
            and left.gradient.dtype == NAMES.get(parameter.grad.dtype)
        }
        if not known:
            return None
        changed = Sighting("", GRADIENTS, keep=self._session.elements_on)
        inputs = [
            Ref(f"input.{left.path}", left.gradient.record, left.gradient.edge)
            for left, _ in known.values()
        ]
        outputs, made, kept = [], [], {}
        code = self._recorded()
        for slot, (left, gradient) in known.items():
            record, edge, _ = self._registry.record_of(gradient, slot, changed)
            outputs.append(Ref(slot, record, edge))
            if code.has_made(left.path, gradient):
                made.append((slot, gradient))
            elif self._is_kept(left, record):
                kept[left.path] = left.gradient.dtype
        recording = Recording(None, [], self._writer.unwanted or _UNRECORDED)
        if not self._writer.unwanted:
            order = [left.path for left, _ in known.values()]
            form = code.form(made), kept, order
            if form != self._last[0]:
                self._last = form, _program_of(code, made, kept, order)
            recording = self._last[1]
        inputs += self._read_by(recording, {ref.slot for ref in inputs})
        changed.placements |= self._placed(inputs)
        written, no_program = self._writer.put_recording(recording, changed)
        return TakenGradients(
            parameters[0][0].root.name,
            (*inputs, *outputs),
            changed.placements,
            dict(self._settings),
            written,
            no_program,
            self._expected,
        )

    def write(self, taken: TakenGradients, region: Any) -> None:
        """Write the call as a part of a region, that of the pass or step that uses the
        gradients.
        """
        expected = taken.expected
        self._registry.call(
            part_of(
                region,
                self._session,
                scope="",
                root=taken.root,
                op=GRADIENTS,
                occurrence=region.occurrence,
                op_type=GRADIENTS,
                refs=taken.refs,
                placements=taken.placements,
                arguments=taken.settings,
                program=taken.program,
                no_program=taken.no_program,
            ),
            functools.partial(_settled, expected) if expected and taken.program else None,
        )
