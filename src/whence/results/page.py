"""What a page shows of a comparison: calls in order, both sides, and tensors looked at closely.
Frozen, JSON round trip, no behaviour.

`api.paging.page_of` measures all of it; `report/html` and plots draw it and compute nothing. A
number that there is not is None, and `missing` says why. Shape:

    Page
      comparison        Comparison (verdicts by call, findings, tokens: everything that was decided)
      reference, target PageSide   what ran: name, path, facts as (name, text)
      calls             PageCall   one for each pair of calls, in the order in which the reference's began
      details           PageDetail tensors of some calls: histogram, magnitude, quantiles, heatmap, worst elements
      places            PagePlace  of the first findings: lines of the user's code, operators of both programs
      unpaired          PageUnpaired calls that only one run has, and between which calls they stand
      missing           sentences: what is not on the page, and why
"""  # noqa: E501

from __future__ import annotations

import msgspec

from whence.results.comparison import Comparison
from whence.results.tokens import TokenMatch


class PageSide(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run. facts: (name, text) of its command, versions, devices, dtypes, commit, seed;
    differing: names that the other has otherwise.
    """

    path: str
    facts: tuple[tuple[str, str], ...] = ()
    differing: tuple[str, ...] = ()


class PageCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pair of calls. Places (`parent`, `reads`) are indices into `Page.calls`.

    pair: index into Plan.pairs. number: in the reference's tree ("0", "3_1"). parent: the call
    around it, -1 without one. reads: calls that made what it, or its own code between the calls in
    it, reads. error: largest rel_l2 of what it made, 0 for equal bits; without elements how far
    statistics are off, if they are; None where nothing could be measured. incoming: the same of
    what it read. added: relative error that the target's operator adds to exact arithmetic on
    the inputs it was given, None where nothing was replayed. noise: largest error that rounding and
    what came in explain here, None where that is not known. own: error that its own rounding makes.
    score: error over what is allowed, of its worst region. shares: of the squared error that came
    in, that the target made, that the reference's own rounding made. visible: how large a fault of
    each kind would have been named (scale, channel, element, noise; see `Visible`), () where it was
    not replayed. evidence, confidence, cause, sentence, slot, operator: of the worst region.
    source, target_source: where it stands in the code. parameters: "equal", "differ", "differ by no
    more than rounding ...", "not compared", "" without any. program: why it was not replayed, ""
    when there is a program.
    """

    pair: int
    name: str
    op_type: str
    verdict: str
    step: int = 0
    rank: int = 0
    occurrence: int = 0
    micro: int = 0
    phase: str = "forward"
    root: str = ""
    number: str = ""
    parent: int = -1
    leaf: bool = True
    reads: tuple[int, ...] = ()
    error: float | None = None
    incoming: float | None = None
    added: float | None = None
    noise: float | None = None
    own: float | None = None
    score: float | None = None
    shares: tuple[float | None, float | None, float | None] = (None, None, None)
    visible: tuple[float | None, ...] = ()
    evidence: str = ""
    confidence: str = ""
    cause: str = ""
    sentence: str = ""
    slot: str = ""
    operator: str = ""
    source: str = ""
    target_source: str = ""
    target_name: str = ""
    parameters: str = ""
    program: str = ""


class PageHeatmap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Root mean square of the error over blocks of a tensor laid out as (rows, channels), channels
    being its last axis.

    values: row-major, `shape[0] * shape[1]` numbers, None where no element of the block is finite.
    rows, channels: extents of the tensor; a block has ceil(rows / shape[0]) rows and ceil(channels
    / shape[1]) channels, the last one fewer. hit: rows or channels in which the error is
    concentrated, as (axis "row" or "channel", from, to), in words in `sentence`.
    """

    shape: tuple[int, int]
    values: tuple[float | None, ...]
    rows: int
    channels: int
    hit: tuple[tuple[str, int, int], ...] = ()
    sentence: str = ""


class PageDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pair of tensors looked at closely. Errors are target - reference, of the elements that are
    finite on both sides.

    call: place in `Page.calls`. dims: how the target's was brought to the reference's axes.
    elements: how many; of more than `sampled` > 0 the points of `magnitude` and `quantiles` are of
    that many, evenly spaced. reference, target: (min, max, mean, std, norm). not_finite: NaN and
    infinities of both. zeros: errors that are exactly zero. edges, counts: |error| of the others in
    bins of decades; counts[k] lies in [edges[k], edges[k + 1]). magnitude: (|reference|, |error|)
    of up to 600 elements, the largest errors among them. noise: standard deviation of an element's
    error that rounding explains; noise_from: on what that rests. quantiles: (of a standard normal
    times `noise`, of the |error| seen), in which noise lies on the diagonal. worst: (index,
    reference, target) of the largest errors, the first being the largest.
    """

    call: int
    slot: str
    target_slot: str
    dtype: str
    target_dtype: str
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    dims: str = ""
    identical: bool = False
    figures: dict[str, float | None] = {}
    elements: int = 0
    sampled: int = 0
    reference: tuple[float | None, ...] = ()
    target: tuple[float | None, ...] = ()
    not_finite: tuple[int, int] = (0, 0)
    zeros: int = 0
    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    magnitude: tuple[tuple[float, float], ...] = ()
    noise: float | None = None
    noise_from: str = ""
    quantiles: tuple[tuple[float, float], ...] = ()
    heatmap: PageHeatmap | None = None
    worst: tuple[tuple[tuple[int, ...], float | None, float | None], ...] = ()
    why: str = ""


class PageExcerpt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A few lines of a user's file, read when the page is made. side: "reference" or "target",
    whose code it is. file: as the page names it; line: which is meant; first: number of the first
    of `lines`. changed: the file is newer than the run.
    """

    side: str
    file: str
    line: int
    first: int
    lines: tuple[str, ...]
    changed: bool = False


class PageOperators(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of two programs side by side. mark: "" (the same), "differs", "only reference", "only
    target", or "left out" (`reference` says how many equal operators are).
    """

    reference: str
    target: str
    mark: str = ""


class PagePlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a finding stands. excerpts: lines of code of one side or both; operators: of both
    programs, () where one is not known; same: both run the same operators with the same arguments.
    """

    excerpts: tuple[PageExcerpt, ...] = ()
    operators: tuple[PageOperators, ...] = ()
    same: bool = False


class PageUnpaired(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that only one run has. side: "reference" or "target". parent: place of the paired call
    around it, -1 for none; inside: place in `Page.unpaired` of the unpaired call around it, -1 for
    none. after: place of the last paired call beside it that began before it, -1 for none. reads,
    readers: places of paired calls; a negative one, -1 - k, is number k of `Page.unpaired`.
    """

    side: str
    name: str
    op_type: str
    step: int = 0
    rank: int = 0
    parent: int = -1
    inside: int = -1
    after: int = -1
    reads: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()


class Page(msgspec.Struct, frozen=True, omit_defaults=True):
    """A comparison as a page shows it. folder: where the comparison lies, "" when it was not
    written. texts: what `whence tokens` said of the outputs of both, where that was given. places:
    of the first findings, in their order. vocabulary: (number, text) of the tokens that both runs
    generated, where a tokenizer was at hand.
    """

    comparison: Comparison
    reference: PageSide
    target: PageSide
    calls: tuple[PageCall, ...] = ()
    details: tuple[PageDetail, ...] = ()
    missing: tuple[str, ...] = ()
    folder: str = ""
    texts: TokenMatch | None = None
    places: tuple[PagePlace, ...] = ()
    unpaired: tuple[PageUnpaired, ...] = ()
    vocabulary: tuple[tuple[int, str], ...] = ()
