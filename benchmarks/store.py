"""Speed of the run format: writing small tensors against one .npy each, random access, opening 10^6
records, cost of an index row.

    python benchmarks/store.py [--json] [--dir /fast/disk] [--tensors 20000] [--records 1000000] [--rounds 3]

Rounds of the writers are interleaved; medians of process CPU time (what one core pays) and of wall
time. Files land in the page cache.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from whence import store
from whence.records import Call, Ref, RunInfo, Sketch, Statistics

STATISTICS = Statistics(4096, -3.1234567, 3.2345678, 0.0123456, 0.998877, 33.123456, 0, 0, 1)
SKETCH = Sketch(2**63 + 12345, 812.123, 0.1234, 3000.1234)


def tensors(count: int) -> list[np.ndarray]:
    """Float32 arrays of 1 to 64 KB; views of one buffer, so that reading them costs little."""
    random = np.random.default_rng(0)
    pool = random.integers(0, 256, 8 << 20, dtype=np.uint8)
    sizes = random.integers(1 << 10, 64 << 10, count) // 4 * 4
    starts = random.integers(0, pool.size - (64 << 10), count)
    return [pool[a : a + n] for a, n in zip(starts, sizes, strict=True)]


def write_store(path: Path, arrays: list[np.ndarray], digests: list[bytes]) -> None:
    """All arrays with statistics, sketch, hash and journal; index at close."""
    with store.Writer(store.create(path, RunInfo())) as writer:
        for data, digest in zip(arrays, digests, strict=True):
            writer.record("float32", (data.size // 4,), data, digest, STATISTICS, SKETCH)


def write_npy(path: Path, arrays: list[np.ndarray], digests: list[bytes]) -> None:
    """One file per tensor, nothing else."""
    path.mkdir()
    for number, data in enumerate(arrays):
        np.save(path / f"{number}.npy", data.view(np.float32))


WRITERS = {"store": write_store, "npy": write_npy}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def writers(where: Path, count: int, rounds: int) -> dict[str, float]:
    """Write rates, interleaved."""
    arrays = tensors(count)
    digests = [
        n.to_bytes(16, "little") for n in range(count)
    ]  # hashing is the capture's cost, see benchmarks of capture
    nbytes = sum(a.size for a in arrays)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WRITERS}
    for trial in range(rounds + 1):
        names = list(WRITERS)
        for name in names[trial % 2 :] + names[: trial % 2]:
            write = WRITERS[name]
            took = timed(
                lambda write=write, trial=trial, name=name: write(
                    where / f"{name}{trial}", arrays, digests
                )
            )
            if trial:  # the first round touches the machine's pages for the first time
                found[name].append(took)
            shutil.rmtree(where / f"{name}{trial}")
    result: dict[str, float] = {"write_bytes": nbytes}
    for name, took in found.items():
        cpu, wall = (statistics.median(t[k] for t in took) for k in (0, 1))
        result[f"{name}_mb_per_cpu_s"] = nbytes / cpu / 1e6
        result[f"{name}_mb_per_s"] = nbytes / wall / 1e6
        result[f"{name}_us_per_tensor"] = cpu / count * 1e6
    result["store_vs_npy"] = result["npy_us_per_tensor"] / result["store_us_per_tensor"]
    return result


def record_cost(where: Path, rounds: int) -> dict[str, float]:
    """CPU time of one record call: without elements, with 256 bytes, with elements stored before;
    and of one call.
    """
    data = np.zeros(256, np.uint8)
    digests = [n.to_bytes(16, "little") for n in range(20_000)]
    result: dict[str, list[float]] = {}
    for trial in range(rounds + 1):
        with store.Writer(store.create(where / f"cost{trial}", RunInfo())) as writer:

            def statistics_only(writer: store.Writer = writer) -> None:
                for digest in digests:
                    writer.record("float32", (64,), None, digest, STATISTICS, SKETCH)

            def small(writer: store.Writer = writer) -> None:
                for digest in digests:
                    writer.record("float32", (64,), data, digest, STATISTICS, SKETCH)

            def known(writer: store.Writer = writer) -> None:
                for digest in digests:
                    writer.record("float32", (64,), data, digest, STATISTICS, SKETCH)

            def calls(writer: store.Writer = writer) -> None:
                for n in range(len(digests)):
                    refs = (Ref("input.0", n), Ref("param.weight", 3), Ref("output.0", n))
                    writer.call(
                        Call(
                            n,
                            "layers.9.self_attn.q_proj",
                            "Net",
                            0,
                            n,
                            op_type="Linear",
                            refs=refs,
                            arguments={"a": 1},
                        )
                    )

            for work in (statistics_only, small, known, calls):
                cpu, _ = timed(work)
                if trial:
                    result.setdefault(work.__name__, []).append(cpu / len(digests) * 1e6)
        shutil.rmtree(where / f"cost{trial}")
    return {f"{name}_us": statistics.median(took) for name, took in result.items()}


def random_access(where: Path, count: int) -> dict[str, float]:
    """Open a run, then 200 tensors by number, one byte of each page touched."""
    arrays = tensors(count)
    write_store(where / "access", arrays, [xxhash.xxh3_128_digest(a) for a in arrays])
    picks = np.random.default_rng(1).integers(0, count, 200).tolist()

    def read() -> None:
        for pick in picks:
            run.array(pick).view(np.uint8)[::4096].sum()

    opened = [timed(lambda: store.open_run(where / "access"))[0] for _ in range(5)]
    run = store.open_run(where / "access")
    first, _ = timed(read)
    again = statistics.median(timed(read)[0] for _ in range(5))
    shutil.rmtree(where / "access")
    return {
        "open_ms": statistics.median(opened) * 1e3,
        "first_access_us": first / 200 * 1e6,
        "access_us": again / 200 * 1e6,
    }


def many(where: Path, count: int) -> dict[str, float]:
    """10^6 records and a third as many calls: close (the index), open with it and without, columns,
    structs.
    """
    run = store.create(where / "many", RunInfo())
    writer = store.Writer(run)
    for n in range(count):
        writer.record(
            "float32",
            (8, n % 512),
            None,
            n.to_bytes(16, "little"),
            STATISTICS,
            SKETCH,
            why="statistics only",
        )
        if n % 3 == 2:
            refs = (Ref("input.0", n - 2), Ref("param.weight", n - 1), Ref("output.0", n))
            writer.call(
                Call(
                    n // 3,
                    f"layers.{n % 800}.q_proj",
                    "Net",
                    n // 2400,
                    n // 3,
                    op_type="Linear",
                    refs=refs,
                )
            )
    close, _ = timed(writer.close)
    opened, opened_wall = timed(lambda: store.open_run(run))
    reader = store.open_run(run)
    columns, _ = timed(
        lambda: [
            reader.column(c)
            for c in ("hash", "dtype", "count", "scope", "step", "ref_slot", "ref_record")
        ]
    )
    some = min(50_000, len(reader.calls))
    structs, _ = timed(lambda: [reader.calls[i] for i in range(some)])
    (folder,) = run.glob("rank*")
    rows = count + count // 3
    sizes = {"journal_bytes_per_row": (folder / "journal.jsonl").stat().st_size / rows}
    sizes["index_bytes_per_row"] = (folder / "index.safetensors").stat().st_size / rows
    (folder / "index.safetensors").unlink()
    journal, journal_wall = timed(lambda: store.open_run(run))
    shutil.rmtree(run)
    return {
        "rows": rows,
        "index_us_per_row": close / rows * 1e6,
        "open_with_index_cpu_s": opened,
        "open_with_index_s": opened_wall,
        "open_from_journal_cpu_s": journal,
        "open_from_journal_s": journal_wall,
        "seven_columns_s": columns,
        "struct_us": structs / some * 1e6,
        **sizes,
    }


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dir", help="where to write (default: the temporary folder)")
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        where = Path(folder)
        result = {
            "load": os.getloadavg()[0],
            **writers(where, options.tensors, options.rounds),
            **record_cost(where, options.rounds),
            **random_access(where, options.tensors),
            **many(where, options.records),
        }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value:14.4g}" if isinstance(value, float) else f"{name:28} {value:14d}")


if __name__ == "__main__":
    main()
