"""A copy of a user's module that shares no tensor with it, and the attributes that hold its
tensors.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from whence.errors import ReplayRefused
from whence.records.slots import param_name
from whence.replay.dtype_policy import widened


def copied_module(module: Any) -> tuple[Any, dict[int, Any]]:
    """Returns (a copy that shares the tensors with the module, {id of each submodule:
    its copy}).
    """
    memo: dict[int, Any] = {}
    parts = list(module.modules())
    for part in parts:
        for box in (part._parameters, part._buffers, vars(part)):
            for value in box.values():
                inner = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, (list, tuple))
                    else (value,)
                )
                memo.update((id(t), t) for t in inner if isinstance(t, torch.Tensor))
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # a module may hold anything
        raise ReplayRefused(
            f"the model's {type(module).__name__} cannot be copied: {type(error).__name__}: "
            f"{str(error)[:200]}"
        ) from error
    copies = {id(part): memo[id(part)] for part in parts if id(part) in memo}
    for part in copies.values():
        for name, value in list(vars(part).items()):
            # `self.core = torch.compile(self.plain)` is bound to the module itself and is not
            # copied with it.
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if isinstance(plain, types.MethodType) and id(plain.__self__) in copies:
                vars(part)[name] = types.MethodType(plain.__func__, copies[id(plain.__self__)])
    return copied, copies


def find_tensor(module: Any, name: str) -> tuple[Any, Any] | None:
    """Returns (container, key) of the tensor called `name`: of the module or of a submodule, a
    plain attribute, or an element of one ("tables.0"); None when there is none.
    """
    for box in (module._parameters, module._buffers, vars(module)):
        if isinstance(box.get(name), torch.Tensor):
            return module, name
    head, _, inner = name.partition(".")
    if inner and module._modules.get(head) is not None:
        return find_tensor(module._modules[head], inner)
    inside = vars(module).get(head)
    if isinstance(inside, tuple):
        inside = vars(module)[head] = list(inside)
    if (
        isinstance(inside, list)
        and inner.isdigit()
        and int(inner) < len(inside)
        and isinstance(inside[int(inner)], torch.Tensor)
    ):
        return inside, int(inner)
    if isinstance(inside, dict):
        return next(
            (
                (inside, key)
                for key, item in inside.items()
                if str(key) == inner and isinstance(item, torch.Tensor)
            ),
            None,
        )
    return None


def get_at(box: Any, key: Any) -> Any:
    return getattr(box, key) if isinstance(box, torch.nn.Module) else box[key]


def set_at(box: Any, key: Any, value: Any) -> None:
    # setattr informs the module: an LSTM also keeps its weights in a list.
    if isinstance(box, torch.nn.Module):
        setattr(box, key, value)
    else:
        box[key] = value


def hidden_tensors(
    module: Any, recorded: Collection[tuple[int, Any]]
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (container, key, tensor) of tensor attributes that no capture records; they keep the
    values of the user's model.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if (
                isinstance(value, torch.Tensor)
                and (id(part), name) not in recorded
                and value.device.type != "meta"
            ):
                yield part, name, value


def addresses(model: Any) -> frozenset[int]:
    """Returns the addresses of the elements of a model's parameters and buffers."""
    tensors = (
        t
        for t in (*model.parameters(), *model.buffers())
        if t.device.type == "cpu" and not torch.nn.parameter.is_lazy(t)
    )
    return frozenset(t.data_ptr() for t in tensors) - {0}


class ModuleCopy:
    """A copy of a module of the user's model that receives recorded tensors for one run at a time.

    parts: id of each submodule of the original -> its copy. shapes: of the recorded parameters, by
    slot. called: (scope, module) of the submodules that the recorded module called. Raises
    ReplayRefused where the tensors of the module differ from the recorded ones.
    """

    def __init__(
        self,
        module: Any,
        shapes: Mapping[str, Sequence[int]],
        called: Sequence[tuple[str, Any]],
        *,
        training: bool,
    ) -> None:
        self.module, self.parts = copied_module(module)
        self.words = f"the model's {type(self.module).__name__}"
        if called:
            self._stub(called)
        self._homes = {slot: self._home(slot, shape) for slot, shape in shapes.items()}
        self._check_all_recorded([self.module] if called else self.module.modules())
        known = {(id(box), key) for box, key in self._homes.values()}
        self._hidden = list(hidden_tensors(self.module, known))
        for part in self.module.modules():
            part.training = training

    def tensor(self, slot: str) -> Any:
        """Returns the tensor that the copy holds for this slot, None where the
        recording has none.
        """
        return get_at(*self._homes[slot]) if slot in self._homes else None

    @contextlib.contextmanager
    def lent(self, params: Mapping[str, Any], wide: Any, *, grad: bool) -> Iterator[None]:
        """Puts these tensors, by slot, into the copy for the duration of the context.

        wide: dtype of tensors that no capture records. grad: whether parameters require a gradient
        as in the user's model.
        """
        originals = {}
        try:
            for slot, (box, key) in self._homes.items():
                if slot not in params:
                    continue
                old = originals[slot] = get_at(box, key)
                if isinstance(old, torch.nn.Parameter):
                    needs_grad = grad and old.requires_grad and params[slot].is_floating_point()
                    set_at(box, key, torch.nn.Parameter(params[slot], requires_grad=needs_grad))
                else:  # a call may write its buffers
                    set_at(box, key, params[slot].clone())
            for box, key, value in self._hidden:
                set_at(box, key, widened(value.detach().cpu().clone(), wide))
            yield
        finally:
            for slot, old in originals.items():
                set_at(*self._homes[slot], old)
            for box, key, value in self._hidden:
                set_at(box, key, value)

    # ---- making the copy

    def _stub(self, called: Sequence[tuple[str, Any]]) -> None:
        """Removes the elements of all submodules of a module that calls others: the recording does
        not tell which values a weight has that is read outside its own module.
        """
        for part in list(self.module.modules())[1:]:
            for name, value in part._parameters.items():
                if value is not None:
                    part._parameters[name] = torch.nn.Parameter(
                        value.detach().to("meta"), requires_grad=False
                    )
            for name, value in part._buffers.items():
                if value is not None:
                    part._buffers[name] = value.to("meta")
        for scope, module in called:
            part = self.parts.get(id(module))
            if part is None or part is self.module:
                raise ReplayRefused(
                    f"{self.words} does not hold {scope}, which the recorded one calls"
                )
            # The recorded inputs and outputs of a call are those outside its hooks.
            for hooks in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_forward_hooks_with_kwargs",
                "_forward_pre_hooks_with_kwargs",
            ):
                getattr(part, hooks).clear()

    def _home(self, slot: str, shape: Sequence[int]) -> tuple[Any, Any]:
        """Returns where the copy keeps the tensor of this slot: (module, list or dict; key)."""
        name = param_name(slot)
        home = find_tensor(self.module, name)
        if home is None:
            raise ReplayRefused(f"{self.words} has no {name}, which the recording has")
        if tuple(get_at(*home).shape) != tuple(shape):
            has = tuple(get_at(*home).shape)
            raise ReplayRefused(
                f"{name} of {self.words} has shape {has}, the recording's {tuple(shape)}"
            )
        return home

    def _check_all_recorded(self, parts: Iterable[Any]) -> None:
        """Raises ReplayRefused when one of these modules has a tensor that was not recorded."""
        homes = {(id(box), key) for box, key in self._homes.values()}
        for part in parts:
            for name, value in (*part._parameters.items(), *part._buffers.items()):
                if (
                    value is not None
                    and (id(part), name) not in homes
                    and not any(value is get_at(*self._homes[s]) for s in self._homes)
                ):
                    raise ReplayRefused(f"{self.words} has {name}, for which nothing was recorded")
