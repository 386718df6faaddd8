"""Parameters of replayed calls: what a correct target holds, converted once per dtype."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from whence import judge
from whence.comparison.replays.semantics import Semantics
from whence.dtypes import Array
from whence.records import Run
from whence.results import SlotPair

# Converted parameters kept for the next call of the same module; never the whole model at once.
_HELD_BYTES = 512 << 20


class ParameterCache:
    """Parameters of two runs. Converted ones are kept until they take more than `_HELD_BYTES`."""

    def __init__(self, reference: Run, target: Run) -> None:
        self._reference, self._target = reference, target
        self._held: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._held_bytes = 0

    def reference_dtype(self, pair: SlotPair) -> str:
        """The dtype in which the reference holds a parameter."""
        return self._reference.records[pair.reference_record].dtype

    def expected(self, pair: SlotPair, given: bool) -> Array:
        """What a correct target holds: the reference's value at the target's precision; its own
        where it is finer, or was changed.

        Where the target's is empty, packed away by an engine, the reference's stands in.
        """
        ours, theirs = (
            self._reference.records[pair.reference_record].dtype,
            self._target.records[pair.target_record].dtype,
        )
        if not self._target.records[pair.target_record].count:
            return judge.rounded(self._reference.array(pair.reference_record), theirs)
        if not given or judge.unit_roundoff(theirs) < judge.unit_roundoff(ours):
            return self._target.array(pair.target_record)
        return judge.rounded(self._reference.array(pair.reference_record), theirs)

    def hold(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Converted parameters by key, made when they are not there; the oldest are let go."""
        cache = self._held
        found = cache.get(key)
        if found is not None:
            cache.move_to_end(key)
            return found[0]
        held = make()
        nbytes = sum(t.nbytes for t in held.tensors.values())
        cache[key] = (held, nbytes)
        self._held_bytes += nbytes
        while self._held_bytes > _HELD_BYTES and len(cache) > 1:
            _, (_, freed) = cache.popitem(last=False)
            self._held_bytes -= freed
        return held


class CallParameters:
    """The parameters of one replayed call, converted once per working dtype and kept for the
    module's other calls.
    """

    def __init__(
        self,
        cache: ParameterCache,
        loaded: Any,
        pairs: list[tuple[SlotPair, bool]],
        semantics: Semantics,
    ) -> None:
        self._cache, self._loaded, self._pairs = cache, loaded, pairs
        self._semantics = semantics
        self._key = (
            loaded.program.id,
            tuple((p.reference_record, p.target_record, given) for p, given in pairs),
        )

    def held(self, working: str) -> Any:
        """The parameters for `Loaded.run` with this working dtype."""
        stand_ins = self._semantics.params

        def value(pair: SlotPair, given: bool) -> Array:
            if pair.reference_slot not in stand_ins:
                return self._cache.expected(pair, given)
            dtype = self._cache.reference_dtype(pair)
            return self._semantics.param(pair.reference_slot, working, dtype)

        def convert() -> Any:
            values = {p.reference_slot: value(p, given) for p, given in self._pairs}
            return self._loaded.hold(values, working=working)

        return convert() if stand_ins else self._cache.hold((*self._key, working), convert)
