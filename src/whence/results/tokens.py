"""Files of generated tokens, compared prompt by prompt."""

from __future__ import annotations

import msgspec

from whence.display import Described


class OutputMatch(msgspec.Struct, frozen=True, kw_only=True):
    """How far one generated output is another's: two strings, or two lists of tokens.

    unit: "character" (Unicode code points) or "token"; lengths and prefix_length are counted in it.
    Positions count from 0. first_character, first_token: where they first differ within the shorter
    of the two, None where they do not; of strings a token is a word between blanks, of lists of
    tokens there is no character. full: equal over the shorter; half: equal over the first half of
    it, at least one unit. None where an output is empty: an equal nothing is not agreement. longer:
    "reference" or "target" where full and one goes on behind the other's end.
    """

    unit: str = ""
    reference_length: int | None = None
    target_length: int | None = None
    prefix_length: int | None = None
    first_character: int | None = None
    first_token: int | None = None
    full: bool | None = None
    half: bool | None = None
    longer: str = ""


class PromptMatch(OutputMatch, frozen=True, kw_only=True):
    """One prompt of two files of outputs.

    number: from 1, in the reference's order, then what only the target has. prompt: its text, cut
    after 1,000 characters. verdict: "PASS" (full), "FAIL", or "NO" (nothing could be compared;
    `why`). before, change: its verdict at the commit before, and "newly failing" or "newly
    passing", where two commits are compared. matched_by: "prompt", "position", or "" without a
    partner. reference_line, target_line: from 1; of an array its elements. common, reference_at,
    target_at: a few units before the first difference and from it on. id: what the file calls it,
    "" where it gives none, or one to several.
    """

    number: int
    prompt: str
    verdict: str
    why: str = ""
    before: str = ""
    change: str = ""
    matched_by: str = ""
    reference_line: int | None = None
    target_line: int | None = None
    common: str = ""
    reference_at: str = ""
    target_at: str = ""
    id: str = ""


class Disagreement(msgspec.Struct, frozen=True):
    """One prompt that occurs twice in a file and was answered in two ways. lines: of the two;
    match: how far they agree.
    """

    side: str
    prompt: str
    lines: tuple[int, int]
    match: OutputMatch


class TokenMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What two files of outputs agree on.

    status: "pass" (both rates reach their thresholds), "fail", or "undecided" (no prompt stands on
    both sides). full_match, half_match: share of `count` prompts whose outputs are equal over the
    shorter, and over its first half; what could not be compared is counted in `count` only. None
    without prompts. *_interval: 95 % (Wilson). thresholds_from: where they come from.
    longer_reference, longer_target: of those with full match, how many go on on one side.
    not_compared: verdict "NO". repeated: prompts that a file holds more than once, each an A/A
    check; disagreements: those that failed it. unreadable: lines that hold no output, with file,
    number and reason.
    """

    reference: str
    target: str
    status: str
    count: int
    full_match: float | None
    half_match: float | None
    full_count: int
    half_count: int
    full_interval: tuple[float, float]
    half_interval: tuple[float, float]
    full_threshold: float
    half_threshold: float
    thresholds_from: str
    longer_reference: int
    longer_target: int
    not_compared: int
    repeated: int
    prompts: tuple[PromptMatch, ...]
    disagreements: tuple[Disagreement, ...] = ()
    unreadable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TokenComparison(Described, TokenMatch, frozen=True, kw_only=True):
    """Two files of outputs; with `before`, the same at an earlier commit, and everything of
    TokenMatch is of the later one.

    table: prompts that pass at "both", "only_before", "only_after", "neither"; those that one
    commit lacks are in `notes`. newly_failing, newly_passing: numbers of prompts. p_value:
    two-sided exact sign test on these two counts. status is also "fail" where significantly more (p
    < 0.05) fail newly than pass newly.
    """

    before: TokenMatch | None = None
    table: dict[str, int] | None = None
    newly_failing: tuple[int, ...] = ()
    newly_passing: tuple[int, ...] = ()
    p_value: float | None = None
