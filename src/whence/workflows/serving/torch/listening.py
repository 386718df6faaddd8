"""Listens to a model while an engine serves requests: logits, what modules are given and make, and
what the cache is given and hands out, as rows of requests.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from whence.frameworks.torch_arrays import tensors_in
from whence.records.slots import CACHES
from whence.workflows.serving.rows import Event, Kind, Rows, Trace
from whence.workflows.serving.torch.schedule import Schedule, Segment, real_slots


class _Call(NamedTuple):
    """A call of the model in progress. shape: (batch, tokens)."""

    number: int
    segments: list[Segment]
    shape: tuple[int, int]
    kwargs: Mapping[str, Any]


class Listening:
    """Listens to a model inside its `with` block.

    sequences: the tokens of each request, as far as they are known. requests: whose rows are kept;
    of the others only digests of what the cache was given. modules: keep what modules are given and
    make, and what the cache hands out; else only logits. traces: what was kept, by request. errors:
    of the listener's own code, which never reach the program.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sequences: Sequence[Sequence[int]],
        requests: Collection[int],
        *,
        modules: bool,
    ) -> None:
        self._model, self._modules, self._requests = model, modules, frozenset(requests)
        self.schedule = Schedule(sequences)
        self.traces = {request: Trace() for request in requests}
        self.writers: dict[tuple[int, Kind, bytes], tuple[int, int]] = {}
        self.errors: list[str] = []
        self._calls = 0
        self._call: _Call | None = None
        self._hooks: list[Any] = []
        self._caches: dict[int, Any] = {}

    def __enter__(self) -> Listening:
        hooks = self._hooks
        hooks.append(self._model.register_forward_pre_hook(self._begins, with_kwargs=True))
        if self._modules:
            for name, module in self._model.named_modules():
                if name:
                    hooks.append(module.register_forward_pre_hook(self._given(name)))
                    hooks.append(module.register_forward_hook(self._made(name)))
        hooks.append(self._model.register_forward_hook(self._ends))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for cache in self._caches.values():
            del cache.update
        self._hooks, self._caches, self._call = [], {}, None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the program
            self.errors.append(f"{type(error).__name__}: {error}")

    # ---- one call of the model

    def _begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._guarded():
            ids = kwargs.get("input_ids", args[0] if args else None)
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
                return
            segments = self.schedule.segments(ids, kwargs)
            self._call = _Call(self._calls, segments, (ids.shape[0], ids.shape[1]), kwargs)
            self._calls += 1
            if self._modules:
                for name in CACHES:
                    if callable(getattr(kwargs.get(name), "update", None)):
                        self._listen_to(kwargs[name])

    def _ends(self, module: Any, args: Any, out: Any) -> None:
        with self._guarded():
            logits = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", out)
            call = self._call
            if call is not None and isinstance(logits, torch.Tensor):
                self._keep_logits(call, logits)
        self._call = None

    def _keep_logits(self, call: _Call, logits: torch.Tensor) -> None:
        """The last row of each segment, as far as the model made logits of it."""
        rows = _logits_of(call, logits)
        for segment in call.segments:
            if segment.request in self._requests and (row := rows.get(segment.at)) is not None:
                kept = Rows(call.number, segment.end - 1, _host(row)[None])
                self.traces[segment.request].add(Event("", Kind.LOGITS), kept)

    # ---- modules

    def _given(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            with self._guarded():
                self._keep(name, Kind.INPUT, args[:1])

        return hook

    def _made(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            with self._guarded():
                self._keep(name, Kind.OUTPUT, out)

        return hook

    def _keep(self, name: str, kind: Kind, values: Any) -> None:
        call = self._call
        if call is None:
            return
        batch, count = call.shape
        for place, tensor in enumerate(tensors_in(values)):
            if not tensor.is_floating_point() or tensor.dim() < 2:
                continue
            if tensor.shape[0] == batch * count and tensor.dim() == 2:
                tensor = tensor.reshape(batch, count, -1)
            if tensor.shape[:2] != (batch, count):
                continue
            for segment in call.segments:
                if segment.request in self._requests:
                    rows = _host(tensor[segment.row, slice(*segment.columns)])
                    event = Event(name, kind, place=place)
                    self.traces[segment.request].add(event, Rows(call.number, segment.start, rows))

    # ---- the cache

    def _listen_to(self, cache: Any) -> None:
        if id(cache) in self._caches:
            return
        self._caches[id(cache)] = cache
        update, signature = cache.update, inspect.signature(cache.update)

        def listening(*args: Any, **kwargs: Any) -> Any:
            values: list[Any] = []
            with self._guarded():
                values = list(signature.bind(*args, **kwargs).arguments.values())
                self._wrote(int(values[2]), (values[0], values[1]))
            result = update(*args, **kwargs)
            with self._guarded():
                beside: dict[str, Any] = next((v for v in values[3:] if isinstance(v, dict)), {})
                self._read(int(values[2]), result, beside.get("cu_seq_lens_k"))
            return result

        cache.update = listening

    def _wrote(self, layer: int, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        """keys, values: (batch, heads, tokens, width)."""
        call = self._call
        if call is None:
            return
        for kind, tensor in zip((Kind.K_WRITTEN, Kind.V_WRITTEN), states):
            for segment in call.segments:
                rows = _host(tensor[segment.row, :, slice(*segment.columns)]).swapaxes(0, 1)
                for offset, row in enumerate(rows):
                    key = layer, kind.read, digest(row)
                    self.writers.setdefault(key, (segment.request, segment.start + offset))
                if segment.request in self._requests:
                    event = Event("", kind, layer)
                    self.traces[segment.request].add(event, Rows(call.number, segment.start, rows))

    def _read(self, layer: int, states: tuple[torch.Tensor, torch.Tensor], cuts: Any) -> None:
        call = self._call
        if call is None:
            return
        for kind, tensor in zip((Kind.K_READ, Kind.V_READ), states):
            for segment in call.segments:
                if segment.request in self._requests:
                    slots = _slots(call, segment, tensor.shape[2], cuts)
                    if slots is not None:
                        rows = _host(tensor[segment.row, :, slots]).swapaxes(0, 1)
                        trace = self.traces[segment.request]
                        trace.read(Event("", kind, layer), call.number, segment, rows)


def _logits_of(call: _Call, logits: torch.Tensor) -> dict[int, torch.Tensor]:
    """The logits of the last token of each segment, by its place in the call: of all tokens, of
    those that the call names, or of as many rows as there are segments.
    """
    segments = call.segments
    if logits.shape[:2] == call.shape:
        return {s.at: logits[s.row, s.columns[1] - 1] for s in segments}
    rows = logits.reshape(-1, logits.shape[-1])
    named = call.kwargs.get("logits_indices", call.kwargs.get("logits_to_keep"))
    if isinstance(named, torch.Tensor) and named.dim() == 1 and call.shape[0] == 1:
        places = {column: n for n, column in enumerate(named.tolist()[: len(rows)])}
        return {
            s.at: rows[places[s.columns[1] - 1]] for s in segments if s.columns[1] - 1 in places
        }
    return {s.at: rows[s.at] for s in segments} if len(rows) == len(segments) else {}


def _slots(call: _Call, segment: Segment, held: int, cuts: Any) -> list[int] | None:
    """Which of the positions that a cache hands out belong to a segment, in order; None where that
    cannot be told. held: positions handed out. cuts: where those of each request end, of a batch
    in one row.
    """
    if isinstance(cuts, torch.Tensor):
        ends = cuts.tolist()
        if ends[-1] > held:  # nothing is read back: what was written is handed out
            return list(range(*segment.columns))
        return list(range(ends[segment.at], ends[segment.at + 1]))
    real = real_slots(call.kwargs, segment.row, call.shape[1])
    slots, total = (real.slots, real.total) if real else (list(range(segment.end)), segment.end)
    if held < total:  # a window
        slots = [slot - total + held for slot in slots if slot >= total - held]
    return slots


def digest(row: np.ndarray[Any, Any]) -> bytes:
    """Of the bits of a row."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(row).tobytes())


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    array: np.ndarray[Any, Any] = tensor.detach().to(device="cpu", dtype=wide, copy=True).numpy()
    return array
