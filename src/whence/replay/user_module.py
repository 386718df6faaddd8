"""One module of the user's own model in the place of a program: run on other inputs, with other
parameters, in another dtype.

The module is copied without its tensors; what a run needs is put into the copy and taken out again,
so that the model is never written and never held in a wider dtype. The code that runs is the
user's: nothing is bounded and nothing is on a list here. A call that called others runs alone: in
the place of a child stands what the child left.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host, tensors_in, to_host
from whence.records import Call, Program
from whence.replay import stepwise as written_out
from whence.replay.dtype_policy import WORKING, laid_out
from whence.replay.engine import HeldParameters

Rebuilt = Callable[[Any, Callable[[str, Any], Any]], Any]
"""(what a call returned, put) -> the same with `put(slot, tensor)` in the place of each tensor;
slots are named as in a capture.
"""

Known = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of a call's tensors by slot."""

GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Kid:
    """A call that the borrowed module makes. module: of the user's model. given, left: the slots it
    was given and left when recorded.

    fresh: those given that nobody could see before; what follows starts from the target's, not from
    what they were made of. returned: something of the form that it returns, whatever its tensors
    are.
    """

    scope: str
    module: Any
    given: tuple[str, ...]
    left: tuple[str, ...]
    returned: Any
    fresh: tuple[str, ...] = ()


class Borrowed:
    """A module of the user's model, run in the place of `call`; has what `torch_engine.Loaded` has.

    call: of the reference. known: (dtype, shape) of its tensors by slot. kids: the calls it made,
    in order. grad: a name of `GRAD`. forbidden: what `addresses` gives of the model. Raises
    ReplayRefused where the module does not hold what the recorded one held. program: slots of the
    call and no operations. notes, check_note, length: as `Loaded` has them.
    """

    def __init__(
        self,
        module: Any,
        call: Call,
        known: Known,
        kids: Sequence[Kid],
        rebuilt: Rebuilt,
        *,
        name: str,
        grad: str = "no_grad",
        forbidden: Collection[int] = (),
    ) -> None:
        self.notes: list[str] = []
        self.check_note = ""
        self.length = 1
        self.chooses = False  # what a module chooses inside cannot be told
        self._call, self._known, self._kids, self._rebuilt, self._grad = (
            call,
            dict(known),
            tuple(kids),
            rebuilt,
            grad,
        )
        self._forbidden = forbidden
        own = [ref.slot for ref in call.refs]
        params = tuple(dict.fromkeys(s for s in own if s.startswith("param")))
        inputs = [s for s in own if s.startswith("input")] + [
            f"{k}:{s}" for k, kid in enumerate(kids) for s in (*kid.fresh, *kid.left)
        ]
        outputs = [f"{k}:{s}" for k, kid in enumerate(kids) for s in kid.given] + [
            s for s in own if s.startswith(("output", "mutated"))
        ]
        # A cache: what it holds is changed inside an object, of which slots show neither the class
        # nor how it began.
        inside = [
            s
            for s in outputs
            if s.startswith("mutated") and not {f"input{s[7:]}", f"param{s[7:]}"} & {*own}
        ]
        lost = tuple(
            (s, "hangs in an object, which the model's module cannot be given") for s in inside
        )
        outputs = [s for s in outputs if s not in inside]
        floating = [
            dtype
            for slot in (*params, *own)
            if (dtype := known[slot][0]) in TORCH and TORCH[dtype].is_floating_point
        ]
        self.program = Program(
            name,
            (),
            tuple(dict.fromkeys(inputs)),
            tuple((slot, {"op": [0, n]}) for n, slot in enumerate(dict.fromkeys(outputs))),
            params,
            base=floating[0] if floating else "",
            lost=lost,
        )
        self._module, self._parts = _copied(module)
        self._stub()
        self._homes = {slot: self._home(slot) for slot in params}
        self._has_no_more(params)
        self._hidden = list(
            _hidden(self._module, {(id(box), key) for box, key in self._homes.values()})
        )
        for part in self._module.modules():
            part.training = call.training

    @property
    def module(self) -> Any:
        """The copy of the user's module that is run."""
        return self._module

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self._module).__name__

    @property
    def words(self) -> str:
        """What it is, in a sentence."""
        return f"the model's {self.kind}"

    # ---- what it rests on

    def needs(self, output: str) -> frozenset[str]:
        """Slots of the inputs and params that this output may rest on: all that is known when it is
        made.
        """
        program, before = self.program, _number(output, len(self._kids))
        return frozenset((*program.params, *(s for s in program.inputs if _number(s, -1) < before)))

    def determined(self, there: Collection[str]) -> list[str]:
        """The outputs for which all that they rest on is there."""
        return [
            slot for slot, _ in self.program.outputs if all(s in there for s in self.needs(slot))
        ]

    def hold(
        self,
        params: Mapping[str, Array],
        *,
        working: str = "recorded",
        strides: Mapping[str, tuple[int, ...]] | None = None,
    ) -> HeldParameters:
        """The params that are there, converted once for several runs with this `working` and
        `strides`.
        """
        wide, layouts = _wide(working), strides or {}
        there = [slot for slot in self.program.params if slot in params]
        return HeldParameters(
            {
                slot: laid_out(_widened(from_host(params[slot]), wide), layouts.get(slot))
                for slot in there
            },
            working,
        )

    # ---- running

    def run(
        self,
        inputs: Mapping[str, Array],
        params: Mapping[str, Array] | HeldParameters,
        *,
        working: str = "recorded",
        stepwise: bool = False,
        strides: Mapping[str, tuple[int, ...]] | None = None,
        convert: bool = True,
        outputs: Sequence[str] | None = None,
        child: Callable[[int, dict[str, Array]], Mapping[str, Array]] | None = None,
        trace: Callable[[int, Array], None] | None = None,
    ) -> dict[str, Array]:
        """Outputs by slot, as the module computes them from these inputs and params (by slot);
        arguments as `Loaded.run` has them.

        "float64", "float32" also rewrite every floating dtype that the module's code asks an
        operator for. In 16 bits what the code widens stays wide. trace is never called: there are
        no operations of a program. Raises ReplayRefused with the reason.
        """
        wide = _wide(working)
        if not isinstance(params, HeldParameters):
            params = self.hold(params, working=working, strides=strides)
        elif params.working != working:
            raise ReplayRefused(f"parameters held for {params.working} given to a run in {working}")
        wanted = [slot for slot, _ in self.program.outputs] if outputs is None else list(outputs)
        needed = frozenset[str]().union(*(self.needs(slot) for slot in wanted))
        lacking = [
            s
            for s in sorted(needed)
            if s not in inputs
            and s not in params.tensors
            and not (child is not None and s[0].isdigit())
        ]
        if lacking:
            raise ReplayRefused(f"the module needs {', '.join(lacking[:5])}, which is not there")
        layouts = strides or {}

        def tensor(slot: str, array: Array) -> Any:
            made = laid_out(
                self._input(slot, from_host(array), working, convert), layouts.get(slot)
            )
            # A clone, since what is written in place must not be a leaf of the graph.
            return (
                made.requires_grad_().clone()
                if self._grad == "grad" and made.is_floating_point()
                else made
            )

        given = {
            slot: tensor(slot, inputs[slot])
            for slot in self.program.inputs
            if not slot[0].isdigit() and slot in inputs
        }
        left = {
            slot: inputs[slot]
            for slot in self.program.inputs
            if slot[0].isdigit() and slot in inputs
        }
        running = _Running(self, left, tensor, child, wanted)
        with (
            self._surroundings(wide),
            self._lent(params.tensors, wide),
            _Arithmetic(wide, stepwise, self.notes, self._forbidden) as arithmetic,
        ):
            made = running.call(given, self._plain(working))
            made |= self._changed(given, wanted)
            self.length = arithmetic.length
        missing = [slot for slot in wanted if slot not in made]
        if missing:
            raise ReplayRefused(f"{self.words} has no {missing[0]}")
        return {slot: to_host(made[slot]) for slot in wanted}

    def _input(self, slot: str, value: Any, working: str, convert: bool) -> Any:
        if working in ("recorded", "float64", "float32"):
            return _widened(value, _wide(working))
        # What a child left is in the dtype of the code around it.
        recorded = self._known[slot][0] if slot in self._known else self.program.base
        return (
            value.to(TORCH[working])
            if convert and value.is_floating_point() and recorded == self.program.base
            else value
        )

    def _plain(self, working: str) -> dict[str, Any]:
        """Arguments that are no tensors, by slot. A dtype is recorded by its name."""
        dtype = TORCH[working] if working in WORKING[1:] else None
        out = {}
        for slot, value in self._call.arguments.items():
            if not slot.startswith("input"):
                continue
            if isinstance(value, str) and value in TORCH:
                value = dtype if dtype is not None and value == self.program.base else TORCH[value]
            out[slot] = value
        return out

    def _changed(self, given: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """What the call was given, or holds, and changed in place."""
        out = {}
        for slot in wanted:
            kind, _, name = slot.partition(".")
            if kind == "mutated" and f"input.{name}" in given:
                out[slot] = given[f"input.{name}"]
            elif kind == "mutated" and (home := self._homes.get(f"param.{name}")) is not None:
                out[slot] = _get(*home)
        return {slot: value.detach().clone() for slot, value in out.items()}

    @contextlib.contextmanager
    def _surroundings(self, wide: Any) -> Iterator[None]:
        """Grad mode as recorded, no autocast, no compiled code, random state and default dtype as
        before.
        """
        default = torch.get_default_dtype()
        eager: Any = contextlib.nullcontext()
        if "torch._dynamo" in sys.modules:
            eager = torch.compiler.set_stance("force_eager")
        with (
            GRAD[self._grad](),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            eager,
        ):
            before = torch.get_rng_state()
            if wide is not None and torch.finfo(wide).bits > torch.finfo(default).bits:
                torch.set_default_dtype(wide)
            try:
                yield
            finally:
                torch.set_default_dtype(default)
            if not torch.equal(before, torch.get_rng_state()):
                raise ReplayRefused(f"{self.words} draws random numbers")

    @contextlib.contextmanager
    def _lent(self, params: Mapping[str, Any], wide: Any) -> Iterator[None]:
        """The copy holds these tensors inside."""
        before = {}
        try:
            for slot, (box, key) in self._homes.items():
                if slot not in params:
                    continue
                old = before[slot] = _get(box, key)
                if isinstance(old, torch.nn.Parameter):
                    grad = (
                        old.requires_grad
                        and params[slot].is_floating_point()
                        and self._grad == "grad"
                    )
                    _set(box, key, torch.nn.Parameter(params[slot], requires_grad=grad))
                else:  # a call may write its buffers
                    _set(box, key, params[slot].clone())
            for box, key, value in self._hidden:
                _set(box, key, _widened(value.detach().cpu().clone(), wide))
            yield
        finally:
            for slot, old in before.items():
                _set(*self._homes[slot], old)
            for box, key, value in self._hidden:
                _set(box, key, value)

    # ---- making the copy

    def _stub(self) -> None:
        """Of a module that calls others those below hold no elements: a weight used past its module
        is not what was recorded for it.
        """
        for part in list(self._module.modules())[1:] if self._kids else ():
            for name, value in part._parameters.items():
                if value is not None:
                    part._parameters[name] = torch.nn.Parameter(
                        value.detach().to("meta"), requires_grad=False
                    )
            for name, value in part._buffers.items():
                if value is not None:
                    part._buffers[name] = value.to("meta")
        for kid in self._kids:
            part = self._parts.get(id(kid.module))
            if part is None or part is self._module:
                raise ReplayRefused(
                    f"{self.words} does not hold {kid.scope}, which the recorded one calls"
                )
            # What a call was given and left, as recorded, lies outside of its hooks.
            for hooks in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_forward_hooks_with_kwargs",
                "_forward_pre_hooks_with_kwargs",
            ):
                getattr(part, hooks).clear()

    def _home(self, slot: str) -> tuple[Any, Any]:
        """Where the copy keeps the tensor of this slot: (module, list or dict, key)."""
        shape = self._known[slot][1]
        found = _find(self._module, slot[6:])
        if found is None:
            raise ReplayRefused(f"{self.words} has no {slot[6:]}, which the recording has")
        if tuple(_get(*found).shape) != tuple(shape):
            has = tuple(_get(*found).shape)
            raise ReplayRefused(
                f"{slot[6:]} of {self.words} has shape {has}, the recording's {tuple(shape)}"
            )
        return found

    def _has_no_more(self, params: Collection[str]) -> None:
        parts = [self._module] if self._kids else list(self._module.modules())
        known = {(id(box), key) for box, key in self._homes.values()}
        for part in parts:
            for name, value in (*part._parameters.items(), *part._buffers.items()):
                if (
                    value is not None
                    and (id(part), name) not in known
                    and not any(value is _get(*self._homes[s]) for s in params)
                ):
                    raise ReplayRefused(f"{self.words} has {name}, of which nothing was recorded")


class _Enough(BaseException):
    """All that was asked for is made; not an Exception, so that no code of the user's takes it for
    one of its own.
    """


class _Running:
    """One call of a borrowed module, with its children answered by what they left."""

    def __init__(
        self,
        borrowed: Borrowed,
        left: Mapping[str, Array],
        tensor: Callable[[str, Array], Any],
        child: Callable[[int, dict[str, Array]], Mapping[str, Array]] | None,
        wanted: Collection[str],
    ) -> None:
        self._borrowed, self._left, self._tensor, self._child = borrowed, left, tensor, child
        self._wanted, self._made, self._at = set(wanted), dict[str, Any](), 0

    def call(self, given: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
        borrowed = self._borrowed
        module = borrowed._module
        called = {id(kid.module): kid for kid in borrowed._kids}
        parts = [(borrowed._parts[place], kid) for place, kid in called.items()]
        try:
            for part, kid in parts:
                part.forward = self._standing_in(kid)
            args, kwargs = arguments(given, plain, module.forward)
            out = module(*args, **kwargs)
        except _Enough:
            return self._made
        except ReplayRefused:
            raise
        except Exception as error:  # whatever the user's code raises on what it was given
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise ReplayRefused(f"{borrowed.words} failed: {text}") from error
        finally:
            for part, _ in parts:
                part.forward = None  # else it would keep the tensors of this run
        if self._at < len(borrowed._kids):
            raise ReplayRefused(
                f"{borrowed.words} does not call {borrowed._kids[self._at].scope} as the "
                "recorded one does"
            )
        self._made.update(self._tensors(out))
        return self._made

    def _tensors(self, out: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        self._borrowed._rebuilt(out, lambda slot, tensor: made.setdefault(slot, tensor.detach()))
        return made

    def _standing_in(self, called: Kid) -> Callable[..., Any]:
        """What the module runs in the place of a child."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            borrowed, k = self._borrowed, self._at
            self._at += 1
            kid = borrowed._kids[k] if k < len(borrowed._kids) else None
            if kid is None or kid.module is not called.module:
                recorded = (
                    f"the recording called {kid.scope}"
                    if kid is not None
                    else "the recording called nothing"
                )
                raise ReplayRefused(
                    f"guard: {borrowed.words} calls {called.scope} where {recorded}"
                )
            handed = {
                f"input{slot[6:]}": t
                for value in (args, kwargs)
                for slot, t in self._tensors(value).items()
            }
            # As they are now: the module may write them later.
            self._made.update((f"{k}:{slot}", t.clone()) for slot, t in handed.items())
            if self._wanted <= self._made.keys():
                raise _Enough
            for slot in kid.fresh:
                if f"{k}:{slot}" in self._left and slot in handed:
                    with contextlib.suppress(
                        RuntimeError
                    ):  # an expanded tensor, or one of another shape, stays as it is
                        handed[slot].copy_(self._tensor(f"{k}:{slot}", self._left[f"{k}:{slot}"]))
            made = {
                slot: self._tensor(f"{k}:{slot}", array)
                for slot, array in self._leaves(k, kid, handed).items()
            }
            for slot, tensor in made.items():
                if (
                    slot.startswith("mutated")
                    and (written := handed.get(f"input{slot[7:]}")) is not None
                ):
                    written.copy_(tensor)
            return borrowed._rebuilt(kid.returned, lambda slot, _: made[slot])

        return forward

    def _leaves(self, k: int, kid: Kid, handed: Mapping[str, Any]) -> Mapping[str, Array]:
        left = {slot: self._left[f"{k}:{slot}"] for slot in kid.left if f"{k}:{slot}" in self._left}
        if len(left) < len(kid.left) and self._child is not None:
            left = {**self._child(k, {slot: to_host(t) for slot, t in handed.items()}), **left}
        lacking = [slot for slot in kid.left if slot not in left]
        if lacking:
            raise ReplayRefused(f"{lacking[0]} of {kid.scope} is not there")
        return {slot: array for slot, array in left.items() if slot in kid.left}


class _Arithmetic(TorchDispatchMode):  # type: ignore[misc]
    """How operators compute inside: dtypes asked for are widened with the rest, fused operators may
    be written out.

    forbidden: addresses of tensors that no operator may see. length: the largest number of terms
    that one element was summed from.
    """

    def __init__(
        self, wide: Any, stepwise: bool, notes: list[str], forbidden: Collection[int]
    ) -> None:
        super().__init__()
        self._wide, self._stepwise, self._notes, self._forbidden, self.length = (
            wide,
            stepwise,
            notes,
            forbidden,
            1,
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        base = func._schema.name.partition("::")[2]
        for tensor in tensors_in([*args, *kwargs.values()]):
            # mm of a CPU tensor and a meta tensor gives uninitialised memory and no error.
            if tensor.device.type == "meta":
                raise ReplayRefused(
                    "it uses a weight of a module below it without calling that module"
                )
            if tensor.data_ptr() in self._forbidden:
                raise ReplayRefused(
                    "it reads the model's own weights past what it holds (a closure?)"
                )
        if base != "view":  # view.dtype reads the same bits as another dtype
            args = tuple(self._dtype(a) for a in args)
            kwargs = {name: self._dtype(value) for name, value in kwargs.items()}
        named = (
            dict(zip((a.name for a in func._schema.arguments if not a.kwarg_only), args)) | kwargs
        )
        self.length = max(self.length, written_out.reduction_length(base, named))
        table = (
            written_out.WRITTEN_OUT
            if self._stepwise
            else written_out.WIDE
            if self._wide is torch.float64
            else {}
        )
        if func.namespace == "aten" and base in table:
            made = table[base](named)
            wanted = len(func._schema.returns)
            return made[0] if wanted == 1 else (*made, *[None] * (wanted - len(made)))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if func._schema.is_mutable:
                raise
            return self._in_float32(func, args, kwargs, error)

    def _dtype(self, value: Any) -> Any:
        if self._wide is None or not isinstance(value, torch.dtype):
            return value
        if self._wide is torch.float64 and value.is_complex:
            return torch.complex128
        narrow = value in _HALF or (self._wide is torch.float64 and value.is_floating_point)
        return self._wide if narrow else value

    def _in_float32(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """No kernel for this dtype: this one operator in float32, its results back in what it was
        given.
        """
        floats = {t.dtype for t in tensors_in([*args, *kwargs.values()]) if t.is_floating_point()}
        if len(floats) != 1 or torch.float32 in floats:
            raise error
        dtype = floats.pop()

        def to(value: Any, old: Any, new: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(new) if value.dtype is old else value
            if isinstance(value, (list, tuple)):
                return type(value)(to(item, old, new) for item in value)
            return value

        try:
            out = func(
                *to(args, dtype, torch.float32),
                **{k: to(v, dtype, torch.float32) for k, v in kwargs.items()},
            )
        except (RuntimeError, NotImplementedError):
            raise error from None
        text = f"{func} in float32: {str(error).splitlines()[0][:200]}"
        if text not in self._notes:
            self._notes.append(text)
        return to(out, torch.float32, dtype)


# ---- arguments


class _Fields(dict[str, Any]):
    """Values by name, read as a dict or as attributes: which of them an argument was, its slots do
    not tell.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def arguments(
    tensors: Mapping[str, Any], plain: Mapping[str, Any], forward: Callable[..., Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call from its slots: "input.0" is the first, "input.mask" a keyword,
    "input.0.1" within a tuple.

    tensors, plain: by slot. What has no slot was None, or an object that no slot shows. Raises
    ReplayRefused when a slot is both a value and a part of one.
    """
    tree: dict[str, Any] = {}
    for slot, value in (*plain.items(), *tensors.items()):
        *path, last = slot.split(".")[1:]
        node = tree
        for step in path:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise ReplayRefused(
                    f"{slot}: a tensor of several parts cannot be put together again"
                )
        if last in node:
            raise ReplayRefused(f"{slot}: a tensor of several parts cannot be put together again")
        node[last] = value
    places = {int(key): _value(value) for key, value in tree.items() if key.isdigit()}
    args = [places.get(k) for k in range(max(places, default=-1) + 1)]
    kwargs = {key: _value(value) for key, value in tree.items() if not key.isdigit()}
    with contextlib.suppress(ValueError, TypeError):  # a forward without a signature
        for k, (name, parameter) in enumerate(inspect.signature(forward).parameters.items()):
            lacking = (
                k >= len(args)
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                else parameter.kind is parameter.KEYWORD_ONLY
            )
            if lacking and parameter.default is parameter.empty:
                kwargs.setdefault(name, None)
    return args, kwargs


def _value(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    values = {key: _value(value) for key, value in node.items()}
    if all(key.isdigit() for key in values):
        places = {int(key): value for key, value in values.items()}
        return tuple(places.get(k) for k in range(max(places) + 1))
    return _Fields(values)


# ---- tensors of a module


def _number(slot: str, otherwise: int) -> int:
    """Of "3:input.0": 3; of a slot of the call itself: `otherwise`."""
    head, colon, _ = slot.partition(":")
    return int(head) if colon else otherwise


def _wide(working: str) -> Any:
    if working not in WORKING:
        raise ReplayRefused(f"working dtype {working!r} is not one of {', '.join(WORKING)}")
    return TORCH[working] if working in ("float64", "float32") else None


def _widened(tensor: Any, wide: Any) -> Any:
    if wide is torch.float64 and tensor.is_complex():
        return tensor.to(torch.complex128)
    if (
        wide is None
        or not tensor.is_floating_point()
        or (wide is torch.float32 and tensor.dtype not in _HALF)
    ):
        return tensor
    return tensor.to(wide)


def _copied(module: Any) -> tuple[Any, dict[int, Any]]:
    """(a copy that shares the tensors with the module, by the id of each module below it its
    copy).
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
        made = copy.deepcopy(module, memo)
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
    return made, copies


def _find(module: Any, name: str) -> tuple[Any, Any] | None:
    """(box, key) of the tensor called `name`: a module's own, of a module below, a plain attribute,
    or within one ("tables.0").
    """
    for box in (module._parameters, module._buffers, vars(module)):
        if isinstance(box.get(name), torch.Tensor):
            return module, name
    head, _, rest = name.partition(".")
    if rest and module._modules.get(head) is not None:
        return _find(module._modules[head], rest)
    inside = vars(module).get(head)
    if isinstance(inside, tuple):
        inside = vars(module)[head] = list(inside)
    if (
        isinstance(inside, list)
        and rest.isdigit()
        and int(rest) < len(inside)
        and isinstance(inside[int(rest)], torch.Tensor)
    ):
        return inside, int(rest)
    if isinstance(inside, dict):
        return next(
            (
                (inside, key)
                for key, item in inside.items()
                if str(key) == rest and isinstance(item, torch.Tensor)
            ),
            None,
        )
    return None


def _get(box: Any, key: Any) -> Any:
    return getattr(box, key) if isinstance(box, torch.nn.Module) else box[key]


def _set(box: Any, key: Any, value: Any) -> None:
    # A module is told: an LSTM keeps its weights in a list too.
    if isinstance(box, torch.nn.Module):
        setattr(box, key, value)
    else:
        box[key] = value


def _hidden(module: Any, known: Collection[tuple[int, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    """(box, key, tensor) of attributes that no capture sees: they are the user's model's own."""
    for part in module.modules():
        for name, value in vars(part).items():
            if (
                isinstance(value, torch.Tensor)
                and (id(part), name) not in known
                and value.device.type != "meta"
            ):
                yield part, name, value


def addresses(model: Any) -> frozenset[int]:
    """Where the elements of a model's parameters and buffers lie."""
    held = (
        t
        for t in (*model.parameters(), *model.buffers())
        if t.device.type == "cpu" and not torch.nn.parameter.is_lazy(t)
    )
    return frozenset(t.data_ptr() for t in held) - {0}


def form_of(module: Any, call: Call, inputs: Mapping[str, Array], rebuilt: Rebuilt) -> Any:
    """Something of the form that a module returns when it is called as `call` was, with the weights
    it has, whatever they are.

    inputs: recorded, by slot. Tensors in what is returned stand for nothing. Raises ReplayRefused
    when it fails.
    """
    made, _ = _copied(module)
    for part in made.modules():
        part.training = False
        for name, value in part._buffers.items():
            part._buffers[name] = value.clone() if value is not None else None
    held = next(
        (t for t in (*made.parameters(), *made.buffers()) if t.is_floating_point()), torch.empty(0)
    )

    def like(array: Array) -> Any:
        tensor = from_host(array)
        return tensor.to(held.device, held.dtype if tensor.is_floating_point() else tensor.dtype)

    plain = {
        slot: TORCH.get(value, value) if isinstance(value, str) else value
        for slot, value in call.arguments.items()
    }
    args, kwargs = arguments(
        {slot: like(array) for slot, array in inputs.items()}, plain, made.forward
    )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = made(*args, **kwargs)
    except Exception as error:  # the user's code
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise ReplayRefused(
            f"what {call.scope} of the model returns is not known: {text}"
        ) from error
    return rebuilt(out, lambda slot, tensor: torch.empty(0))
