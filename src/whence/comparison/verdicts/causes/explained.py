"""The sentences of guilty verdicts, with what explains them: a tied parameter, one that was not
loaded, what a mask lets be seen, what a fused
node takes for granted, TF32 that is allowed, code that another release has.
"""

from __future__ import annotations

from whence.comparison.paired_runs import PairedRuns
from whence.comparison.verdicts.causes.changed_code import ChangedCode
from whence.comparison.verdicts.causes.fused_nodes import assumption
from whence.comparison.verdicts.causes.masks import mask_cause
from whence.comparison.verdicts.causes.parameter_origins import ParameterOrigins
from whence.comparison.verdicts.causes.reduced_precision import AllowedTF32
from whence.results import GUILTY, CauseKind, Confidence, Verdict, VerdictKind

_MOST = 40  # verdicts that are explained: an answer names the most upstream few

Verdicts = dict[tuple[int, int], Verdict]


def explained(verdicts: Verdicts, paired: PairedRuns) -> Verdicts:
    """The verdicts, with the sentences of the first guilty ones explained."""
    guilty = [
        key
        for key, verdict in verdicts.items()
        if verdict.verdict in GUILTY
        and verdict.confidence in (Confidence.LIKELY, Confidence.CERTAIN)
    ]
    guilty.sort(key=lambda key: paired.calls[key[0]].order)
    out, origins, code = dict(verdicts), ParameterOrigins(paired), ChangedCode(paired)
    precision = AllowedTF32(paired)
    for key in guilty[:_MOST]:
        verdict = verdicts[key]
        if verdict.verdict == VerdictKind.PARAM_DIFF:
            words = origins.words(verdict)
        else:
            words = assumption(verdict, paired) or mask_cause(verdict, paired)
        words = words or precision.words(verdict)
        if verdict.cause in (CauseKind.SEMANTIC, CauseKind.STRUCTURAL, CauseKind.UNKNOWN):
            words = "; ".join(filter(None, (words, code.words(verdict))))
        if words:
            out[key] = verdict.replace(sentence=f"{verdict.sentence}; {words}")
    return out
