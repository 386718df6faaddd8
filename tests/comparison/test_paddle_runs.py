"""Two runs of Paddle compared: program, fault, occurrences, way back, passes; a torch model against
a Paddle one.
"""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import warm
import whence
from whence.cli import main

if importlib.util.find_spec("paddle") is None:
    pytest.skip(
        "paddlepaddle is not installed: pip install paddlepaddle==3.3.1", allow_module_level=True
    )
pytestmark = [
    pytest.mark.paddle,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # importing Paddle looks for ccache

CAPTURE = Path(__file__).parent.parent / "instrument"
PLAIN = {"disable_mkldnn": [], "switch_ir_optim": [False]}
LEGACY = {**PLAIN, "enable_new_ir": [False]}


def done(*words, **environment):
    run = subprocess.run(
        [warm.PADDLE, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Programs, and runs of them: `ref`, `again`, `attribute`, `weight`, `onednn`, `legacy`,
    `legacy_attribute`, `legacy_onednn` ...
    """
    here = tmp_path_factory.mktemp("paddle")
    done(CAPTURE / "paddle_models.py", "pir", here)
    done(CAPTURE / "paddle_models.py", "legacy", here, FLAGS_enable_pir_api="0")
    text = (here / "model.json").read_text()
    second = list(re.finditer(r"0\.3535533\d*", text))[1]
    weights = (here / "model.pdiparams").read_bytes()
    for name, program, held in (
        ("attribute_fault", f"{text[: second.start()]}0.355{text[second.end() :]}", weights),
        (
            "weight_fault",
            text,
            weights[:-4] + np.float32(1.5).tobytes(),
        ),  # one element of the last parameter by name
    ):
        (here / f"model_{name}.json").write_text(program)
        (here / f"model_{name}.pdiparams").write_bytes(held)
    (here / "lstm_fault.json").write_bytes((here / "lstm.json").read_bytes())
    (here / "lstm_fault.pdiparams").write_bytes(
        (here / "lstm.pdiparams").read_bytes()[:-4] + np.float32(1.5).tobytes()
    )
    data = (here / "legacy.pdmodel").read_bytes()
    half = np.float32(1.5).tobytes()
    assert data.count(half) == 1
    (here / "legacy_fault.pdmodel").write_bytes(data.replace(half, np.float32(1.6).tobytes()))
    (here / "legacy_fault.pdiparams").write_bytes((here / "legacy.pdiparams").read_bytes())
    for name, old, new in (
        ("loop", 'D":4.0', 'D":2.5'),
        ("image", "9.999999747378752e-05", "0.1"),
        ("coded", "0.007874015718698502", "0.004347826"),
    ):
        text = (here / f"{name}.json").read_text()
        assert text.count(old) == (1 if name != "coded" else 4)
        # names of parameters count the layers of their process
        renamed = text.replace("codes_", "dodes_")
        (here / f"{name}_fault.json").write_text(new.join(renamed.rsplit(old, 1)))
        (here / f"{name}_fault.pdiparams").write_bytes((here / f"{name}.pdiparams").read_bytes())
    wanted = [
        ("ref", "model", PLAIN),
        ("again", "model", PLAIN),
        ("attribute", "model_attribute_fault", PLAIN),
        ("weight", "model_weight_fault", PLAIN),
        ("onednn", "model", {}),
        ("legacy", "legacy", LEGACY),
        ("legacy_attribute", "legacy_fault", LEGACY),
        ("legacy_onednn", "legacy", {"enable_new_ir": [False]}),
        ("loop", "loop", PLAIN),
        ("loop_onednn", "loop", {}),
        ("loop_attribute", "loop_fault", PLAIN),
        ("image", "image", PLAIN),
        ("image_onednn", "image", {}),
        ("image_attribute", "image_fault", PLAIN),
        ("lstm", "lstm", PLAIN),
        ("lstm_again", "lstm", PLAIN),
        ("lstm_onednn", "lstm", {}),
        ("lstm_weight", "lstm_fault", PLAIN),
        ("coded", "coded", PLAIN),
        ("coded_again", "coded", PLAIN),
        ("coded_attribute", "coded_fault", PLAIN),
        ("several", "model+image", PLAIN),
        ("several_attribute", "model+image_fault", PLAIN),
        ("several_onednn", "model+image", {}),
    ]
    script = here / "run.py"
    script.write_text(
        f"import sys, json; sys.path.insert(0, {str(CAPTURE)!r})\nimport paddle_models as pm\n"
        "folder, name, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])\n"
        "made = {n: pm.predictor(folder, n, settings) for n in name.split('+')}\n"
        "for k in range(2):\n    for n in made: pm.once(made[n], pm.fed(n.partition('_')[0], k))\n"
    )
    wanted.append(("lstm_oldest", "lstm", {}))
    if os.environ.get("WHENCE_TESTS") != "all":  # those of the tests that are not marked slow
        wanted = [run for run in wanted if run[1].partition("_")[0] in ("model", "lstm", "coded")]
    for run, name, settings in wanted:
        kernels = (
            {"ONEDNN_MAX_CPU_ISA": "SSE41"} if run.endswith("oldest") else {}
        )  # those of an old processor
        done(
            "-m",
            "whence",
            "run",
            "-o",
            here / "runs" / run,
            "--",
            warm.PADDLE,
            script,
            here,
            name,
            json.dumps(settings),
            **kernels,
        )
    return here


def compared(folder, one, two, **given):
    return whence.compare(folder / "runs" / one, folder / "runs" / two, **given)


def test_two_processes_pair_wholly_and_their_programs_are_equal(folder):
    result = compared(folder, "ref", "again")
    assert (result.status, set(result.counts), result.unmatched) == ("same", {"identical"}, 0)
    assert re.fullmatch(
        r"the programs are equal: \d+ operators with \d+ attributes, (\d+) of \1 weights by hash",
        result.programs[0],
    )
    assert (result.occurrences.first_difference, result.origin) == (None, None)


def test_weights_that_were_folded_into_constants_are_compared_and_stand_where_they_are_read(folder):
    run = whence.open_run(str(folder / "runs" / "coded"))
    products = [c for c in run.calls if c.op_type == "matmul" and c.slots("param")]
    assert len(products) == 2 * 4  # in two steps
    for call in products:
        assert [ref.slot for ref in call.refs] == ["input.0", "param.constant_folding@", "output.0"]
    result = compared(folder, "coded", "coded_again")
    assert (result.status, result.programs[0].rpartition(", ")[2]) == (
        "same",
        "10 of 10 weights by hash",
    )
    result = compared(folder, "coded", "coded_attribute")
    # the constant of the layer with another attribute proves nothing of its codes and scales
    assert "weights: 8 of 10 compared, all equal by hash" in result.programs
    assert {f.cause for f in result.findings} == {"parameter"}
    assert re.search(
        r"in its program \(.*matmul.*\) input\.1 of .*scale", result.findings[0].sentence
    )
    assert (len(result.findings), result.counts["param-diff"]) == (1, 2)
    assert "introduced" not in result.counts


def test_an_attribute_is_named_by_the_program_the_replay_and_the_way(folder, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "compare",
                str(folder / "runs" / "ref"),
                str(folder / "runs" / "attribute"),
                "-o",
                str(tmp_path / "cmp"),
            ]
        )
    text = capsys.readouterr().out
    assert ended.value.code == 1
    assert re.match(
        r"PROGRAMS +exactly one attribute differs: .*0\.35355338\d* against 0\.355\n", text
    )
    result = whence.load_comparison(tmp_path / "cmp")
    first = result.findings[0]
    assert (first.op_type, first.cause, first.confidence, first.evidence) == (
        "scale",
        "semantic",
        "certain",
        "replay",
    )
    assert len(result.findings) == 1
    scales = [
        c
        for c in whence.open_run(str(folder / "runs" / "ref")).calls
        if c.op_type == "scale" and c.step == 0
    ]
    faulty = next(c for c in scales if c.scope == first.name)
    number = sorted(scales, key=lambda c: c.order).index(faulty) + 1
    row = next(r for r in result.occurrences.rows if (r.by, r.name) == ("type", "scale"))
    assert (row.first_difference.number, row.first_significant.number, row.equal) == (
        number,
        number,
        number - 1,
    )
    assert f"scale: occurrences 1-{number - 1} equal, {number}th of" in text
    assert result.origin.steps[-1].name == first.name
    assert result.origin.outcome == "target wrong"
    assert result.origin.attributes["input.1"] == pytest.approx(0.35355338)
    assert result.origin.target_attributes == {"input.1": 0.355}
    assert {i.state for i in result.origin.steps[-1].inputs} == {"equal"}
    way = whence.trace(
        tmp_path / "cmp",
        max(result.rows, key=lambda r: r.pair if r.step == 0 and r.name != "model" else -1).name,
    )
    assert way.steps[-1].name == first.name
    assert len(way.steps) > 10
    assert all(
        a.name in {i.name for i in b.inputs} for b, a in zip(way.steps, way.steps[1:], strict=False)
    )
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path / "cmp"), "no_such"])
    assert ended.value.code == 3
    assert "no call 'no_such' in the reference" in capsys.readouterr().err


def test_a_weight_is_named(folder):
    result = compared(folder, "ref", "weight")
    assert result.programs[0].startswith("exactly one weight differs: its weight ")
    assert [f.cause for f in result.findings] == ["parameter"]
    assert "differs" in {
        i.state for i in result.origin.steps[-1].inputs if i.slot.startswith("param")
    }


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("ref", "onednn"),
        ("onednn", "ref"),
        ("lstm", "lstm_onednn"),
        ("lstm_onednn", "lstm"),
        ("lstm", "lstm_oldest"),
        ("lstm_oldest", "lstm_onednn"),
        *(
            pytest.param(one, two, marks=pytest.mark.slow)
            for one, two in (
                ("legacy", "legacy_onednn"),
                ("loop", "loop_onednn"),
                ("loop_onednn", "loop"),
                ("image", "image_onednn"),
                ("image_onednn", "image"),
            )
        ),
    ],
)
def test_passes_and_onednn_are_noise(folder, one, two):
    result = compared(folder, one, two)
    assert (result.status, result.findings) == ("same", ())
    assert any(
        " are one " in line or " is " in line or "oneDNN" in line or "are equal" in line
        for line in result.programs
    )
    # Whether the kernels of this processor round alike is its own affair: no difference is reported
    # exactly where there is none.
    assert (result.occurrences.first_difference is None) == (set(result.counts) == {"identical"})
    assert result.occurrences.first_significant is None


@pytest.mark.slow
def test_what_a_pass_puts_into_weights_is_no_difference_and_its_fault_is_named(folder):
    result = compared(folder, "image", "image_onednn")
    assert (
        "conv2d + add + batch_norm + relu of the reference are one fused_conv2d in the target"
        in " ".join(result.programs)
    )
    assert not any("only the" in line and "runs" in line for line in result.programs)
    for one, two in (("image", "image_attribute"), ("image_attribute", "image_onednn")):
        (finding,) = compared(folder, one, two).findings
        run = whence.open_run(str(folder / "runs" / one))
        call = next(c for c in run.calls if c.scope == finding.name)
        assert call.op_type == ("batch_norm" if two == "image_attribute" else "relu")


@pytest.mark.slow
def test_the_branch_that_ran_and_every_round_of_a_loop_have_their_attributes(folder):
    result = compared(folder, "loop", "loop_attribute")
    assert [(f.op_type, f.step, f.cause, f.evidence) for f in result.findings] == [
        ("scale", 1, "semantic", "replay")
    ]
    assert (result.origin.attributes["input.1"], result.origin.target_attributes) == (
        4.0,
        {"input.1": 2.5},
    )
    run = whence.open_run(str(folder / "runs" / "loop"))
    said = [
        (c.step, c.arguments["input.1"], c.arguments["bias"])
        for c in run.calls
        if c.op_type == "scale" and c.arguments["input.1"] != 1.0
    ]
    assert said == [(0, 2.0, 0.0), (1, 4.0, 0.0)]
    assert result.coverage.replayed >= sum(
        c.op_type in ("matmul", "add", "relu") for c in run.calls
    )


@pytest.mark.slow
def test_the_programs_of_every_predictor_are_compared(folder):
    result = compared(folder, "several", "several_attribute")
    assert (
        result.programs[0]
        == "model#1: exactly one attribute differs: epsilon of BatchNorm2D_1.batch_norm_0: "
        "0.0001 against 0.1"
    )
    assert result.programs[-1] == "the programs of 1 of 2 predictors are equal"
    assert [(f.op_type, f.root) for f in result.findings] == [("batch_norm", "model#1")]
    assert compared(folder, "several", "several_onednn").status == "same"


@pytest.mark.slow
def test_a_run_that_raised_says_so(folder, tmp_path):
    (tmp_path / "image.json").write_text((folder / "image.json").read_text())
    (tmp_path / "image.pdiparams").write_bytes((folder / "image.pdiparams").read_bytes())
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(CAPTURE)!r})\nimport paddle_models as pm, numpy as "
        "np\n"
        f"made = pm.predictor({str(tmp_path)!r}, 'image', {PLAIN!r})\n"
        "try:\n    pm.once(made, [np.zeros((2, 4, 9, 9), 'float32')])\nexcept Exception:\n    "
        "pass\n"
    )
    done("-m", "whence", "run", "-o", tmp_path / "run", "--", warm.PADDLE, script)
    notes = whence.compare(folder / "runs" / "image", tmp_path / "run").notes
    assert any(note.startswith("target: model raised in step 0: ValueError") for note in notes), (
        notes
    )


def test_scratch_of_an_operator_that_nobody_saved_is_no_weight(folder):
    for run in ("lstm", "lstm_again"):
        held = [
            r.slot
            for c in whence.open_run(str(folder / "runs" / run)).calls
            for r in c.refs
            if "non_persistable" in r.slot
        ]
        assert held == []
    result = compared(folder, "lstm", "lstm_again")
    assert (result.status, set(result.counts), result.unmatched) == ("same", {"identical"}, 0)
    names = {c.scope for c in whence.open_run(str(folder / "lstm.pdiparams")).calls}
    assert (
        "lstm_cell_0" in names
    )  # as many tensors as the program has parameters, so they have names


def test_a_weight_that_an_operator_is_given_in_a_list_is_named(folder):
    result = compared(folder, "lstm", "lstm_weight")
    assert result.programs == (
        "exactly one weight differs: its weight lstm_cell_0.w_1 is another one, by hash "
        "(LSTM.rnn_0)",
    )
    (finding,) = result.findings
    assert (finding.op_type, finding.cause) == ("rnn", "parameter")
    assert "lstm_cell_0.w_1: 1 of 196 elements differs, in row 27" in finding.sentence
    call = next(
        c for c in whence.open_run(str(folder / "runs" / "lstm")).calls if c.op_type == "rnn"
    )
    assert [r.slot for r in call.slots("param")] == [
        f"param.lstm_cell_0.{name}" for name in ("w_0", "w_1", "b_0", "b_1")
    ]
    assert len(call.slots("input")) == 2  # what it reads, and the states it begins with
    assert result.coverage.replayed == result.coverage.calls


def test_a_fault_behind_passes_is_named(folder):
    result = compared(folder, "attribute", "onednn")
    assert result.status == "different"
    assert result.findings[0].name == compared(folder, "attribute", "ref").findings[0].name


@pytest.mark.slow
def test_legacy_programs(folder):
    result = compared(folder, "legacy", "legacy_attribute")
    assert (
        result.programs[0]
        == "exactly one attribute differs: scale of scale_1.tmp_0: 1.5 against 1.6"
    )
    assert [(f.name, f.cause, f.evidence) for f in result.findings] == [
        ("scale_1.tmp_0", "semantic", "replay")
    ]
    row = next(r for r in result.occurrences.rows if (r.by, r.name) == ("type", "scale"))
    assert (row.equal, row.first_significant.number, row.count) == (1, 2, 4)


# ---- torch against Paddle


def net(framework, faults=()):
    """One network twice. faults: "gelu" (block 1), "eps" (block 2), "extra" (behind block 1)."""
    import paddle
    import torch

    is_torch = framework == "torch"
    nn = torch.nn if is_torch else paddle.nn
    base, eps, many = (
        (nn.Module, "eps", nn.ModuleList) if is_torch else (nn.Layer, "epsilon", nn.LayerList)
    )

    class Block(base):
        def __init__(self, k):
            super().__init__()
            self.norm = nn.LayerNorm(16, **{eps: 1e-3 if "eps" in faults and k == 2 else 1e-5})
            self.up, self.down = (
                nn.Linear(16, 16),
                nn.Linear(16, 16),
            )  # square: shapes do not tell how they lie
            fast = "gelu" in faults and k == 1
            self.act = nn.GELU(approximate=("tanh" if fast else "none") if is_torch else fast)

        def forward(self, x):
            return x + self.down(self.act(self.up(self.norm(x))))

    class Net(base):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
            self.blocks = many([Block(k) for k in range(3)])
            self.bn = (nn.BatchNorm1d if is_torch else nn.BatchNorm1D)(16)
            self.rnn = nn.LSTM(16, 16, batch_first=True) if is_torch else nn.LSTM(16, 16)

        def forward(self, ids):
            x = self.emb(ids)
            for k, block in enumerate(self.blocks):
                x = block(x)
                x = x * 1.01 if "extra" in faults and k == 1 else x
            x = self.bn(x.reshape(-1, 16) if is_torch else x.reshape([-1, 16])).reshape(x.shape)
            return self.head(self.rnn(x)[0])

    made = Net()
    made.eval()
    return made


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """Runs of one network in torch and in Paddle, whole and with faults."""
    import paddle
    import torch

    folder = tmp_path_factory.mktemp("nets")
    torch.manual_seed(0)
    ours = net("torch")
    with torch.no_grad():
        for parameter in (*ours.parameters(), ours.bn.running_mean):
            parameter.add_(0.1 * torch.randn_like(parameter))
        ours.bn.running_var.mul_(1.3)
    state = {k: v.numpy() for k, v in ours.state_dict().items()}
    ids = np.random.default_rng(0).integers(0, 40, (2, 9))
    with whence.capture(ours, folder / "torch"), torch.no_grad():
        ours(torch.from_numpy(ids))
    for name, faults in (
        ("right", ()),
        ("gelu", ("gelu",)),
        ("eps", ("eps",)),
        ("extra", ("extra",)),
    ):
        theirs = net("paddle", faults)
        for key, value in theirs.state_dict().items():
            if ".cell." in key:
                continue
            array = state[key.replace("_mean", "running_mean").replace("_variance", "running_var")]
            turned = array.ndim == 2 and key.split(".")[-2] in ("up", "down", "head")
            value.set_value(paddle.to_tensor(np.ascontiguousarray(array.T if turned else array)))
        with whence.capture(theirs, folder / name), paddle.no_grad():
            theirs(paddle.to_tensor(ids))
    return folder


def test_torch_and_paddle_with_one_set_of_weights_are_the_same(nets):
    result = whence.compare(nets / "torch", nets / "right")
    assert (result.status, result.findings, result.unmatched) == ("same", (), 0)
    assert result.coverage.replayed == result.coverage.calls


@pytest.mark.parametrize(("fault", "name"), [("gelu", "blocks.1.act"), ("eps", "blocks.2.norm")])
def test_the_layer_that_differs_is_named(nets, fault, name):
    assert [f.name for f in whence.compare(nets / "torch", nets / fault).findings] == [name]


def test_code_between_layers_is_named(nets):
    (finding,) = whence.compare(nets / "torch", nets / "extra").findings
    assert (finding.name, finding.slot) == ("Net", "2:input.0")
    assert "between blocks.1 and blocks.2" in finding.sentence


def test_map_weights_says_which_faces_which_and_compare_takes_it(nets, tmp_path, capsys):
    found = whence.map_weights(nets / "torch", nets / "right")
    told = {(w.reference, w.name): (w.target_name, w.dims, w.state) for w in found.pairs}
    assert told["blocks.0.up", "weight"] == ("weight", "x.T", "equal")
    assert told["emb", "weight"] == ("weight", "", "equal")
    assert told["bn", "running_mean"] == ("_mean", "", "equal")
    assert {state for _, _, state in told.values()} == {"equal"}
    with pytest.raises(SystemExit):
        main(
            [
                "map-weights",
                str(nets / "torch"),
                str(nets / "right"),
                "-o",
                str(tmp_path / "map.yaml"),
            ]
        )
    capsys.readouterr()
    result = whence.compare(nets / "torch", nets / "gelu", mapping=tmp_path / "map.yaml")
    assert [f.name for f in result.findings] == ["blocks.1.act"]
