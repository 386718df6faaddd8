"""`api.parity`: two models on the same inputs, of one framework or two, on copies that leave the
caller's things alone.
"""

import numpy as np
import pytest

from whence.errors import CaptureError, OutputExists
from whence.workflows.two_models import parity

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def net(eps=1e-5, dropout=0.0):
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(32, 16),
        nn.LayerNorm(16, eps=eps),
    )


def inputs(*shape):
    return torch.randn(*(shape or (4, 16)), generator=torch.Generator().manual_seed(1))


def test_the_fault_of_the_second_model_is_named_and_all_is_kept(tmp_path):
    found = parity(net().eval(), net(eps=1e-1).eval(), inputs(), tmp_path / "p")
    assert (found.status, [f.name for f in found.findings]) == ("different", ["4"])
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["cmp", "reference", "target"]
    with pytest.raises(OutputExists):
        parity(net(), net(), inputs(), tmp_path / "p")
    assert parity(net(), net(), inputs(), tmp_path / "p", force=True).status == "same"


def test_another_dtype_is_given_inputs_of_its_own_and_is_rounding():
    found = parity(net().eval(), net().eval().bfloat16(), inputs())
    assert found.status == "same"
    assert set(found.counts) != {"identical"}


def test_both_draw_the_same_random_numbers_and_the_callers_generator_stays_where_it_was():
    before = torch.get_rng_state()
    model = net(dropout=0.5).train()
    found = parity(model, model, inputs())
    assert set(found.counts) == {"identical"}
    assert torch.equal(before, torch.get_rng_state())


def test_named_arguments_nested_and_written_into_do_not_reach_the_caller():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = net()

        def forward(self, x, *, more, scale):
            more["bias"][0].add_(1.0)
            return self.lin(x * scale) + more["bias"][0]

    bias = torch.zeros(16)
    given = {"x": inputs(), "more": {"bias": [bias]}, "scale": 2.0}
    assert parity(Model(), Model(), given).status == "same"
    assert not bias.any()


def test_arrays_and_several_arguments():
    model = torch.nn.Bilinear(4, 4, 2)
    x = np.ones((3, 4), np.float64)
    assert set(parity(model, model, (x, x)).counts) == {"identical"}
    assert x.dtype == np.float64


def test_an_error_of_a_model_says_which_one_it_was(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        parity(net(), torch.nn.Linear(3, 3), inputs(), tmp_path)
    assert caught.value.__notes__ == [
        "whence: raised by the target model, Linear, on the inputs given"
    ]
    with pytest.raises(CaptureError, match="cannot capture a function"):
        parity(lambda x: x, net(), inputs())


@pytest.mark.paddle
def test_paddle_against_torch_and_against_itself():
    paddle = pytest.importorskip("paddle")
    linear = torch.nn.Linear(16, 8)

    class Twin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.act = linear, torch.nn.Tanh()

        def forward(self, x):
            return self.act(self.lin(x))

    class Other(paddle.nn.Layer):
        def __init__(self, act):
            super().__init__()
            self.lin, self.act = paddle.nn.Linear(16, 8), act
            self.lin.weight.set_value(linear.weight.detach().numpy().T)
            self.lin.bias.set_value(linear.bias.detach().numpy())

        def forward(self, x):
            return self.act(self.lin(x))

    right, wrong = Other(paddle.nn.Tanh()).eval(), Other(paddle.nn.Sigmoid()).eval()
    assert parity(Twin().eval(), right, inputs()).status == "same"
    found = parity(Twin().eval(), wrong, inputs())
    assert (found.status, found.findings[0].name) == ("different", "act")
    assert set(parity(right, right, paddle.to_tensor(inputs().numpy())).counts) == {"identical"}
