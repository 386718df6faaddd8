"""Documents of one row: who sees whom, and what says that nobody should."""

import pytest
import torch
from torch import nn

import whence
from whence.errors import UsageError
from whence.results import Held, Status
from whence.testing import assert_packing_invariant
from whence.workflows.probe.torch.inputs import CallInputs
from whence.workflows.probe.torch.packing import block_mask, documents

pytestmark = pytest.mark.torch

IDS = torch.tensor([[5, 9, 3, 7, 11, 2, 8, 4]])
RESTART = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])


class Net(nn.Module):
    """One head. parts: who sees whom, of positions [length]; None for all that come before."""

    def __init__(self, parts=None, extra=None, by_index=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(16, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 16)
        self.parts, self.extra, self.by_index = parts, extra, by_index

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        length = input_ids.shape[1]
        if position_ids is None or self.by_index:
            position_ids = torch.arange(length)[None]
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.parts is not None:
            seen = seen & self.parts(position_ids[0])
        scores = scores.masked_fill(~seen, torch.finfo(x.dtype).min)
        if attention_mask is not None and attention_mask.ndim == 4:
            scores = scores + attention_mask[:, 0]
        x = x + scores.softmax(-1) @ v
        return {"logits": self.head(x if self.extra is None else self.extra(x))}


def parted(positions):
    numbers = (positions == 0).cumsum(0)
    return numbers[:, None] == numbers[None]


def parted_late(positions):
    numbers = (positions == 0).cumsum(0).roll(1)
    return numbers[:, None] == numbers[None]


def asked(model, declare=(), **inputs):
    values = {"input_ids": IDS, **inputs}
    return whence.probe(model.eval(), values, properties=["packing"], declare=declare)["packing"]


def first(answer):
    return next(v.first for v in answer.variants if v.held == answer.held and v.first)


def test_a_mask_that_follows_positions_holds_in_a_packed_call():
    answer = asked(Net(parted), position_ids=RESTART)
    assert answer.held in (Held.EXACT, Held.ROUNDING)
    assert answer.notes == ("the call itself is packed",)
    assert len(answer.variants) == 3


@pytest.mark.parametrize("parts", [None, parted_late])
def test_documents_that_see_each_other_are_named_with_the_position(parts):
    answer = asked(Net(parts), position_ids=RESTART)
    assert answer.held == Held.VIOLATED
    assert "from its position 0 on" in answer.cause
    assert first(answer).operator == "aten._softmax"
    assert first(answer).line.startswith(__file__)


def test_a_shift_over_the_border_is_named():
    answer = asked(Net(parted, lambda x: x + 0.1 * x.roll(1, 1)), position_ids=RESTART)
    assert answer.held == Held.VIOLATED
    assert first(answer).operator == "aten.roll"


def test_what_nothing_says_should_hold_is_no_fault():
    assert asked(Net()).held == Held.OBSERVED
    assert "--declare packed" in " ".join(asked(Net()).notes)
    declared = asked(Net(), declare=["packed"])
    assert declared.held == Held.VIOLATED
    assert asked(Net(parted), declare=["packed"]).held in (Held.EXACT, Held.ROUNDING)
    assert asked(Net(), declare=["not-packed"]).held == Held.ABSENT


def test_a_block_mask_is_tried_where_the_model_reads_one():
    answer = asked(Net())
    assert "a block mask" in answer.cause
    assert answer.variants[-1].held in (Held.EXACT, Held.ROUNDING)


def test_positions_that_are_not_read_are_named():
    answer = asked(Net(by_index=True), declare=["packed"])
    assert answer.held == Held.VIOLATED
    assert first(answer).scope == "places"


def test_a_model_without_positions_is_not_asked():
    class Bare(nn.Sequential):
        def forward(self, input_ids):
            return super().forward(input_ids)

    assert asked(Bare(nn.Embedding(16, 8), nn.Linear(8, 8))).held == Held.ABSENT


def test_llama_parts_documents_without_a_mask_or_a_cache():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    assert_packing_invariant(model, {"input_ids": IDS})
    answer = asked(model, position_ids=RESTART, attention_mask=torch.ones_like(IDS))
    assert answer.held == Held.VIOLATED
    assert "without attention_mask" in answer.cause
    answer = asked(model, position_ids=RESTART, use_cache=True)
    assert "use_cache=False parts them" in answer.cause
    with pytest.raises(AssertionError, match="see each other"):
        assert_packing_invariant(Net().eval(), {"input_ids": IDS, "position_ids": RESTART})


@pytest.mark.parametrize(
    ("inputs", "spans"),
    [
        ({"position_ids": RESTART}, [(0, 3), (3, 8)]),
        ({"position_ids": torch.arange(8)[None]}, None),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 8])}, [(0, 2), (2, 8)]),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2, 3, 3, 0]])}, [(0, 2), (2, 5), (5, 7)]),
        ({"attention_mask": block_mask([3, 5], torch.float32)}, [(0, 3), (3, 8)]),
        (  # positions of padding on the left, as a library fills them
            {
                "position_ids": torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4]]),
                "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]),
            },
            None,
        ),
    ],
)
def test_a_call_tells_its_documents(inputs, spans):
    found = documents(CallInputs(Net(), (), {"input_ids": IDS, **inputs}))
    assert found == ({0: spans} if spans else {})


def test_a_word_that_declares_nothing_is_refused():
    with pytest.raises(UsageError, match="packed, not-packed, flip, shift"):
        asked(Net(), declare=["rotate"])
    assert whence.probe(Net(parted).eval(), {"input_ids": IDS}).status == Status.SAME
