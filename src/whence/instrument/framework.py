"""The frameworks whose programs can be captured, as the launcher, the site hook and
`workflows/capture` use them.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from whence import extras
from whence.errors import CaptureError, UsageError
from whence.instrument import FRAMEWORKS
from whence.instrument.options import CaptureOptions
from whence.instrument.rungs import framework_of

if TYPE_CHECKING:
    from whence.instrument.session import Session
    from whence.records import Run


class Surroundings(NamedTuple):
    """What a listener gets from the packages above `instrument`.

    folder: of the run. open_run: opens the run that patched tensors come from. parameters: (model,
    session) -> function that finds parameters in checkpoint files. sequences: returns the token
    sequences of a run. recompute: (run, call, inputs by slot) -> outputs by slot, by the call's own
    program; raises ReplayRefused. reading: what the readers know of the framework, None for
    nothing. lasting: the capture lasts until the process ends.
    """

    folder: str
    open_run: Callable[[str], Run]
    parameters: Callable[[Any, Session], Any]
    sequences: Callable[[str], Any]
    recompute: Callable[[Run, Any, Mapping[str, Any]], Mapping[str, Any]]
    reading: Any = None
    lasting: bool = False


class Listening(Protocol):
    """A listener of one capture."""

    session: Session

    def install(self) -> None:
        """Start listening."""

    def remove(self) -> None:
        """Stop listening. Idempotent."""

    def abandon(self) -> None:
        """Stop without writing anything more: in a forked child."""


class Stage(Protocol):
    """Changes how a program is compiled or optimised while a capture listens: one rung of a
    ladder.
    """

    def install(self) -> None:
        """Start. Raises CaptureError where the stage is not available."""

    def finish(self, session: Session) -> None:
        """Stop, and note in the run what was compiled or optimised. Call it once only."""


class Framework(Protocol):
    """One package `instrument/NAME`. Importing it imports nothing of the framework.

    MODELS: what a capture takes, in words. VARIABLES: environment variables that its libraries
    read when they start, for deterministic kernels. LEVELS: levels of a capture that mean something
    for its programs.
    """

    MODELS: tuple[str, ...]
    VARIABLES: Mapping[str, str]
    LEVELS: tuple[str, ...]

    def owns(self, model: Any) -> bool:
        """Whether the model is one of this framework."""

    def check(self, options: CaptureOptions) -> None:
        """Raise UsageError for options that the framework does not support."""

    def determinism(self, seed: int | None, deterministic: bool) -> None:
        """Seed its random generators in this process, and select deterministic kernels."""

    def listener(self, session: Session, model: Any, around: Surroundings) -> Listening:
        """The listener for `model`; None: for everything of the framework in this process."""

    def stage(self, options: CaptureOptions) -> Stage:
        """The stage that the options request. Exists for frameworks in `RUNGS` only."""


def framework(name: str) -> Framework:
    """The framework with a name in `FRAMEWORKS`."""
    return cast(Framework, importlib.import_module(f"whence.instrument.{name}"))


def owner_of(model: Any) -> str:
    """The name of a model's framework. Raises CaptureError where there is none."""
    for name in reversed(FRAMEWORKS):  # torch takes what is much like a module
        if framework(name).owns(model):
            return name
    *others, last = (kind for name in FRAMEWORKS for kind in framework(name).MODELS)
    raise CaptureError(
        f"cannot capture a {type(model).__name__}: whence.capture takes {', '.join(others)} or "
        f"{last}; a whole program is captured by `whence run`"
    )


def stage_of(name: str, options: CaptureOptions) -> Stage | None:
    """The stage that the options request for programs of a framework; None where they request
    none.
    """
    staged = framework_of(options.rung, options.disabled_optimizers)
    return framework(name).stage(options) if name == staged else None


def has_level(name: str, options: CaptureOptions) -> bool:
    """Whether the level of a capture applies to programs of this framework."""
    return options.level in framework(name).LEVELS


def check(name: str, options: CaptureOptions) -> None:
    """Raise UsageError for options that this framework does not support, Unsupported where its
    release is too old.
    """
    extras.check_imported(name)
    if not has_level(name, options):
        listed = " and ".join(n for n in FRAMEWORKS if options.level in framework(n).LEVELS)
        raise UsageError(
            f"level {options.level} is for programs of {listed}, not of {name}; max_depth=0 takes "
            "what the outermost module is given and returns"
        )
    framework(name).check(options)


def set_determinism(
    options: CaptureOptions, name: str = "torch", *, framework_only: bool = False
) -> None:
    """Set seeds and deterministic kernels in this process as `--seed` and `--deterministic` ask;
    without them nothing changes.

    framework_only: python's and numpy's generators were seeded when they were imported, and the
    program may have drawn since.
    """
    if options.seed is not None and not framework_only:
        random.seed(options.seed)
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed(options.seed)
    if options.seed is not None or options.deterministic:
        framework(name).determinism(options.seed, options.deterministic)
