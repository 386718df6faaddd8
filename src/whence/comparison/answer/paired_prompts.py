"""The prompts of two runs in pairs, and the generated tokens that are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from whence import align
from whence.align import prompts as sequences
from whence.align.batches.prompts import Prompt
from whence.dtypes import unit_roundoff
from whence.errors import ElementsMissing
from whence.judge.limits import U32
from whence.metrics.logits import Floats, LogitFigures, of_token
from whence.records import Call, Run

_TF32, _BFLOAT16 = 2.0**-11, 2.0**-8


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A token that is compared. pair: number of its pair of prompts; index: position of the token
    before it; figures: of its logits, None with the reason in `why`; is_equal: whether the logits
    are bitwise equal.
    """

    pair: int
    index: int
    figures: LogitFigures | None
    is_equal: bool
    why: str = ""


class PairedPrompts:
    """The prompts of two runs, and the pairs of prompts that both have (`pairs`).

    reasons: why tokens of a run are not known, in words.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self.runs = reference, target
        self.reasons: list[str] = []
        self.reference = sequences.prompts(reference, whys=self.reasons)
        self.target = sequences.prompts(target, [p.tokens for p in self.reference], self.reasons)
        self.reference = sequences.prompts(reference, [p.tokens for p in self.target])
        self.pairs = sequences.together(self.reference, self.target)
        self._eos = [
            {
                name: _token_ids(settings.get("eos"))
                for name, settings in align.settings_of(run).items()
            }
            for run in self.runs
        ]

    def pair(self, number: int) -> tuple[Prompt, Prompt]:
        """The prompts of one pair."""
        pair = self.pairs[number]
        return self.reference[pair.reference], self.target[pair.target]

    def call(self, place: TokenPlace) -> Call:
        """The call of the reference that computed the logits of a token."""
        return self.runs[0].calls[self.pair(place.pair)[0].scores[place.index].call]

    def behind(self, place: TokenPlace) -> list[Call]:
        """The calls of the reference on which a token's logits depend: the call that computed them
        and, if its input was not the whole text, the prompt's earlier calls.
        """
        call, calls = self.call(place), self.runs[0].calls
        extents = [
            shape[-1]
            for ref in call.slots("input")
            if (shape := self.runs[0].records[ref.record].shape)
            and not unit_roundoff(self.runs[0].records[ref.record].dtype)
        ]
        if max(extents, default=0) > place.index:
            return [call]
        earlier = [calls[c] for c in self.pair(place.pair)[0].calls]
        return [*(c for c in earlier if c.order < call.order), call]

    def moment(self, place: TokenPlace) -> tuple[int, int, int]:
        """A sort key, (call order, row, index), by the time at which the reference computed a
        token's logits.
        """
        return self.call(place).order, self.pair(place.pair)[0].scores[place.index].row, place.index

    @property
    def is_forced(self) -> bool:
        """Whether the target was forced to use the reference's tokens."""
        return bool(self.runs[1].info.options.get("force_tokens"))

    def errors(self) -> list[float]:
        """The relative errors of the logits of all tokens with the same text before them."""
        places = (p for number in range(len(self.pairs)) for p in self.places(number)[0])
        return [p.figures.rel_logit_err for p in places if p.figures is not None]

    def unpaired_length(self) -> int:
        """The number of tokens that the reference generated for prompts without a partner."""
        paired = {pair.reference for pair in self.pairs}
        return sum(self._length(0, p) for n, p in enumerate(self.reference) if n not in paired)

    def _length(self, side: int, prompt: Prompt) -> int:
        """The number of generated tokens with logits, including the one after the last token."""
        return sum(prompt.prompt - 1 <= i < self._end(side, prompt) for i in prompt.scores)

    def _end(self, side: int, prompt: Prompt) -> int:
        """The index after which no token was chosen: the row had ended, and was only padded while
        other rows of the batch went on.
        """
        start, tokens = max(prompt.prompt, 1), prompt.tokens
        if len(tokens) == prompt.prompt:
            return len(tokens)
        filled = len(tokens) - 1
        while filled > start and tokens[filled - 1] == tokens[-1]:
            filled -= 1
        ends = self._eos[side].get(prompt.call.root, ())
        for index in range(start, len(tokens)):
            has_ended = index > start and tokens[index - 1] in ends
            if (has_ended or filled <= index < len(tokens) - 1) and self._best(
                side, prompt, index - 1
            ) not in (tokens[index], None):
                return index - 1
        return len(tokens) - (tokens[-1] in ends)

    def _best(self, side: int, prompt: Prompt, index: int) -> int | None:
        """The token with the largest logit after token `index`; None without logits."""
        try:
            return int(sequences.logits(self.runs[side], prompt.scores[index]).argmax())
        except (KeyError, ElementsMissing):
            return None

    def places(self, number: int) -> tuple[list[TokenPlace], tuple[int, int]]:
        """(compared tokens of a pair of prompts, number of tokens that each run generated)."""
        reference, target = self.pair(number)
        lengths = self._length(0, reference), self._length(1, target)
        start, stop = max(min(reference.prompt, target.prompt), 1), self.pairs[number].shared
        if len(reference.calls) > 1 and len(target.calls) > 1:
            stop = min(stop, self._end(0, reference), self._end(1, target))
        places = []
        for index in range(start - 1, stop):
            if index not in reference.scores or index not in target.scores:
                continue
            try:
                a, b = (
                    sequences.logits(self.runs[0], reference.scores[index]),
                    sequences.logits(self.runs[1], target.scores[index]),
                )
            except ElementsMissing as error:
                places.append(TokenPlace(number, index, None, False, str(error)))
                continue
            is_equal = a.dtype == b.dtype and a.tobytes() == b.tobytes()
            places.append(TokenPlace(number, index, of_token(a, b), is_equal))
        return places, lengths

    def logit_rows(self) -> Iterator[tuple[Floats, Floats]]:
        """(reference, target) logits of each token that both runs have, in float64, without entries
        that are not finite in either run.
        """
        for number, pair in enumerate(self.pairs):
            for index in range(pair.shared):
                scores = [prompt.scores.get(index) for prompt in self.pair(number)]
                try:
                    rows = [
                        sequences.logits(run, score).astype(np.float64)
                        for run, score in zip(self.runs, scores, strict=True)
                        if score is not None
                    ]
                except ElementsMissing:
                    continue
                if len(rows) == len(self.runs):
                    width = min(map(len, rows))
                    finite = np.isfinite(rows[0][:width]) & np.isfinite(rows[1][:width])
                    yield rows[0][:width][finite], rows[1][:width][finite]

    def roundoff(self, places: Iterable[TokenPlace], *, weights: bool = True) -> float:
        """Unit roundoff of the coarser dtype in which either model computes; 0 if it is not known,
        or if the models are quantised differently (or only one is).

        If both models have the same quantised dtypes, bfloat16 is taken as the bound: integers do
        not round, and the codes that floating-point rounding moves add no larger error. weights:
        False ignores quantised parameters.
        """
        widths = [U32]
        assumed = {run.info.options.get("precision") for run in self.runs}
        if "unknown" in assumed:
            return 0.0
        if "16 bits" in assumed:
            widths.append(_BFLOAT16)
        for place in places:
            for run, prompt in zip(self.runs, self.pair(place.pair), strict=True):
                widths.append(unit_roundoff(run.records[prompt.scores[place.index].record].dtype))
        packed: list[set[str]] = [set(), set()]
        for run, codes in zip(self.runs, packed, strict=True):
            for settings in align.settings_of(run).values():
                kinds = {str(kind) for kind in settings.get("parameter_dtypes") or {}}
                codes |= {kind for kind in kinds if re.match(r"u?int\d|float[48]", kind)}
                widths += [unit_roundoff(kind) for kind in kinds - codes]
                if settings.get("matmul_precision", "highest") != "highest":
                    widths.append(_TF32)
        if weights and any(packed):
            if packed[0] != packed[1]:
                return 0.0
            widths.append(_BFLOAT16)
        return max(widths)


def _token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, int):
        return (ids,)
    return tuple(i for i in ids if isinstance(i, int)) if isinstance(ids, list) else ()
