# ruff: noqa: E402
"""Speed of the kernels, as ratios that hold on any machine: to the read ceiling of the same run,
and to numpy.

    python benchmarks/kernels.py [--json FILE] [--quick]

Every figure stands beside its goal (PERF.md section 6). GB/s count the bytes of both inputs. Ends
with 1 if a goal is missed.
"""

from __future__ import annotations

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # threads of BLAS spin on a busy machine and would flatter us

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from _rounds import interleave, machine, median, ratio

from whence import _kernels
from whence.frameworks import host
from whence.metrics import measure_many
from whence.metrics.measure import Options, _jobs, compiled_rows

MANY = 4 << 20
ROWS: list[dict[str, Any]] = []


def row(
    what: str,
    value: float,
    unit: str,
    goal: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """One line of the table. least, most: the goal as a number."""
    missed = (least is not None and value < least) or (most is not None and value > most)
    ROWS.append(
        {
            "what": what,
            "value": value,
            "unit": unit,
            "goal": goal,
            "met": None if least is most is None else not missed,
        }
    )
    print(f"{what:<58} {value:9.3g} {unit:<9} {goal:<10} {'MISSED' if missed else ''}", flush=True)


def twin(dtype: Any, n: int, seed: int = 0) -> tuple[Any, Any]:
    """A tensor and itself with relative noise of 1e-4 (1e-2 for 8 bits; integers off by one now and
    then).
    """
    rng = np.random.default_rng(seed)
    r = rng.standard_normal(n, dtype=np.float32)
    if np.dtype(dtype).kind == "i":
        a = (r * 20).astype(dtype)
        b = a.copy()
        b[::50] += 1
        return a, b
    noise = 1e-2 if np.dtype(dtype).itemsize == 1 else 1e-4
    return r.astype(dtype), (r * (1 + noise * rng.standard_normal(n, dtype=np.float32))).astype(
        dtype
    )


def kernel(r: Any, t: Any, tier: str) -> Callable[[], Any]:
    """The compiled pass alone on one pair, cut in 16 MB as measure_many does it."""
    return lambda: measure_many([(r, t)], tier=tier, kernels=True, threads=1)


def six(r: Any, t: Any) -> list[float]:
    """Six metrics the way a vendor tool takes them: checked for NaN and Inf, widened to float64,
    each from its own temporaries.

    cosine, largest and mean absolute error, largest and mean relative error (0 where the reference
    is), relative 2-norm.
    """
    a, b = r.astype(np.float64), t.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return []
    size_a, size_b = np.linalg.norm(a), np.linalg.norm(b)
    tiny = np.abs(a) <= np.finfo(np.float32).eps
    relative = np.where(tiny, 0, np.abs(b / np.where(tiny, 1, a) - 1))
    absolute = np.where(tiny, 0, np.abs(b - a))
    return [
        a @ b / (size_a * size_b),
        absolute.max(),
        absolute.mean(),
        relative.max(),
        relative.mean(),
        np.linalg.norm(b - a) / size_a,
    ]


def ceiling(rounds: int) -> None:
    r, t = twin(np.float32, MANY)
    same = r.copy()
    # Reads both and does next to nothing with them: what no comparison can be faster than.
    compare_memory = ctypes.CDLL(None).memcmp
    compare_memory.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    found: dict[str, Callable[[], Any]] = {
        "ceiling": lambda: compare_memory(r.ctypes.data, same.ctypes.data, r.nbytes),
        "same": lambda: measure_many([(r, same)], tier="same", kernels=True, threads=1),
    }
    kinds = [
        ("f32", np.float32),
        ("bf16", ml_dtypes.bfloat16),
        ("f64", np.float64),
        ("int8", np.int8),
        ("fp8 e4m3", ml_dtypes.float8_e4m3fn),
    ]
    for name, dtype in kinds:
        x, y = twin(dtype, MANY)
        for tier in ("core", "full"):
            found[f"{name} {tier}"] = kernel(x, y, tier)
    found["f32 identical"] = kernel(r, same, "full")
    found["f32 full, 1024 channels"] = kernel(r.reshape(-1, 1024), t.reshape(-1, 1024), "full")
    mixed = twin(ml_dtypes.bfloat16, MANY)[1]
    found["bf16 against f32 full"] = kernel(r, mixed, "full")
    times = interleave(found, rounds)
    top = 2 * r.nbytes / median(times, "ceiling")
    row("read ceiling (memcmp), 1 thread", top / 1e9, "GB/s")
    row("bit-identical or not (tier same)", 2 * r.nbytes / median(times, "same") / 1e9, "GB/s")
    width = {"f32": 8, "bf16": 4, "fp8 e4m3": 2, "int8": 2, "f64": 16, "bf16 against f32 full": 6}
    goals = {
        "f32 core": 0.20,
        "f32 full": 0.09,
        "f32 identical": 0.35,
        "bf16 core": 0.10,
        "bf16 full": 0.04,
        "fp8 e4m3 full": 0.10,
        "int8 full": 0.10,
    }
    for name in found:
        if name in ("ceiling", "same"):
            continue
        size = MANY * max((len(k), v) for k, v in width.items() if name.startswith(k))[1]
        speed = size / median(times, name)
        row(f"{name}, 4M elements", speed / 1e9, "GB/s")
        goal = goals.get(name)
        row(
            f"{name}, fraction of the ceiling",
            speed / top,
            "",
            f">= {goal}" if goal else "",
            least=goal,
        )


def against_numpy(rounds: int) -> None:
    """By size, the compiled calls alone (what the goals are set for) and all of measure_many with
    its results ("to results").
    """
    for n in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        count = max(1, (1 << 20) // n)
        few = min(count, 64)
        made = [twin(np.float32, n, seed) for seed in range(count)]
        calls = {}
        for tier in ("core", "full"):
            batch = list(_jobs(iter(made), [], tier))
            calls[tier] = _prepared(batch, Options(tier, 1e-3, 1e-5, True, ()))
        times = interleave(
            {
                "call full": calls["full"],
                "call core": calls["core"],
                "full": lambda made=made: measure_many(made, kernels=True, threads=1),
                "core": lambda made=made: measure_many(made, tier="core", kernels=True, threads=1),
                "numpy": lambda made=made, few=few: measure_many(made[:few], kernels=False),
                "six": lambda made=made, few=few: [six(r, t) for r, t in made[:few]],
            },
            rounds,
        )
        each = count / few
        row(
            f"numpy, same metrics / full, {n} elements",
            ratio(times, "numpy", "call full") * each,
            "x",
            ">= 15",
            least=15,
        )
        row(
            f"numpy, six metrics / full, {n} elements",
            ratio(times, "six", "call full") * each,
            "x",
            ">= 2.5",
            least=2.5,
        )
        row(
            f"numpy, six metrics / core, {n} elements", ratio(times, "six", "call core") * each, "x"
        )
        row(
            f"numpy, same metrics / full to results, {n} elements",
            ratio(times, "numpy", "full") * each,
            "x",
        )
        row(
            f"numpy, six metrics / full to results, {n} elements",
            ratio(times, "six", "full") * each,
            "x",
        )
        row(
            f"numpy, six metrics / core to results, {n} elements",
            ratio(times, "six", "core") * each,
            "x",
        )


def small(rounds: int) -> None:
    """10 000 pairs of 4 KB: the compiled call, and all of measure_many with its results."""
    base = [twin(np.float32, 1024, seed) for seed in range(500)]
    made = [(r.copy(), t.copy()) for _ in range(20) for r, t in base]
    jobs = {
        tier: [list(_jobs(iter(made[k : k + 1000]), [], tier)) for k in range(0, 10000, 1000)]
        for tier in ("core", "full")
    }
    options = {tier: Options(tier, 1e-3, 1e-5, True, ()) for tier in jobs}
    meta = {tier: [_prepared(batch, options[tier]) for batch in jobs[tier]] for tier in jobs}
    found: dict[str, Callable[[], Any]] = {
        f"call {tier}": lambda tier=tier: [call() for call in meta[tier]] for tier in jobs
    }
    found |= {
        f"all {tier}": lambda tier=tier: measure_many(made, tier=tier, kernels=True, threads=1)
        for tier in ("same", "core", "full")
    }
    found["six"] = lambda: [six(r, t) for r, t in made[:1000]]
    found["numpy"] = lambda: measure_many(made[:300], kernels=False)
    times = interleave(found, rounds)
    row(
        "10k x 4 KB, batched call, full",
        median(times, "call full") * 100,
        "us/pair",
        "<= 4",
        most=4,
    )
    row(
        "10k x 4 KB, batched call, core",
        median(times, "call core") * 100,
        "us/pair",
        "<= 2",
        most=2,
    )
    for tier in ("same", "core", "full"):
        row(
            f"10k x 4 KB, measure_many with its results, {tier}",
            median(times, f"all {tier}") * 100,
            "us/pair",
        )
    row(
        "numpy loop, six metrics / batched call, full",
        ratio(times, "six", "call full") * 10,
        "x",
        ">= 5",
        least=5,
    )
    row(
        "numpy loop, same metrics / measure_many full",
        ratio(times, "numpy", "all full") * 10000 / 300,
        "x",
    )


def _prepared(batch: list[Any], options: Any) -> Callable[[], None]:
    """One batched call with its table and result rows ready."""
    keep = compiled_rows(batch, options)
    table = np.array(
        [
            (
                j.reference.ctypes.data,
                j.target.ctypes.data,
                j.reference.size,
                j.r_type.code,
                j.t_type.code,
                0,
                0,
                0,
                j.path,
            )
            for j in batch
        ],
        dtype=np.int64,
    )

    def call() -> None:
        _kernels.needed().compare(
            table.ctypes.data,
            len(batch),
            2 if options.tier == "full" else 1,
            options.rtol,
            options.atol,
            _kernels.THRESHOLDS.ctypes.data,
            keep.floats.ctypes.data,
            keep.ints.ctypes.data,
            keep.histogram.ctypes.data,
        )

    return call


def statistics(rounds: int) -> None:
    found: dict[str, Callable[[], Any]] = {}
    sizes = {}
    for name, dtype in (
        ("float32", np.float32),
        ("bfloat16", ml_dtypes.bfloat16),
        ("int8", np.int8),
        ("float64", np.float64),
    ):
        raw = twin(dtype, MANY)[0].view(np.uint8)
        found[name] = lambda raw=raw, name=name: host.statistics(raw, name)
        sizes[name] = raw.size
    tiny = twin(np.float32, 1024)[0].view(np.uint8)
    address = tiny.ctypes.data

    def repeat(work: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(10000):
                work(*arguments)

        return loop

    found["tiny"] = repeat(host.statistics, tiny, "float32")
    found["at"] = repeat(host.statistics_at, address, 4096, "float32")
    found["digest"] = repeat(host.digest_at, address, 4096)
    times = interleave(found, rounds)
    for name, size in sizes.items():
        goal = 10 if name == "float32" else None
        row(
            f"statistics and sketch, {name}",
            size / median(times, name) / 1e9,
            "GB/s",
            f">= {goal}" if goal else "",
            least=goal,
        )
    row("statistics of 4 KB, from an array", median(times, "tiny") * 100, "us", "<= 3", most=3)
    row("statistics of 4 KB, by address", median(times, "at") * 100, "us", "<= 3", most=3)
    row("digest of 4 KB, by address", median(times, "digest") * 100, "us")


def start_up() -> None:
    """CPU seconds of whole processes."""
    compare = (
        "import numpy as np; from whence.metrics import measure_many;x = np.ones(1000, "
        "np.float32); measure_many([(x, x + 1)], kernels={})"
    )

    def spent(code: str, times: int, **environment: str) -> float:
        found = []
        for _ in range(times):
            before = os.times()
            subprocess.run(
                [sys.executable, "-c", code],
                check=True,
                env={**os.environ, **environment},
                stderr=subprocess.DEVNULL,
            )
            after = os.times()
            found.append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
        return sorted(found)[len(found) // 2]

    row("start-up: import whence.metrics", spent("import whence.metrics", 5), "s")
    row("start-up: first comparison by numpy", spent(compare.format(False), 5), "s")
    row(
        "start-up: first comparison by the kernels",
        spent(compare.format(True), 5),
        "s",
        "<= 0.7",
        most=0.7,
    )
    extension = _kernels.needed().__file__
    row("compiled kernels on disk", Path(str(extension)).stat().st_size / 1e6, "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--quick", action="store_true", help="three rounds instead of seven, no start-up"
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else 7
    about = machine()
    print(
        f"{about['processor']}, {about['cores']} cores, load {about['load']}; "
        f"kernels {_kernels.about()}\n"
    )
    ceiling(rounds)
    against_numpy(rounds)
    small(rounds)
    statistics(rounds)
    if not options.quick:
        start_up()
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": ROWS}, indent=1))
    return int(any(r["met"] is False for r in ROWS))


if __name__ == "__main__":
    sys.exit(main())
