"""The fixture `check`: runs what a test names three ways on equal inputs, judges, writes a row.

The three are: on the device, on the CPU in float64 (what is right) and on the CPU in its own dtype
(how far rounding alone strays). The device passes when it strays no further than a few times that.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from whence.frameworks.torch_schema import CREATION, RANDOM, VIEW, chosen_result, kind
from whence.replay.export.support.measure import Figures, kolmogorov_smirnov, measure
from whence.replay.export.support.operators import (
    Calls,
    Operators,
    invoke,
    overload,
    reference_rules,
    results,
    synchronize,
    written,
)
from whence.replay.export.support.table import append
from whence.replay.export.support.tensors import (
    NAMES,
    Built,
    Data,
    Elements,
    Settings,
    Tensor,
    rounds,
    specs_in,
    tensors_in,
)
from whence.replay.stepwise import without_onednn

Run = Callable[[Operators, dict[str, Any]], dict[str, Any]]


class Check:
    """The fixture `check`: runs what a test names, writes its row and fails when the device is
    further off than rounding explains.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.data = Data(settings.folder / "data.safetensors")

    def __call__(self, op: str, sample: int | None, /, **arguments: Any) -> None:
        """One operator. arguments: by schema name, tensors as `tensor(...)`; "state.DEVICE": state
        of that generator before it.
        """
        self._tested(op, lambda: self._operator(op, sample, arguments))

    def gradient(
        self, op: str, sample: int | None, grads: Mapping[int, Tensor], /, **arguments: Any
    ) -> None:
        """The operator and its backward. grads: output number -> gradient that came in; {}: drawn
        at random for the first output.
        """
        self._tested(f"{op} (backward)", lambda: self._gradient(op, sample, grads, arguments))

    def module(
        self, name: str, run: Callable[..., dict[str, Any]], sample: int | None, /, **arguments: Any
    ) -> None:
        """A module written as a function of (operators, its tensors by name), which returns its
        outputs by slot.
        """
        self._tested(name, lambda: self._module(run, sample, arguments))

    # ---- what is run

    def _operator(self, op: str, sample: int | None, arguments: dict[str, Any]) -> Row:
        func = overload(op)
        states = {
            k.removeprefix("state."): v for k, v in arguments.items() if k.startswith("state.")
        }
        arguments = {k: v for k, v in arguments.items() if not k.startswith("state.")}
        with reference_rules():
            elements = self._elements(sample, full=torch.Tag.pointwise in func.tags)
            built = built_from(arguments, elements)
            state = {k: elements.of(f"state.{k}", v) for k, v in states.items() if sample in v.data}

        def run(ops: Operators, inputs: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad(), generators_in(state, self.settings.seed):
                return results(func, invoke(ops, op, inputs), inputs)

        sort = kind(func, arguments)
        if sort == RANDOM:
            row = self._random(
                run, built, repeated=torch.device(self.settings.device).type in state
            )
        elif sort in (VIEW, CREATION):
            row = self._structure(run, built, filled="empty" not in op)
        else:
            row = self._three_ways(run, built, func)
        return row.with_note(note_of_made_up(elements))

    def _gradient(
        self, op: str, sample: int | None, grads: Mapping[int, Tensor], arguments: dict[str, Any]
    ) -> Row:
        func = overload(op)
        with reference_rules():
            elements = self._elements(sample, full=False)
            built = built_from(
                {**arguments, **{f"grad.{k}": v for k, v in grads.items()}}, elements
            )

        def run(ops: Operators, inputs: dict[str, Any]) -> dict[str, Any]:
            named = {k: v for k, v in inputs.items() if not k.startswith("grad.")}
            incoming = {
                int(k.removeprefix("grad.")): v for k, v in inputs.items() if k.startswith("grad.")
            }
            copied = bool(written(func, named))  # a leaf must not be written
            leaves: dict[str, Any] = {}

            def leaf(name: str, value: Any) -> Any:
                if isinstance(value, list):
                    return [leaf(f"{name}.{k}", item) for k, item in enumerate(value)]
                if (
                    not isinstance(value, torch.Tensor)
                    or not rounds(value)
                    or any(word in name for word in ("mask", "running", "bias_mask"))
                ):
                    return value
                leaves[name] = value.detach().requires_grad_()
                return leaves[name].clone() if copied else leaves[name]

            with torch.enable_grad(), generators_in({}, self.settings.seed):
                named = {k: leaf(k, v) for k, v in named.items()}
                outputs = dict(enumerate(results(func, invoke(ops, op, named), named).values()))
                usable = {k: t for k, t in outputs.items() if t.requires_grad}
                chosen = {k: g.to(usable[k].dtype) for k, g in incoming.items() if k in usable}
                if not chosen:
                    chosen = {
                        k: drawn_gradient(t, self.settings.seed)
                        for k, t in list(usable.items())[:1]
                    }
                if not chosen:
                    raise Skipped("its results have no gradient")
                gradients = torch.autograd.grad(
                    [usable[k] for k in chosen],
                    list(leaves.values()),
                    list(chosen.values()),
                    allow_unused=True,
                )
            return {f"grad.{name}": g for name, g in zip(leaves, gradients) if g is not None}

        return self._three_ways(run, built, func, backward=True).with_note(
            note_of_made_up(elements)
        )

    def _module(
        self, run: Callable[..., dict[str, Any]], sample: int | None, arguments: dict[str, Any]
    ) -> Row:
        with reference_rules():
            elements = self._elements(sample, full=False)
            built = built_from(arguments, elements)

        def call(ops: Operators, inputs: dict[str, Any]) -> dict[str, Any]:
            with torch.no_grad():
                return run(ops, **inputs)

        return self._three_ways(call, built).with_note(note_of_made_up(elements))

    # ---- how it is compared

    def _three_ways(
        self, run: Run, built: Built, func: Any = None, *, backward: bool = False
    ) -> Row:
        notes: list[str] = []
        with reference_rules():
            inputs, calls = built.make(), Calls()
            # A test of a backward or a module depends on several operators.
            with calls if func is None or backward else contextlib.nullcontext():
                working, trouble = _tried(run, Operators(), inputs)
            ops = Operators(floating=torch.float64)
            wide, failed = _tried(run, ops, built.make(floating=torch.float64))
            if wide is None and working is not None:
                ops = Operators(floating=torch.float32)
                wide, _ = _tried(run, ops, built.make(floating=torch.float32))
                notes.append(f"reference in float32: {failed}")
            if wide is None and working is not None:
                wide, notes = working, [f"reference in its own dtype: {failed}"]
            notes += ops.notes
            floors = [working]
            with without_onednn():
                floors.append(_tried(run, Operators(), built.make())[0])
            steps = Operators(stepwise=True)
            floors.append(_tried(run, steps, built.make())[0] if not backward else None)
            if not steps.wrote_out:
                floors.pop()
        try:
            outputs, seconds = self._on_device(run, built)[1:]
        except Skipped:
            raise
        except Exception as error:
            if working is None and wide is None:
                raise Skipped(f"the CPU raises as the device does: {trouble}") from error
            raise
        if wide is None:
            raise Skipped(f"no reference: the CPU raised {trouble}")
        figures = Figures()
        with reference_rules():
            picks = picks_of(func, built.make()) if func is not None and not backward else {}
            for slot, value in outputs.items():
                value = value.detach().to("cpu")
                # what only the operator's own backward reads, where a reference was written out
                if slot not in wide:
                    notes.append(f"{slot} has no reference")
                    continue
                form = (working or wide)[slot]
                if value.shape != wide[slot].shape or (
                    working is not None and value.dtype != form.dtype
                ):
                    raise Wrong(f"{slot}: device made {form_of(value)}, CPU {form_of(form)}")
                rounded = [f[slot] for f in floors if f is not None and slot in f]
                figures.join(
                    _compared(slot, (value, wide[slot], *rounded), picks.get(slot), ops.length)
                )
            missing = [slot for slot in wide if slot not in outputs]
        if missing:
            raise Wrong(f"the device made no {', '.join(missing)}")
        return Row(figures, seconds, "; ".join(dict.fromkeys(notes)), tuple(calls.names))

    def _structure(self, run: Run, built: Built, *, filled: bool) -> Row:
        """Views and new tensors: the same elements in the same layout, in memory of the same
        owner.
        """
        with reference_rules():
            cpu_inputs = built.make()
            right = run(Operators(), cpu_inputs)
        inputs, outputs, seconds = self._on_device(run, built)
        figures = Figures()
        with reference_rules():
            for slot, value in outputs.items():
                expected = right[slot]
                layout, right_layout = layout_of(value, inputs), layout_of(expected, cpu_inputs)
                if layout != right_layout:
                    raise Wrong(f"{slot}: device made {layout}, CPU {right_layout}")
                if filled:
                    figures.join(
                        named_figures(slot, value, measure(value.to("cpu"), expected, [expected]))
                    )
        return Row(figures, seconds, "compared structurally")

    def _random(self, run: Run, built: Built, *, repeated: bool) -> Row:
        """repeated: the state of the device's generator before the call is known; CPU states give
        the same numbers again.
        """
        with reference_rules():
            right = run(Operators(), built.make())
        _, outputs, seconds = self._on_device(run, built)
        figures = Figures()
        exact = repeated and torch.device(self.settings.device).type == "cpu"
        with reference_rules():
            for slot, value in outputs.items():
                value, expected = value.to("cpu"), right[slot]
                if value.shape != expected.shape or value.dtype != expected.dtype:
                    raise Wrong(f"{slot}: device made {form_of(value)}, CPU {form_of(expected)}")
                if exact:
                    figures.join(named_figures(slot, value, measure(value, expected, [expected])))
                    continue
                far = kolmogorov_smirnov(value, expected)
                least, greatest = (
                    (float(t) for t in expected.to(torch.float64).aminmax())
                    if expected.numel()
                    else (0.0, 0.0)
                )
                alike = Figures(
                    value.numel(),
                    least,
                    greatest,
                    local=far,
                    score=far,
                    why=f"distributions differ by {far:.3g} times what chance makes",
                )
                figures.join(named_figures(slot, value, alike))
        return Row(
            figures,
            seconds,
            "compared from the recorded random state" if exact else "compared structurally",
        )

    def _on_device(self, run: Run, built: Built) -> tuple[dict[str, Any], dict[str, Any], float]:
        with reference_rules():
            inputs = built.make(self.settings.device)
            ops = Operators(self.settings.device)
            synchronize(self.settings.device)
        began = time.perf_counter()
        outputs = run(ops, inputs)
        synchronize(self.settings.device)
        return inputs, outputs, time.perf_counter() - began

    def _elements(self, sample: int | None, *, full: bool) -> Elements:
        return Elements(self.settings, self.data, self.name, sample, full=full)

    # ---- the row

    def _tested(self, op: str, run: Callable[[], Row]) -> None:
        cells: dict[str, Any] = {"name": self.name, "op_name": op, "device": self.settings.device}
        problem = ""
        try:
            row = run()
        except Skipped as reason:
            cells |= {"status": "skipped", "reason": str(reason)}
        except Wrong as reason:
            problem = str(reason)
            cells |= {"status": "fail", "reason": problem}
        except Exception as error:  # noqa: BLE001 - whatever an operator raises is what its row says
            problem = f"{type(error).__name__}: {str(error)[:500]}"
            cells |= {"status": "error", "reason": problem}
        else:
            failed = row.figures.score > 1
            problem = row.figures.why if failed else ""
            outcome = "; ".join(x for x in (problem, row.note) if x)
            cells |= row.cells() | {"status": "fail" if failed else "pass", "reason": outcome}
        if self.settings.table:
            append(self.settings.table, cells)
        if cells["status"] == "skipped":
            import pytest

            pytest.skip(cells["reason"])
        if problem:
            raise AssertionError(f"{op} on {self.settings.device}: {problem}")


def _compared(
    slot: str, tensors: Sequence[Any], pick: Callable[[Any], Any] | None, length: int
) -> Figures:
    """Figures of an output. tensors: of the device, in float64, and rounded in one or several ways.
    pick: what indices point at, where the output is indices.
    """
    output, *others = [t for t in tensors if t.shape == tensors[0].shape]
    if pick is not None:
        output, *others = map(pick, (output, *others))
    return named_figures(slot, output, measure(output, others[0], others[1:], length=length))


def _tried(run: Run, ops: Operators, inputs: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    try:
        return run(ops, inputs), ""
    except Skipped:
        raise
    except Exception as error:  # noqa: BLE001 - operators raise anything; the text is kept
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


# Inputs and states that make a call of an operator the same again.


def built_from(arguments: Mapping[str, Any], elements: Elements) -> Built:
    return Built(arguments, {name: elements.of(name, spec) for name, spec in specs_in(arguments)})


def drawn_gradient(like: Any, seed: int) -> Any:
    with reference_rules():
        generator = torch.Generator().manual_seed(seed)
        values = (
            torch.rand(math.prod(like.shape), generator=generator, dtype=torch.float64).reshape(
                like.shape
            )
            * 2
            - 1
        )
        # Rounded to 8 bits, so that every dtype holds the same.
        return values.to(torch.bfloat16).to(like.dtype).to(like.device)


@contextlib.contextmanager
def generators_in(state: Mapping[str, Any], seed: int) -> Iterator[None]:
    """With generators in these states ("cpu", "cuda"); without any, the CPU's is seeded. Afterwards
    the CPU's is as before.
    """
    saved = torch.get_rng_state()
    torch.manual_seed(seed)
    for device, value in state.items():
        (torch if device == "cpu" else getattr(torch, device)).set_rng_state(value)
    try:
        yield
    finally:
        torch.set_rng_state(saved)


def picks_of(func: Any, inputs: Mapping[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """For results that are indices: what they point at, by slot; equal values may be pointed at in
    any order.
    """
    name = func._schema.name.partition("::")[2]
    place = chosen_result(func)
    x = next(tensors_in(list(inputs.values())), None)
    if place is None or x is None:
        return {}
    dim = inputs.get("dim", -1 if name not in ("argmax", "argmin") else None)

    def pick(index: Any) -> Any:
        shaped = index
        if "pool" in name:
            flat = x.flatten(-3 if "3d" in name else -2)
            index = index.flatten(-3 if "3d" in name else -2)
            axis = -1
        elif dim is None or x.dim() == 0:
            flat, index, axis = x.reshape(-1), index.reshape(-1), 0
        else:
            flat, axis = x, dim
            if index.dim() < x.dim():
                index = index.unsqueeze(dim)
        if index.numel() and not bool(((index >= 0) & (index < flat.shape[axis])).all()):
            raise Wrong("an index beyond its tensor")
        return flat.gather(axis, index).reshape(shaped.shape)

    return {f"output.{place}": pick}


# What a test found, as a row of the table; and what its parts are called in it.


class Skipped(Exception):
    """There is nothing to compare; the text says why."""


class Wrong(Exception):
    """The device made something of another form than the CPU; the text says what."""


@dataclass
class Row:
    """What a test found. seconds: of the call on the device. calls: operators that ran, where there
    are several.
    """

    figures: Figures
    seconds: float
    note: str
    calls: tuple[str, ...] = ()

    def with_note(self, note: str) -> Row:
        """With one more remark, if there is any."""
        return replace(self, note="; ".join(x for x in (self.note, note) if x))

    def cells(self) -> dict[str, Any]:
        """Its figures by column. shape, dtype, least and greatest value are those of the
        results.
        """
        f = self.figures
        has_range = f.least <= f.greatest
        return {
            "dtype": "; ".join(dict.fromkeys(f.dtypes)),
            "shape": "; ".join(f.shapes),
            "min-val": repr(f.least) if has_range else "",
            "max-val": repr(f.greatest) if has_range else "",
            "max": repr(f.worst),
            **{f"1e-{k + 1}": n for k, n in enumerate(f.counts)},
            "ulp": f"{f.ulp:.17g}",
            "nan_mismatch": f.nan,
            "inf_mismatch": f.inf,
            "local_error": f"{f.local:.6g}",
            "time": f"{self.seconds:.6f}",
            "numel": f.numel,
            "calls": " ".join(self.calls),
        }


def note_of_made_up(elements: Elements) -> str:
    return (
        f"elements were not kept, drawn in their range: {', '.join(elements.made_up)}"
        if elements.made_up
        else ""
    )


def named_figures(slot: str, value: Any, figures: Figures) -> Figures:
    figures.dtypes, figures.shapes = (
        [NAMES.get(value.dtype, str(value.dtype))],
        [str(list(value.shape))],
    )
    figures.why = f"{slot}: {figures.why}" if figures.why else ""
    return figures


def form_of(value: Any) -> str:
    return f"{NAMES.get(value.dtype, value.dtype)} {list(value.shape)}"


def layout_of(value: Any, inputs: Mapping[str, Any]) -> str:
    owners = [
        n
        for n, t in inputs.items()
        if any(
            t.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            for t in tensors_in(t)
        )
    ]
    whose = f" of {owners[0]}" if owners and value.numel() else ""
    return f"{form_of(value)} stride {list(value.stride())} offset {value.storage_offset()}{whose}"
