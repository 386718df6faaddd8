"""The tools of `race.py`, each used as its documentation says, and the model that they look at.

    python benchmarks/_contestants.py JOB TOOL FOLDER OPTIONS

Runs in the Python that has the tool, so nothing of whence or of a tool is imported at the top. JOB:
`cost` prints what a captured forward costs beside a bare one, `dump` captures one forward into
FOLDER, `compare` compares the dumps FOLDER/reference and FOLDER/target of a tool without a command
of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EPS = 1e-2  # of the norm that is at fault in the target; 1e-6 elsewhere
Listening = Any  # a context in which a function (tokens) runs a captured forward


# ---- the model


def build(shape: dict[str, int], *, faulty: bool) -> Any:
    """A model of the llama kind, in plain torch. faulty: one norm in the middle has another eps."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, heads, hidden = shape["width"], shape["heads"], shape["hidden"]

    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps, self.weight = 1e-6, nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(width, width, bias=False))

        def forward(self, x: Any) -> Any:
            many, tokens, _ = x.shape
            q, k, v = (
                project(x).view(many, tokens, heads, width // heads).transpose(1, 2)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(mixed.transpose(1, 2).reshape(many, tokens, width))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(width, hidden, bias=False)
            self.up_proj = nn.Linear(width, hidden, bias=False)
            self.down_proj = nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.self_attn = RMSNorm(), Attention()
            self.post_attention_layernorm, self.mlp = RMSNorm(), MLP()

        def forward(self, x: Any) -> Any:
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(shape["vocabulary"], width)
            self.layers = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.norm = RMSNorm()
            self.lm_head = nn.Linear(width, shape["vocabulary"], bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(self.norm(x))

    model = Net().eval()
    drawn = np.random.default_rng(0)  # torch draws by the kernels of the processor
    for parameter in model.parameters():
        if parameter.dim() > 1:
            weights = drawn.standard_normal(parameter.shape, np.float32) / np.sqrt(width)
            parameter.data.copy_(torch.from_numpy(weights.astype(np.float32)))
    if faulty:
        model.layers[shape["layers"] // 2].post_attention_layernorm.eps = EPS
    return model


# ---- the tools


@contextlib.contextmanager
def _whence(model: Any, folder: Path, **options: Any) -> Iterator[Callable[[Any], Any]]:
    import whence

    with whence.capture(model, folder, **options):
        yield model


@contextlib.contextmanager
def _msprobe(
    model: Any, folder: Path, level: str, task: str = "tensor"
) -> Iterator[Callable[[Any], Any]]:
    folder.mkdir(parents=True)
    config = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": level}
    config[task] = {"scope": [], "list": [], "data_mode": ["all"]}
    (folder / "config.json").write_text(json.dumps(config))
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))

    def forward(tokens: Any) -> None:
        debugger.start(model=model)
        model(tokens)
        debugger.stop()
        debugger.step()

    yield forward


@contextlib.contextmanager
def _msit(model: Any, folder: Path) -> Iterator[Callable[[Any], Any]]:
    from msit_llm import DumpConfig, register_hook

    folder.mkdir(parents=True)
    register_hook(model, DumpConfig(dump_path=str(folder), mode="module"))
    yield model


@contextlib.contextmanager
def _hooks(model: Any, keep: Callable[[str, Any], None]) -> Iterator[None]:
    """A forward hook on every module; `keep` gets its name and each tensor it returns."""

    def hooked(name: str) -> Callable[..., None]:
        def hook(_module: Any, _given: Any, made: Any) -> None:
            keep(name or "model", made)

        return hook

    handles = [m.register_forward_hook(hooked(name)) for name, m in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _polygraphy(model: Any, folder: Path) -> Iterator[Callable[[Any], Any]]:
    from polygraphy.comparator import RunResults

    folder.mkdir(parents=True)
    outputs: dict[str, Any] = {}
    count = 0

    def forward(tokens: Any) -> None:
        nonlocal count
        outputs.clear()
        model(tokens)
        results = RunResults()
        results.add([dict(outputs)], runner_name=folder.name)
        results.save(str(folder / f"{count}.json"))
        count += 1

    def keep(name: str, made: Any) -> None:
        outputs[name] = made.detach().numpy()

    with _hooks(model, keep):
        yield forward


@contextlib.contextmanager
def _torch_save(model: Any, folder: Path) -> Iterator[Callable[[Any], Any]]:
    import torch

    folder.mkdir(parents=True)
    count = 0

    def keep(name: str, made: Any) -> None:
        nonlocal count
        torch.save(made.detach().clone(), folder / f"{count:05}.{name}.pt")
        count += 1

    with _hooks(model, keep):
        yield model


@contextlib.contextmanager
def _debug_mode(model: Any, folder: Path) -> Iterator[Callable[[Any], Any]]:
    from torch.utils._debug_mode import DebugMode

    def forward(tokens: Any) -> Any:
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            model(tokens)
        return mode.logs

    yield forward


LISTEN: dict[str, Callable[[Any, Path], Listening]] = {
    "whence": _whence,
    "whence, statistics": lambda m, f: _whence(m, f, keep="stats"),
    "whence, operators": lambda m, f: _whence(m, f, level="op"),
    "msprobe L0": lambda m, f: _msprobe(m, f, "L0"),
    "msprobe L0, statistics": lambda m, f: _msprobe(m, f, "L0", "statistics"),
    "msprobe L1": lambda m, f: _msprobe(m, f, "L1"),
    "msit": _msit,
    "Polygraphy": _polygraphy,
    "torch.save, allclose": _torch_save,
    "torch DebugMode": _debug_mode,
}


# ---- comparing, where the tool has no command for it


def _compare_polygraphy(folder: Path, _options: dict[str, Any]) -> str:
    from polygraphy.comparator import Comparator, RunResults

    both = RunResults()
    for side in ("reference", "target"):
        both.extend(RunResults.load(str(folder / side / "0.json")))
    (iterations,) = Comparator.compare_accuracy(both)[0].values()
    return next((name for name, is_close in iterations[0].items() if not is_close), "")


def _compare_torch_save(folder: Path, _options: dict[str, Any]) -> str:
    import torch

    for path in sorted((folder / "reference").iterdir()):
        if not torch.allclose(torch.load(path), torch.load(folder / "target" / path.name)):
            return path.stem.partition(".")[2]
    return ""


def _compare_debug_mode(folder: Path, options: dict[str, Any]) -> str:
    """Its logs stay in memory, so both forwards are here, in one process."""
    import torch
    from torch.utils._debug_mode import DebugMode

    logs = []
    with torch.no_grad():
        for faulty in (False, True):
            model = build(options["shape"], faulty=faulty)
            with _debug_mode(model, folder) as forward:
                logs.append(forward(_tokens(options["shape"])))
    mismatches = DebugMode.check_hash_mismatches(*logs)
    return str(mismatches[0]["call"]) if mismatches else ""


COMPARE: dict[str, Callable[[Path, dict[str, Any]], str]] = {
    "Polygraphy": _compare_polygraphy,
    "torch.save, allclose": _compare_torch_save,
    "torch DebugMode": _compare_debug_mode,
}


# ---- jobs


def _tokens(shape: dict[str, int]) -> Any:
    """Those of both dumps."""
    import torch

    chance = torch.Generator().manual_seed(2)
    return torch.randint(0, shape["vocabulary"], (1, shape["tokens"]), generator=chance)


def _cost(tool: str, folder: Path, options: dict[str, Any]) -> None:
    """CPU seconds of a bare forward, of the first captured one and of those that follow."""
    import torch

    torch.set_num_threads(1)
    shape = options["shape"]
    model = build(shape, faulty=False)
    chance = torch.Generator().manual_seed(1)

    def seconds(forward: Callable[[Any], Any]) -> float:
        tokens = torch.randint(0, shape["vocabulary"], (1, shape["tokens"]), generator=chance)
        start = time.process_time()
        forward(tokens)
        return time.process_time() - start

    with torch.no_grad():
        for _ in range(2):
            seconds(model)
        bare = statistics.median(seconds(model) for _ in range(options["forwards"]))
        with LISTEN[tool](model, folder / "cost") as forward:
            first = seconds(forward)
            captured = statistics.median(seconds(forward) for _ in range(options["forwards"]))
    print(f"@@{json.dumps({'bare': bare, 'first': first, 'captured': captured})}")


def _dump(tool: str, folder: Path, options: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    shape, side = options["shape"], options["side"]
    model = build(shape, faulty=side == "target")
    with torch.no_grad(), LISTEN[tool](model, folder / side) as forward:
        forward(_tokens(shape))


def main() -> None:
    os.umask(0o027)  # msprobe and msit read no files that others can write
    job, tool, folder, options = sys.argv[1:]
    if job == "compare":
        print(f"@@{json.dumps({'named': COMPARE[tool](Path(folder), json.loads(options))})}")
    else:
        {"cost": _cost, "dump": _dump}[job](tool, Path(folder), json.loads(options))


if __name__ == "__main__":
    main()
