"""Measures what a page shows of a comparison (`whence.results.page`): the calls in order, and
tensors of the most telling ones looked at closely.

The calls come from the comparison alone; where the runs still lie where they were, what only they
know is added: the tree, sources, facts of both sides, elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from whence import align, judge, metrics
from whence.comparison.programs import programs
from whence.dtypes import Array
from whence.errors import ElementsMissing, WhenceError
from whence.metrics import error_profile
from whence.records import Call, Record, Run, children
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
from whence.results.page import Page, PageCall, PageDetail, PageHeatmap, PageSide
from whence.workflows.reopen import reopened, runs_of

DETAILS = 40
_ALWAYS = ("started", "capture ended")  # differ between any two runs
_LONGEST = 200  # characters of a setting
_SLOTS = 6  # tensors of one call
_MOST = 1e30  # of a ratio: what was divided by nothing says no more than that it is large
_TELLING = (
    VerdictKind.INTRODUCED,
    VerdictKind.PARAM_DIFF,
    VerdictKind.STRUCTURAL,
    VerdictKind.PRECISION,
    VerdictKind.AMPLIFIED,
    VerdictKind.NONDETERMINISTIC,
    VerdictKind.UNDETERMINED,
)


def page_of(
    compared: Comparison,
    *,
    folder: str = "",
    details: int = DETAILS,
    runs: tuple[Run, Run] | None = None,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Page:
    """The page of a comparison. details: calls whose tensors are looked at: findings, what
    introduces, their neighbours, then the rest.

    folder: where the comparison lies. runs: both, where they are open already; else they are
    opened. Reads elements of these only. A run that is gone or was changed is no error: `missing`
    says so.
    """
    missing: list[str] = []
    aligned: align.Aligned | None = None
    try:
        runs = runs or runs_of(compared, folder)
        if any(programs.is_program(run) for run in runs):
            missing.append(
                "programs were compared before anything was computed: there is no tensor to show"
            )
        # else tokens alone were compared
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
    calls = _Calls(compared, aligned)
    made = calls.made()
    found: tuple[PageDetail, ...] = ()
    if aligned is not None and details and made:
        found = tuple(_Looking(compared, aligned, made, tell).details(details))
    facts = [_facts(run) for run in runs] if runs is not None else [{}, {}]
    sides = [
        PageSide(
            path,
            tuple(mine.items()),
            tuple(k for k in {**mine, **other} if k not in _ALWAYS and mine.get(k) != other.get(k))
            if other
            else (),
        )
        for path, mine, other in zip((compared.reference, compared.target), facts, facts[::-1])
    ]
    return Page(compared, sides[0], sides[1], made, found, tuple(missing), folder)


def _is_of(aligned: align.Aligned, compared: Comparison) -> bool:
    """Is this the plan that the comparison speaks of?"""
    named = {row.pair: row.name for row in compared.rows}
    if len(aligned.plan.pairs) != len(compared.plan.pairs):
        return False
    for index, (pair, then) in enumerate(zip(aligned.plan.pairs, compared.plan.pairs)):
        call = aligned.reference.calls[pair.reference]
        if (pair.reference, pair.target) != (then.reference, then.target) or named.get(
            index, call.scope or call.root
        ) != (call.scope or call.root):
            return False
    return True


# ---- calls


class _Calls:
    """Makes the calls of a page in the order of execution."""

    def __init__(self, compared: Comparison, aligned: align.Aligned | None) -> None:
        self.compared, self.aligned = compared, aligned
        self.rows: dict[int, list[Row]] = defaultdict(list)
        for row in compared.rows:
            self.rows[row.pair].append(row)
        self.worst: dict[int, Verdict] = {}
        for verdict in compared.verdicts:
            old = self.worst.get(verdict.pair)
            if old is None or (severity(verdict.verdict), verdict.score or 0.0) > (
                severity(old.verdict),
                old.score or 0.0,
            ):
                self.worst[verdict.pair] = verdict

    def made(self) -> tuple[PageCall, ...]:
        order = self._order()
        place = {pair: i for i, pair in enumerate(order)}
        parents = self._parents(order, place)
        inside = set(parents.values())
        calls = [
            self._one(pair, parents.get(pair, -1), place[pair] not in inside) for pair in order
        ]
        return tuple(self._flowing(calls, order))

    def _order(self) -> list[int]:
        shown = [
            i
            for i in range(len(self.compared.plan.pairs))
            if i in self.rows or self.aligned is not None
        ]
        if self.aligned is None:
            return shown
        calls = self.aligned.reference.calls
        at = {i: calls[self.compared.plan.pairs[i].reference] for i in shown}
        return sorted(shown, key=lambda i: (at[i].rank, at[i].order))

    def _root(self, order: Sequence[int], place: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """(pair, place of the root's call) of what lies below it where only names are known: the
        root is the first call of its step, is named by its class, and makes what another call made.
        """
        steps: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in order:
            steps[self.rows[i][0].rank, self.rows[i][0].step].append(i)
        for first, *below in steps.values():
            row = self.rows[first][0]
            made = {r.reference_record for r in self.rows[first] if is_output(r.reference_slot)}
            others = (r for i in below for r in self.rows[i] if is_output(r.reference_slot))
            if (
                row.name == row.op_type
                and row.name[:1].isupper()
                and any(r.reference_record in made for r in others)
            ):
                yield from ((i, place[first]) for i in below)

    def _parents(self, order: Sequence[int], place: Mapping[int, int]) -> dict[int, int]:
        """Place of the call around each: from the tree, or without it from names that go on."""
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

    def _one(self, pair: int, parent: int, leaf: bool) -> PageCall:
        rows, worst = self.rows.get(pair, []), self.worst.get(pair)
        made = [r for r in rows if is_written(r.reference_slot)]
        given = [r for r in rows if is_input(r.reference_slot)]
        numbers = worst.numbers if worst is not None else {}
        error = _largest(made)
        if made and error is None and all(r.measured.identical for r in made):
            error = 0.0
        incoming = _largest(given)
        # what statistics, or a print in part, tell
        if error is None and worst is not None and worst.verdict != VerdictKind.UNDETERMINED:
            error, incoming = _told(numbers.get("e_out")), incoming or _told(numbers.get("e_in"))
        own = (
            _call(self.aligned.reference, self.compared.plan.pairs[pair].reference)
            if self.aligned is not None
            else None
        )
        other = (
            _call(self.aligned.target, self.compared.plan.pairs[pair].target)
            if self.aligned is not None
            else None
        )
        first = rows[0] if rows else None
        name = first.name if first else (own.scope or own.root) if own else "?"
        return PageCall(
            pair,
            name,
            first.op_type if first else own.op_type if own else "",
            first.verdict if first else worst.verdict if worst else "",
            step=first.step if first else own.step if own else 0,
            rank=first.rank if first else own.rank if own else 0,
            occurrence=first.occurrence if first else own.occurrence if own else 0,
            micro=own.micro if own else 0,
            phase=own.phase if own else "forward",
            root=own.root if own else "",
            number=own.number if own else "",
            parent=parent,
            leaf=own.leaf if own else leaf,
            error=error,
            incoming=incoming,
            noise=_noise(numbers, made),
            own=numbers.get("floor_rel"),
            score=min(worst.score, _MOST) if worst and worst.score is not None else None,
            shares=(
                numbers.get("share_inherited"),
                numbers.get("share_target"),
                numbers.get("share_reference"),
            ),
            evidence=worst.evidence if worst else Evidence.NONE,
            confidence=worst.confidence if worst else Confidence.NONE,
            cause=worst.cause if worst else CauseKind.UNKNOWN,
            sentence=worst.sentence if worst else "",
            slot=worst.slot if worst else "",
            operator=worst.operator if worst else "",
            source=own.source if own else "",
            target_source=other.source if other else "",
            target_name=(other.scope or other.root)
            if other and (other.scope or other.root) != name
            else "",
            parameters=_parameters(rows),
            program=own.no_program if own else "",
        )

    def _flowing(self, calls: list[PageCall], order: Sequence[int]) -> Iterator[PageCall]:
        """The calls, with what made that which they read: the innermost call that has it as output,
        else the innermost call around, whose own code made it. What a call around was given has no
        maker but that of its own input; what a call made and no other read, the code around it
        read."""
        written: dict[tuple[int, int], int] = {}
        read: set[tuple[int, int]] = set()
        reads: list[dict[int, None]] = [{} for _ in calls]
        # Calls around: place, what they were given, what they make, what calls in them made.
        opened: list[
            tuple[int, set[tuple[int, int]], set[tuple[int, int]], set[tuple[int, int]]]
        ] = []

        def close() -> None:
            place, _, made, inside = opened.pop()
            for record in made:
                written.setdefault(record, place)
            reads[place].update(
                dict.fromkeys(sorted(written[record] for record in inside - read - made))
            )
            if opened:
                opened[-1][3].update(made)

        for place, (call, pair) in enumerate(zip(calls, order)):
            while opened and opened[-1][0] != call.parent:
                close()
            slots = [
                (r.reference_slot, (call.rank, r.reference_record)) for r in self.rows.get(pair, ())
            ]
            given = {record: None for slot, record in slots if is_input(slot)}
            for record in given:
                maker = written.get(record, -1)
                if maker < 0 and not any(record in above for _, above, _, _ in opened):
                    maker = call.parent
                if maker >= 0:
                    reads[place][maker] = None
            read.update(given)
            made = {record for slot, record in slots if is_written(slot)}
            opened.append((place, set(given), made, set()))
        while opened:
            close()
        return (
            msgspec.structs.replace(call, reads=tuple(found)) for call, found in zip(calls, reads)
        )


def _call(run: Run, number: int) -> Call | None:
    return run.calls[number] if 0 <= number < len(run.calls) else None


def _largest(rows: Iterable[Row]) -> float | None:
    values = [v for r in rows if (v := r.measured.values.get("rel_l2")) is not None]
    return max(values) if values else None


def _told(error: float | None) -> float | None:
    """Of equal statistics nothing is known of the elements."""
    return error if error is not None and 0.0 < error < _MOST else None


def _parameters(rows: Iterable[Row]) -> str:
    held = [r for r in rows if is_param(r.reference_slot)]
    if not held:
        return ""
    if any(r.verdict == VerdictKind.PARAM_DIFF for r in held) and any(
        not r.measured.identical for r in held
    ):
        return "differ"
    if all(r.measured.identical for r in held):
        return "equal"
    if any(r.measured.tier == "none" for r in held):
        return "not compared"
    rounded = all(
        (r.measured.values.get("rel_l2") or 0.0) <= judge.coarser(r.reference_dtype, r.target_dtype)
        for r in held
    )
    return "differ by no more than rounding to the coarser dtype" if rounded else "differ"


def _noise(numbers: Mapping[str, float | None], made: Sequence[Row]) -> float | None:
    """The largest error that rounding here, and what came in, explain: of a replay the inherited
    error and the rounding of both sides, each at most the limit times the operator's own; of two
    dumps the growth that is let pass.

    The parts are summed, because they may all point the same way: a root of squares would be what
    is usual, not what is largest."""
    floor, inherited = numbers.get("floor_rel"), numbers.get("inherited_rel")
    if floor is not None:
        u = max((judge.coarser(r.reference_dtype, r.target_dtype) for r in made), default=0.0)
        own = judge.LIMITS.for_dtype(u)[0] * floor
        by_reference = numbers.get("reference_rel")
        return (inherited or 0.0) + own + (own if by_reference is None else min(by_reference, own))
    growth, out = numbers.get("growth"), numbers.get("e_out")
    if growth and out is not None:
        return _told(out / growth * judge.LIMITS.growth)
    return None


# ---- sides


def _facts(run: Run) -> dict[str, str]:
    """What is known of how a run came about, by name, as text."""
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


# ---- details


class _Looking:
    """Looks at tensors of the calls that tell most."""

    def __init__(
        self,
        compared: Comparison,
        aligned: align.Aligned,
        calls: Sequence[PageCall],
        tell: Callable[[int, int, str], None],
    ) -> None:
        self.compared, self.aligned, self.calls, self._tell = compared, aligned, calls, tell
        self.place = {call.pair: i for i, call in enumerate(calls)}
        self.kids = children(aligned.reference.calls)
        self.pair_of = {p.reference: i for i, p in enumerate(aligned.plan.pairs)}
        self.measured = {(r.reference_record, r.target_record): r.measured for r in compared.rows}
        self._known: dict[tuple[int, int], PageDetail] = {}

    def details(self, most: int) -> Iterator[PageDetail]:
        chosen = self._chosen(most)
        for done, place in enumerate(chosen):
            self._tell(done + 1, len(chosen), "looking closely")
            for name, slot in self._slots(place):
                yield self._one(place, name, slot)

    def _chosen(self, most: int) -> list[int]:
        """Places, the most telling first: findings, what is beyond noise, what lies beside those,
        then the largest errors.
        """
        findings = [self.place[f.pair] for f in self.compared.findings if f.pair in self.place]
        telling = [i for kind in _TELLING for i, c in enumerate(self.calls) if c.verdict == kind]
        core = list(dict.fromkeys((*findings, *telling)))[:most]
        readers: dict[int, list[int]] = defaultdict(list)
        for i, call in enumerate(self.calls):
            for maker in call.reads:
                readers[maker].append(i)
        beside = [n for i in core for n in (*self.calls[i].reads, *readers[i][:2])]
        differing = [i for i, c in enumerate(self.calls) if c.leaf and (c.error or 0.0) > 0]
        rest = sorted(differing, key=lambda i: (-(self.calls[i].score or 0.0), i))
        return list(dict.fromkeys((*core, *beside, *rest)))[:most]

    def _slots(self, place: int) -> list[tuple[str, SlotPair]]:
        """(slot in words, pair of tensors): what the verdict is about first, then what was made and
        what was read.
        """
        call = self.calls[place]
        pair = self.aligned.plan.pairs[call.pair]
        out: dict[str, SlotPair] = {}
        k, colon, slot = call.slot.partition(":")
        kids = self.kids.get(pair.reference, [])
        if colon and k.isdigit() and int(k) < len(kids) and kids[int(k)] in self.pair_of:
            child = self.aligned.reference.calls[kids[int(k)]]
            found = next(
                (
                    s
                    for s in self.aligned.plan.pairs[self.pair_of[child.id]].slots
                    if s.reference_slot == slot
                ),
                None,
            )
            if found is not None:
                out[f"{child.scope.rpartition('.')[2] or child.op_type}:{slot}"] = found
        own = {s.reference_slot: s for s in pair.slots}
        for kind in (
            call.slot,
            "output",
            "mutated",
            "param" if call.verdict == VerdictKind.PARAM_DIFF else "input",
            "input",
        ):
            out.update(
                {
                    name: s
                    for name, s in own.items()
                    if kind and name.startswith(kind) and name not in out
                }
            )
        return list(out.items())[:_SLOTS]

    def _one(self, place: int, name: str, slot: SlotPair) -> PageDetail:
        key = slot.reference_record, slot.target_record
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look(slot)
        noise, why = self._noise(self.calls[place], slot, name) if known.quantiles else (None, "")
        quantiles = tuple((x * noise, y) for x, y in known.quantiles) if noise else ()
        return msgspec.structs.replace(
            known,
            call=place,
            slot=name,
            target_slot=slot.target_slot,
            noise=noise,
            noise_from=why,
            quantiles=quantiles,
        )

    def _noise(self, call: PageCall, slot: SlotPair, name: str) -> tuple[float | None, str]:
        """Standard deviation of an element's error that rounding explains: the operator's own by
        replay, else half a unit in the last place of an element of the tensor's root mean square.
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
    """The fields of a detail that elements tell."""
    found = metrics.closely(reference, target)
    worst = []
    for at in found.worst:
        index = (
            tuple(int(i) for i in np.unravel_index(int(at), reference.shape))
            if reference.ndim
            else ()
        )
        worst.append((index, _number(reference[index]), _number(target[index])))
    return {
        "sampled": found.looked if found.looked < reference.size else 0,
        "not_finite": found.not_finite,
        "zeros": found.zeros,
        "edges": tuple(map(float, found.edges)),
        "counts": tuple(map(int, found.counts)),
        "magnitude": tuple((float(x), float(y)) for x, y in found.magnitude),
        "quantiles": tuple((float(x), float(y)) for x, y in found.quantiles),
        "worst": tuple(worst),
        "heatmap": _heatmap(found.heat) if found.heat is not None else None,
    }


def _heatmap(heat: metrics.Heat) -> PageHeatmap:
    hits, words = [], []
    for axis, energy in (("row", heat.by_row), ("channel", heat.by_channel)):
        found = error_profile.concentrated(energy)
        if found is not None:
            first, last, share = found
            hits.append((axis, first, last))
            which = f"{axis}s {first} to {last}" if last > first else f"{axis} {first}"
            words.append(
                f"{which} of {energy.size} hold{'' if last > first else 's'} {share:.0%} of the "
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
