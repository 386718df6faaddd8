"""Lists the semantics with which a call is replayed where a policy declares something for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whence import dtypes, judge
from whence.comparison.paired_runs import PairedCall
from whence.comparison.replays.semantics import Quantise, ReplayResult, Semantics
from whence.comparison.verdicts.declared.ledger import DeclarationLedger
from whence.comparison.verdicts.declared.masked_rows import MaskedRows
from whence.comparison.verdicts.declared.quantised_weights import QuantisedWeight
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge.policy import Entry, Scheme
from whence.records import Call, Program, Run
from whence.replay import declared_semantics

_INPUT_SCALES = ("input_scale", "act_scale", "activation_scale", "x_scale", "scale_x")
# Schemes that are tried, in this order, when a target's quantised layers were not declared.
_DYNAMIC = (
    None,
    Scheme(8, "token", mode="dynamic"),
    Scheme(8, "token", symmetric=False, mode="dynamic"),
    Scheme(8, "tensor", mode="dynamic"),
    Scheme(8, "tensor", symmetric=False, mode="dynamic"),
)


@dataclass(frozen=True, slots=True)
class CallReplay:
    """Replays of one paired call. figures: runs the replay under given semantics. cause: the cause
    of flagged outputs, in one word. wide: float64 outputs of a program without parameters on the
    target's inputs.
    """

    figures: Callable[[Semantics], ReplayResult]
    cause: Callable[[Sequence[str]], str]
    wide: Callable[[Program], Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class DeclaredCall:
    """A paired call with declarations (`entries`, by what they declare), or with quantised
    weights.
    """

    pair: PairedCall
    entries: Mapping[str, Entry]
    weights: Sequence[QuantisedWeight]

    @property
    def words(self) -> str:
        """All entries in words."""
        return "; ".join(map(str, self.entries.values()))


class CandidateSemantics:
    """Lists every replay that the declarations for a call allow."""

    def __init__(
        self, reference: Run, target: Run, masked: MaskedRows, ledger: DeclarationLedger
    ) -> None:
        self.reference, self.target = reference, target
        self._masked, self._ledger = masked, ledger
        self._programs: dict[tuple[str, str], Program | None] = {}
        self._usual: list[Scheme | None] = list(_DYNAMIC)

    def prefer(self, scheme: Scheme | None) -> None:
        """Try the activation scheme that explained a call first for the next calls: layers of one
        model are quantised alike.
        """
        self._usual.sort(key=lambda usual: usual != scheme)

    def of(
        self, declared: DeclaredCall, replaying: CallReplay
    ) -> Iterable[tuple[Semantics, Scheme | None]]:
        """Every replay, the likeliest first, each with the activation scheme it assumes."""
        call, entries, weights = declared.pair.call, declared.entries, declared.weights
        entry = entries.get("quantisation")
        schemes: Sequence[Scheme | None] = (
            self._usual
            if weights and entry is None
            else (entry.activations if entry is not None else None,)
        )
        values: list[dict[str, Array]] = [
            dict(zip((w.slot for w in weights), v, strict=True))
            for v in itertools.product(*(w.values for w in weights))
        ]
        programs = list(self._edited(call, entries, replaying))
        keep = tolerance = None
        for kind in ("skip-masked-rows", "tolerance", "fused-rounding"):
            if kind in entries:
                self._ledger.apply(entries[kind])
        if "skip-masked-rows" in entries:
            keep = self._masked.keeper(call, declared.pair.partner, entries["skip-masked-rows"])
        if "tolerance" in entries:
            bound = entries["tolerance"]
            tolerance = lambda slot: bound if bound.covers_slot(slot) else None  # noqa: E731
        size_only = "fused-rounding" in entries
        number = itertools.count()
        for scheme in schemes:
            for quantise in self._activations(scheme, declared.pair.partner):
                for program, params in itertools.product(programs, values):
                    name = f"{call.id}.{next(number)}"
                    yield (
                        Semantics(name, params, quantise, program, size_only, keep, tolerance),
                        scheme,
                    )

    def _edited(
        self, call: Call, entries: Mapping[str, Entry], replaying: CallReplay
    ) -> Sequence[Program | None]:
        """The call's program in every declared form; None stands for the unchanged program."""
        program = self.reference.programs.get(call.program)
        forms: list[Program | None] = [None]
        if program is None:
            return forms
        if "fast-gelu" in entries:
            entry = entries["fast-gelu"]
            names = (entry.form,) if entry.form else ("tanh", "erf")
            edited = [self._gelu(program, name, replaying) for name in names]
            forms = self._if_any(entry, edited) or forms
        if "tf32" in entries:
            edited = [
                declared_semantics.with_tf32(form or program, how)
                for how in ("even", "truncate", "away")
                for form in forms
            ]
            forms = self._if_any(entries["tf32"], edited) or forms
        return forms

    def _if_any(self, entry: Entry, edited: Sequence[Program | None]) -> list[Program | None]:
        """The programs that exist; if there are any, the entry counts as applied."""
        programs: list[Program | None] = [p for p in edited if p is not None]
        if programs:
            self._ledger.apply(entry)
        return programs

    def _gelu(self, program: Program, form: str, replaying: CallReplay) -> Program | None:
        """The program with its GELU in this form; None where it has no GELU, or already this
        form.
        """
        key = (program.id, form)
        if key not in self._programs:
            edited = declared_semantics.with_gelu(program, form)
            if edited is None:
                for present in ("erf", "tanh", "sigmoid"):
                    try:
                        is_present = declared_semantics.computes_gelu(
                            program, present, replaying.wide
                        )
                    except (ReplayRefused, ElementsMissing):
                        break
                    if is_present:
                        if present != form:
                            edited = declared_semantics.gelu_program(program, form)
                        break
            self._programs[key] = edited
        return self._programs[key]

    def _activations(self, scheme: Scheme | None, partner: Call) -> Iterator[Quantise | None]:
        """The ways activations of this scheme are computed in practice: two spans, in float32 or in
        the input's own dtype.
        """
        if scheme is None:
            yield None
            return
        scale = self._input_scale(partner, scheme) if scheme.mode == "static" else None
        spans = (
            ("full", "narrow")
            if scheme.symmetric and scheme.format == "int" and scale is None
            else ("narrow",)
        )
        for in_own_dtype, span in itertools.product((False, True), spans):
            grid = declared_semantics.Grid(
                scheme.bits, scheme.per, 0, 0, scheme.symmetric, scheme.format, span
            )
            yield _quantiser(grid, scale, in_own_dtype=in_own_dtype)

    def _input_scale(self, partner: Call, scheme: Scheme) -> Array | None:
        if scheme.scale is not None:
            return np.asarray(scheme.scale)
        for ref in partner.slots("param"):
            if (
                any(word in ref.slot for word in _INPUT_SCALES)
                and self.target.records[ref.record].count == 1
            ):
                return self.target.array(ref.record).astype(np.float64).reshape(())
        return None


def _quantiser(
    grid: declared_semantics.Grid, scale: Array | None, *, in_own_dtype: bool
) -> Quantise:
    def quantise(x: Array, flips: tuple[int, ...]) -> tuple[Array, int]:
        dtype = dtypes.of(x).name
        is_wide = judge.unit_roundoff(dtype) <= 2.0**-53
        working = dtype if in_own_dtype or is_wide else "float32"
        # Division, or multiplication with a rounded reciprocal, of a scale that was rounded once: a
        # few units either way.
        ties = declared_semantics.Ties(4 * judge.unit_roundoff(working))
        return declared_semantics.fake_quantise(
            x, grid, scale, working=working, ties=ties, flips=flips
        ), ties.per_vector

    return quantise
