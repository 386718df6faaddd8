"""How many bytes of elements the steps of each root take, and what is said of it."""

from __future__ import annotations

from whence.instrument.wording import size


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

    def bytes_of_step(self, used: int) -> int:
        """Bytes that were written since the step began."""
        return used - self._start

    def end(self, root: str, used: int, whole: bool) -> str:
        """A step of `root` that was asked for has ended: the line to say, "" from the second time.

        whole: all its elements were kept.
        """
        step, parameters = used - self._start, self.parameter_bytes - self._parameters_before
        first = root not in self._expected
        if whole:
            self._expected[root] = step - parameters if first else max(step, self._expected[root])
        if root in self._announced or (whole and not first):
            return ""
        self._announced.add(root)
        if not whole:
            return (
                f"whence: {root}: no whole step fits --max-bytes {size(self._max_bytes)}; "
                "statistics and hashes go on"
            )
        parameter_words = f"parameters {size(parameters)} once, " if parameters else ""
        step -= parameters
        if step <= 0:
            return f"whence: {root}: {parameter_words}no elements in a step"
        fit = max(1, 1 + int((self._max_bytes - self._start - parameters - step) // step))
        count = f"{fit:,}".replace(",", " ")
        return (
            f"whence: {root}: {parameter_words}{size(step)}/step, {count} "
            f"{'step fits' if fit == 1 else 'steps fit'}"
        )
