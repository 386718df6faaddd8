"""Runs one program on the target's inputs, in wide arithmetic, in the working dtype and with other
choices, and provides the parameters for it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from whence import dtypes, judge
from whence.comparison.replays.call_tree import REPLICAS, perturbed
from whence.comparison.replays.seen_choices import I64
from whence.comparison.replays.semantics import Semantics
from whence.comparison.replays.tied_choices import ChoiceHints, Choosing
from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.records import Run
from whence.records.marks import Mark, has_mark
from whence.records.slots import is_of_child
from whence.results import SlotPair

if TYPE_CHECKING:
    from whence.replay.choices import Choices
    from whence.replay.jumps import Jumps


T = TypeVar("T")

# Bytes of converted parameters that are kept besides those of the current module.
_HELD_BYTES = 64 << 20


class ParameterCache:
    """The parameters of two runs as a correct target would hold them, converted once per dtype.
    Converted parameters are kept up to `_HELD_BYTES`; those of the current module always.
    """

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target
        self._cache: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0

    def reference_dtype(self, pair: SlotPair) -> str:
        """The dtype in which the reference holds a parameter."""
        return self._reference.records[pair.reference_record].dtype

    def expected(self, pair: SlotPair, is_initial: bool) -> Array:
        """The value of a parameter in a correct target: the reference's, rounded to the target's
        dtype. If the target's dtype is finer, or the parameter no longer has its initial value, the
        target's own value.

        If the target's is empty or not shown (an engine packs it away), the reference's value.
        """
        if pair.target_record < 0:
            return self._reference.array(pair.reference_record)
        record = self._target.records[pair.target_record]
        has_own = not is_initial or (
            judge.unit_roundoff(record.dtype) < judge.unit_roundoff(self.reference_dtype(pair))
        )
        if has_own and record.count:
            return self._target.array(pair.target_record)
        return judge.rounded(self._reference.array(pair.reference_record), record.dtype)

    def hold(self, key: tuple[Any, ...], convert: Callable[[], Any]) -> Any:
        """The converted parameters for a key, whose last item is the dtype; converted on first use.
        The oldest entries of other modules are dropped to make room.
        """
        cache = self._cache
        if key in cache:
            cache.move_to_end(key)
            return cache[key][0]
        self._make_room(key)
        params = convert()
        nbytes = sum(t.nbytes for t in params.tensors.values())
        cache[key] = (params, nbytes)
        self._cached_bytes += nbytes
        self._make_room(key)
        return params

    def _make_room(self, key: tuple[Any, ...]) -> None:
        cache = self._cache
        while self._cached_bytes > _HELD_BYTES and (oldest := next(iter(cache)))[:-1] != key[:-1]:
            self._cached_bytes -= cache.pop(oldest)[1]


class CallParameters:
    """The parameters of one replayed call, converted once per working dtype and kept for the
    module's other calls. pairs: (pair, whether the parameter still has its initial value).
    executed: the dtype in which an engine states that it executed the call, "" if it states none.
    widened: the dtype to which an engine widens 16-bit weights, "" if it does not.
    """

    def __init__(
        self,
        cache: ParameterCache,
        loaded: Any,
        pairs: list[tuple[SlotPair, bool]],
        semantics: Semantics,
        executed: str = "",
        widened: str = "",
    ) -> None:
        self._cache, self._loaded, self._pairs = cache, loaded, pairs
        self._semantics, self._executed, self._widened = semantics, executed, widened
        self._key = (
            loaded.program.id,
            executed,
            widened,
            tuple((p.reference_record, p.target_record, is_initial) for p, is_initial in pairs),
        )

    def held(self, working: str) -> Any:
        """The parameters for `Loaded.run` with this working dtype."""
        stand_ins = self._semantics.params

        def value(pair: SlotPair, is_initial: bool) -> Array:
            if pair.reference_slot not in stand_ins:
                expected = self._cache.expected(pair, is_initial)
                if self._widened and dtypes.is_half(dtypes.of(expected).name):
                    expected = judge.rounded(expected, self._widened)
                # matrices are held in the dtype of the product, biases mostly in a wider one
                rounds = self._executed and (expected.ndim > 1 or working == self._executed)
                return judge.rounded(expected, self._executed) if rounds else expected
            dtype = self._cache.reference_dtype(pair)
            return self._semantics.param(pair.reference_slot, working, dtype)

        def convert() -> Any:
            values = {p.reference_slot: value(p, is_initial) for p, is_initial in self._pairs}
            return self._loaded.hold(values, working=working)

        return convert() if stand_ins else self._cache.hold((*self._key, working), convert)


def _in_words(computed: Array, produced: Array) -> str:
    """How the target's input of a child differs from what the reference's operators give."""
    same_rows = computed.ndim == produced.ndim > 0 and computed.shape[1:] == produced.shape[1:]
    if same_rows and len(computed) != len(produced):
        rows = "1 row" if len(produced) == 1 else f"{len(produced)} rows"
        return f"{rows}, where the reference's operators give {len(computed)}"
    return "other elements than the reference's operators give"


class Misrouted(ReplayRefused):
    """A program that cannot be replayed on the target's inputs, since a choice that no tie explains
    gives children other rows. slots: by input slot of a child, the difference in words.
    """

    def __init__(self, why: str, slots: dict[str, str]) -> None:
        super().__init__(why)
        self.slots = slots


class ProgramRun:
    """Runs one call's program on the target's inputs, in wide and in working dtype.

    arrays: (inputs, strides) by slot. produced: the target's outputs by slot. dtypes: of the wide
    and of the working replay. hints: about the target's choices.
    """

    def __init__(
        self,
        loaded: Any,
        arrays: tuple[Mapping[str, Array], Mapping[str, tuple[int, ...]]],
        params: CallParameters,
        produced: Mapping[str, Array],
        semantics: Semantics,
        dtypes: tuple[str, str],
        hints: ChoiceHints,
    ) -> None:
        self._lenient = False
        self.jumps: Jumps | None = None
        self.known_sides = hints.sides
        self.loaded, self.params = loaded, params
        self.inputs, self.strides = arrays
        self._produced, self._semantics = produced, semantics
        self.wide_dtype, self.working_dtype = wide, _ = dtypes
        self.choosing = None
        if loaded.chooses:
            self.choosing = Choosing(
                loaded.program,
                produced,
                lambda choices: self._run(wide, choices=choices),
                hints,
            )

    def wide_or_routed(self) -> tuple[Mapping[str, Array], ReplayRefused | None]:
        """(the wide replay, None). If the target's choice among ties gives the program other
        extents than recorded: (the wide replay with the target's choices, the original refusal).

        The caller raises that refusal if the target does not agree with the replay, which then
        proves nothing. Raises ReplayRefused.
        """
        try:
            return self.wide(), None
        except ReplayRefused as refused:
            if self.choosing is None:
                raise
            self._lenient = True
            if self.choosing.follow_own_program(self.working):
                with contextlib.suppress(ReplayRefused):
                    return self.wide(), refused
            raise self.misrouted(refused) from refused

    def unserved(self, refused: ReplayRefused) -> ReplayRefused:
        """As `misrouted`, for a call with children that could not be replayed."""
        if self.choosing is not None:
            self._lenient = True
            self.choosing.follow_own_program(self.working)
        return self.misrouted(refused)

    def misrouted(self, refused: ReplayRefused) -> ReplayRefused:
        """The refusal, or a `Misrouted` one if only a choice that rounding does not explain gives
        the children the rows that they have in the target.
        """
        if self.choosing is None:
            return refused
        for seed in range(REPLICAS):
            # `choosing` observes these runs: they show how exponentials and sums enlarge a
            # rounding of the inputs.
            with contextlib.suppress(ReplayRefused):
                self.working(seed=seed)
        slots_inside = [slot for slot in self._produced if is_of_child(slot)]
        computed = self._computed_inside(slots_inside, self.wide_dtype)
        differing = self._differing(computed, {})
        wrong = ""
        if differing:
            wrong = self.choosing.unexplained(lambda chosen: not self._differing(computed, chosen))
        if not wrong:
            return refused
        sentences = {
            slot: f"{_in_words(computed[slot], self._produced[slot])} on the same inputs; {wrong}"
            for slot in differing
        }
        return Misrouted(str(refused), sentences)

    def _computed_inside(
        self, slots: Iterable[str], dtype: str, choices: Choices | None = None
    ) -> dict[str, Array]:
        """The children's inputs that the program computes, by slot, on any extents. Slots that it
        cannot compute are left out.
        """
        out: dict[str, Array] = {}
        for slot in slots:
            with contextlib.suppress(ReplayRefused):
                out |= self.loaded.run(
                    self.inputs,
                    self.params.held(dtype),
                    working=dtype,
                    strides=self.strides,
                    outputs=[slot],
                    convert=False,
                    choices=choices,
                    lenient=True,
                    only_needed=True,
                )
        return out

    def _differing(self, slots: Iterable[str], chosen: Mapping[int, I64]) -> list[str]:
        """The children's input slots in which the target differs from the program with these
        choices.
        """
        from whence.replay.choices import Choices

        choices = Choices(told=chosen)
        wide = self._computed_inside(slots, self.wide_dtype, choices)
        same_choices = Choices(told={place: choice.used for place, choice in choices.seen.items()})
        working = self._computed_inside(slots, self.working_dtype, same_choices)
        return [
            slot
            for slot in slots
            if slot not in wide
            or slot not in working
            or not wide[slot].shape == working[slot].shape == self._produced[slot].shape
            or judge.local(self._produced[slot], wide[slot], working[slot]).score > 1
        ]

    def with_jumps(self, jumps: Jumps, run: Callable[[], T]) -> T:
        """The result of `run` with the sides of jumps forced or recorded by `jumps`."""
        self.jumps = jumps
        try:
            return run()
        finally:
            self.jumps = None

    def wide(self) -> Mapping[str, Array]:
        return self.choosing.wide() if self.choosing is not None else self._run(self.wide_dtype)

    def working(self, *, stepwise: bool = False, seed: int | None = None) -> dict[str, Array]:
        """The replay in the target's dtypes; with a seed, on inputs perturbed by up to one
        rounding.
        """
        choices = self.choosing.for_working() if self.choosing is not None else None
        try:
            return self._run(self.working_dtype, stepwise=stepwise, seed=seed, choices=choices)
        except ReplayRefused:
            as_recorded = self.working_dtype == "recorded" and not has_mark(
                self.loaded.program, Mark.TRANSLATED
            )
            if as_recorded or self.working_dtype == self.wide_dtype:
                raise
            # Mixed dtypes inside: computed in float32 and rounded once at the end.
            return self._run("float32", stepwise=stepwise, seed=seed, choices=choices)

    def _run(
        self,
        dtype: str,
        *,
        stepwise: bool = False,
        seed: int | None = None,
        choices: Choices | None = None,
    ) -> dict[str, Array]:
        params, inputs = self.params.held(dtype), self.inputs
        if seed is not None:
            noise = np.random.default_rng(seed)
            inputs = {slot: perturbed(array, dtype, noise) for slot, array in inputs.items()}
        # A module of a user's model takes no choices.
        options: dict[str, Any] = (
            {"choices": choices, "lenient": self._lenient} if choices is not None else {}
        )
        if self.jumps is not None:
            options["jumps"] = self.jumps.of()

        def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
            outputs: dict[str, Array] = self.loaded.run(
                arrays,
                params,
                working=dtype,
                strides=self.strides,
                stepwise=stepwise,
                outputs=list(self._produced),
                convert=False,
                **options,
            )
            return outputs

        return self._semantics.run(run, inputs, dtype, self._produced)
