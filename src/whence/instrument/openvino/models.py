"""Listens to the models that OpenVINO compiles while installed: the methods of its classes are
wrapped, and call what they were, with what they were given.

Nothing that fails here reaches the program, and what a model returns is handed on as it is.

`_Registry` holds the compiled models that are listened to, each with its root.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from whence.dtypes import unit_roundoff
from whence.frameworks.onnx_names import scope_of
from whence.instrument.engines.effect import Observer, Shown, Words
from whence.instrument.engines.files import facts_of_bytes, facts_of_file, files_beside
from whence.instrument.engines.tensors import Tensors
from whence.instrument.engines.values import Seen
from whence.instrument.engines.wanted import wanted_values
from whence.instrument.engines.watched import (
    ModelRoot,
    NodeForm,
    Registry,
    StepInProgress,
    Watched,
    only_boundary,
)
from whence.instrument.engines.wrapping import Wrappers
from whence.instrument.openvino.source_graph import SourceGraph, SourceNode, source_graph
from whence.instrument.openvino.values import dtype_of, form_of, of_bytes, of_tensor, port_name
from whence.instrument.session import Session
from whence.instrument.wording import raised
from whence.records.marks import EngineModel, Mark, mark


class _Running(NamedTuple):
    """One inference in progress."""

    watched: WatchedModel
    step: InferInProgress
    request: Any


class _Tagged(NamedTuple):
    """The program's userdata for its callback, with the key of the request in a queue."""

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
        wrappers, request, queue = self._wrappers, openvino.InferRequest, openvino.AsyncInferQueue
        wrappers.wrap(request, "infer", self._infer)
        wrappers.wrap(request, "start_async", self._start_async)
        wrappers.wrap(request, "wait", self._wait)
        wrappers.wrap(request, "wait_for", self._wait)
        wrappers.wrap(request, "set_callback", self._set_callback)
        wrappers.note(request, "reset_state", self._reset_state)
        wrappers.note(openvino.CompiledModel, "create_infer_request", self._created_request)
        wrappers.note(queue, "__init__", self._made_queue)
        wrappers.wrap(queue, "start_async", self._queue_start)
        wrappers.note(queue, "wait_all", self._queue_waited)
        wrappers.wrap(queue, "set_callback", self._queue_callback)
        if self._only is not None and hasattr(self._only, "create_infer_request"):
            with self._wrappers.own():
                self._registry.adopt(self._only, Compiled())
            return
        wrappers.note(openvino.Core, "compile_model", self._compiled_model)
        if self._only is None:
            wrappers.note(openvino.Core, "import_model", self._imported_model)
            wrappers.note(openvino.Core, "read_model", self._read_model)

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

    def _read_model(self, out: Any, core: Any, *args: Any, **kwargs: Any) -> None:
        source = (*args, kwargs.get("model"))[0]
        raw = _raw(out)
        place = id(raw)
        gone = weakref.ref(raw, lambda _: self._sources.pop(place, None))
        self._sources[place] = gone, _source_of(source)

    def _compiled_model(self, out: Any, core: Any, *args: Any, **kwargs: Any) -> None:
        arguments = {**dict(zip(("model", "device_name", "config"), args)), **kwargs}
        model = arguments.get("model")
        if self._only is not None and _raw(model) is not _raw(self._only):
            return
        how = _source_of(model)
        if hasattr(model, "get_ordered_ops"):
            how = self._sources.get(id(_raw(model)), (None, Compiled()))[1]
        how = how._replace(
            core=core,
            device=str(arguments.get("device_name") or ""),
            config=arguments.get("config"),
        )
        self._registry.adopt(out, how, self._copy(core, model, arguments.get("weights")))

    def _copy(self, core: Any, model: Any, weights: Any) -> Any:
        """The model before it is compiled, which nobody changes."""
        if not self._registry.observes:
            return None
        if hasattr(model, "get_ordered_ops"):
            import openvino

            return openvino.Model(_raw(model)).clone()
        return core.read_model(model) if weights is None else core.read_model(model, weights)

    def _imported_model(self, out: Any, core: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(("model_stream", "device_name", "config"), args)), **kwargs}
        how = Compiled("", b"", core, str(given.get("device_name") or ""))
        self._registry.adopt(out, how._replace(config=given.get("config")))

    # ---- one request

    def _created_request(self, out: Any, compiled_model: Any) -> None:
        self._registry.known(out, out)  # the program may keep the request alone

    def _infer(self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        key = _request_key(request)
        self._begin(key, request)
        ended = partial(self._returned, key)
        return self._wrappers.call(previous, (request, *args), kwargs, ended)

    def _start_async(
        self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        key = _request_key(request)
        self._begin(key, request)
        ended = partial(self._started, key)
        return self._wrappers.call(previous, (request, *args), kwargs, ended)

    def _wait(self, previous: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        ended = partial(self._returned, _request_key(request))
        return self._wrappers.call(previous, (request, *args), kwargs, ended)

    def _returned(self, key: Any, out: Any, error: str) -> None:
        if error or out is not False:  # wait_for: it is not ready
            self._end(key, error)

    def _started(self, key: Any, out: Any, error: str) -> None:
        if error:
            self._end(key, error)

    def _set_callback(
        self, previous: Callable[..., Any], request: Any, callback: Any, *args: Any, **kwargs: Any
    ) -> Any:
        key = _request_key(request)

        def called(*given: Any) -> Any:
            self._ended(key)
            return callback(*given)

        return previous(request, called, *args, **kwargs)

    def _reset_state(self, out: Any, request: Any) -> None:
        self._begun.discard(request)

    # ---- a queue of requests

    def _made_queue(self, out: Any, queue: Any, *args: Any, **kwargs: Any) -> None:
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
        ended = partial(self._started, key)
        return self._wrappers.call(previous, (queue, *args), kwargs, ended)

    def _queue_waited(self, out: Any, queue: Any) -> None:
        for key in [k for k in self._running if k[0] == id(queue)]:
            self._end(key)

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
        """Begin an inference of a request, and end its previous one."""
        with self._wrappers.own():
            self._end(key)
            watched = self._of(request, request if holder is None else holder)
            if watched is not None:
                step = watched.begin(request, is_new=request not in self._begun)
                self._begun.add(request)
                self._running[key] = _Running(watched, step, request)

    def _ended(self, key: Any) -> None:
        with self._wrappers.own():
            self._end(key)

    def _end(self, key: Any, error: str = "") -> None:
        running = self._running.pop(key, None)
        if running is None or self.session.failed:
            return
        running.watched.end(running.step, running.request, error)

    def _of(self, request: Any, holder: Any) -> WatchedModel | None:
        watched = self._registry.known(request, holder)
        if watched is not None or self._only is not None:
            return watched
        compiled_model = request.get_compiled_model()
        self._registry.adopt(compiled_model, Compiled())
        return self._registry.known(request, holder)


def _raw(model: Any) -> Any:
    """The native model behind a Python object; several objects may share one."""
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


class _Registry(Registry):
    """Compiled models by their first output, which every Python object of one model shares.

    read_onnx(path or bytes): a model of ONNX, as the readers have it.
    """

    def __init__(
        self, session: Session, own: Callable[[], Any], read_onnx: Callable[[Any], Any]
    ) -> None:
        super().__init__(session, own)
        self._read_onnx, self._tensors = read_onnx, Tensors(session)
        self._holders: dict[str, set[int]] = {}

    def known(self, request: Any, holder: Any) -> WatchedModel | None:
        """The observed model of a request, None if it is not observed yet. holder: the object of
        the program that keeps the request: the request itself or a queue.
        """
        key = _key(request)
        watched: WatchedModel | None = self._watched.get(key)
        if watched is not None:
            self._hold(key, holder)
        return watched

    def adopt(self, compiled_model: Any, how: Compiled, source: Any = None) -> WatchedModel | None:
        """Start observing a compiled model; None where this process is not to be captured. source:
        a copy of the model it was compiled from, None if unknown.
        """
        session = self._session
        if not self.begin():
            return None
        key = _key(compiled_model)
        root = self.root(compiled_model, name_of(how))
        watched = WatchedModel(session, self._tensors, root, compiled_model)
        root.ref = lambda: self._watched.get(key)
        graph = None if source is None else source_graph(source, self._first_values(how))
        facts = of_model(compiled_model, how, graph)
        session.note("settings", msgspec.json.encode(facts).decode(), root.name)
        if self.observes:
            watched.inside = self._inside(compiled_model, how, source, graph, root.name)
        self._watched[key] = watched
        self._hold(key, compiled_model)
        return watched

    def forget(self) -> None:
        """Forget all models."""
        super().forget()
        self._holders.clear()

    def _hold(self, key: str, holder: Any) -> None:
        """Keep observing a model as long as one of its Python objects lives."""
        place = id(holder)
        holders = self._holders.setdefault(key, set())
        if place in holders:
            return
        holders.add(place)
        watched = self._watched[key]

        def gone() -> None:
            holders.discard(place)
            if not holders and self._holders.get(key) is holders:
                del self._holders[key]
                self.gone(key, watched)

        weakref.finalize(holder, gone).atexit = False

    def _inside(
        self, compiled_model: Any, how: Compiled, source: Any, graph: Any, root: str
    ) -> Inside | None:
        """What a model computes inside; None, with a note that says why, where that cannot be
        seen.
        """
        if source is None:
            only_boundary(self._session, _EARLIER, root)
            return None
        if graph.draws:
            drawn = ", ".join(graph.draws)
            why = f"{drawn} draws random numbers, and a model beside draws others"
            only_boundary(self._session, why, root)
            return None
        try:
            names = {node.friendly for node in graph.nodes}
            plan = planned(graph, executed(compiled_model.get_runtime_model(), names))
        except Exception as error:  # noqa: BLE001 - what devices raise has many types
            why = f"what it executes cannot be had ({raised(error)})"
            only_boundary(self._session, why, root)
            return None
        outputs = {port_name(p, k) for k, p in enumerate(source.outputs)}
        outputs |= {graph.nodes[place].names[port] for place, port in graph.ends}
        wanted = wanted_values(self._session, plan.nodes, outputs)
        return Inside(source, plan, ModelObserver(how, source, plan, wanted))

    def _first_values(self, how: Compiled) -> dict[str, str]:
        """For an ONNX file: name of a value -> name of the first output of the same node."""
        if not how.content and not how.path.endswith(_ONNX):
            return {}
        try:
            nodes = self._read_onnx(how.content or how.path).graph.nodes
        except (OSError, ValueError):  # of another format, or gone: names serve without it
            return {}
        made = [[v for v in node.outputs if v] for node in nodes]
        return {value: values[0] for values in made for value in values}


def _key(holder: Any) -> str:
    """A key that all Python objects of one compiled model share: the name of its first result's
    node, which is unique in the process.
    """
    asked = getattr(holder, "get_compiled_model", None)
    model = holder if asked is None else asked()
    return str(model.outputs[0].get_node().get_name())


# One compiled model of the program: what it is given and returns, and the values of its graph.

STATE = "state."
"""Prefix of a variable's name in slots."""


class Inside(NamedTuple):
    """The graph that a model was compiled from. model: the uncompiled model."""

    model: Any
    plan: GraphPlan
    observer: ModelObserver


class InferInProgress(StepInProgress):
    """One inference. states: tensors of the variables before it, None where they have the values of
    a new request.
    """

    def __init__(self, order: int, step: int) -> None:
        super().__init__(order, step)
        self.states: dict[str, Any] | None = None
        self.inputs: dict[int, Any] = {}


class WatchedModel(Watched):
    """Records the inferences of one compiled model. inside: None where only inputs and outputs are
    taken.
    """

    KIND = EngineModel.OPENVINO.value
    NO_PROGRAM = "nodes of OpenVINO are not recorded as programs"

    def __init__(
        self, session: Session, tensors: Tensors, root: ModelRoot, compiled_model: Any
    ) -> None:
        super().__init__(session, tensors, root)
        self._inputs = [port_name(p, k) for k, p in enumerate(compiled_model.inputs)]
        self._outputs = [port_name(p, k) for k, p in enumerate(compiled_model.outputs)]

    # ---- a step

    def begin(self, request: Any, *, is_new: bool) -> InferInProgress:
        """Begin an inference. is_new: its variables have the values of a new request."""
        session = self.session
        step = InferInProgress(session.next_order(), self.root.steps)
        self.started(step)
        states = {str(state.name): _copied(state.state) for state in request.query_state()}
        step.states = None if is_new and not any(map(_is_set, states.values())) else states
        if step.selected and session.selector.slots("input"):
            for name, tensor in states.items():
                self.take(step, STATE + name, f"input.{STATE}{name}", of_tensor(tensor))
        return step

    def end(self, step: InferInProgress, request: Any, error: str) -> None:
        """End an inference. error: what it raised, "" for nothing."""
        session = self.session
        step.inputs = dict(enumerate(request.input_tensors))
        if step.selected and session.selector.slots("input"):
            for place, tensor in step.inputs.items():
                name = self._inputs[place]
                self.take(step, name, f"input.{name}", of_tensor(tensor))
        results: dict[str, Seen] = {}
        if not error:
            tensors = request.output_tensors
            results = {n: of_tensor(t) for n, t in zip(self._outputs, tensors, strict=True)}
            for state in request.query_state():
                results[f"{STATE}{state.name}"] = of_tensor(_copied(state.state))
        self.ended(step, results, error)

    # ---- nodes

    def constant(self, form: NodeForm, name: str, shown: Shown) -> tuple[Seen, None]:
        """A constant of the source."""
        return _constant(self.inside, name), None


def _constant(inside: Inside, name: str) -> Seen:
    operator = inside.model.get_ordered_ops()[inside.plan.constants[name]]
    kind, shape = dtype_of(operator.get_output_element_type(0)), tuple(operator.get_output_shape(0))
    return of_bytes(kind, tuple(int(n) for n in shape), operator.data)


def _copied(tensor: Any) -> Any:
    """A copy of a tensor of OpenVINO."""
    copy = type(tensor)(tensor.element_type, tensor.shape)
    tensor.copy_to(copy)
    return copy


def _is_set(tensor: Any) -> bool:
    """Whether a state holds anything but zeros."""
    seen = of_tensor(tensor)
    return not seen.why and bool(np.any(seen.array().reshape(-1).view(np.uint8)))


# What a compiled model computes inside: the source is compiled a second time, for the same device
# with the same properties, with values added to its outputs (`engines/effect.py`).
#
# Only values that the device holds in memory anyway are added, so that fused nodes stay fused.


class ModelObserver(Observer):
    """Runs a second model beside the program's own. source: a copy of the uncompiled model that
    nobody changes. values: to show, in graph order.
    """

    WORDS = Words("the model alone", "the model compiled again computes something else")

    def __init__(self, how: Compiled, source: Any, plan: GraphPlan, values: Sequence[str]) -> None:
        super().__init__(values)
        self._how, self._source, self._plan = how, source, plan
        self._names = [port_name(p, k) for k, p in enumerate(source.outputs)]

    def recorded(self) -> None:
        """Nothing to release after the first step."""

    def make(self, values: Sequence[str]) -> Any:
        """Compile the model with these values as outputs and create a request."""
        variant = self._source.clone()
        operators = list(variant.get_ordered_ops())
        places = [self._plan.places[value] for value in values]
        if places:
            variant.add_outputs([operators[place].output(port) for place, port in places])
        config = dict(self._how.config or {})
        if self._how.core.get_property("CACHE_DIR") or config.get("CACHE_DIR"):
            config["CACHE_DIR"] = ""  # the program's cache is its own
        names = [self._how.device] if self._how.device else []
        return self._how.core.compile_model(variant, *names, config).create_infer_request()

    def run(self, model: Any, step: InferInProgress, values: Sequence[str]) -> Shown:
        states = model.query_state()
        if states and step.states is None:
            model.reset_state()
        for state in states:
            if step.states is not None and state.name in step.states:
                state.state = step.states[state.name]
        model.infer(dict(step.inputs))
        tensors = list(model.output_tensors)
        # a later run of this request writes over its results
        shown = {
            name: [(name, of_tensor(tensor).kept())] for name, tensor in zip(self._names, tensors)
        }
        for value, tensor in zip(values, tensors[len(self._names) :], strict=True):
            shown[value] = [(value, of_tensor(tensor))]
        return shown


# Facts of a model for comparing two runs: release, file, device, properties, inputs and outputs.

_PROPERTIES = (
    "EXECUTION_DEVICES", "INFERENCE_PRECISION_HINT", "PERFORMANCE_HINT", "EXECUTION_MODE_HINT",
    "NUM_STREAMS", "INFERENCE_NUM_THREADS", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
)  # fmt: skip
_STATED = 200  # characters of a property


class Compiled(NamedTuple):
    """How the program had a model compiled. path: its file, "" where there is none; content: its
    bytes, where it was given as such. core: the Core that did it, None where that is not known.
    device: as asked for.
    """

    path: str = ""
    content: bytes = b""
    core: Any = None
    device: str = ""
    config: Any = None


def of_model(compiled_model: Any, how: Compiled, source: SourceGraph | None) -> dict[str, Any]:
    """Facts of a compiled model. source: the graph that it was compiled from, None where that is
    not known.
    """
    import openvino

    facts: dict[str, Any] = {"openvino": str(openvino.__version__), **_of_file(how)}
    if how.device:
        facts["device"] = how.device
    if how.config:
        facts["config"] = {str(k): str(v)[:_STATED] for k, v in dict(how.config).items()}
    facts["properties"] = properties(compiled_model)
    for kind in ("inputs", "outputs"):
        ports = getattr(compiled_model, kind)
        facts[kind] = {port_name(p, k): form_of(p) for k, p in enumerate(ports)}
    if source is not None:
        facts["opset"] = dict(sorted(source.opsets.items()))
        if source.variables:
            facts["variables"] = list(source.variables)
    return facts


def properties(compiled_model: Any) -> dict[str, str]:
    """Properties of a compiled model that decide what it computes, as its device states them."""
    stated: dict[str, str] = {}
    for name in _PROPERTIES:
        try:
            value = compiled_model.get_property(name)
        except RuntimeError:  # the device has none of this name
            continue
        stated[name] = _plain(value)
    return stated


def _plain(value: Any) -> str:
    named = getattr(value, "get_type_name", None)
    return str(named() if named else value)[:_STATED]


def _of_file(how: Compiled) -> dict[str, Any]:
    if how.content:
        return facts_of_bytes(how.content)
    if not how.path:
        return {"model": "(in memory)"}
    facts = facts_of_file(how.path)
    weights = Path(how.path).with_suffix(".bin")
    if how.path.endswith(".xml") and weights.is_file():
        facts["external_data"] = files_beside(how.path, [weights.name])
    return facts


def name_of(how: Compiled) -> str:
    """What the model is called in its run."""
    if how.path:
        return os.path.basename(how.path)  # noqa: PTH119
    return "(bytes)" if how.content else "(in memory)"


# The graph of a model as calls of it will be written: one for each node that the device executes,
# with the nodes of the source that it was fused from.

_COUNTS = ("int32", "int64")
_SHOWN = 4  # types of nodes in the type of a fused one
_INPUTS = ("Parameter", "ReadValue")


class GraphPlan(NamedTuple):
    """nodes: in the order in which they run. places: (node of the source, output) of each value.
    constants: place of each parameter.
    """

    nodes: tuple[NodeForm, ...]
    places: dict[str, tuple[int, int]]
    constants: dict[str, int]


class _Group(NamedTuple):
    """Nodes of the source that one executed node carries out. reads: (node, output)."""

    members: tuple[SourceNode, ...]
    reads: tuple[tuple[int, int], ...]
    constants: tuple[SourceNode, ...]


def planned(source: SourceGraph, executed: Executed) -> GraphPlan:
    """The calls of a graph, given what the device executes of it."""
    nodes = source.nodes
    constant = {
        n.place
        for n in nodes
        if n.is_constant or (n.reads and n.friendly in executed.constants and not _counts(n))
    }
    runs, inserted = _materialised(source, executed, constant)
    used = {read for n in nodes for read in n.reads}
    places: dict[str, tuple[int, int]] = {
        name: (n.place, port) for n in nodes for port, name in enumerate(n.names)
    }
    groups = _groups(source, runs, constant)
    forms = [
        _form(source, group, _precise_least(group, runs[place], inserted), used)
        for place, group in sorted(groups.items())
    ]
    constants = {n.names[0]: n.place for group in groups.values() for n in group.constants}
    return GraphPlan(tuple(forms), places, constants)


def _materialised(
    source: SourceGraph, executed: Executed, constant: set[int]
) -> tuple[dict[int, Execution | None], dict[int, Execution]]:
    """The source nodes whose results the device holds in memory, with the execution of each (None
    if unknown), and the executions of nodes that a frontend inserted.

    These source nodes are the last node of each executed node, the nodes of outputs and states, and
    the user's nodes that compute shapes, positions or indices; the runtime computes the latter
    separately or not at all.
    """
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for node in source.nodes:
        by_name[node.friendly].append(node.place)
    runs: dict[int, Execution | None] = {}
    inserted: dict[int, Execution] = {}
    for execution in executed.nodes:
        known = [p for name in execution.originals for p in by_name[name] if p not in constant]
        last = max(known, default=-1)
        if last >= 0 and _is_shown(source.nodes[last]):
            runs[last] = execution
        elif last >= 0:
            inserted[last] = execution
    for place, _ in source.ends:
        if place not in constant and source.nodes[place].op_type != "Parameter":
            runs.setdefault(place, None)
    for node in source.nodes:
        if node.op_type == "ReadValue" or _counts(node):
            runs.setdefault(node.place, None)
    return runs, inserted


def _precise_least(
    group: _Group, execution: Execution | None, inserted: Mapping[int, Execution]
) -> Execution | None:
    """The execution with the largest rounding error among those of a group and of the nodes
    inserted in it.
    """
    inside = [inserted[m.place] for m in group.members if m.place in inserted]
    executions = inside if execution is None else [execution, *inside]
    return max(executions, key=lambda e: unit_roundoff(e.precision), default=None)


def _counts(node: SourceNode) -> bool:
    """Whether this is a node of the user's file that computes shapes, positions or indices."""
    inner = bool(node.reads) and not node.is_constant and not node.has_bodies
    return inner and node.is_own and all(name in _COUNTS for name in node.dtypes)


def _is_shown(node: SourceNode) -> bool:
    """Whether a node is shown as a call of its own. Nodes that a frontend inserted belong to the
    user's node they lead to.
    """
    return node.is_own and node.op_type not in ("Parameter", "Result", "Assign")


def _groups(
    source: SourceGraph, runs: dict[int, Execution | None], constant: set[int]
) -> dict[int, _Group]:
    """The group of each node in `runs`. Nodes of the user that several groups need are added to
    `runs`: the device left them out because they change nothing, or computes them more than once.
    """
    while True:
        groups = {place: _group(source, place, runs, constant) for place in runs}
        needed = Counter(
            m.place for place, g in groups.items() for m in g.members if m.place != place
        )
        shared = [p for p, count in needed.items() if count > 1 and source.nodes[p].is_own]
        if not shared:
            return groups
        # add the last one first: earlier nodes may then be needed by it alone
        runs[max(shared)] = None


def _group(source: SourceGraph, place: int, runs: Mapping[int, Any], constant: set[int]) -> _Group:
    """The nodes computed between a node and the earlier ones whose results are in memory."""
    members, reads, constants = {place: None}, dict[tuple[int, int], None](), dict[int, None]()
    waiting = [place] if source.nodes[place].op_type not in _INPUTS else []
    while waiting:
        for read in source.nodes[waiting.pop()].reads:
            before = source.nodes[read[0]]
            if before.place in constant:
                constants.update(dict.fromkeys(_leaves(source, before.place)))
            elif before.place in runs or before.op_type in _INPUTS:
                reads[read] = None
            elif before.place not in members:
                members[before.place] = None
                waiting.append(before.place)
    in_order = [source.nodes[m] for m in sorted(members)]
    read_order = {r: k for k, r in enumerate(r for n in in_order for r in n.reads)}
    return _Group(
        tuple(in_order),
        tuple(sorted(reads, key=lambda r: read_order[r])),
        tuple(source.nodes[c] for c in sorted(constants) if source.nodes[c].is_own),
    )


def _leaves(source: SourceGraph, place: int) -> list[int]:
    """The constants of the file that a constant value is computed from."""
    leaves, waiting, visited = [], [place], set[int]()
    while waiting:
        node = source.nodes[waiting.pop()]
        if node.place in visited:
            continue
        visited.add(node.place)
        if node.op_type == "Constant":
            leaves.append(node.place)
        # a value that only follows from the shapes of this model is not a constant of the file
        waiting += [p for p, _ in node.reads if source.nodes[p].is_constant]
    return leaves


def _form(
    source: SourceGraph,
    group: _Group,
    execution: Execution | None,
    used: set[tuple[int, int]],
) -> NodeForm:
    last = group.members[-1]
    outputs = [
        (f"output.{port}", name)
        for port, name in enumerate(last.names)
        if (last.place, port) in used or port == 0
    ]
    scope = scope_of(last.names[0])
    owners = tuple(dict.fromkeys(scope_of(m.owner) for m in group.members if m.owner))
    params = tuple((f"param.{c.names[0]}", c.names[0]) for c in group.constants)
    return NodeForm(
        _op_type(group.members),
        scope,
        "",
        _arguments(group.members),
        _notes(source, group, execution),
        () if owners == (scope,) else owners,
        tuple(
            (f"input.{k}", source.nodes[place].names[port])
            for k, (place, port) in _positions(group)
        ),
        params,
        tuple(outputs),
        _shape_slot(source, group),
    )


def _positions(group: _Group) -> list[tuple[int, tuple[int, int]]]:
    """(position, value) of the inputs of a group. A single operator keeps the positions of its own
    inputs.
    """
    if len(group.members) > 1:
        return list(enumerate(group.reads))
    return [(k, read) for k, read in enumerate(group.members[0].reads) if read in group.reads]


def _op_type(members: tuple[SourceNode, ...]) -> str:
    kinds = [m.op_type for m in members]
    if len(kinds) > _SHOWN:
        kinds = [*kinds[: _SHOWN - 2], f"{len(kinds) - _SHOWN + 1} more", kinds[-1]]
    return "+".join(kinds)


def _arguments(members: tuple[SourceNode, ...]) -> dict[str, Any]:
    """Attributes of a group; with several nodes, names are prefixed by the node's type."""
    if len(members) == 1:
        return dict(members[0].attributes)
    arguments: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    for member in members:
        kinds[member.op_type] += 1
        number = kinds[member.op_type]
        prefix = member.op_type if number == 1 else f"{member.op_type}#{number - 1}"
        arguments |= {f"{prefix}.{name}": value for name, value in member.attributes.items()}
    return arguments


def _notes(source: SourceGraph, group: _Group, execution: Execution | None) -> tuple[str, ...]:
    notes = [mark(Mark.HIDDEN, f"{m.op_type}: ") for m in group.members if m.has_bodies]
    if execution is not None:
        notes.append(mark(Mark.EXECUTED_IN, execution.precision))
        notes.append(f"by {execution.kernel} of {execution.kind}, stored in {execution.stored}")
    if len(group.members) == 1:
        places = {place: k for k, (place, _) in enumerate(group.members[0].reads)}
        notes += [
            mark(Mark.TAKES, f"{c.names[0]} as {places[c.place]}")
            for c in group.constants
            if c.place in places
        ]
    return tuple(notes)


def _shape_slot(source: SourceGraph, group: _Group) -> str:
    """Slot of the parameter that holds the shape of a Reshape, "" for none. A shape can be written
    in several ways (-1, 0), so the actual extents are recorded.
    """
    last = group.members[-1]
    if last.op_type != "Reshape" or len(last.reads) < 2:
        return ""
    shape = source.nodes[last.reads[1][0]]
    return f"param.{shape.names[0]}" if shape in group.constants else ""


# What a compiled model executes, read from its runtime model: which source nodes were fused into
# one, and in which precision each ran.

_CONSTANT = "Const"
_ENDS = ("Input", "Output", "MemoryOutput")


class Execution(NamedTuple):
    """One executed node. originals: friendly names of the source nodes that it executes. kind: the
    runtime's type. precision: dtype of the computation; stored: dtype of its result. kernel: name
    of the kernel.
    """

    originals: tuple[str, ...]
    kind: str
    precision: str
    stored: str
    kernel: str


class Executed(NamedTuple):
    """What a model executes. constants: friendly names of source nodes that were computed at
    compile time.
    """

    nodes: tuple[Execution, ...]
    constants: frozenset[str]


def executed(runtime_model: Any, known: Collection[str]) -> Executed:
    """What a runtime model executes. known: friendly names of the source; nodes that the runtime
    inserted, such as layout changes, are left out.
    """
    nodes: list[Execution] = []
    constants: set[str] = set()
    for op in runtime_model.get_ordered_ops():
        stated = {name: _text(value) for name, value in op.get_rt_info().items()}
        originals = names_in(stated.get("originalLayersNames", ""), known)
        kind = stated.get("layerType", "")
        if kind == _CONSTANT:
            constants.update(originals)
        elif originals and kind not in _ENDS:
            precision = dtype_of(stated.get("runtimePrecision", ""))
            stored = dtype_of(stated.get("outputPrecisions", "").partition(",")[0])
            kernel = stated.get("primitiveType", "")
            nodes.append(Execution(originals, kind, precision, stored, kernel))
    return Executed(tuple(nodes), frozenset(constants))


def names_in(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The known names in a comma-separated list. Names may contain commas."""
    pieces, names, start = text.split(","), [], 0
    while start < len(pieces):
        ends = range(len(pieces), start, -1)
        end = next((e for e in ends if ",".join(pieces[start:e]) in known), 0)
        if end:
            names.append(",".join(pieces[start:end]))
        start = end or start + 1
    return tuple(names)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
