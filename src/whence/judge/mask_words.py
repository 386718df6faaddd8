"""Describes in words how two attention masks differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]


def mask_words(reference: Bits, target: Bits) -> str:
    """How the target's mask differs, in words; "" if there is no simple description. Both masks are
    bool and of one shape; True means either visible or hidden.

    The last two axes are queries and keys. A mask of (row, key), or with a single query, is a mask
    of keys alone.
    """
    if reference.shape != target.shape or reference.ndim < 2:
        return ""
    queries, keys = reference.shape[-2:]
    is_matrix = reference.ndim > 2 or _is_causal(reference) or _is_causal(target)
    if queries == 1 or not is_matrix:
        return _of_keys(reference.reshape(-1, keys), target.reshape(-1, keys))
    if keys < queries:
        return ""
    ref, tgt = (x.reshape(-1, queries, keys) for x in (reference, target))
    own, looks_away = _own_keys(ref, tgt)
    if looks_away:
        ref, tgt = ~ref, ~tgt
    more, fewer = tgt & ~ref, ref & ~tgt
    later = np.arange(keys)[None, :] > own[:, None]
    alone = np.eye(queries, keys, keys - queries, dtype=bool)
    # Padding: keys that no other query of the row sees in the reference, though it could.
    others = ~alone if (ref & later).any() else ~alone & ~later
    unseen = _any(others, 0) & ~_any(ref & others, 1)
    padded = unseen & _any(~unseen, 1)[:, None]
    clauses = []
    if more.any():
        clauses += _seen(more, ref, later, padded)
    if fewer.any():
        clauses += _hidden(fewer, tgt, later, alone)
    return f"the target's mask {' and '.join(clauses)}" if clauses else ""


def _own_keys(ref: Bits, tgt: Bits) -> tuple[npt.NDArray[np.int64], bool]:
    """(index of each query's own key, whether True means hidden in both masks).

    Queries are the last keys (behind a cache), or the first ones if keys were added at the end. In
    masks that hide later keys, only one interpretation lets each query see itself.
    """
    queries, keys = ref.shape[-2:]
    places = np.arange(queries)
    for ahead in (keys - queries, 0):
        own = places + ahead
        later = np.arange(keys)[None, :] > own[:, None]
        for looks_away in (False, True):
            a, b = (mask ^ looks_away for mask in (ref, tgt))
            if a[:, places, own].all() and b[:, places, own].all() and not (a & later).any():
                return own, looks_away
    own = places + keys - queries
    return own, bool(ref[:, places, own].mean() < 0.5)


def _is_causal(mask: Bits) -> bool:
    """Whether a mask is a square matrix in which each position sees itself and no later one. A
    (row, key) mask looks like this only if each row is one token longer than the one above.
    """
    queries, keys = mask.shape[-2:]
    if mask.ndim != 2 or queries != keys or queries < 2:
        return False
    looks = mask if mask[0, 0] else ~mask
    return bool(looks.diagonal().all() and not np.triu(looks, 1).any())


def _of_keys(reference: Bits, target: Bits) -> str:
    """How two masks of (row, key) differ, in words; "" if their meaning is not known. A row with
    equal values has no padding, so its value means visible.
    """
    full = [row[0] for mask in (reference, target) for row in mask if row.min() == row.max()]
    if not full or len({bool(value) for value in full}) > 1:
        return ""
    ref, tgt = (reference, target) if full[0] else (~reference, ~target)
    clauses = []
    for which, words in ((tgt & ~ref, "lets padding be seen"), (ref & ~tgt, "takes for padding")):
        if which.any():
            clauses.append(f"{words} ({_places(which)})")
    return f"the target's mask {' and '.join(clauses)}" if clauses else ""


def _seen(more: Bits, ref: Bits, later: Bits, padded: Bits) -> list[str]:
    """Clauses about keys that only the target shows."""
    of_padding = more & padded[:, None, :]
    others = more & ~padded[:, None, :]
    clauses = []
    is_causal = not (ref & later).any()
    if is_causal and (others & later).any() and not (others & ~later).any():
        last = _any(later, -1)  # every query but the last has a later key
        each = bool(_any(_any(others & later, 0)[last], -1).all())
        reach = int(np.max(np.where(others, _ahead(others), 0)))
        how_far = "the next one" if reach == 1 else f"up to {reach} later ones"
        clauses.append(f"lets {'each position' if each else 'some positions'} see {how_far}")
    elif is_causal and others.any() and not (others & later).any():
        clauses.append("lets earlier positions be seen")
    elif others.any():
        clauses.append(f"lets {_share(others)} be seen that the reference's hides")
    if of_padding.any():
        clauses.append(f"lets padding be seen ({_places(_any(of_padding, 1))})")
    return clauses


def _hidden(fewer: Bits, tgt: Bits, later: Bits, alone: Bits) -> list[str]:
    """Clauses about keys that only the target hides."""
    if (fewer & ~later).any() and not (fewer & later).any():
        gone = ~_any(tgt & ~alone, 1) & _any(fewer, 1)
        columns = np.flatnonzero(_any(gone, 0))
        if columns.size and (fewer <= gone[:, None, :]).all():
            return [f"hides key{'s' if len(columns) > 1 else ''} {_listed(columns)} from all"]
        return ["hides earlier positions"]
    if (fewer & later).any() and not (fewer & ~later).any():
        return ["hides later positions"]
    return [f"hides {_share(fewer)} that the reference's lets be seen"]


def _any(mask: Bits, axis: int) -> Bits:
    return np.asarray(mask.any(axis), dtype=np.bool_)


def _places(which: Bits) -> str:
    """Keys and rows that a mask of (row, key) has True."""
    rows, columns = np.flatnonzero(_any(which, 1)), np.flatnonzero(_any(which, 0))
    keys = "keys" if len(columns) > 1 else "key"
    return f"{keys} {_listed(columns)} of row{'s' if len(rows) > 1 else ''} {_listed(rows)}"


def _ahead(mask: Bits) -> npt.NDArray[np.int64]:
    """How far ahead of its query each key is."""
    queries, keys = mask.shape[-2:]
    ahead = np.arange(keys)[None, :] - (np.arange(queries) + keys - queries)[:, None]
    return np.broadcast_to(ahead, mask.shape)


def _share(which: Bits) -> str:
    count = int(np.count_nonzero(which))
    return f"{count} of {which.size} pairs of positions"


def _listed(numbers: npt.NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, numbers[:4].tolist()))
    return f"{shown} ..." if len(numbers) > 4 else shown
