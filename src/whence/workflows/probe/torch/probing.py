"""Checks all properties of one call of one model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from whence.results.precision import PrecisionRequest
from whence.results.probe import (
    BY_DEFAULT,
    Held,
    Probed,
    Property,
    PropertyAnswer,
    SpreadShare,
    Variant,
)
from whence.results.verdict import Status
from whence.workflows.probe.torch.answering import Unanswered, answer
from whence.workflows.probe.torch.causality import causality, is_causal
from whence.workflows.probe.torch.equivariance import equivariance
from whence.workflows.probe.torch.health.asking import health
from whence.workflows.probe.torch.inputs import CallInputs, other_tokens
from whence.workflows.probe.torch.judging import Judge, compared_outputs, guilty, said
from whence.workflows.probe.torch.measuring import Begun, Distance, Walk, place
from whence.workflows.probe.torch.outputs import Outputs, flattened
from whence.workflows.probe.torch.packing import packing
from whence.workflows.probe.torch.padding import padding
from whence.workflows.probe.torch.precision.asking import precision
from whence.workflows.probe.torch.regions import Positions, Row
from whence.workflows.probe.torch.sensitivity import sensitivity
from whence.workflows.probe.torch.spreading import shares_of_rows, shares_of_threads
from whence.workflows.probe.torch.subject import Subject
from whence.workflows.probe.torch.surroundings import Surroundings
from whence.workflows.probe.torch.trace import Trace
from whence.workflows.rounding.torch_modes import on_threads

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
    """Check the properties of a model on one call.

    call: its positional and named arguments. surroundings, returned: the state in which the
    program's own call ran and what it returned, None when unknown. request: options of `precision`.
    others: further calls of the same kind, for plans of `precision`. Raises UsageError when the
    call contains nothing to change, and whatever the model raises on its own inputs.
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
        answers = tuple(_answered(name, ask[name]) for name in ask if name in properties)
    return Probed(status_of(answers), type(model).__name__, inputs.words(), answers)


def _answered(name: Property, ask: Callable[[], PropertyAnswer]) -> PropertyAnswer:
    try:
        return ask()
    except Unanswered as error:
        return PropertyAnswer(name, error.held, why=str(error))


def status_of(answers: Collection[PropertyAnswer]) -> Status:
    """Different when a property is violated, undecided when one is unknown or none applies, else
    same.
    """
    held = {answer.held for answer in answers}
    if Held.VIOLATED in held:
        return Status.DIFFERENT
    return Status.UNDECIDED if Held.UNKNOWN in held or held <= {Held.ABSENT} else Status.SAME


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled code eagerly inside the block, because its operators are traced."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of libraries about the variants."""
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


# Batch: whether a row depends on the other rows, on their number, or on its place among them.

SIZES = (2, 3, 8, 32)
_STATISTICS = ("batch_norm",)


def batch(judge: Judge, inputs: CallInputs) -> PropertyAnswer:
    """Add other rows to a row, in greater number and in another order: the row's outputs must not
    change.
    """
    if inputs.batch_axis is None:
        raise Unanswered(f"{inputs.main} has no axis of rows")
    one = inputs.with_rows([0])
    first, second = (_beside(one, seed) for seed in (11, 23))
    beside, others = one.joined(first[:2]), one.joined(second[:2])
    middle = [1, 0, 2]
    content = judge.variant(
        "other rows beside it",
        beside.with_rows(middle),
        others.with_rows(middle),
        Row(3, 1, 1, at=1),
        twin=one,
    )
    turned = beside.with_rows([1, 2, 0])
    order = judge.variant("the rows in another order", beside, turned, Row(3, 1, 0, at=2), twin=one)
    sizes = [
        judge.variant(
            f"last in a batch of {size}",
            one,
            one.joined(first[: size - 1]).with_rows([*range(1, size), 0]),
            Row(1, size, 0, at=size - 1),
        )
        for size in SIZES
    ]
    variants = [content, order, *sizes]
    if inputs.rows > 1:
        name = f"in its own batch of {inputs.rows}"
        variants.append(judge.variant(name, one, inputs, Row(1, inputs.rows)))
    shares: tuple[SpreadShare, ...] = ()
    rounded = [v for v in sizes if v.held == Held.ROUNDING]
    if rounded:
        largest = max(rounded, key=lambda v: v.moved)
        size = SIZES[sizes.index(largest)]
        shares = shares_of_rows(judge, one, one.joined(first[: size - 1]), size)
    result = answer(Property.BATCH, variants, cause=_cause(variants, judge.subject.model))
    return replace(result, shares=shares)


def _beside(one: CallInputs, seed: int) -> list[torch.Tensor]:
    return [other_tokens(one.tensor, seed + n) for n in range(max(SIZES) - 1)]


def _cause(variants: list[Variant], model: Any) -> str:
    content, order = variants[:2]
    place = guilty(variants)
    if place is None and not any(v.held == Held.VIOLATED for v in variants):
        return ""
    if place is not None and any(word in place.operator for word in _STATISTICS):
        mode = "in training mode, " if model.training else ""
        return f"{mode}statistics are taken over the batch"
    if content.held == Held.VIOLATED:
        return "leak: what stands in other rows reaches this one"
    if order.held == Held.VIOLATED:
        return "the place of a row in the batch matters"
    return "the number of rows matters, by more than rounding"


# Repeatability: whether a call gives the same result again, later, on other threads, from other
# memory.

_DROPS = ("dropout", "bernoulli")
_FILLS = (0.0, 7.0)
_SEED = 20_011


def repeat(judge: Judge, inputs: CallInputs, returned: Outputs | None) -> PropertyAnswer:
    """Call the model again, in ways that may not matter. returned: what the program's own call
    gave, None where it is not known.
    """
    memory = _memory(judge, inputs)
    again = judge.variant("when called again", inputs, inputs)
    variants, of_threads = [memory, again], dict[int, Variant]()
    if again.held == Held.EXACT and memory.held != Held.VIOLATED:
        variants.append(_seeded(judge, inputs))
        variants += [_later(judge, inputs, between=False), _later(judge, inputs, between=True)]
        of_threads = _threads(judge, inputs)
        variants += of_threads.values()
        variants += _laid_out(judge, inputs)
        if returned is not None:
            variants += _as_returned(judge, inputs, returned)
    broken = [v for held in (Held.VIOLATED, Held.OBSERVED) for v in variants if v.held == held]
    cause = ""
    if broken:
        judged = broken[0].in_float64 is not None
        cause = f"another result {broken[0].name}" if judged else broken[0].why
    result = answer(Property.REPEAT, variants, cause=cause)
    return replace(result, shares=_shares(judge, inputs, of_threads))


def _outcome(name: str, far: Distance, held: Held, why: str, first: Begun | None = None) -> Variant:
    if not far.differing:
        return Variant(name, Held.EXACT, count=far.count)
    return Variant(
        name, held, first=place(first) if first is not None else None, why=why, **vars(far)
    )


_Run = Callable[..., Any]
"""Runs the model on inputs, inside the given modes and with random numbers that start at a seed."""


def _twice(
    judge: Judge,
    name: str,
    runs: Callable[[_Run], None],
    words: Callable[[Begun | None], tuple[Held, str]],
) -> Variant:
    """Compare two runs of the model bit for bit.

    runs: makes both runs with the function that it receives. words: states the meaning of a
    difference, from the operator in which it begins.
    """
    subject, outputs, traces = judge.subject, list[Outputs](), list[Trace]()

    def run(inputs: CallInputs, *modes: Any, seed: int | None = None) -> None:
        outputs.append(subject.run_on(inputs, *modes, seed=seed))

    def trace(inputs: CallInputs, *modes: Any, seed: int | None = None) -> None:
        traces.append(Trace(subject.model))
        subject.run_on(inputs, *modes, traces[-1].listening(), seed=seed)

    begun = None
    try:
        runs(run)
        far = compared_outputs(outputs[0], outputs[1])[0]
        held, why = words(None)
        if far.differing:
            subject.restore()
            with contextlib.suppress(Exception):  # what cannot be traced has no named operator
                runs(trace)
                begun = next(iter(Walk().over(traces[0], traces[1], None)), None)
            held, why = words(begun)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        return Variant(name, Held.UNKNOWN, why=said(error))
    finally:
        subject.restore()
    return _outcome(name, far, held, why, begun)


def _seeded(judge: Judge, inputs: CallInputs) -> Variant:
    """Compare with a run whose random numbers start at another seed: this reveals random draws."""

    def runs(run: _Run) -> None:
        run(inputs)
        judge.subject.restore()
        run(inputs, seed=_SEED)

    def words(begun: Begun | None) -> tuple[Held, str]:
        at = place(begun) if begun is not None else None
        if at is None or not any(w in f"{at.operator} {at.op_type}".lower() for w in _DROPS):
            return Held.OBSERVED, "it draws random numbers: seed it"
        mode = "the model is in training mode: call model.eval()"
        why = mode if judge.subject.model.training else "the model is in evaluation mode"
        return Held.VIOLATED, f"dropout is on; {why}"

    return _twice(judge, "with another seed", runs, words)


def _later(judge: Judge, inputs: CallInputs, *, between: bool) -> Variant:
    """Compare with a second call that starts from the state left by the first.

    between: whether a call with another input comes between them.
    """
    other = inputs.changed(**{inputs.main: other_tokens(inputs.tensor, 31)})
    state: list[str] = []

    def runs(run: _Run) -> None:
        run(inputs)
        if between:
            judge.subject.run_on(other)
        run(inputs)
        state[:] = judge.subject.changed_state()

    def words(begun: Begun | None) -> tuple[Held, str]:
        why = "the model keeps something from one call to the next"
        return Held.VIOLATED, why + (f": {', '.join(state[:3])}" if state else "")

    name = "after a call with another input" if between else "when called a second time"
    return _twice(judge, name, runs, words)


def _threads(judge: Judge, inputs: CallInputs) -> dict[int, Variant]:
    """Number of threads -> result of the variant on so many threads."""
    now = torch.get_num_threads()
    counts = sorted(n for n in {1, 2, os.cpu_count() or 1} - {now} if n <= (os.cpu_count() or 1))
    return {
        count: judge.variant(
            f"on {count} thread{'s' * (count > 1)} in the place of {now}",
            inputs,
            inputs,
            modes=[lambda _, count=count: on_threads(count)],  # type: ignore[misc]
        )
        for count in counts
    }


def _shares(
    judge: Judge, inputs: CallInputs, of_threads: dict[int, Variant]
) -> tuple[SpreadShare, ...]:
    """The sources of the largest spread among numbers of threads."""
    rounded = {n: v for n, v in of_threads.items() if v.held == Held.ROUNDING}
    if not rounded:
        return ()
    count = max(rounded, key=lambda n: rounded[n].moved)
    return shares_of_threads(judge, inputs, count)


def _laid_out(judge: Judge, inputs: CallInputs) -> list[Variant]:
    """The same elements elsewhere in memory, or with other strides."""
    tensor = inputs.tensor
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    moved = room.copy_(tensor.reshape(-1)).view(tensor.shape)
    layouts = {"from memory one element further": moved}
    if not tensor.is_contiguous():
        layouts["from contiguous memory"] = tensor.contiguous()
    if tensor.ndim == 4 and tensor.is_floating_point():
        layouts["in channels_last"] = tensor.contiguous(memory_format=torch.channels_last)
    elif tensor.ndim > 1 and tensor.shape[0] > 1:
        layouts["from transposed memory"] = (
            tensor.t().contiguous().t()
            if tensor.ndim == 2
            else (tensor.transpose(0, 1).contiguous().transpose(0, 1))
        )
    return [
        judge.variant(name, inputs, inputs.changed(**{inputs.main: twin}), copied=False)
        for name, twin in layouts.items()
    ]


class _Fresh(TorchDispatchMode):  # type: ignore[misc]
    """Fills new, uninitialised memory with one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name and isinstance(out, torch.Tensor) and not out.is_meta:
            out.fill_(self._value if out.dtype != torch.bool else bool(self._value))
        return out


def _memory(judge: Judge, inputs: CallInputs) -> Variant:
    """Compare runs that start with other values in uninitialised memory."""

    def runs(run: _Run) -> None:
        for value in _FILLS:
            run(inputs, _Fresh(value))
            judge.subject.restore()

    words = Held.VIOLATED, "it reads memory that torch.empty made and nothing wrote"
    name = "with other values in memory that nothing wrote"
    return _twice(judge, name, runs, lambda begun: words)


def _as_returned(judge: Judge, inputs: CallInputs, returned: Outputs) -> list[Variant]:
    """Compare what the program's own call returned with a call made now."""
    now = judge.base(inputs)
    shared = {name: tensor for name, tensor in returned.items() if name in now}
    if not shared or any(now[n].shape != t.shape for n, t in shared.items()):
        return []
    far = compared_outputs(shared, now)[0]
    words = "the program's own call gave something else: state of the model has changed since"
    return [_outcome("in the program's own call", far, Held.OBSERVED, words)]


# Chunking: whether reading in pieces, with a cache, gives the result of reading at once.
#
# Generation: whether greedy generation with a cache agrees with a forward pass over the whole text.

_KEYS = "past_key_values"
_CACHES = (_KEYS, "cache_params")
_LEAST_LENGTH = 4
_ROOM = 4


def chunking(judge: Judge, inputs: CallInputs, declared: bool | None) -> PropertyAnswer:
    """Read the sequence in pieces, with the model's own cache and then with a static one."""
    model = judge.subject.model
    cache = next((name for name in _CACHES if inputs.takes(name)), "")
    if not cache or not inputs.takes("use_cache"):
        raise Unanswered("the model takes no cache (past_key_values, use_cache)")
    if inputs.length_axis is None or inputs.length < _LEAST_LENGTH:
        raise Unanswered(
            f"the sequence has {inputs.length} positions, too few; --call takes another call"
        )
    expected = declared if declared is not None else is_causal(model, inputs)[0]
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if expected is False or (encoder_decoder and not inputs.main.startswith("decoder")):
        raise Unanswered("only a model that reads from left to right can read in pieces")
    one = inputs.with_rows([0]).changed(use_cache=True)
    if one.given(cache) is not None:
        raise Unanswered(
            "the call has a cache that is not empty already; --call takes another call"
        )
    length = one.length
    name, half = "a token at a time", length // 2
    variants = [_in_pieces(judge, one, cache, name, list(range(1, length)))]
    if cache == _KEYS:
        name = f"in pieces of {half} and {length - half}"
        variants.append(_in_pieces(judge, one, cache, name, [half]))
        if not encoder_decoder and getattr(model, "_can_compile_fullgraph", False):
            variants.append(_static(judge, one))
            name = "a token at a time with a static cache"
            steps = list(range(1, length))
            variants.append(_in_pieces(judge, one, cache, name, steps, _static_cache))
    written, notes = _generated(judge, inputs.with_rows([0]))
    variants += written
    caused = next((v for v in variants if v.held == Held.VIOLATED), None)
    cause = f"with a cache the model computes something else: {caused.name}" if caused else ""
    return answer(Property.CHUNKING, variants, cause=cause, notes=notes)


def _in_pieces(
    judge: Judge,
    one: CallInputs,
    cache: str,
    name: str,
    breaks: Sequence[int],
    first: Callable[[Subject, int], Any] = lambda subject, length: None,
) -> Variant:
    """The last piece, read after the other pieces, against the same positions read at once.

    first: creates the cache of the first piece.
    """
    length, last = one.length, breaks[-1]

    def last_piece(subject: Subject) -> CallInputs:
        past, start = first(subject, length), 0
        for stop in breaks:
            out = subject.raw(_piece(one, cache, past, start, stop))
            past, start = _cache_of(out, cache), stop
        return _piece(one, cache, past, start, length)

    region = Positions(length, length - last, last, length, at=0)
    return judge.variant(name, one, last_piece, region)


def _piece(one: CallInputs, cache: str, past: Any, start: int, stop: int) -> CallInputs:
    """The call for positions start..stop, after the positions in the cache."""
    values = {cache: past}
    mask = one.given(one.mask) if one.mask else None
    if mask is not None:  # a state that sums up the past has no use for its mask
        values[one.mask] = mask[:, :stop] if cache == _KEYS else mask[:, start:stop]
    return one.cut(start, stop).changed(**values)


def _cache_of(out: Any, name: str) -> Any:
    past = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
    if past is None:
        raise ValueError(f"the model returned no {name}")
    return past


def _static(judge: Judge, one: CallInputs) -> Variant:
    """A cache of fixed size, which some engines need, instead of a growing one."""
    length = one.length

    def with_static(subject: Subject) -> CallInputs:
        return one.changed(past_key_values=_static_cache(subject, length))

    region = Positions(length, length + _ROOM, 0, length, whole=True)
    return judge.variant("with a static cache", one, with_static, region)


def _static_cache(subject: Subject, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=subject.model.config, max_cache_len=length + _ROOM)


_TOKENS = 6
_LOGITS = "logits"
_NAME = "generated greedily with a cache"


class _Generated(NamedTuple):
    """A generated text. tokens: [new]. logits: [new, vocabulary], before any processing."""

    tokens: torch.Tensor
    logits: torch.Tensor


class _Stop(Exception):
    """Ends generation at the wanted call."""


def _generated(judge: Judge, inputs: CallInputs) -> tuple[list[Variant], list[str]]:
    """(variants, notes) for generated tokens against one forward pass over all of them.

    The variant is the token with the largest distance; notes are about ties. [] for a model that
    generates nothing from token ids.
    """
    model = judge.subject.model
    can = getattr(model, "can_generate", None)
    if inputs.main != "input_ids" or not inputs.is_tokens or can is None or not can():
        return [], []
    prompt = _bare(inputs)
    try:
        made = _generate(judge.subject, prompt)
        whole = _whole(prompt, made.tokens)
        logits = judge.base(whole)[_LOGITS][0, prompt.length - 1 :]
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises
        why = f"the model does not generate so: {said(error)}"
        return [Variant(_NAME, Held.UNKNOWN, why=why)], []
    finally:
        judge.subject.restore()
    count = len(made.tokens)
    if count < 2 or logits.shape != made.logits.shape:
        why = "it ends at once" if count < 2 else "its logits have another shape than the forward's"
        return [Variant(_NAME, Held.UNKNOWN, why=why)], []
    apart = (logits.double() - made.logits.double()).abs().amax(-1)
    step = int(apart[1:].argmax()) + 1

    def at_step(subject: Subject) -> CallInputs:
        return _call_at(subject, prompt, made.tokens, step)

    region = Positions(whole.length, 1, prompt.length + step - 1, prompt.length + step, at=0)
    name = f"{_NAME}, token {step + 1} of {count}"
    variant = judge.variant(name, whole, at_step, region)
    return [variant], _notes(made, logits, apart, variant)


def _notes(
    made: _Generated, logits: torch.Tensor, apart: torch.Tensor, variant: Variant
) -> list[str]:
    """Notes about a token that would be chosen differently without a cache; it is a tie when the
    difference is rounding.
    """
    cached, best = made.logits.argmax(-1), logits.argmax(-1)
    other = (cached != best).nonzero().flatten().tolist()
    notes = []
    if other:
        step = other[0]
        margin = float(logits[step, best[step]] - logits[step, cached[step]])
        words = f"token {step + 1} is {int(cached[step])} with a cache, {int(best[step])} without"
        if variant.held in (Held.EXACT, Held.ROUNDING):
            words += (
                f": a tie, {margin:.2g} apart, where rounding moves logits by {apart[step]:.2g}"
            )
        notes.append(words)
    chosen = (cached != made.tokens).nonzero().flatten().tolist()
    if chosen:
        notes.append(
            f"token {chosen[0] + 1} is not the largest logit: generation_config changes them"
        )
    return notes


def _bare(inputs: CallInputs) -> CallInputs:
    """The call with only ids and their mask: generation creates the other arguments."""
    ids = inputs.tensor
    prompt = inputs.changed()
    prompt.values = {inputs.main: ids}
    if inputs.takes("attention_mask"):
        mask = inputs.given("attention_mask")
        is_flat = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
        prompt.values["attention_mask"] = mask if is_flat else torch.ones_like(ids)
    return prompt


def _whole(prompt: CallInputs, tokens: torch.Tensor) -> CallInputs:
    """One call with the prompt and all new tokens but the last."""
    more = tokens[None, :-1].to(prompt.tensor)
    values = {prompt.main: torch.cat([prompt.tensor, more], 1)}
    mask = prompt.given("attention_mask")
    if mask is not None:
        values["attention_mask"] = torch.cat([mask, torch.ones_like(more)], 1)
    return prompt.changed(**values)


def _generate(subject: Subject, prompt: CallInputs, forced: Any = None) -> _Generated:
    def run(model: Any) -> Any:
        more = {"logits_processor": [forced]} if forced is not None else {}
        return model.generate(
            **{name: value.clone() for name, value in prompt.values.items()},
            max_new_tokens=_TOKENS,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )

    out = subject.within(run)
    new = out.sequences[0, prompt.length :]
    return _Generated(new.detach().clone(), torch.stack([step[0] for step in out.logits]).detach())


def _call_at(subject: Subject, prompt: CallInputs, tokens: torch.Tensor, step: int) -> CallInputs:
    """The arguments with which generation calls the model for one token, with `tokens` forced.

    Raises ValueError when that call reads more than the preceding token.
    """
    seen: list[dict[str, Any]] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs)
        if len(seen) > step:
            raise _Stop

    def forced(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[:, tokens[ids.shape[1] - prompt.length]] = 0.0
        return out

    handle = subject.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        _generate(subject, prompt, forced)
    except _Stop:
        pass
    finally:
        handle.remove()
    if len(seen) <= step:
        raise ValueError("generation does not call the model once a token")
    call = CallInputs(subject.model, (), {k: v for k, v in seen[step].items() if v is not None})
    if call.length != 1:
        raise ValueError("generation keeps no cache: it reads the whole sequence for each token")
    return call
