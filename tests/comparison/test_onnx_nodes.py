"""Calls that are nodes of an ONNX graph: they get programs, and a fault is named by replay."""

import msgspec
import numpy as np
import pytest

import whence
from handmade import Builder
from whence.comparison.programs.onnx_attributes import with_node_programs
from whence.records.marks import Mark, mark
from whence.replay import validation

pytestmark = pytest.mark.torch
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 6, 16)).astype(np.float32) / 30
WEIGHT = RANDOM.standard_normal((16, 16)).astype(np.float32)
SCALE = (1 + RANDOM.random(16)).astype(np.float32)
BIAS = RANDOM.standard_normal(16).astype(np.float32)


def normed(x, epsilon):
    x = x.astype(np.float64)
    deviation = np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return ((x - x.mean(-1, keepdims=True)) / deviation * SCALE + BIAS).astype(np.float32)


class Graph(Builder):
    """Nodes of a graph, as a capture writes them."""

    def node(self, scope, op_type, reads, makes, opset=17, **attributes):
        """reads: (name, is it a parameter?, array) by position, None for an absent one."""
        slots, notes = {}, [mark(Mark.OPSET, opset)]
        for place, given in enumerate(reads):
            if given is None:
                continue
            name, array = given
            slots[f"param.{name}" if name else f"input.{place}"] = array
            if name:
                notes.append(mark(Mark.TAKES, f"{name} as {place}"))
        slots |= {f"output.{k}": array for k, array in enumerate(makes)}
        self.call(scope, slots, op_type=op_type, parent=0)
        self.calls[-1] = msgspec.structs.replace(
            self.calls[-1], kind="operator", notes=tuple(notes), arguments=attributes, leaf=True
        )


def run(epsilon=1e-5):
    """x + x -> norm -> product, of which the norm is computed with this epsilon."""
    graph = Graph()
    total = X + X
    norm = normed(total, epsilon)
    y = (norm.astype(np.float64) @ WEIGHT).astype(np.float32)
    graph.call("", {"input.x": X, "output.y": y}, op_type="InferenceSession", leaf=False)
    graph.node("sum", "Add", [("", X), ("", X)], [total])
    reads = [("", total), ("scale", SCALE), ("bias", BIAS)]
    graph.node("norm", "LayerNormalization", reads, [norm], axis=-1, epsilon=1e-5)
    graph.node("product", "MatMul", [("", norm), ("weight", WEIGHT)], [y])
    return graph.run()


def test_every_node_has_a_program_that_gives_what_was_recorded():
    made = with_node_programs(run())
    nodes = [call for call in made.calls if call.kind == "operator"]
    assert [call.no_program for call in nodes] == ["", "", ""]
    for call in nodes:
        records = {ref.slot: ref.record for ref in call.refs}
        program = made.programs[call.program]
        found = validation.load(program, []).run(
            {slot: made.array(records[slot]) for slot in program.inputs},
            {slot: made.array(records[slot]) for slot in program.params},
        )
        expected = made.array(records["output.0"])
        np.testing.assert_allclose(found["output.0"], expected, rtol=1e-5, atol=1e-5)


def test_a_run_without_nodes_is_as_it_was():
    other = Builder()
    other.call("fc", {"input.0": X, "output.0": X})
    given = other.run()
    assert with_node_programs(given) is given


def test_a_node_that_computes_otherwise_is_named():
    """The attributes are equal: only replay can tell."""
    result = whence.compare(run(), run(epsilon=1e-3))
    assert [finding.name for finding in result.findings] == ["norm"]
    assert result.findings[0].verdict == "introduced"


def test_equal_graphs_are_the_same():
    result = whence.compare(run(), run())
    assert result.status == "same"
    assert result.findings == ()


@pytest.mark.parametrize(
    ("op_type", "reads", "attributes", "reason"),
    [
        ("If", [("", np.array(True))], {"then_branch": {"graph": True}}, "branches"),
        ("com.acme.Blend", [("", X)], {}, "operator com.acme.Blend of ONNX: not known"),
        ("Reshape", [("", X), None], {}, "its shape is not known"),
        ("Conv", [("", X), None], {}, "input 1 is not there"),
    ],
)
def test_a_node_without_a_program_says_why(op_type, reads, attributes, reason):
    graph = Graph()
    graph.call("", {"output.y": X}, op_type="InferenceSession", leaf=False)
    graph.node("node", op_type, reads, [X], **attributes)
    call = with_node_programs(graph.run()).calls[1]
    assert not call.program
    assert reason in call.no_program


def test_a_parameter_that_was_not_captured_is_a_reason():
    graph = Graph()
    graph.call("", {"output.y": X}, op_type="InferenceSession", leaf=False)
    graph.node("node", "MatMul", [("", X), ("weight", WEIGHT)], [X])
    call = graph.calls[1]
    refs = tuple(ref for ref in call.refs if ref.slot != "param.weight")
    graph.calls[1] = msgspec.structs.replace(call, refs=refs)
    call = with_node_programs(graph.run()).calls[1]
    assert call.no_program == "what MatMul reads as param.weight was not captured"


def test_tensors_and_numbers_of_attributes_are_read_back():
    graph = Graph()
    filled = np.full((2, 3), -np.inf, np.float32)
    graph.call("", {"output.y": filled}, op_type="InferenceSession", leaf=False)
    value = {"dtype": "float32", "shape": [1], "values": [{"float": "-inf"}]}
    shape = np.array([2, 3])
    graph.node("node", "ConstantOfShape", [("", shape)], [filled], value=value)
    made = with_node_programs(graph.run())
    program = made.programs[made.calls[1].program]
    found = validation.load(program, []).run({"input.0": shape}, {})
    np.testing.assert_array_equal(found["output.0"], filled)


def turned(perm):
    """x -> transpose -> reshape -> sum with much else, which hides what the transpose does."""
    graph = Graph()
    heads = RANDOM_HEADS
    swapped = np.ascontiguousarray(heads.transpose(perm))
    rows = swapped.reshape(2, 96)
    y = LARGE + rows
    graph.call("", {"input.x": heads, "output.y": y}, op_type="InferenceSession", leaf=False)
    graph.node("turn", "Transpose", [("", heads)], [swapped], perm=list(perm))
    graph.node("rows", "Reshape", [("", swapped), ("shape", np.array([2, 96]))], [rows])
    graph.node("add", "Add", [("", LARGE), ("", rows)], [y])
    return graph.run()


RANDOM_HEADS = RANDOM.standard_normal((2, 4, 6, 4)).astype(np.float32)
LARGE = 1000 * RANDOM.standard_normal((2, 96)).astype(np.float32)


def test_other_axes_of_a_node_are_not_taken_for_a_layout():
    for perm in ((0, 2, 3, 1), (0, 3, 2, 1)):
        result = whence.compare(turned((0, 2, 1, 3)), turned(perm))
        assert [finding.name for finding in result.findings] == ["turn"]
        assert "perm" in result.findings[0].sentence


def test_nodes_stay_nodes_where_a_pass_fused_others():
    """Operators of modules that are not all paired are judged as a whole; nodes of a graph say
    themselves what they compute.
    """
    first, second = run(), run()
    for each in (first, second):
        each.info = msgspec.structs.replace(each.info, options={"level": "op"})
    second.calls = [call for call in second.calls if call.scope != "sum"]
    second.calls = [
        msgspec.structs.replace(call, id=number) for number, call in enumerate(second.calls)
    ]
    paired = {
        first.calls[pair.reference].scope for pair in whence.compare(first, second).plan.pairs
    }
    assert {"norm", "product"} <= paired
