"""What `whence probe` says of real families, and of violations planted in them.

    python benchmarks/probing.py                     # both
    python benchmarks/probing.py --families          # models as transformers makes them
    python benchmarks/probing.py --planted           # violations, none with a reference
    python benchmarks/probing.py --families --kind image
    python benchmarks/probing.py --attribution       # which operator rounds otherwise in a batch

Every architecture of four mappings of transformers that can be built from a tiny configuration is
probed with random weights, and so are models of torch alone. What is violated there is a false
alarm unless the table KNOWN below says why it is true.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections import Counter
from typing import Any

import _families
import _spreads
import _violations
import torch

import whence

SECONDS = 180
KNOWN = {
    ("convbert", "padding"): "a convolution over keys takes padding in",
    ("nystromformer", "padding"): "a convolution over values takes padding in",
    ("fnet", "padding"): "a Fourier transform mixes all positions, and no mask is read",
    ("funnel", "padding"): "pooling takes the last real position and a pad together",
    ("yoso", "padding"): "attention without a softmax: the mask does not take pads out",
    ("rwkv", "padding"): "attention_mask is not used: pads on the left enter the state",
    ("cpmant", "causality"): "attention is open both ways in what it calls context: all of it",
    ("cpmant", "padding"): "takes pads as the context, and reads no mask",
    ("fsmt", "causality"): "with use_cache, the default, the decoder makes no causal mask",
    ("fsmt", "chunking"): "the same",
    ("prophetnet", "causality"): "the stream of the next token but one reaches the logits",
    ("prophetnet", "padding"): "the same",
    ("prophetnet", "chunking"): "the same",
    **{
        (name, "chunking"): "generation counts positions from 0, the model from its pad on"
        for name in (
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "camembert",
            "data2vec-text",
        )
    },
    ("moshi", "chunking"): "the mask ignores the sliding window that its cache keeps to",
}


def main() -> int:
    """Run what is asked for, and print a line each and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--attribution", action="store_true")
    parser.add_argument("--kind", choices=[*_families.MAPPINGS, "torch"])
    parser.add_argument("--only", help="names that contain this")
    options = parser.parse_args()
    both = not (options.families or options.planted or options.attribution)
    torch.set_num_threads(1)
    wrong = 0
    if options.families or both:
        wrong += families(options.kind, options.only or "")
    if options.planted or both:
        wrong += planted(options.only or "")
    if options.attribution:
        wrong += attribution(options.only or "")
    return int(bool(wrong))


def families(kind: str | None, only: str) -> int:
    """Probe every family that can be built; returns how many false alarms there are."""
    counts: Counter[str] = Counter()
    held: Counter[tuple[str, str]] = Counter()
    for family in every_family(kind, only, counts):
        began = time.monotonic()
        try:
            with limited(SECONDS):
                result = whence.probe(family.model, family.inputs)
        except Exception as error:  # noqa: BLE001 - a family that fails is a line of the table
            counts["failed"] += 1
            print(f"FAILED {family.name}: {type(error).__name__}: {error}", flush=True)
            continue
        counts["probed"] += 1
        short = family.name.split(" ", 1)[1]
        for answer in result.answers:
            held[answer.property, answer.held] += 1
            if answer.held in ("violated", "cannot tell"):
                known = KNOWN.get((short, answer.property))
                word = answer.held if answer.held != "violated" else "true" if known else "FALSE"
                counts[word] += 1
                why = known or answer.why or answer.cause
                print(f"  {word} {family.name} {answer.property}: {why}", flush=True)
        print(f"{family.name} {result.status} {time.monotonic() - began:.1f} s", flush=True)
    print({" ".join(k): v for k, v in sorted(held.items())})
    print(dict(counts))
    return counts["FALSE"]


def every_family(kind: str | None, only: str, counts: Counter[str]) -> Any:
    """The families, one after the other; those that cannot be built are counted."""
    for of_kind in _families.MAPPINGS:
        if kind not in (None, of_kind):
            continue
        for name in _families.names(of_kind):
            if only not in name:
                continue
            try:
                with limited(SECONDS), torch.no_grad():
                    family = _families.family(of_kind, name)
                    family.model(**family.inputs)
            except Exception:  # noqa: BLE001 - many need inputs or packages of their own
                counts["not built"] += 1
                continue
            yield family
    if kind in (None, "torch"):
        yield from (f for f in _families.own() if only in f.name)


def planted(only: str) -> int:
    """Probe every planted violation; returns how many were missed or not named."""
    lists = {"set by": _violations.PLANTED, "held out": _violations.HELD_OUT}
    return sum(_planted(name, violations, only) for name, violations in lists.items())


def _planted(name: str, violations: list[_violations.Planted], only: str) -> int:
    counts: Counter[str] = Counter()
    for violation in violations:
        if only not in violation.name:
            continue
        family = _families.family(*violation.family)
        context = violation.plant(family.model) or contextlib.nullcontext()
        inputs = violation.inputs(family.inputs)
        with context:
            result = whence.probe(
                family.model, inputs, properties=(violation.property,), causal=violation.causal
            )
        seen, named = _violations.found(violation, result)
        word = "named" if named else "seen" if seen else "MISSED"
        counts[word] += 1
        cause = result[violation.property].cause
        print(f"{word} {violation.name} ({violation.family[1]}): {cause}", flush=True)
    print(name, dict(counts))
    return counts["MISSED"] + counts["seen"]


def attribution(only: str) -> int:
    """Ask where spreads by rounding come from; returns how many are not attributed rightly. On two
    threads: those of one are the variant.
    """
    torch.set_num_threads(2)
    lists = {"planted": _spreads.PLANTED, "as torch computes": _spreads.REAL}
    wrong = 0
    for name, spreads in lists.items():
        counts: Counter[str] = Counter()
        for spread in spreads:
            if only in spread.name:
                counts[_attributed(spread)] += 1
        print(name, dict(counts))
        wrong += sum(counts.values()) - counts["right"]
    return wrong


def _attributed(spread: _spreads.Spread) -> str:
    model, inputs = spread.model()
    answer = whence.probe(model, inputs, properties=(spread.property,))[spread.property]
    variants = [v for v in answer.variants if v.held == "within rounding" and v.first]
    largest = max(variants, key=lambda v: v.moved, default=None)
    word, place, size = "MISSED", "", ""
    if largest is not None and largest.first is not None:
        operator, scope = largest.first.operator, largest.first.scope
        is_right = spread.scope in scope and operator.startswith(spread.operators)
        word = "right" if is_right else "WRONG"
        place, size = f"{operator} in {scope}", f"{largest.ulp:.3g} ulp"
    shares = ", ".join(f"{s.operator} {100 * s.share:.0f} %" for s in answer.shares)
    print(f"{word} {spread.name}: {place}, {size}; {shares}", flush=True)
    return word


@contextlib.contextmanager
def limited(seconds: int) -> Any:
    """Raises TimeoutError where what is inside takes longer."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
