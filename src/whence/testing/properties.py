"""Assertions about one model: no second run, and nothing kept from before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whence.results import Probed, PropertyAnswer


def assert_causal(model: Any, inputs: Any, **kwargs: Any) -> Probed:
    """Raise AssertionError if a position depends on one that comes after it.

    model, inputs: as `whence.probe` takes them; kwargs: named arguments beside them. What cannot be
    told fails too. Returns the answer.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "causality", causal=True)


def assert_padding_invariant(model: Any, inputs: Any, **kwargs: Any) -> Probed:
    """Raise AssertionError if what is real depends on padding by more than rounding. Arguments as
    of `assert_causal`.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "padding")


def assert_batch_invariant(
    model: Any, inputs: Any, ulp: float | None = None, **kwargs: Any
) -> Probed:
    """Raise AssertionError if a row depends on the rows beside it, or on their number or order, by
    more than rounding. ulp: allow only so many units in the last place, 0 for none. Arguments as of
    `assert_causal`.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "batch", ulp=ulp)


def assert_repeatable(model: Any, inputs: Any, ulp: float | None = None, **kwargs: Any) -> Probed:
    """Raise AssertionError if the same call gives another result: again, later, on other threads,
    from other memory. ulp: as of `assert_batch_invariant`. Arguments as of `assert_causal`.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "repeat", ulp=ulp)


def assert_packing_invariant(model: Any, inputs: Any, **kwargs: Any) -> Probed:
    """Raise AssertionError if documents that share a row see each other: those of the call where
    its position_ids restart, else two that are put together so. Arguments as of `assert_causal`.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "packing", declare=("packed",))


def assert_equivariant(model: Any, inputs: Any, *declare: str, **kwargs: Any) -> Probed:
    """Raise AssertionError if a head, an expert or a hidden channel is not like the others.
    declare: "flip", "shift" where an image turned so gives the same. Arguments as of
    `assert_causal`.
    """
    __tracebackhide__ = True
    return _asserted(model, inputs, kwargs, "equivariance", declare=declare)


def _asserted(
    model: Any,
    inputs: Any,
    kwargs: dict[str, Any],
    name: str,
    *,
    causal: bool | None = None,
    ulp: float | None = None,
    declare: tuple[str, ...] = (),
) -> Probed:
    __tracebackhide__ = True
    from whence.api import probe
    from whence.report.probe import probed_text
    from whence.results import Held

    result = probe(model, inputs, kwargs, properties=(name,), causal=causal, declare=declare)
    answer: PropertyAnswer = result[name]
    far = max((variant.ulp for variant in answer.variants), default=0.0)
    if answer.held not in (Held.EXACT, Held.ROUNDING):
        raise AssertionError(probed_text(result))
    if ulp is not None and far > ulp:
        raise AssertionError(f"{far:.3g} ulp, where {ulp:g} are allowed\n\n{probed_text(result)}")
    return result
