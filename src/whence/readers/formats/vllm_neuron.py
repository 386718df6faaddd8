"""vLLM Neuron: what its tensor capture writes (`tensor_capture` in neuron_config).

dpR/PHASE_N/MODULE/rankR.pt, where PHASE is prefill_sTOKENS or decode_bROWS, beside
PHASE_N_meta.json with ids of requests and the position of each token. Its captures of a Hugging
Face model have this form too. Source: vllm-neuron, accuracy/tensor_io.py and tensor_capture.py of
July 2026.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.dtypes import Array
from whence.errors import UnreadableRun
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named, natural
from whence.readers.encodings import torch_file
from whence.readers.encodings.archive import File
from whence.readers.encodings.json_file import tree_of
from whence.readers.encodings.pickle_values import TorchTensor, Unknown
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack, Run

LOOKS_LIKE = "a folder of dp0/prefill_s128_0/MODULE/rank0.pt"
ORDER = 25
_FILE = re.compile(
    r"(?P<folder>(?:(?P<model>.+?)/)??(?:dp(?P<replica>\d+)/)?(?:prefill_s|decode_b)\d+_\d+)"
    r"/(?P<module>[^/]+)/rank(?P<rank>\d+)\.pt"
)
_LOGITS = "lm_head"


class _Part(NamedTuple):
    """Tokens of a request in one forward pass. rows: their places among `extent`; others are
    padding, or of other requests, of which there are `requests`.
    """

    folder: str
    rows: tuple[int, ...]
    extent: int
    requests: int


def sniff(place: Place) -> bool:
    """Without a single meta.json a folder a phase is no more than that."""
    if not place.is_folder or not any(map(_FILE.fullmatch, place.files[:50])):
        return False
    return any(name.endswith("_meta.json") for name in place.files)


def open_run(place: Place) -> Run:
    """Each request is a root; its prefill, in however many pieces, is step 0, and each later pass a
    step. Rows that pad a pass are left out, and logits of all but the last token. Reads names and
    shapes now and elements on request. A file that cannot be read loses only its own tensors.
    """
    building = Building(place.path, "vllm_neuron")
    files: dict[str, list[re.Match[str]]] = defaultdict(list)
    for name in place.files:
        if match := _FILE.fullmatch(name):
            files[match["folder"]].append(match)
    ranks = 1 + max(int(m["rank"]) for several in files.values() for m in several)
    models: dict[tuple[str, str], list[str]] = defaultdict(list)
    for folder, several in files.items():
        models[several[0]["model"] or "", several[0]["replica"] or "0"].append(folder)
    for (model, _), folders in models.items():
        requests = _requests(building, place, folders)
        for number, (request, steps) in enumerate(requests.items(), 1):
            words = [model.replace("/", "."), f"request {number}" if len(requests) > 1 else ""]
            building.root = " ".join(filter(None, words)) or "model"
            items = [
                item
                for step, parts in enumerate(steps)
                for item in _tensors(building, place, parts, files, (step, ranks, request))
            ]
            named_tensors.add(building, items)
    return building.run()


def _requests(
    building: Building, place: Place, folders: Sequence[str]
) -> Mapping[str, Sequence[Sequence[_Part]]]:
    """The steps of each request, in the order in which requests came: the parts of a step."""
    prefills: dict[str, list[tuple[int, _Part]]] = defaultdict(list)
    decodes: dict[str, list[tuple[int, _Part]]] = defaultdict(list)
    times: dict[str, tuple[Any, ...]] = {}
    for folder in sorted(folders, key=natural):
        name = folder.rpartition("/")[2]
        meta = f"{folder}/{name}_meta.json"
        try:
            place.leave(meta)
            tree = tree_of(place.inside(meta), meta)
            ids, positions = list(map(str, tree["req_ids"])), list(map(int, tree["positions"]))
        except (UnreadableRun, KeyError, TypeError, ValueError) as error:
            building.lacks(
                Lack.DAMAGED, meta, f"{meta} does not say whose tokens {name} has: {error}"
            )
            continue
        is_prefill = name.startswith("prefill")
        rows = (_prefilled if is_prefill else _decoded)(positions, len(ids))
        for request, own in zip(ids, rows):
            part = _Part(folder, own, len(positions), len(ids))
            (prefills if is_prefill else decodes)[request].append((positions[own[0]], part))
            stated = (0, natural(request)) if request[:1].isdecimal() else ()
            times.setdefault(request, stated or (1, File(place.inside(meta)).modified_ns))
    steps: dict[str, list[list[_Part]]] = {}
    for request in sorted(times, key=times.__getitem__):
        first = [part for _, part in sorted(prefills[request])]
        later = [[part] for _, part in sorted(decodes[request], key=lambda pair: pair[0])]
        steps[request] = [first, *later]
    return steps


def _prefilled(positions: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """The rows of each of `count` requests: positions that follow one another. Padding repeats a
    position, or comes behind all requests.
    """
    runs: list[list[int]] = []
    for row, position in enumerate(positions):
        if row and position == positions[row - 1] + 1:
            runs[-1].append(row)
        elif not row or position != positions[row - 1]:
            runs.append([row])
    return [tuple(run) for run in runs[:count]]


def _decoded(positions: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """The rows of each of `count` requests, one each; the last where the whole text is computed
    again.
    """
    if count == 1 and list(positions) == list(range(len(positions))):
        return [(len(positions) - 1,)]
    return [(row,) for row in range(min(count, len(positions)))]


def _tensors(
    building: Building,
    place: Place,
    parts: Sequence[_Part],
    files: Mapping[str, Sequence[re.Match[str]]],
    where: tuple[int, int, str],
) -> Iterator[Named]:
    """The tensors of one step of a request. where: the step, number of ranks, the request."""
    step, ranks, request = where
    pieces: dict[tuple[str, int], list[tuple[_Part, str]]] = defaultdict(list)
    for part in parts:
        for match in files[part.folder]:
            place.leave(match[0])  # in another run, another file has these tokens
            rank = ranks * int(match["replica"] or 0) + int(match["rank"])
            pieces[match["module"], rank].append((part, match[0]))
    for (module, rank), several in pieces.items():
        read: list[tuple[TorchTensor | Unknown, _Part]] = []
        for part, name in several:
            try:
                tree = torch_file.tensors(torch_file.load(place.inside(name)))
                read += ((tensor, part) for _, tensor in itertools.islice(tree, 1))
            except UnreadableRun as error:
                building.lacks(Lack.DAMAGED, name, not_read(name, error))
        if len(read) == len(several):
            name = several[-1][1]
            options: dict[str, Any] = {"step": step, "rank": rank, "container": name}
            options["arguments"] = {"request": request}
            options["modified_ns"] = File(place.inside(name)).modified_ns
            yield _joined(module, read, options)


def _joined(
    module: str, pieces: Sequence[tuple[TorchTensor | Unknown, _Part]], options: Mapping[str, Any]
) -> Named:
    """The rows of a request in the pieces of a tensor; the last piece where there is no axis of
    tokens, as of logits that only the last token has.
    """
    known = [(tensor, part) for tensor, part in pieces if isinstance(tensor, TorchTensor)]
    cuts = [_cut(tensor.shape, part) for tensor, part in known]
    last = named_tensors.of_torch(module, pieces[-1][0], **options)
    axes = {axis for axis, _ in cuts}
    if len(known) < len(pieces) or axes == {-1}:
        return last
    if len(axes) > 1 or module == _LOGITS:
        cuts, known = cuts[-1:], known[-1:]
    if module == _LOGITS:  # a device computes no others
        cuts = [(axis, rows[-1:]) for axis, rows in cuts]
    axis = cuts[-1][0]
    if len(cuts) == 1 and len(cuts[0][1]) == known[0][0].shape[axis]:
        return last
    shape = list(known[0][0].shape)
    shape[axis] = sum(len(rows) for _, rows in cuts)

    def load() -> Array:
        arrays = [
            np.take(tensor.array(), rows, axis)
            for (tensor, _), (_, rows) in zip(known, cuts, strict=True)
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)

    return Named(module, known[0][0].dtype, tuple(shape), load, **options)


def _cut(shape: Sequence[int], part: _Part) -> tuple[int, tuple[int, ...]]:
    """(axis of the tokens, rows of the request along it); (-1, ()) where a tensor has none."""
    for axis, extent in itertools.islice(enumerate(shape[:-1]), 2):
        if extent == part.extent:
            return axis, part.rows
    return -1, ()
