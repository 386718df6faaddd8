"""How often does rounding alone come as far as `chance` says? Expected against observed, over clean
pairs of runs.

    python benchmarks/calibration.py [--pairs N] [--seed S] [--part i/n] [--json OUT] [--svg FILE]

Of every comparison of a correct target the smallest `chance` of any output is taken: the share of
comparisons below x must not exceed x. The models and their sides are those of power.py. `--svg`
draws what `--json` holds, of this run and of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import power
import torch
import transformers

import whence
from whence.judge.noise_model import FALSE_ALARMS

STEPS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


def smallest(number: int, seed: int) -> dict[str, object]:
    """The rarest output of one comparison of a correct target, and what was compared."""
    draw = random.Random(100_003 * seed + number)
    config, sides = draw.choice(list(power.MODELS)), draw.choice(list(power.SIDES))
    weights = draw.randrange(10**6)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("reference", "target")]
        for path, (dtype, attention) in zip(paths, power.SIDES[sides], strict=True):
            model = power.build(config, dtype, attention, weights)
            power.capture(model, dtype, path, weights)
        result = whence.compare(*map(str, paths))
    chances = [v.numbers["chance"] for v in result.verdicts if "chance" in v.numbers]
    known = [chance for chance in chances if chance is not None]
    return {
        "model": config,
        "sides": sides,
        "status": result.status,
        "chance": min(known, default=1.0),
    }


def table(chances: Sequence[float]) -> str:
    lines = [f"{len(chances)} comparisons of correct targets", "chance  expected  observed"]
    for step in STEPS:
        observed = sum(chance <= step for chance in chances)
        lines.append(f"{step:<7} {step * len(chances):8.1f}  {observed:8}")
    return "\n".join(lines)


def draw(chances: Sequence[float], file: Path) -> None:
    """Observed share of comparisons below each chance, against that chance."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "whence"
    from matplotlib import pyplot

    ordered = sorted(chances)
    figure, axes = pyplot.subplots(figsize=(5, 4))
    shares = [(k + 1) / len(ordered) for k in range(len(ordered))]
    axes.plot([1e-6, 1], [1e-6, 1], color="0.6", label="observed as expected")
    axes.step([max(c, 1e-6) for c in ordered], shares, where="post", label="clean pairs")
    axes.axvline(FALSE_ALARMS, color="0.3", linestyle=":", label="limit")
    axes.set(xscale="log", yscale="log", xlim=(1e-6, 1), ylim=(1e-3, 1.2))
    axes.set_xlabel("chance of the rarest output, as stated")
    axes.set_ylabel("share of comparisons below")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="i/n: only every n-th pair, from the i-th on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    part, parts = map(int, options.part.split("/"))
    rows = []
    if options.json and options.json.exists():
        rows = [json.loads(line) for line in options.json.read_text().splitlines()]
    for number in range(part, options.pairs, parts):
        rows.append(smallest(number, options.seed))
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    chances = [row["chance"] for row in rows]
    print(table(chances))
    print(f"flagged: {sum(row['status'] != 'same' for row in rows)}")
    if options.svg:
        draw(chances, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
