"""Labels of torch tensors: read unseen by modes and compilers, and without breaking what is
compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from whence.errors import UsageError
from whence.frameworks import torch_arrays as adapter
from whence.instrument.torch.modes import ModesOff, is_traced


def read(value: Any) -> tuple[Any, tuple[int, ...], str, str] | None:
    """(host array, stride where not contiguous, device, class) of a tensor; None for what is none.
    Raises UsageError with the reason.
    """
    if isinstance(value, torch.fx.Proxy):
        raise UsageError("the program is traced here, not run: there are no elements")
    if not isinstance(value, torch.Tensor):
        return None
    if is_traced():
        raise UsageError("the program is traced here, not run: the tensor has no elements")
    device = str(value.device)
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError("a CUDA graph is being recorded: reading the tensor would break it")
    with _Unrecorded(), ModesOff():
        parts = adapter.plain(value)
        if parts is None or len(parts) != 1:
            raise UsageError(
                f"a {type(value).__name__} ({value.layout}, on {device}) has no elements to read "
                "here"
            )
        tensor = parts[0][1]
        if not adapter.dtype_name(tensor):
            raise UsageError(f"elements of {tensor.dtype} are not known to whence")
        stride = () if tensor.is_contiguous() else tuple(tensor.stride())
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return adapter.to_host(tensor), stride, device, "" if plain else type(value).__name__


class _Unrecorded:
    """torch.jit.trace records nothing of what is done inside."""

    def __enter__(self) -> None:
        self._state = torch._C._get_tracing_state()
        if self._state is not None:
            torch._C._set_tracing_state(None)

    def __exit__(self, *exc: Any) -> None:
        if self._state is not None:
            torch._C._set_tracing_state(self._state)


def operator(take: Callable[..., None]) -> Callable[..., bool]:
    """What takes a label in code that is being compiled: an operator of the graph, run where the
    label stands, which breaks nothing.

    take(name, value, side, file, id): takes a label. Returns a function of these that says whether
    code is being compiled here; then it has put the operator into the graph. Exported programs get
    none. Made once in a process; imports no compiler.
    """

    def run(x: Any, name: str, side: str, file: str, identity: str, kind: int) -> None:
        take(
            name,
            x if kind == _TENSOR else None,
            side or None,
            file if kind == _FILE else None,
            identity or None,
        )

    library = torch.library.Library("whence", "FRAGMENT")
    library.define("label(Tensor x, str name, str side, str file, str id, int kind) -> ()")
    library.impl("label", run, "CompositeExplicitAutograd")
    torch.library.register_fake("whence::label", lambda *arguments: None, lib=library)
    _libraries.append(library)  # operators live as long as their library
    op = torch.ops.whence.label.default
    torch.fx.node.has_side_effect(op)
    effects = importlib.import_module("torch._higher_order_ops.effects")
    effects._register_effectful_op(op, effects._EffectType.ORDERED)

    def in_graph(name: str, value: Any, side: str | None, file: Any, identity: str | None) -> bool:
        if not torch.compiler.is_compiling():
            return False
        if not torch.compiler.is_exporting():
            kind = (
                _FILE
                if file is not None
                else _TENSOR
                if isinstance(value, torch.Tensor)
                else _OTHER
            )
            x = value if kind == _TENSOR else torch.empty(0)
            op(
                x,
                name,
                side or "",
                str(file) if file is not None else "",
                str(identity) if identity is not None else "",
                kind,
            )
        return True

    return in_graph


_TENSOR, _FILE, _OTHER = range(3)
_libraries: list[Any] = []
