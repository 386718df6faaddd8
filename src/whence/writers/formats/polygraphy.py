"""polygraphy: RunResults as `polygraphy run --save-outputs` of 0.53 writes them.

A destination that ends in .json is one file, another a folder with a file an iteration
(0000000000.json), as Polygraphy itself tells them apart. A runner is a rank or a model, an
iteration a step. Tensors are .npy files in base64, and files of torch.save where numpy has no type
for them (bfloat16, float8), which is how Polygraphy keeps torch's tensors.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from whence.dtypes import Array
from whence.records import Call, Run
from whence.records.slots import param_name
from whence.writers.support import encodings, job
from whence.writers.support.job import Tell, Writing, Written, silent
from whence.writers.support.sidecar_index import Marks

_PIECE_BYTES = 3 << 20  # a multiple of 3, so that pieces of base64 can be put behind each other
_RESERVED = "polygraphy_class"
_Iteration = list[Call]


def write(run: Run, destination: Path, *, tell: Tell = silent) -> Written:
    """Write a run into `destination`, a .json file or a folder, which is made. Raises OSError."""
    work = Writing(run, tell, sum(len(call.refs) for call in run.calls))
    runners = _runners(run)
    if destination.suffix.lower() == ".json":
        destination.parent.mkdir(parents=True, exist_ok=True)
        _write(work, destination, runners)
        return work.done()
    destination.mkdir(parents=True, exist_ok=True)
    for number in range(max(map(len, runners.values()), default=0)):
        those = {
            name: iterations[number : number + 1]
            for name, iterations in runners.items()
            if number < len(iterations)
        }
        _write(work, destination / f"{number:010d}.json", those)
    return work.done()


def _runners(run: Run) -> dict[str, list[_Iteration]]:
    """The iterations of each runner, which is a process and model, with the calls of each step in
    the order in which they ended.
    """
    runners: dict[str, dict[int, _Iteration]] = {}
    ranks, roots = {call.rank for call in run.calls}, {call.root for call in run.calls}
    for (rank, step), calls in job.by_moment(run.calls).items():
        for call in calls:
            words = [f"rank{rank}"] * (len(ranks) > 1) + [call.root] * (len(roots) > 1)
            runners.setdefault("-".join(words) or "whence", {}).setdefault(step, []).append(call)
    return {name: list(steps.values()) for name, steps in runners.items()}


def _write(work: Writing, path: Path, runners: dict[str, list[_Iteration]]) -> None:
    """One file of RunResults, tensor after tensor."""
    with (
        path.open("w", encoding="utf-8") as file,
        TemporaryDirectory(dir=path.parent, prefix=".whence-") as scratch,
    ):
        file.write('{"lst": [')
        for i, (runner, iterations) in enumerate(runners.items()):
            file.write(f"{', ' if i else ''}[{json.dumps(runner)}, [")
            for k, calls in enumerate(iterations):
                file.write(', {"outputs": {' if k else '{"outputs": {')
                marks = _outputs(work, file, calls, Path(scratch) / "tensor.pt")
                seconds = sum(call.seconds for call in calls if call.parent < 0)
                file.write(
                    f'}}, "runtime": {json.dumps(seconds)}, "runner_name": {json.dumps(runner)}, '
                )
                file.write(
                    '"polygraphy_class": "IterationResult", "whence": '
                    f"{json.dumps(marks, default=repr)}}}"
                )
            file.write("]]")
        file.write('], "polygraphy_class": "RunResults"}')
    work.files.append(path)


def _outputs(work: Writing, file: IO[str], calls: _Iteration, scratch: Path) -> dict[str, object]:
    """Write the tensors of an iteration; returns the marks that say which call and slot each is
    of.
    """
    names = {_RESERVED}
    marks: dict[str, object] = {}
    making = Marks(work.run, calls)
    for call in calls:
        for ref in job.refs(call):
            name = job.name(call, param_name(ref.slot))
            while name in names:
                name += "~"
            names.add(name)
            array = work.array(ref.record, name)
            if array is None:
                continue
            file.write(f"{', ' if marks else ''}{json.dumps(name)}: ")
            _array(file, array, scratch)
            work.wrote(array)
            marks[name] = making.of(call, ref.slot)
    for call in making.untold():
        work.leave("a call without tensors", job.name(call))
    return marks


def _array(file: IO[str], array: Array, scratch: Path) -> None:
    """A tensor in base64, some MB at a time."""
    is_plain = encodings.has_numpy_type(array)
    file.write(f'{{"values": {{"{"array" if is_plain else "tensor"}": "')
    if is_plain:
        with scratch.open("wb") as out:
            encodings.write_numpy(out, array)
    else:
        encodings.write_torch(scratch, array)
    with scratch.open("rb") as data:
        while piece := data.read(_PIECE_BYTES):
            file.write(base64.b64encode(piece).decode())
    file.write(
        f'", "polygraphy_class": "{"ndarray" if is_plain else "Tensor"}"}}, "polygraphy_class": '
        f'"LazyArray"}}'
    )
