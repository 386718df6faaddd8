"""Runs made by hand: six records of a two-layer net, without a framework."""

import ml_dtypes
import numpy as np
import xxhash

from whence.dtypes import of
from whence.frameworks import host
from whence.records import Call, MemoryRun, Record, Ref


def record(number, array, *, keep=True, why="", statistics=True):
    array = np.asarray(array)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    stats, sketch = host.statistics(data, of(array).name) if statistics else (None, None)
    return Record(
        number,
        of(array).name,
        array.shape,
        hash=xxhash.xxh3_128_hexdigest(data.tobytes()),
        statistics=stats,
        sketch=sketch,
        why="" if keep else why or "statistics only (--keep stats)",
    )


def net(
    dtype=np.float32, *, seed=0, change=None, keep=True, names=("fc1", "fc2"), root="Net", drop=()
):
    """x -> fc1 (w1) -> h -> fc2 (w2) -> y, and integer ids; computed in float64, rounded to `dtype`
    at each record.

    change: called with the dict of float64 tensors by name after each is made, to plant something:
    change(name, value) -> value.
    """
    rng = np.random.default_rng(seed)
    w1, w2 = rng.standard_normal((32, 16)) / 4, rng.standard_normal((8, 32)) / 6
    x = rng.standard_normal((5, 16))
    change = change or (lambda name, value: value)

    def stored(name, value):
        return change(name, np.asarray(value)).astype(dtype)

    ids = change("ids", np.arange(5))
    x, w1, w2 = stored("x", x), stored("w1", w1), stored("w2", w2)
    h = stored("h", np.tanh(x.astype(np.float64) @ w1.astype(np.float64).T))
    y = stored("y", h.astype(np.float64) @ w2.astype(np.float64).T)
    arrays = dict(enumerate((ids, x, w1, h, w2, y)))
    records = [record(i, a, keep=keep) for i, a in arrays.items()]
    calls = [
        Call(
            0,
            "",
            root,
            0,
            0,
            op_type=root,
            refs=(Ref("input.0", 0), Ref("input.1", 1), Ref("output.0", 5, "identity")),
        ),
        Call(
            1,
            names[0],
            root,
            0,
            1,
            op_type="Linear",
            parent=0,
            number="1",
            leaf=True,
            refs=(Ref("param.weight", 2), Ref("input.0", 1, "identity"), Ref("output.0", 3)),
        ),
        Call(
            2,
            names[1],
            root,
            0,
            2,
            op_type="Linear",
            parent=0,
            number="2",
            leaf=True,
            refs=(Ref("param.weight", 4), Ref("input.0", 3, "identity"), Ref("output.0", 5)),
        ),
    ]
    calls = [c for c in calls if c.scope not in drop or not c.scope]
    calls = [
        Call(**{**{f: getattr(c, f) for f in c.__struct_fields__}, "id": i})
        for i, c in enumerate(calls)
    ]
    return MemoryRun(calls, records, arrays if keep else {}, path=f"<{root}>")


class Builder:
    """Collects calls and tensors of a run. One array (not: equal ones) is one record of its
    rank.
    """

    def __init__(self, *, keep=True):
        self.keep, self.calls, self.records, self.arrays = keep, [], [], {}
        self._known, self._held = {}, []

    def add(self, array, rank=0):
        key = rank, id(array)
        self._held.append(array)  # an id is good while its array lives
        if key not in self._known:
            number = self._known[key] = len(self.records)
            self.arrays[number] = np.ascontiguousarray(array)
            self.records.append(record(number, array, keep=self.keep))
        return self._known[key]

    def call(
        self, scope, slots, *, op_type="Linear", parent=-1, root="Net", step=0, rank=0, leaf=None
    ):
        """slots: name -> array. Returns the call's id."""
        refs = tuple(Ref(slot, self.add(array, rank)) for slot, array in slots.items())
        order = sum(c.rank == rank for c in self.calls)
        self.calls.append(
            Call(
                len(self.calls),
                scope,
                root,
                step,
                order,
                rank=rank,
                op_type=op_type,
                parent=parent,
                leaf=parent >= 0 if leaf is None else leaf,
                refs=refs,
            )
        )
        return len(self.calls) - 1

    def run(self):
        return MemoryRun(self.calls, self.records, self.arrays if self.keep else {})


bfloat16 = ml_dtypes.bfloat16
