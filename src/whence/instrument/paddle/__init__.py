"""Listens to Paddle: predictors operator by operator, and layers in dynamic mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.errors import UsageError

if TYPE_CHECKING:
    from whence.instrument.framework import Listening, Surroundings
    from whence.instrument.options import CaptureOptions
    from whence.instrument.session import Session

MODELS = ("a paddle.nn.Layer", "a Paddle predictor")
LEVELS = ("modules", "op", "graph", "logits")
VARIABLES = {"FLAGS_cudnn_deterministic": "1"}


def owns(model: Any) -> bool:
    """Whether the model is a layer or a predictor of Paddle. Imports nothing."""
    return any(kind.__module__.partition(".")[0] == "paddle" for kind in type(model).__mro__) and (
        hasattr(model, "named_sublayers") or hasattr(model, "register_output_hook")
    )


def check(options: CaptureOptions) -> None:
    """Raise UsageError for what the capture of Paddle cannot do."""
    for name, limit in (
        ("force_tokens", "forces tokens on"),
        ("inject", "plants faults in"),
        ("recompute", "runs programs of"),
    ):
        if getattr(options, name):
            raise UsageError(
                f"{name} {limit} torch models only; --patch replaces tensors of Paddle programs"
            )
    if options.logits_module:
        raise UsageError(
            "logits_module names a module inside a torch model; of Paddle the tensor as wide as "
            "the vocabulary is found"
        )


def determinism(seed: int | None, deterministic: bool) -> None:
    """Seed Paddle, and choose deterministic kernels."""
    import paddle

    if seed is not None:
        paddle.seed(seed)
    if deterministic:
        paddle.set_flags({"FLAGS_cudnn_deterministic": True})


def listener(session: Session, model: Any, around: Surroundings) -> Listening:
    """Listens to `model`, a layer or a predictor; None: to everything of Paddle in this process.

    around.reading: (what the readers know of names and programs, where parameters of a program lie
    in its file of weights).
    """
    from whence.instrument.paddle import layers, predictor
    from whence.instrument.paddle.interventions import Interventions

    options = session.options
    check(options)
    changes = None
    if options.patch:
        changes = Interventions(session, around.open_run(options.patch_from), options.patch)
    listeners: list[Any] = []
    if model is None or hasattr(model, "register_output_hook"):
        words, weights = around.reading
        listeners.append(
            predictor.Listener(
                session, model, words=words, folder=around.folder, weights=weights, changes=changes
            )
        )
    if model is None or hasattr(model, "named_sublayers"):
        listeners.append(layers.Listener(session, model, changes=changes))
    return _Both(session, listeners)


class _Both:
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
