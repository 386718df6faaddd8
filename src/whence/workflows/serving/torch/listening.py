"""Records a model while an engine serves requests: logits, inputs and outputs of modules, and what
the cache receives and returns, as rows of requests.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks.operator_names import VIEWS, base_name
from whence.frameworks.torch_arrays import tensors_in
from whence.records.slots import CACHES
from whence.workflows.serving.rows import Array, Event, Kind, Rows, Trace


class _Call(NamedTuple):
    """The call of the model in progress. shape: (batch, tokens)."""

    number: int
    pieces: list[Piece]
    segments: list[Segment]
    shape: tuple[int, int]
    kwargs: Mapping[str, Any]


class _Choosing(TorchFunctionMode):  # type: ignore[misc]  # torch does not type it
    """Passes scores and result of every top-k inside its block to `chose`, whose answer the code
    gets.
    """

    def __init__(self, chose: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self._chose = chose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return out
        return self._chose(args[0] if args else kwargs["input"], out)


class _Operators(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Passes every operator that runs inside its block, and its result, to `ran`."""

    def __init__(self, ran: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._ran(func, out)
        return out


class Listening:
    """Records a model inside its `with` block.

    sequences: known tokens of each request; where none are, `logits_of` takes them afterwards.
    requests: those whose rows are kept; for others, only
    digests of what the cache receives. modules: record inputs and outputs of modules, reads of the
    cache and choices of routers too, not only logits. choices: what routers take instead of their
    own choice, as of `Trace.choices`, for a call of one whole sequence; None not to listen to them
    without modules. operators: with modules, record results of operators too. traces: recorded rows
    by request. choosers: module by number of a choice. errors: of the recorder's own code, which
    never reach the program.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sequences: Sequence[Sequence[int]],
        requests: Collection[int],
        *,
        modules: bool,
        choices: Mapping[int, Array] | None = None,
        operators: bool = False,
    ) -> None:
        self._operators, self._is_own = operators, False
        self._computed: dict[int, str] = {}
        self._model, self._modules, self._requests = model, modules, frozenset(requests)
        self._choices = choices
        self.choosers: dict[int, str] = {}
        self.schedule = Schedule(sequences)
        self.traces = {request: Trace() for request in requests}
        self.writers: dict[tuple[int, Kind, bytes], tuple[int, int]] = {}
        self.errors: list[str] = []
        self._calls = 0
        self._call: _Call | None = None
        self._hooks: list[Any] = []
        self._caches: dict[int, Any] = {}
        self._heard: list[tuple[list[Piece], dict[int, Array]]] = []
        self._padded: dict[int, int] = {}
        self._scopes: list[str] = []
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Listening:
        hooks = self._hooks
        hooks.append(self._model.register_forward_pre_hook(self._begins, with_kwargs=True))
        if self._modules:
            for name, module in self._model.named_modules():
                if name:
                    hooks.append(module.register_forward_pre_hook(self._given(name)))
                    hooks.append(module.register_forward_hook(self._made(name)))
        hooks.append(self._model.register_forward_hook(self._ends, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for cache in self._caches.values():
            del cache.update
        self._hooks, self._caches, self._call = [], {}, None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        self._is_own = True
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the program
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            self._is_own = False

    # ---- one call of the model

    def _begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._guarded():
            ids = kwargs.get("input_ids", args[0] if args else None)
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
                return
            tokens = pieces(ids, kwargs)
            segments = self.schedule.segments(tokens) if self.traces else []
            self._call = _Call(self._calls, tokens, segments, (ids.shape[0], ids.shape[1]), kwargs)
            self._calls += 1
            self._scopes, chosen = [], itertools.count()
            if self._modules or self._choices is not None:
                self._inside.enter_context(_Choosing(lambda x, out: self._chose(x, out, chosen)))
            if self._operators:
                seen = Counter[str]()
                self._computed = {}  # memory is used again by other tensors from call to call
                self._inside.enter_context(_Operators(lambda func, out: self._ran(func, out, seen)))
            if self._modules:
                for name in CACHES:
                    if callable(getattr(kwargs.get(name), "update", None)):
                        self._listen_to(kwargs[name])

    def _ends(self, module: Any, args: Any, out: Any) -> None:
        self._inside.close()
        with self._guarded():
            logits = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", out)
            call = self._call
            if call is not None and isinstance(logits, torch.Tensor):
                self._keep_logits(call, logits)
        self._call = None

    def logits_of(self, sequences: Sequence[Sequence[int]]) -> list[dict[int, Array]]:
        """Logits of requests whose tokens were not known while they ran, by position."""
        self.schedule = Schedule(sequences)
        logits: list[dict[int, Array]] = [{} for _ in sequences]
        for tokens, rows in self._heard:
            for segment in self.schedule.segments(tokens):
                if segment.at in rows:
                    logits[segment.request][segment.end - 1] = rows[segment.at]
        return logits

    def _keep_logits(self, call: _Call, logits: torch.Tensor) -> None:
        """Record the last row of each segment for which the model returned logits."""
        rows = _logits_of(call, logits)
        if not self.traces:
            self._heard.append((call.pieces, {at: _host(row) for at, row in rows.items()}))
        for segment in call.segments:
            if segment.request in self._requests and (row := rows.get(segment.at)) is not None:
                kept = Rows(call.number, segment.end - 1, _host(row)[None])
                self.traces[segment.request].add(Event("", Kind.LOGITS), kept)

    # ---- modules

    def _given(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            with self._guarded():
                self._scopes.append(name)
                self._keep(name, Kind.INPUT, args[:1])

        return hook

    def _made(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            with self._guarded():
                self._keep(name, Kind.OUTPUT, out)
                self._scopes.pop()

        return hook

    def _keep(self, name: str, kind: Kind, values: Any) -> None:
        call = self._call
        if call is None:
            return
        for place, tensor in enumerate(tensors_in(values)):
            self._keep_rows(call, Event(name, kind, place=place), tensor)

    def _keep_rows(self, call: _Call, event: Event, tensor: torch.Tensor) -> None:
        """Record the rows of a tensor of numbers that has one for each token."""
        batch, count = call.shape
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return
        if tensor.shape[0] == batch * count and tensor.dim() == 2:
            tensor = tensor.reshape(batch, count, -1)
        if tensor.dim() == 4 and tensor.shape[1] != count:  # heads are in front of tokens
            tensor = tensor.transpose(1, 2)
        if tensor.shape[:2] != (batch, count):
            return
        for segment in call.segments:
            if segment.request in self._requests:
                rows = _host(tensor[segment.row, slice(*segment.columns)])
                self.traces[segment.request].add(event, Rows(call.number, segment.start, rows))

    def _ran(self, func: Any, out: Any, seen: Counter[str]) -> None:
        """Record the result of an operator; that of a view is one of whatever computed its data.
        seen: how often each ran in this call.
        """
        call, scope = self._call, self._scopes[-1] if self._scopes else ""
        results = out if isinstance(out, (tuple, list)) else (out,)
        tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        if call is None or self._is_own or not tensors:
            return
        with self._guarded():
            out = tensors[0]
            name = f"{func} in {scope}".replace(".default", "")
            if base_name(str(func)) in VIEWS:
                name = self._computed.get(out.untyped_storage().data_ptr(), name)
            for tensor in tensors:
                self._computed[tensor.untyped_storage().data_ptr()] = name
            if not (out.dim() == 4 and out.shape[1] == call.shape[1]):  # heads, or tokens?
                self._keep_rows(call, Event(name, Kind.OPERATOR, place=seen[name]), out)
            seen[name] += 1

    # ---- routers

    def _chose(self, scores: torch.Tensor, out: Any, numbers: Iterator[int]) -> Any:
        """Record a choice among scores of each token; its result, or that of the prescribed one."""
        call, (_, chosen) = self._call, out
        with self._guarded():
            if call is None or scores.shape[:-1].numel() != chosen.shape[:-1].numel():
                return out
            if scores.shape[:-1].numel() != call.shape[0] * call.shape[1]:
                return out
            number = next(numbers)
            self.choosers[number] = self._scopes[-1] if self._scopes else ""
            for kind, tensor in ((Kind.SCORES, scores), (Kind.CHOICE, chosen)):
                tensor = tensor.reshape(*call.shape, -1)
                for segment in call.segments:
                    if segment.request in self._requests:
                        rows = _host(tensor[segment.row, slice(*segment.columns)])
                        event = Event("", kind, place=number)
                        self.traces[segment.request].add(
                            event, Rows(call.number, segment.start, rows)
                        )
            prescribed = (self._choices or {}).get(number)
            if prescribed is not None and call.segments:
                first = call.segments[0]
                prescribed = prescribed[first.start : first.end]
            if prescribed is not None and prescribed.size == chosen.numel():
                other = torch.from_numpy(prescribed).to(chosen.device).reshape(chosen.shape)
                used = torch.where(other < 0, chosen, other)
                return type(out)((scores.gather(-1, used), used))
        return out

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
        """Record a write to the cache. keys, values: (batch, heads, tokens, width)."""
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
                    if segment.start == 0:
                        self._padded[segment.request] = segment.columns[0]
                    padded = self._padded.get(segment.request, 0)
                    slots = _slots(call, segment, tensor.shape[2], cuts, padded)
                    if slots is not None:
                        rows = _host(tensor[segment.row, :, slots]).swapaxes(0, 1)
                        trace = self.traces[segment.request]
                        trace.read(Event("", kind, layer), call.number, segment, rows)


def _logits_of(call: _Call, logits: torch.Tensor) -> dict[int, torch.Tensor]:
    """The logits of the last token of each piece, by the piece's place in the call.

    The model returns logits of all tokens, of the tokens that the call names, or one row a piece.
    """
    ends = {at: (piece.row, piece.columns[1] - 1) for at, piece in enumerate(call.pieces)}
    if logits.shape[:2] == call.shape:
        return {at: logits[end] for at, end in ends.items()}
    rows = logits.reshape(-1, logits.shape[-1])
    named = call.kwargs.get("logits_indices", call.kwargs.get("logits_to_keep"))
    if isinstance(named, torch.Tensor) and named.dim() == 1 and call.shape[0] == 1:
        places = {column: n for n, column in enumerate(named.tolist()[: len(rows)])}
        return {at: rows[places[last]] for at, (_, last) in ends.items() if last in places}
    return {at: rows[at] for at in ends} if len(rows) == len(ends) else {}


def _slots(call: _Call, segment: Segment, held: int, cuts: Any, padded: int) -> list[int] | None:
    """Positions of the cache's output that belong to a segment, in order; None when unknown.

    held: number of positions returned. cuts: ends of each request, for a batch in one row. padded:
    how many tokens of padding were before its first one.
    """
    if isinstance(cuts, torch.Tensor):
        ends = cuts.tolist()
        if ends[-1] > held:  # nothing is read back: what was written is handed out
            return list(range(*segment.columns))
        return list(range(ends[segment.at], ends[segment.at + 1]))
    real = real_slots(call.kwargs, segment.row, call.shape[1])
    first = padded if held >= padded + segment.end else 0
    alone = list(range(first, first + segment.end)), first + segment.end
    slots, total = (real.slots, real.total) if real else alone
    if held < total:  # a window
        slots = [slot - total + held for slot in slots if slot >= total - held]
    return slots


def digest(row: Array) -> bytes:
    """Digest of the bits of a row."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(row).tobytes())


def _host(tensor: torch.Tensor) -> Array:
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    array: Array = tensor.detach().to(device="cpu", dtype=wide, copy=True).numpy()
    return array


# Assigns the rows of a model call to requests by their tokens, for any form of the batch.
#
# An engine joins requests in one row, cuts prompts into pieces, skips prefixes that it has, and
# pads. Requests are known by their tokens alone; what the engine says of lengths and positions
# decides only between requests that have the same tokens at the same place.


class Segment(NamedTuple):
    """Tokens of one request in one call of the model.

    row: in the batch. columns: (first, end) in that row, without padding. start: position of the
    first token in the request. at: index among the pieces of the call.
    """

    request: int
    row: int
    columns: tuple[int, int]
    start: int
    at: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.columns[1] - self.columns[0]

    @property
    def end(self) -> int:
        """Length of the request after the call."""
        return self.start + self.length


class Piece(NamedTuple):
    """Adjacent tokens in a call. position: of the first token as given by the call, -1 for none."""

    row: int
    columns: tuple[int, int]
    tokens: list[int]
    position: int


class Schedule:
    """Assigns tokens of calls to requests.

    sequences: prompt and generated tokens of each request. begun: how many tokens of each were
    served from its first on. strays: pieces that belong to no request.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._ends = [0] * len(sequences)
        self.begun = [0] * len(sequences)
        self._served = [(-1, 0)] * len(sequences)
        self._calls = 0
        self.strays: list[Piece] = []

    def segments(self, tokens: Sequence[Piece]) -> list[Segment]:
        """The segments of a call, of its tokens."""
        segments: list[Segment] = []
        for at, piece in enumerate(tokens):
            request, start = self._request(piece, {segment.request for segment in segments})
            if request < 0:
                self.strays.append(piece)
                continue
            segments.append(Segment(request, piece.row, piece.columns, start, at))
            self._ends[request] = end = start + len(piece.tokens)
            if start <= self.begun[request] < end:
                self.begun[request] = end
            self._served[request] = self._calls, at
        self._calls += 1
        return segments

    def _request(self, piece: Piece, used: set[int]) -> tuple[int, int]:
        """(request, position of the first token); (-1, -1) when no request has these tokens."""
        places = [
            (request, start)
            for request, sequence in enumerate(self._sequences)
            if request not in used
            for start in self._starts(request, sequence, piece)
        ]
        request, start = min(places, key=lambda place: self._rank(place, piece), default=(-1, -1))
        is_back = request >= 0 and 0 < start < self._ends[request]
        ends = (end for other, end in enumerate(self._ends) if other not in used)
        if is_back and piece.position in ends:
            return -1, -1  # a request that is to go on here got a token that it did not report
        return request, start

    def _starts(self, request: int, sequence: list[int], piece: Piece) -> list[int]:
        count = len(piece.tokens)
        starts = {self._ends[request], piece.position, 0}
        return [s for s in starts if s >= 0 and sequence[s : s + count] == piece.tokens]

    def _rank(self, place: tuple[int, int], piece: Piece) -> tuple[bool, bool, bool, int, int, int]:
        """Sort key, best first: continues where its request ended, at the position that the call
        gives, is not the last token of an answer, which nothing follows, was served longest ago,
        stood first in that call.
        """
        request, start = place
        is_elsewhere = start != self._ends[request], start != piece.position
        is_last = start + len(piece.tokens) == len(self._sequences[request])
        return *is_elsewhere, is_last, *self._served[request], request


def pieces(ids: torch.Tensor, kwargs: Mapping[str, Any]) -> list[Piece]:
    """The tokens of a call, split at the ends of requests and without padding."""
    positions = kwargs.get("position_ids")
    positions = positions if isinstance(positions, torch.Tensor) else None
    cuts = kwargs.get("cu_seq_lens_q")
    cut: list[Piece] = []
    for row, tokens in enumerate(ids.tolist()):
        columns = [(0, len(tokens))]
        if isinstance(cuts, torch.Tensor):
            ends = cuts.tolist()
            columns = list(itertools.pairwise(ends))
        elif (real := real_slots(kwargs, row, len(tokens))) is not None:
            own = [slot - real.total + len(tokens) for slot in real.slots]
            own = [column for column in own if column >= 0]
            columns = [(own[0], own[-1] + 1)] if own else []
        elif positions is not None and positions.dim() == 2:
            columns = _runs(positions[min(row, len(positions) - 1)].tolist())
            columns = columns if len(ids) == 1 else columns[-1:]  # padding is on the left
        for first, last in columns:
            if first < last:
                place = positions[min(row, len(positions) - 1)] if positions is not None else None
                position = int(place[first]) if place is not None and place.dim() else -1
                cut.append(Piece(row, (first, last), tokens[first:last], position))
    return cut


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """(first, end) of each run of positions that follow one another."""
    count = len(positions)
    starts = [n for n in range(count) if not n or positions[n] != positions[n - 1] + 1]
    return list(zip(starts, [*starts[1:], count]))


class RealSlots(NamedTuple):
    """Slots in a row of the mask that contain tokens, in order, and the total number of slots."""

    slots: list[int]
    total: int


def real_slots(kwargs: Mapping[str, Any], row: int, count: int) -> RealSlots | None:
    """The slots of a row's cache and new tokens that are not padding; None without a mask.

    count: number of new tokens.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] < count:
        return None
    return RealSlots(mask[row].nonzero().flatten().tolist(), mask.shape[1])
