"""Attention as two implementations write it: masks as bits or as numbers, weights returned or
not.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch
IDS = torch.arange(3, 33).reshape(3, 10) * 7 % 50
PADDED = torch.ones(3, 10, dtype=torch.int64)
PADDED[0, 7:] = 0
PADDED[1, 4:] = 0


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused, self.scale = fused, 8**-0.5
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.fused:
            out, weights = (
                nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=self.scale
                ),
                None,
            )
        else:
            weights = (q @ k.transpose(-1, -2) * self.scale + mask).softmax(-1)
            out = weights @ v
        return self.o(out.transpose(1, 2).flatten(2)), weights


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(fused)

    def forward(self, x, mask):
        out, weights = self.attention(self.norm(x), mask)
        return x + out, weights


class Model(nn.Module):
    """fused: masks are bits and weights are not returned, as with scaled_dot_product_attention in
    transformers.
    """

    def __init__(self, fused, *, show=False):
        super().__init__()
        torch.manual_seed(0)
        self.fused, self.show, self.shift = fused, show, 0
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(3))

    def forward(self, ids, padded):
        x = self.embed(ids)
        mask = torch.ones(10, 10, dtype=torch.bool).tril(self.shift) & padded[:, None, None].bool()
        if not self.fused:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(
                ~mask, torch.finfo(x.dtype).min
            )
        for block in self.blocks:
            x, weights = block(x, mask)
        return (x, weights) if self.show else x


def compared(tmp_path, reference, target):
    paths = [tmp_path / "reference", tmp_path / "target"]
    for model, path in zip((reference, target), paths, strict=True):
        with torch.no_grad(), whence.capture(model.eval(), path):
            model(IDS, PADDED)
    return whence.compare(*paths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_both_are_the_same(tmp_path, fused, dtype):
    result = compared(tmp_path, Model(fused).to(dtype), Model(not fused).to(dtype))
    assert (result.status, result.findings) == ("same", ())
    assert result.coverage.measured == result.coverage.replayed == result.coverage.calls
    assert not [v.sentence for v in result.verdicts if "no replay" in v.sentence]
    kinds = {
        (r.reference_dtype, r.target_dtype)
        for r in result.rows
        if "bool" in (r.reference_dtype, r.target_dtype)
    }
    assert all(len({a, b}) == 2 for a, b in kinds - {("bool", "bool")})  # shown as each side has it
    assert len(kinds) >= 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_wrong_mask_in_another_form_is_named_where_it_is_made(tmp_path, fused):
    target = Model(not fused)
    target.shift = 1
    result = compared(tmp_path, Model(fused), target)
    assert (result.status, [f.name for f in result.findings]) == ("different", ["Model"])
    assert "between embed and blocks.0" in result.findings[0].sentence


@pytest.mark.parametrize("fused", [True, False])
def test_a_fault_in_one_of_another_form_is_named(tmp_path, fused):
    target = Model(not fused)
    target.blocks[1].attention.scale *= 1.05
    result = compared(tmp_path, Model(fused), target)
    assert [(f.name, f.cause) for f in result.findings] == [("blocks.1.attention", "semantic")]


def test_what_nothing_reads_may_be_missing_in_the_target(tmp_path):
    result = compared(tmp_path, Model(False), Model(True))
    assert result.coverage.measured == result.coverage.calls
    assert any("output.1" in pair.only_reference for pair in result.plan.pairs)  # still listed


def test_what_the_model_returns_may_not(tmp_path):
    result = compared(tmp_path, Model(False, show=True), Model(True, show=True))
    assert (result.status, result.coverage.root_outputs_measured) == ("undecided", False)
