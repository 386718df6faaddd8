"""Greedy generation with a cache, against the whole sequence at once."""

import pytest
import torch

import whence
from whence.results import Held, Variant
from whence.workflows.probe.torch.probing import _Generated, _notes

pytestmark = pytest.mark.torch
transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 9, 3, 7, 11, 2]])


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def asked(model):
    return whence.probe(model, {"input_ids": IDS}, properties=["chunking"])["chunking"]


def test_generation_and_static_caches_follow_the_whole(model):
    answer = asked(model)
    assert answer.held in (Held.EXACT, Held.ROUNDING)
    names = " ".join(v.name for v in answer.variants)
    assert "generated greedily with a cache, token" in names
    assert "a token at a time with a static cache" in names
    assert all(v.held in (Held.EXACT, Held.ROUNDING) for v in answer.variants)


def test_positions_that_generation_counts_wrongly_are_named(model):
    prepare = model.prepare_inputs_for_generation

    def late(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        ids = inputs["input_ids"]
        if ids.shape[1] == 1:
            past = inputs["past_key_values"].get_seq_length()
            inputs["position_ids"] = torch.full_like(ids, past + 1)
        return inputs

    model.prepare_inputs_for_generation = late
    answer = asked(model)
    assert answer.held == Held.VIOLATED
    broken = [v for v in answer.variants if v.held == Held.VIOLATED]
    assert [v.name.partition(",")[0] for v in broken] == ["generated greedily with a cache"]
    assert broken[0].first is not None


def test_a_static_cache_that_changes_what_it_keeps_is_named(model, monkeypatch):
    from transformers.cache_utils import StaticLayer

    original = StaticLayer.update

    def update(self, keys, values, *args, **kwargs):
        if keys.shape[-2] == 1:
            values = values * 1.01
        return original(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(StaticLayer, "update", update)
    answer = asked(model)
    assert answer.held == Held.VIOLATED
    assert "a token at a time with a static cache" in answer.cause


def test_a_tie_is_told_from_another_choice():
    cached, whole = torch.tensor([[0.0, 1.0, 1.1]]), torch.tensor([[0.0, 1.1, 1.0]])
    made = _Generated(torch.tensor([2]), cached)
    apart = (cached - whole).abs().amax(-1)
    (tie,) = _notes(made, whole, apart, Variant("", Held.ROUNDING))
    assert tie.startswith("token 1 is 2 with a cache, 1 without: a tie, 0.1 apart")
    (other,) = _notes(made, whole, apart, Variant("", Held.VIOLATED))
    assert other == "token 1 is 2 with a cache, 1 without"
    assert _notes(_Generated(torch.tensor([0]), whole), whole, apart, Variant("", Held.EXACT)) == [
        "token 1 is not the largest logit: generation_config changes them"
    ]
