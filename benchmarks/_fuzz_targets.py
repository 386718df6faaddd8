"""What reads files that others wrote: how each is called, and what it starts from."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import whence
from whence import api, store
from whence.errors import ElementsMissing, WhenceError

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
GOLDEN = max((DATA / "golden").glob("*/expected.json")).parent
MOST_RECORDS = 60


def _all_of(run) -> None:
    """Read what a comparison reads."""
    for note in run.notes:
        str(note.text)
    for record in list(run.records)[:MOST_RECORDS]:
        try:
            np.ascontiguousarray(run.array(record.id))
        except ElementsMissing as error:
            assert str(error)
    for call in list(run.calls)[:500]:
        for ref in call.refs:
            str(ref.slot)
    getattr(run, "programs", None)
    getattr(run, "collectives", None)
    getattr(run, "steps", None)


def dump(path: Path) -> None:
    _all_of(api.open_run(path))


def run(path: Path) -> None:
    _all_of(store.open_run(path))


def recovered(path: Path) -> None:
    store.recover(path, force=True)
    _all_of(store.open_run(path))


def scrubbed(path: Path) -> None:
    store.scrub(path, ["0*"] if len(str(path)) % 2 else None, force=True)


def compared(path: Path) -> None:
    whence.compare(GOLDEN / "modules", path)


def shown(path: Path) -> None:
    """A tool of the MCP server, with the arguments of a file."""
    from whence.cli import mcp

    try:
        asked = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError):  # the client's library says so
        return
    if not isinstance(asked, dict):
        return
    texts = {k: v for k, v in asked.items() if isinstance(v, str)}
    mcp.show(
        str(GOLDEN / "modules"),
        texts.get("name", ""),
        asked.get("step") if type(asked.get("step")) is int else None,
    )


def comparison(path: Path) -> None:
    from whence.report.summary import summary

    result = api.load_comparison(path)
    summary(result)
    str(result)


def user_map(path: Path) -> None:
    from whence.align import user_map as maps

    maps.load(path)


def policy(path: Path) -> None:
    from whence.judge import policy as policies

    loaded = policies.load(path)
    str(loaded)


def thresholds(path: Path) -> None:
    from whence.workflows.tokens import statistics

    statistics.thresholds(None, None, path, "llama-3")


def msprobe_config(path: Path) -> None:
    from whence.compat.msprobe.pytorch import _config

    _config.read(path, {})


def label_library(path: Path) -> None:
    from whence.instrument.labels import library

    library.load(str(path))


def operator_csv(path: Path) -> None:
    from whence.workflows.operator_tests import diff

    table = diff.read(path)
    diff.diff(table, table)


def checkpoint(path: Path) -> None:
    """A safetensors or GGUF file in which weights are looked for; it says why it skips one."""
    found = store.Candidates([path])
    len(found)


def _by_hand(folder: Path) -> dict[str, list[Path]]:
    """What people write without a tool: pickles, texts of numbers, prints, raw bytes."""
    array = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    held = {"layers.0": array, "layers.1": array[::-1]}
    hand = folder / "by_hand"
    for name in ("texts", "raw"):
        (hand / name).mkdir(parents=True)
    (hand / "x.pkl").write_bytes(pickle.dumps({**held, "pairs": list(held.items())}, protocol=4))
    np.save(hand / "x.npy", held, allow_pickle=True)
    np.savetxt(hand / "texts" / "a.txt", array)
    np.savetxt(hand / "texts" / "b.csv", array, delimiter=",", fmt="%.6f")
    lists = [{"name": k, "shape": [3, 4], "values": v.ravel().tolist()} for k, v in held.items()]
    (hand / "texts" / "c.json").write_text(json.dumps(lists))
    (hand / "texts" / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lists))
    prints = f"--- step 1 ---\na {array}\nb: tensor({array.tolist()}, dtype=torch.float16)\n"
    figures = "fc: shape=(3, 4) mean=0.1, std=0.9, min=-2.5, max=3\n"
    (hand / "x.log").write_text(f"{prints}{figures}c {array!r}\nd tensor([1.5, ..., 2.5])\n")
    array.tofile(hand / "raw" / "x.bin")
    array.tofile(hand / "raw" / "y_3x4_float32.raw")
    (hand / "raw" / "x.json").write_text('{"shape": [3, 4], "dtype": "float32"}')
    (hand / "raw" / "shapes.json").write_text('{"tensors": [{"file": "z.bin", "shape": [3, 4]}]}')
    array.tofile(hand / "raw" / "z.bin")
    return {
        "torch_tensors": [hand / "x.pkl"],
        "npy": [hand / "x.npy"],
        "number_texts": [hand / "texts", hand / "texts" / "c.json", hand / "texts" / "a.txt"],
        "printed_tensors": [hand / "x.log"],
        "raw_bytes": [hand / "raw"],
    }


_META = b'{"req_ids": ["0"], "positions": [3], "dp_rank": 0}'


def _hooks(folder: Path, tensors: Path) -> list[Path]:
    """Folders that hooks of serving engines write."""
    names = {
        "nxd": ("captured_tensors_cte_step_1_module_norm_output.pt",),
        "vllm": ("a/step_0/model.norm/outputs_cuda_0.pt", "a/step_0/model.norm/inputs.json"),
    }
    return _folders(folder, names, tensors)


def _passes(folder: Path, tensors: Path) -> list[Path]:
    """A pass of vLLM Neuron."""
    files = ("dp0/decode_b1_0/model.norm/rank0.pt", "dp0/decode_b1_0/decode_b1_0_meta.json")
    return _folders(folder, {"neuron": files}, tensors)


def _folders(folder: Path, names: dict[str, tuple[str, ...]], tensors: Path) -> list[Path]:
    for place, files in names.items():
        for name in files:
            file = folder / "hooks" / place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(tensors.read_bytes() if file.suffix == ".pt" else _META)
    return [folder / "hooks" / place for place in names]


class Target:
    """read: what reads it. seeds: files or folders. folder: what is mutated is a folder."""

    def __init__(self, read: Callable[[Path], None], seeds: list[Path], share: int = 10) -> None:
        self.read, self.seeds, self.share = read, seeds, share


def _converted(folder: Path) -> dict[str, Path]:
    """Dumps of every format that whence writes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from handmade import net

    out = {}
    for name in api.formats():
        place = folder / (f"{name}.json" if name == "polygraphy" else name)
        try:
            whence.convert(net(), place, to=name)
        except WhenceError:
            continue
        out[name] = place
    return out


def targets(folder: Path) -> dict[str, Target]:
    """Every target by name. folder: where seeds that are made go."""
    made = _converted(folder)
    runs = [p for p in sorted(GOLDEN.iterdir()) if p.is_dir()]
    small = [
        p for p in runs if p.name in ("increments", "external", "recorded", "logits", "killed")
    ]
    corpus = DATA / "corpus"
    saved = folder / "saved"
    api.write(whence.compare(GOLDEN / "recorded", GOLDEN / "recorded"), saved)
    for number, asked in enumerate(({"name": "0", "step": 0}, {"name": "0:output.0"}, {"step": 1})):
        (folder / f"arguments{number}.json").write_text(json.dumps(asked))
    ascend = DATA / "ascend"
    formats = {
        "npy": [made["npy"]],
        "safetensors": [made["safetensors"]],
        "torch_tensors": [
            corpus / "torch_tensors" / "zip.pt",
            corpus / "torch_tensors" / "legacy.pt",
        ],
        "msprobe": [made["msprobe"], DATA / "msprobe" / "eps", DATA / "msprobe" / "mix_structure"],
        "msit_torch": [made["msit_torch"]] if "msit_torch" in made else [],
        "polygraphy": [made["polygraphy"], DATA / "polygraphy" / "ref.json"],
        "onnx_model": [DATA / "onnx" / "types.onnx"],
        "onnx_tensors": [DATA / "onnx" / "test_data_set_0"],
        "atb": [p for p in (ascend / "atb").iterdir() if p.is_dir()],
        "ge": [ascend / "ge" / "msit_ge_dump"],
        "ascend_graph": sorted((corpus / "ascend_graph").iterdir()),
        "fx": [ascend / "fx_new" / "msit_fx_dump", ascend / "fx_old" / "data_dump"],
        "hf_debugger": [DATA / "hf_debugger" / "ref_files", DATA / "hf_debugger" / "ref_text"],
        "llama_cpp": [DATA / "llama_cpp" / "clean.log"],
        "paddle_log": [p for p in (DATA / "paddle").iterdir() if p.suffix in (".log", ".txt")],
        "paddle_program": [
            p for p in (DATA / "paddle").iterdir() if p.suffix in (".pdmodel", ".json")
        ],
        "etdump": [DATA / "etdump" / "reference"],
        "engine_hooks": _hooks(folder, corpus / "torch_tensors" / "zip.pt"),
        "vllm_neuron": _passes(folder, corpus / "torch_tensors" / "zip.pt"),
        "sglang": [p for p in (DATA / "sglang").iterdir() if p.is_dir()],
        "torch_xray": sorted((DATA / "torch_xray").glob("*.h5")),
    }
    for name, seeds in _by_hand(folder).items():
        formats[name] = [*formats.get(name, ()), *seeds]
    out = {name: Target(dump, seeds) for name, seeds in formats.items() if seeds}
    out["torch_xray"].share = 1  # each costs a process
    params = corpus / "paddle_params"
    if params.exists():
        out["paddle_params"] = Target(dump, sorted(params.glob("*.pdiparams")))
    out |= {
        "run": Target(run, runs, 20),
        "run, recovered": Target(recovered, small),
        "run, scrubbed": Target(scrubbed, small),
        "run, compared": Target(compared, [GOLDEN / "statistics", GOLDEN / "modules"], 1),
        "comparison": Target(comparison, [saved / "report.json"]),
        "map": Target(user_map, [corpus / "map" / "map.yaml"]),
        "policy": Target(policy, [corpus / "policy" / "policy.yaml"]),
        "thresholds": Target(thresholds, sorted((corpus / "thresholds").iterdir())),
        "msprobe configuration": Target(
            msprobe_config, [corpus / "msprobe_config" / "config.json"]
        ),
        "library of labels": Target(label_library, sorted((corpus / "label_library").iterdir())),
        "csv of operator tests": Target(operator_csv, [corpus / "operator_csv" / "x.csv"]),
        "checkpoint": Target(
            checkpoint, [corpus / "gguf" / "small.gguf", GOLDEN / "weights.safetensors"]
        ),
        "MCP arguments": Target(shown, sorted(folder.glob("arguments*.json")), 3),
    }
    return out
