"""What a check of an engine against a reference shows: stage, phase, layer, rows."""

from __future__ import annotations

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class ServingStage(Word):
    """Where an engine goes wrong."""

    NONE = ""
    WEIGHTS = "weights"
    """A parameter is not the reference's."""
    PROMPT = "prompt"
    """The model was given another text."""
    SAMPLER = "sampler"
    """The logits are right; what is made of them is not."""
    CACHE = "cache"
    """What the cache was given is right; what it hands out is not."""
    LAYER = "layer"
    """A module, or the code between two of them, computes something else."""
    LOGITS = "logits"
    """The logits are wrong, and the inside cannot be seen, or shows nothing."""


class RequestCheck(msgspec.Struct, frozen=True):
    """One prompt: how its tokens stand to the reference's logits of the same text.

    number: from 1. tokens: generated; judged: whose logits the reference gave. first: the first
    generated token, from 0, that rounding does not explain, -1 for none; ties: tokens that are not
    the reference's best, and explained. gap: between the reference's best logit and that of the
    first such token; noise: standard deviation of what rounding adds to a logit. error: largest
    relative error of the engine's logits, None where they cannot be seen. routes: number of choices
    by routers that differ among scores that tie; the rest is judged given the engine's choice.
    """

    number: int
    tokens: int
    judged: int
    first: int = -1
    ties: int = 0
    gap: float = 0.0
    noise: float = 0.0
    error: float | None = None
    routes: int = 0


class ServingFault(msgspec.Struct, frozen=True):
    """The first thing in an engine that rounding does not explain.

    request: number from 1, 0 where it is of none. step: 0 the prefill, from 1 decode steps of the
    request. layer: -1 where it is of none. name: of a parameter or module. tensor: what of it ("K",
    "V", "input", "output"). heads: () for all. positions: of the request. error: relative 2-norm.
    alone: is the request wrong alone too; None where that was not asked.
    """

    stage: ServingStage
    request: int = 0
    step: int = 0
    layer: int = -1
    name: str = ""
    tensor: str = ""
    heads: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    error: float = 0.0
    sentence: str = ""
    alone: bool | None = None


class LogRatio(msgspec.Struct, frozen=True):
    """Log-probabilities of one answer by the engine less those by the reference, for each token.

    number: of the prompt, from 1. causes: which part of each comes from what: "routes", modules by
    their name in a layer, "rest" for what no module explains; in the order of the model. They
    add up to `tokens`.
    """

    number: int
    tokens: tuple[float, ...]
    causes: dict[str, tuple[float, ...]]


class BatchDependence(msgspec.Struct, frozen=True):
    """The operator whose result for a prompt first depends on what is beside it: by more than
    rounding if one does, else bit by bit.

    number: of the prompt, from 1. operator: with its module, "" where nothing depends. position: of
    the prompt and its answer. error: relative 2-norm of the difference; is_rounding: whether it is
    no more than the rounding of a whole model. compared: number of rows.
    """

    number: int
    operator: str = ""
    position: int = 0
    error: float = 0.0
    is_rounding: bool = True
    compared: int = 0


class ServingCheck(Described, msgspec.Struct, frozen=True):
    """An engine against a reference on some prompts."""

    status: Status
    reference: str
    target: str
    requests: tuple[RequestCheck, ...]
    fault: ServingFault | None = None
    notes: tuple[str, ...] = ()
    ratios: tuple[LogRatio, ...] = ()
    batch: tuple[BatchDependence, ...] = ()
