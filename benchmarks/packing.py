"""How small runs become when they are packed against a reference, and how fast: pairs that differ
by rounding, and one with a fault.

    python benchmarks/packing.py [--json FILE] [--tokens 256] [--rounds 3]

A llama of random weights (width 256, 4 layers) is captured with fused attention as the reference;
the targets compute the same with eager attention, with the plain kernel of fused attention, or with
another epsilon of one norm (a fault). Every run is unpacked and compared file by file. Rates are
bytes of the shards per second of the process, the verification of every piece included. "results"
is the ratio of what calls return and the reference has under the same name and size: parameters and
inputs are mostly equal and take nothing.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import whence
from whence import api, store
from whence.workflows.pack import _partners


def capture(path: Path, dtype: torch.dtype, tokens: int, variant: str) -> None:
    """Capture one forward pass of the model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4096,
        attn_implementation="eager" if variant == "eager" else "sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    if variant == "fault":
        model.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-2
    ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(1))
    backend = SDPBackend.MATH if variant == "math kernel" else SDPBackend.FLASH_ATTENTION
    with torch.no_grad(), sdpa_kernel(backend), whence.capture(model, str(path)):
        model(ids, use_cache=False)


def results_ratio(reference: Path, target: Path, packed: Path) -> float:
    """Bytes of paired outputs over what they take."""
    ref, run, small = (store.open_run(path) for path in (reference, target, packed))
    partners = _partners(ref, run)
    outputs = {
        r.record for c in run.calls for r in c.refs if r.slot.startswith("output") and c.leaf
    }
    (reader,) = small.readers
    columns = reader.index.columns
    before = after = 0
    for record in outputs:
        nbytes = int(columns["nbytes"][record])
        partner = int(partners[record])
        if partner < 0 or int(ref.column("nbytes")[partner]) != nbytes:
            continue
        shard = reader.shard(int(columns["shard"][record]))._opened()
        piece = int(shard["offset"].searchsorted(columns["offset"][record]))
        first, last = shard["chunks_at"][piece : piece + 2]
        before += nbytes
        after += int(shard["chunk_at"][last] - shard["chunk_at"][first])
    return before / max(1, after)


def measured(where: Path, dtype: torch.dtype, variant: str, tokens: int, rounds: int) -> dict:
    """One pair: ratios, and rates in MB of shards per CPU second, best of the rounds."""
    reference, target = where / "ref", where / "tgt"
    capture(reference, dtype, tokens, "sdpa")
    capture(target, dtype, tokens, variant)
    packing, unpacking = [], []
    for number in range(rounds):
        small, again = where / f"small{number}", where / f"again{number}"
        start = time.process_time()
        result = api.pack(target, small, against=reference)
        packing.append(time.process_time() - start)
        start = time.process_time()
        api.unpack(small, again)
        unpacking.append(time.process_time() - start)
        compared = filecmp.dircmp(target, again)
        (folder,) = compared.common_dirs
        names = filecmp.dircmp(target / folder, again / folder)
        _, wrong, missing = filecmp.cmpfiles(
            target / folder, again / folder, names.left_list, shallow=False
        )
        assert not wrong and not missing and names.left_list == names.right_list
    return {
        "pair": variant, "dtype": str(dtype).removeprefix("torch."), "MB": result.nbytes / 1e6,
        "ratio": result.nbytes / result.packed_nbytes,
        "results": results_ratio(reference, target, small),
        "pack MB/s": result.nbytes / min(packing) / 1e6,
        "unpack MB/s": result.nbytes / min(unpacking) / 1e6,
    }  # fmt: skip


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for variant in ("eager", "math kernel", "fault"):
            with tempfile.TemporaryDirectory() as folder:
                row = measured(Path(folder), dtype, variant, options.tokens, options.rounds)
            rows.append(row)
            print(
                "  ".join(
                    f"{name} {value:.1f}" if isinstance(value, float) else f"{value:10}"
                    for name, value in row.items()
                )
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
