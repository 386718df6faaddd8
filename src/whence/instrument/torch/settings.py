"""Settings of torch when something ran: switches that choose kernels and rounding, and how a
compiled module was compiled.

All are plain data (bool, int, float, str, None, lists and dicts of these) for notes in a run; other
values are left out.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

_DEPTH = 4
_BACKENDS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "_orig_backend")
# Dynamo itself writes these while it compiles.
_OWN = {"error_on_recompile", "nested_graph_breaks"}


def numerics() -> dict[str, Any]:
    """Switches of torch that choose kernels and rounding, besides those that every run notes."""
    facts: dict[str, Any] = {
        "mkldnn": bool(torch._C._get_mkldnn_enabled()),
        "interop_threads": torch.get_num_interop_threads(),
    }
    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    if capability is not None:
        facts["cpu_capability"] = capability()
    for name, module, switch in (
        ("cudnn", "cudnn", "enabled"),
        ("cudnn_deterministic", "cudnn", "deterministic"),
        ("cudnn_benchmark", "cudnn", "benchmark"),
    ):
        facts[name] = getattr(getattr(torch.backends, module), switch)
    for name, read in (
        ("cudnn_tf32", "_get_cudnn_allow_tf32"),
        ("fp16_reduction", "_get_cublas_allow_fp16_reduced_precision_reduction"),
        ("bf16_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
        ("sdp_flash", "_get_flash_sdp_enabled"),
        ("sdp_efficient", "_get_mem_efficient_sdp_enabled"),
        ("sdp_math", "_get_math_sdp_enabled"),
    ):
        function = getattr(torch._C, read, None)
        if function is not None:
            facts[name] = function()
    if torch._C._is_any_autocast_enabled():
        facts["autocast"] = {
            kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
    return {name: value for name, value in facts.items() if _is_plain(value)}


class Compilers:
    """Describes how compiled code was compiled, once per place."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def met(self, root: str, scope: str, compiled: Any) -> dict[str, Any] | None:
        """How `compiled` (a module, or dynamo's callback) was compiled; None when that was
        described before. Changes nothing.
        """
        if (root, scope) in self._noted:
            return None
        self._noted.add((root, scope))
        context = _context(compiled) if isinstance(compiled, torch.nn.Module) else None
        facts: dict[str, Any] = {"root": root}
        try:
            facts |= _backend(context[0] if context is not None else compiled)
            if context is not None:
                facts |= {
                    "fullgraph": bool(getattr(context[1], "fullgraph", False)),
                    "dynamic": getattr(context[1], "_dynamic", None),
                }
            facts |= {
                "inductor": changed("torch._inductor.config"),
                "dynamo": changed("torch._dynamo.config"),
            }
        except Exception as error:  # noqa: BLE001 - another torch keeps these elsewhere; the capture goes on without
            facts["unknown"] = f"{type(error).__name__}: {error}"[:200]
        return {name: value for name, value in facts.items() if _is_plain(value)}


def changed(name: str) -> dict[str, Any]:
    """Values of a config module of torch that are not its defaults, by dotted name; {} when it is
    not loaded. Only plain ones.
    """
    config = sys.modules.get(name)
    if config is None:
        return {}
    entries = config._config
    defaults = getattr(config, "_default", None)  # before torch 2.6
    is_default = getattr(config, "_is_default", lambda key: False)
    changes = {}
    for key, entry in entries.items():
        if (
            getattr(entry, "alias", None) is not None
            or key.startswith("_")
            or key in _OWN
            or is_default(key)
        ):
            continue
        default = defaults.get(key) if defaults is not None else entry.default
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to read a deprecated one warns
            value = config
            for part in key.split("."):
                value = getattr(value, part)
        if _is_plain(value) and not _same(value, default):
            changes[key] = value
    return changes


def _same(value: Any, default: Any) -> bool:
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # noqa: BLE001 - a default may be anything
        return False


def _context(module: Any) -> tuple[Any, Any] | None:
    """(dynamo's callback, its context) of a compiled module, None where they cannot be found."""
    context = module.__dict__.get("dynamo_ctx")
    if context is not None:
        return getattr(context, "callback", None), context
    function = module._compiled_call_impl
    if function is None or getattr(function, "__closure__", None) is None:
        return None
    cells = dict(
        zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__))
    )
    return cells.get("callback"), cells.get("self")


def _backend(callback: Any) -> dict[str, Any]:
    """Name and options of the compiler behind dynamo's callback."""
    for _ in range(8):
        inner = next((getattr(callback, n) for n in _BACKENDS if hasattr(callback, n)), None)
        if inner is None:
            break
        callback = inner
    name = getattr(callback, "compiler_name", None) or getattr(callback, "__name__", None)
    if not isinstance(name, str):
        return {}
    options = (
        getattr(callback, "config", None)
        if name == "inductor"
        else (getattr(callback, "kwargs", None) or {}).get("options")
    )
    dynamic = getattr(callback, "dynamic", None)
    plain = (
        {k: v for k, v in options.items() if isinstance(k, str) and _is_plain(v)}
        if isinstance(options, dict)
        else {}
    )
    return {"backend": name[:200], "options": plain, "dynamic": dynamic}


def _is_plain(value: Any, depth: int = 0) -> bool:
    if (
        value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, str) and len(value) <= 1000)
    ):
        return type(value) in (bool, int, float, str, type(None))
    if depth >= _DEPTH:
        return False
    if type(value) in (list, tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    return type(value) is dict and all(
        type(k) is str and _is_plain(v, depth + 1) for k, v in value.items()
    )
