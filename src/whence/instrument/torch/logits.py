"""Records logits only: for every call of a model its tokens, positions and mask, and the logits of
the last token of each row.

Modules inside the model are not observed, except the one named as the maker of the logits. Steps,
ranks, budget and failures are handled as in `modules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from whence.frameworks.torch_trees import ObjectSnapshot, is_plain_object, rebuilt
from whence.instrument.call_frames import Args, Kwargs
from whence.instrument.selection import matcher
from whence.instrument.session import Form, Session
from whence.instrument.torch.frames import ModuleFrame
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.program_cache import NoPrograms
from whence.instrument.torch.tensor_identity import TensorRegistry
from whence.records import Ref
from whence.records.experts import note_of_experts
from whence.records.logits import LAST_LAYER, note_of_maker
from whence.records.slots import input_name

TOKENS = ("decoder_input_ids", "input_ids", "ids", "tokens", "token_ids", "input_tokens")
_INTEGERS = (torch.int64, torch.int32, torch.bool)
_LEAST_PADDED = 3  # tokens of rows that may be padded
_NOT_KEPT = "not kept at --level logits"


class LogitsListener(Listener):
    """A `Listener` that records one call per call of the model: its integer inputs as `input.*`,
    and `output.logits`.

    output.logits: (batch, 1, vocabulary), of the last real token of each row. All tokens are kept
    with positions="all", or where several rows share one axis; the last few are kept where rows
    without a mask end in a repeated id. Of a cache only the shape is recorded. A model that returns
    no logits leaves a note.
    """

    def __init__(self, session: Session, model: Any = None, **how: Any) -> None:
        self._of_experts: set[str] = set()  # names of roots that were noted
        super().__init__(session, model, **how)
        head = session.options.logits_module
        self._is_head = matcher(head) if head else None
        self._heads = 0
        self._logits = LogitsTensors(session, self.registry, any_width=head != LAST_LAYER)
        self.tensors = self._logits
        self.programs = NoPrograms("--level logits", always=True)

    def remove(self) -> None:
        if not self._removed:
            if self._is_head is not None and not self._heads:
                self.session.note(
                    "logits",
                    f"logits_module {self.session.options.logits_module!r} was never called "
                    "inside a model",
                )
            for name in self._logits.roots_without():
                text = (
                    "returns no logits (batch, tokens, vocabulary): name the module that "
                    "makes them with --logits-module"
                )
                self.session.note("logits", f"{name} {text}")
        super().remove()

    def _new_root(self, module: Any) -> None:
        super()._new_root(module)
        note = note_of_experts(module.named_modules(), type(module).__name__)
        if note is not None and note.scope not in self._of_experts:
            self._of_experts.add(note.scope)
            self.session.note(note.kind, note.text, note.scope)

    def _observe(
        self, previous: Callable[..., Any], module: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        stack = self.thread.stack
        if self.thread.busy or not stack:
            return super()._observe(previous, module, args, kwargs)
        out = previous(module, *args, **kwargs)
        if (
            self._is_head is not None
            and (info := self.modules.get(module)) is not None
            and self._is_head(info.scope)
        ):
            logits = logits_of(out, None, 0)
            if logits is not None:
                self._heads += 1
                stack[-1].results.append((info.scope, logits[1].detach()))
        return out

    def _note_boundary(self, frame: ModuleFrame) -> None:
        """Nothing to note: no module is observed inside at this level."""


class LogitsTensors:
    """Records tokens, positions and masks of a model's calls, and the logits.

    any_width: take the output of the named module even if it is not as wide as the model's own
    output.
    """

    def __init__(
        self, session: Session, registry: TensorRegistry, *, any_width: bool = True
    ) -> None:
        self._session, self._registry, self._any_width = session, registry, any_width
        self._makers: set[tuple[str, str]] = set()  # root, module: those that were noted
        self._silent: set[str] = set()  # roots that were given tokens and returned no logits
        self._scored: set[str] = set()
        self._forms: dict[str, tuple[int, ...]] = {}  # of the tokens that a root was given last
        self._filled: set[str] = set()  # roots whose rows of one length ended in a repeated id

    def roots_without(self) -> list[str]:
        """Names of the roots that were given tokens and never returned logits."""
        return sorted(self._silent - self._scored)

    def prune(self) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing to forget."""

    def take_inputs(
        self, frame: ModuleFrame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """Record integer inputs. Returns an empty list, since no program reads them."""
        for name, value in (*((str(i), v) for i, v in enumerate(args)), *kwargs.items()):
            slot = f"input.{name}"
            if isinstance(value, torch.Tensor):
                if value.dtype in _INTEGERS and (value.ndim <= 2 or "pos" in name):
                    number, edge, _ = self._registry.record_of(value, slot, frame)
                    frame.refs.append(Ref(slot, number, edge))
                    frame.inputs.append((slot, value, None, None))
            elif isinstance(value, (bool, int, float)):
                frame.arguments[slot] = value
            elif (keys := _keys(value)) is not None:
                number = self._session.unreadable(
                    Form(str(keys.dtype).removeprefix("torch."), tuple(keys.shape), device=""),
                    _NOT_KEPT,
                )
                frame.refs.append(Ref(f"{slot}.0", number))
            elif value is not None and not isinstance(value, str):
                frame.arguments[slot] = type(value).__name__
        return []

    def take_results(self, frame: ModuleFrame, out: Any, error: str) -> None:
        """Record the logits that the model, or the module named for them, returned."""
        # a lazy module changes its class
        frame.op_type = frame.info.op_type = type(frame.module).__name__
        if error:
            return
        inputs = {input_name(slot): tensor for slot, tensor, *_ in frame.inputs}
        ids, root = tokens_of(inputs), frame.root.name
        logits = self._made(frame, out, ids)
        frame.results.clear()
        if logits is None:
            if ids is not None:
                self._silent.add(root)
            return
        self._scored.add(root)
        if self._session.options.positions == "last":
            columns = self._columns(root, logits, ids, inputs)
            logits = logits.detach()
            logits = last(logits, ids, inputs) if columns == 1 else logits[:, -columns:]
        number, edge, _ = self._registry.record_of(logits, "output.logits", frame)
        frame.refs.append(Ref("output.logits", number, edge))

    def _made(self, frame: ModuleFrame, out: Any, ids: Any) -> Any:
        """The logits of a call: those of the inner module that makes them, else those that the
        model returned; None without any.
        """
        returned = logits_of(out, ids, widest(frame.module))
        for scope, tensor in reversed(frame.results):
            if self._any_width or returned is None or tensor.shape[-1] == returned[1].shape[-1]:
                if (frame.root.name, scope) not in self._makers:
                    self._makers.add((frame.root.name, scope))
                    note = note_of_maker(scope, frame.root.name)
                    self._session.note(note.kind, note.text, note.scope)
                return tensor
        return returned[1] if returned is not None else None

    def _columns(self, root: str, logits: Any, ids: Any, inputs: dict[str, Any]) -> int:
        """Number of positions of logits to keep at the end: 1, or back to the last token before a
        possible padding.

        Rows of equal length that end in a repeated id, without a mask, may be padded; that is
        decided when their texts are known (`align.prompts`).
        """
        if (
            ids is None
            or ids.ndim != 2
            or logits.ndim != 3
            or logits.shape[1] != ids.shape[1]
            or ids.shape[1] < _LEAST_PADDED
        ):
            return 1
        if any("mask" in name and tensor.ndim == 2 for name, tensor in inputs.items()):
            return 1
        form, last_form = tuple(ids.shape), self._forms.get(root)
        self._forms[root] = form
        if last_form not in (None, form):
            self._filled.discard(root)  # the rows are as long as their texts
            return 1
        differs = (ids != ids[:, -1:]).flip(1).int()
        run = int((differs.argmax(1) + (differs.amax(1) == 0) * ids.shape[1]).max())
        if run > 1:
            self._filled.add(root)
        return min(run + 1, ids.shape[1]) if root in self._filled else 1


def tokens_of(inputs: dict[str, Any]) -> Any:
    """The token ids among a call's tensors, (batch, tokens) or (tokens,); None where there are
    none.
    """
    for name in (*TOKENS, "0"):
        tensor = inputs.get(name)
        if (
            tensor is not None
            and tensor.ndim in (1, 2)
            and tensor.dtype in (torch.int64, torch.int32)
            and tensor.numel()
        ):
            return tensor
    return None


def widest(module: Any) -> int:
    """Number of rows of the largest embedding of a module, a lower bound of the vocabulary of its
    logits; 0 without an embedding.
    """
    return max(
        (m.num_embeddings for m in module.modules() if isinstance(m, torch.nn.Embedding)), default=0
    )


def logits_of(out: Any, ids: Any, vocabulary: int) -> tuple[str, Any] | None:
    """(slot, tensor) of the logits among a module's results, None where no result has the size of
    the vocabulary.

    Takes a field named logits, else the first floating-point tensor that fits the rows of `ids` and
    has at least `vocabulary` entries in its last axis. ids: tokens, None to accept any rows.
    """
    named_tensors: list[tuple[str, Any]] = []

    def look(slot: str, tensor: Any) -> Any:
        named_tensors.append((slot, tensor))
        return tensor

    rebuilt(out, look)
    scores = [
        (s, t)
        for s, t in named_tensors
        if t.is_floating_point() and t.ndim in (2, 3) and t.numel() and _fits(t, ids)
    ]
    named = [(s, t) for s, t in scores if s.rpartition(".")[2] == "logits"]
    return next(iter(named or [(s, t) for s, t in scores if t.shape[-1] >= vocabulary]), None)


def _fits(tensor: Any, ids: Any) -> bool:
    """Whether the tensor has one row for each row of tokens, and no more positions than these."""
    if ids is None:
        return True
    if ids.ndim == 1:
        return bool(tensor.ndim == 2 and tensor.shape[0] <= ids.shape[0])
    return bool(
        tensor.shape[0] == ids.shape[0] and (tensor.ndim == 2 or tensor.shape[1] <= ids.shape[1])
    )


def last(logits: Any, ids: Any, inputs: dict[str, Any]) -> Any:
    """Logits of the last real token of each row, (batch, 1, vocabulary); all logits where rows
    share an axis or there is only one position.

    logits: (batch, tokens, vocabulary), (batch, vocabulary) or (tokens, vocabulary). No value is
    copied from a device.
    """
    if ids is not None and ids.ndim == 1 and logits.ndim == 2:
        several = any(
            "pos" in name and tensor.shape[-1:] == ids.shape for name, tensor in inputs.items()
        )
        return logits if several else logits[-1:]
    if logits.ndim == 2 or logits.shape[1] == 1:
        return logits
    mask = next(
        (
            t
            for n, t in inputs.items()
            if "mask" in n and t.ndim == 2 and t.shape[0] == logits.shape[0]
        ),
        None,
    )
    if mask is None or mask.shape[1] < logits.shape[1]:
        return logits[:, -1:]
    real = mask[:, -logits.shape[1] :]
    if "pad" in next(n for n, t in inputs.items() if t is mask):
        real = real == 0
    places = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    columns = ((real.to(logits.device) != 0) * places).amax(1).clamp(
        min=1
    ) - 1  # a row without a real token: its first
    return logits[torch.arange(logits.shape[0], device=logits.device), columns][:, None]


def _keys(value: Any) -> Any:
    """The first key tensor (batch, heads, tokens, features) of a cache, None for an empty cache or
    another object.
    """
    return next((t for t in _within(value) if t.ndim == 4), None)


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _within(item)
    elif is_plain_object(value):
        yield from (tensor for _, tensor in ObjectSnapshot(value, lambda _: None).items())
