"""Records the sessions of ONNX Runtime while installed: methods of its classes are wrapped, and the
wrappers call the originals with the same arguments.

A failure here never reaches the program, and results of sessions are returned unchanged.

Also notes which values programs bind to an `IOBinding` as inputs and outputs, because the binding
itself does not tell.

`_Registry` holds the observed sessions with their roots, without keeping them alive.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from whence.instrument.engines.tensors import Tensors
from whence.instrument.engines.values import Seen
from whence.instrument.engines.watched import Registry
from whence.instrument.engines.wrapping import Wrappers
from whence.instrument.onnxruntime import in_float, native_sessions
from whence.instrument.onnxruntime import settings as session_facts
from whence.instrument.onnxruntime.in_float import LayersInFloat
from whence.instrument.onnxruntime.insides import Reading, open_inside
from whence.instrument.onnxruntime.values import at_pointer, seen_values
from whence.instrument.onnxruntime.watched import RunInProgress, WatchedSession
from whence.instrument.session import Session
from whence.instrument.wording import raised

_RUNS = {
    "run": ("output_names", "input_feed", "run_options"),
    "run_with_ort_values": ("output_names", "input_dict_ort_values", "run_options"),
    "run_with_iobinding": ("iobinding", "run_options"),
    "run_with_ortvaluevector": (
        "run_options", "feed_names", "feeds", "fetch_names", "fetches", "fetch_devices",
    ),
    "run_async": ("output_names", "input_feed", "callback", "user_data", "run_options"),
}  # fmt: skip
"""Methods that run a session, with the names of their arguments."""


class _Running(NamedTuple):
    """A run in progress, and the names of what it returns."""

    watched: WatchedSession
    step: RunInProgress
    names: list[str]


class Listener:
    """Records what sessions run. python_session: only this one; None: every one that is made or
    run. folder: of the run, where graphs are saved for a moment. reading: what reads ONNX files.
    layers: those that every new session computes in float, None for none.
    """

    def __init__(
        self,
        session: Session,
        python_session: Any = None,
        *,
        reading: Reading,
        folder: str,
        layers: LayersInFloat | None = None,
    ) -> None:
        self.session = session
        self._only = python_session
        self._layers = layers
        self._wrappers = Wrappers(session)
        self._bindings = _Bindings()
        self._registry = _Registry(session, self._wrappers.own, reading, folder)

    # ---- installing

    def install(self) -> None:
        """Start listening."""
        from onnxruntime.capi import onnxruntime_inference_collection as collection

        self._wrappers.active = True
        kind = collection.InferenceSession
        for name in _RUNS:
            run = self._run_async if name == "run_async" else partial(self._run, name)
            self._wrappers.wrap(kind, name, run)
        for name, noting in self._bindings.methods().items():
            self._wrappers.note(collection.IOBinding, name, noting)
        if self._only is not None:
            with self._wrappers.own():
                self._registry.adopt(self._only)
            return
        self._wrappers.wrap(kind, "__init__", self._init)
        options = collection.C.SessionOptions
        self._wrappers.note(options, "register_custom_ops_library", self._registered)

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        self._wrappers.put_back()
        with self._wrappers.own():
            self._registry.close()
            if self._layers is not None:
                self._layers.finish()

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child, whose files belong to the
        parent.
        """
        self._wrappers.forked()
        self._registry.forget()
        self.remove()

    # ---- what is called instead of the runtime's own

    def _init(
        self, previous: Callable[..., Any], python_session: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._layers is not None:
            with self._wrappers.own():
                args = tuple(in_float.edited(self._layers, args, kwargs))
        out = previous(python_session, *args, **kwargs)
        with self._wrappers.own():
            disabled = kwargs.get("disabled_optimizers") or ()
            names = tuple(map(str, (disabled,) if isinstance(disabled, str) else disabled))
            self._registry.adopt(python_session, names)
        return out

    def _registered(self, out: Any, options: Any, *args: Any, **kwargs: Any) -> None:
        native_sessions.registered((*args, *kwargs.values())[0])

    def _run_async(
        self, previous: Callable[..., Any], python_session: Any, *args: Any, **kwargs: Any
    ) -> Any:
        running = self._begin("run_async", python_session, args, kwargs)
        arguments = _arguments("run_async", args, kwargs)
        if running is None or "callback" not in arguments:
            return previous(python_session, *args, **kwargs)

        def ended(results: Any, user_data: Any, error: str) -> Any:
            try:
                return arguments["callback"](results, user_data, error)
            finally:
                with self._wrappers.own():
                    self._end(running, () if error else results, str(error or ""))

        return previous(python_session, **(arguments | {"callback": ended}))

    # ---- runs

    def _begin(
        self, method: str, python_session: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Running | None:
        """Record the inputs of a run."""
        running: _Running | None = None
        with self._wrappers.own():
            watched = self._of(python_session)
            if watched is not None:
                arguments = _arguments(method, args, kwargs)
                if method == "run_with_iobinding":
                    feeds = self._bindings.inputs(arguments.get("iobinding"))
                elif method == "run_with_ortvaluevector":
                    feeds = dict(zip(arguments.get("feed_names", ()), arguments.get("feeds", ())))
                else:
                    feeds = arguments.get(_RUNS[method][1]) or {}
                names = arguments.get("output_names") or arguments.get("fetch_names")
                step = watched.begin(feeds, arguments.get("run_options"))
                running = _Running(watched, step, list(names or watched.output_names))
        return running

    def _run(
        self,
        method: str,
        previous: Callable[..., Any],
        python_session: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a session by one of its methods, and record what it computed."""
        running = self._begin(method, python_session, args, kwargs)
        if running is None:
            return previous(python_session, *args, **kwargs)

        def ended(out: Any, error: str) -> None:
            self._end(running, () if error else self._results(method, args, kwargs, out), error)

        return self._wrappers.call(previous, (python_session, *args), kwargs, ended)

    def _results(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Any:
        """What a method that returned `out` computed."""
        arguments = _arguments(method, args, kwargs)
        if method == "run_with_iobinding":
            return self._bindings.outputs(arguments.get("iobinding"))
        return list(arguments.get("fetches", ()) if method == "run_with_ortvaluevector" else out)

    def _end(self, running: _Running, results: Any, error: str) -> None:
        if self.session.failed:
            return
        values = list(results)
        named = (
            values if values and isinstance(values[0], tuple) else list(zip(running.names, values))
        )
        running.watched.end(running.step, named, error)

    def _of(self, python_session: Any) -> WatchedSession | None:
        watched = self._registry.known(python_session)
        if watched is not None:
            return watched
        if self._only is not None and python_session is not self._only:
            return None
        return self._registry.adopt(python_session)


def _arguments(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a method by name; what it does not take, it will say itself."""
    return {**dict(zip(_RUNS[method], args)), **kwargs}


_POINTED_AT = ("device_type", "device_id", "element_type", "shape", "buffer_ptr")


class _Bindings:
    """Bindings of a process, as their methods were called. Keeps none of them alive."""

    def __init__(self) -> None:
        self._inputs: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._outputs: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def methods(self) -> dict[str, Callable[..., None]]:
        """By name of a method of IOBinding: what notes that it was called with these arguments."""
        return {
            "bind_cpu_input": self._bind_value,
            "bind_input": self._bind_input,
            "bind_ortvalue_input": self._bind_value,
            "bind_output": self._bind_output,
            "bind_ortvalue_output": self._bind_output,
            "clear_binding_inputs": self._clear_inputs,
            "clear_binding_outputs": self._clear_outputs,
        }

    def inputs(self, binding: Any) -> dict[str, list[tuple[str, Seen]]]:
        """The inputs bound at present, by name, as far as known."""
        bound = dict(getattr(binding, "_numpy_obj_references", None) or {})
        bound |= {k: v for k, v in (getattr(binding, "_bound_inputs", None) or {}).items() if v}
        bound |= self._inputs.get(binding, {})
        return {
            name: list(seen_values(value, f"input.{name}"))
            if not isinstance(value, Seen)
            else [(f"input.{name}", value)]
            for name, value in bound.items()
        }

    def outputs(self, binding: Any) -> list[tuple[str, Any]]:
        """(name, OrtValue) of its results."""
        names = self._outputs.get(binding) or getattr(binding, "_bound_outputs", None) or {}
        values = list(binding.get_outputs())
        if len(names) != len(values):
            return [(str(place), value) for place, value in enumerate(values)]
        return list(zip(names, values, strict=True))

    # ---- what was called

    def _bind_value(self, out: Any, binding: Any, name: str, *args: Any, **kwargs: Any) -> None:
        self._inputs.setdefault(binding, {})[name] = (*args, *kwargs.values())[0]

    def _bind_input(self, out: Any, binding: Any, name: str, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_POINTED_AT, args)), **kwargs}
        seen = at_pointer(
            given["element_type"], given["shape"], str(given["device_type"]), given["buffer_ptr"]
        )
        self._inputs.setdefault(binding, {})[name] = seen

    def _bind_output(self, out: Any, binding: Any, name: str, *_: Any, **__: Any) -> None:
        self._outputs.setdefault(binding, {})[name] = None

    def _clear_inputs(self, out: Any, binding: Any) -> None:
        self._inputs.pop(binding, None)

    def _clear_outputs(self, out: Any, binding: Any) -> None:
        self._outputs.pop(binding, None)


class _Registry(Registry):
    """Sessions by identity. folder: of the run, where graphs are saved for a moment. reading: what
    reads ONNX files.
    """

    def __init__(
        self, session: Session, own: Callable[[], Any], reading: Reading, folder: str
    ) -> None:
        super().__init__(session, own)
        self._reading, self._folder = reading, folder
        self._tensors = Tensors(session)

    def known(self, python_session: Any) -> WatchedSession | None:
        """The observed session, None if it is not observed yet. If the program has changed its
        providers, the session is observed anew.
        """
        watched: WatchedSession | None = self._watched.get(id(python_session))
        if watched is None or watched.root.ref() is not python_session:
            return None
        if watched.native is python_session._sess:
            return watched
        watched.close()  # the program changed its providers: it is made anew
        return self.adopt(python_session, watched.disabled)

    def adopt(self, python_session: Any, disabled: tuple[str, ...] = ()) -> WatchedSession | None:
        """Start observing a session; None where this process is not to be captured. disabled: names
        of optimisers that the program switched off.
        """
        session = self._session
        if not self.begin():
            return None
        disabled = tuple(dict.fromkeys((*disabled, *session.options.disabled_optimizers)))
        path = session_facts.model_path(python_session)
        root = self.root(python_session, os.path.basename(path) or "(bytes)")  # noqa: PTH119
        watched = WatchedSession(session, self._tensors, root, python_session, disabled)
        original = self._original(python_session, path, root.name)
        facts = session_facts.of_session(python_session, original, disabled)
        session.note("settings", msgspec.json.encode(facts).decode(), root.name)
        if self.observes:
            watched.inside = open_inside(
                session,
                self._reading,
                python_session,
                original,
                self._folder,
                set(disabled),
                root.name,
            )
        place = id(python_session)
        root.ref = weakref.ref(python_session, lambda _: self.gone(place, watched))
        self._watched[place] = watched
        return watched

    def _original(self, python_session: Any, path: str, root: str) -> Any:
        """The user's model as its file has it, None where that cannot be read."""
        try:
            return self._reading.model(path or python_session._model_bytes)
        except (OSError, ValueError) as error:
            name = os.path.basename(path) or "the model given as bytes"  # noqa: PTH119
            self._session.note("program", f"{name} cannot be read: {raised(error)}", root)
            return None
