"""Operators of another device run here, and give what torch's own modules give."""

import numpy as np
import pytest
import torch
from torch import nn

from whence.records import Operation, Program
from whence.replay import engine, validation

pytestmark = pytest.mark.torch


def run(name, tensors, *rest, working="recorded", outputs=1, kind="float32"):
    """What a program of one operator gives, whose first arguments are these tensors."""
    program = Program(
        id="one",
        operations=(
            Operation(f"aten.{name}.default", (*({"in": k} for k in range(len(tensors))), *rest)),
        ),
        inputs=tuple(f"input.{k}" for k in range(len(tensors))),
        outputs=tuple((f"output.{k}", {"op": [0, k]}) for k in range(outputs)),
        base=kind,
        input_dtypes=(kind,) * len(tensors),
    )
    inputs = {f"input.{k}": tensor.numpy() for k, tensor in enumerate(tensors)}
    given = {slot: array.copy() for slot, array in inputs.items()}
    found = validation.load(program).run(inputs, {}, working=working)
    assert all(np.array_equal(inputs[slot], given[slot]) for slot in inputs)
    return [found[f"output.{k}"] for k in range(outputs)]


@pytest.mark.parametrize("working", ["recorded", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("_scaled_dot_product_flash_attention", (0.0,)),
        ("_scaled_dot_product_efficient_attention", (None, False, 0.0)),
        ("_scaled_dot_product_cudnn_attention", (None, False, 0.0)),
    ],
)
def test_attention(name, rest, causal, working):
    q, k, v = torch.randn(3, 2, 4, 8, 16, dtype=torch.float64).unbind()
    (found,) = run(name, [x.float() for x in (q, k, v)], *rest, causal, working=working)
    scores = q.float().double() @ k.float().double().transpose(-1, -2) / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ v.float().double()
    assert found.dtype == (np.float32 if working == "recorded" else np.float64)
    assert np.allclose(found, expected, atol=1e-6 if working == "recorded" else 1e-13)


def test_attention_with_a_mask_and_fewer_heads_of_keys():
    q, mask = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 8)
    k, v = torch.randn(2, 2, 2, 8, 16).unbind()
    named = {"query": q, "key": k, "value": v, "attn_bias": mask, "scale": 0.3}
    (found,) = engine.attention(named)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    assert torch.allclose(found, (q @ k.mT * 0.3 + mask).softmax(-1) @ v, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["cudnn_batch_norm", "miopen_batch_norm"])
def test_batch_norm(name, training):
    norm = nn.BatchNorm2d(3, momentum=0.1, eps=1e-5).train(training)
    nn.init.normal_(norm.weight)
    x, mean, variance = torch.randn(4, 3, 5, 5), torch.randn(3), torch.rand(3) + 0.5
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    tensors = [x, norm.weight.detach(), norm.bias.detach(), mean, variance]
    for working in ("recorded", "float64"):
        (found,) = run(name, tensors, training, 0.1, 1e-5, working=working)
        expected = _alone(norm, x) if training else norm.eval()(x).detach()
        assert np.allclose(found, expected, atol=1e-5)


def _alone(norm, x):
    return nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True).detach()


def test_cells():
    x, h, c = torch.randn(3, 5), torch.randn(3, 6), torch.randn(3, 6)
    for cell, function in (
        (nn.LSTMCell(5, 6), engine.lstm_cell),
        (nn.GRUCell(5, 6), engine.gru_cell),
    ):
        named = {
            "input_gates": x @ cell.weight_ih.T,
            "hidden_gates": h @ cell.weight_hh.T,
            "input_bias": cell.bias_ih,
            "hidden_bias": cell.bias_hh,
            "hx": h,
            "cx": c,
        }
        expected = cell(x, (h, c)) if isinstance(cell, nn.LSTMCell) else [cell(x, h)]
        for a, b in zip(function(named), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_histogram_of_whole_numbers(dtype):
    """As experts count their tokens on a GPU."""
    x = torch.tensor([0, 1, 1, 3, 3, 3], dtype=dtype)
    (found,) = engine.histogram({"self": x, "bins": 4, "min": 0, "max": 3})
    assert found.tolist() == [1, 2, 0, 3] and found.dtype == dtype


def test_gradients_flow_through_them():
    """Backward passes are replayed as derivatives of the forward program."""
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    named = {
        "input": x, "weight": torch.ones(3, dtype=torch.float64), "training": True,
        "exponential_average_factor": 0.1, "epsilon": 1e-5,
    }  # fmt: skip
    assert torch.autograd.gradcheck(lambda y: engine.batch_norm({**named, "input": y})[0], x)
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda y: engine.attention({"query": y, "key": y, "value": y})[0], q
    )
