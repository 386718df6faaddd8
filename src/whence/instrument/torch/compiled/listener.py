"""Listens to compiled graphs: every execution of a graph of inductor's with the tensors inside it,
beside the modules that stay eager.

`torch.compile` is instrumented by having its backend hand each graph to us instead of to inductor
(`inductor_taps` has the patches). Each execution is a call of kind "graph" below the module that
ran it, each tensor in it a call of kind "operator" below that. The first execution of a graph is
done a second time with nothing taken, on clones: whether the bits differ is the observer effect.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.session import Session
from whence.instrument.torch.compiled import what_returned
from whence.instrument.torch.compiled.graph_compiler import GraphCompiler
from whence.instrument.torch.compiled.graph_runs import GraphRuns, GraphThread
from whence.instrument.torch.compiled.module_paths import ModulePaths
from whence.instrument.torch.compiled.results import Results
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.module_info import ModuleRoot
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.program_cache import ProgramCache
from whence.instrument.torch.regions import Region, Regions


class GraphListener(Listener):
    """A `Listener` that also records what compiled graphs compute.

    folder: of the run, for the texts of graphs. program: instrument every torch.compile of the
    process, not only what is told to.
    """

    def __init__(
        self, session: Session, model: Any = None, *, folder: str, program: bool = False, **how: Any
    ) -> None:
        self._everything = program
        self._patched: list[tuple[Any, Any, Any]] = []
        super().__init__(session, model, thread=GraphThread(), **how)
        self.programs = _ModulePrograms(
            session, self.registry, self.frames, self._compiled_code, self.writer
        )
        paths = ModulePaths(self.frames, self.modules)
        self._compiler = GraphCompiler(session, self.frames, paths, folder)
        self.instrumenting = self._compiler.instrumenting
        self._regions = Regions(session, self.registry, self.thread)
        self._runs = GraphRuns(
            session,
            self.registry,
            self.frames,
            self.writer,
            paths=paths,
            region=self._region,
            tell_mode=self._compiler.tell_mode,
        )
        self._compiler.runs = self._runs
        wanted = what_returned.asked() if program else None
        self._results = Results(*wanted) if wanted is not None else None

    def install(self) -> None:
        """Start listening, and of a whole program have its torch.compile instrumented."""
        super().install()
        if not self._everything:
            return
        listener = self
        kind = torch._TorchCompileInductorWrapper
        call = kind.__call__

        @functools.wraps(call)
        def __call__(wrapper: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not listener.active:
                return call(wrapper, *args, **kwargs)
            with listener.instrumenting():
                return call(wrapper, *args, **kwargs)

        kind.__call__ = __call__
        self._patched.append((kind, call, __call__))
        wrapper = getattr(torch, "_TorchCompileWrapper", None)
        if wrapper is not None:
            original = wrapper.__call__

            @functools.wraps(original)
            def __call__(wrapper: Any, gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
                if not listener.active or isinstance(
                    getattr(wrapper, "compiler_fn", None), _Inductor
                ):
                    return original(wrapper, gm, inputs, *args, **kwargs)
                compiles = listener._compiler.compiles
                with listener.instrumenting(gm):
                    out = original(wrapper, gm, inputs, *args, **kwargs)
                    return (
                        out
                        if listener._compiler.compiles > compiles
                        else listener._compiler.other_backend(wrapper, gm, inputs, out)
                    )

            wrapper.__call__ = __call__
            self._patched.append((wrapper, original, __call__))
        if self._results is not None:
            self._results.install()

    def remove(self) -> None:
        """Stop listening. What was compiled meanwhile keeps its code, which takes nothing any
        more.
        """
        if not self._removed:
            self.active = False
            if self._results is not None:
                self._results.finish(self._compiler.switched)
            for kind, original, replacement in self._patched:
                if kind.__call__ is replacement:
                    kind.__call__ = original
            if not self.session.failed:
                with self.frames.lock:
                    self._regions.close_all()
            self._runs.clear()
        super().remove()

    def abandon(self) -> None:
        """Stop without writing more: in a forked child, whose own listener watches its results."""
        if self._results is not None:
            self._results.remove()
        super().abandon()

    def _begin_root(self, frame: ModuleFrame, root: ModuleRoot) -> None:
        self._regions.close()
        super()._begin_root(frame, root)
        if frame.phase != "recompute":
            self.thread.last = root, frame.step, frame.micro, frame.counts

    def _optimizer_stepped(self, optimizer: Any, is_skipped: bool) -> None:
        with self.frames.lock:
            self._regions.close()
        super()._optimizer_stepped(optimizer, is_skipped)

    def _region(self, kind: str) -> Region:
        """The region of a graph that runs outside any module."""
        thread, roots = self.thread, self.modules.roots
        if thread.last is None and len(roots) == 1:  # a backward pass on a thread of its own
            root = next(iter(roots.values()))
            step = max(0, root.steps.get("", 0) - (not root.trained))
            thread.last = root, step, max(0, root.micro - 1), {}
        elif thread.last is None:
            thread.last = self._regions.nowhere, 0, 0, {}
        return self._regions.enter(kind, *thread.last)


class _ModulePrograms(ProgramCache):
    """Programs of modules, but of those that run graphs."""

    def program_of(self, frame: ModuleFrame, error: str) -> tuple[str, str]:
        if frame.operators and not frame.note:
            return "", "its graphs are calls of their own"
        return super().program_of(frame, error)


def compiled_by(
    model: Any,
    listen: Callable[[Any], GraphListener],
    *,
    torch_mode: str | None = None,
    options: Any = None,
    dynamic: Any = None,
    fullgraph: bool = False,
) -> Any:
    """`torch.compile(model)` with what `listen(compiled)` returns listening. The result is a
    context manager and has `close()`.
    """
    backend = _Inductor(torch_mode, options, dynamic)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    kind = type(compiled)

    class Compiled(kind):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            """End the capture. The module goes on as it was compiled. Idempotent."""
            atexit.unregister(self.close)
            backend.close()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            self.close()

    Compiled.__name__, Compiled.__qualname__, Compiled.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    compiled.__class__ = Compiled
    backend.listener = listen(compiled)
    atexit.register(compiled.close)
    return compiled


def backend_with(listener: GraphListener, ended: Callable[[], None] | None = None) -> Any:
    """Inductor for `torch.compile`, its graphs told to a listener that is installed; `close()` ends
    it, with its session.

    ended: called then, in the process that made it.
    """
    backend = _Inductor(None, None, None)
    backend.listener, backend.ended, backend.process = listener, ended, os.getpid()
    atexit.register(backend.close)
    return backend


class _Inductor(torch._TorchCompileInductorWrapper):  # type: ignore[misc]
    """What `torch.compile` takes as backend: inductor, its graphs instrumented as long as a
    listener is there.

    Equal to itself only: dynamo would take code compiled for one capture for another.
    """

    listener: GraphListener | None = None
    ended: Callable[[], None] | None = None
    process = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listener = self.listener
        if listener is None or not listener.active:
            return super().__call__(*args, **kwargs)
        with listener.instrumenting():
            return super().__call__(*args, **kwargs)

    def close(self) -> None:
        """End the capture. What was compiled goes on as it is. Idempotent."""
        if self.listener is not None:
            atexit.unregister(self.close)
            listener, self.listener = self.listener, None
            listener.remove()
            listener.session.close()
            if self.ended is not None and self.process == os.getpid():
                self.ended()

    def __eq__(self, other: Any) -> bool:
        return self is other

    __hash__ = object.__hash__
