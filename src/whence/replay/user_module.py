"""Runs one module of the user's own model in place of a program: on other inputs, with other
parameters, in another dtype.

The module is copied without its tensors. A run puts the tensors that it needs into the copy and
takes them out again, so that the model is never written and never held in a wider dtype. The code
that runs is the user's: it has no memory bound and no list of allowed operators. A module that
calls others runs alone: the recorded outputs of a child replace the child.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from whence.dtypes import Array
from whence.errors import ReplayRefused
from whence.frameworks.torch_arrays import TORCH, from_host, to_host
from whence.frameworks.torch_trees import rebuilt
from whence.records import Call
from whence.records.slots import (
    SlotKind,
    is_input,
    is_mutated,
    is_of_child,
    slot_of_kind,
    split_slot,
)
from whence.replay.dtype_policy import (
    WORKING,
    HeldParameters,
    hold,
    laid_out,
    wide_dtype,
    widened,
)
from whence.replay.module_arguments import Forms, Kid, arguments, call_order, program_of_slots
from whence.replay.module_arithmetic import Arithmetic
from whence.replay.module_copy import ModuleCopy

GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}


class Borrowed:
    """A module of the user's model that runs in place of `call`, with the interface of
    `engine.Loaded`.

    call: of the reference. forms: (dtype, shape) of its tensors by slot. kids: the calls it made,
    in order. grad: a name of `GRAD`. forbidden: the `addresses` of the model. Raises ReplayRefused
    where the tensors of the module differ from the recorded ones. program: slots of the call and no
    operations. notes, check_note, length: as in `Loaded`.
    """

    def __init__(
        self,
        module: Any,
        call: Call,
        forms: Forms,
        kids: Sequence[Kid],
        *,
        name: str,
        grad: str = "no_grad",
        forbidden: Collection[int] = (),
    ) -> None:
        self.notes: list[str] = []
        self.check_note = ""
        self.length = 1
        self.chooses = self.jumps = False  # what a module chooses inside cannot be told
        self._call, self._forms, self.kids = call, dict(forms), tuple(kids)
        self._grad, self._forbidden = grad, forbidden
        self.program = program_of_slots(name, call, kids, forms)
        self.copy = ModuleCopy(
            module,
            {slot: forms[slot][1] for slot in self.program.params},
            [(kid.scope, kid.module) for kid in kids],
            training=call.training,
        )

    @property
    def module(self) -> Any:
        """The copy of the user's module that runs."""
        return self.copy.module

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    @property
    def words(self) -> str:
        """A phrase that names the module, for messages."""
        return self.copy.words

    # ---- dependencies

    def needs(self, output: str) -> frozenset[str]:
        """Returns the slots of the inputs and params that this output may depend on: all that are
        known when it is computed.
        """
        program, calls_before = self.program, call_order(output, len(self.kids))
        return frozenset(
            (*program.params, *(s for s in program.inputs if call_order(s, -1) < calls_before))
        )

    def determined(self, available: Collection[str]) -> list[str]:
        """Returns the outputs whose inputs and params are all available."""
        return [
            slot
            for slot, _ in self.program.outputs
            if all(s in available for s in self.needs(slot))
        ]

    def hold(
        self,
        params: Mapping[str, Array] | HeldParameters,
        *,
        working: str = "recorded",
        strides: Mapping[str, tuple[int, ...]] | None = None,
    ) -> HeldParameters:
        """Returns the available params, converted once for several runs with this `working` and
        `strides`.
        """
        convert = functools.partial(widened, wide=wide_dtype(working))
        return hold(params, self.program.params, working, strides or {}, convert)

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
        lenient: bool = False,
    ) -> dict[str, Array]:
        """Returns outputs by slot, computed by the module from these inputs and params (by slot);
        arguments as in `Loaded.run`.

        "float64", "float32" also rewrite every floating dtype that the module's code requests from
        an operator. In 16 bits, tensors that the code widens stay wide. trace is never called:
        there are no operations of a program. lenient changes nothing: a module takes any extents.
        Raises ReplayRefused with the reason.
        """
        params = self.hold(params, working=working, strides=strides)
        requested = [slot for slot, _ in self.program.outputs] if outputs is None else list(outputs)
        self._check_given(requested, {*inputs, *params.tensors}, has_child=child is not None)
        layouts = strides or {}

        def tensor(slot: str, array: Array) -> Any:
            prepared = laid_out(
                self._input(slot, from_host(array), working, convert), layouts.get(slot)
            )
            # A clone, since an in-place write to a leaf of the graph is an error.
            return (
                prepared.requires_grad_().clone()
                if self._grad == "grad" and prepared.is_floating_point()
                else prepared
            )

        own_inputs = {
            slot: tensor(slot, inputs[slot])
            for slot in self.program.inputs
            if not is_of_child(slot) and slot in inputs
        }
        from_children = {
            slot: inputs[slot]
            for slot in self.program.inputs
            if is_of_child(slot) and slot in inputs
        }
        wide = wide_dtype(working)
        running = _Running(self, from_children, tensor, child, requested)
        with (
            self._surroundings(wide),
            self.copy.lent(params.tensors, wide, grad=self._grad == "grad"),
            Arithmetic(wide, stepwise, self.notes, self._forbidden) as arithmetic,
        ):
            results = running.call(own_inputs, self._plain(working))
            results |= self._changed(own_inputs, requested)
            self.length = arithmetic.length
        missing = [slot for slot in requested if slot not in results]
        if missing:
            raise ReplayRefused(f"{self.words} has no {missing[0]}")
        return {slot: to_host(results[slot]) for slot in requested}

    def _check_given(
        self, requested: Sequence[str], available: Collection[str], *, has_child: bool
    ) -> None:
        """Raises ReplayRefused when a tensor that these outputs may depend on is missing."""
        needed = frozenset[str]().union(*(self.needs(slot) for slot in requested))
        lacking = [s for s in sorted(needed - {*available}) if not (has_child and is_of_child(s))]
        if lacking:
            raise ReplayRefused(f"the module needs {', '.join(lacking[:5])}, which is not there")

    def _input(self, slot: str, value: Any, working: str, convert: bool) -> Any:
        if working in ("recorded", "float64", "float32"):
            return widened(value, wide_dtype(working))
        # Outputs of a child have the dtype of the code around it.
        recorded = self._forms[slot][0] if slot in self._forms else self.program.base
        return (
            value.to(TORCH[working])
            if convert and value.is_floating_point() and recorded == self.program.base
            else value
        )

    def _plain(self, working: str) -> dict[str, Any]:
        """Returns the arguments that are not tensors, by slot. A dtype is recorded by its name."""
        dtype = TORCH[working] if working in WORKING[1:] else None
        out = {}
        for slot, value in self._call.arguments.items():
            if not is_input(slot):
                continue
            if isinstance(value, str) and value in TORCH:
                value = dtype if dtype is not None and value == self.program.base else TORCH[value]
            out[slot] = value
        return out

    def _changed(self, own_inputs: Mapping[str, Any], requested: Collection[str]) -> dict[str, Any]:
        """Returns the inputs and params that the call changed in place, by "mutated" slot."""
        out = {}
        for slot in requested:
            kind, name = split_slot(slot)
            if kind == "mutated" and f"input.{name}" in own_inputs:
                out[slot] = own_inputs[f"input.{name}"]
            elif kind == "mutated" and (held := self.copy.tensor(f"param.{name}")) is not None:
                out[slot] = held
        return {slot: value.detach().clone() for slot, value in out.items()}

    @contextlib.contextmanager
    def _surroundings(self, wide: Any) -> Iterator[None]:
        """Sets the recorded grad mode, no autocast, no compiled code and `wide` as default dtype;
        restores the random state and the default dtype. Raises ReplayRefused when the module draws
        random numbers.
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
            state = torch.get_rng_state()
            if wide is not None and torch.finfo(wide).bits > torch.finfo(default).bits:
                torch.set_default_dtype(wide)
            try:
                yield
            finally:
                torch.set_default_dtype(default)
            if not torch.equal(state, torch.get_rng_state()):
                raise ReplayRefused(f"{self.words} draws random numbers")


class _Enough(BaseException):
    """Stops the run once all requested outputs are computed; not an Exception, so that no handler
    in the user's code catches it.
    """


class _Running:
    """One call of a borrowed module, with its children replaced by their recorded outputs."""

    def __init__(
        self,
        borrowed: Borrowed,
        from_children: Mapping[str, Array],
        tensor: Callable[[str, Array], Any],
        child: Callable[[int, dict[str, Array]], Mapping[str, Array]] | None,
        requested: Collection[str],
    ) -> None:
        self._borrowed, self._from_children, self._tensor, self._child = (
            borrowed,
            from_children,
            tensor,
            child,
        )
        self._requested, self._results, self._next_child = set(requested), dict[str, Any](), 0

    def call(self, tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
        borrowed = self._borrowed
        module = borrowed.module
        called = {id(kid.module): kid for kid in borrowed.kids}
        parts = [(borrowed.copy.parts[place], kid) for place, kid in called.items()]
        try:
            for part, kid in parts:
                part.forward = self._standing_in(kid)
            args, kwargs = arguments(tensors, plain, module.forward)
            out = module(*args, **kwargs)
        except _Enough:
            return self._results
        except ReplayRefused:
            raise
        except Exception as error:  # whatever the user's code raises on what it was given
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise ReplayRefused(f"{borrowed.words} failed: {text}") from error
        finally:
            for part, _ in parts:
                part.forward = None  # else it would keep the tensors of this run
        if self._next_child < len(borrowed.kids):
            raise ReplayRefused(
                f"{borrowed.words} does not call {borrowed.kids[self._next_child].scope} as the "
                "recorded one does"
            )
        self._results.update(self._tensors(out))
        return self._results

    def _tensors(self, out: Any) -> dict[str, Any]:
        by_slot: dict[str, Any] = {}
        rebuilt(out, lambda slot, tensor: by_slot.setdefault(slot, tensor.detach()))
        return by_slot

    def _standing_in(self, called: Kid) -> Callable[..., Any]:
        """Returns the `forward` that replaces a child."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            borrowed, k = self._borrowed, self._next_child
            self._next_child += 1
            kid = borrowed.kids[k] if k < len(borrowed.kids) else None
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
                slot_of_kind(slot, SlotKind.INPUT): t
                for value in (args, kwargs)
                for slot, t in self._tensors(value).items()
            }
            # Cloned, since the module may write to them later.
            self._results.update((f"{k}:{slot}", t.clone()) for slot, t in handed.items())
            if self._requested <= self._results.keys():
                raise _Enough
            for slot in kid.fresh:
                if f"{k}:{slot}" in self._from_children and slot in handed:
                    # an expanded tensor, or one of another shape, stays as it is
                    with contextlib.suppress(RuntimeError):
                        handed[slot].copy_(
                            self._tensor(f"{k}:{slot}", self._from_children[f"{k}:{slot}"])
                        )
            results = {
                slot: self._tensor(f"{k}:{slot}", array)
                for slot, array in self._leaves(k, kid, handed).items()
            }
            for slot, tensor in results.items():
                if (
                    is_mutated(slot)
                    and (argument := handed.get(slot_of_kind(slot, SlotKind.INPUT))) is not None
                ):
                    argument.copy_(tensor)
            return rebuilt(kid.returned, lambda slot, _: results[slot])

        return forward

    def _leaves(self, k: int, kid: Kid, handed: Mapping[str, Any]) -> Mapping[str, Array]:
        results = {
            slot: self._from_children[f"{k}:{slot}"]
            for slot in kid.outputs
            if f"{k}:{slot}" in self._from_children
        }
        if len(results) < len(kid.outputs) and self._child is not None:
            results = {
                **self._child(k, {slot: to_host(t) for slot, t in handed.items()}),
                **results,
            }
        lacking = [slot for slot in kid.outputs if slot not in results]
        if lacking:
            raise ReplayRefused(f"{lacking[0]} of {kid.scope} is not there")
        return {slot: array for slot, array in results.items() if slot in kid.outputs}
