"""Samples that lm-evaluation-harness logs (`--log_samples`), as records of a prompt and an output.

Written to its releases 0.4.9 and 0.4.13: a line a document, `arguments` with the arguments of each
request, `resps` with the list of answers to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_record(raw: Any) -> Any:
    """The record with `src` and `output` where it is such a sample, else as it is.

    src: the context of the first request. output: the text generated, or the continuation whose
    log-likelihood is the highest. A sample with neither (a perplexity) has no output.
    """
    if not isinstance(raw, Mapping) or not {"arguments", "resps"} <= raw.keys():
        return raw
    requests = [_values(arguments) for arguments in _values(raw["arguments"])]
    answers = [(_values(several) or [None])[0] for several in _values(raw["resps"])]
    if not requests or not requests[0] or len(requests) != len(answers):
        return raw
    record = {"src": requests[0][0], **raw}
    if isinstance(answers[0], str) and len(requests[0]) > 1:
        record["output"] = answers[0]
    elif len(answers) > 1 and not math.isnan(sum(scores := list(map(_log_likelihood, answers)))):
        best = requests[scores.index(max(scores))]
        # A task asks for one context with several endings, or for several contexts with one.
        have_one_context = all(request[0] == best[0] for request in requests)
        record["output"] = str(best[-1 if have_one_context else 0])
    return record


def _values(arguments: Any) -> list[Any]:
    """What a list, or an object with numbered keys, holds."""
    if isinstance(arguments, Mapping):
        return list(arguments.values())
    return list(arguments) if isinstance(arguments, (list, tuple)) else []


def _log_likelihood(answer: Any) -> float:
    """The first of (log-likelihood, whether greedy decoding gives it), which may be texts; NaN for
    any other answer.
    """
    try:
        return float(_values(answer)[0])
    except (IndexError, TypeError, ValueError):
        return math.nan
