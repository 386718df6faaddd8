"""Folders that hooks of serving engines write: a .pt file for each tensor, with step and module.

AWS's NxD Inference: captured_tensors_PHASE_step_N_module_MODULE_output.pt, where PHASE is cte (the
prefill, step 1) or tkg, and manual_tensor_K in place of module_MODULE_output. vLLM's intermediate
logging: ID/step_N/MODULE/outputs_cuda_0.pt, beside inputs_0_cuda_0.pt and descriptions in JSON; the
K-th repeated call of a module is in MODULE_K, and module_calls.txt lists calls as they begin.
Sources: neuronx-distributed-inference, utils/tensor_capture_utils.py; vLLM,
v1/intermediates/intermediates_logging.py of September 2025.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection

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
    r"(?:^|/)captured_tensors_[a-z]+_step_(?P<step>\d+)_"
    rf"(?:(?P<manual>manual_tensor_\d+)|module_(?P<module>.+?)(?:_{_SIDE})?)\.pt$"
)
_LOGGED = re.compile(
    rf"(?:^|/)step_(?P<step>\d+)/(?P<module>[^/]+)/{_SIDE}_(?:cpu|[a-z]+_(?P<rank>\d+))\.pt$"
)
_DESCRIPTION = re.compile(r"(?:.*/)?(?:(?:in|out)puts|capture_metadata)\.json")
_CALLS = "module_calls.txt"


def sniff(place: Place) -> bool:
    return place.is_folder and any(map(_match, place.files[:50]))


def _match(name: str) -> re.Match[str] | None:
    return _CAPTURED.search(name) or _LOGGED.search(name)


def open_run(place: Place) -> Run:
    """Reads names and shapes now and memory-maps elements on request; step 0 is the prefill. A file
    that cannot be read loses only its own tensors.
    """
    building = Building(place.path, "engine_hooks")
    modules: dict[str, set[str]] = defaultdict(set)
    for name in place.files:
        if match := _LOGGED.search(name):
            modules[_step_of(name)].add(match["module"])
        elif _DESCRIPTION.fullmatch(name) or name.rpartition("/")[2] == _CALLS:
            place.leave(name)
    entered = {step: _entered(place, step) for step in modules}
    items = []
    for name in place.files:
        if (match := _match(name)) is None:
            continue
        try:
            tensors = torch_file.tensors(torch_file.load(place.inside(name)))
        except UnreadableRun as error:
            building.lacks(Lack.DAMAGED, name, not_read(name, error))
            continue
        parts = match.groupdict()
        first, module, counter = 1, parts["module"] or parts["manual"], -1
        if match.re is _LOGGED:
            first, step = 0, _step_of(name)
            counter = entered[step].get(module, -1)
            module = _without_number(module, modules[step])
        for inner, tensor in tensors:
            slot = named_tensors.below(parts["slot"] or "", inner) or "0"
            items.append(
                named_tensors.of_torch(
                    named_tensors.below(module, inner),
                    tensor,
                    step=max(int(parts["step"]) - first, 0),
                    rank=int(parts.get("rank") or 0),
                    counter=counter,
                    place_in_call=(module, parts["side"] or "output", slot),
                    modified_ns=File(place.inside(name)).modified_ns,
                    file=name,
                )
            )
    named_tensors.add(building, items)
    return building.run()


def _step_of(name: str) -> str:
    """The folder of the step of a file that vLLM logged."""
    return name.rpartition("/")[0].rpartition("/")[0]


def _entered(place: Place, step: str) -> dict[str, int]:
    """The place of each call among those of a step, as they began; {} where that is not known."""
    with contextlib.suppress(UnreadableRun, OSError, ValueError):
        lines = place.inside(f"{step}/{_CALLS}").read_text(encoding="utf-8").splitlines()
        return {line: n for n, line in enumerate(dict.fromkeys(lines))}  # each rank adds its own
    return {}


def _without_number(call: str, calls: Collection[str]) -> str:
    """The module of a call: MODULE_2 is the third of MODULE, where those before it are calls."""
    module, _, number = call.rpartition("_")
    if not number.isdecimal() or number.startswith("0") or module not in calls:
        return call
    earlier = {f"{module}_{n}" for n in range(1, int(number))}
    return module if earlier <= set(calls) else call
