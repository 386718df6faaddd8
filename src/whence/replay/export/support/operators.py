"""Runs operators by name, as recorded or in a wider dtype, and says what they made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.frameworks import torch_schema
from whence.frameworks.operator_names import words
from whence.frameworks.torch_schema import CREATION, VIEW, kind, schema_of
from whence.replay import stepwise
from whence.replay.export.support.tensors import rounds, tensors_in, widened


def _gelu(named: dict[str, Any]) -> list[Any]:
    x = named["self"]
    if named.get("approximate", "none") != "none":
        return [torch.nn.functional.gelu(x, approximate=named["approximate"])]
    return [(0.5 * x * (1 + stepwise.erf({"self": x * math.sqrt(0.5)})[0]))]


WRITTEN_OUT = {**stepwise.WRITTEN_OUT, "gelu": _gelu}


class Operators:
    """Runs operators: as recorded, or in a wider floating dtype. `ops.aten.mm.default(a, b)` is
    that overload.

    floating: the wider dtype, None: as recorded. stepwise: attention and norms are written out,
    rounding at every step. Afterwards, notes: what was met ("aten.foo.default in float32: ...");
    length: the most terms one element was summed from.
    """

    def __init__(
        self, device: Any = "cpu", floating: Any = None, *, stepwise: bool = False
    ) -> None:
        self.device, self.floating, self.stepwise = torch.device(device), floating, stepwise
        self.notes: list[str] = []
        self.length, self.wrote_out = 1, False

    def __getattr__(self, namespace: str) -> Any:
        if namespace.startswith("__"):
            raise AttributeError(namespace)
        return _Name(self, namespace)

    def cast(self, x: Any, way: str) -> Any:
        """A cast point of the recorded code: "up" to float32, or "back"."""
        return x.to(torch.float32 if self.floating is None else self.floating)

    def guard(self, result: Any, expected: Any) -> Any:
        """A number that the recorded code read from a tensor, and may have decided by."""
        number = (
            result
            if isinstance(result, (bool, int, float))
            else sum(t.numel() for t in tensors_in(result))
        )
        if number != expected:
            raise RuntimeError(f"guard: read {number!r} where the recording had {expected!r}")
        return result

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator of this name ("aten.mm.default"), by position and by schema name."""
        func = overload(name)
        if self.floating is None and not self.stepwise:  # on a device: nothing but the operator
            return func(*args, **kwargs)
        named = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs)
        base = func._schema.name.partition("::")[2]
        self.length = max(self.length, reduction_length(base, named))
        if self.stepwise and base in WRITTEN_OUT:
            self.wrote_out = True
            return _as_returned(func, WRITTEN_OUT[base](named))
        if self.floating is None:
            return func(*args, **kwargs)
        return self._wide(func, base, list(args), dict(kwargs), named)

    def _wide(
        self, func: Any, base: str, args: list[Any], kwargs: dict[str, Any], named: dict[str, Any]
    ) -> Any:
        if named.get("half_to_float"):
            args, kwargs = (
                [
                    named[a.name] if a.name != "half_to_float" else False
                    for a in func._schema.arguments
                ],
                {},
            )
        args = [widened(a, self.floating) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {
            k: widened(v, self.floating) if isinstance(v, torch.dtype) else v
            for k, v in kwargs.items()
        }
        tensors = list(tensors_in([args, list(kwargs.values())]))
        changes = any(a.alias_info is not None for a in func._schema.arguments)
        if (
            torch.Tag.pointwise in func.tags
            and tensors
            and not changes
            and not any(rounds(t) for t in tensors)
        ):
            # Integers become the default floating dtype on the way (positions / 10).
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                floats = [
                    a.to(self.floating)
                    if isinstance(a, torch.Tensor) and a.dtype is not torch.bool
                    else a
                    for a in args
                ]
                if any(rounds(t) for t in tensors_in(func(*args, **kwargs))):
                    return func(*floats, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            text = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                if str(error)
                else type(error).__name__
            )
            if base in ("view", "_unsafe_view", "_reshape_alias"):
                return args[0].reshape(args[1])
            if base in WRITTEN_OUT:
                self.notes.append("written out")
                return _as_returned(func, WRITTEN_OUT[base](named))
            if self.floating is not torch.float64 or changes:
                raise
            out = _map(
                func(*_map(args, torch.float32), **_map(kwargs, torch.float32)), self.floating
            )
            self.notes.append(f"{func} in float32: {text}")
        return out if changes else _map(out, self.floating)


class _Name:
    __slots__ = ("_name", "_ops")

    def __init__(self, ops: Operators, name: str) -> None:
        self._ops, self._name = ops, name

    def __getattr__(self, part: str) -> _Name:
        return _Name(self._ops, f"{self._name}.{part}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ops.call(self._name, args, kwargs)


def overload(name: str) -> Any:
    """The operator of a full name. Raises LookupError when this torch has none."""
    func: Any = torch.ops
    try:
        for part in name.split("."):
            func = getattr(func, part)
    except (AttributeError, RuntimeError):
        func = None
    if not isinstance(func, torch._ops.OpOverload):
        raise LookupError(
            f"operator {name} does not exist in torch {torch.__version__}; a custom one comes "
            "with --import MODULE"
        )
    return func


def invoke(ops: Operators, name: str, named: Mapping[str, Any]) -> Any:
    """The operator with arguments by schema name, handed over by position where the schema takes
    them so.
    """
    schema = overload(name)._schema
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    last = max(
        (k for k, a in enumerate(schema.arguments) if not a.kwarg_only and a.name in named),
        default=-1,
    )
    for k, argument in enumerate(schema.arguments):
        if argument.kwarg_only:
            if argument.name in named:
                kwargs[argument.name] = named[argument.name]
        elif k <= last:
            args.append(named.get(argument.name, argument.default_value))
    unknown = set(named).difference(a.name for a in schema.arguments)
    if unknown:
        raise TypeError(
            f"{name} takes no argument {', '.join(sorted(unknown))} in torch {torch.__version__}"
        )
    return ops.call(name, args, kwargs)


def _map(value: Any, floating: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return widened(value, floating)
    if isinstance(value, torch.dtype):
        return widened(value, floating)
    if isinstance(value, dict):
        return {k: _map(v, floating) for k, v in value.items()}
    return type(value)(_map(v, floating) for v in value) if type(value) in (list, tuple) else value


def _as_returned(func: Any, outputs: list[Any]) -> Any:
    """A written-out operator's results in the place of the operator's own; those that only its
    backward needs are missing.
    """
    return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)


_SUMS = words("""
    norm softmax loss embedding_dense dist index_add scatter_add conv
""")


def reduction_length(base: str, named: Mapping[str, Any]) -> int:
    """About how many terms one element of the operator's result is summed from; 1 when it does not
    sum.
    """
    is_backward = "backward" in base
    length = 1 if is_backward else stepwise.reduction_length(base, dict(named))
    shapes = {
        k: v.shape
        for k, v in named.items()
        if isinstance(v, torch.Tensor) and rounds(v) and v.dim()
    }
    if length > 1 or not shapes or not any(word in base for word in _SUMS):
        return length
    first = next(iter(shapes.values()))
    kept = 1
    if len(first) > 1 and ("conv" in base or "norm" in base):
        kept = first[1 if any(word in base for word in ("conv", "batch", "group")) else -1]
    length = math.prod(first) // max(1, kept)
    if "conv" in base and "weight" in shapes:
        length = max(length, math.prod(shapes["weight"]) // max(1, shapes["weight"][0]))
    return int(length)


@contextlib.contextmanager
def reference_rules() -> Iterator[None]:
    """References are computed here: without the modes that simulate a device, without autocast, in
    full matmul precision.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    precision = torch.get_float32_matmul_precision()
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


class Calls(TorchDispatchMode):  # type: ignore[misc]
    """Names of the operators that run, each once. Views and new tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
        if kind(func, named) not in (VIEW, CREATION):
            self.names[str(func)] = None
        return func(*args, **(kwargs or {}))


def synchronize(device: Any) -> None:
    module = getattr(torch, torch.device(device).type, None)
    if module is not None and torch.device(device).type != "cpu" and hasattr(module, "synchronize"):
        module.synchronize()


def written(func: Any, named: Mapping[str, Any]) -> list[str]:
    """Names of the arguments at hand that the operator writes."""
    names = torch_schema.written(schema_of(func), named)
    return [name for name in names if named.get(name) is not None]


def results(func: Any, out: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator made by slot: "output.0", "output.1.0" of a list, and "mutated.NAME" for
    what it wrote.
    """
    wrote = written(func, named)
    outputs: dict[str, Any] = {}
    returns = (
        [out]
        if len(func._schema.returns) == 1
        else list(out)
        if isinstance(out, (list, tuple))
        else []
    )
    for k, (value, declared) in enumerate(zip(returns, func._schema.returns)):
        if declared.alias_info is not None and declared.alias_info.is_write:
            continue
        if isinstance(value, (bool, int, float, complex)):
            outputs[f"output.{k}"] = torch.as_tensor(
                value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64
            )
        elif isinstance(value, torch.Tensor):
            outputs[f"output.{k}"] = value
        else:
            outputs.update(
                {
                    f"output.{k}.{i}": t
                    for i, t in enumerate(value or ())
                    if isinstance(t, torch.Tensor)
                }
            )
    for name in wrote:
        value = named[name]
        outputs.update(
            {f"mutated.{name}": value}
            if isinstance(value, torch.Tensor)
            else {f"mutated.{name}.{i}": t for i, t in enumerate(value)}
        )
    return outputs
