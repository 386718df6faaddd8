"""Measures what a page shows of a comparison (`whence.results.page`): the calls in order, and
tensors of the most telling ones looked at closely.

The calls come from the comparison alone; where the runs still lie where they were, what only they
know is added: the tree, sources, facts of both sides, elements.

Details are tensors of the most telling calls, looked at element by element.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from whence import align, judge, metrics
from whence.comparison.programs import programs
from whence.dtypes import Array
from whence.errors import ElementsMissing, WhenceError
from whence.metrics import error_profile
from whence.records import Record, Run, children
from whence.records.marks import OBSERVER
from whence.records.slots import is_input
from whence.results import Comparison, SlotPair, VerdictKind
from whence.results.page import Page, PageCall, PageDetail, PageHeatmap, PageSide
from whence.workflows.notebook_progress import Count
from whence.workflows.page.calls import limited, page_calls, page_unpaired
from whence.workflows.page.places import page_places
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
    """The page of a comparison. details: calls whose tensors are looked at: findings, what
    introduces, their neighbours, then the rest.

    folder: where the comparison lies. runs: both, where they are open already; else they are
    opened. tokenizer: a tokenizer.json, or its folder. Reads elements of these only. A run that is
    gone or was changed is no error: `missing` says so.
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
    """A run with its facts, and names of those that differ from the other side's."""
    differing = (
        name
        for name in {**facts, **other_side}
        if name not in _ALWAYS and facts.get(name) != other_side.get(name)
    )
    return PageSide(path, tuple(facts.items()), tuple(differing) if other_side else ())


def _is_of(aligned: align.Aligned, compared: Comparison) -> bool:
    """Is this the plan of the comparison?"""
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
    """How a run came about, by name, as text."""
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
    """Looks at tensors of the most telling calls."""

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
        """Places, the most telling first: findings, errors beyond the noise, the neighbours of
        those, then the largest errors.
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
        """(slot in words, pair of tensors): that of the verdict first, then outputs and inputs."""
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
    """The fields of a detail that need elements."""
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
