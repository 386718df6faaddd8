"""What the schema of an operator says, and what a dispatch mode's handler must put back for the
operator to run as without it. This file travels with generated tests (`replay.export.support`): it
needs torch and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from whence.frameworks.operator_names import CHOOSES, words

# In-place operators that only change what a tensor looks like. Recorded as the view they amount to,
# so that replay never changes a tensor object another operation refers to.
METADATA_ONLY = {
    "aten.t_.default": "aten.t.default",
    "aten.transpose_.default": "aten.transpose.int",
    "aten.swapaxes_.default": "aten.transpose.int",
    "aten.swapdims_.default": "aten.transpose.int",
    "aten.squeeze_.default": "aten.squeeze.default",
    "aten.squeeze_.dim": "aten.squeeze.dim",
    "aten.squeeze_.dims": "aten.squeeze.dims",
    "aten.unsqueeze_.default": "aten.unsqueeze.default",
    "aten.detach_.default": "aten.detach.default",
}
# Write their running statistics in training although the schema does not say so.
STATISTICS_WRITERS = words("""
    batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index
    instance_norm
""")
VIEW, RANDOM, CREATION, PLAIN = "view", "random", "creation", "plain"
_CREATE = words("""
    arange eye empty full ones zeros scalar_tensor tril_indices triu_indices range
""")
_COMPUTED = words("linspace logspace")  # of numbers alone, and rounded by each kernel in its way
# oneDNN's recurrent layers take a kernel of training wherever gradients are enabled, whatever they
# are asked; on some processors its bits are not those of inference.
BY_GRAD_MODE = words("mkldnn_rnn_layer")
UNINITIALISED = words("""
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided
""")
AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
}

_TRACKING = "ADInplaceOrView"
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
"""The first is that of every device."""
_AUTOGRAD_KEY = torch._C._parse_dispatch_key(_AUTOGRAD[0])
_AUTOGRAD_KERNELS = words("Autograd AutogradCPU AutogradCUDA AutogradXPU AutogradPrivateUse1")
_TRACKING_KEY = torch._C._parse_dispatch_key(_TRACKING)
_is_off = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_off = torch._C._dispatch_tls_set_dispatch_key_excluded


class OperatorSchema(NamedTuple):
    """What the schema of an overload says, worked out once."""

    name: str
    base: str
    namespace: str
    positional: tuple[str, ...]
    writes: tuple[str, ...]
    view: bool
    random: bool
    composite: bool  # runs other operators, with view tracking as its caller had it
    is_open: bool  # what it runs inside counts versions and notes views
    is_unregistered: bool  # has no derivative: autograd sees what it runs inside
    defaults: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def schema_of(func: Any) -> OperatorSchema:
    schema = func._schema
    namespace, _, base = schema.name.partition("::")
    returns = [r.alias_info for r in schema.returns]
    writes = tuple(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    is_composite = _has_kernel(func, "CompositeImplicitAutograd")
    is_unregistered = not is_composite and not any(_has_kernel(func, k) for k in _AUTOGRAD_KERNELS)
    return OperatorSchema(
        name=f"{namespace}.{base}.{func._overloadname}",
        base=base,
        namespace=namespace,
        positional=tuple(a.name for a in schema.arguments if not a.kwarg_only),
        writes=writes,
        view=bool(returns) and all(a is not None and not a.is_write for a in returns),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        composite=is_composite and not _has_kernel(func, _TRACKING),
        # Those of torch's that compute a result switch it off for what they run inside.
        is_open=not _has_kernel(func, _TRACKING)
        and (
            bool(writes) or is_composite or namespace != "aten" or not _has_kernel(func, "Autograd")
        ),
        is_unregistered=is_unregistered,
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
    )


def schema_named(name: str) -> OperatorSchema | None:
    """The schema of an overload by its full name ("aten.native_layer_norm.default"); None where
    this torch has none.
    """
    func: Any = torch.ops
    for part in name.split("."):
        func = getattr(func, part, None)
    return schema_of(func) if isinstance(func, torch._ops.OpOverload) else None


def _has_kernel(func: Any, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
    except RuntimeError:  # an operator of Python's alone (aten::sym_size)
        return False


def draws(facts: OperatorSchema, named: Mapping[str, Any]) -> bool:
    """Does this call draw random numbers? The tag alone also sits on dropout in evaluation and on
    every fused attention.
    """
    if not facts.random:
        return False
    names = {**facts.defaults, **named}
    if "dropout_p" in names:
        return bool(names["dropout_p"])
    chance = names.get("p", names.get("dropout", 1))
    training = names.get("train", names.get("training", True))
    return bool(chance) and training is not False


def written(facts: OperatorSchema, named: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the arguments that a call writes: as its schema says, and running statistics."""
    training = named.get("training", named.get("train", named.get("use_input_stats")))
    if facts.base not in STATISTICS_WRITERS or not training:
        return facts.writes
    return (*facts.writes, "running_mean", "running_var")


def chosen_result(func: Any) -> int | None:
    """Which result of an operator is indices that it chose among scores."""
    place = CHOOSES.get(schema_of(func).base)
    return place if place is not None and place < len(func._schema.returns) else None


def kind(func: Any, named: Mapping[str, Any]) -> str:
    """Does the operator draw random numbers, make a tensor from nothing, only look at another's
    memory, or compute?

    named: its arguments by schema name; only their presence and plain values count.
    """
    schema = func._schema
    base = schema.name.partition("::")[2]
    if draws(schema_of(func), named):
        return RANDOM
    if (
        base in _CREATE
        or base.startswith(("new_", "empty_"))
        or (base.endswith("_like") and base.removesuffix("_like") in _CREATE)
    ):
        return CREATION
    if base not in _COMPUTED and not any(
        "Tensor" in str(a.type) for a in schema.arguments if a.name in named
    ):
        return CREATION
    aliases = [r.alias_info for r in schema.returns]
    if aliases and all(a is not None and not a.is_write for a in aliases):
        return VIEW
    # Composite operators that change the shape, and copies of views that functionalisation makes.
    return (
        VIEW if base in ("_reshape_alias", "_unsafe_view", "alias", "lift", "lift_fresh") else PLAIN
    )


class _Tracked:
    """Inside of it, versions of tensors are counted and views noted. No state: used again."""

    def __enter__(self) -> None:
        _set_off(_TRACKING_KEY, False)

    def __exit__(self, *_: object) -> None:
        _set_off(_TRACKING_KEY, True)


_TRACKED, _AS_IT_IS = _Tracked(), contextlib.nullcontext()


def restored(func: Any, autocast: tuple[str, ...]) -> Any:
    """What a mode's handler must put back for `func` to run as it would have without the mode.

    torch calls the handler with the tracking of versions and views, autograd and autocast switched
    off. An operator without a kernel of its own for the tracking leaves it to those that it runs
    inside (`_foreach_add_` counts a version in the `add_` of each tensor; linear folds its input if
    and only if the transposed weight requires grad), and a library's operator without one for
    autograd leaves that to them. autocast: the dispatch keys (`AUTOCAST_KEYS`) that are on around
    the operator. One with an autocast kernel of its own has passed through that already, and
    autocast is off for what it calls.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return _AS_IT_IS
    schema = schema_of(func)
    is_tracked = schema.is_open and _is_off_by_the_mode(_TRACKING_KEY)
    is_unregistered = schema.is_unregistered and _is_off_by_the_mode(_AUTOGRAD_KEY)
    inner: tuple[str, ...] = ()
    if not autocast:
        pass
    elif torch.is_inference_mode_enabled():
        if schema.composite:
            inner = tuple(k for k in autocast if not _has_kernel(func, k))
    elif func.__name__ == "_trilinear.default":
        inner = tuple(
            k
            for k in autocast
            if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::bilinear", k)
        )
    if is_unregistered:
        inner += _AUTOGRAD
    if not inner:
        return _TRACKED if is_tracked else _AS_IT_IS
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (*inner, *((_TRACKING,) if is_tracked else ())):
        exclude = exclude.remove(torch._C._parse_dispatch_key(key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def _is_off_by_the_mode(key: Any) -> bool:
    """Is a dispatch key off because of the mode alone? What makes tensors (`torch.ones`) has the
    tracking off by itself.
    """
    if not _is_off(key):
        return False
    try:
        with torch._C._RestorePythonTLSSnapshot():
            return not _is_off(key)
    except RuntimeError:  # no mode's handler runs
        return False
