"""Wires the capture of Paddle: predictors and layers, the readers that know its names and programs,
and weights in the user's file.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import UsageError, WhenceError
from whence.readers import Place
from whence.readers.formats import paddle_params, paddle_program
from whence.readers.paddle.names import plain_name, plain_type

if TYPE_CHECKING:
    from whence.instrument.options import CaptureOptions
    from whence.instrument.paddle.interventions import Interventions
    from whence.instrument.paddle.tensor_identity import Weight
    from whence.instrument.session import Session
    from whence.records import External


def is_paddle(model: Any) -> bool:
    """Is this a layer or a predictor of Paddle? Imports nothing."""
    return any(kind.__module__.partition(".")[0] == "paddle" for kind in type(model).__mro__) and (
        hasattr(model, "named_sublayers") or hasattr(model, "register_output_hook")
    )


def check(options: CaptureOptions) -> None:
    """Raise UsageError for what the capture of Paddle cannot do."""
    for name, limit in (("force_tokens", "forces tokens on"), ("inject", "plants faults in")):
        if getattr(options, name):
            raise UsageError(
                f"{name} {limit} torch models only; --patch replaces tensors of Paddle programs"
            )
    if options.logits_module:
        raise UsageError(
            "logits_module names a module inside a torch model; of Paddle the tensor as wide as "
            "the vocabulary is found"
        )


class Both:
    """The listeners of one capture, as one."""

    def __init__(self, session: Session, listeners: list[Any]) -> None:
        self.session, self._listeners = session, listeners

    def install(self) -> None:
        """Start listening."""
        for listener in self._listeners:
            listener.install()

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        for listener in reversed(self._listeners):
            listener.remove()

    def abandon(self) -> None:
        """Stop without writing anything more."""
        for listener in reversed(self._listeners):
            listener.abandon()


def listener(session: Session, model: Any, folder: str) -> Both:
    """Listens to `model`, a layer or a predictor; None: to everything of Paddle in this process.
    folder: of the run.
    """
    from whence.instrument.paddle import layers, predictor
    from whence.instrument.paddle.saved_programs import NameTable

    check(session.options)
    changes = _changes(session)
    listeners: list[Any] = []
    if model is None or hasattr(model, "register_output_hook"):
        words = NameTable(
            plain_name,
            plain_type,
            lambda file: paddle_program.described(Place(Path(file))),
            _of_file,
        )
        listeners.append(
            predictor.Listener(
                session, model, words=words, folder=folder, weights=_weights, changes=changes
            )
        )
    if model is None or hasattr(model, "named_sublayers"):
        listeners.append(layers.Listener(session, model, changes=changes))
    return Both(session, listeners)


def _changes(session: Session) -> Interventions | None:
    if not session.options.patch:
        return None
    from whence import store
    from whence.instrument.paddle.interventions import Interventions

    return Interventions(session, store.open_run(session.options.patch_from), session.options.patch)


def _of_file(program: str, weights: str, names: Collection[str]) -> dict[str, Weight]:
    """Parameters of a program by name, mapped from its file of weights; without those that are not
    in there.
    """
    import numpy as np

    data = np.asarray(np.memmap(weights, np.uint8, "r"))
    streams = paddle_params.places(Place(Path(weights)), Place(Path(program)))
    return {
        name: (s.dtype, s.shape, data[s.start : s.start + s.nbytes])
        for name, s in streams.items()
        if name in names
    }


def _weights(program: str, weights: str) -> Callable[[str, bytes, str, int], External | None]:
    """Finds parameters of a program, by name, in its file of weights: where their bytes lie when
    they are the same.
    """
    places: dict[str, paddle_params.Stream] = {}
    data: mmap.mmap | None = None
    try:
        places = paddle_params.places(Place(Path(weights)), Place(Path(program)))
        with Path(weights).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (WhenceError, OSError, ValueError):
        pass  # then parameters are copied

    def find(name: str, digest: bytes, dtype: str, nbytes: int) -> External | None:
        from whence.frameworks import host
        from whence.records import External

        stream = places.get(name)
        if data is None or stream is None or (stream.dtype, stream.nbytes) != (dtype, nbytes):
            return None
        import numpy as np

        if host.digest(np.frombuffer(data, np.uint8, nbytes, stream.start)) != digest:
            return None
        return External(str(Path(weights).resolve()), stream.start, nbytes)

    return find
