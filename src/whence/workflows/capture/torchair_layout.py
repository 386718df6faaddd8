"""What a compiled graph computed, laid out as torchair lays its dumps out: npy files beside the
run.

    data_dump/1/gm_20251017071211190258_dump/mm-aten.mm.default.INPUT.0.20251017071211190258.npy       FX, tokens from 1
    dump_20251010_083826/20251010083826/0/graph_1/1/0/Mm.mm.0.0.1706596912161951.output.0.npy          GE, tokens from 0

On an Ascend device the second kind is binary; here it has the form to which its own tool converts
it.
"""  # noqa: E501

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from whence import disk
from whence.dtypes import Array
from whence.records import Call, Run
from whence.records.slots import split_slot

_UNSAFE = re.compile(r"[^\w]")
_TARGET = re.compile(r"[^\w.]")


def lay_out_fx(run_path: str | Path, folder: Path) -> None:
    """Write the nodes of graphs that were run one by one into `folder` (`data_dump`). Raises
    UnreadableRun, OSError.
    """
    now = time.time()
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))

    def place(call: Call, graph: int, kind: str, slot: str) -> Path:
        when = f"{stamp}{call.order % 1_000_000:06d}"  # in the order in which they ran
        node, target = (
            _UNSAFE.sub("_", call.op),
            _TARGET.sub("_", str(call.arguments.get("overload", call.op_type))),
        )
        return (
            folder
            / str(call.step + 1)
            / f"gm_{stamp}{graph:06d}_dump"
            / f"{node}-{target}.{kind.upper()}.{slot}.{when}.npy"
        )

    _write(run_path, place)


def lay_out_ge(run_path: str | Path, folder: Path) -> None:
    """Write what the kernels of compiled graphs left into `folder` (`dump_<time>`). Raises
    UnreadableRun, OSError.
    """
    now = time.time()
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
    first = int(now * 1e6) // 1_000_000 * 1_000_000

    def place(call: Call, graph: int, kind: str, slot: str) -> Path:
        node, target = (_UNSAFE.sub("_", text) for text in (call.op, call.op_type))
        name = f"{target[:1].upper()}{target[1:]}.{node}.{call.order}.0.{first + call.order}.{kind}.{slot}.npy"  # noqa: E501
        return folder / stamp / str(call.rank) / f"graph_{graph + 1}" / "1" / str(call.step) / name

    _write(run_path, place)


def _write(run_path: str | Path, place: Callable[[Call, int, str, str], Path]) -> None:
    from whence import store
    from whence.errors import ElementsMissing
    from whence.writers.support import encodings

    run = store.open_run(run_path)
    for call, graph in _nodes(run):
        for ref in call.refs:
            kind, slot = split_slot(ref.slot)
            if kind not in ("input", "output") or not re.fullmatch(r"\d+(\.\d+)*", slot):
                continue
            try:
                array = run.array(ref.record)
            except ElementsMissing:
                continue
            file = place(call, graph, kind, slot)
            file.parent.mkdir(parents=True, exist_ok=True)
            with disk.whole_file(file) as out:
                encodings.write_numpy(out, _widened(array))


def _nodes(run: Run) -> Iterator[tuple[Call, int]]:
    """The operators of graphs, each with the number of its graph: those of one step are told apart,
    as often as they ran.
    """
    numbers: dict[tuple[object, ...], int] = {}
    graphs: dict[int, int] = {}
    executions: dict[tuple[object, ...], int] = {}
    for call in sorted(run.calls, key=lambda c: c.order):
        if call.kind == "graph":
            key = call.root, call.step, call.op
            executions[key] = executions.get(key, -1) + 1
            graphs[call.id] = numbers.setdefault(
                (call.root, call.op, executions[key]), len(numbers)
            )
    for call in run.calls:
        if call.kind == "operator" and call.parent in graphs:
            yield call, graphs[call.parent]


def _widened(array: Array) -> Array:
    """Types that npy has no name for as float32, as torchair writes bfloat16."""
    import numpy as np

    return np.asarray(array) if array.dtype.isbuiltin else array.astype(np.float32)
