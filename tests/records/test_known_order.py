"""What is known of the order of tensors, and that a stronger source wins."""

import itertools

import pytest

from whence.records import Call
from whence.records.known_order import (
    Trace,
    are_gradients,
    known,
    layer_before,
    module_of,
    trace_of,
)


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
    assert ("L02_ln", "L02_out") in told(["L02_out", "L02_ln"])[0]
    assert order.is_total


def ordered(names, **fields):
    """The names in the order that is known, whatever order they are listed in."""
    pairs, order = told(names, **fields)
    return [names[n] for n in order.order if n < len(names)], pairs


@pytest.mark.parametrize(
    "names",
    [
        ["attn_norm-0", "Qcur-0", "kqv_out-0", "ffn_norm-0", "ffn_gate-0", "ffn_out-0", "l_out-0"],
        ["q_proj_layer0", "o_proj_layer0", "fc1_layer0", "fc2_layer0"],
        ["wq.L0", "attn_o.L0", "w1.L0", "w2.L0"],
    ],
)
def test_the_number_of_a_layer_may_stand_behind_its_parts(names):
    later = [name[:-1] + "10" for name in names]
    listed, _ = ordered(sorted(names + later))
    assert listed == names + later


def test_numbers_behind_names_of_classes_are_no_layers():
    for names in (
        ["conv", "conv_1", "conv_2", "conv_3", "relu", "relu_1"],
        ["conv_1", "conv_2", "batch_norm_1", "batch_norm_2", "relu_1", "relu_2"],
    ):
        _, pairs = ordered(names)
        assert not {("relu_1", "conv_2"), ("conv_1", "relu_2"), ("relu_1", "conv_1")} & pairs
        assert ("conv_1", "conv_2") in pairs


def test_numbers_in_the_order_of_registration_put_a_whole_behind_its_parts():
    names = ["l.0", "l.0.a", "l.0.b", "l.0.b.c", "l.1", "l.1.a"]
    listed, _ = ordered(names, counter=list(range(6)))
    assert listed == ["l.0.a", "l.0.b.c", "l.0.b", "l.0", "l.1.a", "l.1"]
    # a whole that was used again alone is where it was counted
    names = ["x.a", "y.a", "y", "z.a", "z", "x", "x.b"]
    listed, _ = ordered(names, counter=list(range(7)))
    assert listed == names


def test_keys_that_are_sorted_at_every_level_are_no_order():
    names = [f"l.{n}.{part}" for n in (0, 1, 10, 2) for part in ("Norm", "attn.o", "attn.q", "mlp")]
    by_value = sorted(names, key=lambda name: int(name.split(".")[1]))
    for listed in (names, by_value):
        _, pairs = ordered(listed, file=["f"] * 16, entry=list(range(16)))
        assert ("l.2.attn.q", "l.2.attn.o") in pairs
        assert ("l.2.mlp", "l.10.Norm") in pairs
    _, pairs = ordered(names[::-1], file=["f"] * 16, entry=list(range(16)))
    assert ("l.10.mlp", "l.10.attn.q") in pairs


def test_underscores_part_modules_where_several_have_parts():
    names = ["att", "att_self", "att_self_q", "att_self_k", "att_dense", "mlp", "mlp_dense"]
    _, pairs = ordered(names)
    assert {("att_self_q", "att_self"), ("att_self", "att"), ("mlp_dense", "mlp")} <= pairs
    _, pairs = ordered(["gate", "gate_act", "h_q", "h_q_norm"])
    assert not {("gate_act", "gate"), ("h_q_norm", "h_q")} & pairs


@pytest.mark.parametrize(
    "names",
    [
        ["Layer 0 - Self Attn - Q Proj", "Layer 0 - Self Attn - O Proj", "Layer 0 - Mlp", "Norm"],
        [
            "layer-1.attention__self__query",
            "layer-1.attention__output__dense",
            "layer-1.output__dense",
        ],
        ["layers.0.1", "layers.0.2", "layers.1.0"],
    ],
)
def test_words_and_parts_may_be_separated_by_anything(names):
    assert ordered(names[::-1])[0] == names


def test_keys_in_brackets_that_are_sorted_are_no_order():
    names = [f"l[{n}].{part}" for n in (0, 10, 1, 2) for part in ("attn.o", "attn.q", "mlp")]
    _, pairs = ordered(names, file=["f"] * 12, entry=list(range(12)))
    assert ("l[2].attn.q", "l[2].attn.o") in pairs
    assert ("l[2].mlp", "l[10].attn.o") in pairs


def test_names_that_come_again_were_not_sorted():
    """Classes of modules as hooks fire: their first ones stand in the order of the alphabet."""
    names = ["Conv", "Dense", "Conv", "Gelu", "Identity", "Linear", "Norm", "Conv"]
    traces = [Trace(name, entry=n, file="f") for n, name in enumerate(names)]
    assert known(traces).is_total
    alone = [Trace(name, entry=n, file="f") for n, name in enumerate(sorted({*names}))]
    assert not known(alone).is_total


def test_results_in_front_of_the_layers_that_they_come_from_are_last():
    names = ["p.logits", *(f"p.hidden_states.{n}" for n in range(3)), "q.loss", "q.hidden_states.0"]
    order = known([Trace(name, entry=n, file="f") for n, name in enumerate(names)]).order
    assert [names[n] for n in order if n < len(names)] == [
        *names[1:4],
        names[0],
        names[5],
        names[4],
    ]
    for names in (
        ["logits", "hidden_states.0", "hidden_states.1"],
        ["a.logits", "a.hidden_states"],
    ):
        order = known([Trace(name, entry=n, file="f") for n, name in enumerate(names)]).order
        assert [names[n] for n in order if n < len(names)] == [*names[1:], names[0]]


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("layers.10.mlp", ["layers.9.mlp", "layers.09.mlp"]),
        ("block.2.layer.1.o", ["block.1.layer.1.o", "block.2.layer.0.o"]),
        ("layer_010", ["layer_9", "layer_009"]),
        ("layers.0.mlp", []),
        ("model.h.3", ["model.h.2"]),
        ("out.hidden_states.3", ["out.hidden_states.2"]),
        ("Linear.3", []),  # another place in each layer
        ("3", []),
        ("head", []),
    ],
)
def test_the_layer_before(name, before):
    assert list(dict.fromkeys(layer_before(name))) == before


def test_experts_run_one_after_another_behind_the_attention_of_their_layer():
    inner = ["experts.0.w1", "experts.0.w2", "experts.0.w3", "experts.1.w1", "experts.1.w2"]
    parts = [*(f"moe.{name}" for name in inner), "self_attn.o_proj", "post_attention_layernorm"]
    pairs, _ = told([f"layers.2.{part}" for part in parts])
    for former, later in (
        ("self_attn.o_proj", "post_attention_layernorm"),
        ("post_attention_layernorm", "moe.experts.0.w1"),
        ("self_attn.o_proj", "moe.experts.1.w2"),
        ("moe.experts.0.w1", "moe.experts.0.w2"),
        ("moe.experts.0.w3", "moe.experts.0.w2"),
        ("moe.experts.0.w2", "moe.experts.1.w1"),
    ):
        assert (f"layers.2.{former}", f"layers.2.{later}") in pairs
        assert (f"layers.2.{later}", f"layers.2.{former}") not in pairs


def test_convolutions_around_layers_are_in_front_of_them():
    pairs, _ = told(["conv1", "conv2", "ctc_proj", "layers.0.fc", "layers.1.fc"])
    assert {("conv1", "conv2"), ("conv2", "layers.0.fc"), ("layers.1.fc", "ctc_proj")} <= pairs
