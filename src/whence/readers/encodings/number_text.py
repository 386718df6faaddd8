"""Numbers written as text: their values, and how many digits the text keeps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence import dtypes
from whence.dtypes import Array

NUMBER = r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4})?|[nN]a[nN]|[iI]nf(?:inity)?)"
_PARTS = re.compile(r"(\d+)?(?:\.(\d*))?(?:[eE]([-+]?\d{1,4}))?$")
_WHOLE = re.compile(r"[-+]?\d{1,18}")
_TRUTH = {"True": True, "False": False}
_USUAL = 6  # significant digits where nothing else is asked for
_EXACT = 10  # significant digits from which on a text holds every float32 as it is


@dataclass(frozen=True, slots=True)
class Digits:
    """How the numbers of one text were written.

    kept: significant digits, 0 where each number has the same count of decimals. last: decimal
    place of the finest last digit, 6 for 0.000001.
    """

    kept: int
    last: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> Digits:
        """Derives the digits from all numbers of a file, which one writer wrote."""
        most, last, fractions, powers = 0, 0, set[int](), False
        for match in filter(None, map(_PARTS.search, texts)):
            whole, fraction, power = match[1] or "", match[2], match[3]
            powers = powers or power is not None
            if not fraction and power is None:  # a whole number, NaN, infinity
                continue
            most = max(most, len((whole + (fraction or "")).lstrip("0")))
            last = max(last, len(fraction or "") - int(power or 0))
            fractions.add(len(fraction or ""))
        if len(fractions) < 2:
            return cls(most if powers else 0, last)
        return cls(max(most, _USUAL), last)  # zeros at ends are left out

    @property
    def is_exact(self) -> bool:
        """Whether the text represents every float32 exactly."""
        return self.kept >= _EXACT

    def step(self, values: Array) -> float:
        """Returns the step of the last kept digit of the largest of these numbers; 0 where the text
        is exact.
        """
        finite = values[np.isfinite(values)]
        top = float(np.abs(finite).max(initial=0.0))
        if self.is_exact or not top or (self.last == 1 and (finite == np.rint(finite)).all()):
            return 0.0
        step = 10.0 ** min(-self.last, 300)
        if self.kept:
            magnitude = math.floor(math.log10(top)) + 1
            step = max(step, 10.0 ** max(magnitude - self.kept, -300))
        return 0.0 if step <= 2 * float(np.spacing(np.float32(min(top, 3e38)))) else step


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The numbers of a text. step: of the last digit of the largest, 0 where nothing is lost."""

    array: Array
    step: float = 0.0

    @classmethod
    def of(cls, texts: Sequence[str], shape: tuple[int, ...], digits: Digits) -> Values:
        """Converts words to numbers: integers become int64, true and false bool; others float32
        where the text holds no more than that, else float64. Raises ValueError.
        """
        if texts and all(text in _TRUTH for text in texts):
            return cls(np.array([_TRUTH[text] for text in texts], np.bool_).reshape(shape))
        if all(map(_WHOLE.fullmatch, texts)):
            return cls(np.array([int(text) for text in texts], np.int64).reshape(shape))
        wide = np.array([float(text) for text in texts], np.float64).reshape(shape)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        is_narrow = (digits.kept or digits.last) < _EXACT or np.array_equal(
            narrow, wide, equal_nan=True
        )
        return cls(narrow if is_narrow else wide, digits.step(wide))

    def shaped(self, shape: tuple[int, ...], dtype: str = "") -> Values:
        """Returns the same numbers with the dtype and shape that their file states. Raises
        ValueError.
        """
        array = self.array.reshape(shape)
        if dtype in dtypes.DTYPES and dtypes.named(dtype).kind != "complex":
            with np.errstate(over="ignore", invalid="ignore"):
                array = array.astype(dtypes.named(dtype).numpy)
        return Values(array, self.step)
