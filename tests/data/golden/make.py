"""Writes the golden runs of this version of whence, once, when it is released.

    python tests/data/golden/make.py            into tests/data/golden/<version>, which must not exist

They are never written again: a later whence has to open what an earlier one wrote, and say the same
of it (tests/store/test_golden_runs.py). Paths, hosts and users are replaced by words.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "benchmarks"), str(HERE)]

import _captured_programs as programs  # noqa: E402
import expected  # noqa: E402
import numpy as np  # noqa: E402
import xxhash  # noqa: E402

import whence  # noqa: E402
from whence import store  # noqa: E402
from whence._version import __version__  # noqa: E402
from whence.records import Increment  # noqa: E402

HEADER = 16 << 10


def captured(place, name, program, **more):
    def capturing(model, **options):
        if model is None:
            return whence.recording(place / name)
        return whence.capture(model, place / name, **options, **more)

    program(capturing)


def faulty(place):
    """The net of "modules" with one wrong weight."""
    import torch

    model, inputs = programs._net(), programs._inputs()
    with torch.no_grad():
        model[3].weight[2, 5] += 0.25
    with whence.capture(model, place / "modules_fault"), torch.no_grad():
        for x in inputs:
            model(x)


def ranks(place):
    """Two processes."""
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(WORLD_SIZE="2", RANK=str(rank))
            time.sleep(0.3)  # both have started before one of them makes the run
            captured(place, "ranks", programs.torch_forward("modules"))
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]


def killed(place):
    """A process that was killed between two steps: no index, no clean end."""
    pid = os.fork()
    if not pid:
        import torch

        model = programs._net()
        with whence.capture(model, place / "killed"), torch.no_grad():
            model(programs._inputs()[0])
            os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


def growing(place):
    """A cache that grows: each record follows the one before it."""
    run = store.create(place / "increments", programs_info())
    draw = np.random.default_rng(0)
    whole = draw.normal(size=(2, 1, 3)).astype("f4")
    with store.Writer(run) as writer:
        from whence.records import Call, Ref

        before = -1
        for step in range(4):
            data = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
            digest = xxhash.xxh3_128_digest(data.data)
            if before >= 0:
                tail = np.ascontiguousarray(whole[:, -1:]).reshape(-1).view(np.uint8)
                before = writer.record(
                    "float32", whole.shape, tail, digest, None, None, base=(before, 1)
                )
            else:
                before = writer.record("float32", whole.shape, data, digest, None, None)
            writer.call(
                Call(step, "cache", "", step=step, order=step, refs=(Ref("output.0", before),))
            )
            whole = np.concatenate([whole, draw.normal(size=(2, 1, 3)).astype("f4")], 1)
    assert isinstance(store.open_run(run).records[3].elements, Increment)


def programs_info():
    from whence.records import RunInfo

    return RunInfo(command=("golden",), versions={"whence": __version__})


def external(place):
    """Weights that lie in a file of the user's, beside the run."""
    from safetensors.numpy import save_file

    from whence.records import Call, External, Ref
    from whence.store.shards import map_file, parse_header

    arrays = {n: np.random.default_rng(3).normal(size=(5, 7)).astype("f4") for n in ("a", "b")}
    file = place / "weights.safetensors"
    save_file(arrays, file)
    run = store.create(place / "external", programs_info())
    data = map_file(file)
    with store.Writer(run) as writer:
        for tensor in parse_header(data):
            digest = xxhash.xxh3_128_digest(
                data[tensor.offset : tensor.offset + tensor.nbytes].tobytes()
            )
            where = External(f"../{file.name}", tensor.offset, tensor.nbytes)
            number = writer.record(
                "float32", tensor.shape, None, digest, None, None, external=where
            )
            refs = (Ref("param.weight", number),)
            writer.call(Call(number, tensor.name, "", step=0, order=number, refs=refs))


def nameless(run):
    """Take this machine out of a run; its index is made again."""
    info = json.loads((run / "run.json").read_text())
    info |= {"command": ["golden"], "environment": {}, "user": "", "host": "", "cwd": "", "git": ""}
    info["devices"] = {} if isinstance(info.get("devices"), dict) else []
    info.get("settings", {}).pop("launched", None)
    (run / "run.json").write_text(json.dumps(info, indent=1) + "\n")
    for number, folder in enumerate(sorted(run.glob("rank*")), 1):
        process = json.loads((folder / "process.json").read_text())
        process |= {"host": "golden", "pid": number, "boot": "", "pid_started": 0}
        (folder / "process.json").write_text(json.dumps(process, indent=1) + "\n")
        journal = (folder / "journal.jsonl").read_bytes()
        journal = re.sub(rb'/[^" :,]*/((?:[^"/ :,]+))', rb"/golden/\1", journal)
        (folder / "journal.jsonl").write_bytes(journal)
        had_index = (folder / "index.safetensors").exists()
        (folder / "index.safetensors").unlink(missing_ok=True)
        if had_index:
            from whence.store import index_builder
            from whence.store.columns import FileBlocks

            with FileBlocks(folder / "journal.jsonl") as blocks:
                index_builder.write(blocks, folder)
        folder.rename(run / f"{folder.name[:9]}-golden-{number}")


def main() -> int:
    """Write and describe them."""
    final = HERE / __version__
    if final.exists():
        print(f"{final} exists: what a release wrote is never written again", file=sys.stderr)
        return 1
    store.Writer.__init__.__kwdefaults__["header_bytes"] = HEADER  # 512 KiB each would be megabytes
    place = Path(tempfile.mkdtemp()) / __version__
    place.mkdir()
    for make in (ranks, killed):  # they fork, so before any library has threads
        make(place)
    for name, level, more in (
        ("modules", "modules", {}),
        ("statistics", "modules", {"keep": "stats"}),
        ("topology", "modules", {"keep": "none"}),
        ("op", "op", {}),
    ):
        captured(place, name, programs.torch_forward(level), **more)
    captured(place, "logits", programs.torch_logits)
    captured(place, "training", programs.torch_training)
    captured(place, "graph", programs.torch_graph)
    captured(place, "recorded", programs.recorded)
    captured(place, "onnxruntime", programs.onnxruntime_level("modules"))
    for make in (faulty, growing, external):
        make(place)
    for run in sorted(p for p in place.iterdir() if p.is_dir()):
        nameless(run)
    described = {
        run.name: expected.described(run) for run in sorted(place.iterdir()) if run.is_dir()
    }
    pairs = [("modules", "modules_fault"), ("modules", "modules"), ("statistics", "modules")]
    described["comparisons"] = [
        [*pair, *expected.answer(place / pair[0], place / pair[1])] for pair in pairs
    ]
    (place / "expected.json").write_text(json.dumps(described, indent=0) + "\n")
    shutil.move(place, final)
    return 0


if __name__ == "__main__":
    sys.exit(main())
