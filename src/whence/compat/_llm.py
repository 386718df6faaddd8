"""`ait_llm` and `msit_llm`, one tool of two ages: what is dumped, from the first call of
`register_hook` to the end of the process.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whence.compat._said import once, same_as, without

_LEVELS = {"module": "modules", "api": "op"}
_PARTS = {0: "input", 1: "output", 2: "both"}
_STATISTICS = {0: "full", 1: "stats", 2: "full"}


class DumpConfig:
    """What is dumped, and where: below `dump_path`, for ait `<device>_<process>/` and for msit
    `msit_dump_<time>/torch_tensors/<device>_<process>/`, a run of whence too.

    token_range: tokens (calls of the model, from 0) to dump; the first when it is not given, of
    dump_last_logits all. module_list: classes of modules, or their names; [] for all. api_list:
    operators that the tool's files have (the run has all); mode: "module", "api" or both.
    tensor_part: 0 inputs, 1 outputs, 2 both. device_id: only on this device. layer_name: names or a
    pattern with `*`, from "root" on. dump_last_logits: the logits of each token alone.
    dump_statistics_mode: 0 tensors, 1 statistics, 2 both; analyze: statistics too. dump_weight:
    weights too (the run has them always). seed: for every framework, with deterministic kernels.
    Raises UsageError for what is not understood.
    """

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        token_range: Sequence[int] | int | None = None,
        module_list: Sequence[Any] | None = None,
        api_list: Sequence[Any] | None = None,
        tensor_part: int = 2,
        device_id: int | None = None,
        dump_last_logits: bool = False,
        mode: str | Sequence[str] | None = None,
        dump_weight: bool = False,
        layer_name: str | Sequence[str] | None = None,
        dump_statistics_mode: int = 0,
        analyze: bool = False,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        from whence.api import Dump
        from whence.compat._steps import numbers
        from whence.errors import UsageError

        without("DumpConfig", others, {}, inspect.signature(DumpConfig).parameters)
        modes = (mode,) if isinstance(mode, str) else tuple(mode or ("module",))
        if wrong := [m for m in modes if m not in _LEVELS]:
            raise UsageError(f"DumpConfig(mode={wrong[0]!r}): module, api, or both in a list")
        for name, value, allowed in (
            ("tensor_part", tensor_part, _PARTS),
            ("dump_statistics_mode", dump_statistics_mode, _STATISTICS),
        ):
            if value not in allowed:
                raise UsageError(f"DumpConfig({name}={value!r}): {', '.join(map(str, allowed))}")
        self.dump_path = Path(dump_path or ".")
        default = None if dump_last_logits else 0
        self.steps = numbers(
            "token_range", default if token_range in (None, [], ()) else token_range
        )
        self.device_id, self.modes = device_id, modes
        self.apis = tuple(_named(api) for api in api_list or ())
        if dump_last_logits and (module_list or layer_name or api_list):
            raise UsageError(
                "DumpConfig: dump_last_logits takes the logits alone; leave module_list, "
                "api_list and layer_name out"
            )
        layers = (layer_name,) if isinstance(layer_name, str) else layer_name or ()
        chosen = {
            "level": "op" if "api" in modes else "modules",
            "slots": _PARTS[tensor_part],
            "keep": _STATISTICS[dump_statistics_mode],
            "classes": tuple(_named(kind) for kind in module_list or ()),
            "include": tuple(map(_scope, layers)),
        }
        self.options: dict[str, Any] = {k: v for k, v in chosen.items() if v}
        if dump_last_logits:
            # The layer that `llm dump --ids N` dumps on the other side.
            self.options = {"level": "logits", "logits_module": Dump.LAST_LAYER}
        self.layout_options = {
            "weights": dump_weight,
            "statistics": dump_statistics_mode == 2 or bool(analyze),
            "tensors": dump_statistics_mode != 1,
        }
        if seed is not None:
            self.options |= {"seed": seed, "deterministic": True}


def register(
    tool: str, model: Any, config: DumpConfig, hook_type: str = "dump_data", **others: Any
) -> None:
    """Dump what `model` computes, from here to the end of the process."""
    from whence.api import Dump
    from whence.errors import UsageError

    without("register_hook", others, {})
    if not callable(getattr(model, "parameters", None)):
        raise UsageError(f"register_hook takes a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(config, DumpConfig):
        raise UsageError(f"register_hook takes a DumpConfig, not a {type(config).__name__}")
    if hook_type != "dump_data":
        raise UsageError(f"register_hook(hook_type={hook_type!r}): only 'dump_data' is known")
    level = config.options["level"]
    same_as(
        f"{tool}.register_hook",
        f"whence run{'' if level == 'modules' else f' --level {level}'} -o RUN -- CMD",
    )
    device = _device(model)
    if (
        config.device_id is not None
        and device != "cpu"
        and not device.endswith(str(config.device_id))
    ):
        once(
            f"register_hook: this process computes on {device}, device_id is {config.device_id}: "
            "nothing is dumped here"
        )
        return
    folder = _folder(tool, config.dump_path, f"{device}_{os.getpid()}", model)
    if folder is None:
        once("register_hook: this model is dumped already; the first configuration holds")
        return
    modules = "module" in config.modes

    def wanted(call: Any) -> bool:
        if call.kind == "module":
            return modules
        return not config.apis or any(
            re.search(rf"(^|[.:]){re.escape(api)}(\.|$)", call.op) for api in config.apis
        )

    Dump(
        folder,
        model,
        steps=config.steps,
        layout="msit_torch",
        layout_options=config.layout_options,
        is_wanted=wanted,
        **config.options,
    )
    once(f"dumped into {folder}")


def _folder(tool: str, dump_path: Path, process: str, model: Any) -> Path | None:
    """Where this process dumps a model, a place of its own for each model; None where this one is
    dumped there already.

    The guides of ait say `<dump_path>/<device>_<process>`, those of msit
    `<dump_path>/msit_dump_<time>/torch_tensors/<device>_<process>`.
    """
    from whence.api import opened_dump

    parent = dump_path
    if not tool.startswith("ait"):
        parent = (
            dump_path
            / f"{tool.partition('_')[0]}_dump_{time.strftime('%Y%m%d_%H%M%S')}"
            / "torch_tensors"
        )
    folder, number = parent / process, 1
    while (dump := opened_dump(folder)) is not None:
        if dump.model is model:
            return None
        number += 1
        folder = parent / f"{process}-{number}"
    return folder


def registering(tool: str) -> Callable[..., None]:
    """`register_hook` of a tool."""

    def register_hook(
        model: Any, config: DumpConfig, hook_type: str = "dump_data", **others: Any
    ) -> None:
        """Dump what `model` (a torch.nn.Module, the outermost) computes, from here to the end of
        the process. Nothing of it changes.
        """
        register(tool, model, config, hook_type, **others)

    return register_hook


def seed_all(seed: int = 2024, mode: bool = False) -> None:
    """Seed Python, numpy and torch. mode: deterministic kernels too."""
    from whence.api import determine

    same_as(
        "seed_all", f"whence run --seed {seed}{' --deterministic' if mode else ''} -o RUN -- CMD"
    )
    determine(seed, mode)


def _device(model: Any) -> str:
    """As the tool writes it: cpu, cuda0, npu1."""
    device = next((tensor.device for tensor in model.parameters()), None)
    return str(device).replace(":", "") if device is not None else "cpu"


def _named(function: Any) -> str:
    """A class, function or name as its name."""
    return (
        function.rpartition(".")[2]
        if isinstance(function, str)
        else str(getattr(function, "__name__", function))
    )


def _scope(name: str) -> str:
    """A name from "root" on as a pattern on ours; only `*` stands for other letters there."""
    inside = name.removeprefix("root.") if name.startswith("root.") else name.removeprefix("root")
    return "re:" + ".*".join(map(re.escape, inside.split("*")))
