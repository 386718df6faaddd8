"""A run of everything that a format can trip over: all dtypes, odd shapes, hostile names, ranks,
steps, occurrences.
"""

import msgspec
import numpy as np

from handmade import Builder
from whence import dtypes
from whence.records import MemoryRun

NAMES = (
    "layers.0.attn",
    "schicht.größe.層",
    "a/b/../../../etc/passwd",
    "x\x00y",
    "=cmd|' /C calc'!A0",
    "layers.0.forward_output.0",
    "Attn",
    "..",
    "0.1.2",
    "q" * 300,
    "LAYERS.0.ATTN",
    "polygraphy_class",
    'with "quotes" and \n lines',
    "a%2Fb",
)
SHAPES = ((3, 5), (), (0, 4), (1, 1, 7))


def every_dtype(seed=0):
    """One array of random bits of each dtype and shape."""
    rng = np.random.default_rng(seed)
    for number, kind in enumerate(dtypes.DTYPES.values()):
        shape = SHAPES[number % len(SHAPES)] if seed else SHAPES[0]
        high = 2 if kind.name == "bool" else 256
        yield (
            rng.integers(0, high, int(np.prod(shape)) * kind.itemsize, np.uint8)
            .view(kind.numpy)
            .reshape(shape)
        )


def run(ranks=(0, 1), steps=(0, 1)):
    built = Builder()
    for rank in ranks:
        for step in steps:
            seed = 10 * rank + step
            rng = np.random.default_rng(seed)
            at = {"rank": rank, "step": step}
            x = rng.standard_normal((6, 4)).astype(np.float32)
            root = built.call("", {"input.0": x, "input.ids": np.arange(9)}, op_type="Net", **at)
            for name in NAMES:
                y = (x + np.float32(rng.standard_normal())).astype(np.float32)
                weight = rng.standard_normal((4, 4)).astype(np.float32)
                built.call(
                    name, {"param.weight": weight, "input.0": x, "output.0": y}, parent=root, **at
                )
                x = y
            every = dict(zip((f"output.{i}" for i in range(len(dtypes.DTYPES))), every_dtype(seed)))
            built.call("every.dtype", {"input.0": x, **every}, parent=root, op_type="Zoo", **at)
            for again in range(2):
                z = (x * np.float32(again + 2)).astype(np.float32)
                built.call(
                    "twice",
                    {"input.0": x, "output.logits": z, "mutated.0": x, "output.nested.1.a": z[:2]},
                    parent=root,
                    **at,
                )
                built.calls[-1] = msgspec.structs.replace(
                    built.calls[-1],
                    occurrence=again,
                    arguments={"input.1": [1, None, 0.5], "input.eps": 1e-6},
                )
                x = z
            root_call = built.calls[root]
            ref = next(r for r in built.calls[-1].refs if r.slot == "output.logits")
            built.calls[root] = msgspec.structs.replace(
                root_call, refs=(*root_call.refs, msgspec.structs.replace(ref, slot="output.0"))
            )
    return ended(built)


def ended(built):
    """The run, its calls in the order in which they ended: what holds others behind them."""
    order = (
        [c.id for c in built.calls if c.parent >= 0],
        [c.id for c in built.calls if c.parent < 0],
    )
    by_root = [
        number
        for root in order[1]
        for number in (*(c for c in order[0] if built.calls[c].parent == root), root)
    ]
    place = {number: i for i, number in enumerate(by_root)}
    calls = [
        msgspec.structs.replace(
            built.calls[n], id=place[n], parent=place.get(built.calls[n].parent, -1), number=""
        )
        for n in by_root
    ]
    return MemoryRun(
        calls,
        built.records,
        {i: array.reshape(built.records[i].shape) for i, array in built.arrays.items()},
    )
