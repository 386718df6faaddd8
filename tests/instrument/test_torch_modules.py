"""What a capture of torch modules writes down: names, order, steps, slots, identity, and every
element as torch holds it.
"""

import gc
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from live_torch import call, captured, ref, slots, tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import whence
from whence import store
from whence.instrument.options import CaptureOptions
from whence.instrument.session import Session
from whence.instrument.torch.modules import Listener
from whence.records import RunInfo
from whence.store import open_run

pytestmark = pytest.mark.torch


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x, *, scale=1.0):
        return {"hidden": self.down(self.act(self.up(x))) * scale, "none": None}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x, scale=0.5)["hidden"]
        return self.head(self.norm(self.norm(x)))


def net(train=False):
    torch.manual_seed(0)
    return Net().train(train)


IDS = torch.tensor([[1, 2, 3]])


def forward(model, times=1):
    with torch.no_grad():
        for _ in range(times):
            model(IDS)


def test_names_order_parents_and_tree_numbers(tmp_path):
    run = captured(net(), tmp_path / "run", forward)
    root = call(run, "")
    assert (root.root, root.op_type, root.number, root.parent, root.leaf, root.step) == (
        "Net",
        "Net",
        "0",
        -1,
        False,
        0,
    )
    got = {(c.scope, c.number, c.occurrence, c.leaf, c.parent) for c in run.calls}
    block0, block1 = call(run, "blocks.0").id, call(run, "blocks.1").id
    assert got == {
        ("", "0", 0, False, -1),
        ("embed", "1", 0, True, root.id),
        ("blocks.0", "2", 0, False, root.id),
        ("blocks.0.up", "2_1", 0, True, block0),
        ("blocks.0.act", "2_2", 0, True, block0),
        ("blocks.0.down", "2_3", 0, True, block0),
        ("blocks.1", "3", 0, False, root.id),
        ("blocks.1.up", "3_1", 0, True, block1),
        ("blocks.1.act", "3_2", 0, True, block1),
        ("blocks.1.down", "3_3", 0, True, block1),
        ("norm", "4", 0, True, root.id),
        ("norm", "5", 1, True, root.id),
        ("head", "6", 0, True, root.id),
    }
    assert sorted(c.order for c in run.calls) == list(range(13))
    began = [c.scope for c in sorted(run.calls, key=lambda c: c.order)]
    assert began[:5] == ["", "embed", "blocks.0", "blocks.0.up", "blocks.0.act"]
    assert call(run, "blocks.0").source.endswith("test_torch_modules.Mlp")
    assert call(run, "blocks.0").arguments == {"input.scale": 0.5}
    assert not any(c.training for c in run.calls)


def test_slots(tmp_path):
    run = captured(net(), tmp_path / "run", forward)
    assert slots(call(run, "")) == ["input.0", "output.0"]
    assert slots(call(run, "blocks.0")) == ["input.0", "output.hidden"]
    assert slots(call(run, "blocks.0.up")) == ["param.weight", "param.bias", "input.0", "output.0"]
    assert slots(call(run, "norm")) == ["param.weight", "param.bias", "input.0", "output.0"]


def test_what_one_call_makes_and_the_next_reads_is_one_record(tmp_path):
    run = captured(net(), tmp_path / "run", forward)
    up, act, norm, again = (
        call(run, "blocks.0.up"),
        call(run, "blocks.0.act"),
        call(run, "norm"),
        call(run, "norm", 1),
    )
    for made, reader in (
        (ref(up, "output.0"), ref(act, "input.0")),
        (ref(norm, "output.0"), ref(again, "input.0")),
    ):
        assert made.record == reader.record
        assert (made.edge, reader.edge) == ("", "identity")
    assert (
        ref(call(run, "embed"), "param.weight").record
        == ref(call(run, "head"), "param.weight").record
    )
    assert ref(call(run, "head"), "output.0").record == ref(call(run, ""), "output.0").record


def test_arrays_and_statistics_are_those_of_torch(tmp_path):
    model, seen = net(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, a, o, name=name: seen.update(
                {name: o["hidden"] if isinstance(o, dict) else o}
            )
        )
    run = captured(model, tmp_path / "run", forward)
    for name, value in seen.items():
        one = call(run, name, -1)
        slot = next(s for s in slots(one) if s.startswith("output"))
        assert torch.equal(tensor(run, one, slot), value)
        figures = run.records[ref(one, slot).record].statistics
        array = value.numpy().astype(np.float64)
        assert (figures.count, figures.min, figures.max) == (array.size, array.min(), array.max())
        assert np.allclose(
            [figures.mean, figures.std, figures.norm],
            [array.mean(), array.std(), np.linalg.norm(array)],
            rtol=1e-12,
        )
    assert torch.equal(
        tensor(run, call(run, "blocks.1.up"), "param.weight"), model.blocks[1].up.weight.detach()
    )


def test_a_step_is_one_forward_in_inference(tmp_path):
    run = captured(net(), tmp_path / "run", lambda m: forward(m, 3))
    assert [(c.step, c.micro) for c in run.calls if c.parent == -1] == [(0, 0), (1, 0), (2, 0)]
    assert [(s.root, s.step, s.kept) for s in run.steps] == [
        ("Net", 0, True),
        ("Net", 1, True),
        ("Net", 2, True),
    ]
    weights = {ref(c, "param.weight").record for c in run.calls if c.scope == "head"}
    assert len(weights) == 1
    assert run.steps[1].nbytes == 0  # the same input again: nothing new


def test_a_step_is_one_optimizer_step_in_training(tmp_path):
    def use(model):
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for _ in range(3):
                model(IDS).square().mean().backward()
            opt.step()
            opt.zero_grad()
        model.eval()
        forward(model)

    run = captured(net(train=True), tmp_path / "run", use)
    roots = [c for c in run.calls if c.parent == -1 and c.kind == "module"]
    assert [(c.step, c.micro) for c in roots] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
    ]
    heads = [c for c in run.calls if c.scope == "head" and c.phase == "forward"]
    weights = [ref(c, "param.weight").record for c in heads]
    assert weights[0] == weights[1] == weights[2] != weights[3] == weights[5] != weights[6]


@pytest.mark.parametrize("write", ["data", "numpy", "replaced", "loaded", "data_in_training"])
def test_a_changed_parameter_is_a_new_record(write, tmp_path):
    def use(model):
        grad = write == "data_in_training"
        model.train(grad)
        with torch.set_grad_enabled(grad):
            model(torch.ones(1, 4))
            if write == "data":
                model.weight.data.mul_(2)
            elif write == "numpy":
                model.weight.detach().numpy()[:] *= 2
            elif write == "replaced":
                model.weight = nn.Parameter(model.weight.detach() * 2)
            elif write == "loaded":
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
            else:
                model.weight.data[1, 1] += 1  # a single element of many
            model(torch.ones(1, 4))

    model = nn.Linear(4, 300)
    run = captured(model, tmp_path / "run", use)
    one, two = (ref(c, "param.weight").record for c in run.calls)
    assert one != two
    assert torch.equal(tensor(run, run.calls[1], "param.weight"), model.weight.detach())
    assert not torch.equal(tensor(run, run.calls[0], "param.weight"), model.weight.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_a_phase_of_its_own(reentrant, tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
            )

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    def use(model):
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            opt.step()

    run = captured(Checkpointed(), tmp_path / "run", use)
    again = [c for c in run.calls if c.phase == "recompute"]
    assert {(c.scope, c.step, c.micro) for c in again if c.parent == -1} == {
        (f"blocks.{b}", s, 0) for b in (0, 1) for s in (0, 1)
    }
    assert {c.error for c in run.calls} == {""}
    assert {c.phase for c in run.calls if c.kind == "module"} >= {"forward", "recompute"}
    assert len({c.key() for c in run.calls}) == len(run.calls)
    for c in again:
        if c.scope.endswith(".0") and c.scope.count(".") == 2 and "output.0" in slots(c):
            first = next(
                f
                for f in run.calls
                if f.phase == "forward" and f.scope == c.scope and f.step == c.step
            )
            assert torch.equal(tensor(run, c, "output.0"), tensor(run, first, "output.0"))


# ---- identity


class Passes(nn.Module):
    def forward(self, x):
        return x


class Program(nn.Module):
    """Two children with the given code between them."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = Passes(), Passes(), between

    def forward(self, x):
        y = self.a(x)
        return self.b(self.between(y))


def poke(y):
    y.numpy()[0] = 7.0
    return y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("between", "same"),
    [
        (lambda y: y, True),
        (poke, False),
        (lambda y: y.add_(1), False),
        (lambda y: y.clone(), False),
        (lambda y: y.view(2, 2), False),
    ],
    ids=["handed on", "written by numpy", "in place", "copied", "viewed"],
)
def test_identity(between, same, mode, tmp_path):
    def use(model):
        with mode():
            model(torch.arange(4.0) + 1)

    run = captured(Program(between), tmp_path / "run", use)
    made, read = ref(call(run, "a"), "output.0"), ref(call(run, "b"), "input.0")
    assert (made.record == read.record) is same
    if same:
        assert read.edge == ("identity" if mode is torch.no_grad else "content")
    else:
        assert read.edge == ""


def test_memory_given_out_again_is_another_tensor(tmp_path):
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Passes()

        def forward(self, x):
            places = []
            for _ in range(20):
                y = x * 2  # the same values, often at the same address
                places.append(y.data_ptr())
                self.leaf(y)
                del y
            self.reused = len(set(places)) < 20
            return x

    model = Reuses()
    run = captured(model, tmp_path / "run", lambda m: m(torch.ones(1000)))
    assert model.reused
    inputs = [ref(c, "input.0") for c in run.calls if c.scope == "leaf"]
    assert len({r.record for r in inputs}) == 20
    assert {r.edge for r in inputs} == {""}
    assert (
        len({run.records[r.record].elements.offset for r in inputs}) == 1
    )  # stored once all the same


def test_empty_tensors_are_not_merged(tmp_path):
    run = captured(
        Program(lambda y: torch.empty(0, 3)), tmp_path / "run", lambda m: m(torch.empty(0, 3))
    )
    assert ref(call(run, "a"), "output.0").record != ref(call(run, "b"), "input.0").record


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_mutated_inputs(mode, tmp_path):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf, self.soft = nn.ReLU(inplace=True), Passes()

        def forward(self, x, *, cache):
            cache[0] += 1
            self.soft(x)
            return self.leaf(x)

    def use(model):
        with mode():
            model(torch.tensor([-1.0, 2.0]), cache=[torch.zeros(2)])

    run = captured(Writes(), tmp_path / "run", use)
    leaf, root = call(run, "leaf"), call(run, "")
    assert tensor(run, leaf, "input.0").tolist() == [-1, 2]
    assert tensor(run, leaf, "mutated.0").tolist() == [0, 2]
    assert (
        ref(leaf, "mutated.0").record
        == ref(leaf, "output.0").record
        == ref(root, "output.0").record
    )
    assert tensor(run, root, "input.cache.0").tolist() == [0, 0]
    assert tensor(run, root, "mutated.cache.0").tolist() == [1, 1]
    assert "mutated.0" in slots(root)
    assert "mutated.0" not in slots(call(run, "soft"))


def test_running_statistics_are_mutated_parameters(tmp_path):
    model = nn.BatchNorm1d(3)
    run = captured(model, tmp_path / "run", lambda m: (m(torch.randn(4, 3)), m(torch.randn(4, 3))))
    one, two = run.calls
    assert {"mutated.running_mean", "mutated.running_var", "mutated.num_batches_tracked"} <= set(
        slots(one)
    )
    assert ref(one, "mutated.running_mean").record == ref(two, "param.running_mean").record
    assert torch.equal(tensor(run, two, "mutated.running_mean"), model.running_mean)


# ---- programs belong to the module that ran them


def test_a_module_at_the_address_of_a_dead_one(tmp_path):
    class Makes(nn.Module):
        def forward(self, x):
            for kind in (nn.Softmax, nn.LogSoftmax) * 4:
                x = kind(dim=0)(x)
            return x

    run = captured(Makes(), tmp_path / "run", lambda m: m(torch.ones(4)))
    for c in run.calls:
        if c.parent >= 0 and c.program:
            names = {o.name for o in run.programs[c.program].operations}
            assert any(
                ("log_softmax" in n) == (c.op_type == "LogSoftmax") for n in names if "softmax" in n
            ), (c.op_type, names)


# ---- caches of transformers


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generated(model, **more):
    return model.generate(
        torch.tensor([[1, 5, 9]]),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **more,
    )


@pytest.mark.filterwarnings("ignore")
def test_generation_with_a_cache_that_grows(llama, tmp_path):
    expected = generated(llama)
    out = []
    run = captured(llama, tmp_path / "run", lambda m: out.append(generated(m)))
    assert torch.equal(out[0], expected)
    roots = [c for c in run.calls if c.parent == -1]
    assert [c.step for c in roots] == [0, 1, 2, 3]
    assert "output.logits" in slots(roots[0])
    assert torch.equal(tensor(run, roots[2], "output.logits")[:, -1].argmax(-1), expected[:, 5])
    attention = [c for c in run.calls if c.scope == "model.layers.1.self_attn"]
    grown = [
        next(r for r in c.refs if r.slot.startswith("mutated") and r.slot.endswith("keys"))
        for c in attention
    ]
    assert [run.records[r.record].shape[2] for r in grown] == [3, 4, 5, 6]
    kinds = [type(run.records[r.record].elements).__name__ for r in grown]
    assert kinds == ["Kept", "Increment", "Increment", "Increment"]
    with torch.no_grad():
        whole = llama(expected[:, :6], use_cache=True).past_key_values.layers[1].keys
    last = torch.from_numpy(np.array(run.array(grown[-1].record)))
    assert torch.allclose(last, whole, atol=1e-5)
    for before, after in itertools.pairwise(grown):
        a, b = run.array(before.record), run.array(after.record)
        assert np.array_equal(a, b[:, :, : a.shape[2]])
    assert run.records[grown[-1].record].elements.nbytes < last.nbytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_of_fixed_size(mode, llama, tmp_path):
    from transformers import StaticCache

    def use(model):
        cache = StaticCache(config=model.config, max_cache_len=8)
        with mode():
            for at in range(3):
                model(torch.tensor([[at + 1]]), past_key_values=cache, use_cache=True)
        return cache

    kept = []
    run = captured(llama, tmp_path / "run", lambda m: kept.append(use(m)))
    for layer in (0, 1):
        calls = [c for c in run.calls if c.scope == f"model.layers.{layer}.self_attn"]
        seen = [
            [
                r
                for r in c.refs
                if r.slot.startswith("mutated") and r.slot.endswith(f"layers.{layer}.keys")
            ]
            for c in calls
        ]
        assert [len(s) for s in seen] == [1, 1, 1]
        assert np.array_equal(run.array(seen[-1][0].record), kept[0].layers[layer].keys.numpy())
        assert len({s[0].record for s in seen}) == 3
        other = [
            r.slot
            for c in calls
            for r in c.refs
            if r.slot.startswith("mutated") and f"layers.{1 - layer}." in r.slot
        ]
        assert other == []


# ---- what the user selects


def taken(run):
    return sorted({c.scope for c in run.calls if c.refs})


@pytest.mark.parametrize(
    ("options", "scopes"),
    [
        ({"include": "blocks.*.up"}, ["blocks.0.up", "blocks.1.up"]),
        (
            {"include": "re:blocks\\.1.*", "exclude": ["*.act"]},
            ["blocks.1", "blocks.1.down", "blocks.1.up"],
        ),
        ({"classes": "ReLU"}, ["blocks.0.act", "blocks.1.act"]),
        ({"max_depth": 1}, ["", "blocks.0", "blocks.1", "embed", "head", "norm"]),
        (
            {"ids": "2,3_1"},
            ["blocks.0", "blocks.0.act", "blocks.0.down", "blocks.0.up", "blocks.1.up"],
        ),
        ({"ids": "2", "no_children": True}, ["blocks.0"]),
    ],
    ids=str,
)
def test_selection_by_call(options, scopes, tmp_path):
    run = captured(net(), tmp_path / "run", forward, **options)
    assert taken(run) == scopes
    assert len(run.calls) == 13  # all are there, without their tensors
    assert [n for n in run.notes if n.kind == "selection"] == []


def test_a_pattern_that_matches_nothing_is_a_note(tmp_path):
    run = captured(net(), tmp_path / "run", forward, include=["blocks.*", "layers.*"], ids="2,9")
    told = [n.text for n in run.notes if n.kind == "selection"]
    assert len(told) == 2
    assert "'layers.*' matched none of 11 modules" in told[0]
    assert "'9'" in told[1]


@pytest.mark.parametrize(
    ("which", "kinds"),
    [("input", {"input"}), ("output", {"output"}), ("both", {"input", "output"})],
)
def test_selection_by_slot(which, kinds, tmp_path):
    run = captured(net(), tmp_path / "run", forward, slots=which)
    assert {r.slot.partition(".")[0] for c in run.calls for r in c.refs} == {"param", *kinds}


def test_selection_by_step(tmp_path):
    run = captured(net(), tmp_path / "run", lambda m: forward(m, 4), steps="1:3")
    assert {c.step for c in run.calls if c.refs} == {1, 2}


def test_keep(tmp_path):
    stats = captured(net(), tmp_path / "stats", forward, keep="stats")
    assert all(
        r.statistics is not None and r.elements is None and "--keep stats" in r.why
        for r in stats.records
    )
    none = captured(net(), tmp_path / "none", forward, keep="none")
    assert all(r.statistics is None and r.elements is None and r.why for r in none.records)
    assert [c.scope for c in none.calls] == [c.scope for c in stats.calls]


def test_no_inputs(tmp_path):
    run = captured(net(), tmp_path / "run", forward, no_inputs=["embed"])
    record = run.records[ref(call(run, ""), "input.0").record]
    assert record.elements is not None  # seen at the root first, which was not named
    run = captured(net(), tmp_path / "run2", forward, no_inputs=["input.0"])
    record = run.records[ref(call(run, "embed"), "input.0").record]
    assert (record.elements, record.statistics.max) == (None, 3.0)
    assert "--no-inputs" in record.why


def test_on_record_makes_columns_and_never_raises(tmp_path):
    seen = []

    def on_record(op_type, name, value):
        seen.append((op_type, name))
        if op_type == "ReLU":
            raise ZeroDivisionError("mine")
        return {"peak": float(value.abs().max())} if value.is_floating_point() else None

    run = captured(net(), tmp_path / "run", forward, on_record=on_record)
    record = run.records[ref(call(run, "head"), "output.0").record]
    assert record.columns == {
        "peak": pytest.approx(max(abs(record.statistics.min), abs(record.statistics.max)))
    }
    assert ("Embedding", "embed:output.0") in seen
    notes = [n for n in run.notes if n.kind == "hook-error"]
    assert len(notes) == 2
    assert notes[0].text == "on_record raised ZeroDivisionError: mine"
    assert notes[0].scope == "blocks.0.act:output.0"


def test_live_printing(tmp_path, capsys):
    captured(net(), tmp_path / "run", forward, print_pattern="blocks.0.*")
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("whence:")
    ]
    assert {line.partition(":")[0] for line in lines} == {
        "blocks.0.up",
        "blocks.0.act",
        "blocks.0.down",
    }
    assert any(line.startswith("blocks.0.up:output.0  float32 [1, 3, 8]  min ") for line in lines)


def test_settings_are_noted(tmp_path):
    run = captured(net(), tmp_path / "run", forward)
    (note,) = [n for n in run.notes if n.kind == "settings"]
    told = json.loads(note.text)
    assert note.scope == "Net"
    assert (told["training"], told["parameter_dtypes"], told["torch"]) == (
        False,
        {"float32": 11},
        str(torch.__version__),
    )


# ---- the byte budget


def test_whole_steps_are_kept_first_ones_first(tmp_path, capsys):
    def use(model):
        with torch.no_grad():
            for step in range(6):
                model(torch.full((4, 100), float(step + 1)))

    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100)).eval()
    parameters, step = 2 * 10_100 * 4, 4 * 100 * 4 * 4
    run = captured(model, tmp_path / "run", use, max_bytes=parameters + 3 * step + step // 2)
    assert [s.kept for s in run.steps] == [True, True, True, False, False, False]
    for c in run.calls:
        kept = {
            run.records[r.record].elements is not None
            for r in c.refs
            if not r.slot.startswith("param")
        }
        assert kept == {c.step < 3}
    assert all(r.statistics is not None for r in run.records)
    assert capsys.readouterr().err == "", "the size of a step is told at a terminal only"
    (note,) = [n for n in run.notes if n.kind == "budget"]
    assert "elements end here" in note.text


def test_a_first_step_that_does_not_fit_stops_between_calls(tmp_path, capsys):
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)]).eval()
    run = captured(model, tmp_path / "run", lambda m: m(torch.ones(1, 100)), max_bytes=60_000)
    kept = [
        {run.records[r.record].elements is not None for r in c.refs}
        for c in run.calls
        if c.parent >= 0
    ]
    assert kept == [{True}, {True}, {True, False}, {True, False}] or kept[:2] == [{True}, {True}]
    assert all(
        len({run.records[r.record].elements is not None for r in c.refs if r.edge == ""}) <= 1
        for c in run.calls
    )
    assert "no whole step fits into --max-bytes 60 kB" in capsys.readouterr().err


def test_several_roots_and_modules_outside(tmp_path):
    model = net()
    with whence.capture(model.blocks, tmp_path / "run"):
        forward(model)
        nn.Linear(2, 2)(torch.ones(2))
    run = open_run(tmp_path / "run")
    assert [(c.root, c.scope, c.number) for c in run.calls if c.parent == -1] == [
        ("ModuleList", "0", "0"),
        ("ModuleList", "1", "0"),
    ]


def test_a_module_made_anew_at_every_step_is_one_root(tmp_path):
    session = Session(
        lambda rank: store.Writer(str(tmp_path / "run"), rank),
        CaptureOptions(),
        max_bytes=1 << 20,
        say=lambda text: None,
    )
    store.create(str(tmp_path / "run"), RunInfo())
    listener = Listener(session)
    listener.install()
    try:
        for _ in range(3):
            nn.ReLU().eval()(torch.ones(2))
    finally:
        listener.remove()
        session.close()
    assert [(c.root, c.step) for c in open_run(str(tmp_path / "run")).calls] == [
        ("ReLU", 0),
        ("ReLU", 1),
        ("ReLU", 2),
    ]


class Cell(nn.Module):
    def forward(self, x, h, c):
        return torch.tanh(x + h), c + x * h


def test_inputs_that_are_one_tensor_make_a_program_of_their_own(tmp_path):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            h = c = torch.zeros(4)
            for i in range(3):
                h, c = self.cell(x[i], h, c)
            return h + c

    model = Loop().eval()
    for name in ("ref", "tgt"):
        with torch.no_grad(), whence.capture(model, tmp_path / name, force=True):
            model(torch.arange(12.0).reshape(3, 4) / 7 + (1e-7 if name == "tgt" else 0))
    programs = [c.program for c in open_run(str(tmp_path / "ref")).calls if c.scope == "cell"]
    assert len(set(programs[1:])) == 1
    assert programs[0] != programs[1]
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.coverage.replayed == result.coverage.calls, [v.sentence for v in result.verdicts]


def test_the_block_cache_of_an_engine_is_left_out_and_told(tmp_path):
    """It is not a parameter, grows to the memory left, and changes at every step."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.kv_cache = [torch.zeros(2, 4 << 20), torch.zeros(2, 4 << 20)]
            self.small_cache, self.scale = torch.ones(4), torch.tensor(0.5)

        def forward(self, x):
            self.kv_cache[0][0, : x.numel()] = x.reshape(-1)
            return x * self.scale + self.small_cache

    model = Attention()
    with torch.no_grad(), whence.capture(model, tmp_path / "run"):
        for _ in range(2):
            model(torch.ones(2, 4))
    run = open_run(tmp_path / "run")
    assert {r.slot for c in run.calls for r in c.slots("param")} == {
        "param.scale",
        "param.small_cache",
    }
    told = [n for n in run.notes if n.kind == "not-captured"]
    assert [n.text for n in told] == [
        "kv_cache: a cache that the module keeps, 64 MiB or more, and no parameter"
    ]


def test_calls_take_no_reference_away(tmp_path):
    """torch 2.6 and 2.7 return dynamo's callback, mostly None, without counting the reference."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad(), whence.capture(model, tmp_path / "run", keep="none"):
        model(x)
        gc.collect()
        gc.disable()  # what others left behind holds references, too
        try:
            before = sys.getrefcount(None)
            for _ in range(300):
                model(x)
            assert sys.getrefcount(None) > before - 100
        finally:
            gc.enable()
