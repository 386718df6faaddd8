"""The compiled models of a program that are listened to, each with its root."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from whence.instrument.engines.roots import Roots
from whence.instrument.engines.tensors import Tensors
from whence.instrument.engines.wanted import wanted_values
from whence.instrument.openvino import settings as model_facts
from whence.instrument.openvino.executed import executed
from whence.instrument.openvino.graph_plan import planned
from whence.instrument.openvino.observer import Observer
from whence.instrument.openvino.settings import Compiled
from whence.instrument.openvino.source_graph import source_graph
from whence.instrument.openvino.values import port_name
from whence.instrument.openvino.watched import Inside, WatchedModel
from whence.instrument.session import Session
from whence.instrument.wording import raised

_ONNX = ".onnx"
_EARLIER = (
    "it was compiled before the capture began, and OpenVINO does not hand out what from; compile "
    "it inside of the block, or capture the program with `whence run`"
)


class Registry:
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
