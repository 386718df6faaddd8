"""Models against themselves under other names: every call finds its partner by structure and
content, whatever was inserted.
"""

import tempfile

import pytest
import torch
from renamed import variant, wrong
from torch import nn

import whence
from whence import align
from whence.store import open_run

pytestmark = pytest.mark.torch


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=4, tie_word_embeddings=True)
    ), {"input_ids": torch.arange(10)[None]}


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    return model, {"input_ids": torch.arange(10)[None], "decoder_input_ids": torch.arange(6)[None]}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2, self.b2, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x):
        return self.act(x + self.b2(self.c2(self.act(self.b1(self.c1(x))))))


def conv():
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        Residual(),
        Residual(),
        nn.MaxPool2d(2),
        Residual(),
        nn.Flatten(),
        nn.Linear(392, 5),
    )
    return nn.Sequential(*layers), {"input": torch.randn(2, 3, 16, 16)}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 16), nn.Dropout(0.1), nn.Linear(16, 20)
        self.lstm = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(3))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for lstm, norm in zip(self.lstm, self.norm):
            x = self.drop(norm(x + lstm(x)[0]))
        return self.head(x)


def recurrent():
    return Recurrent(), {"x": torch.arange(12)[None]}


@pytest.fixture(scope="module", params=[llama, t5, conv, recurrent], ids=lambda make: make.__name__)
def run(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = request.param()
    model.eval()
    folder = tempfile.mkdtemp()
    with torch.no_grad(), whence.capture(model, f"{folder}/run"):
        model(**inputs)
        model(**inputs)
    return open_run(f"{folder}/run")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"numbers": True},
        {"numbers": True, "noise": 1e-5},
        {"numbers": True, "noise": 1e-3, "classes": True},
    ],
    ids=["words", "numbers", "rounding", "classes"],
)
def test_every_call_of_a_renamed_model_finds_its_partner(run, how):
    other, truth = variant(run, seed=1, **how)
    assert not {c.scope for c in run.calls if c.scope and not c.scope.isdigit()} & {
        c.scope for c in other.calls
    }
    plan = align.plan(run, other)
    assert wrong(plan, truth) == ([], [])
    assert len(plan.pairs) == len(run.calls)
    assert all(p.evidence for p in plan.pairs if p.rule not in ("exact key", "normalised name"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "how", [{"rename": False}, {}, {"numbers": True}], ids=["same names", "renamed", "renumbered"]
)
def test_ten_calls_inserted_and_ten_removed(run, how, seed):
    ten = min(10, sum(c.leaf for c in run.calls) // 8)
    other, truth = variant(run, seed=seed, insert=ten, remove=ten, **how)
    bad, missing = wrong(align.plan(run, other), truth)
    # A call that was removed may face one that was inserted in its place: which of the two was
    # meant nobody can say.
    assert [pair for pair in bad if pair[0] in truth] == []
    assert missing == []


def test_a_norm_left_out_among_norms_of_ones(run):
    """Identically initialised siblings are told apart by their place."""
    norms = [c for c in run.calls if "Norm" in c.op_type]
    gone = norms[len(norms) // 4].scope
    other, truth = variant(run, seed=2, numbers=True, remove=0)
    keep = [
        c for c in other.calls if c.id != truth[next(c.id for c in run.calls if c.scope == gone)]
    ]
    left = {c.id: k for k, c in enumerate(keep)}
    cut = type(other)(
        [
            type(c)(
                **{
                    **{f: getattr(c, f) for f in c.__struct_fields__},
                    "id": left[c.id],
                    "parent": left.get(c.parent, -1),
                }
            )
            for c in keep
        ],
        other.records,
        {},
    )
    partner = {p.reference: p.target for p in align.plan(run, cut).pairs}
    expected = {a: left[b] for a, b in truth.items() if b in left}
    assert {a: b for a, b in partner.items() if expected.get(a) != b} == {}
    assert set(expected) - set(partner) == set()
