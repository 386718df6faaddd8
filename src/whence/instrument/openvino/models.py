"""Listens to the models that OpenVINO compiles while installed: the methods of its classes are
wrapped, and call what they were, with what they were given.

Nothing that fails here reaches the program, and what a model returns is handed on as it is.

`_Registry` holds the compiled models that are listened to, each with its root.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from whence.instrument.engines.roots import Roots
from whence.instrument.engines.tensors import Tensors
from whence.instrument.engines.wanted import wanted_values
from whence.instrument.engines.wrapping import Wrappers
from whence.instrument.openvino import settings as model_facts
from whence.instrument.openvino.executed import executed
from whence.instrument.openvino.graph_plan import planned
from whence.instrument.openvino.observer import Observer
from whence.instrument.openvino.settings import Compiled
from whence.instrument.openvino.source_graph import source_graph
from whence.instrument.openvino.values import port_name
from whence.instrument.openvino.watched import InferInProgress, Inside, WatchedModel
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
    compile); None: every one that is compiled or infers. read_onnx: see `_Registry`.
    """

    def __init__(
        self, session: Session, model: Any = None, *, read_onnx: Callable[[Any], Any]
    ) -> None:
        self.session = session
        self._only = model
        self._wrappers = Wrappers(session)
        self._registry = _Registry(session, self._wrappers.own, read_onnx)
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


_ONNX = ".onnx"
_EARLIER = (
    "it was compiled before the capture began, and OpenVINO does not hand out what from; compile "
    "it inside of the block, or capture the program with `whence run`"
)


class _Registry:
    """Compiled models by their first output, which every Python object of one model shares.

    own: makes the context in which code of the listener runs. read_onnx(path or bytes): a model of
    ONNX, as the readers have it.
    """

    def __init__(
        self, session: Session, own: Callable[[], Any], read_onnx: Callable[[Any], Any]
    ) -> None:
        self._session, self._own, self._read_onnx = session, own, read_onnx
        # else only what a model is given and returns
        observes = session.options.level not in ("io", "logits")
        self.observes = observes and session.options.max_depth != 0
        self._tensors = Tensors(session)
        self._watched: dict[str, WatchedModel] = {}
        self._holders: dict[str, set[int]] = {}
        self._roots = Roots()
        self._begun = False

    def known(self, request: Any, holder: Any) -> WatchedModel | None:
        """The model of a request, when it is listened to already. holder: what of the program keeps
        the request: itself, or a queue.
        """
        key = _key(request)
        watched = self._watched.get(key)
        if watched is not None:
            self._hold(key, holder)
        return watched

    def adopt(self, compiled_model: Any, how: Compiled, source: Any = None) -> WatchedModel | None:
        """Listen to a compiled model from now on; None where this process is not asked for.
        source: a copy of what it was compiled from, None where that is not known.
        """
        session = self._session
        if not self._begun:
            self._begun = True
            session.begin()
        if session.failed:
            return None
        key = _key(compiled_model)
        root = self._roots.of(compiled_model, model_facts.name_of(how))
        watched = WatchedModel(session, self._tensors, root, compiled_model)
        root.ref = lambda: self._watched.get(key)
        graph = None if source is None else source_graph(source, self._first_values(how))
        facts = model_facts.of_model(compiled_model, how, graph)
        session.note("settings", msgspec.json.encode(facts).decode(), root.name)
        if self.observes:
            watched.inside = self._inside(compiled_model, how, source, graph, root.name)
        self._watched[key] = watched
        self._hold(key, compiled_model)
        return watched

    def close(self) -> None:
        """Let go of all models. Idempotent."""
        for watched in list(self._watched.values()):
            watched.close()
        self.forget()

    def forget(self) -> None:
        """In a forked child: models beside the program's belong to the parent."""
        self._watched.clear()
        self._holders.clear()

    def _hold(self, key: str, holder: Any) -> None:
        """A model is listened to as long as one of its Python objects lives."""
        place = id(holder)
        holders = self._holders.setdefault(key, set())
        if place in holders:
            return
        holders.add(place)

        def gone() -> None:
            holders.discard(place)
            if not holders and self._holders.get(key) is holders:
                del self._holders[key]
                watched = self._watched.pop(key, None)
                if watched is not None:
                    with self._own():
                        watched.close()

        weakref.finalize(holder, gone).atexit = False

    def _inside(
        self, compiled_model: Any, how: Compiled, source: Any, graph: Any, root: str
    ) -> Inside | None:
        """What a model computes inside; None, with a note that says why, where that cannot be
        seen.
        """
        if source is None:
            self._unseen(_EARLIER, root)
            return None
        if graph.draws:
            drawn = ", ".join(graph.draws)
            why = f"{drawn} draws random numbers, and a model beside draws others"
            self._unseen(why, root)
            return None
        try:
            names = {node.friendly for node in graph.nodes}
            plan = planned(graph, executed(compiled_model.get_runtime_model(), names))
        except Exception as error:  # noqa: BLE001 - what devices raise has many types
            self._unseen(f"what it executes cannot be had ({raised(error)})", root)
            return None
        outputs = {port_name(p, k) for k, p in enumerate(source.outputs)}
        outputs |= {graph.nodes[place].names[port] for place, port in graph.ends}
        wanted = wanted_values(self._session, plan.nodes, outputs)
        return Inside(graph, source, plan, Observer(how, source, plan, wanted))

    def _first_values(self, how: Compiled) -> dict[str, str]:
        """Of a file of ONNX: by value the first that its node makes."""
        if not how.content and not how.path.endswith(_ONNX):
            return {}
        try:
            nodes = self._read_onnx(how.content or how.path).graph.nodes
        except (OSError, ValueError):  # of another format, or gone: names serve without it
            return {}
        made = [[v for v in node.outputs if v] for node in nodes]
        return {value: values[0] for values in made for value in values}

    def _unseen(self, why: str, root: str) -> None:
        text = f"only inputs and outputs are recorded: {why}"
        self._session.note("inside-not-seen", text, root, aloud=True)


def _key(holder: Any) -> str:
    """The same for all Python objects of one compiled model: the name of its first result, which no
    other node of the process has.
    """
    asked = getattr(holder, "get_compiled_model", None)
    model = holder if asked is None else asked()
    return str(model.outputs[0].get_node().get_name())
