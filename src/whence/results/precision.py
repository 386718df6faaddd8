"""Which modules of a model may compute in a narrower type, by what each was measured to do to the
outputs.
"""

from __future__ import annotations

import msgspec

NARROW_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8")
"""Types that modules can be narrowed to."""
DEFAULT_TYPES = ("bfloat16",)
DEFAULT_BUDGET = 1e-2
"""Relative root mean square at the outputs: five roundings of bfloat16 (2**-9). Logits of a
language model have a root mean square of a few units, so that probabilities move by a few percent;
all of a transformer in bfloat16 makes about as much.
"""


class PrecisionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a precision table is asked for. to: narrower types, of `NARROW_TYPES`. budget: largest
    relative rms error that the outputs may have.
    """

    to: tuple[str, ...] = DEFAULT_TYPES
    budget: float = DEFAULT_BUDGET


class ModuleEffect(msgspec.Struct, frozen=True, omit_defaults=True):
    """One module alone in a narrower type, everything else as it is.

    module: its path. op_type: its class. parameters: that it holds. error: ||y' - y|| / ||y|| of
    the output that moves most, both norms in float64; None where it does not run so, or where NaN
    or Inf appears. output: that output. flips: rows of the first output with rows whose largest
    element is another, of `rows`; 0 of 0 where it has none. why: why it cannot compute so, "" where
    it can.
    """

    module: str
    op_type: str
    parameters: int
    error: float | None = None
    output: str = ""
    flips: int = 0
    rows: int = 0
    why: str = ""


class PrecisionCheck(msgspec.Struct, frozen=True):
    """The mixed model, run on one call. inputs: which, in words. error: as of `ModuleEffect`.
    flips, rows: as there. planned_on: whether the plan was made with these inputs. decided: rows of
    discrete decisions inside the model that came out otherwise.
    """

    inputs: str
    error: float | None
    flips: int
    rows: int
    planned_on: bool
    decided: int = 0


class PrecisionPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Modules that may compute in one narrower type together.

    to: the type. modules: paths, those that cost least for their parameters first. keep: measured
    modules that stay as they are, the most harmful first. parameters: of `modules`; of all that
    the model has: `of_parameters`. predicted: upper bound of the error at the outputs, budget at
    most. quadrature: root of the sum of the squares of the modules' own errors. correction: by how
    much groups of modules erred more than their quadrature, at most. margin: factor for inputs
    that were not measured. checks: the mixed model run. holds: is each check's error at most
    `predicted`? shrunk: how often the plan was made smaller after a check. why: why no plan was
    found. decides: operators of the model that choose (experts, keys), in words, "" for none;
    decided: rows of them that chose otherwise, at most in a run of this type. Where more do, the
    outputs may move further than predicted.
    """

    to: str
    budget: float
    modules: tuple[str, ...]
    keep: tuple[str, ...]
    parameters: int
    of_parameters: int
    predicted: float
    quadrature: float
    correction: float
    margin: float
    checks: tuple[PrecisionCheck, ...]
    holds: bool
    shrunk: int = 0
    why: str = ""
    decides: str = ""
    decided: int = 0


class PrecisionTable(msgspec.Struct, frozen=True):
    """Of each type that was asked for its plan, and the effect of each module alone.

    rows: by type, the most harmful first. runs: how often the model was called.
    """

    plans: tuple[PrecisionPlan, ...]
    rows: dict[str, tuple[ModuleEffect, ...]]
    runs: int
