"""`config.json` of msprobe, as options of a capture."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.compat._said import without

_LEVELS = {"L0": "modules", "L1": "op", "mix": "op", "debug": "modules"}
_KEEP = {"statistics": "stats", "tensor": "full", "structure": "none", "md5": "stats"}
_DATA = {"all": "both", "forward": "both", "input": "input", "output": "output"}
_NOTHING = {
    "async_dump": "elements are written behind the program already",
    "extra_info": "the line of the program is always there",
    "precision": "statistics are taken in float64",
    "risk_level": "every operator is taken",
    "custom_op_namespaces": "operators of every namespace are taken",
    "load": "whence run --patch CALL --patch-from RUN gives a call what it had in another run",
}
_NOTHING_OF_A_TASK = {
    "scope": "the whole step is dumped; name what is wanted in list",
    "tensor_list": "the task statistics keeps no elements; take the task tensor with a list",
    "slice": "tensors are dumped whole",
    "summary_mode": "statistics and a hash are always there",
    "bench_path": "whence compare finds the first difference in two runs",
    "diff_nums": "whence compare finds the first difference in two runs",
    "request_id": "all rows of a batch are dumped",
    "file_format": "files are those of torch.save",
}


@dataclass(frozen=True)
class Settings:
    """What a configuration asks for. steps: None for all. is_wanted: whether a call goes into the
    tool's own files.
    """

    folder: Path
    steps: frozenset[int] | None
    options: Mapping[str, Any]
    is_wanted: Callable[[Any], bool]
    enabled: bool

    @property
    def keep(self) -> str:
        """What of `whence run` keeps as much."""
        return "" if self.options["keep"] == "full" else f" --keep {self.options['keep']}"


def read(path: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> Settings:
    """Settings of a config.json (None: none); arguments replace its. Raises UsageError."""
    from whence.compat._steps import numbers
    from whence.errors import UsageError

    values = {**_load(path), **arguments}
    keys = ("task", "dump_path", "level", "rank", "step", "dump_enable", *_TASKS)
    without("config.json", {k: v for k, v in values.items() if k not in keys}, _NOTHING, keys)
    task, level = values.get("task") or "statistics", values.get("level") or "L1"
    if not isinstance(task, str) or task not in _KEEP:
        raise UsageError(
            f"config.json: task {task!r} is not there; {', '.join(_KEEP)} are (docs/switching.md)"
        )
    if not isinstance(level, str) or level not in _LEVELS:
        raise UsageError(
            f"config.json: level {level!r} is not there; {', '.join(_LEVELS)} are "
            "(docs/switching.md)"
        )
    section = values.get(task) or {}
    _check_types(values, section, task)
    own_keys = ("list", "data_mode")
    others = {
        k: v for k, v in section.items() if k not in own_keys and v not in ([], "", "statistics")
    }
    without(f"config.json, {task}", others, _NOTHING_OF_A_TASK, own_keys)
    listed = tuple(section.get("list") or ())
    options: dict[str, Any] = {
        "level": _LEVELS[level],
        "keep": _KEEP[task],
        "slots": _slots(section.get("data_mode")),
    }
    if level == "L0" and listed:
        options["include"] = tuple(f"re:.*{re.escape(_plain(name))}.*" for name in listed)
    if level == "debug":
        # what is saved by name alone, which is in the run
        options |= {
            "exclude": ("*",),
            "programs": False,
        }
    ranks = numbers("rank", values.get("rank"))
    if ranks is not None:
        options["ranks"] = tuple(sorted(ranks))

    def wanted(call: Any) -> bool:
        if level == "L1" and call.kind == "module":
            return False
        return not listed or any(_plain(name) in f"{call.scope} {call.op}" for name in listed)

    enabled = values.get("dump_enable", True) is not False
    return Settings(
        Path(values.get("dump_path") or "./dump"),
        numbers("step", values.get("step")),
        options,
        wanted,
        enabled,
    )


_TASKS = (
    "statistics",
    "tensor",
    "structure",
    "md5",
    "acc_check",
    "nan_check",
    "diff_check",
    "exception_dump",
    "overflow_check",
    "run_ut",
    "free_benchmark",
    "grad_probe",
)


def _load(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    from whence import config_files
    from whence.errors import UsageError

    if path is None:
        return {}
    try:
        content = json.loads(config_files.text_of(path, "utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"config_path {os.fspath(path)} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"config_path {os.fspath(path)} holds no JSON object")
    return content


def _check_types(values: Mapping[str, Any], section: Any, task: str) -> None:
    """Raise UsageError for what is not of the type that the key has."""
    from whence.errors import UsageError

    if not isinstance(section, dict):
        raise UsageError(f"config.json: {task} is an object, not {section!r:.80}")
    if not isinstance(values.get("dump_path") or "", str | os.PathLike):
        raise UsageError(f"config.json: dump_path is a text, not {values['dump_path']!r:.80}")
    for key in ("list", "data_mode"):
        given = section.get(key) or []
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple) or not all(isinstance(n, str) for n in listed):
            raise UsageError(f"config.json: {task}.{key} is a list of texts, not {given!r:.80}")


def _slots(modes: Any) -> str:
    """data_mode -> which tensors of a call. Raises UsageError."""
    from whence.errors import UsageError

    named = [modes] if isinstance(modes, str) else list(modes or ["all"])
    without(
        "data_mode",
        {"backward": True} if "backward" in named else {},
        {"backward": "the backward pass is dumped at L1 and mix, with the forward"},
    )
    if wrong := [mode for mode in named if mode not in (*_DATA, "backward")]:
        raise UsageError(
            f"config.json: data_mode {wrong[0]!r}; {', '.join(_DATA)} and backward are there"
        )
    kinds = {_DATA[mode] for mode in named if mode in _DATA}
    return kinds.pop() if len(kinds) == 1 else "both"


def _plain(name: str) -> str:
    """A name of the tool's as part of one of ours: "Module.conv1.Conv2d.forward.0" is conv1,
    "Torch.relu.0.forward" is relu.
    """
    parts = name.split(".")
    if parts[0] == "Module" and len(parts) > 4 and parts[-2] in ("forward", "backward"):
        return ".".join(parts[1:-3])
    if len(parts) == 4 and parts[-1] in ("forward", "backward"):
        return parts[1]
    return name
