"""What two runs generated, token by token."""

from __future__ import annotations

import msgspec

from whence.results.verdict import Word


class TokenKind(Word):
    """What is made of one choice of a token, as `Token` says."""

    IDENTICAL = "identical"
    NOISE = "noise"
    EXPLAINED = "explained"
    UNEXPLAINED = "unexplained"
    SAMPLED = "sampled"
    OFF = "off"
    INHERITED = "inherited"
    INCOMPARABLE = "incomparable"


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token that both runs chose behind the same tokens.

    prompt: its number, from 1, as `Prompted.number` has it. index: place in the sequence, from the
    prompt's first token on. step, row: call of the root and row of its batch whose logits chose it.
    reference, target: the tokens that came next, or would have. verdict: "identical" (bitwise equal
    logits), "noise", "explained" (another token, the gap is within the noise), "unexplained",
    "sampled" (another token although the logits agree: not the largest was taken), "off" (logits
    further apart than rounding takes them, the token is the same or could have been), "inherited"
    (unexplained or off, and every module computes right on the inputs that it had: a choice inside
    the model came out otherwise), "incomparable". score: over what is allowed, > 1 is flagged.
    numbers: figures (docs/generation.md).
    """

    prompt: int
    index: int
    step: int
    row: int
    target_step: int
    target_row: int
    reference: int
    target: int
    verdict: str
    score: float = 0.0
    numbers: dict[str, float | None] = {}
    why: str = ""


class Prompted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one prompt. ids: its tokens, which it is known by. root, rank, step, row: the
    call and row that it came with.

    tokens, target_tokens: generated behind it; compared: how many choices of both were compared, of
    `of` in the reference. outcome: "equal", "explained", "sampled" (parted, and no fault of the
    model), "inherited", "unexplained", "off" (no token unexplained, but logits that are off), "not
    compared".
    flips: (explained, unexplained, sampled). first: place in Generation.tokens of the first token
    that differs, off: of the first from logits that are off; -1 for none. no_effect: modules in its
    calls whose error changed none of its tokens. number: from 1, in the order in which the
    reference was asked. led_to: the finding behind a token that is not explained, "" for none.
    """

    ids: tuple[int, ...]
    root: str
    rank: int
    step: int
    row: int
    target_step: int
    target_row: int
    tokens: int
    target_tokens: int
    compared: int
    of: int
    outcome: str
    flips: tuple[int, int, int] = (0, 0, 0)
    first: int = -1
    off: int = -1
    no_effect: tuple[str, ...] = ()
    number: int = 0
    led_to: str = ""

    @property
    def passes(self) -> bool:
        """Is no token another one, save where that is not a fault of the model?"""
        return self.outcome in ("equal", "explained", "sampled", TokenKind.INHERITED) or (
            self.outcome == "off" and self.first < 0
        )


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What two runs generated, token by token.

    logits_only: the comparison is based on logits alone, no module was captured. noise: median
    relative error of the logits that were judged to be rounding, None where none differed.
    compared, of: tokens. alone_reference, alone_target: prompts without a partner. forced: the
    target was fed the reference's tokens. suspect: place in `tokens` of the first that is not
    explained, -1 for none; sentence: it, in words; led_to: the finding behind it, "" where there is
    none.
    """

    logits_only: bool
    prompts: tuple[Prompted, ...]
    tokens: tuple[Token, ...]
    compared: int
    of: int
    noise: float | None = None
    alone_reference: int = 0
    alone_target: int = 0
    forced: bool = False
    suspect: int = -1
    sentence: str = ""
    led_to: str = ""

    def prompt_of(self, token: Token) -> Prompted:
        """The prompt behind which a token was chosen."""
        return next(prompt for prompt in self.prompts if prompt.number == token.prompt)
