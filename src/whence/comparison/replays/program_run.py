"""One program run on the target's inputs: wide, in the working dtype, and with other choices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.comparison.replays.call_tree import perturbed
from whence.comparison.replays.parameters import CallParameters
from whence.comparison.replays.semantics import Semantics
from whence.comparison.replays.tied_choices import I64, Choosing, run_options
from whence.dtypes import Array
from whence.errors import ReplayRefused

if TYPE_CHECKING:
    from whence.replay.choices import Choices


class Misrouted(ReplayRefused):
    """A program that does not serve the target's inputs, since another choice, which no tie
    explains, gave calls inside other extents.
    """

    def __init__(self, why: str, slots: dict[str, str]) -> None:
        super().__init__(why)
        self.slots = slots


class ProgramRun:
    """One call's program on the target's inputs, in the dtypes that are needed."""

    def __init__(
        self,
        loaded: Any,
        inputs: Mapping[str, Array],
        params: CallParameters,
        strides: Mapping[str, tuple[int, ...]],
        produced: Mapping[str, Array],
        semantics: Semantics,
        wide: str,
        working: str,
        proposed: Callable[[], list[I64]],
    ) -> None:
        self._lenient = False
        self._loaded, self._inputs, self._params, self._strides = loaded, inputs, params, strides
        self._produced, self._semantics = produced, semantics
        self.wide_dtype, self.working_dtype = wide, working
        self.choosing = None
        if loaded.chooses:
            self.choosing = Choosing(
                loaded.program, produced, lambda choices: self._run(wide, choices=choices), proposed
            )

    def wide_or_routed(self) -> tuple[Mapping[str, Array], ReplayRefused | None]:
        """The wide replay; where another choice among ties gives the program other extents than it
        was recorded with, as that gives.

        Also the refusal that is raised instead where the target is not what that gives: then it
        proves nothing.
        """
        try:
            return self.wide(), None
        except ReplayRefused as refused:
            if self.choosing is None:
                raise
            self._lenient = True
            if self.choosing.looked(self.working):
                with contextlib.suppress(ReplayRefused):
                    return self.wide(), refused
            if slots := self._misrouted():
                raise Misrouted(str(refused), slots) from refused
            raise

    def _misrouted(self) -> dict[str, str]:
        """Outputs of another extent than the program gives them, as far as it runs, by more rows
        than there are ties.
        """
        from whence.replay.choices import Extents

        extents, most = Extents(), self.choosing.tied_rows() if self.choosing is not None else 0
        with contextlib.suppress(ReplayRefused):
            self._loaded.run(
                self._inputs,
                self._params.held(self.wide_dtype),
                working=self.wide_dtype,
                strides=self._strides,
                outputs=list(self._produced),
                convert=False,
                lenient=True,
                watch=extents,
            )
        out: dict[str, str] = {}
        for slot, operand in self._loaded.program.outputs:
            place, number = operand.get("op", (-1, 0))
            if slot not in self._produced or place not in extents.shapes:
                continue
            mine, theirs = extents.shapes[place][number], self._produced[slot].shape
            if (
                len(mine) == len(theirs) > 0
                and mine[1:] == theirs[1:]
                and abs(mine[0] - theirs[0]) > most
            ):
                ties = f"scores tie in {most} rows" if most else "no scores tie"
                out[slot] = (
                    f"{theirs[0]} rows, where the reference's operators give {mine[0]} on the "
                    f"same inputs; {ties}"
                )
        return out

    def wide(self) -> Mapping[str, Array]:
        return self.choosing.wide() if self.choosing is not None else self._run(self.wide_dtype)

    def working(self, *, stepwise: bool = False, seed: int | None = None) -> dict[str, Array]:
        """In the target's dtypes; with a seed, on inputs that are off by up to a rounding each."""
        choices = self.choosing.for_working() if self.choosing is not None else None
        try:
            return self._run(self.working_dtype, stepwise=stepwise, seed=seed, choices=choices)
        except ReplayRefused:
            if self.working_dtype in ("recorded", self.wide_dtype):
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
        held, outputs, given = self._params.held(dtype), list(self._produced), self._inputs
        if seed is not None:
            noise = np.random.default_rng(seed)
            given = {slot: perturbed(array, dtype, noise) for slot, array in given.items()}

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            made: dict[str, Array] = self._loaded.run(
                inputs,
                held,
                working=dtype,
                strides=self._strides,
                stepwise=stepwise,
                outputs=outputs,
                convert=False,
                **run_options(choices, lenient=self._lenient),
            )
            return made

        return self._semantics.run(run, given, dtype, self._produced)
