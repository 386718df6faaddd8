"""Compares the recorded settings and input metadata of both runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from whence.display import listed
from whence.records import Run
from whence.records.marks import FILES_CHANGED, OBSERVER
from whence.records.observed import observed

# Settings that change results beyond rounding or choose other kernels. Other settings are listed
# but explain no difference.
_WATCHED = (
    "training",
    "parameter_dtypes",
    "attention",
    "devices",
    "threads",
    "matmul_precision",
    "default_dtype",
    "inference_mode",
    "onednn",
    "ir_optim",
    "deterministic",
    "model_hash",
    "optimization",
    "disabled_optimizers",
    "providers",
)


def settings_of(run: Run) -> dict[str, dict[str, Any]]:
    """The settings that the capture recorded for every root: mode, dtypes, attention
    implementation, threads.
    """
    out: dict[str, dict[str, Any]] = {}
    for scope, value in told(run, "settings"):
        out.setdefault(scope, value)
    return out


def told(run: Run, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The (scope, table) of each note of a kind that holds a table."""
    for note in run.notes:
        if note.kind != kind:
            continue
        with contextlib.suppress(msgspec.MsgspecError):
            if isinstance(value := msgspec.json.decode(note.text), dict):
                yield note.scope, value


def differences(reference: Run, target: Run) -> list[str]:
    """Sentences, one per condition in which the two runs differ."""
    out: list[str] = []
    settings, target_settings = settings_of(reference), settings_of(target)
    shared = [name for name in settings if name in target_settings]
    pairs = [(name, settings[name], target_settings[name]) for name in shared]
    if not pairs and len(settings) == 1 and len(target_settings) == 1:
        ((name, only),), (only_target,) = settings.items(), target_settings.values()
        pairs = [(name, only, only_target)]
    for name, a, b in pairs:
        # An engine's model has other settings than a module: only settings that both state are
        # compared.
        alike = ("training" in a) == ("training" in b)
        out += [
            f"{name}: {key} {_short(a.get(key))} against {_short(b.get(key))}"
            for key in _WATCHED
            if (alike or (key in a and key in b)) and _short(a.get(key)) != _short(b.get(key))
        ]
    if reference.info.seed != target.info.seed:
        out.append(f"seed {reference.info.seed} against {target.info.seed}")
    # a dump of another tool does not record them
    versions, across = reference.info.versions, target.info.versions
    for package in sorted({*versions, *across}) if versions and across else ():
        old, new = versions.get(package), across.get(package)
        if old != new:
            out.append(f"{package} {old or 'absent'} against {new or 'absent'}")
    return out


def changed(run: Run) -> list[str]:
    """Sentences on what a capture changed on purpose: patched outputs, a planted fault."""
    out: list[str] = []
    points = run.info.options.get("patch")
    if isinstance(points, list) and points:
        source = run.info.options.get("patch_from")
        out.append(f"patched with outputs of {source} at {listed([*map(str, points)], 4)}")
    if run.info.options.get("inject"):
        out.append(f"a fault was planted in it: {run.info.options['inject']}")
    kinds = ("patch-refused", "fault-refused", "forced", "force-refused", FILES_CHANGED)
    return out + [n.text for n in run.notes if n.kind in kinds]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(str(k) for k in value) or "none"
    return str(value)


def observer_effects(run: Run) -> Iterator[str]:
    """Sentences on how a capture changed its run: one for each graph whose results differ from the
    same command without a capture, and one with the number of graphs without a difference.
    """
    none = 0
    for note in run.notes:
        if note.kind == "observer":
            if note.text.startswith(f"{OBSERVER}none"):
                none += 1
            else:
                yield note.text
    seen = observed(run)
    parts = [seen.words] if seen is not None else []
    if none and not (seen is not None and seen.is_doubt):
        parts.insert(0, f"none in {none} {'graph' if none == 1 else 'graphs'}")
    if run.info.options.get("graph_mode") == "fx":
        parts.append("graphs ran node by node, in the place of compiled code")
    if parts:
        yield OBSERVER + "; ".join(parts)
