"""What a command dumped, laid out as ATB's library lays its dumps out: `tensors/`, `layer/` and
`model/` of `ait llm dump`.

    tensors/0_77/3/2_Linear/after/outtensor0.bin        rank_process / token / number_class of each module / before or after
    layer/77/Linear_2.json, model/77/LlamaForCausalLM.json

The numbers are those of `whence show RUN --tree`, which --ids takes.
"""  # noqa: E501

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whence import disk
from whence.dtypes import Array
from whence.records import Call, Run

_UNSAFE = re.compile(r"[^\w.-]")


class Layer(NamedTuple):
    """A module that the model calls directly: its number, class and name, and the file that
    describes it.
    """

    number: str
    kind: str
    name: str
    file: Path


class Laid(NamedTuple):
    """What was written: folders of tensors by (rank, process), the layers in order, and sentences
    about what was left out.
    """

    tensors: dict[tuple[int, int], Path]
    layers: tuple[Layer, ...]
    left_out: tuple[str, ...]


def lay_out_atb(
    run_path: str | Path, destination: str | Path, *, kinds: Sequence[str] = ("tensor", "model")
) -> Laid:
    """Write the run at `run_path` into the folder `destination` (`ait_dump`) in the layout of ATB.

    kinds: what `--type` of `ait llm dump` says; "tensor" files of tensors, "model" and "layer"
    descriptions of the modules. Raises UnreadableRun, StoreFailed when the medium refuses.
    """
    from whence import store
    from whence.errors import StoreFailed
    from whence.store.folder import load_process, process_folders

    place = Path(destination)
    tensors: dict[tuple[int, int], Path] = {}
    layers: list[Layer] = []
    left_out: list[str] = []
    processes = sorted(
        (load_process(folder) for folder in process_folders(Path(run_path))),
        key=lambda p: (p.rank, p.pid),
    )
    try:
        for process in processes:
            run = store.open_run(run_path, ranks={process.rank})
            calls = _of_one_model(run, left_out)
            if not calls:
                continue
            if "tensor" in kinds:
                folder = place / "tensors" / f"{process.rank}_{process.pid}"
                if _tensors(run, calls, folder):
                    tensors[process.rank, process.pid] = folder
            if {"layer", "model"} & set(kinds):
                layers += _topology(calls, place, str(process.pid), model="model" in kinds)
    except OSError as error:
        raise StoreFailed(
            f"cannot write {error.filename or place}: {error.strerror or error}; the run itself "
            f"is at {run_path}"
        ) from error
    return Laid(tensors, tuple(layers), tuple(dict.fromkeys(left_out)))


def _of_one_model(run: Run, left_out: list[str]) -> list[Call]:
    """The forward calls of the root module that makes most calls.

    The layout has room for one model; a sentence for each other model is added to `left_out`.
    """
    calls = [
        call
        for call in run.calls
        if call.kind in ("module", "operator") and call.phase == "forward"
    ]
    counts = Counter(call.root for call in calls)
    if not counts:
        return []
    chosen = counts.most_common(1)[0][0]
    left_out += [
        f"{root} is in the run only: the layout has room for one model, {chosen}"
        for root in counts
        if root != chosen
    ]
    return sorted((call for call in calls if call.root == chosen), key=lambda call: call.order)


def _tensors(run: Run, calls: Sequence[Call], folder: Path) -> bool:
    """Write the tensors of all calls. Returns whether there are any."""
    from whence.errors import ElementsMissing

    kinds = {(call.step, call.number): _safe(call.op_type or call.op) for call in calls}
    wrote = False
    for call in calls:
        parts = call.number.split("_")
        numbers = ["_".join(parts[: depth + 1]) for depth in range(len(parts))]
        path = [
            f"{part}_{kinds.get((call.step, number), 'Module')}"
            for part, number in zip(parts, numbers, strict=True)
        ]
        for kind, when, stem in (("input", "before", "intensor"), ("output", "after", "outtensor")):
            for place, ref in enumerate(call.slots(kind)):
                try:
                    array = run.array(ref.record)
                except ElementsMissing:
                    continue
                file = folder.joinpath(str(call.step), *path, when, f"{stem}{place}.bin")
                file.parent.mkdir(parents=True, exist_ok=True)
                disk.write_file(file, _encoded(array))
                wrote = True
    return wrote


def _encoded(array: Array) -> bytes:
    """The bytes of a tensor file in the format of the ATB library."""
    import numpy as np

    from whence import dtypes
    from whence.readers.ascend.dtypes import ACL

    name = dtypes.of(array).name
    code = next((number for number, dtype in ACL.items() if dtype == name), None)
    # a dtype for which the library has no code
    dtype_line = "" if code is not None else f"whence.dtype={name}\n"
    data = np.ascontiguousarray(array).tobytes()
    head = f"$Version=1.0\n$Object.Count=1\n$Object.Length={len(data)}\nformat=2\ndtype={-1 if code is None else code}\n{dtype_line}"  # noqa: E501
    return (
        f"{head}dims={','.join(map(str, array.shape))}\n$Object.data=0,{len(data)}\n$End=1\n".encode()  # noqa: E501
        + data
    )


def _topology(calls: Sequence[Call], place: Path, process: str, *, model: bool) -> Iterator[Layer]:
    """Write one file for each module that the model calls and one for the model, from the first
    step.
    """
    first = min(call.step for call in calls)
    nodes: dict[str, dict[str, Any]] = {}
    named: dict[str, str] = {}
    root: dict[str, Any] = {"modelName": _safe(calls[0].root), "nodes": []}
    for call in calls:
        if call.step != first or call.kind != "module" or (call.number == "0" and call.occurrence):
            continue
        kind = _safe(call.op_type)
        node = {
            "opName": f"{kind}_{call.number}",
            "opType": kind,
            "param": {"name": call.scope},
            "inTensors": [],
            "outTensors": [],
        }
        node["nodes"] = []
        if call.number == "0":
            root["modelName"] = kind or root["modelName"]
            continue
        nodes[call.number], named[call.number] = node, call.scope
        above = nodes.get(call.number.rpartition("_")[0], root)
        above["nodes"].append(node)
    layers = [(number, node) for number, node in nodes.items() if "_" not in number]
    folder = place / "layer" / process
    folder.mkdir(parents=True, exist_ok=True)
    for number, node in layers:
        file = folder / f"{node['opName']}.json"
        disk.write_file(file, json.dumps(node, indent=1) + "\n")
        yield Layer(number, str(node["opType"]), named[number], file)
    if model:
        folder = place / "model" / process
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{root['modelName']}.json"
        disk.write_file(file, json.dumps(root, indent=1) + "\n")


def _safe(name: str) -> str:
    """The name as one safe component of a path: names in a run are untrusted."""
    return _UNSAFE.sub("_", name)[:200].lstrip(".") or "Module"
