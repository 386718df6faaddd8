"""What `whence probe` says of numeric health, and whether its precision tables can be followed.

    python benchmarks/precision.py                       # all of it
    python benchmarks/precision.py --plans               # plans, followed by code of its own
    python benchmarks/precision.py --real                # the same with trained weights
    python benchmarks/precision.py --health              # planted losses, and families without any
    python benchmarks/precision.py --only llama

A plan is followed by plain torch: its modules are replaced by copies in the narrower type, made
here and not by the code that made the plan. The mixed model is run on the inputs that the plan was
made with, and on others that it never saw. A check passes where the outputs move by no more than
was predicted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

import _families
import _following
import _ill_conditioned
import probing
import torch

import whence
from whence.workflows.probe.torch.health import asking

BUDGETS = {"bfloat16": 4e-3, "float16": 5e-4, "float8_e4m3fn": 4e-2, "int8": 1e-2}
"""About what all modules together do to a tiny transformer: some may go, some may not."""
COLLAPSED = {"image mobilevit": "with these random weights its logits are 1e-41"}
"""Families whose losses are true."""
UNSEEN = 5
"""Inputs that a plan never saw, for each check."""
SET_BY = {
    "decoder": (
        "llama", "mixtral", "gpt2", "mamba", "bloom", "qwen3_moe", "mistral", "gemma2", "phi",
        "opt", "gpt_neox", "falcon", "mamba2", "rwkv", "olmo2", "stablelm", "qwen2_moe", "cohere",
        "gptj", "phimoe",
    ),
    "encoder": ("bert", "deberta", "roberta", "albert", "electra", "distilbert", "convbert"),
    "encoder-decoder": ("t5", "bart", "mt5", "pegasus", "marian", "led"),
    "image": (
        "vit", "resnet", "swin", "deit", "convnext", "beit", "mobilenet_v2", "dinov2", "poolformer",
        "regnet",
    ),
}  # fmt: skip
"""Families that the rules were set with, beside those of torch alone."""
HELD_OUT = {
    "decoder": (
        "qwen3", "granite", "starcoder2", "codegen", "biogpt", "xglm", "gpt_neo", "olmoe",
        "nemotron", "glm", "persimmon", "gpt_oss",
    ),
    "encoder": ("mpnet", "camembert", "rembert", "squeezebert", "ernie", "layoutlm"),
    "encoder-decoder": ("blenderbot", "m2m_100", "longt5", "bigbird_pegasus", "plbart"),
    "image": (
        "swinv2", "mobilenet_v1", "segformer", "efficientnet", "focalnet", "cvt", "pvt", "levit",
        "convnextv2",
    ),
}  # fmt: skip


def main() -> int:
    """Run what is asked for; 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plans", "real", "health"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--texts", type=int, default=1, help="texts that a real plan is made with")
    options = parser.parse_args()
    every = not (options.plans or options.real or options.health)
    torch.set_num_threads(1)
    wrong = 0
    if options.health or every:
        wrong += health(options.only)
    if options.plans or every:
        wrong += plans(options.only)
    if options.real or every:
        wrong += real(options.texts, options.only)
    return int(bool(wrong))


def unseen(inputs: dict[str, Any], number: int) -> dict[str, Any]:
    """Inputs of the same kind, drawn here: other ids of the vocabulary, other pixels."""
    generator = torch.Generator().manual_seed(9000 + number)
    out = {}
    for name, value in inputs.items():
        if "mask" in name:
            out[name] = value
        elif value.is_floating_point():
            out[name] = torch.randn(value.shape, generator=generator)
        else:
            out[name] = torch.randint(3, 90, value.shape, generator=generator)
    return out


class Tally:
    """Counts checks, and those that would have failed with less in the prediction."""

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, Counter()

    def check(self, title: str, model: Any, inputs: Any, plan: Any, others: list[Any]) -> None:
        """Follow a plan, on its own inputs and on others."""
        if not plan.modules:
            self.counts["nothing fits"] += 1
            return
        mixed = _following.followed(model, plan)
        try:
            errors = [_following.error(model, mixed, call) for call in (inputs, *others)]
        except RuntimeError as problem:  # code that asks for the dtype of a module that was cast
            self.counts["does not run with modules cast for good"] += 1
            print(f"  not followed {title} {plan.to}: {problem}"[:150], flush=True)
            return
        worst = max(errors)
        alone = 1.0 * plan.quadrature
        for key, limit in (
            ("predicted", plan.predicted),
            ("without margin and correction", alone),
            ("without margin", alone * plan.correction),
            ("without correction", alone * plan.margin),
        ):
            self.counts[f"{key}: same inputs"] += errors[0] <= limit
            self.counts[f"{key}: all inputs"] += worst <= limit
        over = [c for c, e in zip((inputs, *others), errors, strict=True) if e > plan.predicted]
        chose = [_following.choices_changed(model, mixed, call) for call in over]
        other_choice = bool(chose) and all(n > plan.decided for n in chose)
        self.counts["exceeded where the model chose otherwise, as the plan says"] += other_choice
        self.counts["checks"] += 1
        self.counts["modules"] += len(plan.modules)
        self.counts["of modules"] += len(plan.modules) + len(plan.keep)
        self.counts["shrunk"] += bool(plan.shrunk)
        word = "holds" if not over else "other choice" if other_choice else "EXCEEDED"
        print(
            f"  {word} {title} {plan.to}: {len(plan.modules)} of "
            f"{len(plan.modules) + len(plan.keep)} modules, predicted {plan.predicted:.2g}, "
            f"same inputs {errors[0]:.2g}, others at most {max(errors[1:], default=0):.2g}",
            flush=True,
        )

    @property
    def missed(self) -> int:
        """Checks that moved the outputs by more than was predicted."""
        explained = self.counts["exceeded where the model chose otherwise, as the plan says"]
        return self.counts["checks"] - self.counts["predicted: all inputs"] - explained


def plans(only: str) -> int:
    """Plans of every family of both lists, followed; returns how many are exceeded."""
    wrong = 0
    for name, families in (("set by", SET_BY), ("held out", HELD_OUT)):
        tally = Tally(name)
        began = time.monotonic()
        for family in _listed(families, name, only):
            for to, budget in BUDGETS.items():
                _plan(tally, family, to, budget)
        print(name, dict(tally.counts), f"{time.monotonic() - began:.0f} s", flush=True)
        wrong += tally.missed
    return wrong


def _listed(families: dict[str, tuple[str, ...]], name: str, only: str) -> Any:
    if name == "set by":
        yield from (f for f in _families.own() if only in f.name)
    for kind, names in families.items():
        for one in names:
            if only in one:
                try:
                    with torch.no_grad():
                        family = _families.family(kind, one)
                        family.model(**family.inputs)
                    yield family
                except Exception as problem:  # noqa: BLE001 - a family that this release lacks
                    print(f"  not built {kind} {one}: {problem}"[:120], flush=True)


def _plan(tally: Tally, family: Any, to: str, budget: float) -> None:
    answer = whence.probe(
        family.model, family.inputs, properties=["precision"], to=[to], budget=budget
    )["precision"]
    if answer.held != "measured":
        tally.counts[answer.held] += 1
        print(f"  {answer.held} {family.name} {to}: {answer.why}", flush=True)
        return
    others = [unseen(family.inputs, number) for number in range(UNSEEN)]
    plan = answer.precision.plans[0]
    tally.check(family.name, family.model, family.inputs, plan, others)


# ---- trained weights

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome, and the largest city of Japan",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "Dear Sir or Madam, I am writing to complain about the service that I received last week at",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "Water boils at a lower temperature on a mountain because the pressure of the air",
)
REAL_BUDGETS = {"bfloat16": 1e-2, "float16": 1e-3, "float8_e4m3fn": 5e-2, "int8": 5e-2}


def real(known: int, only: str) -> int:
    """SmolLM2-135M with its weights: plans made with so many known texts, checked on the others.
    only: part of the type's name.
    """
    from whence.demo import torch_smollm2

    model, tokenizer = torch_smollm2.load()
    texts = [dict(tokenizer(text, return_tensors="pt")) for text in TEXTS]
    tally = Tally("SmolLM2-135M")
    for to, budget in ((t, b) for t, b in REAL_BUDGETS.items() if only in t):
        began = time.monotonic()
        answer = whence.probe(
            model,
            texts[0],
            properties=["precision"],
            to=[to],
            budget=budget,
            others=texts[1:known],
        )["precision"]
        plan = answer.precision.plans[0]
        print(f"{to}: {answer.precision.runs} runs, {time.monotonic() - began:.0f} s, {plan.why}")
        for row in answer.precision.rows[to][:4]:
            print(f"    {row.module} {row.error} {row.why}")
        tally.check(tally.name, model, texts[0], plan, texts[known:])
    print(tally.name, dict(tally.counts), flush=True)
    return tally.missed


# ---- numeric health


def health(only: str) -> int:
    """Planted losses that are missed, healthy forms and families that are reported."""
    wrong = 0
    lists = {"set by": "PLANTED", "held out": "HELD_OUT", "healthy": "HEALTHY"}
    for name, attribute in lists.items():
        counts: Counter[str] = Counter()
        for planted in getattr(_ill_conditioned, attribute):
            if only not in planted.name:
                continue
            model, inputs = planted.make()
            answer = whence.probe(model, inputs, properties=["health"])["health"]
            word = _word(planted, answer)
            counts[word] += 1
            first = answer.findings[0].meaning if answer.findings else ""
            print(f"  {word} {planted.name}: {first}", flush=True)
        print(name, dict(counts), flush=True)
        wrong += counts["MISSED"] + counts["FALSE"]
    return wrong + _healthy_families(only)


def _word(planted: Any, answer: Any) -> str:
    if not planted.symptom:
        return "FALSE" if answer.findings else "silent"
    hits = [
        f
        for f in answer.findings
        if f.symptom == planted.symptom
        and planted.operator in f.first.operator
        and planted.scope in f.first.scope
    ]
    return "named" if hits else "MISSED"


def _healthy_families(only: str) -> int:
    """Every family of `_families` as transformers makes it."""
    counts: Counter[str] = Counter()
    for family in probing.every_family(None, only, counts):
        try:
            with probing.limited(probing.SECONDS):
                answer = whence.probe(family.model, family.inputs, properties=["health"])["health"]
        except Exception as problem:  # noqa: BLE001 - a line of the table
            counts["failed"] += 1
            print(f"  failed {family.name}: {type(problem).__name__}: {problem}", flush=True)
            continue
        known = COLLAPSED.get(family.name) if answer.findings else None
        counts["true" if known else answer.held] += 1
        counts["infinities that reach no output"] += any("infinities" in n for n in answer.notes)
        counts["reported, were losses not put into a run"] += _without_effects(family)
        if answer.findings or answer.why:
            words = known or answer.cause or answer.why
            print(f"  {answer.held} {family.name}: {words}", flush=True)
    print("families", dict(counts), flush=True)
    return counts["unhealthy"] + counts["violated"]


def _without_effects(family: Any) -> bool:
    """Would a family be reported if losses were, whatever the outputs see of them?"""
    limit, asking.MATTERS = asking.MATTERS, 0.0
    try:
        answer = whence.probe(family.model, family.inputs, properties=["health"])["health"]
    finally:
        asking.MATTERS = limit
    return bool(answer.findings)


if __name__ == "__main__":
    sys.exit(main())
