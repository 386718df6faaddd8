"""Every architecture by its name: a model with numbers for weights, and what it is given."""

from __future__ import annotations

import functools

from _zoo import irregular, plain
from _zoo.language import TYPES, build
from _zoo.sides import Side, fill

NETS = plain.NETS | irregular.NETS
ARCHITECTURES: tuple[str, ...] = (*NETS, *TYPES)


def reference(name: str) -> Side:
    """The side that other ways start from."""
    return _built(name).copied()


@functools.cache
def _built(name: str) -> Side:
    if name in NETS:
        make, inputs, traits = NETS[name]
        return Side(fill(make()), inputs(), traits=frozenset({*traits.split(), "plain"}))
    kind, auto, inputs, traits, own = TYPES[name]
    model = fill(build(kind, auto, dict(own)))
    return Side(model, inputs(), traits=frozenset({*traits.split(), "transformers"}))
