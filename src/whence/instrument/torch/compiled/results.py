"""Watches what compiled graphs return, at the point where dynamo gets the code from its backend:
outside every cache and CUDA graph, so that the compiler's settings stay as the program has them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from whence import disk
from whence.frameworks.torch_arrays import canonical, dtype_name, plain, tensors_in
from whence.instrument.guard import Replacements
from whence.instrument.process_group import process_group
from whence.instrument.torch.compiled import inductor_taps as inductor
from whence.instrument.torch.compiled.collected import find
from whence.instrument.torch.compiled.what_returned import Execution, Returned
from whence.instrument.torch.modes import ModesOff
from whence.instrument.wording import raised

_MOST = 20_000  # executions that are kept one by one; the rest is in the digest of all
_DEEP = 4  # views that may lie between an output and the backward pass of its graph


class Results:
    """Digests of what the compiled graphs of this process return. folder: where `finish` writes
    them. off: names of `SWITCHES` that are off while graphs are compiled.

    It wraps around a listener: code that a listener returns in place of the backend's is watched
    too.
    """

    def __init__(self, folder: Path, off: Sequence[str] = ()) -> None:
        self._folder, self._off = folder, tuple(off)
        self._replaced = Replacements()
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._graphs: list[str] = []
        self._executions: list[Execution] = []
        self._count, self._whole, self._problem = 0, xxhash.xxh3_128(), ""

    def install(self) -> None:
        """Start watching what every backend returns."""
        for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
            if (kind := getattr(torch, name, None)) is not None:
                self._patch(kind)

    def _patch(self, kind: Any) -> None:
        original, results = kind.__call__, self

        @functools.wraps(original)
        def __call__(wrapper: Any, gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if inductor.is_precompiling():
                return original(wrapper, gm, inputs, *args, **kwargs)
            with inductor.off(results._off):
                code = original(wrapper, gm, inputs, *args, **kwargs)
            return results._watched(code, gm)

        self._replaced.put(kind, "__call__", __call__)

    def remove(self) -> None:
        """Stop watching. Idempotent."""
        self._replaced.remove()

    def finish(self, switched: Iterable[str] = ()) -> None:
        """Stop watching, and write the digests to the folder. Call it once only. switched: names of
        `SWITCHES` that a capture turned off.
        """
        self.remove()
        # A folder that is gone: the launcher is, too, and nobody asks any more.
        if not self._graphs or not self._folder.is_dir():
            return
        returned = Returned(
            int(process_group().get("rank", os.environ.get("RANK", 0)) or 0),
            tuple(self._graphs),
            tuple(self._executions),
            self._count,
            self._whole.hexdigest(),
            tuple(switched),
            self._problem,
        )
        disk.write_file(self._folder / f"{os.getpid()}.json", msgspec.json.encode(returned))

    def renew(self) -> None:
        """Start anew in a forked child: the parent's results are not its own."""
        self._lock = threading.Lock()
        self._forget()

    def _watched(self, code: Callable[..., Any], gm: Any) -> Callable[..., Any]:
        number = len(self._graphs)
        self._graphs.append(_name(gm))

        @functools.wraps(code, assigned=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return code(*args, **kwargs)
            versions = [(value, _version(value)) for value in tensors_in(list(args))]
            out = code(*args, **kwargs)
            returned = list(tensors_in(out))
            left = [value for value, version in versions if _version(value) != version]
            self._took(number, [*returned, *left])
            self._watch_backward(number, returned)
            return out

        return run

    def _watch_backward(self, number: int, returned: Sequence[Any]) -> None:
        if _is_backward_compiled():
            return
        nodes = {id(n): n for value in returned if (n := _backward(value)) is not None}
        for node in nodes.values():
            node.register_hook(
                lambda gradients, _: self._took(number, tensors_in(list(gradients)), backward=True)
            )

    def _took(self, number: int, tensors: Iterable[Any], *, backward: bool = False) -> None:
        digest = xxhash.xxh3_128()
        try:
            with ModesOff(), torch.no_grad():
                for tensor in tensors:
                    _feed(digest, tensor)
        except Exception as error:  # noqa: BLE001 - whatever a class of the user's raises must not reach the program
            self._problem = self._problem or raised(error)
        text = digest.hexdigest()
        with self._lock:
            self._count += 1
            self._whole.update(f"{number} {backward} {text}".encode())
            if len(self._executions) < _MOST:
                self._executions.append(Execution(number, backward, text))


def _is_backward_compiled() -> bool:
    """Whether dynamo compiles backward passes while they run. A hook would become part of the
    compiled code.
    """
    compiled_autograd = find("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled_autograd, "compiled_autograd_enabled", False))


def _name(gm: Any) -> str:
    """Name of a graph: torch's frame and compile id, and the source line of its last operator."""
    context = torch._guards.CompileContext.try_get()
    compile_id = str(context.compile_id) if context is not None else "?"
    for node in reversed(getattr(getattr(gm, "graph", None), "nodes", ())):
        lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
        places = [line for line in lines if line.lstrip().startswith("File ")]
        if places:
            parts = places[-1].split('"')
            number = parts[2].split("line ")[-1].partition(",")[0]
            return f"{compile_id} ({Path(parts[1]).name}:{number})"
    return compile_id


def _version(tensor: Any) -> int:
    """Version of a tensor, 0 for an inference tensor."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _backward(tensor: Any) -> Any:
    """The backward node of the compiled graph that returned this tensor, None where there is
    none.
    """
    node = tensor.grad_fn
    for _ in range(_DEEP):
        if node is None or "CompiledFunction" in node.name():
            return node
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return None


def _feed(digest: Any, tensor: Any) -> None:
    parts = plain(tensor)
    if parts is None:
        digest.update(f"{type(tensor).__name__} without elements".encode())
        return
    for name, part in parts:
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        if dtype_name(part):
            digest.update(canonical(part))
