"""Listens to the models that OpenVINO compiles while installed: the methods of its classes are
wrapped, and call what they were, with what they were given.

Nothing that fails here reaches the program, and what a model returns is handed on as it is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from whence.instrument.engines.wrapping import Wrappers
from whence.instrument.openvino.registry import Registry
from whence.instrument.openvino.settings import Compiled
from whence.instrument.openvino.watched import InferInProgress, WatchedModel
from whence.instrument.session import Session
from whence.instrument.wording import raised


class _Running(NamedTuple):
    """An inference in progress."""

    watched: WatchedModel
    step: InferInProgress
    request: Any


class _Tagged(NamedTuple):
    """What a program hands to its callback, with the request of a queue that it is of."""

    key: Any
    userdata: Any


class Listener:
    """Records what models infer. model: only this one (compiled, or one that the program is to
    compile); None: every one that is compiled or infers. read_onnx: see `Registry`.
    """

    def __init__(
        self, session: Session, model: Any = None, *, read_onnx: Callable[[Any], Any]
    ) -> None:
        self.session = session
        self._only = model
        self._wrappers = Wrappers(session)
        self._registry = Registry(session, self._wrappers.own, read_onnx)
        self._sources: dict[int, tuple[Any, Compiled]] = {}
        self._running: dict[Any, _Running] = {}
        # queues that call the program back by way of here
        self._answering: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # requests that have inferred

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        import openvino

        self._wrappers.active = True
        self.session.load_kernels()
        request, queue = openvino.InferRequest, openvino.AsyncInferQueue
        for owner, name, method in (
            (request, "infer", self._infer),
            (request, "start_async", self._start_async),
            (request, "wait", self._wait),
            (request, "wait_for", self._wait),
            (request, "set_callback", self._set_callback),
            (request, "reset_state", self._reset_state),
            (openvino.CompiledModel, "create_infer_request", self._create_request),
            (queue, "__init__", self._queue_init),
            (queue, "start_async", self._queue_start),
            (queue, "wait_all", self._queue_wait),
            (queue, "set_callback", self._queue_callback),
        ):
            self._wrap(owner, name, method)
        if self._only is not None and hasattr(self._only, "create_infer_request"):
            with self._wrappers.own():
                self._registry.adopt(self._only, Compiled())
            return
        self._wrap(openvino.Core, "compile_model", self._compile_model)
        self._wrap(openvino.Core, "import_model", self._import_model)
        if self._only is None:
            self._wrap(openvino.Core, "read_model", self._read_model)

    def _wrap(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        holder = next((kind for kind in owner.__mro__ if name in vars(kind)), None)
        if holder is not None:
            self._wrappers.wrap(holder, name, method)

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        with self._wrappers.own():
            for key in list(self._running):
                self._end(key)
        self._wrappers.put_back()
        with self._wrappers.own():
            self._registry.close()
        self._sources.clear()

    def aside(self, *, aside: bool = True) -> AbstractContextManager[None]:
        """A model is called by whoever holds it, never inside of another one."""
        return nullcontext()

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self._wrappers.forked()
        self._running.clear()
        self._registry.forget()
        self.remove()

    # ---- models

    def _read_model(
        self, previous: Callable[..., Any], core: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(core, *args, **kwargs)
        with self._wrappers.own():
            source = (*args, kwargs.get("model"))[0]
            raw = _raw(out)
            place = id(raw)
            gone = weakref.ref(raw, lambda _: self._sources.pop(place, None))
            self._sources[place] = gone, _source_of(source)
        return out

    def _compile_model(
        self, previous: Callable[..., Any], core: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(core, *args, **kwargs)
        with self._wrappers.own():
            arguments = {**dict(zip(("model", "device_name", "config"), args)), **kwargs}
            model = arguments.get("model")
            if self._only is None or _raw(model) is _raw(self._only):
                how = _source_of(model)
                if hasattr(model, "get_ordered_ops"):
                    how = self._sources.get(id(_raw(model)), (None, Compiled()))[1]
                how = how._replace(
                    core=core,
                    device=str(arguments.get("device_name") or ""),
                    config=arguments.get("config"),
                )
                self._registry.adopt(out, how, self._copy(core, model, arguments.get("weights")))
        return out

    def _copy(self, core: Any, model: Any, weights: Any) -> Any:
        """The model before it is compiled, which nobody changes."""
        if not self._registry.observes:
            return None
        if hasattr(model, "get_ordered_ops"):
            import openvino

            return openvino.Model(_raw(model)).clone()
        return core.read_model(model) if weights is None else core.read_model(model, weights)

    def _import_model(
        self, previous: Callable[..., Any], core: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(core, *args, **kwargs)
        with self._wrappers.own():
            if self._only is None:
                given = {**dict(zip(("model_stream", "device_name", "config"), args)), **kwargs}
                how = Compiled("", b"", core, str(given.get("device_name") or ""))
                self._registry.adopt(out, how._replace(config=given.get("config")))
        return out

    # ---- one request

    def _create_request(
        self, previous: Callable[..., Any], compiled_model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(compiled_model, *args, **kwargs)
        with self._wrappers.own():
            self._registry.known(out, out)  # the program may keep the request alone
        return out

    def _infer(self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ran(_request_key(request), request, previous, (request, *args), kwargs)

    def _ran(
        self, key: Any, request: Any, previous: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self._begin(key, request)
        try:
            out = previous(*args, **kwargs)
        except BaseException as error:  # of the program: recorded, and raised again
            self._ended(key, raised(error))
            raise
        self._ended(key)
        return out

    def _start_async(
        self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        key = _request_key(request)
        self._begin(key, request)
        try:
            return previous(request, *args, **kwargs)
        except BaseException as error:
            self._ended(key, raised(error))
            raise

    def _wait(self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            out = previous(request, *args, **kwargs)
        except BaseException as error:
            self._ended(_request_key(request), raised(error))
            raise
        if out is not False:  # wait_for: it is not ready
            self._ended(_request_key(request))
        return out

    def _set_callback(
        self, previous: Callable[..., Any], request: Any, callback: Any, *args: Any, **kwargs: Any
    ) -> Any:
        key = _request_key(request)

        def called(*given: Any) -> Any:
            self._ended(key)
            return callback(*given)

        return previous(request, called, *args, **kwargs)

    def _reset_state(
        self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(request, *args, **kwargs)
        with self._wrappers.own():
            self._begun.discard(request)
        return out

    # ---- a queue of requests

    def _queue_init(
        self, previous: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any
    ) -> None:
        previous(queue, *args, **kwargs)
        with self._wrappers.own():
            self._registry.known(queue[0], queue)

    def _queue_start(
        self, previous: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # blocks until one is free, as the method itself does, which takes the same
        place = queue.get_idle_request_id()
        key = (id(queue), place)
        self._begin(key, queue[place], queue)
        if queue in self._answering:
            given = {**dict(zip(("inputs", "userdata", "share_inputs"), args)), **kwargs}
            args, kwargs = (), given | {"userdata": _Tagged(key, given.get("userdata"))}
        try:
            return previous(queue, *args, **kwargs)
        except BaseException as error:
            self._ended(key, raised(error))
            raise

    def _queue_wait(
        self, previous: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any
    ) -> Any:
        out = previous(queue, *args, **kwargs)
        for key in [k for k in self._running if k[0] == id(queue)]:
            self._ended(key)
        return out

    def _queue_callback(
        self, previous: Callable[..., Any], queue: Any, callback: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def called(request: Any, userdata: Any) -> Any:
            if isinstance(userdata, _Tagged):
                self._ended(userdata.key)
                userdata = userdata.userdata
            return callback(request, userdata)

        out = previous(queue, called, *args, **kwargs)
        with self._wrappers.own():
            self._answering.add(queue)
        return out

    # ---- steps

    def _begin(self, key: Any, request: Any, holder: Any = None) -> None:
        """A request is about to infer: what it did before is at its end."""
        with self._wrappers.own():
            self._end(key)
            watched = self._of(request, request if holder is None else holder)
            if watched is not None:
                step = watched.begin(request, is_new=request not in self._begun)
                self._begun.add(request)
                self._running[key] = _Running(watched, step, request)

    def _ended(self, key: Any, error: str = "") -> None:
        with self._wrappers.own():
            self._end(key, error)

    def _end(self, key: Any, error: str = "") -> None:
        running = self._running.pop(key, None)
        if running is None:
            return
        if self.session.failed:
            self._wrappers.active = False
            return
        running.watched.end(running.step, running.request, error)

    def _of(self, request: Any, holder: Any) -> WatchedModel | None:
        if self.session.failed:
            self._wrappers.active = False
            return None
        watched = self._registry.known(request, holder)
        if watched is not None or self._only is not None:
            return watched
        compiled_model = request.get_compiled_model()
        self._registry.adopt(compiled_model, Compiled())
        return self._registry.known(request, holder)


def _raw(model: Any) -> Any:
    """The model that a Python object stands for: several may be of one."""
    return getattr(model, "_Model__model", model)


def _source_of(model: Any) -> Compiled:
    """Where a model was read from."""
    if isinstance(model, (str, os.PathLike)):
        text = os.fspath(model)
        return Compiled(path=text) if not text.lstrip().startswith("<") else Compiled()
    if isinstance(model, bytes):
        return Compiled(content=model)
    if hasattr(model, "getvalue"):
        return Compiled(content=bytes(model.getvalue()))
    return Compiled()


def _request_key(request: Any) -> tuple[int, int]:
    return id(request), -1
