"""Folders that hooks of serving engines write: a .pt file for each tensor, with step and module.

AWS's NxD Inference: captured_tensors_PHASE_step_N_module_MODULE_output.pt, where PHASE is cte (the
prefill, step 1) or tkg. vLLM's intermediate logging: ID/step_N/MODULE/outputs_cuda_0.pt, beside
inputs_0_cuda_0.pt and descriptions in JSON. Sources: their documentation of September 2025 and July
2026.
"""

from __future__ import annotations

import re

from whence.errors import UnreadableRun
from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.encodings import torch_file
from whence.readers.encodings.archive import File
from whence.readers.source import Place
from whence.readers.unread import not_read
from whence.records import Lack, Run

LOOKS_LIKE = "a folder of captured_tensors_cte_step_1_module_M.pt, or step_0/M/outputs_cuda_0.pt"
ORDER = 25
_SIDE = r"(?P<side>input|output)s?(?:_(?P<slot>\w+?))??"
_CAPTURED = re.compile(
    rf"(?:^|/)captured_tensors_[a-z]+_step_(?P<step>\d+)_module_(?P<module>.+?)(?:_{_SIDE})?\.pt$"
)
_LOGGED = re.compile(
    rf"(?:^|/)step_(?P<step>\d+)/(?P<module>[^/]+)/{_SIDE}_[a-z]+_(?P<rank>\d+)\.pt$"
)


def sniff(place: Place) -> bool:
    return place.is_folder and any(map(_match, place.files[:50]))


def _match(name: str) -> re.Match[str] | None:
    return _CAPTURED.search(name) or _LOGGED.search(name)


def open_run(place: Place) -> Run:
    """Reads names and shapes now and memory-maps elements on request; step 0 is the prefill. A file
    that cannot be read loses only its own tensors.
    """
    building = Building(place.path, "engine_hooks")
    items = []
    for name in place.files:
        if (match := _match(name)) is None:
            if re.fullmatch(r".*/(?:in|out)puts\.json", name):
                place.leave(name)  # describes the tensors beside it
            continue
        try:
            tensors = torch_file.tensors(torch_file.load(place.inside(name)))
        except UnreadableRun as error:
            building.lacks(Lack.DAMAGED, name, not_read(name, error))
            continue
        parts = match.groupdict()
        first = 0 if "rank" in parts else 1
        for inner, tensor in tensors:
            slot = named_tensors.below(parts["slot"] or "", inner) or "0"
            items.append(
                named_tensors.of_torch(
                    named_tensors.below(parts["module"], inner),
                    tensor,
                    step=max(int(parts["step"]) - first, 0),
                    rank=int(parts.get("rank") or 0),
                    place_in_call=(parts["module"], parts["side"] or "output", slot),
                    modified_ns=File(place.inside(name)).modified_ns,
                    file=name,
                )
            )
    named_tensors.add(building, items)
    return building.run()
