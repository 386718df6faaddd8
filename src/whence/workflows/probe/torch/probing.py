"""All properties of one call of one model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from whence.results.precision import PrecisionRequest
from whence.results.probe import BY_DEFAULT, Held, Probed, Property, PropertyAnswer
from whence.results.verdict import Status
from whence.workflows.probe.torch.batch import batch
from whence.workflows.probe.torch.causality import causality
from whence.workflows.probe.torch.chunking import chunking
from whence.workflows.probe.torch.equivariance import equivariance
from whence.workflows.probe.torch.health.asking import health
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.judging import Judge
from whence.workflows.probe.torch.outputs import flattened
from whence.workflows.probe.torch.packing import packing
from whence.workflows.probe.torch.padding import padding
from whence.workflows.probe.torch.precision.asking import precision
from whence.workflows.probe.torch.repeat import repeat
from whence.workflows.probe.torch.sensitivity import sensitivity
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.surroundings import Surroundings

_WARN = "transformers"


def probed(
    model: Any,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    properties: Collection[str] = BY_DEFAULT,
    causal: bool | None = None,
    declare: Collection[str] = (),
    surroundings: Surroundings | None = None,
    returned: Any = None,
    request: PrecisionRequest | None = None,
    others: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = (),
) -> Probed:
    """Ask a model on one call. call: its positional and named arguments. surroundings, returned: of
    the program's own call, what it ran in and what it gave, None where that is not known. request:
    of `precision`. others: further calls of the same kind, for its plans. Raises UsageError where
    the call holds nothing to change, and whatever the model raises on its own inputs.
    """
    inputs = CallInputs(model, *call)
    judge = Judge(Subject(model, surroundings))
    outputs = flattened(returned) if returned is not None else None
    ask: dict[Property, Callable[[], PropertyAnswer]] = {
        Property.CAUSALITY: lambda: causality(judge, inputs, causal),
        Property.PADDING: lambda: padding(judge, inputs),
        Property.BATCH: lambda: batch(judge, inputs),
        Property.CHUNKING: lambda: chunking(judge, inputs, causal),
        Property.REPEAT: lambda: repeat(judge, inputs, outputs),
        Property.PACKING: lambda: packing(judge, inputs, declare),
        Property.EQUIVARIANCE: lambda: equivariance(judge, inputs, declare),
        Property.SENSITIVITY: lambda: sensitivity(judge, inputs),
        Property.HEALTH: lambda: health(judge, inputs),
        Property.PRECISION: lambda: precision(
            judge,
            inputs,
            request or PrecisionRequest(),
            [CallInputs(model, *further) for further in others],
        ),
    }
    with _eager(), _quiet():
        judge.base(inputs)  # raises where the model does not run as it is
        answers = tuple(ask[name]() for name in ask if name in properties)
    return Probed(status_of(answers), type(model).__name__, inputs.words(), answers)


def status_of(answers: Collection[PropertyAnswer]) -> Status:
    """Different where a property is violated, undecided where one cannot be told or none applies,
    else same.
    """
    held = {answer.held for answer in answers}
    if Held.VIOLATED in held:
        return Status.DIFFERENT
    return Status.UNDECIDED if Held.UNKNOWN in held or held <= {Held.ABSENT} else Status.SAME


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs as it was written: its inside is looked at."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Libraries do not warn of what our variants do."""
    import logging
    import warnings

    logger = logging.getLogger(_WARN)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
