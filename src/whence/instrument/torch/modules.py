"""Listens to torch modules: every call of every `nn.Module` below a root, with its parameters,
inputs, outputs and mutations.

`nn.Module.__call__` is wrapped while a listener is installed (not hooks: a wrapper sees what
entered before any hook and what left after all of them, needs no change to the module, and keeps
torch's fast path without hooks). Compiled and scripted code is entered through the same wrapper, so
its boundary is recorded and a note says that the inside was not seen. While the wrapper looks at
tensors, dispatch and function modes of the program are off, so that nothing of ours is seen by
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from whence.frameworks import host
from whence.frameworks import torch_arrays as tensors
from whence.frameworks.torch_trees import CLOSED, NESTING, SIMPLE, ObjectSnapshot, is_plain_object
from whence.instrument.guard import end_capture
from whence.instrument.session import Session
from whence.instrument.torch import settings as settings_module
from whence.instrument.torch import settings as torch_settings
from whence.instrument.torch.compiled_boundary import CompiledCodeGuard, is_compilers
from whence.instrument.torch.modes import (
    ModesOff,
    NoFunctions,
    dynamo_knows,
    is_traced,
    set_call,
    taken_for_torchs,
)
from whence.instrument.torch.program_recorder import (
    Recorder,
    asks_for_listeners,
    compiled_inside,
    is_block_cache,
    layout,
    tensors_of,
)
from whence.instrument.torch.tensor_identity import FindExternal, TensorRegistry
from whence.instrument.torch.weak_registry import (
    HeldTensor,
    ModuleInfo,
    Pending,
    Root,
    StorageRef,
    address_of,
    home_of,
    sample,
    storage_ref,
)
from whence.instrument.wording import raised
from whence.records import Call, Placement, Ref

# So many programs of a family that are one and the same, and its next extents are not recorded
# again.
_SETTLED = 3
# Of one module; a program with its extents written in serves no other extents, and every one more
# costs the time to record it.
_MOST_PROGRAMS = 16


class Interventions(Protocol):
    """What a capture changes in the program on purpose: planted faults, patched tensors, forced
    tokens.
    """

    def met(self, root: str, module: Any) -> None:
        """A root is about to be called for the first time."""

    def left(self, frame: Any, out: Any) -> Any:
        """What a call returns instead of `out`. frame: the call that ends."""

    def taken(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """What the program gets instead of `out`, which is recorded."""

    def undo(self) -> None:
        """Take everything out of the program again. Idempotent."""

    def finish(self) -> None:
        """Take everything out again, and note what was done."""


class _Ran(NamedTuple):
    """What calls of one signature run: a program, or why there is none; and the slots it reads out
    of objects.
    """

    program: str
    reason: str
    reads: tuple[str, ...] = ()


class _Frame:
    """One call in progress."""

    __slots__ = (
        "args",
        "depth",
        "family",
        "keep",
        "kids",
        "known",
        "made",
        "micro",
        "module",
        "note",
        "number",
        "objects",
        "occurrence",
        "operators",
        "order",
        "parent",
        "phase",
        "place",
        "placements",
        "reads",
        "recorder",
        "refs",
        "root",
        "scope",
        "signature",
        "started",
        "state",
        "step",
        "tensors",
        "training",
        "wanted",
    )
    args: dict[str, Any] | None
    depth: int
    family: tuple[Any, ...] | None
    keep: bool
    kids: int
    known: ModuleInfo
    made: list[tuple[str, Any]]
    micro: int
    module: Any
    note: str
    number: str
    objects: list[tuple[str, ObjectSnapshot]]
    occurrence: int
    operators: int
    order: int
    parent: _Frame | None
    phase: str
    place: int
    placements: dict[str, Placement]
    reads: list[str]
    recorder: Recorder | None
    refs: list[Ref]
    root: Root
    scope: str
    signature: tuple[Any, ...] | None
    started: float
    state: dict[str, int]
    step: int
    tensors: list[tuple[str, Any, int | None, Any]]
    training: bool
    wanted: bool

    @property
    def op_type(self) -> str:
        return self.known.op_type


class _Thread(threading.local):
    """What each thread has of its own: its calls in progress, and whether it is inside this
    listener.
    """

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.busy = False


class Listener:
    """Records module calls into a session while installed.

    model: only calls of this module and below it; None: every module that is called (each outermost
    one is a root). find_external: where a parameter's bytes may already lie in the user's
    checkpoint file. staged: send CPU tensors through the staging ring too (device tensors always go
    there). changes: what is changed in the program on purpose, None for nothing.
    """

    def __init__(
        self,
        session: Session,
        model: Any = None,
        *,
        find_external: FindExternal | None = None,
        staged: bool = False,
        changes: Interventions | None = None,
    ) -> None:
        self.session, self._changes = session, changes
        self.model = model
        self.active = self._removed = False
        self._trap = CompiledCodeGuard(self._met_compiled)
        self._compilers = torch_settings.Compilers()
        self._local = _Thread()
        self._known: dict[int, ModuleInfo] = {}
        self._learned = 0
        self._lock = threading.RLock()
        self._sights = TensorRegistry(
            session,
            find_external=find_external,
            staged=staged,
            on_error=self._give_up,
            busy=self._be_busy,
            again=session.options.level == "op",
        )
        self._sight = self._sights.sight
        self._roots: dict[str, Root] = {}
        self._objects: dict[int, ObjectSnapshot] = {}
        self._signatures: dict[tuple[Any, ...], _Ran] = {}
        self._families: dict[tuple[Any, ...], list[_Ran]] = {}
        self._programs: set[str] = set()
        self._previous: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._optimizer_hook: Any = None
        self.programs_recorded = 0
        self.programs_s = 0.0
        if model is not None:
            self._new_root(model)

    # ---- installing

    def _load_kernels(self) -> None:
        if self.session.options.keep != "none":
            # Without numba the same figures come from numpy, slower.
            with contextlib.suppress(ImportError):
                host.use_kernels()

    def install(self) -> None:
        """Start listening."""
        if self.model is not None:
            # else with the first call: programs may search what is imported while they start
            self._load_kernels()
        previous = torch.nn.Module.__call__
        is_compiling = torch.compiler.is_compiling
        # as `inside` asks; a frame of ours would go to dynamo
        callback, off = (
            get_eval_frame_callback,
            (None, False),
        )
        listener = self

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or not listener.active or callback() not in off:
                return previous(module, *args, **kwargs)
            return listener._observe(previous, module, args, kwargs)

        taken_for_torchs(__call__)
        self._previous, self._wrapper = previous, __call__
        __call__.listener = self  # type: ignore[attr-defined]
        set_call(__call__)
        if hasattr(os, "register_at_fork"):
            me = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forked(me))
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._optimizer_hook = register_optimizer_step_post_hook(
            lambda *_: self._optimizer_stepped()
        )
        self.active = True

    def remove(self) -> None:
        """Stop listening. If someone wrapped `__call__` after us, our wrapper stays in place and
        does nothing until they let go.

        Idempotent.
        """
        if self._removed:
            return
        self.active, self._removed = False, True
        self._unwrap()
        if self._changes is not None:
            self._changes.finish()
        self._trap.clear()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        self._sights.close()
        if self.programs_recorded:
            spent = f"{self.programs_s:.3f} s with what they ran, once per signature"
            self.session.note("programs", f"{self.programs_recorded} calls recorded in {spent}")
        for table in (self._known, self._roots, self._objects, self._signatures, self._families):
            table.clear()

    def drain(self) -> None:
        """Wait until what was seen so far is written."""
        with self._lock:
            self._sights.drain()

    def _unwrap(self) -> None:
        """Take off every wrapper of ours that lies on top and no longer listens. Dynamo lets go of
        one that stays below another's.
        """
        while (
            owner := getattr(torch.nn.Module.__call__, "listener", None)
        ) is not None and not owner.active:
            set_call(owner._previous)
        below: Any = self
        while below is not None and not below.active:
            dynamo_knows(below._wrapper, below._previous)
            below = getattr(below._previous, "listener", None)

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self.active = False
        self.session.failed = "forked"
        self._sights.abandon()
        self._lock = threading.RLock()  # a thread that is not here any more may have held it
        self._unwrap()
        if self._changes is not None:
            self._changes.undo()
        _ABANDONED.append(self)

    # ---- one call

    def _observe(
        self,
        previous: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        local = self._local
        if (
            local.busy
            or torch._C._get_tracing_state() is not None
            or (torch._C._len_torch_dispatch_stack() and is_traced())
        ):
            return previous(module, *args, **kwargs)
        stack = local.stack
        depth = len(stack)
        frame = None
        above = stack[-1].recorder if stack else None
        if above is not None:
            above.pause()
        local.busy = True
        try:
            with self._lock, ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                frame = self._enter(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the captured program
            self._give_up(error)
        except BaseException:  # Ctrl-C while this code ran: a call that never began
            del stack[depth:]
            raise
        finally:
            local.busy = False
        if frame is None:
            if above is not None:
                above.abandon("calls a module that could not be listened to")
            return previous(module, *args, **kwargs)
        try:
            if frame.recorder is None:
                out = previous(module, *args, **kwargs)
            else:
                with frame.recorder:
                    out = previous(module, *args, **kwargs)
        except BaseException as error:
            self._finish(frame, None, raised(error))
            raise
        if self._changes is not None:
            out = self._changes.left(frame, out)
        self._finish(frame, out, "")
        if above is not None:
            above.resume()
        if self._changes is not None:
            out = self._changes.taken(frame, args, kwargs, out)
        return out

    def _finish(self, frame: _Frame, out: Any, error: str) -> None:
        local = self._local
        local.busy = True
        try:
            with self._lock, ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                self._leave(frame, out, error)
        except Exception as ours:  # noqa: BLE001 - as above
            self._give_up(ours)
        finally:
            local.busy = False

    def _be_busy(self) -> None:
        self._local.busy = True

    def _give_up(self, error: Exception) -> None:
        self.active = False
        self._local.stack.clear()
        end_capture(self.session, error)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
        session = self.session
        if session.failed:
            self.active = False
            return None
        stack = self._local.stack
        known = self._known.get(id(module))
        if known is not None and known.ref() is not module:
            known = None
        parent = stack[-1] if stack else None
        if known is None:
            if is_compilers(module):
                return None
            if parent is None:
                if self.model is not None:
                    return None
                if not self._known:
                    self._load_kernels()
                self._new_root(module)
                if not session.active:
                    return None
                known = self._known[id(module)]
            else:
                known = self._adopt(module, parent)
        frame = _Frame()
        frame.known, frame.module, frame.parent, frame.kids, frame.operators = (
            known,
            module,
            parent,
            0,
            0,
        )
        frame.recorder = frame.signature = frame.family = frame.args = None
        frame.note, frame.refs, frame.tensors, frame.objects, frame.made = "", [], [], [], []
        frame.placements = {}
        frame.training, frame.keep = module.training, False
        frame.scope = scope = known.scope
        if parent is None:
            self._begin_root(frame, known.root, scope)
        else:
            frame.place = parent.kids
            parent.kids += 1
            frame.state, frame.root, frame.phase = parent.state, parent.root, parent.phase
            frame.step, frame.micro = parent.step, parent.micro
            frame.number = (
                str(parent.kids) if parent.number == "0" else f"{parent.number}_{parent.kids}"
            )
            frame.depth = parent.depth + 1
        counts = frame.state
        frame.occurrence = counts[scope] = counts.get(scope, -1) + 1
        frame.order = session.next_order()
        frame.wanted = session.takes_all or session.selector.wants(
            scope, known.op_type, frame.depth, frame.number, frame.step
        )
        stack.append(frame)
        if not frame.wanted:
            frame.note = "not selected"
            return frame
        session.over_budget(scope, frame.step, self._sights.waiting_bytes)
        frame.keep = session.elements_on and not session.sampled
        found = self._take_inputs(frame, args, kwargs)
        if parent is not None and parent.recorder is not None:
            parent.recorder.child_enters(frame.place, found)
        return frame

    def _begin_root(self, frame: _Frame, root: Root, scope: str) -> None:
        frame.root, frame.number, frame.depth = root, "0", 0
        root.calls += 1
        if torch._C._current_graph_task_id() != -1:
            frame.phase, frame.step, frame.micro = (
                "recompute",
                root.steps.get("", 0),
                max(root.micro - 1, 0),
            )
        else:
            frame.phase = "forward"
            training = frame.training and torch.is_grad_enabled()
            frame.step = root.steps.get(scope, 0)
            frame.micro = root.micro if training else 0
            if training:
                root.micro += 1
                root.trained = True
            else:
                root.steps[scope] = frame.step + 1
            self._sights.drain()  # the budget of a step is decided on what was written
            self.session.begin_step(root.name)
        key = (scope, frame.step, frame.micro, frame.phase)
        frame.state = root.occurrences.setdefault(key, {}) if frame.phase == "recompute" else {}

    def _optimizer_stepped(self) -> None:
        with self._lock:
            self._next_step()

    def _next_step(self) -> None:
        for root in self._roots.values():
            if root.trained:
                root.steps = {scope: step + 1 for scope, step in (root.steps or {"": 0}).items()}
                root.steps.setdefault("", 1)
                root.micro, root.trained = 0, False
                root.occurrences.clear()

    def _leave(self, frame: _Frame, out: Any, error: str) -> None:
        stack = self._local.stack
        if stack and stack[-1] is frame:
            stack.pop()
        elif any(f is frame for f in stack):
            # above it: calls that were left without an end, by a greenlet or a Ctrl-C
            while stack.pop() is not frame:
                pass
        session = self.session
        if session.failed:
            self.active = False
            return
        known, leaf = frame.known, frame.kids == 0
        program = no_program = ""
        if frame.wanted:
            program, no_program = self._take_results(frame, out, leaf, error)
            frame.recorder = None  # it refers to the frame
        above = frame.parent.recorder if frame.parent is not None else None
        if above is not None and error:
            above.abandon("an exception left a module it calls")
        elif above is not None:
            above.child_leaves(frame.place, frame.made)
        if error.startswith("_StopRecomputationError"):
            # torch's way to end a recomputation once backward has what it needs.
            error, frame.note = "", frame.note or "recomputed as far as backward needed it"
        call = Call(
            id=frame.order,
            scope=frame.scope,
            root=frame.root.name,
            step=frame.step,
            order=frame.order,
            rank=session.rank,
            micro=frame.micro,
            phase=frame.phase,
            occurrence=frame.occurrence,
            op_type=known.op_type,
            source=known.source,
            parent=frame.parent.order if frame.parent is not None else -1,
            number=frame.number,
            leaf=leaf and not frame.operators,
            training=frame.training,
            refs=tuple(frame.refs),
            arguments=frame.args or {},
            program=program,
            no_program=no_program,
            notes=(frame.note,) if frame.note else (),
            error=error,
            placements=frame.placements,
        )
        self._sights.call(call)
        if frame.parent is None:
            self._end_root(frame)

    def _take_results(self, frame: _Frame, out: Any, leaf: bool, error: str) -> tuple[str, str]:
        """Mutations and outputs of a call that ends, and (its program, why it has none)."""
        known = frame.known
        if not error:
            self._take_mutated(frame, leaf)
            self._take_outputs(frame, out)
        if known.entries is None and not (leaf and known.branches):
            self._take_params(frame)  # of a lazy module: the call made them
        if leaf and known.branches and not known.deep:
            # None of its children was called, so their parameters are its own, from now on.
            known.deep, known.entries, known.held = True, None, (-1, -1, -1)
            frame.refs = [r for r in frame.refs if not r.slot.startswith("param")]
            self._take_params(frame)
        return self._program_of(frame, error)

    def _end_root(self, frame: _Frame) -> None:
        session, name, step = self.session, frame.root.name, frame.step
        if frame.phase != "recompute":
            self._sights.emit(lambda: session.end_step(name, step))
        self._sights.prune()
        if len(self._objects) > 64:
            self._objects = {k: w for k, w in self._objects.items() if w.ref() is not None}

    # ---- names

    def _new_root(self, module: Any) -> None:
        kind = type(module).__name__
        alike = [r for r in self._roots.values() if r.name.partition("#")[0] == kind]
        root = next((r for r in alike if r.ref() is None), None)
        if root is not None:
            # A module made anew at every step (a loss) goes on where the one before it, now gone,
            # left off.
            root.ref = weakref.ref(module)
            self._learn(module, root, "")
            return
        root = Root(kind if not alike else f"{kind}#{len(alike)}", module)
        self._roots[root.name] = root
        self._learn(module, root, "")
        if not self.session.begin():
            return
        self._settings(module, root)
        if self._changes is not None:
            self._changes.met(root.name, module)

    def _learn(self, module: Any, root: Root, prefix: str) -> None:
        for name, child in module.named_modules(prefix=prefix):
            known = self._known.get(id(child))
            if known is None or known.ref() is not child or child is module:
                self._learned += 1
                self._known[id(child)] = ModuleInfo(child, name, root, self._learned, self._forget)

    def _forget(self, place: int, serial: int) -> None:
        """A module died: what is known of it would keep its tensors alive."""
        if (known := self._known.get(place)) is not None and known.serial == serial:
            del self._known[place]

    def _adopt(self, module: Any, parent: _Frame) -> ModuleInfo:
        """A module met inside a root that was not there when the root was walked."""
        root = parent.root
        top = root.ref()
        if top is not None:
            for name, child in top.named_modules():
                if child is module:
                    self._learn(module, root, name)
                    return self._known[id(module)]
        scope = (
            f"{parent.scope}.<{type(module).__name__}>"
            if parent.scope
            else f"<{type(module).__name__}>"
        )
        self._learn(module, root, scope)
        return self._known[id(module)]

    def _settings(self, module: Any, root: Root) -> None:
        """What a reader of two runs asks first: mode, dtypes, attention implementation, threads."""
        dtypes: dict[str, int] = {}
        devices: dict[str, int] = {}
        for p in module.parameters():
            dtypes[str(p.dtype).removeprefix("torch.")] = (
                dtypes.get(str(p.dtype).removeprefix("torch."), 0) + 1
            )
            devices[str(p.device)] = devices.get(str(p.device), 0) + 1
        config = getattr(module, "config", None)
        settings: dict[str, Any] = {
            "training": module.training,
            "parameter_dtypes": dtypes,
            "devices": devices,
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "inference_mode": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "torch": str(torch.__version__),
        }
        settings |= torch_settings.numerics() | settings_module.facts()
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str):
            settings["attention"] = attention
        ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        if isinstance(ends, (int, list)):
            settings["eos"] = ends
        padding = getattr(config, "pad_token_id", None)
        if isinstance(padding, int):
            settings["pad"] = padding
        if "transformers" in sys.modules:
            settings["transformers"] = getattr(sys.modules["transformers"], "__version__", "")
        self.session.note("settings", msgspec.json.encode(settings).decode(), root.name)

    # ---- tensors of a call

    def _take_inputs(
        self, frame: _Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """(slot, tensor) of everything this call was handed, recorded where inputs are wanted."""
        module = frame.module
        if isinstance(module, torch.jit.ScriptModule):
            frame.note = "scripted: inside not seen"
        elif module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            frame.note = "compiled: inside not seen"
            self._tell_compiler(frame, module)
        takes_inputs = self.session.selector.slots("input")
        self._take_params(frame)
        found: list[tuple[str, Any]] = []
        arguments: dict[str, Any] = {}
        for i, value in enumerate(args):
            self._collect(value, f"input.{i}", found, arguments, frame)
        for name, value in kwargs.items():
            self._collect(value, f"input.{name}", found, arguments, frame)
        frame.args = arguments
        shapes: list[Any] = []
        if takes_inputs:
            refs = frame.refs
            for slot, tensor in found:
                number, edge, key = self._sight(tensor, slot, frame)
                refs.append(Ref(slot, number, edge))
                shapes.append((slot, key))
                frame.tensors.append(
                    (slot, tensor, None if tensor.is_inference() else tensor._version, number)
                )
        options = self.session.options
        if takes_inputs and options.programs and options.keep == "full" and not frame.note:
            self._expect_program(frame, found, shapes, arguments)
        return found

    def _collect(
        self,
        value: Any,
        slot: str,
        found: list[tuple[str, Any]],
        arguments: dict[str, Any],
        frame: _Frame | None,
    ) -> None:
        """Tensors (in any nesting) go to `found`, simple values to `arguments`, cache-like objects
        are watched.
        """
        if type(value) is torch.Tensor and not value.is_nested:
            found.append((slot, value))
        elif isinstance(value, torch.Tensor) and not tensors.answers(value):
            arguments[slot] = f"{type(value).__name__}, {CLOSED}"
        elif isinstance(value, torch.Tensor):
            inner = tensors.plain(value) if hasattr(type(value), "__tensor_flatten__") else None
            if value.is_nested and value.layout is torch.strided:
                inner = [("values", value.values()), ("sizes", value._nested_tensor_size())]
            if inner is None or len(inner) == 1:
                found.append((slot, value))
            else:
                found += [(f"{slot}.{name}", tensor) for name, tensor in inner]
                arguments[slot] = f"{type(value).__name__}({', '.join(name for name, _ in inner)})"
        elif value is None or slot.count(".") > NESTING:
            return
        elif isinstance(value, SIMPLE):
            if not isinstance(value, str) or len(value) <= 200:
                arguments[slot] = value
        elif isinstance(value, dict):
            for k, v in value.items():
                self._collect(
                    v,
                    f"{slot}.{k if isinstance(k, SIMPLE) else type(k).__name__}",
                    found,
                    arguments,
                    frame,
                )
        elif isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                self._collect(v, f"{slot}.{i}", found, arguments, frame)
        elif isinstance(value, torch.dtype):
            arguments[slot] = str(value).removeprefix("torch.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self._collect(
                    getattr(value, field.name, None),
                    f"{slot}.{field.name}",
                    found,
                    arguments,
                    frame,
                )
        elif is_plain_object(value):
            watched = self._objects.get(id(value))
            first = watched is None or watched.ref() is not value
            if first:
                watched = self._watch(value)
            assert watched is not None
            if frame is None:
                found.extend((slot + path, tensor) for path, tensor in watched.items())
                return
            if watched.places or watched.sizes:
                frame.objects.append((slot, watched))
            watched.holder = frame.order
            # An object holds the tensors of all layers: they are listed where it is first seen and
            # at roots, else only what changed.
            fresh = (
                list(watched.items())
                if first or frame.parent is None
                else [one[:2] for one in watched.changed()]
            )
            if frame.parent is None and not first:
                watched.walk(value)
            found.extend((slot + path, tensor) for path, tensor in fresh)

    def _watch(self, value: Any) -> ObjectSnapshot:
        place, objects = id(value), self._objects

        def gone(ref: Any) -> None:
            if place in objects and objects[place].ref is ref:
                del objects[place]

        objects[place] = watched = ObjectSnapshot(value, gone)
        return watched

    def _take_mutated(self, frame: _Frame, leaf: bool) -> None:
        refs = frame.refs
        for slot, tensor, version, number in frame.tensors:
            # Inference tensors carry no version: their bytes are looked at again.
            if version is not None and tensor._version == version:
                continue
            where = "mutated" + slot[5:]
            seen, edge, _ = self._sight(tensor, where, frame)
            if seen is not number and seen != number:
                refs.append(Ref(where, seen, edge))
                frame.made.append((where, tensor))
        for slot, watched in frame.objects:
            # Of its inference tensors the bytes are looked at where it was handed to last, and at
            # the root.
            innermost = frame.parent is None or watched.holder == frame.order
            for path, tensor, certain in watched.changed(unversioned=innermost):
                where = "mutated" + slot[5:] + path
                seen, edge, _ = self._sight(tensor, where, frame, grows=(watched, path))
                if isinstance(seen, Pending):
                    seen.certain = certain
                if certain or not edge:
                    refs.append(Ref(where, seen, edge))
                    frame.made.append((where, tensor))
        for item in frame.known.entries or ():
            tensor = item.tensor()
            if item.seen is None or tensor is None or tensor.is_inference():
                continue
            # Batch norm writes its running statistics without a new version.
            if tensor._version != item.version or (
                frame.training and leaf and tensor is frame.module._buffers.get(item.slot[6:])
            ):
                where = "mutated" + item.slot[5:]
                number, edge, _ = self._sight(tensor, where, frame)
                if number == item.seen.record:
                    continue
                item.version, item.seen = tensor._version, Ref(item.slot, number, "identity")
                item.remember(tensor)
                refs.append(Ref(where, number, edge))
                frame.made.append((where, tensor))

    def _take_outputs(self, frame: _Frame, out: Any) -> None:
        if not self.session.selector.slots("output"):
            return
        found: list[tuple[str, Any]] = []
        if type(out) is torch.Tensor and not out.is_nested:
            found.append(("output.0", out))
        else:
            if isinstance(out, (list, tuple, dict)) or out is None:
                self._collect(out, "output", found, {}, None)
            else:
                self._collect(
                    out,
                    "output.0" if not dataclasses.is_dataclass(out) else "output",
                    found,
                    {},
                    None,
                )
        for slot, tensor in found:
            number, edge, _ = self._sight(tensor, slot, frame)
            frame.refs.append(Ref(slot, number, edge))
        frame.made += found

    def _take_params(self, frame: _Frame) -> None:
        """Parameters, buffers and plain tensor attributes of the module; of the modules below it
        too where those are never called.
        """
        known, module = frame.known, frame.module
        entries = known.entries
        held = len(module._parameters), len(module._buffers), len(module._modules)
        if entries is None or known.held != held:
            entries = self._held_by(known, module)
            if entries is None:  # they are made by the call itself
                return
            known.held = held
        if not entries:
            return
        refs = frame.refs
        calls = known.root.calls
        for item in entries:
            tensor = item.tensor()
            if tensor is None:
                continue
            now = None if tensor.is_inference() else tensor._version
            seen = item.seen
            same = seen is not None and item.version == now and address_of(tensor) == item.pointer
            if same and item.looked != calls:
                # `p.data.add_()` and numpy leave the version as it is: a training step changes all,
                # elsewhere a sample shows it.
                same = not (frame.training and torch.is_grad_enabled()) and item.probe == sample(
                    item.pointer, item.nbytes
                )
            item.looked = calls
            if not same or seen is None:
                number, edge, _ = self._sight(tensor, item.slot, frame, parameter=True)
                seen = Ref(item.slot, number, edge)
                item.seen = seen if edge else Ref(item.slot, number, "identity")
                item.version, item.placement = now, frame.placements.get(item.slot)
                item.remember(tensor)
            elif item.placement is not None:
                frame.placements[item.slot] = item.placement
            refs.append(seen)

    def _held_by(self, known: ModuleInfo, module: Any) -> list[HeldTensor] | None:
        """What the module holds now, None while a part of it is lazy."""
        for name in [
            n
            for n, value in module.__dict__.items()
            if known.entries is None and is_block_cache(n, value)
        ]:
            self.session.note(
                "not-captured",
                f"{name}: a cache that the module keeps, 64 MiB or more, and no parameter",
                known.scope,
            )
        known.op_type = type(module).__name__
        known.branches = any(child is not None for child in module._modules.values())
        if known.deep or not known.branches:
            held = tensors_of(module)
        else:
            tables = (module._parameters, module._buffers)
            held = [
                (f"param.{n}", t) for table in tables for n, t in table.items() if t is not None
            ]
        if any(torch.nn.parameter.is_lazy(t) for _, t in held):
            known.entries = None
            return None
        known.entries = []
        for slot, tensor in held:
            if not tensors.answers(tensor):
                self.session.note(
                    "not-captured", f"{slot}: {type(tensor).__name__}, {CLOSED}", known.scope
                )
                continue
            inner = tensors.plain(tensor) if hasattr(type(tensor), "__tensor_flatten__") else None
            if inner is None or len(inner) == 1:
                known.entries.append(HeldTensor(slot, tensor, *home_of(module, slot[6:])))
            else:
                known.entries += [
                    HeldTensor(f"{slot}.{name}", part, None, "") for name, part in inner
                ]
        return known.entries

    # ---- programs

    def _expect_program(
        self,
        frame: _Frame,
        found: list[tuple[str, Any]],
        looks: list[Any],
        arguments: dict[str, Any],
    ) -> None:
        """Listen to what this call runs, unless that is known already: once per signature, a few
        times per family.

        A signature is everything that code may decide by: modes, arguments, dtypes, shapes,
        strides. A family is a signature without its extents: when its programs are one and the
        same, extents are followed, and the next one is not recorded.
        """
        # Which inputs are one tensor belongs to it: a program recorded from it reads that one for
        # both.
        numbers = [number for _, _, _, number in frame.tensors]
        alike = (
            tuple(numbers.index(number) for number in numbers)
            if len(set(numbers)) != len(numbers)
            else ()
        )
        how = (
            frame.known.serial,
            alike,
            tuple(arguments.items()) if arguments else (),
            frame.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._is_any_autocast_enabled(),
        )
        forms = tuple(watched.form for _, watched in frame.objects)
        frame.signature = signature = (how, tuple(looks), forms)
        ran = self._signatures.get(signature)
        if ran is None:
            # An extent of one broadcasts, so it is not followed.
            kinds = tuple(
                (slot, look[0], tuple(n == 1 for n in look[1]), bool(look[2]))
                for slot, look in looks
            )
            frame.family = family = (how, kinds)
            history = self._families.setdefault(family, [])
            if (
                len(history) >= _SETTLED
                and history[-1].program
                and all(h == history[-1] for h in history[-_SETTLED:])
            ):
                ran = self._signatures[signature] = history[-1]
            elif frame.known.programs >= _MOST_PROGRAMS:
                ran = self._signatures[signature] = _Ran(
                    "", f"other extents than in its first {_MOST_PROGRAMS} programs"
                )
        if ran is not None:
            for slot in ran.reads:
                self._read(frame, slot)
        elif self.session.elements_on:
            self._record(frame, found, signature)

    def _record(
        self, frame: _Frame, found: list[tuple[str, Any]], signature: tuple[Any, ...]
    ) -> None:
        module = frame.module
        hidden = compiled_inside(module)
        if hidden:
            self._signatures[signature] = _Ran("", f"compiled ({hidden}): inside not seen")
            return
        self._trap.set()
        params = [
            (item.slot, tensor)
            for item in frame.known.entries or ()
            if (tensor := item.tensor()) is not None
        ]
        frame.started = time.perf_counter()
        frame.reads = []
        # As it is now: what the call itself hangs there is nothing that it was given.
        hanging = {
            layout(t): (slot + path, storage_ref(t))
            for slot, watched in frame.objects
            for path, t in watched.items()
        }
        frame.recorder = Recorder(
            found,
            params,
            casts=not asks_for_listeners(module),
            find=lambda tensor: self._find(frame, hanging, tensor),
        )

    def _find(
        self, frame: _Frame, hanging: dict[tuple[Any, ...], tuple[str, StorageRef]], tensor: Any
    ) -> str:
        """The slot of a tensor that a call sees without being handed it: in an object of its
        arguments, or held by a module below.
        """
        busy, self._local.busy = self._local.busy, True
        try:
            with self._lock, NoFunctions():
                place = layout(tensor)
                if (there := hanging.get(place)) is not None:
                    slot = there[0]
                    frame.reads.append(slot)
                    number, edge, _ = self._sight(tensor, slot, frame)
                    frame.refs.append(Ref(slot, number, edge))
                    return slot
                for slot, item in tensors_of(frame.module):
                    if layout(item) == place:
                        held = HeldTensor(slot, item, *home_of(frame.module, slot[6:]))
                        held.seen = Ref(slot, *self._sight(item, slot, frame, parameter=True)[:2])
                        held.version = None if item.is_inference() else item._version
                        held.remember(item)
                        frame.refs.append(held.seen)
                        if frame.known.entries is not None:
                            frame.known.entries.append(held)
                        return slot
        finally:
            self._local.busy = busy
        return ""

    def _read(self, frame: _Frame, where: str) -> None:
        """Record a tensor that hangs in an object of this call's arguments as an input of the
        call.
        """
        if any(ref.slot == where for ref in frame.refs):
            return
        for slot, watched in frame.objects:
            if where.startswith(slot) and (tensor := watched.get(where[len(slot) :])) is not None:
                number, edge, _ = self._sight(tensor, where, frame)
                frame.refs.append(Ref(where, number, edge))
                return

    def _tell_compiler(self, frame: _Frame, compiled: Any) -> None:
        told = self._compilers.met(frame.root.name, frame.scope, compiled)
        if told is not None:
            self.session.note("compiled", msgspec.json.encode(told).decode(), frame.scope)

    def _met_compiled(self, callback: Any) -> None:
        """Compiled code runs next on this thread: no mode of ours may be around it."""
        if self._local.stack and callback not in (None, False):
            self._tell_compiler(self._local.stack[-1], callback)
        for frame in self._local.stack:
            if frame.recorder is not None and frame.recorder.listening:
                frame.recorder.abandon("runs compiled code")

    def _program_of(self, frame: _Frame, error: str) -> tuple[str, str]:
        """(program id, why there is none) of a call that ends now."""
        recorder = frame.recorder
        if frame.note:
            return "", frame.note
        if recorder is None:
            if frame.signature is None:
                return "", "programs were not recorded"
            ran = self._signatures.get(frame.signature) or _Ran(
                "", "first seen when elements were no longer kept"
            )
            return ran.program, ran.reason
        if error:
            recorder.abandon()
            return "", "the call raised"
        recording = recorder.finish(frame.made)
        self.programs_recorded += 1
        self.programs_s += time.perf_counter() - frame.started
        if recording.program is None:
            result = _Ran("", recording.reason)
        else:
            program = recording.program
            if program.id not in self._programs:
                self._programs.add(program.id)
                frame.known.programs += 1
                constants = tuple(
                    self._sight(t, f"constant.{i}", frame)[0]
                    for i, t in enumerate(recording.constants)
                )
                self._sights.emit(
                    lambda: self.session.program(
                        msgspec.structs.replace(
                            program, constants=tuple(int(getattr(c, "id", c)) for c in constants)
                        )
                    )
                )
            result = _Ran(program.id, "", tuple(frame.reads))
        assert frame.signature is not None
        self._signatures[frame.signature] = result
        if frame.family is not None:
            self._families[frame.family].append(result)
        return result.program, result.reason


def _forked(listener: weakref.ref[Listener]) -> None:
    mine = listener()
    if mine is not None and mine._wrapper is not None:
        mine.abandon()


# Kept so that nothing of them is finalised in the child: their buffers belong to the parent.
_ABANDONED: list[Listener] = []
