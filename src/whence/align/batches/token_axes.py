"""Which axis of a tensor is the batch and which the tokens: read off its extents, which follow
those of the tokens the root was given, over all calls of the module.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whence.align.batches.batch import Batch, is_position
from whence.align.batches.positions import WITH_PLAIN
from whence.align.batches.sequences import followers
from whence.align.derived_run import DerivedTensors
from whence.align.module_names import normal_scope
from whence.records import Call, Ref
from whence.records.slots import is_cache, is_mutated, is_param

SlotKey = tuple[str, str, int, str]


class SeenTokens(NamedTuple):
    """One sight of a slot: its shape, and what the root was given then. total: tokens it could see,
    with those cached.

    batch: None in a flattened batch. rows: of the batch, however it lies. fronts: extents of an
    axis in front of batch and tokens that this tensor may have: positions of several axes do, and
    what is made of them.
    """

    shape: tuple[int, ...]
    batch: int | None
    width: int
    total: int
    rows: int = 1
    fronts: frozenset[int] = frozenset()

    def has_front(self) -> bool:
        """Does this tensor lie behind an axis of positions?"""
        if len(self.shape) < 2 or self.shape[0] not in self.fronts:
            return False
        if self.batch is None:
            return self.shape[1] == self.width
        return (
            len(self.shape) > 2 and self.shape[1] in (1, self.batch) and self.shape[2] == self.width
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """Where the rows, the new tokens and the tokens that can be seen lie in a tensor; None where it
    has no such axis.

    last: the axis of new tokens where only the last of a call is there (the scores of a
    generation); of a flattened batch it has the last of every row. flat: one axis of all rows'
    tokens.
    """

    batch: int | None = None
    token: int | None = None
    visible: int | None = None
    last: int | None = None
    flat: int | None = None

    def __len__(self) -> int:
        return sum(
            axis is not None
            for axis in (self.batch, self.token, self.visible, self.last, self.flat)
        )

    @property
    def has_tokens(self) -> bool:
        """Is there an axis of tokens?"""
        return len(self) > (self.batch is not None)


def fits(axes: Axes, sights: Sequence[SeenTokens]) -> bool:
    """Could a tensor of these extents have these axes?"""
    if axes.last is not None or axes.flat is not None:
        return False
    return all(
        axis is None or (axis < len(s.shape) and s.shape[axis] == extent)
        for s in sights
        for axis, extent in ((axes.batch, s.batch), (axes.token, s.width), (axes.visible, s.total))
    )


def axes(slot: str, boolean: bool, sights: Sequence[SeenTokens]) -> Axes | None:
    """The axes of a slot from all sights of it; None when they do not follow what the root was
    given.

    The batch is one of the first two axes. Attention masks have both an axis of new tokens and one
    of all that can be seen, caches only the latter.
    """
    dims = {len(s.shape) for s in sights}
    if len(dims) != 1:
        return None
    count = dims.pop()
    if all(s.has_front() for s in sights):
        return _behind_front(sights)
    varied = [k for k in range(count) if len({s.shape[k] for s in sights}) > 1]
    if count and _are_flat(sights):
        # Rows and tokens in one axis, as routers of experts have them: no other axis is one of
        # these then.
        return Axes(flat=0) if varied in ([], [0]) else None
    batch = _batch_axis(count, sights)
    is_mask = boolean or "mask" in slot or "bias" in slot
    token, visible = _token_axes(count, batch, varied, is_mask, sights)
    if (
        token is None
        and visible is None
        and all(s.batch is None for s in sights)
        and any(s.width > s.rows for s in sights)
    ):
        last = _first_axis(count - 1, None, sights, lambda s: s.rows)
        if last is not None:
            return Axes(last=last) if set(varied) <= {last} else None
    is_kept = count > 2 and (is_cache(slot) or is_mutated(slot))
    if any(k not in (batch, token, visible) for k in varied) or (
        is_kept and token is None and visible is None
    ):
        return None  # a cache of fixed length holds what came last
    has_last = token is None and visible is None and count > 2 and any(s.width > 1 for s in sights)
    single = _first_axis(count - 1, batch, sights, lambda s: 1)
    return Axes(batch, token, visible, single if has_last else None)


def _are_flat(sights: Sequence[SeenTokens]) -> bool:
    """Does the first axis hold all tokens of all rows, in more rows and tokens than one?"""
    return any((s.batch or 1) > 1 and s.width > 1 for s in sights) and all(
        s.shape[0] == (s.batch or 1) * s.width for s in sights
    )


def _axes_of_extent(
    count: int,
    batch: int | None,
    sights: Sequence[SeenTokens],
    extent: Callable[[SeenTokens], int | None],
) -> list[int]:
    """The axes other than the batch that have this extent in all sights."""
    return [k for k in range(count) if k != batch and all(s.shape[k] == extent(s) for s in sights)]


def _first_axis(
    count: int,
    batch: int | None,
    sights: Sequence[SeenTokens],
    extent: Callable[[SeenTokens], int | None],
) -> int | None:
    return next(iter(_axes_of_extent(count, batch, sights, extent)), None)


def _batch_axis(count: int, sights: Sequence[SeenTokens]) -> int | None:
    axis = _first_axis(min(2, count), None, sights, lambda s: s.batch)
    if axis == 1 and not (
        any(s.width > 1 for s in sights) and all(s.shape[0] == s.width for s in sights)
    ):
        return None  # behind one axis that is no tokens: heads, as many as rows by chance
    return axis


def _token_axes(
    count: int,
    batch: int | None,
    varied: Sequence[int],
    is_mask: bool,
    sights: Sequence[SeenTokens],
) -> tuple[int | None, int | None]:
    """The axis of new tokens, and that of all tokens that can be seen."""
    new = _axes_of_extent(count, batch, sights, lambda s: s.width)
    total = _axes_of_extent(count, batch, sights, lambda s: s.total)
    visible = next((k for k in total if k in varied and k not in new), None)
    token = next(iter(new), None) if visible is None or is_mask else None
    if visible is None and token is not None:
        # Masks have it also where nothing varies, attention weights where it does.
        visible = next((k for k in total if k != token and (is_mask or k in varied)), None)
    return token, visible


def _behind_front(sights: Sequence[SeenTokens]) -> Axes | None:
    """The axes of a tensor that has its batch and tokens behind an axis of positions."""
    flat = any(s.batch is None for s in sights)
    token, batch = (
        (1, None) if flat else (2, 1 if all(s.shape[1] == s.batch for s in sights) else None)
    )
    varied = [k for k in range(len(sights[0].shape)) if len({s.shape[k] for s in sights}) > 1]
    return Axes(batch, token) if all(k in (batch, token) for k in varied) else None


class SlotAxes:
    """Axes of rows and tokens of one run's tensors, by slot, and the calls below each root."""

    def __init__(
        self,
        derived: DerivedTensors,
        calls: Sequence[Call],
        batches: Mapping[int, Batch],
        totals: Mapping[int, int],
        rows: Mapping[int, int],
    ) -> None:
        self.derived, self._batches, self._totals, self._rows = derived, batches, totals, rows
        self.across: SlotAxes | None = None  # of the other run
        self._trees = _trees(calls, batches)
        self._axes: dict[tuple[Any, ...], Axes | None] = {}
        self._by_key: dict[SlotKey, Axes | None] | None = None

    def roots(self) -> Iterable[int]:
        """The root calls that were given tokens."""
        return self._batches

    def tree(self, root: int) -> list[Call]:
        """A root call, all below it and what follows it, in the order they began."""
        return self._trees[root]

    @functools.cached_property
    def lasts(self) -> set[SlotKey]:
        """The slots that hold the last token of each call only."""
        calls = [call for root in self._batches for call in self.tree(root)]
        slots = {
            (c.root, c.scope, c.op, c.occurrence, r.slot): (c, r.slot)
            for c in calls
            for r in c.refs
        }
        return {
            slot_key(call, slot)
            for call, slot in slots.values()
            if not is_param(slot)
            and (axes := self.of(call, slot)) is not None
            and axes.last is not None
        }

    def of(self, call: Call, slot: str) -> Axes | None:
        """The axes of a slot, with what the other run says where its lengths vary more."""
        key = (call.root, call.scope, call.op, call.occurrence, slot)
        if key not in self._axes:
            record = next(r.record for r in call.refs if r.slot == slot)
            sights = self._sights[key]
            slot_axes = axes(slot, self.derived.record(record).dtype == "bool", sights)
            across = self.across.named(slot_key(call, slot)) if self.across is not None else None
            if (
                slot_axes is not None
                and across is not None
                and fits(across, sights)
                and len(across) > len(slot_axes)
            ):
                slot_axes = across
            self._axes[key] = slot_axes
        return self._axes[key]

    @functools.cached_property
    def held(self) -> set[int]:
        """Records of parameters, and of what operators made of these alone: no axis of theirs
        follows the tokens.
        """
        calls = sorted((c for tree in self._trees.values() for c in tree), key=lambda c: c.order)
        held = {r.record for c in calls for r in c.slots("param")}
        for call in calls:
            read = call.slots("input") if call.kind == "operator" else ()
            if read and all(r.record in held for r in read):
                held.update(r.record for r in call.slots("output"))
        return held

    def width(self, ref: Ref) -> int:
        """Channels of a tensor."""
        shape = self.derived.record(ref.record).shape
        return shape[-1] if len(shape) > 1 else 0

    def named(self, key: SlotKey) -> Axes | None:
        """The axes of a slot by its name, from this run's own sights."""
        if self._by_key is None:
            self._by_key = {
                (normal_scope(scope), op, occurrence, slot): axes(slot, False, sights)
                for (_, scope, op, occurrence, slot), sights in self._sights.items()
            }
        return self._by_key.get(key)

    @functools.cached_property
    def _sights(self) -> dict[tuple[Any, ...], list[SeenTokens]]:
        """Every sight of every slot below the roots that were given something."""
        out: dict[tuple[Any, ...], list[SeenTokens]] = defaultdict(list)
        for root, batch in self._batches.items():
            size = None if batch.flat else batch.size
            fronts = self._fronts(root)
            for call in self.tree(root):
                for ref in call.refs:
                    if not is_param(ref.slot) and ref.record not in self.held:
                        record = self.derived.record(ref.record)
                        positions = fronts and _says_positions(call, ref.slot, record.dtype)
                        out[call.root, call.scope, call.op, call.occurrence, ref.slot].append(
                            SeenTokens(
                                record.shape,
                                size,
                                batch.width,
                                self._totals[root],
                                self._rows.get(root, 1),
                                fronts if positions else fronts - {size},
                            )
                        )
        return out

    def _fronts(self, root: int) -> frozenset[int]:
        """Numbers in a token's position, as extents of an axis in front of batch and tokens."""
        batch = self._batches[root]
        extents = [(batch.width,)] if batch.flat else [(n, batch.width) for n in {1, batch.size}]
        slots = (r for c in self.tree(root) for r in c.slots("input") if is_position(r.slot))
        shapes = {self.derived.record(r.record).shape for r in slots}
        counts = {s[0] for s in shapes if s and s[1:] in extents}
        # Below the call that takes the plain position from the front, one axis less.
        return frozenset(counts | {n - 1 for n in counts if n == WITH_PLAIN})


def scored_across(slots: SlotAxes, across: SlotAxes) -> set[SlotKey]:
    """The slots of the other run that hold scores of all tokens, of which this one's have the last:
    in a call behind the root.

    They are what the other's root returns, as wide as what is behind this one's root, and the call
    that makes it.
    """
    calls, (root, *below) = (
        slot_axes.tree(next(iter(slot_axes.roots()))) for slot_axes in (slots, across)
    )
    widths = {
        slots.width(r)
        for c in calls
        if c.parent == -1
        for r in c.slots("output")
        if c.scope and slot_key(c, r.slot) in slots.lasts
    }
    widths -= {slots.width(r) for r in calls[0].slots("output")}
    returned = [
        r
        for r in root.slots("output")
        if across.width(r) in widths and slot_key(root, r.slot) not in across.lasts
    ]
    scores = {r.record for r in returned}
    makers = [c for c in below if c.leaf and any(r.record in scores for r in c.slots("output"))]
    return {slot_key(root, r.slot) for r in returned} | {
        slot_key(c, r.slot) for c in makers for r in c.refs if not is_param(r.slot)
    }


def _trees(calls: Sequence[Call], batches: Mapping[int, Batch]) -> dict[int, list[Call]]:
    """The calls of each root that was given tokens, in the order they began."""
    trees: dict[int, list[Call]] = {root: [] for root in batches}
    roots: dict[int, int] = {}
    leaders = followers(calls)
    for call in sorted(calls, key=lambda c: c.order):
        roots[call.id] = (
            leaders.get(call.id, call.id) if call.parent == -1 else roots.get(call.parent, -1)
        )
        if roots[call.id] in trees:
            trees[roots[call.id]].append(call)
    return trees


def _says_positions(call: Call, slot: str, dtype: str) -> bool:
    """Are these positions or made of them, by dtype and names? Extents may not tell."""
    name = f"{call.scope.rpartition('.')[2]}:{slot}"
    return dtype in ("int64", "int32") or any(
        word in name for word in ("position", "rotary", "rope")
    )


def slot_key(call: Call, slot: str) -> SlotKey:
    """The name of a slot that the other run's slot in its place has too."""
    return (normal_scope(call.scope), call.op, call.occurrence, slot)
