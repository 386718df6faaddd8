"""One process against two that share a model: clean ones agree, and each fault of many ranks is
named where it is, in words.
"""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

import warm
import whence
from whence.align import Derived
from whence.comparison.options import CompareOptions
from whence.comparison.pipeline import compare_runs
from whence.comparison.verdicts.ranks import sum_in_words
from whence.store import open_run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)

import ranked_net  # noqa: E402


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(reference of one process, run of two ranks in which every fault is a root)"""
    folder = tmp_path_factory.mktemp("ranks")
    torch.set_num_threads(1)
    net = ranked_net.Net().eval()
    with torch.no_grad(), whence.capture(net, folder / "one"):
        net(ranked_net.ids())
    command = [
        warm.TORCH,
        "-m",
        "whence",
        "run",
        "-o",
        folder / "two",
        "--",
        warm.TORCH,
        ranked_net.__file__,
        "2",
        folder / "store",
    ]
    source = str(Path(whence.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": source,
        "PROGRAM_PATH": source,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return open_run(folder / "one"), open_run(folder / "two")


def only(run, root):
    calls = [c for c in run.calls if c.root == root]
    place = {c.id: i for i, c in enumerate(calls)}
    return Derived(
        run,
        (),
        (),
        [
            msgspec.structs.replace(c, id=i, parent=place.get(c.parent, -1))
            for i, c in enumerate(calls)
        ],
    )


OTHER_NAMES = {
    "embed": "tok", "layers": "blk", "norm1": "ln_a", "attn": "mixer", "q_proj": "alpha",
    "k_proj": "beta", "v_proj": "gamma", "o_proj": "out", "norm2": "ln_b", "mlp": "ff",
    "up": "wide", "down": "narrow", "norm": "fin", "head": "unembed",
}  # fmt: skip


def renamed(run):
    """The run with every module under another name."""
    return Derived(
        run,
        (),
        (),
        [
            msgspec.structs.replace(
                c, scope=".".join(OTHER_NAMES.get(p, p) for p in c.scope.split("."))
            )
            for c in run.calls
        ],
    )


def compared(runs, fault, *, swap=False, rename=False):
    left, right = runs[0], only(runs[1], fault)
    right = renamed(right) if rename else right
    return compare_runs(*((right, left) if swap else (left, right)), CompareOptions(threads=1))


@pytest.mark.slow
def test_processes_are_recorded_under_the_rank_of_their_group(runs):
    assert {c.rank for c in runs[1].calls} == {0, 1}
    settings = [msgspec.json.decode(n.text) for n in runs[1].notes if n.kind == "settings"]
    assert {(s["rank"], s["world_size"], s["backend"]) for s in settings} == {
        (0, 2, "gloo"),
        (1, 2, "gloo"),
    }


@pytest.mark.parametrize("fault", ["clean", "later", "tokens"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("rename", [False, True])
def test_a_clean_pair_is_the_same(runs, fault, swap, rename):
    found = compared(runs, fault, swap=swap, rename=rename)
    assert (found.status, found.findings) == ("same", ()), found.findings
    assert found.unmatched == found.incomparable == 0
    assert any("2 ranks joined" in note for note in found.plan.notes)


@pytest.mark.parametrize(
    ("fault", "name", "cause", "says"),
    [
        (
            "no_sum",
            "layers.1.mlp.down",
            "semantic",
            "the sum over ranks is missing: rank 1's part is not in it",
        ),
        (
            "vocabulary",
            "embed",
            "semantic",
            "the sum over ranks is missing: rank 1's part is not in it",
        ),
        ("lost", "layers.1.mlp.down", "semantic", "output equals 2 x the part of rank 0"),
        (
            "twice",
            "layers.1.mlp.down",
            "semantic",
            "summed over ranks twice: output equals 2 x the sum",
        ),
        ("mean", "layers.1.mlp.down", "semantic", "the mean over ranks in the place of the sum"),
        ("bias", "layers.1.mlp.down", "semantic", "the bias is added on every rank (2 times)"),
        ("order", "head", "semantic", "the ranks' pieces lie in the order 1, 0 along axis 2"),
        ("shard", "layers.1.mlp.up", "parameter", "rank 1 holds the piece of rank 0"),
        ("one_rank", "layers.1.norm2", "semantic", "the ranks differ here, this is rank 1's"),
    ],
)
@pytest.mark.parametrize("rename", [False, True])
def test_faults_of_many_ranks(runs, fault, name, cause, says, rename):
    found = compared(runs, fault, rename=rename)
    assert found.status == "different"
    first = found.findings[0]
    assert (first.name, first.cause) == (name, cause), first
    assert says in first.sentence
    assert [f.name for f in found.findings] == [name]


@pytest.mark.parametrize(
    ("factors", "bias", "words"),
    [
        ([1, 1, 0, 1], None, "the sum over ranks is not whole: rank 2's part is not in it"),
        (
            [0, 3, 0],
            None,
            "the sum over ranks is missing: the parts of ranks 0, 2 are not in it; output equals "
            "3 x the part of rank 1",
        ),
        ([1, 2], None, "2 x the part of rank 1"),
        ([4, 4, 4, 4], 4, "summed over ranks twice: output equals 4 x the sum"),
        ([3, 3], None, "output equals 3 x the sum over ranks"),
        ([0.25] * 4, 1, "the mean over ranks in the place of the sum"),
        ([1] * 4, 4, "the bias is added on every rank (4 times)"),
        ([1, 1], 0, "the bias is missing"),
        ([1, 1], 1, ""),
    ],
)
def test_sums_in_words(factors, bias, words):
    assert sum_in_words(factors, bias) == words
