"""Names that say that a model sends tokens to experts."""

import pytest

from whence.records.experts import names_experts


@pytest.mark.parametrize(
    "name",
    (
        "MixtralSparseMoeBlock",
        "model.layers.0.mlp.experts.3",
        "block_sparse_moe",
        "FusedMoE",
        "layers.1.moe.gate",
        "OlmoeTopKRouter",
        "router",
    ),
)
def test_experts_are_known_by_their_names(name):
    assert names_experts(["model.layers.0", name])


@pytest.mark.parametrize(
    "name", ("LlamaForCausalLM", "model.layers.0.mlp.gate_proj", "Moebius", "smoelz", "moerch.gate")
)
def test_other_names_say_nothing_of_experts(name):
    assert not names_experts([name])
