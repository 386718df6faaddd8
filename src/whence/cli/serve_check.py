"""Name where a serving engine leaves its model.

\b
    whence serve-check serving:reference serving:engine --prompts prompts.jsonl
    whence serve-check serving:reference http://localhost:8000/v1 --prompts prompts.jsonl

REF is module:factory of a causal torch model. TGT is a factory of a model of transformers or of an
object with generate(prompts, max_new_tokens) and, where it can be looked into, the torch model that
runs as `model`; or the address of a server of this machine that speaks OpenAI's completions. The
reference scores the engine's own tokens, so every token is compared, and rounding is measured. The
answer names the first thing that rounding does not explain: weights, sampler, cache (layer, K or V,
heads, positions, and what they hold), or a module.

Exit code: 0 no fault, 1 a fault, 2 something could not be compared, 3 a factory or file is wrong.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli import _answers, _files
from whence.cli._options import COUNT, HERE, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("reference", "REF"),
    argument("target", "TGT"),
    option(
        "--prompts FILE",
        "JSON lines or an array: token ids, texts, objects with one as src, samples of lm-eval.",
        HERE,
        required=True,
    ),
    option("--tokens N", "Tokens that are generated for each prompt.", COUNT, default=32),
    option(
        "--cache CODES",
        "What a quantised cache keeps (int8, int4, int2, fp8): their rounding is allowed.",
        str,
        default="",
    ),
    option(
        "--cache-error ERROR",
        "Relative error that the rows of a quantised cache may have.",
        click.FloatRange(0, 1),
        default=0.0,
    ),
    option(
        "--dtype NAME", "In which an engine computes that cannot be looked into.", str, default=""
    ),
    option("--alone", "Ask two prompts alone too: what depends on others in a batch?"),
    option("--fresh", "Use nothing that an earlier check with the same content kept."),
    option("--rollout", "The engine samples its tokens; split its log-ratios by cause."),
    option("--html FILE", "Also write the stages as one HTML page.", HERE),
    TEXT_OR_JSON,
)
def command(
    reference: str,
    target: str,
    prompts: str,
    tokens: int,
    html: str | None,
    form: str,
    **options: Any,
) -> int:
    """Words -> `api.serve_check` -> report -> exit code."""
    from whence import api
    from whence.report.serving import serving_text

    result = api.serve_check(
        reference,
        target,
        api.read_prompts(prompts),
        max_new_tokens=tokens,
        resume=True,
        tell=lambda line: click.echo(f"whence: {line}", err=True),
        **options,
    )
    _answers.told(result, form, serving_text)
    if html is not None:
        from whence.report.serving_page import serving_html

        _files.write(html, serving_html(result), force=True)
    return _answers.CODES[result.status]
