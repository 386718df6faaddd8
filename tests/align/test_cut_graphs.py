"""Graphs that both runs executed are cut at what both show; what a module returns faces the node
that it returns. Made by hand.
"""

import msgspec
import numpy as np
import pytest

from handmade import bfloat16, record
from whence.align.calls.compiled_graphs import cut_alike
from whence.align.calls.graph_nodes import kernel, same_nodes
from whence.align.tensors.graph_modules import by_module
from whence.align.tensors.modules_as_graphs import as_graphs
from whence.records import Call, MemoryRun, Operation, Program, Ref

OPERATIONS = {
    "mul": (Operation("aten.mul.Tensor", ({"in": 0}, {"param": "param.fc.weight"})), "fc"),
    "add": (Operation("aten.add.Tensor", ({"op": [0, 0]}, 1.0)), "fc"),
    "view": (Operation("aten.view.default", ({"op": [1, 0]}, [12])), "fc"),
    "relu": (Operation("aten.relu.default", ({"op": [2, 0]},)), "act"),
    "sub": (Operation("aten.sub.Tensor", ({"op": [3, 0]}, {"op": [2, 0]})), ""),
    "neg": (Operation("aten.neg.default", ({"op": [4, 0]},)), "tail"),
}
ALL = ("mul", "add", "relu", "sub", "neg")


def values(dtype=np.float32, seed=0, wrong=None):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=(3, 4)).astype(dtype)
    out = {"x": x, "w": w, "mul": x * w}
    out["add"] = out["mul"] + dtype(1)
    out["relu"] = np.maximum(out["add"].reshape(12), dtype(0))
    if wrong:
        out["relu"] = out["relu"] + dtype(wrong)
    out["sub"] = out["relu"] - out["add"].reshape(12)
    out["neg"] = -out["sub"]
    return {name: np.asarray(a, dtype) for name, a in out.items()}


def graph_run(
    shown,
    found=None,
    kernels=(),
    operations=OPERATIONS,
    op="0/0",
    mode="exact",
    scopes=None,
    backward=False,
):
    """shown: the nodes that the run has tensors of. kernels: (name, nodes), of a compiled run."""
    found = found or values()
    names = list(operations)
    program = Program(
        "whole",
        tuple(o for o, _ in operations.values()),
        ("input.0",),
        (("output.0", {"op": [len(names) - 1, 0]}),),
        ("param.fc.weight",),
        base="float32",
        input_dtypes=("float32",),
        names=tuple(names),
        scopes=tuple(scopes or (s for _, s in operations.values())),
    )
    where = {node: (k, nodes) for k, nodes in kernels for node in nodes}
    arrays = [found["x"], found["w"], *(found[n] for n in shown)]
    at = {n: k + 2 for k, n in enumerate(shown)}
    calls = [
        Call(
            k,
            operations[n][1],
            "Net",
            0,
            2 + k,
            op=n,
            kind="operator",
            op_type=operations[n][0].name.split(".")[1],
            leaf=True,
            parent=len(shown),
            refs=(Ref("output.0", at[n]),),
            origins=where.get(n, (0, (n,)))[1],
            arguments={"kernel": where[n][0]} if n in where else {},
            phase="backward" if backward else "forward",
        )
        for k, n in enumerate(shown)
    ]
    end = at[names[-1]]
    calls.append(
        Call(
            len(shown),
            "",
            "Net",
            0,
            1,
            op=op,
            kind="graph",
            op_type="graph",
            parent=len(shown) + 1,
            program="whole",
            arguments={"mode": mode},
            refs=(Ref("input.0", 0), Ref("param.fc.weight", 1), Ref("output.0", end)),
            phase="backward" if backward else "forward",
        )
    )
    calls.append(
        Call(
            len(shown) + 1,
            "",
            "Net",
            0,
            0,
            op_type="Net",
            refs=(Ref("input.0", 0), Ref("output.0", end)),
        )
    )
    return MemoryRun(
        calls,
        [record(i, a) for i, a in enumerate(arrays)],
        dict(enumerate(arrays)),
        programs={"whole": program},
    )


def module_run(found=None, again=False):
    found = found or values()
    names = ["x", "w", "add", "relu", "neg"]
    at = {n: k for k, n in enumerate(names)}
    arrays = [found[n].reshape(12) if n == "add" else found[n] for n in names]

    def call(k, scope, reads, makes, params=()):
        refs = (
            *(Ref(f"input.{i}", at[n]) for i, n in enumerate(reads)),
            *(Ref(s, at[n]) for s, n in params),
            Ref("output.0", at[makes]),
        )
        return Call(
            k,
            scope,
            "Net",
            0,
            k + 1,
            op_type=scope or "Net",
            parent=4 if scope else -1,
            leaf=bool(scope),
            refs=refs,
        )

    calls = [
        call(0, "fc", ["x"], "add", [("param.weight", "w")]),
        call(1, "act", ["add"], "relu"),
        call(2, "idle", ["x"], "x"),
        call(3, "tail", ["relu"], "neg"),
        call(4, "", ["x"], "neg"),
    ]
    if again:
        calls = [
            c
            if c.scope != "idle"
            else Call(2, "act", "Net", 0, 3, occurrence=1, parent=4, refs=c.refs)
            for c in calls
        ]
    calls[4] = Call(4, "", "Net", 0, 0, op_type="Net", refs=calls[4].refs)
    return MemoryRun(calls, [record(i, a) for i, a in enumerate(arrays)], dict(enumerate(arrays)))


def pieces(run):
    """node -> (names of the nodes in its program, slots that it reads)."""
    out = {}
    for call in run.calls:
        if call.kind == "operator":
            program = run.programs.get(call.program)
            reads = {
                r.slot: run.records[r.record].shape
                for r in call.refs
                if not r.slot.startswith("output")
            }
            out[call.op] = (program.names if program else None, reads)
            if program:
                assert set(reads) == {*program.inputs, *program.params}
    return out


def test_each_node_reads_the_nearest_that_both_show():
    exact = graph_run(
        ["add", "relu", "neg"],
        kernels=[("k0", ("mul", "add")), ("k1", ("relu",)), ("k2", ("sub", "neg"))],
    )
    found = cut_alike(graph_run(ALL, mode="fx"), exact)
    want = {
        "add": (("mul", "add"), {"input.0": (3, 4), "param.fc.weight": (3, 4)}),
        "relu": (("view", "relu"), {"input.add": (3, 4)}),
        "neg": (("view", "sub", "neg"), {"input.add": (3, 4), "input.relu": (12,)}),
    }
    assert pieces(found.reference) == pieces(found.target) == want
    assert found.notes == (
        "graph 0/0: 2 of 5 tensors of the reference are not seen in the target; they are judged "
        "with the next that is",
    )
    for run in found[:2]:
        assert all(c.id == i for i, c in enumerate(run.calls))
        (graph,) = [c for c in run.calls if c.kind == "graph"]
        assert not graph.slots("param")  # with the nodes that read them
        assert run.programs[graph.program].outputs == (("output.0", {"in": 0}),)
        assert run.programs[graph.program].inputs == ("2:output.0",)
    (relu,) = [c for c in found.target.calls if c.op == "relu"]
    assert kernel(relu) == "node relu, kernel k1 computes relu"


def test_a_kernel_is_not_cut_at_what_it_stores_beside():
    """It goes on with what it has in its registers, which may be wider."""
    exact = graph_run(
        ["add", "relu", "neg"], kernels=[("k0", ("mul", "add", "relu")), ("k2", ("sub", "neg"))]
    )
    exact = MemoryRun(
        [
            c
            if c.op not in ("add", "relu")
            else Call(
                **{f: getattr(c, f) for f in c.__struct_fields__}
                | {"origins": ("mul", "add", "relu")}
            )
            for c in exact.calls
        ],
        exact.records,
        {r.id: exact.array(r.id) for r in exact.records},
        programs=exact.programs,
    )
    found = pieces(cut_alike(graph_run(ALL, mode="fx"), exact).reference)
    assert found["relu"] == (
        ("mul", "add", "view", "relu"),
        {"input.0": (3, 4), "param.fc.weight": (3, 4)},
    )
    assert found["neg"][1] == {"input.add": (3, 4), "input.relu": (12,)}


def test_graphs_with_other_operators_are_paired_by_place_not_by_name():
    operations = {
        "mul": OPERATIONS["mul"],
        "mul_1": (Operation("aten.mul.Tensor", ({"op": [0, 0]}, 1.0)), "fc"),
        "add_7": (Operation("aten.add.Tensor", ({"op": [1, 0]}, 1.0)), "fc"),
        "view": (Operation("aten.view.default", ({"op": [2, 0]}, [12])), "fc"),
        "relu_3": (Operation("aten.relu.default", ({"op": [3, 0]},)), "act"),
        "sub": (Operation("aten.sub.Tensor", ({"op": [4, 0]}, {"op": [3, 0]})), ""),
        "neg": (Operation("aten.neg.default", ({"op": [5, 0]},)), "tail"),
    }
    renamed = {"add_7": "add", "relu_3": "relu"}
    found = values()
    other = graph_run(
        ["add_7", "relu_3", "neg"],
        found | {new: found[old] for new, old in renamed.items()},
        operations=operations,
    )
    cut = cut_alike(graph_run(["add", "relu", "neg"]), other)
    left, right = pieces(cut.reference), pieces(cut.target)
    assert left.keys() == right.keys() == {"add", "relu", "neg"}
    assert right["add"][0] == ("mul", "mul_1", "add_7")
    assert left["add"][0] == ("mul", "add")
    assert any("other operators" in note for note in cut.notes)
    assert kernel(next(c for c in cut.target.calls if c.op == "add")) == "node add_7"


def test_a_node_of_another_module_or_shape_is_none():
    other = values()
    other["relu"] = other["relu"].reshape(3, 4)
    found = cut_alike(
        graph_run(ALL),
        graph_run(ALL, other, operations=OPERATIONS | {"neg": (OPERATIONS["neg"][0], "head")}),
    )
    assert set(pieces(found.reference)) == {"mul", "add", "sub"}


def test_executions_face_by_their_place_where_compiles_are_counted_otherwise():
    found = cut_alike(graph_run(ALL), graph_run(ALL, op="1/2"))
    assert set(pieces(found.target)) == set(ALL)


@pytest.mark.parametrize("graphs", [(False, False), (True, False)])
def test_runs_without_graphs_on_both_sides_stay(graphs):
    runs = [graph_run(ALL) if g else module_run() for g in graphs]
    assert cut_alike(*runs)[:2] == tuple(runs)


def test_a_module_faces_the_node_that_it_returns():
    _, found, plan = by_module(module_run(), graph_run(ALL))
    pairs = {p.reference: found.calls[p.target].op for p in plan.pairs}
    calls = module_run().calls
    assert {calls[k].scope: op for k, op in pairs.items()} == {
        "fc": "add",
        "act": "relu",
        "tail": "neg",
        "": "neg",
        "idle": "",
    }
    (fc,) = [p for p in plan.pairs if calls[p.reference].scope == "fc"]
    (out,) = [s for s in fc.slots if s.reference_slot == "output.0"]
    np.testing.assert_array_equal(found.array(out.target_record), values()["add"].reshape(12))
    assert not plan.unmatched_reference
    assert plan.notes == (
        "2 tensors of the target's graphs are not a module's output; they are judged with the next "
        "that is",
    )


def test_a_module_whose_output_was_fused_away_has_no_partner():
    """`mul` is in fc and of its size, but `add` is what fc returns."""
    _, found, plan = by_module(module_run(), graph_run(["mul", "relu", "neg"]))
    assert [module_run().calls[k].scope for k in plan.unmatched_reference] == ["fc"]
    assert all(found.calls[p.target].op != "mul" for p in plan.pairs)


def test_of_a_module_that_is_called_twice_the_graph_does_not_tell_the_calls_apart():
    _, found, plan = by_module(module_run(again=True), graph_run(ALL))
    assert {found.calls[p.target].op for p in plan.pairs} == {"add", "neg", ""}


def test_backward_graphs_are_said_not_to_be_compared():
    *_, plan = by_module(module_run(), graph_run(ALL, backward=True))
    assert plan.notes == (
        "5 tensors of the target's backward graphs are not compared: modules show none; capture "
        "the fx run",
    )


def test_modules_in_the_form_of_a_graph():
    reference = graph_run(["mul", "add", "relu", "neg"])
    made = as_graphs(reference, module_run())
    found = cut_alike(reference, made)
    assert pieces(found.reference).keys() == pieces(found.target).keys() == {"add", "relu", "neg"}
    (add,) = [c for c in found.target.calls if c.op == "add"]
    np.testing.assert_array_equal(
        found.target.array(add.slots("output")[0].record), values()["add"]
    )
    assert {r.slot for r in add.refs} == {"input.0", "param.fc.weight", "output.0"}


def test_base_dtype_is_that_of_what_the_piece_reads():
    found = cut_alike(graph_run(ALL, values(bfloat16)), graph_run(ALL, values(bfloat16)))
    program = next(p for name, p in found.reference.programs.items() if name.endswith(" relu"))
    assert (program.base, program.input_dtypes) == ("bfloat16", ("bfloat16",))


def changed(run, **by_kind):
    """The run with fields of its calls of a kind replaced, without its programs where a call says
    that it has none.
    """
    calls = [msgspec.structs.replace(c, **by_kind.get(c.kind, {})) for c in run.calls]
    return MemoryRun(
        calls, run.records, {r.id: run.array(r.id) for r in run.records}, programs=run.programs
    )


def test_without_a_program_nodes_read_what_their_kernel_did():
    none = {"graph": {"program": "", "no_program": "draws random numbers"}}
    exact = changed(
        graph_run(
            ["add", "relu", "neg"], kernels=[("k", ("add",)), ("k", ("relu",)), ("k", ("neg",))]
        ),
        **none,
    )
    reads = {"add": ("x", "w"), "relu": ("add",), "neg": ("add", "relu")}
    place = {"x": 0, "w": 1, "add": 2, "relu": 3, "neg": 4}
    calls = [
        msgspec.structs.replace(
            c, refs=(*(Ref(f"input.{k}", place[n]) for k, n in enumerate(reads[c.op])), *c.refs)
        )
        if c.op in reads
        else c
        for c in exact.calls
    ]
    exact = MemoryRun(calls, exact.records, {r.id: exact.array(r.id) for r in exact.records})
    found = cut_alike(changed(graph_run(ALL, mode="fx"), **none), exact)
    want = {
        "add": ["input.0", "param.fc.weight"],
        "relu": ["input.add"],
        "neg": ["input.add", "input.relu"],
    }
    for run in found[:2]:
        nodes = [c for c in run.calls if c.kind == "operator"]
        assert {c.op: [r.slot for r in c.refs[:-1]] for c in nodes} == want
        assert all(not c.program and c.no_program == "draws random numbers" for c in nodes)


def test_parameters_of_a_compiled_module_are_with_the_nodes_that_read_them():
    run = graph_run(ALL)
    root = msgspec.structs.replace(
        run.calls[-1],
        refs=(
            *run.calls[-1].refs,
            Ref("param._orig_mod.fc.weight", 1),
            Ref("param._orig_mod.other", 1),
        ),
    )
    run = MemoryRun(
        [*run.calls[:-1], root],
        run.records,
        {r.id: run.array(r.id) for r in run.records},
        programs=run.programs,
    )
    found = cut_alike(run, run)
    assert [r.slot for r in found.target.calls[-1].slots("param")] == ["param._orig_mod.other"]


def chain(operators):
    """A graph of operators one behind the other, without modules."""
    places = [{"in": 0}, *({"op": [k, 0]} for k in range(len(operators)))]
    return Program(
        "chain",
        tuple(Operation(f"aten.{n}.default", (p,)) for n, p in zip(operators, places)),
        ("input.0",),
        (("output.0", places[-1]),),
        names=tuple(f"{n}_{k}" for k, n in enumerate(operators)),
        scopes=("",) * len(operators),
    )


def test_an_operator_of_one_graph_alone_moves_no_other():
    plain = ["mul", "add", "relu", "mul", "add", "neg", "mul", "add", "tanh", "mul"]
    longer = [*plain[:4], "mul", *plain[4:]]
    partners = same_nodes(chain(plain), chain(longer))
    assert len(partners) == len(plain)
    assert partners["tanh_8"] == "tanh_9" and partners["mul_9"] == "mul_10"
    moved = [*plain[1:], "mul"]  # as many of each kind, but for the first in another place
    assert same_nodes(chain(plain), chain(moved))["mul_3"] == "mul_2"
