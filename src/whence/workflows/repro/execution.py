"""How the runs of a finding executed their operators, and whether this machine can do so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whence import align
from whence.records import Call, Run
from whence.records.marks import was_compiled

if TYPE_CHECKING:
    from whence.replay.export.ways import Way


def way_of(run: Run, call: Call, notes: list[str]) -> Way:
    """How a run executed a call; what is not taken over is added to `notes`."""
    from whence.replay.export.ways import Way, known_config

    settings = align.settings_of(run).get(call.root, {})
    results = (*call.slots("output"), *call.slots("mutated"))
    device = next((run.records[r.record].device for r in results), "cpu") or "cpu"
    if not re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", device):
        device = "cpu"
    if not was_compiled(call):
        return Way(device=device, settings=settings)
    compiled = _compile_settings(run, call)
    if compiled is None:
        notes.append(
            "the run does not say how it was compiled (an older capture): the defaults of "
            "torch.compile are used"
        )
        compiled = {"backend": "inductor"}
    inductor, unknown = known_config(
        "torch._inductor.config", {**_table(compiled, "inductor"), **_table(compiled, "options")}
    )
    dynamo, unknown_dynamo = known_config("torch._dynamo.config", _table(compiled, "dynamo"))
    if unknown or unknown_dynamo:
        notes.append(
            "settings of the compiler that were not copied: "
            f"{', '.join(sorted((*unknown, *unknown_dynamo))[:10])}"
        )
    dynamic = compiled.get("dynamic")
    return Way(
        str(compiled.get("backend", "inductor")),
        inductor,
        dynamo,
        dynamic if isinstance(dynamic, bool) else None,
        device,
        settings,
    )


def why_not_here(way: Way, compiled: bool) -> str:
    """Why this machine cannot run operators that way, "" when it can."""
    import torch

    from whence.replay.export.ways import is_backend

    if compiled and not is_backend(way.backend):
        return (
            f"the target was compiled by {way.backend!r}, which is no backend of torch.compile here"
        )
    try:
        torch.empty(1, device=way.device)
    except Exception:  # noqa: BLE001 - torch raises anything for a device that is not there
        return f"the target ran on {way.device}, which this machine has not"
    return ""


def conditions(run: Run, call: Call, way: Way) -> str:
    """Versions, device and settings of a call, in words."""
    settings = align.settings_of(run).get(call.root, {})
    info = run.info
    parts = [f"torch {settings['torch']}"] if "torch" in settings else []
    parts += [
        f"{k} {settings[k]}"
        for k in ("cpu_capability", "threads", "matmul_precision", "attention")
        if k in settings
    ]
    device = next((run.records[r.record].device for r in call.slots("output")), "")
    parts += [f"device {device}"] if device else []
    parts += ["training"] if call.training else []
    parts += ["oneDNN off"] if settings.get("mkldnn") is False else []
    parts += [f"autocast {settings['autocast']}"] if settings.get("autocast") else []
    parts += [f"compiled by {way.backend}"] if way.backend else []
    parts += [f"seed {info.seed}"] if info.seed is not None else []
    return ", ".join(parts)


def _compile_settings(run: Run, call: Call) -> dict[str, Any] | None:
    """How a call, or the nearest one around or inside it, was compiled, as the capture noted it."""
    by_distance: list[tuple[int, dict[str, Any]]] = []
    for scope, settings in align.told(run, "compiled"):
        if settings.get("root", call.root) != call.root:
            continue
        around = scope in ("", call.scope) or call.scope.startswith(f"{scope}.")
        within = not call.scope or scope.startswith(f"{call.scope}.")
        if around or within:
            by_distance.append((-len(scope) if around else len(scope), settings))
    return min(by_distance, key=lambda item: item[0])[1] if by_distance else None


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name)
    return {k: v for k, v in table.items() if isinstance(k, str)} if isinstance(table, dict) else {}
