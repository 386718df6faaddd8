"""Runs the reference on an engine's tokens: the correct value of each tensor, and how much rounding
changes it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from whence.errors import UsageError
from whence.judge.ties import noise_of
from whence.records.slots import CACHES
from whence.workflows.serving.rows import Array, Event, HandedOut, Kind, Rows, Trace, distances
from whence.workflows.serving.torch.listening import Listening

_LOGITS = Event("", Kind.LOGITS)


class Truth(NamedTuple):
    """The reference's results for one sequence in float64, and the rounding floor of each event.

    logits: (positions, vocabulary). noise: standard deviation of the rounding error of a logit.
    scores: that of each score of a router, by number of the choice. unfit: layers in which keys and
    values that were handed out are of another form than the reference's, which attends to its own.
    """

    trace: Trace
    floors: dict[Event, float]
    logits: Array
    noise: float
    scores: dict[int, Array]
    unfit: frozenset[int] = frozenset()


class Forced:
    """A reference model that is run on given tokens, once in float64 and once in each of `dtypes`.

    The runs in `dtypes`, given by their names, measure the effect of rounding. The model itself is
    not changed. Raises UsageError for a name that is of no floating-point dtype.
    """

    _MEASURED = 2
    """Sequences whose rounding is measured before that of others is taken for alike."""

    def __init__(self, model: torch.nn.Module, dtypes: Collection[str]) -> None:
        self._wide = copy.deepcopy(model).double()
        choose = getattr(self._wide, "set_experts_implementation", None)
        if choose is not None and hasattr(self._wide.config, "num_experts_per_tok"):
            choose("eager")  # the grouped product of torch takes no float64
        names = {name.removeprefix("torch.") for name in dtypes}
        narrow = {
            name: copy.deepcopy(model).to(_dtype(name)) for name in sorted(names - {"float64"})
        }
        self._narrow = [*narrow.values()]
        self._quick = None if "float64" in names else narrow.get("float32")
        if self._quick is None and "float64" not in names:
            self._quick = copy.deepcopy(model).float()
        self._measured: list[tuple[float, float]] = []

    def truth(
        self,
        sequence: Sequence[int],
        *,
        modules: bool,
        choices: Mapping[int, Array] | None = None,
        handed: Sequence[HandedOut] = (),
        since: int = 0,
    ) -> Truth:
        """The truth for a sequence of tokens.

        choices: what routers take; by default their own choice in float64. handed: keys and values
        that are attended to, call by call; by default what the reference computes. Rounding is
        measured with the same choices, keys and values. since: the first position of which logits
        are computed; rows before it have no meaning.
        """
        unfit: set[int] = set()
        forms: dict[str, Any] = {"modules": modules, "since": since, "unfit": unfit}
        forms["handed"] = handed
        trace, logits = _run(self._wide, sequence, choices or {}, **forms)
        own = trace.choices(len(sequence))
        used = {
            n: np.where(rows < 0, own[n], rows)
            for n, rows in (choices or own).items()
            if n in own and rows.shape == own[n].shape
        }
        floors: dict[Event, float] = {}
        scores: dict[int, Array] = {}
        noise = 0.0
        for model in self._narrow:
            near, rounded = _run(model, sequence, used, **forms)
            rows, right = rounded[since:], logits[since:]
            noise = max(noise, float((rows - right).std(-1).max()))
            for event in near.rows.keys() & trace.rows.keys():
                wide, narrow = trace.whole(event), near.whole(event)
                if event.kind is Kind.SCORES:
                    moved = noise_of(wide, narrow, own[event.place], wide.shape[-1])
                    scores[event.place] = np.maximum(scores.get(event.place, 0.0), moved)
                elif event.kind is not Kind.LOGITS:
                    floors[event] = max(
                        floors.get(event, 0.0), float(distances(narrow, wide).max())
                    )
            floors[_LOGITS] = max(floors.get(_LOGITS, 0.0), float(distances(rows, right).max()))
        self._measured.append((floors.get(_LOGITS, 0.0), noise))
        return Truth(trace, floors, logits, noise, scores, frozenset(unfit))

    def quick_truth(self, sequence: Sequence[int], since: int) -> Truth | None:
        """The truth of logits as float32 has it, with the least rounding that was measured so far:
        enough for an engine that agrees with it by far. None before enough was measured, and for an
        engine in float64.
        """
        if self._quick is None or len(self._measured) < self._MEASURED:
            return None
        trace, logits = _run(self._quick, sequence, {}, modules=False, since=since)
        floor, noise = map(min, zip(*self._measured))
        return Truth(trace, {_LOGITS: floor}, logits, noise, {})

    def swapped(self, sequence: Sequence[int], engine: Trace) -> Iterator[tuple[str, Array]]:
        """Yields (what, logits) of the reference in float64: on its own (""), with the engine's
        choices of routers ("routes"), and with the results of ever more of the engine's modules, in
        the order in which they run, each under its name in a layer ("self_attn").
        """
        own, logits = _run(self._wide, sequence, {}, modules=True)
        yield "", logits
        choices = engine.choices(len(sequence))
        if choices:
            yield "routes", _run(self._wide, sequence, choices, modules=False)[1]
        hooks = []
        try:
            for event in sorted(own.rows.keys() & engine.rows.keys(), key=own.order.__getitem__):
                module = self._wide.get_submodule(event.module)
                if event.kind is Kind.OUTPUT and not event.place and (name := _part(module, event)):
                    hooks.append(module.register_forward_hook(_replacing(engine.rows[event])))
                    yield name, _run(self._wide, sequence, choices, modules=False)[1]
        finally:
            for hook in hooks:
                hook.remove()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"no engine computes in {name!r}; give float32, bfloat16 or float16")
    return dtype


def _part(module: torch.nn.Module, event: Event) -> str:
    """The name of a child of a layer, of the list of a layer, or of a leaf outside of layers; ""
    for other modules.
    """
    parts = event.module.split(".")
    layers = [n for n, part in enumerate(parts) if part.isdecimal()]
    if layers:
        return {len(parts) - 2: parts[-1], len(parts) - 1: parts[-2]}.get(layers[0], "")
    return parts[-1] if next(module.children(), None) is None else ""


def _replacing(rows: Sequence[Rows]) -> Callable[..., Any]:
    """A hook that puts known rows into the first result of a module."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        first = (out if isinstance(out, torch.Tensor) else out[0]).clone()
        for piece in rows:
            values = torch.from_numpy(piece.rows).to(first)
            into = first[0] if first.dim() > values.dim() else first
            into[piece.start : piece.start + len(values)] = values
        return first if isinstance(out, torch.Tensor) else (first, *out[1:])

    return hook


def _run(
    model: torch.nn.Module,
    tokens: Sequence[int],
    choices: Mapping[int, Array],
    *,
    modules: bool,
    handed: Sequence[HandedOut] = (),
    since: int = 0,
    unfit: set[int] | None = None,
) -> tuple[Trace, Array]:
    """Run over all tokens, in one forward pass or in the calls of `handed`: (trace, logits). Logits
    before the position `since` are computed only where the model cannot leave them out. unfit: gets
    layers as in `Truth`.
    """
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    listening = Listening(model, [tokens], [0], modules=modules, choices=choices)
    cache, logits, start = _cache(model), [], 0
    now: dict[int, tuple[Array, Array]] = {}
    for held in cache.values():
        if handed and hasattr(held, "update"):
            held.update = _handing(held.update, now, set() if unfit is None else unfit)
    if since and not handed and "logits_to_keep" in inspect.signature(model.forward).parameters:
        cache["logits_to_keep"] = len(tokens) - since
    with torch.no_grad(), listening:
        for end, states in (*((call.end, call.states) for call in handed), (len(tokens), {})):
            now.clear()
            now.update(states)
            if handed and "position_ids" in inspect.signature(model.forward).parameters:
                cache["position_ids"] = torch.arange(start, end, device=ids.device)[None]
            out = model(input_ids=ids[:, start:end], **cache)
            logits.append(getattr(out, "logits", out)[0].double().cpu().numpy())
            start = end
    known = np.concatenate(logits)
    if len(known) == len(tokens):
        return listening.traces[0], known
    whole = np.empty((len(tokens), known.shape[1]))  # rows that nobody reads take no memory
    whole[-len(known) :] = known
    return listening.traces[0], whole


def _handing(
    update: Callable[..., Any], now: Mapping[int, tuple[Array, Array]], unfit: set[int]
) -> Any:
    """The update of a cache that hands out `now` for the layers in it. unfit: gets layers whose
    keys and values have another form.
    """

    def handing(keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        own = update(keys, values, layer_idx, *args, **kwargs)
        stored = [torch.from_numpy(rows).to(own[0]) for rows in now.get(layer_idx, ())]
        rows = tuple(each.transpose(0, 1)[None] for each in stored)
        if [row.shape for row in rows] == [each.shape for each in own]:
            return rows
        if rows:
            unfit.add(layer_idx)
        return own

    return handing


class _Growing:
    """A cache that returns all keys and values that it received."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    def update(self, keys: Any, values: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values to attend to."""
        if layer_idx in self._kept:
            pairs = zip(self._kept[layer_idx], (keys, values))
            keys, values = (torch.cat(pair, 2) for pair in pairs)
        self._kept[layer_idx] = keys, values
        return keys, values


def _cache(model: torch.nn.Module) -> dict[str, Any]:
    """A cache under the argument name that the model accepts, so that keys and values are recorded;
    {} for a model without a cache.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        cache = transformers.DynamicCache(config=model.config)
        return {"past_key_values": cache, "use_cache": True}
    taken = inspect.signature(model.forward).parameters
    return {name: _Growing() for name in CACHES if name in taken}


def differing_parameters(reference: torch.nn.Module, target: torch.nn.Module) -> list[str]:
    """Names of parameters that differ between both models after rounding to the coarser dtype.

    Parameters that only one model has, or that have another shape, are skipped.
    """
    others = dict(target.named_parameters())
    names = []
    for name, parameter in reference.named_parameters():
        other = others.get(name)
        if other is None or other.shape != parameter.shape:
            continue
        coarser = min((parameter.dtype, other.dtype), key=lambda d: -torch.finfo(d).eps)
        if not torch.equal(parameter.to(coarser).cpu(), other.to(coarser).cpu()):
            names.append(name)
    return names


def state_of(model: torch.nn.Module | None) -> list[str]:
    """Digests of a model's parameters, buffers and configuration, of its device and threads; [] for
    no model.
    """
    if model is None:
        return []
    states = itertools.chain(model.named_parameters(), model.named_buffers())
    configs = (getattr(model, name, None) for name in ("config", "generation_config"))
    return [
        str(model),
        *map(str, configs),
        *(f"{name} {t.dtype} {tuple(t.shape)} {t.device} {_digest(t)}" for name, t in states),
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    ]


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy())
