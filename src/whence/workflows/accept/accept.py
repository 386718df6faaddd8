"""`whence.accept`: decides whether an expectation that no longer holds may be renewed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence import dtypes
from whence.dtypes import Array
from whence.errors import UsageError
from whence.results.accept import ACCEPTED, Acceptance, AcceptKind, JudgedValue
from whence.workflows.accept import golden_files
from whence.workflows.accept.golden_files import Golden
from whence.workflows.accept.judging import Evidence, judged, worst_first
from whence.workflows.rounding import Ways, run_ways, with_leaves
from whence.workflows.rounding.ways import arguments

_CAPTURED = (
    "whence commits -o out OLD NEW -- CMD names the operator that computes something else; OLD is "
    "the commit that wrote the expectation, CMD the program"
)


def accept(
    expected: Any,
    actual: Any = None,
    *,
    again: Sequence[Any] = (),
    exact: Any = None,
    program: Any = None,
    inputs: Any = None,
    was: str = "",
) -> Acceptance:
    """Judge whether an expectation that no longer holds may be renewed.

    expected: a JSON or YAML file with numbers, a file of arrays that whence reads, or what a
    program holds: a number, an array, a tensor, a mapping or list of them. actual: the same of now;
    None: what the program gives. again: actual values of further runs, on other threads, kernels or
    orders of the batch. exact: values that do not come from this program. program: a function or
    module (or "module:function") that gives the actual values of `inputs` (or of none); it is run
    in several ways of rounding and in float64. inputs: a tuple is the positional arguments, a
    mapping the named ones; a function of none gives them. was: the dtype that the expectation was
    computed in, where it was a coarser one. Raises UnreadableRun, UsageError, and what the program
    raises.
    """
    old = golden_files.read(expected)
    evidence, ways = Evidence(), None
    notes: list[str] = []
    if program is not None:
        program, inputs = _imported(program), _imported(inputs)
        if not callable(program):
            raise UsageError(f"the program is a function or a module, not {type(program).__name__}")
        if callable(inputs) and not hasattr(inputs, "shape"):
            inputs = inputs()
        ways = run_ways(program, inputs)
        _of_program(evidence, ways, program, inputs, was)
        notes += ways.notes
        if inputs is None:
            notes.append("whether the program depends on its inputs is not asked without --inputs")
    elif was:
        raise UsageError("was= needs the program: what the coarser precision makes is tried on it")
    if actual is None and ways is None:
        raise UsageError("give the actual values, or the program that makes them")
    new = golden_files.read(ways.own if ways is not None and actual is None else actual)
    for number, source in enumerate(again, 1):
        evidence.ways[f"run {number}"] = _arrays(golden_files.read(source))
    if exact is not None:
        evidence.exact, evidence.is_independent = _arrays(golden_files.read(exact)), True
    if not evidence.exact and program is None:
        evidence.ways["actual"] = _arrays(new)  # a further run: where others stray, it may too
    old, new = _only_names_match(old, new, evidence)
    results = {name: judged(name, golden, new.get(name), evidence) for name, golden in old.items()}
    values = worst_first([value for value, _ in results.values()])
    renewed = {name: array for name, (_, array) in results.items() if array is not None}
    answer = answered(values, evidence, notes)
    if answer.verdict not in ACCEPTED:
        return answer
    return msgspec.structs.replace(
        answer, expectation={name: array.tolist() for name, array in renewed.items()}
    )


def answered(values: Sequence[JudgedValue], evidence: Evidence, notes: Sequence[str]) -> Acceptance:
    """Build the acceptance from judged values, which are sorted with the worst first."""
    return Acceptance(
        values[0].verdict,
        tuple(values),
        _tried(evidence),
        _sentence(values, evidence),
        _next(values),
        tuple(notes),
    )


def renew(expected: str | Path, answer: Acceptance) -> Acceptance:
    """Put the values of an answer into the file that it is about, where they may be renewed; the
    answer with the name of the file. Raises UsageError for a file that is read only, StoreFailed.
    """
    path = Path(expected)
    golden_files.check_writable(path)
    if not answer.expectation:
        return answer
    new = {name: np.asarray(value) for name, value in answer.expectation.items()}
    golden_files.renew(path, golden_files.read(path), new)
    return msgspec.structs.replace(answer, written=str(path))


def _tried(evidence: Evidence) -> tuple[str, ...]:
    """Describe in words the ways of rounding that were tried; repeated draws of one way are
    counted.
    """
    counts: dict[str, int] = {}
    for name in evidence.ways:
        if name != "actual":
            way = re.sub(r", \d+$", "", name)
            counts[way] = counts.get(way, 0) + 1
    words = [name if n == 1 else f"{name} ({n} times)" for name, n in counts.items()]
    if evidence.exact:
        words.append("an exact result" if evidence.is_independent else "in float64")
    return tuple(words)


def _of_program(evidence: Evidence, ways: Ways, program: Any, inputs: Any, was: str) -> None:
    evidence.ways = {"as it is": ways.own} | ways.others
    again = ways.others.get("again", {})
    if all(same_bits(again.get(key), own) for key, own in ways.own.items()):
        del evidence.ways["again"]  # it repeats itself, which tells nothing of rounding
    evidence.exact = ways.exact
    if was:
        evidence.coarser = _coarser(program, inputs, was)
    if inputs is not None:
        evidence.ignored = _ignored(program, inputs, ways.own, ways.notes)


def same_bits(a: Array | None, b: Array) -> bool:
    """Whether two arrays are equal bit for bit; NaN counts as equal to NaN."""
    return a is not None and np.array_equal(a, b, equal_nan=b.dtype.kind in "fc")


def _coarser(program: Any, inputs: Any, was: str) -> dict[str, dict[str, Array]]:
    """Run the program with every operator off by one rounding of a dtype coarser than `was`.

    Returns the values by the name of the way. Raises UsageError for an unknown dtype.
    """
    from whence.workflows.rounding.ways import run_coarser

    units = {"tf32": 2.0**-11} | {
        n: dtypes.unit_roundoff(n) for n in ("bfloat16", "float16", "float32")
    }
    if was not in units:
        raise UsageError(f"no dtype is called {was!r}; give one of {', '.join(units)}")
    return run_coarser(program, inputs, units[was])


def _ignored(
    program: Any, inputs: Any, own: Mapping[str, Array], notes: list[str]
) -> dict[str, tuple[str, ...]]:
    """For each value, the inputs that can be replaced without changing any of its bits.

    notes: receives a remark for each input whose replacement the program refuses; nothing is known
    of such an input.
    """
    from whence.workflows.rounding.ways import run_once

    ignored: dict[str, list[str]] = {name: [] for name in own}
    for name, tensor in _tensors(inputs):
        if (other := _other(tensor)) is None:
            continue
        try:
            values = run_once(program, with_leaves(inputs, _swap(tensor, other)))
        except Exception as error:  # noqa: BLE001 - a model may refuse what is drawn
            notes.append(
                f"whether the values depend on {name} is not known: with others in its place the "
                f"program raised {type(error).__name__}"
            )
            continue
        for key, array in own.items():
            if same_bits(values.get(key), array):
                ignored[key].append(name)
    return {key: tuple(names) for key, names in ignored.items() if names}


def _tensors(inputs: Any) -> list[tuple[str, Any]]:
    """The tensors and arrays of a call, each with the name of its argument."""
    args, kwargs = arguments(inputs)
    named = {**{f"input {place}": value for place, value in enumerate(args)}, **kwargs}
    tensors: list[tuple[str, Any]] = []
    for label, value in named.items():
        leaves: list[Any] = []
        with_leaves(value, leaves.append)
        # neither modules nor what has no element
        tensors += [(label, leaf) for leaf in leaves if 0 not in getattr(leaf, "shape", (0,))]
    return tensors


def _swap(tensor: Any, other: Any) -> Callable[[Any], Any]:
    return lambda leaf: other if leaf is tensor else leaf


def _other(tensor: Any) -> Any:
    """Another tensor of the same shape, dtype and range, drawn at random with a fixed seed; None
    for a constant tensor, which has no other value in its range.
    """
    content = tensor
    if not isinstance(tensor, np.ndarray):
        held = tensor.detach().cpu()
        content = (held.double() if held.is_floating_point() else held).numpy()
    random = np.random.default_rng(0)
    if content.dtype.kind in "fc":
        other = random.permutation(content.reshape(-1)).reshape(content.shape)
        other = other * random.uniform(0.5, 1.5, content.shape)
    else:
        low, high = int(content.min()), int(content.max())
        other = random.integers(low, high + 1, content.shape)
    other = other.astype(content.dtype)
    if same_bits(other, content):
        return None
    return other if content is tensor else tensor.new_tensor(other)


def _imported(value: Any) -> Any:
    """What "module:name" names; any other value unchanged."""
    if not isinstance(value, str):
        return value
    from whence.comparison.replays import user_model

    return user_model.imported(value)


def _arrays(values: Mapping[str, Golden]) -> dict[str, Array]:
    return {name: golden.content for name, golden in values.items()}


def _only_names_match(
    old: dict[str, Golden], new: dict[str, Golden], evidence: Evidence
) -> tuple[dict[str, Golden], dict[str, Golden]]:
    """Give the only new value the name of the only old one: with one value a side, names do not
    matter.
    """
    if len(old) != 1 or len(new) != 1 or set(old) == set(new):
        return old, new
    name, there = next(iter(old)), next(iter(new))
    for arrays in (*evidence.ways.values(), evidence.exact, *evidence.coarser.values()):
        if there in arrays:
            arrays[name] = arrays[there]
    if there in evidence.ignored:
        evidence.ignored[name] = evidence.ignored[there]
    return old, {name: new[there]}


def _sentence(values: Sequence[JudgedValue], evidence: Evidence) -> str:
    """The sentence that the pull request should contain."""
    first = values[0]
    of = f"`{first.name}`" if first.name else "the expectation"
    if first.verdict == AcceptKind.UNCHANGED:
        return "Nothing changes: every expected value holds."
    if first.verdict not in ACCEPTED:
        return f"Not renewed: {of} {first.verdict}: {first.words}."
    moved = [v for v in values if v.verdict != AcceptKind.UNCHANGED]
    worst = max(moved, key=lambda v: v.change or 0.0)
    moves = "" if worst.change is None else f"they move by {worst.change:.1g} at most (relative), "
    count = len(evidence.ways)
    measured = (
        "the program in float64 and " if evidence.exact and not evidence.is_independent else ""
    )
    closer = (
        " and the new values are nearer to the exact result"
        if first.verdict == AcceptKind.CLOSER
        else ""
    )
    return (
        f"Renewed {len(moved)} of {len(values)} expectations: {moves}"
        f"which rounding explains{closer}, as {measured}{count} ways of rounding show"
        f"{_covering(worst)}."
    )


def _covering(value: JudgedValue) -> str:
    """Name the tolerance that covers a change; "" for choices, which have none."""
    if value.relative_tolerance:
        return f"; a tolerance of {value.relative_tolerance:g} (relative) covers it"
    has_none = value.tolerance is None
    return "" if has_none else f"; a tolerance of {value.tolerance:g} (absolute) covers it"


def _next(values: Sequence[JudgedValue]) -> str:
    first = values[0]
    if first.decides:
        return f"give {first.decides}" if not first.decides.startswith("whence") else first.decides
    if first.verdict in (AcceptKind.CHANGED, AcceptKind.FAULT):
        return _CAPTURED
    if first.verdict == AcceptKind.IGNORES_INPUT:
        return "whence probe --only sensitivity -- CMD says which inputs reach the outputs"
    return ""
