"""vLLM Neuron's tensor capture: passes of requests, in the buckets of a device or of a library that
computes the whole text again.
"""

import json

import pytest

import whence
from whence.readers import open_run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

MODULES = ("model.embed_tokens", "model.layers.0.mlp", "model.layers.1.mlp", "lm_head")
PROMPTS, DECODES = (5, 9), 3
WRONG = "model.layers.1.mlp"


class Capture:
    """Writes passes as `CaptureWriter` does. wrong: (step, request) of a module that is off."""

    def __init__(self, folder, wrong=None, names=str, ranks=1, model="", last_logits=False):
        self.folder, self.wrong, self.names, self.ranks = (
            folder / model / "dp0",
            wrong,
            names,
            ranks,
        )
        self.counts, self.last_logits = {}, last_logits

    def row(self, module, request, position):
        seed = 10_000 * request + 100 * MODULES.index(module) + position
        row = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        step = max(position - PROMPTS[request] + 1, 0)
        return row * (1.05 if (step, request) == self.wrong and module == WRONG else 1)

    def call(self, phase, tokens, bucket=0, axes=1):
        """tokens: (request, position) of each. bucket: number of rows, the rest repeats the last."""
        padded = [*tokens, *[tokens[-1]] * (bucket - len(tokens))]
        size = f"{phase}_{'sb'[phase == 'decode']}{len(padded)}"
        name = f"{size}_{self.counts.get(size, 0)}"
        self.counts[size] = self.counts.get(size, 0) + 1
        for module in MODULES:
            rows = torch.stack([self.row(module, *token) for token in tokens])
            rest = torch.randn(len(padded) - len(tokens), 8)  # nobody reads it
            out = torch.cat([rows, rest])
            if module == "lm_head" and self.last_logits and phase == "prefill":
                out = rows[-1:]
            for rank in range(self.ranks):
                place = self.folder / name / module
                place.mkdir(parents=True, exist_ok=True)
                torch.save(out[None] if axes == 2 else out, place / f"rank{rank}.pt")
        requests = [self.names(request) for request in dict.fromkeys(r for r, _ in tokens)]
        meta = {"req_ids": requests, "positions": [p for _, p in padded], "dp_rank": 0}
        (self.folder / name / f"{name}_meta.json").write_text(json.dumps(meta))


def whole(request, end):
    return [(request, position) for position in range(end)]


def library(folder, **options):
    """A library without a cache: each step computes the whole text."""
    capture = Capture(folder, **options)
    for request, length in enumerate(PROMPTS):
        for step in range(DECODES + 1):
            phase = "decode" if step else "prefill"
            capture.call(phase, whole(request, length + step), axes=2)
    return folder


def device(folder, piece=16, **options):
    """A device: prompts in padded pieces, then one token of each request in padded batches."""
    capture = Capture(folder, **options)
    for request, length in enumerate(PROMPTS):
        tokens = whole(request, length)
        for first in range(0, length, piece):
            capture.call("prefill", tokens[first : first + piece], bucket=piece)
    for step in range(DECODES):
        tokens = [(request, length + step) for request, length in enumerate(PROMPTS)]
        capture.call("decode", tokens, bucket=4)
    return folder


def test_requests_are_roots_and_their_phases_steps(tmp_path):
    run = open_run(device(tmp_path / "dump"))
    assert run.reader == "vllm_neuron"
    shapes = {
        (call.root, call.step, run.records[call.slots("output")[0].record].shape)
        for call in run.calls
        if call.scope == WRONG
    }
    prefills = {("request 1", 0, (5, 8)), ("request 2", 0, (9, 8))}
    assert shapes == prefills | {
        (f"request {n}", step, (1, 8)) for n in (1, 2) for step in range(1, DECODES + 1)
    }
    assert {call.arguments["request"] for call in run.calls if call.scope} == {"0", "1"}


@pytest.mark.parametrize("wrong", [(0, 0), (2, 0), (3, 1)])
def test_a_fault_is_named_at_its_step_and_request(tmp_path, wrong):
    result = whence.compare(
        library(tmp_path / "library"), device(tmp_path / "device", wrong=wrong, last_logits=True)
    )
    finding = result.findings[0]
    assert (result.status, finding.name, finding.step, finding.root) == (
        "different", WRONG, wrong[0], f"request {wrong[1] + 1}",
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"piece": 4}, {"last_logits": True}, {"names": lambda request: f"cmpl-{9 - request}"}],
)
def test_other_pieces_batches_and_names_of_requests_differ_in_nothing(tmp_path, options):
    reference = library(tmp_path / "library")
    assert whence.compare(reference, device(tmp_path / "device", **options)).status == "same"


def test_ranks_and_models_beside_each_other(tmp_path):
    for name in ("a", "b"):
        device(tmp_path / name, ranks=2)
        library(tmp_path / name, model="draft", wrong=(1, 1) if name == "b" else None)
    run = open_run(tmp_path / "a")
    assert {call.rank for call in run.calls if call.root == "request 1"} == {0, 1}
    finding = whence.compare(tmp_path / "a", tmp_path / "b").findings[0]
    assert (finding.root, finding.step, finding.name) == ("draft request 2", 1, WRONG)


def test_passes_without_what_they_hold_and_damaged_files_are_told(tmp_path):
    folder = device(tmp_path / "dump")
    (folder / "dp0/decode_b4_1/decode_b4_1_meta.json").unlink()
    damaged = folder / "dp0/prefill_s16_0" / WRONG / "rank0.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    run = open_run(folder)
    told = " ".join(missing.text for missing in run.missing)
    assert "decode_b4_1_meta.json" in told
    assert f"prefill_s16_0/{WRONG}/rank0.pt" in told
    assert max(call.step for call in run.calls) == DECODES - 1
