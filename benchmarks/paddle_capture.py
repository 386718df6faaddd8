"""What capturing a Paddle predictor costs per tensor, beside a hook written by hand that copies
with numpy and takes an md5.

    python benchmarks/paddle_capture.py [--json FILE] [--rounds 7]

A Llama-like program of 6 layers in PIR, oneDNN off, 1 x 16 tokens; one thread. Variants run in turn
within a round, each beside a bare run of its own round; figures are medians over the rounds, of the
CPU time of the thread that calls the predictor, in which operators and hooks run. Time of the
process would count a worker of Paddle's, which frees tensors and spins while it waits: the longer
any hook takes, the longer it spins, on another core. Every step has other tokens. "small" has
tensors of some kilobytes, where the cost of a call counts; "large" of some hundred, where hashing,
statistics and writing do. "copy" is a hook that copies every output and nothing else; "to a file"
one that writes the copies to a file beside the run, as whence does: how fast a fresh file takes
them is up to the system.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import whence

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "capture"))

STEPS = 10


def exported(folder: Path, size: int) -> Path:
    """The program of a model of so many channels."""
    import paddle
    import paddle_models

    model = paddle_models.layers()["model"](size=size, heads=4, blocks=6)
    model.eval()
    spec = [paddle.static.InputSpec([None, None], "int64", name="ids")]
    path = folder / f"model{size}"
    paddle.jit.save(paddle.jit.to_static(model, input_spec=spec, full_graph=True), str(path))
    return path


def predictor(path: Path) -> Any:
    """A fresh predictor: hooks cannot be taken off again."""
    from paddle.inference import Config, create_predictor

    config = Config(f"{path}.json", f"{path}.pdiparams")
    config.disable_glog_info()
    config.disable_mkldnn()
    config.set_cpu_math_library_num_threads(1)
    return create_predictor(config)


def run(made: Any, ids: Any) -> None:
    ids += 1
    ids %= 64
    made.get_input_handle("ids").copy_from_cpu(ids)
    made.run()


def spent(action: Callable[[], None]) -> float:
    """Seconds of CPU time of this thread for a run, of several."""
    began = time.thread_time()
    for _ in range(STEPS):
        action()
    return (time.thread_time() - began) / STEPS


def by_hand(op: str, name: str, tensor: Any) -> None:
    hashlib.md5(tensor.numpy().tobytes()).hexdigest()


def copying(op: str, name: str, tensor: Any) -> None:
    tensor.numpy().copy()


def measured(path: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Medians: seconds a run, tensors a run, and microseconds a tensor over the bare run."""
    ids = np.arange(16).reshape(1, 16).astype("int64")
    count = [0]
    bare, hand, copy = predictor(path), predictor(path), predictor(path)
    hand.register_output_hook(by_hand)
    copy.register_output_hook(copying)
    counting = predictor(path)
    counting.register_output_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    run(counting, ids)
    times: dict[str, list[float]] = {
        k: [] for k in ("bare", "by hand", "copy", "to a file", "whence", "stats")
    }
    for _ in range(rounds):
        times["bare"].append(spent(lambda: run(bare, ids)))
        times["by hand"].append(spent(lambda: run(hand, ids)))
        times["copy"].append(spent(lambda: run(copy, ids)))
        kept = predictor(path)
        with (folder / "copies").open("wb", buffering=1 << 20) as file:
            kept.register_output_hook(
                lambda op, name, tensor, file=file: file.write(tensor.numpy())
            )
            run(kept, ids)
            times["to a file"].append(spent(lambda kept=kept: run(kept, ids)))
        (folder / "copies").unlink()
        for name, keep in (("whence", "full"), ("stats", "stats")):
            made = predictor(path)
            with whence.capture(made, folder / "run", keep=keep, force=True):
                run(made, ids)  # the first step has all parameters
                times[name].append(spent(lambda made=made: run(made, ids)))
            shutil.rmtree(folder / "run")
    median = {name: statistics.median(found) for name, found in times.items()}
    tensors = count[0]
    each = {
        name: (median[name] - median["bare"]) / tensors * 1e6 for name in median if name != "bare"
    }
    return {
        "bare_ms": median["bare"] * 1e3,
        "tensors": tensors,
        **{f"{name}_us": value for name, value in each.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    result = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, size in (("small", 32), ("large", 256)):
            result[label] = found = measured(exported(folder, size), folder, given.rounds)
            us = {
                kind: found[f"{kind}_us"]
                for kind in ("copy", "to a file", "by hand", "whence", "stats")
            }
            print(
                f"{label}: {found['tensors']:.0f} tensors, bare {found['bare_ms']:.2f} ms; us "
                f"per tensor: copy {us['copy']:.1f}, "
                f"to a file {us['to a file']:.1f}, numpy + md5 {us['by hand']:.1f}, whence "
                f"{us['whence']:.1f}, "
                f"--keep stats {us['stats']:.1f}; whence over the copy "
                f"{us['whence'] - us['copy']:.1f}, "
                f"over copies in a file {us['whence'] - us['to a file']:.1f}, "
                f"{us['whence'] / us['by hand']:.2f} times numpy + md5"
            )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
