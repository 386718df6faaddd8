"""How many bytes of elements the steps of each root take, and what is said of it."""

from __future__ import annotations

from typing import NamedTuple

from whence.instrument.wording import counted, size

_EXACT = 100  # fewer steps than this are counted, more are estimated


class StepLine(NamedTuple):
    """What to say of a step. is_warning: else it is worth a line at a terminal only."""

    text: str
    is_warning: bool = False


class StepSizes:
    """Sizes of the steps that ended. The first step of a root writes its parameters too, the later
    ones only where an optimizer changes them.

    max_bytes: budget of the run for elements. parameter_bytes: bytes of parameters so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.parameter_bytes = max_bytes, 0
        self._start = self._parameters_before = 0
        self._expected: dict[str, int] = {}
        self._announced: set[str] = set()

    def begin(self, root: str, used: int) -> str:
        """A step of `root` begins, `used` bytes are written: why it will not fit, "" if it may."""
        self._start, self._parameters_before = used, self.parameter_bytes
        expected = self._expected.get(root, 0)
        if used + expected <= self._max_bytes:
            return ""
        return (
            f"elements end here: {size(used)} used, the next step needs {size(expected)}, "
            f"--max-bytes is {size(self._max_bytes)}; statistics and hashes go on"
        )

    def fits(self, root: str, used: int, waiting: int) -> bool:
        """Will `begin` say "" whatever becomes of the `waiting` bytes that are not written yet?

        Another thread may begin and end earlier steps meanwhile: they are expected to be as large
        as they can be.
        """
        written = used + waiting
        last = written - self._start  # read before what the end of that step changes
        return written + max(last, self._expected.get(root, 0)) <= self._max_bytes

    def bytes_of_step(self, used: int) -> int:
        """Bytes that were written since the step began."""
        return used - self._start

    def end(self, root: str, used: int, whole: bool) -> StepLine | None:
        """A step of `root` that was asked for has ended: what to say, None from the second time.

        whole: all its elements were kept.
        """
        step, parameters = used - self._start, self.parameter_bytes - self._parameters_before
        first = root not in self._expected
        if whole:
            self._expected[root] = step - parameters if first else max(step, self._expected[root])
        if root in self._announced or (whole and not first):
            return None
        self._announced.add(root)
        if not whole:
            return StepLine(
                f"whence: {root}: no whole step fits into --max-bytes {size(self._max_bytes)}; "
                "from here on only statistics and hashes are kept",
                is_warning=True,
            )
        step -= parameters
        text = f"whence: capturing {root}: "
        if parameters:
            text += f"{size(parameters)} of parameters" + (" + " if step > 0 else ", ")
        if step <= 0:
            return StepLine(text + "no new elements per step")
        fit = max(1, 1 + int((self._max_bytes - self._start - parameters - step) // step))
        return StepLine(f"{text}{size(step)} per step; room for {_about(fit)}")


def _about(steps: int) -> str:
    """ "3 steps", "about 830 000 steps"."""
    if steps < _EXACT:
        return counted(steps, "step")
    return f"about {counted(int(float(f'{steps:.1e}')), 'step')}"
