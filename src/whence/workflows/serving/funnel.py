"""The stages of a check of an engine: each runs only if the stage before leaves a question open."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from whence.judge.limits import LIMITS, U32
from whence.judge.ties import Followed, follow
from whence.results import (
    BatchDependence,
    LogRatio,
    RequestCheck,
    ServingCheck,
    ServingFault,
    ServingStage,
    Status,
)
from whence.workflows.serving.engines import Answer, Engine
from whence.workflows.serving.kept import Kept, digest
from whence.workflows.serving.prompts import given_instead
from whence.workflows.serving.rows import (
    Array,
    CacheRead,
    Event,
    Kind,
    Rows,
    Trace,
    distances,
)
from whence.workflows.serving.wrong_rows import WrongRows, explained, position_words

if TYPE_CHECKING:
    from whence.workflows.serving.torch.forced import Forced, Truth
    from whence.workflows.serving.torch.listening import Listening


T = TypeVar("T")
_LOOKED_INTO = 2
"""Number of requests for which modules and caches are recorded."""
_LOGITS = Event("", Kind.LOGITS)
_LEAST_LOGITS = 64 * U32


class Request(NamedTuple):
    """A prompt and the engine's answer to it."""

    prompt: tuple[int, ...]
    answer: Answer

    @property
    def sequence(self) -> list[int]:
        """All tokens that the model received or generated."""
        return [*self.prompt, *self.answer.tokens]


class _Answers(msgspec.Struct):
    """What an engine answered. logits: by prompt, the positions of which its logits are kept, and
    the size of its vocabulary. given: by prompt, how what its model was given differs from it.
    """

    answers: list[Answer]
    logits: list[tuple[list[int], int]]
    given: list[str]


class _Score(msgspec.Struct):
    """What the reference says of one answer. is_right: the logits were seen and are right, as far
    as that is known. logprobs: of the engine, () where they are unknown.
    """

    check: RequestCheck
    is_right: bool
    reported: ServingFault | None
    logprobs: tuple[float, ...]


class _Inside(msgspec.Struct):
    """What the inside shows: the fault, and renewed checks."""

    fault: ServingFault | None
    checks: list[RequestCheck]


class Settings(NamedTuple):
    """What is asked of a check.

    tokens: new ones of each answer. cache_error, cache: as in `Judged`. rollout: whether the engine
    samples its tokens, so that they need not be the best. dtype: name of the one in which an engine
    computes whose model is not accessible, "" for that of the reference. alone: whether prompts are
    asked alone too, and compared with themselves in the batch.
    """

    tokens: int
    cache_error: float
    cache: str
    rollout: bool
    dtype: str
    alone: bool


class Funnel:
    """The stages of one check.

    reference: a causal language model, called `name`. kept: results of stages that ran before.
    tell: receives a line at the start of each stage.
    """

    def __init__(
        self,
        reference: Any,
        name: str,
        target: Engine,
        prompts: list[tuple[int, ...]],
        settings: Settings,
        kept: Kept,
        tell: Callable[[str], None],
    ) -> None:
        self._reference, self._name, self._target = reference, name, target
        self._prompts, self._settings, self._tell = prompts, settings, tell
        self._count = settings.tokens
        self._kept, self._notes = kept, kept.notes

    def check(self) -> ServingCheck:
        answered = self._stage("answers", _Answers, self._answers, self._are_whole)
        requests = [Request(p, a) for p, a in zip(self._prompts, answered.answers, strict=True)]
        fault = self._weights()
        self._tell(f"{self._name} scores the answers")
        scores = [
            self._score(number, request, answered.logits[number])
            for number, request in enumerate(requests)
        ]
        for number in range(len(requests)):
            self._kept.forget(f"logits-{number}")
        checks = [score.check for score in scores]
        reported = next((score.reported for score in scores if score.reported), None)
        suspects = [(n, score.is_right) for n, score in enumerate(scores) if score.check.first >= 0]
        if fault is None and reported and (reported.stage is ServingStage.SAMPLER or not suspects):
            fault = reported
        given = next(((n, answered.given[n]) for n, _ in suspects if answered.given[n]), None)
        if fault is None and given is not None:
            fault = _of_prompt(*given)
        if suspects and fault is None:
            fault = self._narrowed(requests, suspects, checks)
        logprobs = [score.logprobs for score in scores]
        ratios: tuple[LogRatio, ...] = ()
        batch: tuple[BatchDependence, ...] = ()
        if self._settings.rollout:
            ratios = self._stage(
                "ratios", tuple[LogRatio, ...], lambda: self._ratios(requests, logprobs)
            )
        if self._settings.alone:
            batch = self._stage("batch", tuple[BatchDependence, ...], lambda: self._batch(requests))
        status = self._status(requests, checks, fault)
        if self._kept.count:
            self._notes.append(
                f"{self._kept.count} results are kept ones, of the same code, models and prompts; "
                "--fresh asks anew"
            )
        return ServingCheck(
            status,
            self._name,
            self._target.name,
            tuple(checks),
            fault,
            tuple(dict.fromkeys(self._notes)),
            ratios,
            batch,
        )

    def _are_whole(self, answered: _Answers) -> bool:
        """Whether the logits of kept answers are there, except where they were scored."""
        return all(
            not places
            or self._kept.has(f"logits-{number}")
            or self._kept.has(_score_name(number, Request(prompt, answer)))
            for number, (prompt, answer, (places, _)) in enumerate(
                zip(self._prompts, answered.answers, answered.logits, strict=True)
            )
        )

    def _stage(
        self,
        name: str,
        kind: type[T],
        compute: Callable[[], T],
        is_whole: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """The result of a stage for which the engine runs. It is kept if the model is known that
        runs: what else may have changed in an engine nobody sees.
        """
        if self._target.model is None:
            return compute()
        return self._kept.result(name, kind, compute, is_whole)

    @functools.cached_property
    def _forced(self) -> Forced:
        from whence.workflows.serving.torch.forced import Forced

        models = [self._reference, self._target.model]
        dtypes = {str(next(m.parameters()).dtype) for m in models if m is not None}
        return Forced(self._reference, dtypes | ({self._settings.dtype} - {""}))

    def _answers(self) -> _Answers:
        """The answers of the engine; its logits are kept."""
        self._tell(f"{self._target.name} answers {len(self._prompts)} prompts")
        answers, logits, given = self._asked(self._prompts)
        places = []
        for number, rows in enumerate(logits):
            order = sorted(rows)
            if order:
                self._kept.keep(f"logits-{number}", np.stack([rows[place] for place in order]))
            places.append((order, rows[order[0]].size if order else 0))
        return _Answers(answers, places, given)

    def _asked(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[Answer], list[dict[int, Array]], list[str]]:
        """Answers of the engine; where its model is accessible, its logits by position, and how
        what it was given differs from each prompt.
        """
        if self._target.model is None:
            answers = self._target.generate(prompts, self._count)
            return answers, [{} for _ in prompts], [""] * len(prompts)
        from whence.workflows.serving.torch.listening import Listening

        with Listening(self._target.model, (), (), modules=False) as listening:
            answers = self._target.generate(prompts, self._count)
        logits = listening.logits_of([[*p, *a.tokens] for p, a in zip(prompts, answers)])
        self._note(listening)
        strays = [piece.tokens for piece in listening.schedule.strays]
        begun = zip(prompts, listening.schedule.begun)
        return answers, logits, [given_instead(prompt, count, strays) for prompt, count in begun]

    def _note(self, listening: Listening) -> None:
        self._notes += [f"not listened to: {error}" for error in listening.errors[:1]]
        if count := sum(len(piece.tokens) for piece in listening.schedule.strays):
            self._notes.append(f"{count} tokens of its calls belong to no prompt")

    def _score(self, number: int, request: Request, kept: tuple[list[int], int]) -> _Score:
        """What the reference says of one answer."""

        def compute() -> _Score:
            places, width = kept
            rows = self._kept.array(f"logits-{number}", width) if places else ()
            logits = dict(zip(places, rows))
            since = len(request.prompt) - 1
            truth = self._forced.quick_truth(request.sequence, since) if logits else None
            if truth is not None:
                score = self._scored(number, request, logits, truth)
                if _is_clear(score, truth):
                    return score
            truth = self._forced.truth(request.sequence, modules=False, since=since)
            return self._scored(number, request, logits, truth)

        return self._kept.result(_score_name(number, request), _Score, compute)

    def _scored(
        self, number: int, request: Request, logits: Mapping[int, Array], truth: Truth
    ) -> _Score:
        check = self._checked(number, request, logits, truth)
        is_right = _is_right(check, truth, logits.get(len(request.prompt) - 1 + check.first))
        return _Score(
            check,
            is_right,
            _of_logprobs(number, request, truth, is_right=is_right and bool(logits)),
            _logprobs_of(request, logits),
        )

    def _batch(self, requests: list[Request]) -> tuple[BatchDependence, ...]:
        """For the first few prompts, the operator that first depends on those beside them."""
        numbers = range(min(len(requests), _LOOKED_INTO))
        self._tell(f"asking {len(numbers)} prompts alone")
        beside = self._listen(requests, numbers, operators=True)
        if beside is None:
            return ()
        results = []
        for number in numbers:
            prompt = requests[number].prompt
            alone = Request(prompt, self._target.generate([prompt], self._count)[0])
            single = self._listen([alone], [0], operators=True)
            if single is not None:
                pairs = zip(requests[number].sequence, alone.sequence)
                equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                traces = beside.traces[number], single.traces[0]
                truth = self._forced.truth(alone.sequence, modules=False)
                results.append(first_dependent(number + 1, traces, equal, _allowed_logits(truth)))
        return tuple(results)

    def _checked(
        self, number: int, request: Request, logits: Mapping[int, Array], truth: Truth
    ) -> RequestCheck:
        return _checked(number, request, logits, truth, is_greedy=not self._settings.rollout)

    def _ratios(
        self, requests: list[Request], reported: Sequence[tuple[float, ...]]
    ) -> tuple[LogRatio, ...]:
        """Log-ratios of the first few answers, split by cause if the engine can be looked into."""
        numbers = range(min(len(requests), _LOOKED_INTO))
        self._tell(f"splitting the log-ratios of {len(numbers)} prompts")
        inside = self._listen(requests, numbers)
        ratios = []
        for number in numbers:
            tokens = requests[number].answer.tokens
            logprobs = np.asarray(reported[number])
            if not logprobs.size:
                continue
            at = slice(len(requests[number].prompt) - 1, -1), list(tokens)
            trace = inside.traces[number] if inside else Trace()
            causes: dict[str, Array] = {}
            for name, logits in self._forced.swapped(requests[number].sequence, trace):
                now = log_softmax(logits[at[0]])[np.arange(len(tokens)), at[1]]
                if not name:
                    before = whole = now
                causes[name] = causes.get(name, 0.0) + now - before
                before = now
            causes["rest"] = logprobs - before
            del causes[""]
            ratios.append(
                LogRatio(
                    number + 1,
                    tuple((logprobs - whole).tolist()),
                    {name: tuple(part.tolist()) for name, part in causes.items()},
                )
            )
        return tuple(ratios)

    def _ended_early(self, requests: list[Request]) -> list[int]:
        """Numbers of prompts whose answer is shorter than requested and does not end with an end
        token.
        """
        settings = getattr(self._reference, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None)
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        return [
            number
            for number, request in enumerate(requests, 1)
            if len(request.answer.tokens) < self._count
            and not ends & set(request.answer.tokens[-1:])
        ]

    def _status(
        self, requests: list[Request], checks: list[RequestCheck], fault: ServingFault | None
    ) -> Status:
        if fault is not None:
            return Status.DIFFERENT
        if early := self._ended_early(requests):
            self._notes.append(
                f"prompts {', '.join(map(str, early[:5]))} ended after fewer than {self._count} "
                "tokens, and not at an end of text: did the engine fail?"
            )
        blind = [check for check in checks if check.error is None or check.judged < check.tokens]
        if self._target.model is None:
            self._notes.append("the engine's inside cannot be seen: only its answers are compared")
        elif blind:
            self._notes.append(f"the logits of {len(blind)} of {len(checks)} prompts were not seen")
        return Status.UNDECIDED if blind or early else Status.SAME

    def _weights(self) -> ServingFault | None:
        if self._target.model is None:
            return None
        from whence.workflows.serving.torch.forced import differing_parameters

        names = differing_parameters(self._reference, self._target.model)
        if not names:
            return None
        several = f", nor are {len(names) - 1} more" if len(names) > 1 else ""
        return ServingFault(
            ServingStage.WEIGHTS,
            layer=_layer(names[0]),
            name=names[0],
            sentence=f"{names[0]} is not the reference's, rounded to the coarser dtype{several}",
        )

    def _listen(
        self,
        requests: Sequence[Request],
        kept: Sequence[int],
        *,
        operators: bool = False,
    ) -> Listening | None:
        """Record the inside of the model while the engine answers again; None when its model is not
        accessible.
        """
        if self._target.model is None:
            return None
        from whence.workflows.serving.torch.listening import Listening

        sequences = [request.sequence for request in requests]
        listening = Listening(
            self._target.model, sequences, kept, modules=True, operators=operators
        )
        with listening:
            answers = self._target.generate([r.prompt for r in requests], self._count)
        if [a.tokens for a in answers] != [r.answer.tokens for r in requests]:
            self._notes.append(
                "the engine does not repeat itself: asked again it answers otherwise"
            )
        self._note(listening)
        return listening

    def _narrowed(
        self,
        requests: list[Request],
        suspects: list[tuple[int, bool]],
        checks: list[RequestCheck],
    ) -> ServingFault | None:
        """Find the origin of the first wrong token; None if choices of routers among ties explain
        all. suspects: (request, whether its logits are right).
        """
        wrong = [number for number, is_right in suspects if not is_right]
        if not wrong:
            return _of_sampler(suspects[0][0], checks[suspects[0][0]])
        wrong.sort(key=lambda number: checks[number].first)
        for place in range(0, len(wrong), _LOOKED_INTO):
            numbers = wrong[place : place + _LOOKED_INTO]
            inside = self._stage(
                f"inside-{numbers[0]}",
                _Inside,
                functools.partial(self._inside, requests, numbers, list(checks)),
            )
            checks[:] = inside.checks
            if inside.fault is not None:
                return inside.fault
        return None

    def _inside(
        self, requests: list[Request], numbers: Sequence[int], checks: list[RequestCheck]
    ) -> _Inside:
        """Look into modules and caches of some requests: without a fault if the choices of routers
        among ties explain their tokens.
        """
        fault = self._first_inside(requests, numbers, checks)
        return _Inside(fault and self._beside_others(fault, requests), checks)

    def _first_inside(
        self, requests: list[Request], numbers: Sequence[int], checks: list[RequestCheck]
    ) -> ServingFault | None:
        """The first fault inside. Renews checks."""
        self._tell(f"looking into {len(numbers)} prompts")
        seen = self._listen(requests, numbers)
        if seen is None:
            return _of_logits(numbers[0], checks[numbers[0]])
        firsts, faults = [], []
        for number in numbers:
            judged = self._given_routes(requests[number], number, seen, checks)
            first = first_wrong(seen.traces[number], judged)
            if first is not None:
                firsts.append((first.call, number, first, judged))
            elif checks[number].first >= 0:
                faults.append(_of_logits(number, checks[number]))
        if firsts:
            _, number, first, judged = min(firsts, key=lambda entry: entry[:2])
            return _fault(number, first, len(requests[number].prompt), judged)
        return faults[0] if faults else None

    def _given_routes(
        self,
        request: Request,
        number: int,
        seen: Listening,
        checks: list[RequestCheck],
    ) -> Judged:
        """What a reference that takes the choices of the engine's routers says of a request."""
        trace = seen.traces[number]
        choices = trace.choices(len(request.sequence))
        is_coarse = bool(self._settings.cache or self._settings.cache_error)
        handed = trace.handed() if is_coarse else ()
        truth = self._forced.truth(request.sequence, modules=True, choices=choices, handed=handed)
        if truth.unfit:
            layers = ", ".join(map(str, sorted(truth.unfit)))
            self._notes.append(
                f"layers {layers}: what the cache hands out has another form than the reference's; "
                "there the reference attends to its own keys and values"
            )
        routes = _routes(choices, truth, len(request.sequence))
        if routes or is_coarse:
            flips = sum(int(followed.tied.sum()) for followed in routes.values())
            check = self._checked(number, request, _logits_in(trace), truth)
            checks[number] = msgspec.structs.replace(check, routes=flips)
        return Judged(
            number,
            {
                event: truth.trace.whole(event)
                for event in truth.trace.rows
                if not event.kind.is_of_router and event != _LOGITS  # of the last token of a call
            },
            truth.floors,
            _windows(self._reference),
            seen.writers,
            self._settings.cache_error,
            self._settings.cache,
            routes,
            seen.choosers,
        )

    def _beside_others(self, fault: ServingFault, requests: list[Request]) -> ServingFault:
        """The fault, with whether it also occurs when its request runs alone."""
        if len(requests) < 2 or fault.request < 1:
            return fault
        prompt = requests[fault.request - 1].prompt
        (answer,), (logits,), _ = self._asked([prompt])
        request = Request(prompt, answer)
        truth = self._forced.truth(request.sequence, modules=False)
        check = self._checked(0, request, logits, truth)
        return msgspec.structs.replace(fault, alone=check.first >= 0)


def _checked(
    number: int, request: Request, logits: Mapping[int, Array], truth: Truth, *, is_greedy: bool
) -> RequestCheck:
    """Compare the tokens of an answer with the reference's logits for the same text. logits: the
    engine's, by position.
    """
    allowed = _allowed_logits(truth)
    tokens, begin = request.answer.tokens, len(request.prompt) - 1
    first, ties, gap_there, errors = -1, 0, 0.0, []
    for place, token in enumerate(tokens):
        right = truth.logits[begin + place]
        gap = float(right.max() - right[token]) if is_greedy else 0.0
        is_off = False
        if (own := logits.get(begin + place)) is not None:
            errors.append(_logits_error(own, right))
            is_off = errors[-1] > allowed
        is_tie = 0 < gap <= LIMITS.flip * max(truth.noise, _LEAST_LOGITS)
        ties += is_tie and not is_off
        if first < 0 and (is_off or (gap > 0 and not is_tie)):
            first, gap_there = place, gap
    error = max(errors, default=None) if len(errors) == len(tokens) else None
    if not errors and len(request.answer.logprobs) == len(tokens) > 0:
        error = _logprobs_error(request, truth)
    return RequestCheck(
        number + 1, len(tokens), len(tokens), first, ties, gap_there, truth.noise, error
    )


def _logprobs_error(request: Request, truth: Truth) -> float:
    """The largest absolute error of the reported log-probabilities."""
    begin, tokens = len(request.prompt) - 1, list(request.answer.tokens)
    right = log_softmax(truth.logits[begin : begin + len(tokens)])
    return max(abs(float(row[t]) - p) for row, t, p in zip(right, tokens, request.answer.logprobs))


def _logprobs_of(request: Request, logits: Mapping[int, Array]) -> tuple[float, ...]:
    """Log-probabilities of an answer as the engine reports them, else as its logits give them; ()
    where neither is known.
    """
    tokens, logprobs = request.answer
    if len(logprobs) == len(tokens):
        return logprobs
    places = range(len(request.prompt) - 1, len(request.sequence) - 1)
    if not logits.keys() >= set(places):
        return ()
    rows = (log_softmax(logits[place].astype(np.float64)) for place in places)
    return tuple(float(row[token]) for row, token in zip(rows, tokens))


def _score_name(number: int, request: Request) -> str:
    return f"score-{number}-{digest([request.sequence, request.answer.logprobs])}"


def _logits_in(trace: Trace) -> dict[int, Array]:
    return {rows.start: rows.rows[0] for rows in trace.rows.get(_LOGITS, ())}


def _logits_error(own: Array, right: Array) -> float:
    """Relative error of logits; one of the vocabularies may be padded."""
    width = min(len(own), len(right))
    return float(distances(own[None, :width], right[None, :width])[0])


def _is_right(check: RequestCheck, truth: Truth, first: Array | None) -> bool:
    """Whether the logits of a prompt are right, so that only its tokens are wrong. first: the
    logits of the first wrong token; what follows it may be of another text than was reported.
    """
    if check.first >= 0 and first is not None:
        right = truth.logits[check.first - check.tokens - 1]
        return _logits_error(first, right) <= _allowed_logits(truth)
    return check.error is not None and check.error <= _allowed_logits(truth)


def _is_clear(score: _Score, truth: Truth) -> bool:
    """Whether an answer is right whatever rounding `truth` has itself."""
    check = score.check
    is_best = check.first < 0 and not check.ties and score.reported is None
    return is_best and check.error is not None and check.error <= _allowed_logits(truth) / 2


def _allowed_logits(truth: Truth) -> float:
    """The largest relative error of logits that rounding explains."""
    return max(truth.floors.get(_LOGITS, 0.0), _LEAST_LOGITS) * LIMITS.whole


def first_dependent(
    number: int, traces: tuple[Trace, Trace], tokens: int, allowed: float
) -> BatchDependence:
    """The first operator that gives a request other results in a batch than alone.

    traces: of both. tokens: number of tokens that both have in common. allowed: largest relative
    error that rounding explains.
    """
    (beside, alone), firsts, compared = traces, [], 0
    for event in beside.rows.keys() & alone.rows.keys():
        if event.kind not in (Kind.OPERATOR, Kind.OUTPUT):
            continue  # a module may run other operators in a batch: its result is compared then
        own = {r.start + n: row for r in alone.rows[event] for n, row in enumerate(r.rows)}
        for rows in beside.rows[event]:
            for place, row in enumerate(rows.rows, rows.start):
                other = own.get(place)
                if place >= tokens or other is None or other.shape != row.shape:
                    continue
                compared += 1
                if not np.array_equal(row, other, equal_nan=True):
                    error = float(distances(row.reshape(1, -1), other.reshape(1, -1))[0])
                    at = rows.call, beside.order[event], place
                    firsts.append((error <= allowed, *at, error, event.module))
    if not firsts:
        return BatchDependence(number, compared=compared)
    is_rounding, *_, place, error, operator = min(firsts)
    return BatchDependence(number, operator, place, error, is_rounding, compared)


def _routes(choices: Mapping[int, Array], truth: Truth, length: int) -> dict[int, Followed]:
    """How the choices of an engine's routers stand to those of the reference, given those before:
    by number of the choice.
    """
    routes = {}
    for number, own in truth.trace.choices(length).items():
        rows = choices.get(number)
        if rows is not None and rows.shape == own.shape:
            scores = truth.trace.whole(Event("", Kind.SCORES, place=number)).astype(np.float64)
            noise = truth.scores.get(number, np.zeros_like(scores))
            target = np.where(rows < 0, own, rows)
            routes[number] = follow(own, target, scores, noise, U32, ordered=False)
    return routes


def _of_logprobs(
    number: int, request: Request, truth: Truth, *, is_right: bool
) -> ServingFault | None:
    """A fault of reported log-probabilities. is_right: the engine's logits were seen and are
    right.
    """
    tokens, logprobs = request.answer
    if not tokens or len(logprobs) != len(tokens):
        return None
    begin = len(request.prompt) - 1
    logits = truth.logits[begin : begin + len(tokens)]
    residual, words = transform_of(logits, tokens, logprobs, truth.noise)
    if not residual:
        return None
    sentence = f"its log-probabilities are those of the reference's logits by another rule: {words}"
    if not words:
        sentence = (
            f"its log-probabilities are off by up to {residual:.2g}, rounding explains "
            f"{largest_residual(truth.noise):.2g}, and no rule gives them"
        )
    stage = ServingStage.SAMPLER if words or is_right else ServingStage.LOGITS
    return ServingFault(stage, number + 1, error=residual, tensor="logprobs", sentence=sentence)


def _of_prompt(number: int, words: str) -> ServingFault:
    sentence = f"the model was given another text than prompt {number + 1}: {words}"
    return ServingFault(ServingStage.PROMPT, number + 1, tensor="tokens", sentence=sentence)


def _of_sampler(number: int, check: RequestCheck) -> ServingFault:
    sentence = (
        f"the logits of prompt {number + 1} are right, and token {check.first} is not their best: "
        f"its logit lies {check.gap:.3g} below, rounding adds {check.noise:.2g}"
    )
    return ServingFault(
        ServingStage.SAMPLER, number + 1, check.first, tensor="tokens", sentence=sentence
    )


def _of_logits(number: int, check: RequestCheck) -> ServingFault:
    words = "are off" if check.error is not None else "cannot be seen"
    sentence = (
        f"token {check.first} of prompt {number + 1} is not explained by rounding, and its logits "
        f"{words}"
    )
    return ServingFault(
        ServingStage.LOGITS, number + 1, check.first, tensor="logits", sentence=sentence
    )


def _fault(number: int, wrong: Wrong, prompt: int, judged: Judged) -> ServingFault:
    """Describe the first wrong tensor."""
    event = wrong.event
    step = max(wrong.end - prompt, 0)
    when = "the prefill" if step == 0 else f"decode step {step}"
    before = "prefill is right, " if step else ""
    layer = event.layer if event.layer >= 0 else _layer(event.module)
    stage = ServingStage.CACHE if event.kind.is_read else ServingStage.LAYER
    if event.kind is Kind.LOGITS:
        stage = ServingStage.LOGITS
    if event.kind.is_of_cache:
        written = event._replace(kind=event.kind.written)
        how = "" if event.kind.is_read else " as the cache is given them"
        words = f"layer {layer}, {event.kind.value[0]}{how}, " + place_words(
            wrong, judged.truth[written].shape[1]
        )
    else:
        words = _module_words(event, wrong)
    return ServingFault(
        stage,
        number + 1,
        step,
        layer,
        event.module,
        event.kind.value[0] if event.kind.is_of_cache else str(event.kind),
        wrong.heads,
        wrong.positions,
        wrong.error,
        f"{before}{when} differs first: {words}",
    )


def _module_words(event: Event, wrong: Wrong) -> str:
    if event.kind is Kind.CHOICE:
        return (
            f"{event.module or 'a router'}, {position_words(list(wrong.positions))}: {wrong.words}"
        )
    if event.kind is Kind.INPUT:
        parent = event.module.rpartition(".")[0] or "the model"
        return (
            f"what {parent} computes in front of {event.module}, by {wrong.error:.2g} of its size; "
            "all before it is right"
        )
    return f"{event.module or 'logits'}, by {wrong.error:.2g} of its size; all before it is right"


def _layer(name: str) -> int:
    """The number of the layer that a module name belongs to, -1 for none."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else -1


def _windows(model: Any) -> Mapping[int, int]:
    """Number of positions that a query may attend to, for layers with a sliding window."""
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "num_hidden_layers", 0)
    if not window or not layers:
        return {}
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return {n: int(window) for n, kind in enumerate(types) if kind == "sliding_attention"}


# The transform of the reference's logits that gives the log-probabilities which an engine reports.

_CLOSER = 0.05
"""Largest share of the residual that a transform may leave to count as its explanation."""
_CLOSEST = 1e-3
"""A residual below this is rounding: log-probabilities are reported with few digits."""
_TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 400))
_USUAL = (1.0, *(n / 20 for n in range(2, 41) if n != 20))
"""Temperatures that are tried together with a part of the vocabulary."""


def log_softmax(logits: Array) -> Array:
    """Log-softmax along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def transform_of(
    logits: Array, tokens: Sequence[int], logprobs: Sequence[float], noise: float
) -> tuple[float, str]:
    """(largest residual beyond rounding, its explanation); (0, "") when there is no such residual.

    logits: the reference's, (tokens, vocabulary). noise: standard deviation of a logit's rounding
    error.
    """
    reported = np.asarray(logprobs, np.float64)
    chosen = np.arange(len(tokens)), np.asarray(tokens)
    residual = float(np.abs(log_softmax(logits)[chosen] - reported).max())
    if residual <= largest_residual(noise):
        return 0.0, ""
    best, words = residual, ""
    for name, left in _tried(logits, chosen, reported, largest_residual(noise)):
        if left < best:
            best, words = left, name
    is_explained = best <= max(_CLOSER * residual, largest_residual(noise))
    return residual, words if is_explained else ""


def largest_residual(noise: float) -> float:
    """The largest error of a log-probability that rounding explains.

    noise: standard deviation of a logit's rounding error.
    """
    return max(_CLOSEST, LIMITS.whole * noise)


def _tried(
    logits: Array, chosen: tuple[Array, Array], reported: Array, allowed: float
) -> Iterator[tuple[str, float]]:
    """Pairs (name of a transform, residual that it leaves)."""
    own = log_softmax(logits)[chosen]
    if len(own) > 2:
        yield "shifted by one token", float(np.abs(own[1:] - reported[:-1]).max())
        yield "shifted by one token", float(np.abs(own[:-1] - reported[1:]).max())
    yield "logits, not normalised", float(np.abs(logits[chosen] - reported).max())
    best, temperature = min(
        (float(np.abs(log_softmax(logits / t)[chosen] - reported).max()), t) for t in _TEMPERATURES
    )
    for fine in np.linspace(temperature * 0.98, temperature * 1.02, 81):
        left = float(np.abs(log_softmax(logits / fine)[chosen] - reported).max())
        best, temperature = min((best, temperature), (left, fine))
    yield f"temperature {temperature:.3g}", best
    ranked = np.sort(logits, -1)[:, ::-1]
    for temperature in _USUAL:
        own = log_softmax(logits / temperature)[chosen]
        shares = np.cumsum(np.exp(log_softmax(ranked / temperature)), -1)
        if part := _part_of(shares, np.exp(own - reported), allowed):
            before = "" if temperature == 1 else f"temperature {temperature:g}, "
            yield f"{before}{part}, renormalised", 0.0


def _part_of(shares: Array, kept: Array, allowed: float) -> str:
    """The rule by which the likeliest tokens are kept: top-k, or top-p; "" if neither fits.

    shares: sum of the probabilities of the likeliest 1, 2, ... tokens, (tokens, vocabulary). kept:
    sum of those that were kept, (tokens). allowed: largest error of the logarithm of a sum.
    """
    fits = np.abs(np.log(shares) - np.log(kept)[:, None]) <= allowed
    if not fits.any(-1).all() or fits[:, -1].all():
        return ""
    rows, last = np.arange(len(kept)), shares.shape[1] - 1
    least, most = fits.argmax(-1), last - fits[:, ::-1].argmax(-1)
    if least.max() <= most.min():
        return f"top-k {least.max() + 1}"
    low = np.where(least > 0, shares[rows, least - 1], 0.0).max()
    high = shares[rows, most].min()
    rounded = (round(high, digits) for digits in range(1, 7))
    return next((f"top-p {share:g}" for share in rounded if low < share <= high), "")


# The first tensor of a request with an error beyond rounding, in the order in which an engine
# computes tensors, call by call.

_LEAST = 32 * U32
"""Least floor of rounding: recorded tensors are float32, so smaller floors cannot be measured."""


class Judged(NamedTuple):
    """The correct tensors of one request, and the tolerances for judging it.

    truth: (positions, ...) by event. windows: number of positions, itself included, that a query
    may attend to, by layer; layers without a window are absent. origin: (request, position) that
    wrote these bits, by layer, keys or values, and digest. cache_error: relative error that the
    cache may add; cache: the codes that it keeps, a name of `CACHE_CODES` or "".
    routes, choosers: judgement of a router's choices, and its module, by number of
    the choice in a call of the model.
    """

    request: int
    truth: Mapping[Event, Array]
    floors: Mapping[Event, float]
    windows: Mapping[int, int]
    origin: Mapping[tuple[int, Kind, bytes], tuple[int, int]]
    cache_error: float = 0.0
    cache: str = ""
    routes: Mapping[int, Followed] = {}
    choosers: Mapping[int, str] = {}


class Wrong(NamedTuple):
    """The first wrong tensor.

    end: length of the request after the call. positions, heads: of its wrong rows. error: relative.
    """

    event: Event
    call: int
    end: int
    positions: tuple[int, ...]
    heads: tuple[int, ...]
    error: float
    words: str


def first_wrong(trace: Trace, judged: Judged) -> Wrong | None:
    """The first tensor of a request that differs from the reference's on the same tokens."""
    marks = sorted(_marks(trace, judged), key=lambda mark: mark[:2])
    if not marks:
        return None
    call, _, event, item, away = marks[0]
    if isinstance(item, CacheRead):
        return _wrong_read(event, item, away, judged)
    places, *rest = np.nonzero(away)
    positions = places + item.start
    heads = rest[0] if event.kind.is_of_cache else np.zeros(0, int)
    words = ""
    if event.kind is Kind.CHOICE and (gap := judged.routes[event.place].worst) is not None:
        event = event._replace(module=judged.choosers[event.place])
        words = (
            f"takes {gap.target} where {gap.reference} has the better score, by {gap.gap:.2g}; "
            f"rounding explains {gap.explained:.2g}"
        )
    if event.kind.is_of_cache:
        words = _explained(event, item.rows, away, positions, heads, judged, {})
    return _wrong(event, (call, item.start + len(item.rows)), positions, heads, away, words)


def _marks(
    trace: Trace, judged: Judged
) -> Iterator[tuple[int, int, Event, Rows | CacheRead, Array]]:
    """Wrong tensors: (call, order, event, rows, error of each cell; 0 where rounding
    explains it).
    """
    yield from _misrouted(trace, judged)
    for event, several in trace.rows.items():
        truth = judged.truth.get(event)
        if truth is None:
            continue
        for rows in several:
            right = truth[rows.start : rows.start + len(rows.rows)]
            if right.shape != rows.rows.shape:
                continue
            away = _beyond(distances(rows.rows, right, truth), _allowed(event, judged))
            if away.any():
                yield rows.call, trace.order[event], event, rows, away
    for event, reads in trace.reads.items():
        truth = judged.truth.get(event._replace(kind=event.kind.written))
        if truth is None:
            continue
        before = min((n for read in reads if (n := read.end - read.added) > 0), default=0)
        for read in reads:
            right = truth[read.positions]
            if right.shape != read.rows.shape:
                continue
            allowed = _allowed(event, judged) + coarseness(judged.cache, read.rows, right, truth)
            errors = distances(read.rows, right, truth)
            for clipped in saturated(judged.cache, right, truth[:before]):
                errors = np.minimum(errors, distances(read.rows, clipped, truth))
            away = _beyond(errors, allowed)
            if away.any() or read.first > _needed_from(event, read, judged):
                yield read.call, trace.order[event], event, read, away


def _misrouted(
    trace: Trace, judged: Judged
) -> Iterator[tuple[int, int, Event, Rows | CacheRead, Array]]:
    """Choices of routers that rounding does not explain, as in `_marks`."""
    for number, followed in judged.routes.items():
        event = Event("", Kind.CHOICE, place=number)
        for rows in trace.rows[event]:
            wrong = followed.wrong[rows.start :][: len(rows.rows)]
            if wrong.any():
                yield rows.call, trace.order[event], event, rows, wrong.astype(np.float64)


def _allowed(event: Event, judged: Judged) -> float:
    floor = judged.floors.get(event._replace(kind=event.kind.written), 0.0)
    extra = judged.cache_error if event.kind.is_read else 0.0
    return max(floor, _LEAST) * LIMITS.whole + extra


CACHE_CODES = {"int8": 255, "int4": 15, "int2": 3, "fp8": 0}
"""Kinds of quantised caches, and the number of steps between their least and largest value; 0 for
floating-point numbers.
"""
_FP8 = 1 / 16
"""Relative error of a number with three bits of mantissa, as fp8 of e4m3 has."""


def coarseness(codes: str, rows: Array, truth: Array, whole: Array) -> Array:
    """Relative error that decoded rows, (rows, heads, width), may have by the rounding of their
    codes. truth: what was given. whole: all rows of the layer.

    The step between two codes is read from the rows themselves: whatever a scale is shared by, a
    right one makes all values of a row multiples of one step. Where they are not, because the scale
    changes within a row, the step is the largest that the layer can have.
    """
    if not codes:
        return np.zeros(rows.shape[:2])
    if not (count := CACHE_CODES[codes]):
        return np.full(rows.shape[:2], _FP8)
    gaps = np.diff(np.sort(rows, -1), axis=-1).astype(np.float64)
    span = np.maximum(gaps.sum(-1), np.finfo(np.float32).tiny)
    least = np.where(gaps > 1e-4 * span[..., None], gaps, np.inf).min(-1)
    steps = gaps / least[..., None]
    is_grid = (np.abs(steps - steps.round()) < 0.05).all(-1) & (span <= 1.01 * count * least)
    largest = float(np.ptp(whole)) / count
    step = np.where(is_grid, np.minimum(least, largest), largest)
    norms = np.linalg.norm(whole.astype(np.float64), axis=-1)
    size = np.maximum(np.linalg.norm(truth.astype(np.float64), axis=-1), np.median(norms))
    most = 0.5 * step * np.sqrt(rows.shape[-1])
    return np.asarray(most / np.maximum(size, np.finfo(np.float32).tiny))


def saturated(codes: str, truth: Array, first: Array) -> Iterator[Array]:
    """What codes of eight bits in floating point hold of rows, (rows, heads, width), if their scale
    is that of the rows that came first: nothing is larger than the largest of these, in the layer
    or in each head.
    """
    if codes == "fp8" and len(first):
        for axes in ((0, 1, 2), (0, 2)):
            limit = np.abs(first).max(axes, keepdims=True)[0]
            yield np.clip(truth, -limit, limit)


def _beyond(errors: Array, allowed: float | Array) -> Array:
    return np.where(errors > allowed, errors, 0.0)


def _needed_from(event: Event, read: CacheRead, judged: Judged) -> int:
    """The first position that the first new token attends to."""
    window = judged.windows.get(event.layer, 0)
    return max(read.end - read.added - window + 1, 0) if window else 0


def _wrong_read(event: Event, read: CacheRead, away: Array, judged: Judged) -> Wrong:
    if not away.any():
        missing = np.arange(_needed_from(event, read, judged), read.first)
        words = "are not handed out: evicted, or outside of a window that the layer does not have"
        return Wrong(event, read.call, read.end, tuple(missing.tolist()), (), 1.0, words)
    places, heads = np.nonzero(away)
    positions = read.positions[places]
    from whence.workflows.serving.torch.listening import digest

    origin = {
        int(position): judged.origin[key]
        for position, row in zip(read.positions, read.rows)
        if (key := (event.layer, event.kind, digest(row))) in judged.origin
    }
    words = _explained(event, read.rows, away, positions, heads, judged, origin)
    return _wrong(event, (read.call, read.end), positions, heads, away, words)


def _explained(
    event: Event,
    rows: Array,
    away: Array,
    positions: Array,
    heads: Array,
    judged: Judged,
    origin: Mapping[int, tuple[int, int]],
) -> str:
    held = judged.truth[event._replace(kind=event.kind.written)]
    cells = np.nonzero(away)
    wrong = WrongRows(
        event.kind,
        rows[cells].astype(np.float64),
        held[positions, heads],
        positions,
        heads,
        held,
        judged.request,
        origin,
    )
    return explained(wrong)


def _wrong(
    event: Event, when: tuple[int, int], positions: Array, heads: Array, away: Array, words: str
) -> Wrong:
    error = float(np.median(away[away > 0]))
    return Wrong(
        event,
        *when,
        tuple(sorted(set(positions.tolist()))),
        tuple(sorted(set(heads.tolist()))),
        error,
        words,
    )


def place_words(wrong: Wrong, heads: int) -> str:
    """Describe where the tensor is wrong and what it contains. heads: number of heads of
    the layer.
    """
    texts = []
    if wrong.heads and len(wrong.heads) < heads:
        numbers = ", ".join(map(str, wrong.heads))
        texts.append(f"head{'' if len(wrong.heads) == 1 else 's'} {numbers}: ")
    texts.append(position_words(list(wrong.positions)))
    words = wrong.words or f"differ by {wrong.error:.2g} of their size"
    return f"{''.join(texts)}: {words}"
