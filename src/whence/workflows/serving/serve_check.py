"""`whence.serve_check`: compares an engine with a reference, and narrows a difference as far as
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whence import extras
from whence._version import __version__
from whence.errors import UsageError
from whence.results import ServingCheck


def serve_check(  # noqa: PLR0913 - options of the command
    reference: Any,
    target: Any,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int = 32,
    cache_error: float = 0.0,
    cache: str = "",
    rollout: bool = False,
    dtype: str = "",
    alone: bool = False,
    resume: bool = False,
    fresh: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> ServingCheck:
    """Does an engine answer as a reference does, and if not, where does it go wrong first?

        whence.serve_check(model, engine, [[1, 5, 9], [1, 7]], max_new_tokens=16).fault

    reference: a causal language model (a torch module), or "module:factory". target: an object with
    generate(prompts, max_new_tokens) and, where it can be looked into, the torch `model` that runs;
    a model of transformers; "module:factory"; or the address of a server of this machine that
    speaks OpenAI's completions and returns token ids. prompts: token ids, or texts, which the
    `tokenizer` of the reference or the engine encodes. cache_error: relative error that rows of the
    cache may have, of a quantised one; cache: the codes that it keeps ("int8", "int4", "int2",
    "fp8"), whose rounding is then allowed. rollout: the engine samples, so its
    tokens need not be the best; log-ratios are split by cause. dtype: in which an engine computes
    that cannot be looked into ("bfloat16"); by default that of the reference. alone: two prompts
    are asked alone too, and the first operator that gives them other bits in the batch is named.
    resume: keep what each stage shows, and use what an earlier check kept, unless code, files,
    models, prompts or environment changed since; for two names, in a process that has imported
    neither. fresh: use nothing that was kept.
    The reference scores the engine's own tokens in float64 and in the dtypes of both, so every
    token is compared and the floor of rounding is measured. Raises UsageError for what is not an
    engine or a dtype, and for prompts without tokens.
    """
    extras.needed("torch", "serve-check")
    from whence.comparison.replays.user_model import made
    from whence.workflows.serving.engines import engine
    from whence.workflows.serving.funnel import CACHE_CODES, Funnel, Settings
    from whence.workflows.serving.kept import Kept, Reading, environment, opened
    from whence.workflows.serving.prompts import token_ids
    from whence.workflows.serving.torch.forced import state_of

    if cache and cache not in CACHE_CODES:
        raise UsageError(f"no cache of {cache!r} is known; give one of {', '.join(CACHE_CODES)}")
    reading = Reading() if resume and isinstance(reference, str) else None
    model, name = made(reference, "the reference scores tokens")
    served = engine(target)
    requests = token_ids(prompts, model, served, served.model)
    settings = Settings(max_new_tokens, cache_error, cache, rollout, dtype, alone)
    kept = Kept()
    if reading is not None and isinstance(target, str):
        question = [reference, target, requests, settings._replace(alone=False), str(Path.cwd())]
        models = {"the reference": model, "the engine": served.model}
        inputs: dict[str, object] = {words: state_of(each) for words, each in models.items()}
        inputs |= {"whence": __version__, "the environment": environment()}
        kept = opened(question, inputs, reading, fresh=fresh, tell=tell)
    return Funnel(model, name, served, requests, settings, kept, tell).check()
