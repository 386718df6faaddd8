"""Which operator rounds otherwise in a batch, or on other threads, and how much of the spread it
explains.
"""

import pytest
import torch
from torch import nn

import whence
from whence.results import Held
from whence.workflows.probe.torch.measuring import counterparts
from whence.workflows.probe.torch.trace import Trace

pytestmark = pytest.mark.torch

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


class Parts(nn.Linear):
    """Sums in parts. parts: how many, of what it is given."""

    def __init__(self, parts):
        super().__init__(16, 16)
        self.parts = parts

    def forward(self, x):
        if self.parts(x) == 1:
            return (x[:, None] * self.weight).sum(-1) + self.bias
        product = x[:, None] * self.weight
        return product[..., :5].sum(-1) + product[..., 5:].sum(-1) + self.bias


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
        return x


def asked(name, *layers):
    torch.manual_seed(0)
    for layer in layers:
        layer.reset_parameters()
    return whence.probe(Net(*layers).eval(), X, properties=[name])[name]


def rows(x):
    return 1 if len(x) == 1 else 2


def test_a_module_that_runs_other_code_in_a_batch_explains_all_of_it():
    answer = asked("batch", Parts(lambda x: 1), Parts(rows))
    assert answer.held == Held.ROUNDING
    (share,) = answer.shares
    assert (share.scope, share.calls) == ("layers.1", 1)
    assert share.share == pytest.approx(1.0)
    assert share.operator == "aten.add.Tensor"


def test_two_sources_share_the_spread():
    answer = asked("batch", Parts(rows), Parts(rows))
    places = {v.first.scope for v in answer.variants if v.first}
    assert places == {"layers.0"}
    assert 0.0 < answer.shares[0].share <= 1.0


def test_a_sum_by_threads_explains_the_spread_over_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        answer = asked("repeat", Parts(lambda x: torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert answer.held == Held.ROUNDING
    assert answer.shares[0].scope == "layers.0"
    assert answer.shares[0].share == pytest.approx(1.0)


def test_only_operators_that_are_the_same_are_paired():
    net = nn.Sequential(Parts(rows))
    traces = []
    for x in (X[:1], X):
        trace = Trace(net)
        with trace.listening():
            net(x)
        traces.append(trace)
    base, variant = traces
    pairs = counterparts(base, variant)
    names = [op.key[2] for op in base.operators]
    assert all(base.operators[a].key[2] == variant.operators[b].key[2] for a, b in pairs.items())
    assert names.index("aten.sum.dim_IntList") not in pairs
    assert pairs[len(names) - 1] == len(variant.operators) - 1
