"""A cache with room to spare against one that grows, in either direction."""

import pytest

import whence
from whence.report.answer import answer

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def decoded(path, cache, *, wrong=1.0):
    """Four steps; before the third the keys of the cache are multiplied by `wrong`."""
    from transformers.cache_utils import DynamicCache, StaticCache

    net, fed = model(), torch.tensor([[5, 9, 2, 44, 7]])
    held = StaticCache(config=net.config, max_cache_len=16) if cache == "static" else DynamicCache()
    with whence.capture(net, path), torch.no_grad():
        for step in range(4):
            if step == 2 and wrong != 1:
                for layer in held.layers:
                    layer.keys = layer.keys * wrong
            fed = net(fed, past_key_values=held, use_cache=True).logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("sides", (("static", "growing"), ("growing", "static")))
def test_caches_of_two_kinds_are_the_same(tmp_path, sides):
    """A static cache counts its tokens in a tensor of its own, which a growing one has not."""
    for name, cache in zip(("ref", "tgt"), sides):
        decoded(tmp_path / name, cache)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "same", result.headline


def test_a_cache_that_was_changed_between_steps_is_no_missing_mask(tmp_path):
    decoded(tmp_path / "ref", "static")
    decoded(tmp_path / "tgt", "growing", wrong=1.05)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    first = result.findings[0]
    assert (first.name, first.step) == ("model.layers.0.self_attn", 2)
    assert "past_key_values.layers.0.keys" in first.slot and "attention_mask" not in first.sentence


def test_what_was_not_judged_may_be_behind_a_token(tmp_path):
    decoded(tmp_path / "ref", "growing")
    decoded(tmp_path / "tgt", "static", wrong=1.5)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status != "same"
    if not result.findings:
        assert "behind it        not known: " in answer(result)
