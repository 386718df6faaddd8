"""The arguments of one call, and changes to them: other rows, other tokens, other lengths."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whence.errors import UsageError

_TOKENS = ("decoder_input_ids", "input_ids", "tokens", "inputs_embeds", "idx")
_MASKS = ("decoder_attention_mask", "attention_mask", "mask")
_OF_LENGTH = ("cache_position",)
_ALL_LOGITS = {"logits_to_keep": 0, "num_logits_to_keep": 0}
_TIME_FIRST = (torch.nn.RNNBase, torch.nn.MultiheadAttention, torch.nn.Transformer)


class CallInputs:
    """Arguments of one call by name. The arguments are never written: each change is a new object.

    values: name -> argument; positional arguments without a name in the signature are called "0",
    "1", ... main: the argument that holds the sequence or the data. batch_axis, length_axis: of
    `main`, None when it has no such axis.
    """

    def __init__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.taken = _parameters(model)
        pad = getattr(getattr(model, "config", None), "pad_token_id", None)
        self.pad_id = pad if isinstance(pad, int) and pad >= 0 else 0
        names = [self.taken[i] if i < len(self.taken) else str(i) for i in range(len(args))]
        self._positional = len(args)
        self.values: dict[str, Any] = dict(zip(names, args)) | dict(kwargs)
        for name, value in _ALL_LOGITS.items():
            if isinstance(self.values.get(name), int):
                self.values[name] = value
        for name, value in self.values.items():
            if _is_empty_cache(value):
                self.values[name] = None  # an empty cache: the model makes its own
        self.main = self._main()
        tensor = self.tensor
        self.is_tokens = not (tensor.is_floating_point() or tensor.is_complex())
        time_first = isinstance(model, _TIME_FIRST) and not getattr(model, "batch_first", False)
        self.batch_axis: int | None = 1 if time_first else 0
        self.length_axis: int | None = 1 - (self.batch_axis or 0)
        if (isinstance(model, torch.nn.RNNBase) and tensor.ndim == 2) or (
            self.is_tokens and tensor.ndim == 1
        ):
            self.batch_axis, self.length_axis = None, 0
        elif not self.is_tokens and tensor.ndim != 3:
            self.length_axis = None
        if tensor.ndim == 0:
            self.batch_axis = None

    def _main(self) -> str:
        tensors = {n: v for n, v in self.values.items() if isinstance(v, torch.Tensor)}
        known = [n for n in _TOKENS if n in tensors]
        if known:
            return known[0]
        for name, value in tensors.items():
            if value.ndim and (value.is_floating_point() or value.dtype == torch.long):
                return name
        raise UsageError(
            "no tensor is among the arguments of the call "
            f"({', '.join(self.values) or 'it has none'}): a probe needs one to change"
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The argument that is changed (`main`)."""
        value: torch.Tensor = self.values[self.main]
        return value

    @property
    def rows(self) -> int:
        """Number of rows in the batch."""
        return self.tensor.shape[self.batch_axis] if self.batch_axis is not None else 1

    @property
    def length(self) -> int:
        """Number of positions in the sequence, 0 without a sequence."""
        return self.tensor.shape[self.length_axis] if self.length_axis is not None else 0

    @property
    def mask(self) -> str:
        """Name of the argument that marks padding, given or accepted; "" for none."""
        names = [n for n in _MASKS if self.main.startswith("decoder") == n.startswith("decoder")]
        for name in names:
            value = self.values.get(name)
            if name in self.values and value is not None:
                return name if value.ndim == 2 else ""
        return next((n for n in names if n in self.taken), "")

    def takes(self, name: str) -> bool:
        """Whether the model's forward has a parameter of this name."""
        return name in self.taken

    def given(self, name: str) -> Any:
        """The argument of this name, None when it was not given."""
        return self.values.get(name)

    def changed(self, **values: Any) -> CallInputs:
        """The same call with some arguments replaced."""
        twin = copy.copy(self)
        twin.values = {**self.values, **values}
        return twin

    def with_rows(self, rows: Sequence[int]) -> CallInputs:
        """The call with these rows of the batch, in this order; a row may come twice."""
        return self.changed(
            **{
                name: value.index_select(axis, torch.tensor(rows, device=value.device))
                for name, value, axis in self._of_batch()
            }
        )

    def _of_batch(self) -> list[tuple[str, torch.Tensor, int]]:
        if self.batch_axis is None:
            return []
        out = []
        for name, value in self.values.items():
            if not isinstance(value, torch.Tensor) or name in _OF_LENGTH:
                continue
            axis = self.batch_axis if name == self.main else 0
            if value.ndim > axis and value.shape[axis] == self.rows:
                out.append((name, value, axis))
        return out

    def joined(self, others: Sequence[torch.Tensor]) -> CallInputs:
        """A batch of this call's only row and others.

        others: main tensors with one row each.
        """
        batch = self.with_rows([0] * (1 + len(others)))
        return batch.changed(**{self.main: torch.cat([self.tensor, *others], self.batch_axis or 0)})

    def cut(self, start: int, stop: int) -> CallInputs:
        """The call restricted to the positions start..stop."""
        values: dict[str, Any] = {name: None for name in _OF_LENGTH if name in self.values}
        for name, value, axis in self.of_length():
            values[name] = value.narrow(axis, start, stop - start)
        return self.changed(**values)

    def of_length(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, axis) of the arguments that have an element for each position."""
        assert self.length_axis is not None
        out = [(self.main, self.tensor, self.length_axis)]
        for name, value in self.values.items():
            if name == self.main or not isinstance(value, torch.Tensor) or name in _OF_LENGTH:
                continue
            if self.main.startswith("decoder") != name.startswith("decoder"):
                continue  # the encoder's
            if value.ndim >= 2 and value.shape[1] == self.length and not value.is_floating_point():
                out.append((name, value, 1))
        return out

    def call(self, copied: bool = True) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs) to call the model with: copies, so that a model may write to them."""
        fresh = {n: _copy(v) for n, v in self.values.items()} if copied else self.values
        names = list(fresh)
        args = [fresh[n] for n in names[: self._positional]]
        return args, {n: fresh[n] for n in names[self._positional :]}

    def words(self) -> str:
        """The tensors in words: "input_ids [2, 12], attention_mask [2, 12]"."""
        return ", ".join(
            f"{name} {list(value.shape)}"
            for name, value in self.values.items()
            if isinstance(value, torch.Tensor)
        )


def _is_empty_cache(value: Any) -> bool:
    if not hasattr(value, "get_seq_length"):
        return False
    try:
        return not value.get_seq_length()
    except ValueError:  # one of recurrent states alone counts no positions
        return False


def _parameters(model: Any) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict) and type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item) for item in value)
    return copy.deepcopy(value)


def kept(value: Any) -> Any:
    """A copy of an argument, which the program cannot change afterwards."""
    try:
        return _copy(value)
    except Exception:  # noqa: BLE001 - an object of the user's that cannot be copied is used as it is
        return value


def other_tokens(tokens: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values at every position.

    Token ids are replaced only by ids that occur in the tensor: these are valid, and none is a
    special mark that the model counts.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokens.is_floating_point() or tokens.is_complex():
        noise = torch.randn(tokens.shape, generator=generator).to(tokens)
        scale = tokens.float().std() if tokens.numel() > 1 else tokens.float().abs().max()
        return tokens.flip(-1 if tokens.ndim > 1 else 0) * 0.7 + noise * (scale + 0.1).to(tokens)
    flat = tokens.reshape(-1).cpu()
    ids = flat.unique()
    if len(ids) == 1:
        ids = torch.stack([ids[0], ids[0] + 1 if ids[0] < 2 else ids[0] - 1])
    places = torch.searchsorted(ids.sort().values, flat)
    steps = torch.randint(1, len(ids), flat.shape, generator=generator)
    return ids[(places + steps) % len(ids)].reshape(tokens.shape).to(tokens)
