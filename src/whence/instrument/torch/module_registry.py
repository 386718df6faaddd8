"""Modules that a listener has seen: their names below a root, the root itself, and settings that a
reader of two runs asks for first.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import msgspec
import torch

from whence.instrument.call_frames import root_or_name
from whence.instrument.process_group import process_group
from whence.instrument.session import Session
from whence.instrument.torch import settings
from whence.instrument.torch.module_info import ModuleInfo, ModuleRoot, is_optimized


class ModuleRegistry:
    """Modules by identity, and roots by name. Keeps no module alive."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._infos: dict[int, ModuleInfo] = {}
        self._serial = 0
        self.roots: dict[str, ModuleRoot] = {}

    def __bool__(self) -> bool:
        return bool(self._infos)

    def get(self, module: Any) -> ModuleInfo | None:
        """The `ModuleInfo` of a module, None if it is unknown."""
        info = self._infos.get(id(module))
        return info if info is not None and info.ref() is module else None

    def clear(self) -> None:
        """Forget everything."""
        self._infos.clear()
        self.roots.clear()

    def new_root(self, module: Any) -> ModuleRoot | None:
        """Make a module a root. Returns the root if it is new, None if the module continues the
        root of an earlier module of its class that is gone.
        """
        free, name = root_or_name(self.roots.values(), type(module).__name__)
        if free is not None:
            free.ref = weakref.ref(module)
            self._learn(module, free, "")
            return None
        root = self.roots[name] = ModuleRoot(name, weakref.ref(module))
        self._learn(module, root, "")
        return root

    def adopt(self, module: Any, root: ModuleRoot, parent_scope: str) -> ModuleInfo:
        """Register a module that is called inside a root but was not there when the root was
        registered.
        """
        top = root.ref()
        for name, child in top.named_modules() if top is not None else ():
            if child is module:
                self._learn(module, root, name)
                return self._infos[id(module)]
        inside = f"<{type(module).__name__}>"
        self._learn(module, root, f"{parent_scope}.{inside}" if parent_scope else inside)
        return self._infos[id(module)]

    def known_compiled(self, module: Any) -> ModuleInfo | None:
        """Register the `torch.compile` wrapper of a known module under that module's name; None for
        any other module.
        """
        original = self.get(module._orig_mod) if is_optimized(module) else None
        if original is None:
            return None
        self._serial += 1
        info = ModuleInfo(module, original.scope, original.root, self._serial, self._forget)
        self._infos[id(module)] = info
        return info

    def _learn(self, module: Any, root: ModuleRoot, prefix: str) -> None:
        for name, child in module.named_modules(prefix=prefix):
            if child is module or self.get(child) is None:
                self._serial += 1
                self._infos[id(child)] = ModuleInfo(child, name, root, self._serial, self._forget)

    def _forget(self, place: int, serial: int) -> None:
        """Forget a module that is gone, since its info would keep tensors alive."""
        if (info := self._infos.get(place)) is not None and info.serial == serial:
            del self._infos[place]

    def note_settings(self, module: Any, root: ModuleRoot) -> None:
        """Note mode, dtypes, attention implementation, threads and versions of a root."""
        dtypes: dict[str, int] = {}
        devices: dict[str, int] = {}
        for parameter in module.parameters():
            dtype, device = str(parameter.dtype).removeprefix("torch."), str(parameter.device)
            dtypes[dtype] = dtypes.get(dtype, 0) + 1
            devices[device] = devices.get(device, 0) + 1
        config = getattr(module, "config", None)
        facts: dict[str, Any] = {
            "training": module.training,
            "parameter_dtypes": dtypes,
            "devices": devices,
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "inference_mode": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "torch": str(torch.__version__),
        }
        facts |= settings.numerics() | process_group()
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str):
            facts["attention"] = attention
        ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
        if isinstance(ends, (int, list)):
            facts["eos"] = ends
        padding = getattr(config, "pad_token_id", None)
        if isinstance(padding, int):
            facts["pad"] = padding
        if "transformers" in sys.modules:
            facts["transformers"] = getattr(sys.modules["transformers"], "__version__", "")
        self._session.note("settings", msgspec.json.encode(facts).decode(), root.name)
