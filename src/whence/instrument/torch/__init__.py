"""Captures torch programs: modules, operators, compiled graphs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whence.instrument.framework import Stage, Surroundings
    from whence.instrument.options import CaptureOptions
    from whence.instrument.session import Session
    from whence.instrument.step_choice.gate import StepGate
    from whence.instrument.torch.interventions import Interventions
    from whence.instrument.torch.modules import Listener

MODELS = ("a torch.nn.Module",)
LEVELS = ("modules", "op", "graph", "logits")
# TensorFlow's and Ascend's names: torch runs on their libraries too.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TF_DETERMINISTIC_OPS": "1",
    "HCCL_DETERMINISTIC": "true",
}


def owns(model: Any) -> bool:
    """Whether the model is a torch module, or has `named_modules` like one."""
    return hasattr(model, "named_modules")


def check(options: CaptureOptions) -> None:
    """Accept all options: torch supports every one."""


def determinism(seed: int | None, deterministic: bool) -> None:
    """Seed torch and select deterministic kernels. Operators without such a kernel warn instead of
    failing.
    """
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", VARIABLES["CUBLAS_WORKSPACE_CONFIG"])
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def stage(options: CaptureOptions) -> Stage:
    """A stage that gives `torch.compile` the backend of the rung."""
    from whence.instrument.torch.compiled.stages import Rung

    return Rung(options.rung)


def listener(session: Session, model: Any, around: Surroundings) -> Listener:
    """The listener for the level of a session. model: None to listen to every model."""
    from whence.instrument.torch.logits import LogitsListener
    from whence.instrument.torch.modules import Listener
    from whence.instrument.torch.operators import OperatorListener

    how: dict[str, Any] = {
        "find_external": around.parameters(model, session),
        "changes": _changes(session, around),
    }
    level = session.options.level
    if level == "graph":
        from whence.instrument.torch.compiled.listener import GraphListener

        return GraphListener(session, model, folder=around.folder, program=True, **how)
    if level == "op":
        return OperatorListener(session, model, lasting=around.lasting, **how)
    if level == "logits":
        return LogitsListener(session, model, **how)
    return Listener(session, model, gate=_gate(session, around, how["changes"]), **how)


def _gate(session: Session, around: Surroundings, changes: Interventions | None) -> StepGate | None:
    """The gate that selects recorded steps, None where every step is observed, as in captures that
    change the program.
    """
    options = session.options
    if changes is not None or not (options.ranges or options.waits):
        return None
    from whence.instrument.step_choice.gate import gate_of

    return gate_of(options, around.folder, lambda text: session.note("trigger", text, aloud=True))


def _changes(session: Session, around: Surroundings) -> Interventions | None:
    options = session.options
    if not options.patch and not options.inject and not options.force_tokens:
        return None
    from whence.instrument.torch.forced_tokens import ForcedTokens
    from whence.instrument.torch.interventions import Interventions

    forced = None
    if options.force_tokens:
        tokens = around.sequences(options.force_tokens)
        forced = ForcedTokens(session, tokens, options.force_tokens)
    run = around.open_run(options.patch_from) if options.patch else None
    computed = around.recompute if options.recompute else None
    return Interventions(session, run, options.patch, options.inject, forced, computed)
