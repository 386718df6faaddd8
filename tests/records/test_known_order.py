"""What is known of the order of tensors, and that a stronger source wins."""

import itertools

import pytest

from whence.records import Call
from whence.records.known_order import Trace, are_gradients, known, module_of, trace_of


def is_before(order, first, second):
    """Whether one node was made before another."""
    todo, seen = list(order.before[second]), set()
    while todo:
        node = todo.pop()
        if node == first:
            return True
        if node not in seen:
            seen.add(node)
            todo += order.before[node]
    return False


def told(names, **fields):
    """(pairs of names that are ordered, whether all are)."""
    traces = [Trace(name, **{k: v[n] for k, v in fields.items()}) for n, name in enumerate(names)]
    order = known(traces)
    many = range(len(names))
    return {(names[a], names[b]) for a in many for b in many if is_before(order, a, b)}, order


def test_layers_are_compared_as_numbers_and_what_is_in_them_stays_open():
    pairs, order = told(["layer_10", "layer_2", "layer_2.a", "layer_2.b"])
    assert ("layer_2.a", "layer_10") in pairs
    assert ("layer_2.a", "layer_2") in pairs
    assert not {("layer_2.a", "layer_2.b"), ("layer_2.b", "layer_2.a")} & pairs
    assert not order.is_total


@pytest.mark.parametrize(
    "names",
    [
        ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
        ["text_embedding.out", "transformer.0.mlp", "final.out", "classifier.out"],
        ["encoder.block.0", "encoder.final_layer_norm", "decoder.block.0", "lm_head"],
        ["layers.0.attn.q", "layers.0.attn.o", "layers.0.attn", "layers.0.mlp.fc1", "layers.0.mlp"],
        ["layers_0_self_attn_q_proj", "layers_0_self_attn_o_proj", "layers_0_mlp_down_proj"],
        ["input_ids", "layers.0", "logits"],
    ],
)
def test_roles_tell_which_is_first_however_they_are_listed(names):
    for listed in (names, names[::-1], sorted(names)):
        pairs, order = told(listed)
        assert [listed[n] for n in order.order if n < len(listed)] == names
        assert set(itertools.pairwise(names)) <= pairs


def test_norms_with_numbers_stand_before_or_behind():
    names = [f"blocks.0.{name}" for name in ("attn.o", "norm2", "mlp.fc1")]
    pairs, _ = told(names)
    assert (names[0], names[1]) in pairs
    assert not {(names[1], names[2]), (names[2], names[1])} & pairs


def test_places_in_a_file_win_over_names_but_not_an_alphabet():
    names = ["layers.1", "layers.0"]
    assert told(names, file=["f"] * 2, entry=[0, 1])[0] == {("layers.1", "layers.0")}
    names = ["a.norm", "a.attn", "a.mlp", "a.head", "a.stem"]
    assert told(names, file=["f"] * 5, entry=[*range(5)])[1].is_total
    names.sort()
    pairs, _ = told(names, file=["f"] * 5, entry=[*range(5)])
    assert ("a.attn", "a.head") not in pairs


def test_times_order_as_far_as_they_differ_and_not_against_names():
    pairs, order = told(["u", "w", "v"], file=["u", "w", "v"], time=[1, 1, 2])
    assert pairs == {("u", "v"), ("w", "v")}
    assert not order.is_total
    against = told(["layers.0", "layers.1", "w"], file=["a", "b", "c"], time=[3, 2, 1])[0]
    assert against == {("layers.0", "layers.1")}


@pytest.mark.parametrize(
    "names",
    [
        ["embed_0", "norm_0", "linear_0", "norm_1", "linear_1"],
        ["stem[0]", "stem[1]", "stem", "blocks[0].conv", "fc"],
        ["layers.0.mlp.gate_proj", "layers.0.mlp.act_fn", "layers.0.mlp.up_proj", "layers.0.mlp"],
    ],
)
def test_times_are_believed_beside_counts_of_classes_brackets_and_gates(names):
    times = [*range(len(names))]
    assert told(names, file=names[::-1], time=times)[1].order == times


def test_counters_are_the_order():
    pairs, order = told(["layers.1", "layers.0", "x"], counter=[0, 1, 2])
    assert order.is_total
    assert ("layers.1", "layers.0") in pairs


def test_gradients_are_made_backwards_whatever_a_file_says():
    names = ["layers.0.fc.weight", "layers.1.fc.weight", "lm_head.weight"]
    assert are_gradients(names)
    pairs, _ = told(names, file=["f"] * 3, entry=[0, 1, 2])
    assert (names[2], names[1]) in pairs
    assert (names[1], names[0]) in pairs
    assert module_of("d_layers_0_fc_weight") == "layers_0_fc"
    assert module_of("layers.0.fc.bias.grad") == "layers.0.fc"
    assert not module_of("layers.0.reweight")


def test_the_other_run_tells_what_this_one_does_not():
    other = [Trace("p", counter=1), Trace("q", counter=0)]
    order = known([Trace("p"), Trace("q")], other=other)
    assert order.is_total
    assert is_before(order, 1, 0)


@pytest.mark.parametrize(
    "trace",
    [
        Trace("a", 0, -1, 7, "x, y"),
        Trace("a", -1, 2),
        Trace("a"),
        Trace("a", -1, -1, 3, "f", ("b.c", "d, e")),
    ],
)
def test_a_note_says_what_the_dump_told(trace):
    assert trace_of(Call(0, "a", "", 0, 0, notes=(trace.note(),))) == trace


def test_what_a_content_was_made_of_wins_over_names_and_times():
    pairs, order = told(["layers.1", "layers.0"], made_of=[(), ("layers.1",)])
    assert pairs == {("layers.1", "layers.0")}
    assert order.is_total
    assert not told(["a", "a", "b"], made_of=[(), (), ("a",)])[0]  # which of the two, is not known


def test_the_output_of_a_layer_in_its_file_is_made_after_its_parts():
    pairs, order = told(["layer_2.out", "layer_2.conv1", "layer_2.conv2", "layer_3.conv1"])
    assert ("layer_2.conv2", "layer_2.out") in pairs
    assert order.is_total
