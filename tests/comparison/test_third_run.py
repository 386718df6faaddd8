"""A third run in higher precision: numbers for every differing call, a yardstick where nothing can
be replayed.
"""

import csv
import io

import numpy as np
import pytest

import whence
from handmade import bfloat16, net
from whence import api
from whence.errors import UsageError
from whence.report.answer import answer
from whence.report.files import table_csv
from whence.report.summary import summary_data

U = 2.0**-8


def noisy(seed, *, fault=1.0, noise=0.05):
    """A bf16 net whose layers round badly inside: h is off by `noise` in every run, and the growth
    rule alone would blame it.
    """
    rng = np.random.default_rng(seed)

    def change(name, value):
        if name == "h":
            value = value * (1 + noise * rng.standard_normal(value.shape))
        return value * fault if name == "y" else value

    return net(bfloat16, change=change)


def verdicts(result):
    names = {row.pair: row.name for row in result.rows}
    return {names[v.pair]: v for v in result.verdicts if v.stretch < 0}


def test_what_the_reference_is_off_by_too_is_noise():
    reference, target = noisy(1), noisy(2)
    alone = api.compare(reference, target)
    assert [f.name for f in alone.findings] == ["fc1"]
    result = api.compare(reference, target, third=net(np.float32))
    assert (result.status, result.evidence, result.findings) == ("same", "three-way", ())
    found = verdicts(result)["fc1"]
    assert (found.verdict, found.evidence) == ("noise", "three-way")
    g, t, h = (run.array(3).astype(np.float64) for run in (reference, target, net(np.float32)))
    assert found.numbers["third_ratio"] == pytest.approx(
        np.linalg.norm(t - h) / np.linalg.norm(g - h)
    )
    assert "could not have seen errors below 3 times the reference's own" in answer(result)


def test_what_only_the_target_is_off_by_is_introduced_and_at_most_likely():
    # no one number explains it: every second channel is too large, the others too small
    by_channel = 1 + 0.04 * np.resize([1, -1], noisy(1).array(5).shape[-1])
    reference, target = noisy(1, noise=0.005), noisy(2, noise=0.005, fault=by_channel)
    alone = api.compare(reference, target)
    assert alone.status == "same", "growth alone must not see it"
    result = api.compare(reference, target, third=net(np.float32))
    assert [(f.name, f.verdict, f.confidence, f.evidence) for f in result.findings] == [
        ("fc2", "introduced", "likely", "three-way")
    ]
    assert "three-way        target is off by rel_l2" in answer(result)


def test_the_answer_says_who_is_closer():
    coarse, fine = noisy(1, noise=0.05), noisy(2, noise=0.001)
    text = answer(api.compare(coarse, fine, third=net(np.float32)))
    assert "the target is closer to <Net> than the reference" in text
    assert "the target is further from <Net> than the reference" in answer(
        api.compare(fine, coarse, third=net(np.float32))
    )
    third = api.compare(coarse, fine, third=net(np.float32)).third
    g, t, h = (run.array(5).astype(np.float64) for run in (coarse, fine, net(np.float32)))
    assert third.reference_err == pytest.approx(np.linalg.norm(g - h) / np.linalg.norm(h))
    assert third.target_err == pytest.approx(np.linalg.norm(t - h) / np.linalg.norm(h))
    assert (third.calls, third.closer) == (2, 2)


def test_the_numbers_are_in_every_format(tmp_path):
    result = api.compare(noisy(1), noisy(2), third=net(np.float32), output=tmp_path / "cmp")
    rows = list(csv.DictReader(io.StringIO("".join(table_csv(result)))))
    ratios = {(r["name"], r["reference_slot"]): r["third_ratio"] for r in rows}
    assert float(ratios["fc1", "output.0"]) == pytest.approx(
        verdicts(result)["fc1"].numbers["third_ratio"]
    )
    assert summary_data(result)["third"]["calls"] == 2
    assert api.load_comparison(tmp_path / "cmp").third == result.third


def test_a_call_the_third_run_lacks_is_judged_as_without():
    reference, target = noisy(1), noisy(2)
    result = api.compare(reference, target, third=net(np.float32, drop=("fc1",)))
    alone = verdicts(api.compare(reference, target))["fc1"]
    # Its output is still known as the input of the next call; a run without that either knows
    # nothing of it.
    assert verdicts(result)["fc1"].verdict == "noise"
    both = api.compare(reference, target, third=net(np.float32, drop=("fc1", "fc2")))
    assert verdicts(both)["fc1"] == alone
    assert any("have no partner" in n for n in both.notes)


def test_a_run_of_the_same_precision_is_an_error():
    with pytest.raises(
        UsageError,
        match=r"nowhere of higher precision than <Net>; give the same program in float32 for 16-bit",
    ):
        api.compare(noisy(1), noisy(2), third=net(bfloat16))


def test_other_inputs_or_weights_are_an_error():
    def other(name, value):
        return value[::-1] if name == "ids" else value

    with pytest.raises(UsageError, match=r"--third did not get the same inputs: Net step 0: 0"):
        api.compare(noisy(1), noisy(2), third=net(np.float32, change=other))
    with pytest.raises(
        UsageError,
        match=r"--third <Net>: it has other parameters than <Net> \(Net.fc1 step 0: weight\)",
    ):
        api.compare(
            noisy(1),
            noisy(2),
            third=net(np.float32, change=lambda n, v: v * 1.1 if n == "w1" else v),
        )


def test_elements_that_were_not_kept_leave_the_answer_as_it_was():
    reference, target = noisy(1), noisy(2)
    result = api.compare(reference, target, third=net(np.float32, keep=False))
    assert result.counts == api.compare(reference, target).counts
    assert "no differing call could be measured" in answer(result)


@pytest.mark.torch
def test_real_runs_with_a_fault_between_modules(tmp_path):
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = (
                torch.nn.LayerNorm(64),
                torch.nn.Linear(64, 128),
                torch.nn.Linear(128, 64),
            )
            self.residual = 1.0

        def forward(self, x):
            return self.residual * x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def run(name, dtype, change=None):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        # Weights and inputs that bfloat16 holds exactly, so that all runs have the same.
        model = Model().bfloat16().to(dtype)
        x = torch.randn(40, 64).bfloat16().to(dtype)
        if change:
            change(model)
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
        return tmp_path / name

    def rounds_once_more(model):
        for block in model.blocks:
            block.norm.register_forward_hook(
                lambda mod, args, out: (out.float() * 1.003).to(out.dtype)
            )

    def broken(model):
        model.blocks[3].residual = 1.02

    reference, third = run("ref", torch.bfloat16), run("fp32", torch.float32)
    benign = whence.compare(
        reference, run("benign", torch.bfloat16, rounds_once_more), third=third, replay=False
    )
    assert (benign.status, benign.findings) == ("same", ())
    faulty = run("broken", torch.bfloat16, broken)
    assert whence.compare(reference, faulty, replay=False).status == "same", (
        "two dumps must not see it"
    )
    result = whence.compare(reference, faulty, third=third, replay=False)
    assert result.findings[0].name == "blocks.3"
    assert result.findings[0].evidence == "three-way"
    assert result.third.name == "blocks.3"


MODULES = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "lm_head"]
PHASES = ["prefill_s16_0", "decode_b4_0", "decode_b4_1"]


def served(root, dtype, seed, fault=None, phases=PHASES):
    """Outputs alone, a folder a phase and module and a file a rank, as engines write them. fault:
    of layer 2 in the first decode.
    """
    torch = pytest.importorskip("torch")
    weights = np.random.default_rng(0)
    noise = np.random.default_rng(seed)
    for phase in phases:
        x = weights.standard_normal((8, 64))
        for name in MODULES:
            y = x @ weights.standard_normal((64, 64)) / 8
            x = x + np.maximum(y, 0) if "layers" in name else y
            if dtype != torch.float32:
                x = x * (1 + 2e-3 * noise.standard_normal(x.shape))
            if fault and (phase, name) == ("decode_b4_0", "model.layers.2"):
                x = fault(x)
            stored = torch.from_numpy(x).to(dtype)
            x = stored.double().numpy()
            folder = root / phase / name
            folder.mkdir(parents=True)
            for rank in (0, 1):
                part = stored[:, rank * 32 : rank * 32 + 32].clone()
                torch.save(part, folder / f"rank{rank}.pt")
    return root


def row(x):
    x = x.copy()
    x[0] *= 1.1
    return x


def columns(x):
    x = x.copy()
    x[:, :8] *= 1.06
    return x


@pytest.mark.parametrize("fault", [row, columns, lambda x: x * 1.03])
def test_the_error_ratio_that_rises_between_labels_names_the_module(tmp_path, fault):
    torch = pytest.importorskip("torch")
    third = served(tmp_path / "third", torch.float32, 0)
    reference = served(tmp_path / "reference", torch.bfloat16, 1)
    target = served(tmp_path / "target", torch.bfloat16, 2, fault)
    result = whence.compare(reference, target, third=third)
    assert result.status == "different"
    [finding] = result.findings
    assert (finding.name, finding.step) == ("model.layers.2", 1)
    clean = served(tmp_path / "clean", torch.bfloat16, 3)
    assert whence.compare(reference, clean, third=third).status == "same"
