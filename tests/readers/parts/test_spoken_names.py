"""What people write into names of files: steps, ranks, counters, inputs and outputs."""

import pytest

from whence.readers.assembly import named_tensors
from whence.readers.assembly.builder import Building
from whence.readers.assembly.named_tensors import Named
from whence.readers.assembly.spoken_names import counted, sides, tell
from whence.readers.source import Place


@pytest.mark.parametrize(
    ("paths", "inner", "said"),
    [
        (["step3/rank_1/fc.npy"], [""], [("fc", 3, 1)]),
        (["fc_step0.npy", "fc_step1.npy"], ["", ""], [("fc", 0, 0), ("fc", 1, 0)]),
        (["acts_step0.pt", "acts_step1.pt"], ["fc", "fc"], [("fc", 0, 0), ("fc", 1, 0)]),
        (["iter_0000010/d.npz", "iter_0000020/d.npz"], ["a", "a"], [("a", 10, 0), ("a", 20, 0)]),
        (["epoch1_batch0/a.pt", "epoch1_batch4/a.pt"], ["", ""], [("a", 0, 0), ("a", 4, 0)]),
        (["epoch1_batch0/a.pt", "epoch0_batch4/a.pt"], ["", ""], [("a", 1, 0), ("a", 0, 0)]),
        (["mp_rank_00/a.pt", "mp_rank_01/a.pt"], ["", ""], [("a", 0, 0), ("a", 0, 1)]),
        (["dp0/tp1/a.pt", "dp1/tp0/a.pt"], ["", ""], [("a", 0, 0), ("a", 0, 1)]),
        (["global_step5/dp1/a.pt"], [""], [("a", 5, 1)]),
        (["a.rank1.step2.npy", "b.rank1.step2.npy"], ["", ""], [("a", 2, 1), ("b", 2, 1)]),
        (["token_2_a.pt", "token_3_a.pt"], ["", ""], [("a", 2, 0), ("a", 3, 0)]),
        (["第2步/a.npy", "第3步/a.npy"], ["", ""], [("a", 2, 0), ("a", 3, 0)]),
        (["步骤1/a.npy", "步骤2/a.npy"], ["", ""], [("a", 1, 0), ("a", 2, 0)]),
        (["l.0.a-0.f32", "l.0.a-1.f32", "l.1.a-0.f32", "l.1.a-1.f32"], [""] * 4,
         [("l.0.a", 0, 0), ("l.0.a", 1, 0), ("l.1.a", 0, 0), ("l.1.a", 1, 0)]),
        (["q_0.npy", "q_1.npy", "k_0.npy", "k_1.npy"], [""] * 4,
         [("q_0", 0, 0), ("q_1", 0, 0), ("k_0", 0, 0), ("k_1", 0, 0)]),
        (["a.pt"] * 4, ["t=981.l.0.q", "t=981.l.1.q", "t=961.l.0.q", "t=961.l.1.q"],
         [("l.0.q", 981, 0), ("l.1.q", 981, 0), ("l.0.q", 961, 0), ("l.1.q", 961, 0)]),
        (["l.0.q[0].npy", "l.0.q[1].npy", "l.1.q[0].npy", "l.1.q[1].npy"], [""] * 4,
         [("l.0.q", 0, 0), ("l.0.q", 1, 0), ("l.1.q", 0, 0), ("l.1.q", 1, 0)]),
        (["l.0.q/0000.pt", "l.0.q/0001.pt", "l.1.q/0000.pt", "l.1.q/0001.pt"], [""] * 4,
         [("l.0.q", 0, 0), ("l.0.q", 1, 0), ("l.1.q", 0, 0), ("l.1.q", 1, 0)]),
        (["a.h5"] * 2, ["l/0/q/iter0/out", "l/0/q/iter1/out"], [("l.0.q.out", 0, 0), ("l.0.q.out", 1, 0)]),
        (["a100-node3_41/x.pt", "a100-node3_41/y.pt"], ["", ""], [("x", 0, 0), ("y", 0, 0)]),
        (["a-70317.npy", "b-70317.npy"], ["", ""], [("a", 0, 0), ("b", 0, 0)]),
        (["a.pkl"] * 2, ["['l'][0]['q']", "['l'][1]['q']"], [("l[0].q", 0, 0), ("l[1].q", 0, 0)]),
        (["Layers2OProj.npy", "Layers2QProj.npy"], ["", ""], [("Layers_2_OProj", 0, 0), ("Layers_2_QProj", 0, 0)]),
        (["a.pt"] * 6, ["l.0.0", "l.0.1", "l.1.0", "l.1.1", "rest.0", "rest.2"],
         [(n, 0, 0) for n in ("l.0.0", "l.0.1", "l.1.0", "l.1.1", "rest.0", "rest.2")]),
        (["etape_1/a.npy", "etape_2/a.npy"], ["", ""], [("a", 1, 0), ("a", 2, 0)]),
        (["inputs.pt"], ["a"], [("a.input", 0, 0)]),
        (["fc.npz", "act.npz"], ["arr_0", "arr_0"], [("fc", 0, 0), ("act", 0, 0)]),
        (["token_type.pt", "a_step.pt", "x.pt"], [""] * 3, [("token_type", 0, 0), ("a_step", 0, 0), ("x", 0, 0)]),
        (["conv_token_1.pt", "b.pt", "c.pt"], [""] * 3, [("conv_token_1", 0, 0), ("b", 0, 0), ("c", 0, 0)]),
    ],
)  # fmt: skip
def test_steps_and_ranks(paths, inner, said):
    assert [tuple(one) for one in tell(paths, inner)] == said


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["A.IN", "A.OUT"], [("A", "input", "0"), ("A", "output", "0")]),
        (["a.input", "b.input"], [("a.input", "output", "0"), ("b.input", "output", "0")]),
        (["l_1.in.x", "l_1.out.x", "l_1.in.y", "l_1.out.y"],
         [("l_1.x", "input", "0"), ("l_1.x", "output", "0"), ("l_1.y", "input", "0"), ("l_1.y", "output", "0")]),
        (["a.inputs_0", "a.inputs_1", "a.outputs_0"], [("a", "input", "0"), ("a", "input", "1"), ("a", "output", "0")]),
        (["4.Block-input.x", "4.Block-output.y"], [("4.Block", "input", "x"), ("4.Block", "output", "y")]),
        (["a_input", "a_ouput"], [("a", "input", "0"), ("a", "output", "0")]),
        (["a:input[1]", "a:output[0]"], [("a", "input", "1"), ("a", "output", "0")]),
        (["a__hidden__in", "a__out"], [("a", "input", "hidden"), ("a", "output", "0")]),
        (["a_in", "a_out", "b_in", "b_out", "logits"],
         [("a", "input", "0"), ("a", "output", "0"), ("b", "input", "0"), ("b", "output", "0"), ("logits", "output", "0")]),
        (["out1", "out2"], [("out1", "output", "0"), ("out2", "output", "0")]),
        (["a.pre", "a.post"], [("a", "input", "0"), ("a", "output", "0")]),
        (["a/b.x", "a/b.y"], [("a/b", "input", "0"), ("a/b", "output", "0")]),
        (["hook_resid_pre", "hook_z"], [(n, "output", "0") for n in ("hook_resid_pre", "hook_z")]),
        (["inputs.a.b", "outputs.a.b"], [("a.b", "input", "0"), ("a.b", "output", "0")]),
        (["a_in", "a_out"], [("a", "input", "0"), ("a", "output", "0")]),
        (["层_输入", "层_输出"], [("层", "input", "0"), ("层", "output", "0")]),
        (["a.output.dense_in", "a.output.dense_out"], [("a.output.dense", "input", "0"), ("a.output.dense", "output", "0")]),
        (["bert.output", "bert.output.dense", "x"], [(n, "output", "0") for n in ("bert.output", "bert.output.dense", "x")]),
        (["conv_in", "mid", "conv_out"], [(n, "output", "0") for n in ("conv_in", "mid", "conv_out")]),
        (["input_layernorm", "mlp"], [(n, "output", "0") for n in ("input_layernorm", "mlp")]),
    ],
)  # fmt: skip
def test_inputs_and_outputs(names, told):
    assert sides(names) == told


@pytest.mark.parametrize(
    ("scopes", "told"),
    [
        (["003_a", "004_b"], [("a", 3), ("b", 4)]),
        (["a_3", "b_4"], [("a", 3), ("b", 4)]),
        (["dump_3_a", "dump_4_b"], [("a", 3), ("b", 4)]),
        (
            ["a-1764000000123456789", "b-1764000000123456999"],
            [("a", 1764000000123456789), ("b", 1764000000123456999)],
        ),
        (["4.a", "4.a", "5.b"], [("a", 4), ("a", 4), ("b", 5)]),
        (["layer_0", "layer_1"], None),
        (["q_0", "k_0", "q_1", "k_1"], None),
        (["0.fc", "0.act", "1.fc"], None),
    ],
)
def test_counters(scopes, told):
    assert counted([0] * len(scopes), scopes) == told


def test_a_name_that_says_all_takes_the_place_of_that_of_its_file(tmp_path):
    for name in ("a_0", "b_1"):
        (tmp_path / f"{name}.x").write_bytes(b"x")
    items = named_tensors.of_files(
        Building(tmp_path, "x"),
        Place(tmp_path),
        lambda name: name.endswith(".x"),
        lambda _building, file: [Named(f"fc.{file.size}", "int8", (), None, "x", is_whole=True)],
    )
    assert [item.name for item in items] == ["fc.1", "fc.1"]


@pytest.mark.parametrize(
    ("paths", "ranks"),
    [
        (["it3_r0/x.pt", "it3_r0/y.pt", "it3_r1/x.pt", "it3_r1/y.pt"], [0, 0, 1, 1]),
        (["x_r0.npy", "y_r0.npy", "x_r1.npy"], [0, 0, 1]),  # one was lost
        (["r0/conv.npy", "r1/conv.npy", "stem.npy"], [0, 0, 0]),
        (["r0.npy", "r1.npy"], [0, 0]),
        (["block_r0.npy", "block_r1.npy", "fc.npy"], [0, 0, 0]),
    ],
)
def test_a_letter_is_a_rank_where_each_has_most_names(paths, ranks):
    spoken = tell(paths, [""] * len(paths))
    assert [say.rank for say in spoken] == ranks
    assert any(ranks) or len({say.name for say in spoken}) == len(paths)


def test_a_folder_of_the_process_is_no_name_and_one_of_numbers_counts_forwards():
    paths = [f"4711/{step}/fc.{n}/out.npy" for step in (0, 1) for n in (0, 1)]
    spoken = tell(paths, [""] * 4)
    assert [(say.name, say.step) for say in spoken] == [
        ("fc.0.out", 0),
        ("fc.1.out", 0),
        ("fc.0.out", 1),
        ("fc.1.out", 1),
    ]
    files = [f"rank{rank}/s{step}.pt" for rank in (0, 1) for step in (0, 1) for _ in (0, 1)]
    spoken = tell(files, ["fc.0", "fc.1"] * 4)
    assert [(say.name, say.step, say.rank) for say in spoken[1:4]] == [
        ("fc.1", 0, 0),
        ("fc.0", 1, 0),
        ("fc.1", 1, 0),
    ]
    experts = tell(["l0.pt", "l0.pt", "l1.pt", "l1.pt"], ["e.0", "e.1"] * 2)
    assert [say.name for say in experts] == ["l0.e.0", "l0.e.1", "l1.e.0", "l1.e.1"]
    layers = tell([f"{n}/{part}.npy" for n in (0, 1) for part in "qk"], [""] * 4)
    assert [say.name for say in layers] == ["0.q", "0.k", "1.q", "1.k"]


def test_a_file_called_by_chance_names_nothing_that_has_a_name():
    paths = [f"{n}bd0fe1c-07a6-4a4e-9f1e-0d5ad1c0aa0{n}.pt" for n in (1, 2)]
    assert [say.name for say in tell(paths, ["fc.1", "fc.2"])] == ["fc.1", "fc.2"]
    assert len({say.name for say in tell(paths, ["0", "0"])}) == 2


def test_values_of_names_with_bars_around_are_those_of_the_names():
    inner = ["layers.0.__call__.0", "layers.0.fc.__call__.0"]
    assert [say.name for say in tell(["a.pkl"] * 2, inner)] == ["layers.0", "layers.0.fc"]
