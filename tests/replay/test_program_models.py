"""Whole models: every leaf's program reproduces its recording bitwise, runs in float64, and a
repeat call of its signature too.
"""

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402

pytestmark = pytest.mark.torch
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def checked(model, inputs, mode):
    """Record all leaf calls of one forward; returns (calls, distinct programs). Asserts everything
    usable and nothing changed.
    """
    with mode():
        bare = [t for _, t in recording.flat(model(*inputs), "")]
        with recording.leaves(model, first_only=False) as found:
            seen = [t for _, t in recording.flat(model(*inputs), "")]
    assert all(recording.same(recording.host(a), recording.host(b)) for a, b in zip(bare, seen))
    calls, distinct = 0, {}
    for name, recorded in found.items():
        for r in recorded:
            calls += 1
            assert r.reason == "", (name, r.reason)
            loaded, _ = distinct.setdefault(r.recording.program.id, (r.load(), name))
            # Equal programs are loaded once, so every further call is a test on other activations.
            assert r.check(loaded) == "", name
            assert loaded.check_note == ""
            assert loaded.length >= 1
    for name, recorded in found.items():
        r = recorded[0]
        for slot, wide in (
            r.load().run(r.inputs, r.params, working="float64", strides=r.strides).items()
        ):
            want = r.outputs[slot]
            if want.dtype.kind not in "biu" and want.size:
                assert wide.dtype == np.float64, name
                want = want.astype(np.float64)
                finite = np.isfinite(want) & (np.abs(want) < 1e30)
                unit = {2: 2.0**-8, 4: 2.0**-20, 8: 2.0**-48}[r.outputs[slot].dtype.itemsize]
                assert (
                    np.linalg.norm(wide[finite] - want[finite])
                    <= 8 * unit * np.linalg.norm(want[finite]) + 1e-12
                ), (name, slot)
    return calls, len(distinct)


@pytest.mark.shared
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["decoder", "vit", "vit fused", "cnn", "cnn_dc", "lstm", "dec_sharp"]
)
def test_leaves_of_the_faultbench_models(shared, monkeypatch, name, mode):
    monkeypatch.syspath_prepend(str(shared / "faultbench"))
    # The benchmark's packages have names of their own in no one's namespace; they are forgotten
    # again afterwards.
    before = set(sys.modules)
    try:
        from public import models

        options = {"fused": True} if name == "vit fused" else {}
        model, inputs = getattr(models, name.partition(" ")[0])(0, **options)
        calls, distinct = checked(model.eval(), inputs, mode)
        assert 0 < distinct <= calls
    finally:
        for module in set(sys.modules) - before:
            if module.partition(".")[0] in ("public", "fb"):
                del sys.modules[module]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_leaves_of_a_llama_with_a_cache(attention, dtype, mode):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))

    class Decode(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            out = self.model(input_ids=ids, use_cache=True)
            logits = [out.logits]
            for step in range(3):
                out = self.model(
                    input_ids=ids[:, step : step + 1],
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
                logits.append(out.logits)
            return logits

    calls, distinct = checked(Decode(), (ids,), mode)
    assert calls > 60
    # One program per kind of leaf for the prompt, one for all decode steps.
    assert distinct <= 20


@pytest.mark.parametrize("mode", MODES)
def test_the_fast_path_of_a_transformer_encoder_is_left_on(mode):
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
    ).eval()
    checked(model, (torch.randn(2, 5, 32),), mode)
