"""Windows of convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whence.replay.onnx_translation.writer import Writer


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the spatial axes. before, behind: pads. ceiled: whether a window that is cut off
    at the end counts.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    ceiled: bool

    @property
    def reach(self) -> tuple[int, ...]:
        """The number of elements that a window spans, by axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations))

    def counts(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of windows, by axis; none starts beyond the last element."""
        sizes = []
        for i, n in enumerate(extents):
            steps = (n + self.before[i] + self.behind[i] - self.reach[i]) / self.strides[i]
            count = (math.ceil(steps) if self.ceiled else math.floor(steps)) + 1
            if self.ceiled and (count - 1) * self.strides[i] >= n + self.before[i]:
                count -= 1
            sizes.append(count)
        return tuple(sizes)


def windows(w: Writer, extents: Sequence[int], kernel: Sequence[int] | None = None) -> Windows:
    """Returns the windows that a node describes. extents: of the spatial axes."""
    count = len(extents)
    kernel = tuple(w.integers("kernel_shape")) if kernel is None else tuple(kernel)
    strides = tuple(w.integers("strides", [1] * count))
    dilations = tuple(w.integers("dilations", [1] * count))
    pads = w.integers("pads", [0] * (2 * count))
    if {len(kernel), len(strides), len(dilations), len(pads) // 2} != {count} or len(pads) % 2:
        raise w.refuse(f"its windows are not of {count} axes")
    before, behind = pads[:count], pads[count:]
    auto = w.text("auto_pad", "NOTSET")
    if auto == "VALID":
        before, behind = [0] * count, [0] * count
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        before, behind = _same(auto, extents, kernel, strides, dilations)
        if "Pool" in w.node.op_type and any(
            (-(-n // s) - 1) * s + (k - 1) * d + 1 < n
            for n, k, s, d in zip(extents, kernel, strides, dilations)
        ):
            raise w.refuse(f"with {auto} and windows that leave out elements engines differ")
    elif auto != "NOTSET":
        raise w.refuse(f"auto_pad {auto[:40]} is not known to whence")
    ceiled = bool(w.whole("ceil_mode", 0)) and auto == "NOTSET"
    return Windows(kernel, strides, dilations, tuple(before), tuple(behind), ceiled)


def _same(
    auto: str,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Returns (before, behind) pads that give ceil(extent / stride) windows; the extra element of
    an odd pad is at the end named by `auto`.
    """
    before, behind = [], []
    for n, k, s, d in zip(extents, kernel, strides, dilations):
        total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        less, more = total // 2, total - total // 2
        before.append(less if auto == "SAME_UPPER" else more)
        behind.append(more if auto == "SAME_UPPER" else less)
    return before, behind
