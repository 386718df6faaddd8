"""What graph mode shall dump: a configuration of torchair's where that is installed, else one of
ours with the same meaning.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from whence.compat._said import once, without

Slots = Literal["both", "input", "output"]


class CompilerConfig:
    """What `whence.compat.torchair.get_npu_backend` shall dump. mode: "exact" or "fx", "" for
    nothing. steps: None for all.
    """

    def __init__(self) -> None:
        self.mode, self.folder = "", Path()
        self.steps: frozenset[int] | None = None
        self.slots: Slots = "both"


def get_ge_dump_config(
    dump_path: str = ".",
    dump_mode: str = "all",
    fusion_switch_file: str | None = None,
    dump_token: Sequence[int] | None = None,
    dump_layer: Sequence[str] | None = None,
    compiler_config: Any = None,
    **others: Any,
) -> Any:
    """Dump what the compiled graph computes, into `<dump_path>/dump_<time>`, which is a run of
    whence too.

    dump_mode: "all", "input" or "output". dump_token: steps to dump, from 0. fusion_switch_file,
    dump_layer: for torchair itself. Where torchair is installed, its own configuration is returned
    (the one given, or a new one). Raises UsageError.
    """
    from whence.compat._steps import numbers
    from whence.errors import UsageError

    if dump_mode not in ("all", "input", "output"):
        raise UsageError(f"get_ge_dump_config(dump_mode={dump_mode!r}): all, input or output")
    if _is_there():
        folder = Path(dump_path) / "msit_ge_dump"
        return _of_torchair(
            folder, dump_mode, fusion_switch_file, dump_token, dump_layer, compiler_config, others
        )
    why = {
        "fusion_switch_file": "it switches fusions of GE; torch._inductor.config has inductor's",
        "dump_layer": "the whole graph is dumped; choose when comparing",
        "use_fusion": "it switches fusions of GE",
    }
    options = {**others, "fusion_switch_file": fusion_switch_file, "dump_layer": dump_layer}
    without(
        "get_ge_dump_config",
        options,
        why,
        ("dump_path", "dump_mode", "dump_token", "compiler_config"),
    )
    config = _ours(compiler_config)
    config.mode, config.folder = "exact", _new(Path(dump_path))
    config.steps = numbers("dump_token", dump_token)
    # checked where the capture begins
    config.slots = cast("Slots", {"all": "both"}.get(dump_mode, dump_mode))
    return config


def get_fx_dump_config(dump_path: str = ".", compiler_config: Any = None, **others: Any) -> Any:
    """Run the graph node by node with torch's own operators and dump them, into
    `<dump_path>/data_dump`, which is a run of whence too.

    Where torchair is installed, its own configuration is returned. Raises UsageError.
    """
    if _is_there():
        folder = Path(dump_path) / "msit_fx_dump"
        config = _given(compiler_config)
        config.debug.data_dump.type = "npy"
        if hasattr(config.debug.data_dump, "path"):
            folder.mkdir(parents=True, exist_ok=True)
            config.debug.data_dump.path = str(folder)
        return config
    without("get_fx_dump_config", others, {"dump_mode": "inputs and outputs are always dumped"})
    config = _ours(compiler_config)
    config.mode, config.folder = "fx", Path(dump_path) / "data_dump"
    return config


def _new(folder: Path) -> Path:
    """`dump_<time>` in a folder, of a second in which there is none yet."""
    now = time.time()
    while (
        place := folder / f"dump_{time.strftime('%Y%m%d_%H%M%S', time.localtime(now))}"
    ).exists():
        now += 1
    return place


def _is_there() -> bool:
    return importlib.util.find_spec("torchair") is not None


def _ours(config: Any) -> CompilerConfig:
    from whence.errors import UsageError

    if config is not None and not isinstance(config, CompilerConfig):
        raise UsageError(
            f"compiler_config is a {type(config).__name__}; take "
            "whence.compat.torchair.CompilerConfig, or install torchair for its own"
        )
    return config or CompilerConfig()


def _given(config: Any) -> Any:
    once("torchair is installed: it dumps by itself, and `whence compare` reads what it writes")
    if config is not None:
        return config
    return importlib.import_module("torchair.configs.compiler_config").CompilerConfig()


def _of_torchair(
    folder: Path,
    dump_mode: str,
    fusion_switch_file: str | None,
    dump_token: Sequence[int] | None,
    dump_layer: Sequence[str] | None,
    compiler_config: Any,
    others: Any,
) -> Any:
    """torchair's configuration, told by its own fields."""
    without("get_ge_dump_config", others, {"use_fusion": "torchair takes a fusion_switch_file"})
    config = _given(compiler_config)
    folder.mkdir(parents=True, exist_ok=True)
    config.debug.graph_dump.type = "txt"
    setattr(
        config.debug.graph_dump,
        "_path" if hasattr(config.debug.graph_dump, "_path") else "path",
        str(folder),
    )
    config.dump_config.enable_dump = True
    config.dump_config.dump_mode, config.dump_config.dump_path = dump_mode, str(folder)
    if fusion_switch_file is not None:
        config.fusion_config.fusion_switch_file = fusion_switch_file
    if dump_token is not None:
        config.dump_config.dump_step = "|".join(map(str, dump_token))
    if dump_layer is not None:
        config.dump_config.dump_layer = " ".join(dump_layer)
    return config
