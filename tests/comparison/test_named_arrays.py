"""Targets that are nothing but named arrays: a numpy port of a small torch model, its tensors
paired and its faults named.
"""

import numpy as np
import pytest

import whence
from whence.errors import OutputExists, StoreFailed, UsageError
from whence.judge.policy import parse

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYERS, HEADS, WIDTH, TOKENS, WORDS = 4, 3, 8, 9, 50
DIM = HEADS * WIDTH


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(1 + torch.randn(DIM) / 10)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, torch.nn.Linear(DIM, DIM, bias=False))
        self.up, self.down = torch.nn.Linear(DIM, 2 * DIM), torch.nn.Linear(2 * DIM, DIM)

    def forward(self, h):
        x = self.norm1(h)
        split = [
            m(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for m in (self.q, self.k, self.v)
        ]
        turn = torch.arange(TOKENS)[:, None] * 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        q, k = (
            torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)
            for a, b in (x.chunk(2, -1) for x in split[:2])
        )
        hidden = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        seen = torch.softmax(q @ k.mT / WIDTH**0.5 + hidden, -1) @ split[2]
        h = h + self.o(seen.transpose(1, 2).flatten(2))
        return h + self.down(torch.nn.functional.silu(self.up(self.norm2(h))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, DIM)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = Norm(), torch.nn.Linear(DIM, WORDS, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model, ids = Model().eval(), torch.randint(0, WORDS, (2, TOKENS))
    path = tmp_path_factory.mktemp("labels") / "ref"
    with torch.no_grad(), whence.capture(model, path):
        model(ids)
    return path, {n: p.detach().numpy() for n, p in model.named_parameters()}, ids.numpy()


def port(w, ids, change=lambda name, layer, value: value, through=lambda x: x):
    """The model again in numpy, float32, (b, q, h, d) attention, other names. change: plants a
    fault. through: what products are given.
    """

    def norm(x, g):
        return (x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * g).astype(
            np.float32
        )

    def product(x, name):
        return through(x) @ w[f"{name}.weight"].T + w.get(f"{name}.bias", np.float32(0))

    taps = {}
    h = w["embed.weight"][ids]
    turn = (np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)).astype(
        np.float32
    )
    cos, sin = (f(turn)[None, :, None] for f in (np.cos, np.sin))
    for i in range(LAYERS):
        taps[f"h{i}"] = h = change("h", i, h)
        p = f"layers.{i}."
        x = norm(h, change("norm1", i, w[p + "norm1.weight"]))
        q, k, v = (product(x, p + n).reshape(2, TOKENS, HEADS, WIDTH) for n in "qkv")
        q, k = (
            np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            for a, b in (np.split(z, 2, -1) for z in (q, k))
        )
        taps[f"q{i}"] = q = change("q", i, q)
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(WIDTH) ** np.float32(0.5)
        scores = change(
            "mask", i, scores + np.triu(np.full((TOKENS, TOKENS), -np.inf, np.float32), 1)
        )
        e = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v).reshape(2, TOKENS, DIM)
        h = h + product(seen, p + "o")
        up = product(norm(h, w[p + "norm2.weight"]), p + "up")
        h = h + change("mlp", i, product(up / (1 + np.exp(-up)), p + "down"))
    # An order that is not that of execution, as a dict that a compiler sorted.
    return {
        "logits": product(norm(h, w["norm.weight"]), "head"),
        **dict(sorted(taps.items(), reverse=True)),
    }


def test_all_tensors_are_paired_and_the_port_is_the_same(case):
    path, w, ids = case
    taps = port(w, ids)
    result = whence.compare(path, taps)
    assert result.status == "same", result.headline
    assert result.evidence == "replay"
    assert result.without_partner == {}
    assert result.coverage.share == 1.0
    assert any("shows no parameters" in n for n in result.notes)
    outputs = {
        (r.name, r.reference_slot.partition(".")[0]): r
        for r in result.rows
        if not r.reference_slot.startswith("input")
    }
    assert {
        ("embed", "output"),
        ("head", "output"),
        *((f"layers.{i}", "output") for i in range(LAYERS - 1)),
    } <= set(outputs)
    assert [
        i for i in range(LAYERS) if (f"layers.{i}", "inside") not in outputs
    ] == []  # q is not a module's output
    assert all(r.measured.values["rel_l2"] < 1e-5 for r in result.rows if not r.measured.identical)


@pytest.mark.parametrize(
    ("name", "fault", "expected"),
    [
        ("h", lambda v: v * np.float32(1.5), "layers.1"),
        ("norm1", lambda v: v * np.float32(1.01), "layers.2"),
        ("q", lambda v: v * np.float32(1.02), "layers.2"),
        ("mask", lambda v: np.where(np.isfinite(v), v, 0).astype(np.float32), "layers.2"),
        ("mlp", lambda v: v * np.float32(1.005), "layers.2"),
        (
            "mlp",
            lambda v: (
                v
                * np.float32([[[1.3 if t == 4 else 1]] for t in range(TOKENS)]).reshape(
                    1, TOKENS, 1
                )
            ),
            "layers.2",
        ),
    ],
)
def test_a_fault_in_one_layer_is_named_and_its_tensors_keep_their_partners(
    case, name, fault, expected
):
    path, w, ids = case
    result = whence.compare(
        path, port(w, ids, lambda n, i, v: fault(v) if (n, i) == (name, 2) else v)
    )
    assert result.status == "different"
    assert result.findings[0].name.split("..")[0].startswith(expected), result.findings
    assert len(result.findings) == 1
    rows = {r.reference_record: r.target_record for r in result.rows}
    assert len(set(rows.values())) == len(rows)
    assert {r.name for r in result.rows if r.reference_slot == "output.0"} >= {
        f"layers.{i}" for i in range(LAYERS - 1)
    }
    assert result.without_partner == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_the_finding(case, bad):
    path, w, ids = case
    taps = port(w, ids)
    taps["h2"] = taps["h2"].copy()
    taps["h2"][0, 0, 0] = bad
    result = whence.compare(path, taps)
    assert result.status == "different"
    assert result.findings[0].name.startswith("layers.1")


def test_a_layer_left_out_does_not_shift_the_names_behind_it(case):
    path, w, ids = case
    skipped = {}

    def change(name, layer, value):
        if name == "h" and layer == 2:
            return skipped["h"]
        if name == "h" and layer == 1:
            skipped["h"] = value
        return value

    result = whence.compare(path, port(w, ids, change))
    assert result.status == "different"
    assert result.findings[0].name == "layers.1"


def test_the_same_fault_in_all_layers_is_no_coarser_arithmetic(case):
    path, w, ids = case
    result = whence.compare(
        path, port(w, ids, lambda n, i, v: v * np.float32(1.01) if n == "mlp" else v)
    )
    assert result.status == "different"
    assert result.findings[0].name == "layers.0"


def test_activations_of_eight_bits_are_recognised_and_a_fault_beside_them_is_named(case):
    from whence.judge.block_quantisation import in_blocks

    path, w, ids = case
    coarse = lambda x: in_blocks(x, width=0)  # noqa: E731
    result = whence.compare(path, port(w, ids, through=coarse))
    assert result.status in ("same", "undecided"), result.findings
    assert result.findings == ()
    assert any("8 bits by row" in n for n in result.notes)
    broken = whence.compare(
        path,
        port(
            w,
            ids,
            lambda n, i, v: v * np.float32(1.5) if (n, i) == ("mlp", 1) else v,
            through=coarse,
        ),
    )
    assert broken.status == "different"
    assert {f.name for f in broken.findings} == {"layers.1"}


def test_a_recording_is_a_run_like_any_other(case, tmp_path):
    path, w, ids = case
    taps = port(w, ids)
    whence.record(tmp_path / "tgt", taps)
    stored = whence.open_run(str(tmp_path / "tgt"))
    assert [c.scope for c in stored.calls] == list(taps)
    for call in stored.calls:
        np.testing.assert_array_equal(stored.array(call.refs[0].record), taps[call.scope])
    assert whence.compare(path, tmp_path / "tgt").status == "same"
    with pytest.raises(OutputExists):
        whence.record(tmp_path / "tgt", taps)


def test_names_repeat_steps_count_and_tensors_of_torch_keep_their_dtype(tmp_path):
    with whence.recording(tmp_path / "run") as run:
        run.add("q", torch.ones(3, dtype=torch.bfloat16), op="MUL_MAT")
        run.add("q", np.float16([1, 2]), op="ROPE")
        run.add("q", 3.5, step=1)
    calls = whence.open_run(str(tmp_path / "run"))
    assert [(c.scope, c.occurrence, c.step, c.op_type, c.kind) for c in calls.calls] == [
        ("q", 0, 0, "MUL_MAT", "label"),
        ("q", 1, 0, "ROPE", "label"),
        ("q", 0, 1, "", "label"),
    ]
    assert [r.dtype for r in calls.records] == ["bfloat16", "float16", "float64"]
    with pytest.raises(StoreFailed, match="closed"):
        run.add("late", np.ones(1))


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        np.ones(3),
        [("a",)],
        [(1, np.ones(2))],
        {"a": "words"},
        {"": np.ones(1)},
        {"a": [object()]},
    ],
)
def test_what_is_no_run_of_arrays_is_refused(tmp_path, bad):
    with pytest.raises(UsageError):
        whence.record(tmp_path / "run", bad)


def test_arrays_against_arrays_are_judged_by_their_order():
    rng = np.random.default_rng(0)
    reference = {f"h{i}": rng.standard_normal((4, 64)).astype(np.float32) for i in range(5)}

    def target(fault=()):
        return {
            n: (a * np.float32(1 + 1e-7) * (2 if n in fault else 1)).astype(np.float32)
            for n, a in reference.items()
        }

    assert whence.compare(reference, target()).status == "same"
    broken = whence.compare(reference, target(("h2", "h3", "h4")))
    assert broken.status == "different"
    assert [f.name for f in broken.findings] == ["h2"]
    assert broken.findings[0].confidence == "likely"
    first = whence.compare(reference, target(tuple(reference)))
    # Nothing before it is seen, but twice everything is no rounding.
    assert [(f.name, f.confidence) for f in first.findings] == [("h0", "likely")]
    assert (
        whence.compare(reference, {n: a for n, a in target().items() if n != "h4"}).status
        == "undecided"
    )


@pytest.mark.parametrize("fault", [False, True])
def test_arrays_of_float32_handed_over_as_float64_are_judged_as_float32(case, fault, tmp_path):
    path, w, ids = case
    taps = port(
        w, ids, lambda n, i, v: v * np.float32(1.005) if fault and (n, i) == ("mlp", 2) else v
    )
    whence.record(tmp_path / "wide", {n: a.astype(np.float64) for n, a in taps.items()})
    for wide in (tmp_path / "wide", {n: a.tolist() for n, a in taps.items()}):
        result = whence.compare(path, wide)
        assert result.status == ("different" if fault else "same"), result.findings
        assert [f.name.split("..")[0][:8] for f in result.findings] == (
            ["layers.2"] if fault else []
        )
        assert any(
            f"{len(taps)} tensors stored in float64 hold numbers of float32" in n
            for n in result.notes
        )


def test_arrays_of_float32_on_both_sides_handed_over_as_float64(tmp_path):
    rng = np.random.default_rng(0)
    one = {f"h{i}": rng.standard_normal((4, 64)).astype(np.float32) for i in range(4)}
    one["loss"] = np.float32(0.7340112)
    two = {n: (a * np.float32(1 + 1e-7)).astype(np.float32) for n, a in one.items()}
    wide = [{n: a.astype(np.float64) for n, a in arrays.items()} for arrays in (one, two)]
    assert whence.compare(*wide).status == whence.compare(one, two).status == "same"
    fine = whence.compare(
        {n: a + 1e-12 for n, a in wide[0].items()}, {n: a + 1e-12 for n, a in wide[1].items()}
    )
    assert fine.status == "undecided"  # numbers of float64, 1e-7 apart


def allow(**entry):
    return parse({"allow": [{"declare": "tolerance", "why": "known", **entry}]})


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        ({"module": "h3", "rel_l2": 1e-2}, "same"),
        ({"module": "h*", "rtol": 1e-2, "atol": 1e-2}, "same"),
        ({"module": "h3", "ignore": True}, "same"),
        ({"module": "layers.2", "rel_l2": 1e-2}, "same"),
        ({"module": "h3", "rel_l2": 1e-5}, "different"),
        ({"module": "h2", "rel_l2": 1}, "different"),
        ({"module": "h3", "rel_l2": 1, "slot": "input.*"}, "different"),
    ],
)
def test_a_policy_selects_a_tensor_by_its_name_or_by_what_it_faces(case, entry, status):
    path, w, ids = case
    result = whence.compare(
        path,
        port(w, ids, lambda n, i, v: v * np.float32(1.005) if (n, i) == ("mlp", 2) else v),
        policy=allow(**entry),
    )
    assert result.status == status, result.findings
    if status == "same":
        assert [(d.calls, d.ignored) for d in result.declared] == [(1, "ignore" in entry)]
        assert [v.verdict for v in result.verdicts].count("declared") == 1
    else:
        assert result.declared == ()


def test_a_policy_selects_an_array_of_both_sides_and_an_unknown_name_is_an_error(case):
    rng = np.random.default_rng(0)
    one = {f"h{i}": rng.standard_normal((4, 64)).astype(np.float32) for i in range(4)}
    two = {n: a * np.float32(1.01 if n == "h2" else 1) for n, a in one.items()}
    assert whence.compare(one, two).status == "different"
    assert whence.compare(one, two, policy=allow(module="h2", rel_l2=0.02)).status == "same"
    assert whence.compare(one, two, policy=allow(module="h2", rel_l2=0.005)).status == "different"
    with pytest.raises(UsageError, match="matches no call that both runs have"):
        whence.compare(one, two, policy=allow(module="h9", ignore=True))
    with pytest.raises(UsageError, match="matches no call that both runs have"):
        whence.compare(
            case[0], {"h0": port(*case[1:])["h0"]}, policy=allow(module="h9", ignore=True)
        )


def test_arrays_as_the_reference_of_a_captured_run(case):
    path, w, ids = case

    def streams(change=lambda n, i, v: v):
        return dict(sorted((n, a) for n, a in port(w, ids, change).items() if n[0] == "h"))

    clean = whence.compare(streams(), path)
    assert clean.status == "same"
    assert clean.coverage.replayed == 0
    broken = whence.compare(streams(lambda n, i, v: v * 2 if (n, i) == ("h", 2) else v), path)
    assert broken.status == "different"
    assert broken.findings[0].name == "h2"


def test_arrays_that_resemble_nothing_are_undecided_and_said(case):
    path = case[0]
    result = whence.compare(
        path, {"a": np.ones(7, np.float32), "b": np.ones((2, TOKENS, DIM), np.float32)}
    )
    assert result.status == "undecided"
    assert result.coverage.paired == 0
    assert any("no tensor of the labels resembles" in n for n in result.plan.notes)


def test_a_map_says_which_label_a_module_faces(case, tmp_path):
    path, w, ids = case
    taps = {n: a for n, a in port(w, ids).items() if n in ("h0", "h1", "h3", "logits")}
    taps["other"] = np.ascontiguousarray(port(w, ids)["h2"].transpose(1, 0, 2)) * np.float32(
        3
    )  # not to be known by its elements
    chart = tmp_path / "map.yaml"
    chart.write_text("pairs:\n- {reference: layers.1, target: other}\n")
    result = whence.compare(path, taps, mapping=chart)
    row = next(r for r in result.rows if (r.name, r.reference_slot) == ("layers.1", "output.0"))
    assert row.target_shape == row.reference_shape
    assert row.measured.values["rel_l2"] == pytest.approx(2, abs=1e-4)
    assert result.findings[0].name == "layers.1"
