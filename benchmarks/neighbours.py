"""The rules of tools of 2026 and of whence, on the same captures of the same pairs.

    python benchmarks/neighbours.py [--seeds 3] [--verl PATH]

Pairs of a small llama with random weights, float32 as the reference: correct ones (bfloat16,
float16, fused attention) and ones with a fault planted in a leaf module. Rules, as read in the code
of the tools, applied to leaf modules with one input:

    chisel, isolated       the module's own operators, run on the target's inputs, against what the
                           target made: flagged where Pearson's correlation is below 0.99
    chisel, accumulated    the reference run's output against the target's, by the same limit
    torchtitan             L1 norms of outputs in float64, flagged where they differ by more than
                           1e-8 relatively (tools/compare_numerics.py)
    verl                   probabilities of the next tokens, rollout against actor: largest
                           difference and correlation; it has no limit (utils/debug/metrics.py)

verl's figures come from its own function where --verl names the folder that `pip install --no-deps
--target PATH verl tensordict ray msgpack ...` made.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import whence

PCC = 0.99
HASH = 1e-8
KINDS = ("scale", "weight", "row", "eps", "bias", "channel", "stale", "constant")
TOKENS = 24


class Pair(NamedTuple):
    """site: the module that has the fault; "" for a correct pair."""

    name: str
    site: str
    run: Path
    log_probs: torch.Tensor


class Outcome(NamedTuple):
    flagged: bool
    right: bool


def model(seed: int, attention: str = "eager") -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).eval()


def capture(model: Any, tokens: torch.Tensor, folder: Path, fault: str = "") -> torch.Tensor:
    """Capture one forward pass; gives the log probabilities of the tokens that came next."""
    with whence.capture(model, folder, inject=fault), torch.no_grad():
        logits = model(tokens, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def sites(model: Any, kind: str) -> list[str]:
    """Leaves with one input that can have this fault."""
    leaves = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or "Norm" in type(module).__name__
    ]
    linear = kind in ("weight", "row", "bias")
    return [
        name
        for name, module in leaves
        if isinstance(module, torch.nn.Linear) is (linear or kind in ("stale", "constant"))
        or kind in ("scale", "channel")
    ]


def pairs(seed: int, folder: Path) -> tuple[Any, Path, torch.Tensor, list[Pair]]:
    """The reference and its run, then every target."""
    reference, out = model(seed), []
    tokens = torch.randint(0, 500, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    first = capture(reference, tokens, folder / "reference")
    correct = {
        "bfloat16": copy.deepcopy(reference).bfloat16(),
        "float16": copy.deepcopy(reference).half(),
        "fused attention": model(seed, "sdpa"),
        "fused attention, bfloat16": model(seed, "sdpa").bfloat16(),
    }
    for name, target in correct.items():
        run = folder / name.replace(" ", "-")
        out.append(Pair(name, "", run, capture(target, tokens, run)))
    random = np.random.default_rng(seed)
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            target = copy.deepcopy(reference).to(dtype)
            site = str(random.choice(sites(target, kind)))
            run = folder / f"{kind}-{dtype}"
            try:
                made = capture(target, tokens, run, f"{kind}@{site}")
            except whence.WhenceError as error:
                print(f"  {kind} at {site}: {error}", file=sys.stderr)
                continue
            out.append(Pair(f"{kind}, {dtype}", site, run, made))
    return reference, folder / "reference", first, out


def elements(run: Any, place: str) -> NDArray[np.float64]:
    return np.asarray(run[place], np.float64)


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def chisel(
    reference: Any, leaves: list[str], first: Any, run: Any
) -> tuple[list[float], list[float]]:
    """Correlations of every leaf: isolated, accumulated."""
    isolated, accumulated = [], []
    for name in leaves:
        given = torch.from_numpy(elements(run, f"{name}:input.0"))
        made = elements(run, f"{name}:output.0")
        module = copy.deepcopy(reference.get_submodule(name)).double()
        given = given.long() if isinstance(module, torch.nn.Embedding) else given
        with torch.no_grad():
            right = module(given).numpy().astype(np.float64)
        isolated.append(correlation(right, made))
        accumulated.append(correlation(elements(first, f"{name}:output.0"), made))
    return isolated, accumulated


def torchtitan(leaves: list[str], first: Any, run: Any) -> list[float]:
    """Relative differences of the L1 norms of every leaf's output."""
    out = []
    for name in leaves:
        a, b = (float(np.abs(elements(r, f"{name}:output.0")).sum()) for r in (first, run))
        out.append(abs(a - b) / max(a, b, 1e-30))
    return out


def verl(rollout: torch.Tensor, actor: torch.Tensor) -> dict[str, float]:
    """What verl logs of such a batch, by its own function where it is installed."""
    try:
        from tensordict import TensorDict
        from verl.protocol import DataProto
        from verl.utils.debug.metrics import calculate_debug_metrics
    except ImportError:
        a, b = rollout.exp().ravel(), actor.exp().ravel()
        both = torch.corrcoef(torch.stack([a, b]))
        return {
            "training/rollout_probs_diff_max": float((a - b).abs().max()),
            "training/rollout_actor_probs_pearson_corr": float(both[0, 1]),
        }
    batch = TensorDict(
        {
            "rollout_log_probs": rollout,
            "old_log_probs": actor,
            "response_mask": torch.ones_like(rollout, dtype=torch.long),
            "responses": torch.zeros_like(rollout, dtype=torch.long),
        },
        batch_size=[len(rollout)],
    )
    return dict(calculate_debug_metrics(DataProto(batch=batch)))


def named(leaves: list[str], wrong: list[bool], site: str) -> Outcome:
    """The first leaf in order is what such a table names."""
    first = next((name for name, bad in zip(leaves, wrong, strict=True) if bad), "")
    return Outcome(bool(first), first == site)


def leaves_in_order(reference: Any, first: Any) -> list[str]:
    """Leaf modules that have one input, as they ran."""
    names = [
        name
        for name, module in reference.named_modules()
        if not list(module.children()) and "rotary" not in name and "act_fn" not in name
    ]
    order = {call.scope: i for i, call in reversed([*enumerate(first.calls)])}
    return sorted(names, key=lambda name: order[name])


def outcomes(reference: Any, place: Path, pair: Pair) -> dict[str, Outcome]:
    """What each rule that has a limit says of a pair."""
    first, run = whence.open_run(place), whence.open_run(pair.run)
    leaves = leaves_in_order(reference, first)
    isolated, accumulated = chisel(reference, leaves, first, run)
    hashes = torchtitan(leaves, first, run)
    found = whence.compare(place, pair.run)
    return {
        "chisel, isolated": named(leaves, [c < PCC for c in isolated], pair.site),
        "chisel, accumulated": named(leaves, [c < PCC for c in accumulated], pair.site),
        "torchtitan": named(leaves, [d > HASH for d in hashes], pair.site),
        "whence": Outcome(
            found.status == "different",
            bool(found.findings) and found.findings[0].name == pair.site,
        ),
    }


def main(arguments: argparse.Namespace) -> None:
    if arguments.verl:
        sys.path.insert(0, arguments.verl)
    rules: dict[str, list[tuple[str, Outcome]]] = {}
    probabilities: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            reference, place, log_probs, made = pairs(seed, Path(folder))
            for pair in made:
                for rule, result in outcomes(reference, place, pair).items():
                    rules.setdefault(rule, []).append((pair.site, result))
                probabilities[bool(pair.site)].append(verl(log_probs, pair.log_probs))
    for rule, results in rules.items():
        clean = [result for site, result in results if not site]
        faulty = [result for site, result in results if site]
        print(
            f"{rule:20} correct pairs flagged {sum(r.flagged for r in clean)} of {len(clean)}; "
            f"faults flagged {sum(r.flagged for r in faulty)}, "
            f"named first {sum(r.right for r in faulty)} of {len(faulty)}"
        )
    for faulty, logged in probabilities.items():
        for name in (
            "training/rollout_probs_diff_max",
            "training/rollout_actor_probs_pearson_corr",
        ):
            figures = sorted(entry[name] for entry in logged)
            middle = figures[len(figures) // 2]
            print(
                f"{'faults' if faulty else 'correct'}: {name} {figures[0]:.3g} to "
                f"{figures[-1]:.3g}, median {middle:.3g}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--verl", default="")
    main(parser.parse_args())
