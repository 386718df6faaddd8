"""Measures what a page shows of a comparison (`whence.results.page`): the calls in order, and
details of tensors of the most relevant calls.

The calls come from the comparison alone. If the runs are still where they were, the page also shows
their tree, sources, facts of both sides, and elements.

Details concern single elements of tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from whence import align, judge, metrics
from whence.comparison.programs import programs
from whence.dtypes import Array
from whence.errors import ElementsMissing, WhenceError
from whence.judge.power import KINDS
from whence.metrics import error_profile
from whence.records import Call, Record, Run, children, marks
from whence.records.marks import OBSERVER
from whence.records.slots import is_input, is_output, is_param, is_written
from whence.results import (
    CauseKind,
    Comparison,
    Confidence,
    Evidence,
    Row,
    SlotPair,
    Verdict,
    VerdictKind,
    severity,
)
from whence.results.page import Page, PageCall, PageDetail, PageHeatmap, PageSide, PageUnpaired
from whence.workflows.notebook_progress import Count
from whence.workflows.page.places import call_at, page_places
from whence.workflows.page.vocabulary import vocabulary
from whence.workflows.reopen import reopened, runs_of

DETAILS = 40
_ALWAYS = ("started", "capture ended")  # differ between any two runs
_LONGEST = 200  # characters of a setting


def page_of(
    compared: Comparison,
    *,
    folder: str = "",
    details: int = DETAILS,
    runs: tuple[Run, Run] | None = None,
    tokenizer: Path | None = None,
    tell: Count = lambda *_: None,
) -> Page:
    """The page of a comparison.

    details: number of calls whose tensors are examined: findings, calls that introduce an error,
    their neighbours, then the rest. folder: where the comparison lies. runs: both runs if they are
    open; otherwise they are opened. tokenizer: a tokenizer.json, or its folder.

    Only the examined tensors' elements are read. A run that is gone or was changed is no error:
    `missing` says so.
    """
    missing: list[str] = []
    aligned: align.Aligned | None = None
    try:
        runs = runs or runs_of(compared, folder)
        if any(programs.is_program(run) for run in runs):
            missing.append(
                "programs were compared before anything was computed: there is no tensor to show"
            )
        # otherwise only tokens were compared
        elif compared.generation is None or not compared.generation.logits_only:
            aligned, _ = reopened(compared, runs=runs)
        if aligned is not None and not _is_of(aligned, compared):
            aligned, runs = None, None
            missing.append(
                "the runs are not those that were compared (they were changed since): the tree, "
                "sources and elements are left out"
            )
    except (WhenceError, OSError) as error:
        missing.append(
            "the runs could not be read again, so the tree, sources and elements are left out: "
            f"{error}"
        )
    calls = page_calls(compared, aligned)
    tensors: tuple[PageDetail, ...] = ()
    if aligned is not None and details and calls:
        tensors = tuple(_Details(compared, aligned, calls, tell).listed(details))
    texts = vocabulary(compared, runs, tokenizer)
    reference, target = [_facts(run) for run in runs] if runs is not None else [{}, {}]
    whole = Page(
        compared,
        _side(compared.reference, reference, target),
        _side(compared.target, target, reference),
        calls,
        tensors,
        tuple(missing),
        folder,
        places=page_places(compared, aligned) if aligned is not None else (),
        unpaired=page_unpaired(compared, aligned, calls) if aligned is not None else (),
        vocabulary=texts,
    )
    return limited(whole)


def _side(path: str, facts: Mapping[str, str], other_side: Mapping[str, str]) -> PageSide:
    """A run with its facts, and names of the facts that differ from the other side's."""
    differing = (
        name
        for name in {**facts, **other_side}
        if name not in _ALWAYS and facts.get(name) != other_side.get(name)
    )
    return PageSide(path, tuple(facts.items()), tuple(differing) if other_side else ())


def _is_of(aligned: align.Aligned, compared: Comparison) -> bool:
    """Whether this plan pairs the same calls as the comparison's plan."""
    named = {row.pair: row.name for row in compared.rows}
    if len(aligned.plan.pairs) != len(compared.plan.pairs):
        return False
    for index, (pair, then) in enumerate(zip(aligned.plan.pairs, compared.plan.pairs)):
        call = aligned.reference.calls[pair.reference]
        if (pair.reference, pair.target) != (then.reference, then.target) or named.get(
            index, call.module_name
        ) != call.module_name:
            return False
    return True


def _facts(run: Run) -> dict[str, str]:
    """Facts about the origin of a run, by name, as text."""
    info = run.info
    out = {
        "kind": info.kind if info.kind != "whence" else "",
        "command": " ".join(info.command),
        "host": info.host,
        "started": info.started,
        "commit": info.git,
        "seed": "" if info.seed is None else str(info.seed),
        "devices": ", ".join(info.devices),
        **info.versions,
        "capture ended": run.ended,
    }
    for root, settings in align.settings_of(run).items():
        for name, value in settings.items():
            if (
                isinstance(value, (str, int, float, bool, list, dict))
                and len(str(value)) < _LONGEST
            ):
                out[f"{root}: {name}"] = (
                    ", ".join(map(str, value)) if isinstance(value, (list, dict)) else str(value)
                )
    for number, note in enumerate(n for n in run.notes if n.kind == "observer"):
        if number < 3:
            out[f"observer effect {number + 1}" if number else "observer effect"] = (
                note.text.removeprefix(OBSERVER)
            )
    return {k: v for k, v in out.items() if v}


_SLOTS = 6  # tensors of one call
_TELLING = (
    VerdictKind.INTRODUCED,
    VerdictKind.PARAM_DIFF,
    VerdictKind.STRUCTURAL,
    VerdictKind.PRECISION,
    VerdictKind.AMPLIFIED,
    VerdictKind.NONDETERMINISTIC,
    VerdictKind.UNDETERMINED,
)


class _Details:
    """Examines tensors of the most relevant calls."""

    def __init__(
        self,
        compared: Comparison,
        aligned: align.Aligned,
        calls: Sequence[PageCall],
        tell: Count,
    ) -> None:
        self.compared, self.aligned, self.calls, self._tell = compared, aligned, calls, tell
        self.place = {call.pair: i for i, call in enumerate(calls)}
        self.children = children(aligned.reference.calls)
        self.pair_of = {p.reference: i for i, p in enumerate(aligned.plan.pairs)}
        self.measured = {(r.reference_record, r.target_record): r.measured for r in compared.rows}
        self._by_records: dict[tuple[int, int], PageDetail] = {}

    def listed(self, limit: int) -> Iterator[PageDetail]:
        chosen = self._chosen(limit)
        for number, place in enumerate(chosen, 1):
            self._tell(number, len(chosen), "looking closely")
            for name, slot in self._slots(place):
                yield self._detail(place, name, slot)

    def _chosen(self, limit: int) -> list[int]:
        """Places of the calls to examine, the most relevant first: findings, errors beyond the
        noise, the neighbours of these, then the largest errors.
        """
        findings = [self.place[f.pair] for f in self.compared.findings if f.pair in self.place]
        telling = [i for kind in _TELLING for i, c in enumerate(self.calls) if c.verdict == kind]
        core = list(dict.fromkeys((*findings, *telling)))[:limit]
        readers: dict[int, list[int]] = defaultdict(list)
        for i, call in enumerate(self.calls):
            for maker in call.reads:
                readers[maker].append(i)
        neighbours = [n for i in core for n in (*self.calls[i].reads, *readers[i][:2])]
        differing = [i for i, c in enumerate(self.calls) if c.leaf and (c.error or 0.0) > 0]
        by_score = sorted(differing, key=lambda i: (-(self.calls[i].score or 0.0), i))
        return list(dict.fromkeys((*core, *neighbours, *by_score)))[:limit]

    def _slots(self, place: int) -> list[tuple[str, SlotPair]]:
        """(slot in words, pair of tensors): the slot of the verdict first, then outputs
        and inputs.
        """
        call = self.calls[place]
        pair = self.aligned.plan.pairs[call.pair]
        out: dict[str, SlotPair] = {}
        k, colon, slot = call.slot.partition(":")
        inside = self.children.get(pair.reference, [])
        if colon and k.isdigit() and int(k) < len(inside) and inside[int(k)] in self.pair_of:
            child = self.aligned.reference.calls[inside[int(k)]]
            child_name = child.scope.rpartition(".")[2] or child.op_type
            child_pair = self.aligned.plan.pairs[self.pair_of[child.id]]
            named = [s for s in child_pair.slots if s.reference_slot == slot]
            out |= {f"{child_name}:{slot}": s for s in named[:1]}
        third = "param" if call.verdict == VerdictKind.PARAM_DIFF else "input"
        slots = {s.reference_slot: s for s in pair.slots}
        for kind in filter(None, (call.slot, "output", "mutated", third, "input")):
            for name in (name for name in slots if name.startswith(kind)):
                out.setdefault(name, slots[name])
        return list(out.items())[:_SLOTS]

    def _detail(self, place: int, name: str, slot: SlotPair) -> PageDetail:
        key = slot.reference_record, slot.target_record
        detail = self._by_records.get(key)
        if detail is None:
            detail = self._by_records[key] = self._look(slot)
        noise, why = self._noise(self.calls[place], slot, name) if detail.quantiles else (None, "")
        quantiles = tuple((x * noise, y) for x, y in detail.quantiles) if noise else ()
        return msgspec.structs.replace(
            detail,
            call=place,
            slot=name,
            target_slot=slot.target_slot,
            noise=noise,
            noise_from=why,
            quantiles=quantiles,
        )

    def _noise(self, call: PageCall, slot: SlotPair, name: str) -> tuple[float | None, str]:
        """(standard deviation of an element's error that rounding explains or None, its origin).

        By replay it is the operator's own rounding; otherwise half a unit in the last place at the
        tensor's root mean square.
        """
        record = self.aligned.reference.records[slot.reference_record]
        s = record.statistics
        rms = (
            s.norm / math.sqrt(s.count)
            if s is not None and s.norm is not None and s.count
            else None
        )
        measured = self.measured.get((slot.reference_record, slot.target_record))
        if rms is None and measured is not None and record.count:
            norm = measured.values.get("reference_norm")
            rms = norm / math.sqrt(record.count) if norm is not None else None
        if not rms:
            return None, ""
        if call.own and not is_input(name):
            return call.own * rms, "the operator's own rounding, from its replay"
        u = judge.coarser(record.dtype, self.aligned.target.records[slot.target_record].dtype)
        return (u * rms / math.sqrt(3), "rounding once to the coarser dtype") if u else (None, "")

    def _look(self, slot: SlotPair) -> PageDetail:
        a, b = (
            self.aligned.reference.records[slot.reference_record],
            self.aligned.target.records[slot.target_record],
        )
        measured = self.measured.get((slot.reference_record, slot.target_record))
        detail = PageDetail(
            -1,
            slot.reference_slot,
            slot.target_slot,
            a.dtype,
            b.dtype,
            a.shape,
            b.shape,
            dims=slot.dims,
            identical=measured.identical
            if measured is not None
            else bool(a.hash) and a.hash == b.hash,
            figures=dict(measured.values) if measured is not None else {},
            elements=a.count,
            reference=_statistics(a),
            target=_statistics(b),
            why=measured.why if measured is not None else "",
        )
        if detail.identical or a.shape != b.shape or not a.count:
            return detail
        try:
            arrays = (
                self.aligned.reference.array(slot.reference_record),
                self.aligned.target.array(slot.target_record),
            )
        except (ElementsMissing, OSError) as error:
            return msgspec.structs.replace(detail, why=str(error))
        return msgspec.structs.replace(detail, **_closely(*arrays))


def _statistics(record: Record) -> tuple[float | None, ...]:
    s = record.statistics
    return (s.min, s.max, s.mean, s.std, s.norm) if s is not None else ()


def _closely(reference: Array, target: Array) -> dict[str, object]:
    """The fields of a detail that are computed from elements."""
    profile = metrics.closely(reference, target)
    worst = []
    for flat in profile.worst:
        shape = reference.shape
        index = tuple(map(int, np.unravel_index(int(flat), shape))) if shape else ()
        worst.append((index, _number(reference[index]), _number(target[index])))
    return {
        "sampled": profile.looked if profile.looked < reference.size else 0,
        "not_finite": profile.not_finite,
        "zeros": profile.zeros,
        "edges": tuple(map(float, profile.edges)),
        "counts": tuple(map(int, profile.counts)),
        "magnitude": tuple((float(x), float(y)) for x, y in profile.magnitude),
        "quantiles": tuple((float(x), float(y)) for x, y in profile.quantiles),
        "worst": tuple(worst),
        "heatmap": _heatmap(profile.heat) if profile.heat is not None else None,
    }


def _heatmap(heat: metrics.Heat) -> PageHeatmap:
    hits, words = [], []
    for axis, energy in (("row", heat.by_row), ("channel", heat.by_channel)):
        if (concentrated := error_profile.concentrated(energy)) is not None:
            first, last, share = concentrated
            hits.append((axis, first, last))
            lines = f"{axis}s {first} to {last}" if last > first else f"{axis} {first}"
            words.append(
                f"{lines} of {energy.size} hold{'' if last > first else 's'} {share:.0%} of the "
                "squared error"
            )
    values = tuple(float(v) if np.isfinite(v) else None for v in heat.values.reshape(-1))
    shape = (int(heat.values.shape[0]), int(heat.values.shape[1]))
    return PageHeatmap(
        shape, values, heat.by_row.size, heat.by_channel.size, tuple(hits), "; ".join(words)
    )


def _number(value: object) -> float | None:
    number = complex(value)  # type: ignore[call-overload]
    return float(number.real if number.imag == 0 else abs(number)) if np.isfinite(number) else None


# The calls of a page: their order, their tree, who reads what, errors and verdicts.
#
# A page stays small for any number of calls (`limited`): it chooses the calls to show and states
# how many are left out.
#
# Calls that only one run has are placed between calls that both runs have.

_LARGEST_RATIO = 1e30


def page_calls(compared: Comparison, aligned: align.Aligned | None) -> tuple[PageCall, ...]:
    """The calls in execution order. aligned: None when the runs are gone."""
    return _Calls(compared, aligned).listed()


class _Calls:
    """The calls of a page in execution order. aligned: None when the runs are gone."""

    def __init__(self, compared: Comparison, aligned: align.Aligned | None) -> None:
        self.compared, self.aligned = compared, aligned
        self.rows: dict[int, list[Row]] = defaultdict(list)
        for row in compared.rows:
            self.rows[row.pair].append(row)
        self.worst: dict[int, Verdict] = {}
        for verdict in compared.verdicts:
            previous = self.worst.get(verdict.pair)
            if previous is None or _rank(verdict) > _rank(previous):
                self.worst[verdict.pair] = verdict

    def listed(self) -> tuple[PageCall, ...]:
        order = self._order()
        place = {pair: i for i, pair in enumerate(order)}
        parents = self._parents(order, place)
        inside = set(parents.values())
        calls = [
            self._page_call(pair, parents.get(pair, -1), place[pair] not in inside)
            for pair in order
        ]
        return tuple(self._with_reads(calls, order))

    def _order(self) -> list[int]:
        pairs = [
            i
            for i in range(len(self.compared.plan.pairs))
            if i in self.rows or self.aligned is not None
        ]
        if self.aligned is None:
            return pairs
        calls = self.aligned.reference.calls
        call_of = {i: calls[self.compared.plan.pairs[i].reference] for i in pairs}
        return sorted(pairs, key=lambda i: (call_of[i].rank, call_of[i].order))

    def _root(self, order: Sequence[int], place: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """(pair, place of the root's call) of calls below a root, for runs that only have names.

        The root is the first call of its step, has the name of its class, and returns what a call
        below it returned.
        """
        steps: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in order:
            steps[self.rows[i][0].rank, self.rows[i][0].step].append(i)
        for first, *below in steps.values():
            row = self.rows[first][0]
            returned = {r.reference_record for r in self.rows[first] if is_output(r.reference_slot)}
            others = (r for i in below for r in self.rows[i] if is_output(r.reference_slot))
            if (
                row.name == row.op_type
                and row.name[:1].isupper()
                and any(r.reference_record in returned for r in others)
            ):
                yield from ((i, place[first]) for i in below)

    def _parents(self, order: Sequence[int], place: Mapping[int, int]) -> dict[int, int]:
        """Place of the enclosing call for each call, from the tree or, without it, from dotted
        names.
        """
        pairs = self.compared.plan.pairs
        if self.aligned is not None:
            calls = self.aligned.reference.calls
            of_call = {pairs[i].reference: place[i] for i in order}
            out = {}
            for i in order:
                up = calls[pairs[i].reference].parent
                while up >= 0 and up not in of_call:
                    up = calls[up].parent
                if up >= 0:
                    out[i] = of_call[up]
            return out
        latest: dict[tuple[int, int, str], int] = {}
        out = dict(self._root(order, place))
        for i in order:
            row = self.rows[i][0]
            latest[row.rank, row.step, row.name] = place[i]
            name = row.name
            while "." in name:
                name = name.rpartition(".")[0]
                if (row.rank, row.step, name) in latest:
                    out[i] = latest[row.rank, row.step, name]
                    break
        return out

    def _page_call(self, pair: int, parent: int, leaf: bool) -> PageCall:
        rows, worst = self.rows.get(pair, []), self.worst.get(pair)
        calls = self.compared.plan.pairs[pair]
        reference = target = None
        if self.aligned is not None:
            reference = call_at(self.aligned.reference, calls.reference)
            target = call_at(self.aligned.target, calls.target)
        if rows:
            key = rows[0]
            name, op_type, verdict = key.name, key.op_type, key.verdict
        else:
            name, op_type, verdict = "?", "", worst.verdict if worst else ""
            if reference is not None:
                name, op_type = reference.module_name, reference.op_type
        place = rows[0] if rows else reference
        target_name = target.module_name if target else ""
        page_call = PageCall(
            pair,
            name,
            op_type,
            verdict,
            step=place.step if place else 0,
            rank=place.rank if place else 0,
            occurrence=place.occurrence if place else 0,
            parent=parent,
            leaf=leaf,
            target_source=target.source if target else "",
            target_name=target_name if target_name != name else "",
            parameters=_parameters(rows),
            **_errors(rows, worst),
            **_judgement(worst),
        )
        if reference is None:
            return page_call
        return msgspec.structs.replace(
            page_call,
            micro=reference.micro,
            phase=reference.phase,
            root=reference.root,
            number=reference.number,
            leaf=reference.leaf,
            source=reference.source,
            program=reference.no_program,
            whole=marks.has_mark(reference, marks.Mark.PUT_TOGETHER),
        )

    def _with_reads(self, calls: list[PageCall], order: Sequence[int]) -> Iterator[PageCall]:
        """The calls with the producers of what they read.

        The producer is the innermost call with the tensor as output, else the innermost enclosing
        call. An input of an enclosing call has the producer that it has there; an output that no
        other call reads counts as read by the enclosing code.
        """
        maker_of: dict[tuple[int, int], int] = {}
        read: set[tuple[int, int]] = set()
        reads: list[dict[int, None]] = [{} for _ in calls]
        # Enclosing calls: place, inputs, outputs, outputs of inner calls.
        opened: list[
            tuple[int, set[tuple[int, int]], set[tuple[int, int]], set[tuple[int, int]]]
        ] = []

        def close() -> None:
            place, _, outputs, inside = opened.pop()
            for record in outputs:
                maker_of.setdefault(record, place)
            reads[place].update(
                dict.fromkeys(sorted(maker_of[record] for record in inside - read - outputs))
            )
            if opened:
                opened[-1][3].update(outputs)

        for place, (call, pair) in enumerate(zip(calls, order)):
            while opened and opened[-1][0] != call.parent:
                close()
            slots = [
                (r.reference_slot, (call.rank, r.reference_record)) for r in self.rows.get(pair, ())
            ]
            inputs = {record: None for slot, record in slots if is_input(slot)}
            for record in inputs:
                maker = maker_of.get(record, -1)
                if maker < 0 and not any(record in above for _, above, _, _ in opened):
                    maker = call.parent
                if maker >= 0:
                    reads[place][maker] = None
            read.update(inputs)
            outputs = {record for slot, record in slots if is_written(slot)}
            opened.append((place, set(inputs), outputs, set()))
        while opened:
            close()
        return (
            msgspec.structs.replace(call, reads=tuple(makers)) for call, makers in zip(calls, reads)
        )


def _rank(verdict: Verdict) -> tuple[float, float]:
    return severity(verdict.verdict), verdict.score or 0.0


def _errors(rows: Sequence[Row], worst: Verdict | None) -> dict[str, Any]:
    """The error fields of a page's call."""
    outputs = [r for r in rows if is_written(r.reference_slot)]
    numbers = worst.numbers if worst is not None else {}
    error = _largest(outputs)
    if outputs and error is None and all(r.measured.identical for r in outputs):
        error = 0.0
    incoming = _largest(r for r in rows if is_input(r.reference_slot))
    # errors known from statistics, or from partially printed tensors
    if error is None and worst is not None and worst.verdict != VerdictKind.UNDETERMINED:
        error, incoming = _finite(numbers.get("e_out")), incoming or _finite(numbers.get("e_in"))
    shares = ("share_inherited", "share_target", "share_reference")
    return {
        "error": error,
        "incoming": incoming,
        "noise": _noise(numbers, outputs),
        "added": 0.0 if error == 0.0 else numbers.get("error_rel"),
        "own": numbers.get("floor_rel"),
        "shares": tuple(numbers.get(name) for name in shares),
        "visible": tuple(numbers.get(f"visible_{kind}") for kind in KINDS)
        if f"visible_{KINDS[-1]}" in numbers
        else (),
    }


def _judgement(worst: Verdict | None) -> dict[str, Any]:
    """The fields of a page's call that come from its worst verdict."""
    if worst is None:
        return {
            "evidence": Evidence.NONE,
            "confidence": Confidence.NONE,
            "cause": CauseKind.UNKNOWN,
        }
    return {
        "score": min(worst.score, _LARGEST_RATIO) if worst.score is not None else None,
        "evidence": worst.evidence,
        "confidence": worst.confidence,
        "cause": worst.cause,
        "sentence": worst.sentence,
        "slot": worst.slot,
        "operator": worst.operator,
    }


def _largest(rows: Iterable[Row]) -> float | None:
    values = [v for r in rows if (v := r.measured.values.get("rel_l2")) is not None]
    return max(values) if values else None


def _finite(error: float | None) -> float | None:
    """An error that is informative, else None.

    Equal statistics prove nothing about the elements, and a ratio to zero only says that the error
    is large.
    """
    return error if error is not None and 0.0 < error < _LARGEST_RATIO else None


def _parameters(rows: Iterable[Row]) -> str:
    params = [r for r in rows if is_param(r.reference_slot)]
    if not params:
        return ""
    if any(r.verdict == VerdictKind.PARAM_DIFF for r in params) and any(
        not r.measured.identical for r in params
    ):
        return "differ"
    if all(r.measured.identical for r in params):
        return "equal"
    if any(r.measured.tier == "none" for r in params):
        return "not compared"
    rounded = all(
        (r.measured.values.get("rel_l2") or 0.0) <= judge.coarser(r.reference_dtype, r.target_dtype)
        for r in params
    )
    return "differ by no more than rounding to the coarser dtype" if rounded else "differ"


def _noise(numbers: Mapping[str, float | None], outputs: Sequence[Row]) -> float | None:
    """The largest error explained by local rounding and by the error of the inputs.

    By replay: the inherited error plus the rounding of both sides, each at most the limit times the
    operator's own. From two dumps: the tolerated growth.

    The parts are summed, because they may all point the same way: a root of squares is the usual
    error, not the largest.
    """
    floor, inherited = numbers.get("floor_rel"), numbers.get("inherited_rel")
    if floor is not None:
        u = max((judge.coarser(r.reference_dtype, r.target_dtype) for r in outputs), default=0.0)
        rounding = judge.LIMITS.size(u) * floor
        by_reference = numbers.get("reference_rel")
        of_reference = rounding if by_reference is None else min(by_reference, rounding)
        return (inherited or 0.0) + rounding + of_reference
    growth, error = numbers.get("growth"), numbers.get("e_out")
    if growth and error is not None:
        return _finite(error / growth * judge.LIMITS.growth)
    return None


_MOST_CALLS = 20_000
_QUIET = (VerdictKind.IDENTICAL, VerdictKind.NOISE, VerdictKind.INHERITED)


def limited(page: Page, most: int = _MOST_CALLS) -> Page:
    """The page limited to about `most` calls.

    Kept are the calls around differences (the worst first), the examined calls, and then others in
    execution order, each with its enclosing calls. `missing` says how many are left out, and which
    command shows them.
    """
    calls = page.calls
    if len(calls) <= most:
        return page
    kept: set[int] = set()
    for place in _ranked(page):
        if len(kept) >= most:
            break
        while place >= 0 and place not in kept:
            kept.add(place)
            place = calls[place].parent
    order = sorted(kept)
    new = {old: number for number, old in enumerate(order)}
    loud = sum(call.verdict not in _QUIET for k, call in enumerate(calls) if k not in kept)
    return msgspec.structs.replace(
        page,
        calls=tuple(_moved(calls[old], new) for old in order),
        details=tuple(
            msgspec.structs.replace(detail, call=new[detail.call])
            for detail in page.details
            if detail.call in new
        ),
        unpaired=tuple(_moved_unpaired(call, new) for call in page.unpaired),
        missing=(*page.missing, _sentence(page, len(calls) - len(order), loud)),
    )


def _sentence(page: Page, left_out: int, loud: int) -> str:
    what = "all of them equal, noise or inherited" if not loud else f"{loud} of them beyond noise"
    return (
        f"{left_out} of {len(page.calls)} calls are not on this page, {what}; all of them: whence "
        f'query {page.folder or "CMP"} "select * from calls", and tensors: "select * from pairs"'
    )


def _ranked(page: Page) -> Iterable[int]:
    """Places of calls, the most relevant first."""
    calls = page.calls
    loud = [k for k, call in enumerate(calls) if call.verdict not in _QUIET]
    loud.sort(key=lambda k: (-VerdictKind(calls[k].verdict).severity, -(calls[k].score or 0.0), k))
    findings = {finding.pair for finding in page.comparison.findings}
    first = [k for k, call in enumerate(calls) if call.pair in findings]
    return [*first, *(detail.call for detail in page.details), *loud, *range(len(calls))]


def _moved(call: PageCall, new: Mapping[int, int]) -> PageCall:
    return msgspec.structs.replace(
        call,
        parent=new.get(call.parent, -1),
        reads=tuple(new[place] for place in call.reads if place in new),
    )


def _moved_unpaired(call: PageUnpaired, new: Mapping[int, int]) -> PageUnpaired:
    def places(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(new.get(place, place) for place in old if place < 0 or place in new)

    return msgspec.structs.replace(
        call,
        parent=new.get(call.parent, -1),
        after=new.get(call.after, -1),
        reads=places(call.reads),
        readers=places(call.readers),
    )


_MOST = 400  # of a side


def page_unpaired(
    compared: Comparison, aligned: align.Aligned, calls: Sequence[PageCall]
) -> tuple[PageUnpaired, ...]:
    """Unpaired calls of both sides, in the order in which they began."""
    place = {call.pair: i for i, call in enumerate(calls)}
    pairs = compared.plan.pairs
    reference = {pairs[pair].reference: i for pair, i in place.items()}
    target = {pairs[pair].target: i for pair, i in place.items()}
    for pair, i in place.items():
        target.update(dict.fromkeys(pairs[pair].also, i))
    out: list[PageUnpaired] = []
    for side, run, alone, places in (
        ("reference", aligned.reference, compared.plan.unmatched_reference, reference),
        ("target", aligned.target, compared.plan.unmatched_target, target),
    ):
        ids = [number for number in alone if 0 <= number < len(run.calls)]
        if 0 < len(ids) <= _MOST:
            out += _Side(side, run, ids, places, len(out)).listed()
    return tuple(out)


class _Side:
    """One run: its unpaired calls, numbered from `base`, between its paired ones."""

    def __init__(
        self, side: str, run: Run, alone: Sequence[int], places: Mapping[int, int], base: int
    ) -> None:
        self.side, self.run = side, run
        self.alone = sorted(alone, key=lambda number: run.calls[number].order)
        self.code = dict(places) | {n: -1 - base - k for k, n in enumerate(self.alone)}

    def listed(self) -> Iterator[PageUnpaired]:
        order = sorted(self.run.calls, key=lambda call: call.order)
        parents = {call.id: self._around(call) for call in order}
        last: dict[int | None, int] = {}
        after = {}
        makers: dict[int, int] = {}
        reads: dict[int, dict[int, None]] = {}
        for call in order:
            code = self.code.get(call.id)
            if code is None:
                continue
            around = parents[call.id]
            if code < 0:
                after[call.id] = last.get(around, -1)
            else:
                last[around] = code
            reads[code] = {
                makers[ref.record]: None
                for ref in call.refs
                if is_input(ref.slot) and ref.record in makers
            }
            # Of the calls that return a tensor, the innermost begins last.
            makers.update((ref.record, code) for ref in call.refs if is_written(ref.slot))
        readers: dict[int, list[int]] = {}
        for code, read in reads.items():
            for maker in read:
                readers.setdefault(maker, []).append(code)
        for number in self.alone:
            call, code = self.run.calls[number], self.code[number]
            around = parents[number]
            yield PageUnpaired(
                self.side,
                call.module_name,
                call.op_type or call.op,
                call.step,
                call.rank,
                parent=around if around is not None and around >= 0 else -1,
                inside=-1 - around if around is not None and around < 0 else -1,
                after=after[number],
                reads=tuple(reads[code]),
                readers=tuple(dict.fromkeys(readers.get(code, ()))),
            )

    def _around(self, call: Call) -> int | None:
        """Code of the nearest enclosing call that the page contains."""
        up = call.parent
        while up >= 0 and up not in self.code:
            up = self.run.calls[up].parent
        return self.code[up] if up >= 0 else None
