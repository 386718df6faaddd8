"""Does a comparison name the faults that it says it would have named, and no smaller ones?

    python benchmarks/power.py [--cases N] [--seed S] [--part i/n] [--json OUT] [--ablation]
                               [--rule replay|dumps|statistics]

Of a clean pair of runs, `Comparison.visible` and the numbers of each verdict say how large a fault
of each kind would have been named at each call. Here such faults are planted, at twice the stated
size and at a tenth of it, in a leaf drawn at random: inside the leaf's last operator, before the
result is rounded, so that the program stays what it was. Needs torch and transformers. Models are
built on the spot from transformers' configurations, with random weights. With --ablation: how many
faults of twice the size are named, and how many clean pairs flagged, without each rule. --rule:
what a comparison has, as for `faultbench.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import faultbench
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from whence.results import Comparison

KINDS = ("scale", "channel", "element", "noise")
FACTORS = {2.0: "twice", 0.1: "a tenth"}
_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 200,
}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaConfig": _DECODER,
    "Qwen3Config": {**_DECODER, "head_dim": 32},
    "PhiConfig": _DECODER,
    "GPTNeoXConfig": _SMALL,
    "Olmo2Config": _DECODER,
    "StableLmConfig": _DECODER,
    "BertConfig": _SMALL,
    "ModernBertConfig": {**_SMALL, "pad_token_id": 0, "local_attention": 8},
    "ViTConfig": {**_SMALL, "image_size": 32, "patch_size": 8},
}
# (reference's dtype and attention, target's)
SIDES = {
    "float32 against bfloat16": (("float32", "sdpa"), ("bfloat16", "sdpa")),
    "float32 against float16": (("float32", "eager"), ("float16", "sdpa")),
    "bfloat16, other attention": (("bfloat16", "eager"), ("bfloat16", "sdpa")),
    "float32, other attention": (("float32", "eager"), ("float32", "sdpa")),
}
Compare = Callable[[Path, Path], Comparison]
_LEAF = re.compile("Linear|Norm|Conv1D|GELU|SiLU|Activation")
_LAST_OPERATORS = {
    *("mm", "addmm", "bmm", "native_layer_norm", "gelu", "silu", "tanh", "convolution", "linear"),
    *("mul", "_fused_rms_norm"),
}


class Fault(TorchDispatchMode):
    """While a leaf runs, its last operator is computed in wider arithmetic, changed by a fault of
    this kind and relative size, and rounded: as a wrong kernel does.

    planted: how many results were changed.
    """

    def __init__(self, leaf: torch.nn.Module, kind: str, size: float, seed: int) -> None:
        super().__init__()
        self._leaf, self._kind, self._size = leaf, kind, size
        self._random = torch.Generator().manual_seed(seed)
        self._active, self.planted = False, 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Fault:
        self._hooks = [
            self._leaf.register_forward_pre_hook(lambda *_: self._switch(on=True)),
            self._leaf.register_forward_hook(lambda *_: self._switch(on=False)),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _switch(self, *, on: bool) -> None:
        self._active = on

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if not self._active or first is None or not self._is_last(func, args):
            return func(*args, **kwargs)
        wide = torch.float64 if first.dtype == torch.float32 else torch.float32
        widened = [
            a.to(wide) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        ]
        result = func(*widened, **kwargs)
        self.planted += 1
        if isinstance(result, tuple):
            others = (r.to(first.dtype) if r is not None else r for r in result[1:])
            return self._changed(result[0]).to(first.dtype), *others
        return self._changed(result).to(first.dtype)

    def _is_last(self, func: Any, args: Sequence[Any]) -> bool:
        name = func.overloadpacket.__name__
        if name != "mul":
            return name in _LAST_OPERATORS
        # Of a norm written out, the last product is that with its weight.
        weights = (a for a in args if isinstance(a, torch.Tensor) and a.dim() == 1)
        return "Norm" in type(self._leaf).__name__ and any(w.numel() > 8 for w in weights)

    def _changed(self, result: torch.Tensor) -> torch.Tensor:
        rms = result.pow(2).mean().sqrt()
        result = result.clone()
        if self._kind == "scale":
            return result * (1 + self._size)
        if self._kind == "channel":
            place = int(torch.randint(result.shape[-1], (1,), generator=self._random))
            result[..., place] += self._size * rms
        elif self._kind == "element":
            place = int(torch.randint(result.numel(), (1,), generator=self._random))
            result.view(-1)[place] += self._size * rms
        else:
            noise = torch.randn(result.shape, generator=self._random).to(result)
            result += self._size * rms * noise
        return result


def build(config: str, dtype: str, attention: str, seed: int) -> torch.nn.Module:
    """A model of transformers whose norms and biases are no ones and zeros."""
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(
        getattr(transformers, config)(**MODELS[config]), attn_implementation=attention
    ).eval()
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.1 if parameter.dim() == 1 else 0.05
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))
    return model.to(getattr(torch, dtype))


def inputs(model: torch.nn.Module, dtype: str, seed: int) -> dict[str, torch.Tensor]:
    random_ = torch.Generator().manual_seed(seed + 2)
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(2, 3, 32, 32, generator=random_)
        return {"pixel_values": pixels.to(getattr(torch, dtype))}
    return {"input_ids": torch.randint(3, 200, (2, 32), generator=random_)}


def capture(
    model: torch.nn.Module, dtype: str, path: Path, seed: int, fault: Fault | None = None
) -> None:
    context = fault if fault is not None else contextlib.nullcontext()
    with (
        torch.no_grad(),
        contextlib.redirect_stderr(io.StringIO()),
        whence.capture(model, str(path)),
        context,
    ):
        model(**inputs(model, dtype, seed))


def stated(result: Comparison, kind: str) -> dict[str, float]:
    """By module, how large a fault of this kind it would have named there."""
    sizes: dict[str, float] = {}
    modules = {row.pair: row.name for row in result.rows}
    for verdict in result.verdicts:
        size = verdict.numbers.get(f"visible_{kind}")
        if size is not None:
            sizes[modules[verdict.pair]] = size
    return sizes


def case(
    number: int, seed: int, rules: Sequence[str], compare: Compare
) -> Iterator[dict[str, Any]]:
    """A model, its sides, and for every kind a leaf: what was answered at both sizes; of `rules`,
    what is answered without each, at the larger size.
    """
    draw = random.Random(1000 * seed + number)
    config, sides = draw.choice(list(MODELS)), draw.choice(list(SIDES))
    (dtype, attention), (target_dtype, target_attention) = SIDES[sides]
    weights = draw.randrange(10**6)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("reference", "clean", "faulty")]
        capture(build(config, dtype, attention, weights), dtype, paths[0], weights)
        target = build(config, target_dtype, target_attention, weights)
        capture(target, target_dtype, paths[1], weights)
        clean = compare(paths[0], paths[1])
        told = {"model": config, "sides": sides}
        yield (
            told
            | {"kind": "clean", "status": clean.status}
            | {"flagged": _without(rules, paths[0], paths[1], _is_flagged)}
        )
        for kind, factor in itertools.product(KINDS, FACTORS):
            leaves = {
                name: size
                for name, size in stated(clean, kind).items()
                if name and _LEAF.search(type(target.get_submodule(name)).__name__)
            }
            if clean.status != "same" or not leaves:
                continue
            leaf = draw.choice(sorted(leaves))
            size = factor * leaves[leaf]
            fault = Fault(target.get_submodule(leaf), kind, size, weights)
            faulty = paths[2].with_name(f"{kind}{factor}")
            capture(target, target_dtype, faulty, weights, fault)
            if not fault.planted:
                continue
            result = compare(paths[0], faulty)
            named = [f.name for f in result.findings]

            def is_named(answer: Comparison, leaf: str = leaf) -> bool:
                return bool(answer.findings) and answer.findings[0].name == leaf

            yield told | {
                "without": _without(rules if factor > 1 else (), paths[0], faulty, is_named),
                "kind": kind,
                "factor": factor,
                "leaf": leaf,
                "size": size,
                "named": bool(named) and named[0] == leaf,
                "others": [name for name in named if name != leaf],
                "sentence": result.findings[0].sentence if named else "",
            }


def _is_flagged(answer: Comparison) -> bool:
    return answer.status != "same"


def _without(
    rules: Sequence[str], reference: Path, target: Path, of: Callable[[Comparison], bool]
) -> dict[str, bool]:
    """By rule, something about the answer without it; "" is the answer with all rules."""
    answers = {"": of(whence.compare(str(reference), str(target)))} if rules else {}
    for rule in rules:
        with faultbench.without(rule):
            answers[rule] = of(whence.compare(str(reference), str(target)))
    return answers


def ablation(rows: Sequence[Mapping[str, Any]]) -> str:
    """By rule: clean pairs flagged, and faults of twice the stated size named, by kind."""
    lines = [f"{'without':15} flagged  " + "  ".join(f"{kind:>9}" for kind in KINDS)]
    clean = [row["flagged"] for row in rows if row["kind"] == "clean"]
    for rule in clean[0]:
        cells = []
        for kind in KINDS:
            named = [r["without"][rule] for r in rows if r["kind"] == kind and r["factor"] > 1]
            cells.append(f"{sum(named):>3} of {len(named):>2}")
        flagged = sum(answer[rule] for answer in clean)
        lines.append(f"{rule or '(nothing)':15} {flagged:>2} of {len(clean)}  {'  '.join(cells)}")
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of faults that were named, by kind and size, and how often something else was."""
    lines = ["kind      size       planted  named  something else named"]
    counts: Counter[tuple[str, float, str]] = Counter()
    for row in rows:
        if row["kind"] == "clean":
            continue
        key = row["kind"], row["factor"]
        counts[*key, "planted"] += 1
        counts[*key, "named"] += row["named"]
        counts[*key, "others"] += bool(row["others"])
    for kind, factor in itertools.product(KINDS, FACTORS):
        planted = counts[kind, factor, "planted"]
        if planted:
            named = counts[kind, factor, "named"] / planted
            lines.append(
                f"{kind:9} {FACTORS[factor]:10} {planted:7}  {named:5.0%}  "
                f"{counts[kind, factor, 'others']:20}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="i/n: only every n-th case, from the i-th on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--rule", choices=("replay", "dumps", "statistics"), default="replay")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    part, parts = map(int, options.part.split("/"))
    rules = (*faultbench.EVIDENCE, *faultbench.KEEPS_BACK) if options.ablation else ()
    rule = faultbench.RULES[options.rule]
    rows = []
    for number in range(part, options.cases, parts):
        for row in case(number, options.seed, rules, lambda a, b: rule(a, b, lambda: None)):
            rows.append(row)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))
    if rules:
        print(ablation(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
