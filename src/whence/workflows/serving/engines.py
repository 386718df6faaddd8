"""Sources of answers to prompts: a torch model, an object with `generate`, or a local server."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from whence.comparison.replays.user_model import imported
from whence.errors import UsageError

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_SECONDS = 600
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener without a proxy: prompts must not leave this machine."""


class Answer(NamedTuple):
    """The tokens that an engine generated for a prompt.

    logprobs: log-probability of each token, () when the engine reports none.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class Engine(NamedTuple):
    """An engine.

    generate: takes prompts of token ids and a number of new tokens. model: the torch model inside,
    None when it is not accessible. tokenizer: that of the object, None without one.
    """

    name: str
    generate: Callable[[Sequence[Sequence[int]], int], list[Answer]]
    model: Any = None
    tokenizer: Any = None


def engine(source: Any) -> Engine:
    """The engine that a user names: "module:factory", what such a function returns, or the address
    of a server that speaks OpenAI's completions. Raises UsageError.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return _server(source)
    name = source if isinstance(source, str) else type(source).__name__
    served = imported(source) if isinstance(source, str) else source
    if isinstance(served, type) or not hasattr(served, "generate"):
        served = _called(served, name)
    if not callable(getattr(served, "generate", None)):
        raise UsageError(
            f"engine {name}: a {type(served).__name__} has no method generate; give a transformers "
            "model, an object with generate(prompts, max_new_tokens), or the address of a server"
        )
    if hasattr(served, "parameters"):
        return Engine(
            name, lambda prompts, count: [_plain(served, p, count) for p in prompts], served
        )

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[Answer]:
        asked = [list(prompt) for prompt in prompts]
        try:
            answers = [_answer(value) for value in served.generate(asked, count)]
        except (Exception, SystemExit) as error:  # the user's code
            words = f"{type(error).__name__}: {error}"
            raise UsageError(f"engine {name}: generate(prompts, {count}) raised {words}") from error
        if len(answers) != len(asked):
            raise UsageError(f"engine {name}: {len(answers)} answers to {len(asked)} prompts")
        return answers

    inside = (getattr(served, part, None) for part in ("model", "tokenizer"))
    return Engine(name, generate, *inside)


def _called(factory: Any, name: str) -> Any:
    """The object that a factory returns; any other object unchanged."""
    if not callable(factory) or hasattr(factory, "parameters"):
        return factory
    try:
        return factory()
    except (Exception, SystemExit) as error:  # the user's code
        words = f"{type(error).__name__}: {error}"
        raise UsageError(f"engine {name}: calling it without arguments raised {words}") from error


def _plain(model: Any, prompt: Sequence[int], count: int) -> Answer:
    """Greedy generation with a model of transformers, for one prompt."""
    import torch

    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return Answer(tuple(out[0, len(prompt) :].tolist()))


def _answer(value: Any) -> Answer:
    """Convert an engine's answer: tokens, tokens with log-probabilities, or an object with both."""
    tokens = getattr(value, "generated_tokens", getattr(value, "tokens", None))
    if tokens is not None:
        return Answer(tuple(map(int, tokens)), tuple(getattr(value, "logprobs", ()) or ()))
    if len(value) == 2 and isinstance(value[0], (list, tuple)):
        return Answer(tuple(map(int, value[0])), tuple(map(float, value[1])))
    return Answer(tuple(map(int, value)))


def _server(address: str) -> Engine:
    if urllib.parse.urlsplit(address).hostname not in _LOOPBACK:
        raise UsageError(
            f"engine {address}: only servers of this machine are asked ({', '.join(_LOOPBACK)}); "
            "forward a port of it to here"
        )

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[Answer]:
        return [_completion(address.rstrip("/"), prompt, count) for prompt in prompts]

    return Engine(address, generate)


def _completion(address: str, prompt: Sequence[int], count: int) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    asked = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(asked, timeout=_SECONDS) as response:
            choice = json.load(response)["choices"][0]
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"engine {address}/completions: {type(error).__name__}: {error}"
        ) from error
    logprobs = choice.get("logprobs") or {}
    tokens = choice.get("token_ids")
    if tokens is None:
        words = [str(word).rpartition(":")[2] for word in logprobs.get("tokens", [])]
        tokens = words if all(word.isdigit() for word in words) else []
    if not tokens:
        raise UsageError(
            f"engine {address}: its answer holds no token ids (token_ids, or logprobs.tokens as "
            "token_id:N); compare its texts with whence tokens"
        )
    values = logprobs.get("token_logprobs") or ()
    return Answer(tuple(map(int, tokens)), tuple(float(v) for v in values))
