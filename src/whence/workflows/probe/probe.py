"""`whence.probe`, for a model in this process and for a program that is started."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import CaptureError, UsageError, WhenceError
from whence.results.precision import (
    DEFAULT_BUDGET,
    DEFAULT_TYPES,
    NARROW_TYPES,
    PrecisionRequest,
)
from whence.results.probe import BY_DEFAULT, Probed, Property

if TYPE_CHECKING:
    from whence.instrument.options import CaptureOptions
    from whence.workflows.probe.torch.watching import KeptCall

_ATTACH = "whence.api:attach_probe"
_DECLARED = ("packed", "not-packed", "flip", "shift")
_QUESTION, _ANSWER, _PROBLEM = "probe.json", "answer-{}.json", "problem-{}.txt"


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to ask a program.

    properties: () for the default ones. causal: whether the model is causal, None when unknown.
    declare: further properties that should hold. call: number of the call, None for the first call
    of the largest model. now: ask during the program, not at its end. request: options of
    `precision`.
    """

    properties: tuple[str, ...] = ()
    causal: bool | None = None
    declare: tuple[str, ...] = ()
    call: int | None = None
    now: bool = False
    request: PrecisionRequest = PrecisionRequest()


def probe(
    model: Any,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    properties: Collection[str] = (),
    causal: bool | None = None,
    declare: Collection[str] = (),
    to: Sequence[str] = DEFAULT_TYPES,
    budget: float = DEFAULT_BUDGET,
    others: Sequence[Any] = (),
) -> Probed:
    """Ask one model, on one call, what must hold without a second run: that a position does not
    depend on later ones, nor a row on its neighbours, nor what is real on padding, and so on.

        print(whence.probe(model, {"input_ids": ids, "attention_mask": mask}))

    model: a torch module, with its weights and modes as they are. inputs: a tuple is the positional
    arguments, a mapping the named ones, anything else the only one; kwargs: named ones beside them.
    properties: of `whence.results.Property`, () for all but `precision`, which takes many calls.
    causal: whether a position may see only what comes before it; None where the model says so
    itself. declare: what should hold though nothing else says so: "packed" (documents of one row,
    told by positions that restart, do not see each other; "not-packed": they may), "flip", "shift"
    (an image flipped left to right, or shifted by a column, gives the same). to, budget: of
    `precision`: types that modules may compute in (bfloat16, float16, float8_e4m3fn, int8), and the
    largest relative rms error that the outputs may have. others: inputs of further calls, each as
    `inputs`: modules are measured on the first half of them too, and plans are checked on the rest;
    without any, inputs are made from those of the call. The model is called many times, without
    gradients, and left as it was; float64 copies of it are made where a difference has to be told
    from rounding. Raises UsageError for what is not a torch module, holds no tensor, or for a
    property, type or budget that there is not, and whatever the model raises on these inputs.
    """
    if "torch" not in sys.modules or not isinstance(model, sys.modules["torch"].nn.Module):
        raise UsageError(
            f"probe takes a torch module, not {type(model).__name__}; give the model itself"
        )
    _check_properties(properties)
    _check_declared(declare)
    request = _request(to, budget)
    from whence.workflows.probe.torch.probing import probed

    return probed(
        model,
        _arguments(inputs, kwargs),
        properties=properties or BY_DEFAULT,
        causal=causal,
        declare=declare,
        request=request,
        others=[_arguments(other, kwargs) for other in others],
    )


def _arguments(
    inputs: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call."""
    named = {**(inputs if isinstance(inputs, Mapping) else {}), **(kwargs or {})}
    if isinstance(inputs, Mapping) or inputs is None:
        return (), named
    return (inputs if type(inputs) is tuple else (inputs,)), named


def _request(to: Sequence[str], budget: float) -> PrecisionRequest:
    """The request for `precision`. Raises UsageError for an unsupported type or an
    invalid budget.
    """
    if isinstance(to, str):
        to = (to,)
    if unknown := set(to) - set(NARROW_TYPES):
        raise UsageError(
            f"no module is narrowed to {min(unknown)!r}; give one of {', '.join(NARROW_TYPES)}"
        )
    if not to or not 0 < budget < 1:
        raise UsageError(f"a plan needs a type and a budget between 0 and 1, not {budget:g}")
    return PrecisionRequest(tuple(dict.fromkeys(to)), budget)


def _check_properties(properties: Collection[str]) -> None:
    """Raise UsageError for the name of an unknown property."""
    if unknown := set(properties) - set(Property):
        raise UsageError(
            f"there is no property {min(unknown)!r}; give one of {', '.join(Property)}"
        )


def _check_declared(declare: Collection[str]) -> None:
    """Raise UsageError for an unknown declaration."""
    if unknown := set(declare) - set(_DECLARED):
        raise UsageError(f"nothing is declared by {min(unknown)!r}; give of {', '.join(_DECLARED)}")


def probe_command(
    command: Sequence[str],
    *,
    to: Sequence[str] = DEFAULT_TYPES,
    budget: float = DEFAULT_BUDGET,
    tell: Callable[[str], None] | None = None,
    **asked: Any,
) -> Probed:
    """Run a command, and ask the largest model that it calls. Its output goes where it goes
    without us. to,
    budget: as of `probe`. asked: properties, causal, declare, of `probe`; call, the number of the
    outermost call to ask about, from 1, None for the first one of the model; now, ask during the
    program, not at its end. Raises
    CaptureError where no model was called, or asking failed.
    """
    from whence.instrument.launch import child_process, interpreter, launcher, outcome
    from whence.instrument.options import make

    question = Question(**asked, request=_request(to, budget))
    _check_properties(question.properties)
    _check_declared(question.declare)
    found = interpreter.find(command, os.environ)
    if found:
        interpreter.check(found, os.environ)
    with tempfile.TemporaryDirectory(prefix="whence-probe-") as folder:
        environment = launcher.child_environment(os.environ, folder, make(), _ATTACH)
        (Path(folder) / _QUESTION).write_bytes(msgspec.json.encode(question))
        ended = child_process.execute(command, environment)
        processes = outcome.collect(folder)
        answers = [
            msgspec.json.decode(path.read_bytes(), type=Probed)
            for path in sorted(Path(folder).glob(_ANSWER.format("*")))
        ]
        problems = [
            path.read_text(encoding="utf-8")
            for path in sorted(Path(folder).glob(_PROBLEM.format("*")))
        ]
    if not answers:
        why = "; ".join((*processes.errors, *problems)) or _why_nothing(processes)
        raise CaptureError(f"the command {outcome.ended_words(ended.exit_code)}; {why}")
    if len(answers) > 1 and tell is not None:
        tell(f"{len(answers)} processes answered; this is the first")
    notes = list(answers[0].notes)
    if ended.exit_code:
        notes.append(f"the command {outcome.ended_words(ended.exit_code)}")
    return msgspec.structs.replace(answers[0], command=tuple(command), notes=tuple(notes))


def _why_nothing(processes: Any) -> str:
    if not processes.started:
        return "no Python process of the command loaded whence"
    if not processes.attached:
        return "torch was never imported, and only its modules can be asked"
    return (
        "no module of torch with parameters was called with a tensor (--call takes another call; "
        "compiled code is not seen)"
    )


def attach_probe(options: CaptureOptions, run_path: str, framework: str) -> None:
    """Watch the modules of this process, and ask when it ends. Called in the child by
    `whence probe`, after its import of a framework.
    """
    if framework != "torch":
        return
    from whence.workflows.probe.torch.watching import Watching

    question = msgspec.json.decode((Path(run_path) / _QUESTION).read_bytes(), type=Question)

    def ask(call: KeptCall) -> None:
        _answer(call, question, Path(run_path))

    watching = Watching(question.call, ask if question.now else None)

    def finish() -> None:
        watching.remove()
        call = watching.largest
        if call is not None and not question.now:
            ask(call)
        elif call is None and question.call is not None:
            text = f"call {question.call} was not made: {watching.seen} outermost calls were"
            _write(Path(run_path) / _PROBLEM.format(os.getpid()), text.encode())

    atexit.register(finish)


def _answer(call: KeptCall, question: Question, folder: Path) -> None:
    """Probe the kept call and write the answer for the waiting process; an error is written too."""
    from whence.workflows.probe.torch.probing import probed

    try:
        result = probed(
            call.model,
            (call.args, call.kwargs),
            properties=question.properties or BY_DEFAULT,
            causal=question.causal,
            declare=question.declare,
            surroundings=call.surroundings,
            returned=call.returned,
            request=question.request,
        )
    except WhenceError as error:
        _write(folder / _PROBLEM.format(os.getpid()), str(error).encode())
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        text = (
            f"{type(call.model).__name__} cannot be called again: {type(error).__name__}: {error}"
        )
        _write(folder / _PROBLEM.format(os.getpid()), text.encode("utf-8", "replace"))
    else:
        _write(folder / _ANSWER.format(os.getpid()), msgspec.json.encode(result))


def _write(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        path.write_bytes(content)
