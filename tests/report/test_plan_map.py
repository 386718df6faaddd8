"""A map to edit: each pair of names below what they were paired by."""

import numpy as np
import yaml

from whence import api
from whence.report.plan import plan_map

NAMES = {
    "attn.qkv": "attention.query_key_value",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}


def dumped(folder, *, is_target):
    """Three layers under the names of one project or another; of the target with a fault."""
    folder.mkdir()
    chance, number = np.random.default_rng(0), 0
    for layer in range(3):
        for reference, target in NAMES.items():
            name = (
                f"encoder.layers.{layer}.{target}" if is_target else f"blocks.{layer}.{reference}"
            )
            tensor = chance.standard_normal((6, 16)).astype(np.float32)
            np.save(folder / f"{number:03d}_{name}.npy", tensor)
            number += 1
    return folder


def test_siblings_are_one_entry_below_what_paired_them(tmp_path):
    sides = [dumped(tmp_path / name, is_target=name == "b") for name in ("a", "b")]
    aligned = api.align_runs(*map(str, sides))
    text = plan_map(aligned.as_said(), aligned.reference, aligned.target)
    lines = text.splitlines()
    expected = {f"blocks.{{i}}.{a}": f"encoder.layers.{{i}}.{b}" for a, b in NAMES.items()}
    assert {p["reference"]: p["target"] for p in yaml.safe_load(text)["pairs"]} == expected
    entries = [n for n, line in enumerate(lines) if line.startswith("- reference")]
    assert len(entries) == 3
    assert all(lines[n - 1].startswith("# order: ") for n in entries)
    (tmp_path / "map.yaml").write_text(text, encoding="utf-8")
    again = api.align_runs(*map(str, sides), mapping=str(tmp_path / "map.yaml"))
    assert len(again.plan.pairs) == len(aligned.plan.pairs)
