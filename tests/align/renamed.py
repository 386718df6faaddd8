"""A captured run as another program would have given it: every module renamed, calls inserted and
removed; the truth is known.
"""

import collections
import random

import msgspec

from whence.records import MemoryRun, Ref

WORDS = [a + b + c for a in "bdfgklmnprtvz" for b in "aeiou" for c in "bdgklmnrst"]


def variant(
    run, *, seed=0, rename=True, classes=False, numbers=False, noise=0.0, insert=0, remove=0
):
    """(MemoryRun, {id in run: id in it}). classes: other class names too; numbers: also rename
    numeric components; noise: relative change of every tensor that is not a parameter, so that no hash
    agrees; insert, remove: how many leaf calls."""
    rng = random.Random(seed)
    table = {}

    def name(scope):
        if not rename or not scope:
            return scope
        parts, out = scope.split("."), []
        for k, part in enumerate(parts):
            path = ".".join(parts[: k + 1])
            if part.isdigit() and not numbers:
                out.append(part)
            else:
                out.append(
                    table.setdefault(path, f"{rng.choice(WORDS)}{rng.choice(WORDS)}{len(table)}")
                )
        return ".".join(out)

    params = {r.record for c in run.calls for r in c.slots("param")}
    records = []
    for r in run.records:
        if (
            noise
            and r.id not in params
            and r.statistics is not None
            and r.dtype.startswith(("float", "bfloat"))
        ):
            by = 1 + noise * rng.uniform(-1, 1)
            s = r.statistics
            figures = {f: getattr(s, f) for f in ("min", "max", "mean", "std", "norm")}
            s = msgspec.structs.replace(
                s, **{f: v if v is None else v * by for f, v in figures.items()}
            )
            sketch = r.sketch and msgspec.structs.replace(
                r.sketch, checksum=rng.getrandbits(64), abs_sum=(r.sketch.abs_sum or 0) * by
            )
            r = msgspec.structs.replace(
                r, statistics=s, sketch=sketch, hash=f"{rng.getrandbits(128):032x}"
            )
        records.append(r)
    # What is inserted or removed is so in every step.
    leaves = list(dict.fromkeys((c.scope, c.occurrence) for c in run.calls if c.leaf))
    gone = set(rng.sample(leaves, remove))
    calls = [(c.order, 0, c) for c in run.calls if (c.scope, c.occurrence) not in gone]
    for k in range(insert):
        what, where = rng.choice(leaves), rng.choice(leaves)
        for like in [c for c in run.calls if (c.scope, c.occurrence) == what]:
            before = next(
                c for c in run.calls if (c.scope, c.occurrence, c.step) == (*where, like.step)
            )
            new = len(records)
            for i, r in enumerate(like.refs):
                fresh = {
                    "id": new + i,
                    "hash": f"{rng.getrandbits(128):032x}",
                    "sketch": None,
                    "statistics": None,
                }
                records.append(msgspec.structs.replace(run.records[r.record], **fresh))
            refs = tuple(Ref(r.slot, new + i) for i, r in enumerate(like.refs))
            scope = f"{before.scope}_extra{k}"
            extra = msgspec.structs.replace(
                like, id=-1, scope=scope, refs=refs, parent=before.parent
            )
            calls.append((before.order + 0.5, k, extra))
    calls.sort(key=lambda x: x[:2])
    # Ids in the order in which calls ended: kept for the old ones, an inserted leaf right after
    # what ran before it.
    ordered = [(c, order) for order, (_, _, c) in enumerate(calls)]
    ended, last = [], -1
    for c, order in ordered:
        ended.append(((c.id, 0) if c.id >= 0 else (last, 1 + order), c, order))
        last = c.id if c.id >= 0 and c.leaf else last
    ended.sort(key=lambda x: x[0])
    truth = {c.id: k for k, (_, c, _) in enumerate(ended) if c.id >= 0}
    kinds = {}

    def kind(op_type):
        return kinds.setdefault(op_type, f"X{len(kinds)}") if classes else op_type

    root = "Other" if rename else None
    seen = collections.Counter()

    def occurrence(call):
        key = call.step, call.micro, call.phase, call.scope, call.op
        seen[key] += 1
        return seen[key] - 1

    times = {c.id: occurrence(c) for c, _ in ordered if c.id >= 0}
    out = [
        msgspec.structs.replace(
            c,
            id=k,
            order=order,
            parent=truth.get(c.parent, -1),
            scope=name(c.scope),
            op_type=kind(c.op_type),
            occurrence=times.get(c.id, 0),
            root=root or c.root,
        )
        for k, (_, c, order) in enumerate(ended)
    ]
    return MemoryRun(out, records, {}), truth


def wrong(plan, truth):
    """(pairs that are wrong, calls of the reference that have a true partner and none in the
    plan).
    """
    bad = [(p.reference, p.target) for p in plan.pairs if truth.get(p.reference) != p.target]
    missing = [a for a in truth if a not in {p.reference for p in plan.pairs}]
    return bad, missing
