"""Padding that fused code leaves as zeros is nobody's fault; what is wrong beside it is found."""

import numpy as np
import pytest

from handmade import record
from whence.align.batches import padding
from whence.records import Call, MemoryRun, Ref

torch = pytest.importorskip("torch")

import whence  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
LENGTHS = (10, 7, 4, 2)
MASK = torch.arange(10)[None] >= torch.tensor(LENGTHS)[:, None]


def captured(path, *, fast, change=lambda model: None, mask=MASK):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=fast).eval()
    change(model)
    x = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(1))
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad(), whence.capture(model, path):
            model(x, src_key_padding_mask=mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return path


@pytest.mark.parametrize("fast_first", [False, True])
def test_a_fused_encoder_faces_the_plain_one(tmp_path, fast_first):
    plain, fused = captured(tmp_path / "plain", fast=False), captured(tmp_path / "fused", fast=True)
    result = whence.compare(*((fused, plain) if fast_first else (plain, fused)))
    assert (result.status, result.findings, result.inputs_differ) == ("same", (), ())
    assert "padding (17 of 40 positions) differs and is left out" in result.plan.notes[0]
    if not fast_first:
        # Its layers show no inside: they run again as one.
        assert result.coverage.inside == 24


def test_a_fault_beside_the_padding_is_found(tmp_path):
    def norm(model):
        model.layers[1].norm1.eps = model.layers[1].norm2.eps = 3e-2  # both, or torch does not fuse

    result = whence.compare(
        captured(tmp_path / "plain", fast=False),
        captured(tmp_path / "fused", fast=True, change=norm),
    )
    assert result.status == "different"
    assert result.findings[0].name == "layers.1"


def test_padding_that_was_looked_at_is_no_padding(tmp_path):
    other = MASK.clone()
    other[1, 7] = False
    result = whence.compare(
        captured(tmp_path / "plain", fast=False),
        captured(tmp_path / "fused", fast=True, mask=other),
    )
    assert result.status != "same"
    assert not any("left out" in note for note in result.plan.notes)
    assert any("src_key_padding_mask" in sentence for sentence in result.inputs_differ)


def test_a_nested_tensor_is_written_out_with_padding():
    rows = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) + n for n in (2, 4, 1)]
    arrays = {
        0: np.concatenate([r.ravel() for r in rows]),
        1: np.array([r.shape for r in rows]),
        2: np.zeros((3, 5), bool),
    }
    refs = (Ref("input.mask", 2), Ref("output.0.values", 0), Ref("output.0.sizes", 1))
    nested = MemoryRun(
        [Call(0, "", "Net", 0, 0, refs=refs)], [record(i, a) for i, a in arrays.items()], arrays
    )
    plain = MemoryRun([Call(0, "", "Net", 0, 0)], [], {})
    out = padding.dense(nested, plain)
    (made,) = [r.record for r in out.calls[0].refs if r.slot == "output.0"]
    np.testing.assert_array_equal(
        out.array(made), np.stack([np.pad(r, ((0, 5 - len(r)), (0, 0))) for r in rows])
    )
    # Where the other run has such tensors too, they face each other as they are.
    assert padding.dense(nested, nested) is nested


def positions(folder, kind, *, further=0):
    """A prompt alone against itself in a batch that is padded on the left, where nobody passes
    positions.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "rotary":
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
        model = transformers.LlamaForCausalLM(config).eval()
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        ).eval()
        model.transformer.wpe.weight.data *= 20
    batch = torch.randint(3, 64, (2, 9))
    batch[0, :3] = 0
    given = {"position_ids": torch.arange(9)[None] + further} if further else {}
    with torch.no_grad():
        with whence.capture(model, folder / "alone"):
            model(batch[:1, 3:])
            model(batch[1:])
        with whence.capture(model, folder / "batch"):
            model(batch, attention_mask=(batch != 0).long(), **given)
    return whence.compare(folder / "alone", folder / "batch")


def test_rotary_positions_that_count_padding_are_a_note(tmp_path):
    result = positions(tmp_path, "rotary")
    assert (result.status, result.findings) == ("same", ())
    assert any(
        "start from 0 in the reference and from 3 in the target" in note for note in result.notes
    )


def test_learned_positions_that_count_padding_are_told_and_no_operator_is_blamed(tmp_path):
    result = positions(tmp_path, "learned")
    assert (result.status, result.findings) == ("undecided", ())
    assert any(
        "start from 0 in the reference and from 3 in the target" in sentence
        for sentence in result.inputs_differ
    )


def test_positions_that_differ_by_more_than_the_padding_are_not_explained_by_it(tmp_path):
    result = positions(tmp_path, "learned", further=1)
    assert result.status != "same" and not any(
        "padding too" in said for said in (*result.notes, *result.inputs_differ)
    )
