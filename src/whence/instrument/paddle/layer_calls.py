"""The one function through which every layer is called, as a listener wraps it.

`nn.Layer.__call__` is wrapped while somebody listens, as of torch modules: that sees what entered
before any hook and what left after all of them, keyword arguments too. Code that `to_static` traced
is entered through its layer's call, so its boundary is recorded; inside, Paddle gets its own
`__call__` back, so that what it traces is the program and not this wrapper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from whence.instrument.call_frames import Switch
from whence.instrument.guard import put_back


class LayerCalls:
    """Calls of layers, handed to `observe(previous, layer, inputs, kwargs)` while `switch` is
    active.
    """

    def __init__(self, switch: Switch, observe: Callable[..., Any]) -> None:
        self._switch, self._observe = switch, observe
        self._lock = threading.RLock()
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._inside = 0

    def wrap(self) -> None:
        """Put the wrapper on."""
        import paddle
        from paddle.jit.dy2static import program_translator

        kind, switch, observe = paddle.nn.Layer, self._switch, self._observe
        previous, in_dynamic_mode = kind.__call__, paddle.in_dynamic_mode

        def __call__(layer: Any, *inputs: Any, **kwargs: Any) -> Any:  # noqa: N807
            if not switch.active or not in_dynamic_mode():
                return previous(layer, *inputs, **kwargs)
            return observe(previous, layer, inputs, kwargs)

        kind.__call__ = __call__
        self._undo.append((kind, "__call__", __call__, previous))
        for name in ("SymbolicStaticFunction", "ASTStaticFunction"):
            traced = getattr(program_translator, name, None)
            if traced is not None and "_perform_call" in vars(traced):
                self._around(traced)

    def unwrap(self) -> None:
        """Take it off. Idempotent."""
        put_back(self._undo)

    def _around(self, traced: Any) -> None:
        """While code runs that to_static traced, `__call__` is Paddle's own: it may be traced
        now.
        """
        perform = traced._perform_call

        def _perform_call(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._step_aside()
            try:
                return perform(function, *args, **kwargs)
            finally:
                self._step_back()

        traced._perform_call = _perform_call
        self._undo.append((traced, "_perform_call", _perform_call, perform))

    def _step_aside(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1 and self._undo:
                kind, _, wrapper, previous = self._undo[0]
                if kind.__call__ is wrapper:
                    kind.__call__ = previous

    def _step_back(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._undo and self._switch.active:
                kind, _, wrapper, previous = self._undo[0]
                if kind.__call__ is previous:
                    kind.__call__ = wrapper
