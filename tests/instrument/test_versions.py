"""Version counters are as without a capture: autograd goes by them when it refuses a tensor that
was changed since.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from whence.frameworks.torch_schema import restored

pytestmark = pytest.mark.torch
LEVELS = {"modules": {}, "op": {"level": "op"}}


def ones(*shape):
    return torch.ones(*(shape or (3,)))


def foreach(tensors):
    torch._foreach_add_(tensors, 1.0)
    torch._foreach_addcdiv_(tensors, tensors, [t + 1 for t in tensors], 0.1)
    torch._foreach_zero_(tensors)


def fused(tensors):
    states = [[torch.zeros_like(t) for t in tensors] for _ in range(3)]
    steps = [torch.tensor(1.0) for _ in tensors]
    torch._fused_adamw_(
        tensors, *states, [], steps, lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def outs(tensors):
    torch.add(tensors[0], 1, out=tensors[1])
    torch.cat([ones(1), ones(2)], out=tensors[1].resize_(0))


def memory(tensors):
    tensors[0].resize_(2)
    tensors[1].set_(ones(5))
    tensors[1].data = ones(2)


def views(tensors):
    tensors[0][0] = 5
    tensors[1].view(3, 1)[0].mul_(2)
    tensors[1].detach().add_(1)
    torch.split(tensors[0], 1)[1].fill_(0)


def inference(tensors):
    with torch.inference_mode():
        tensors[0].add_(1)
        torch._foreach_mul_(tensors, 2)


def unscaled(tensors):
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros(1), torch.ones(1))


def statistics(tensors):
    nn.functional.batch_norm(torch.randn(4, 3), *tensors, training=True)
    nn.functional.instance_norm(torch.randn(2, 3, 4), *tensors, use_input_stats=True)


def made(tensors):
    tensors += [torch.zeros(2), torch.full((2,), 1.0), torch.arange(3.0), torch.eye(2)]
    tensors += [nn.functional.linear(torch.ones(5000, 8), torch.ones(4, 8), torch.ones(4))]
    tensors += [
        torch.ones(2, 3).sort(-1)[0],
        torch.ones(3).cumsum(0),
        torch.tensor([1.0]),
        torch.nn.init.normal_(ones()),
        torch.randn(2).clamp_(0),
    ]


def library(tensors):
    torch.ops.whence_test.twice_(tensors[0])
    torch.ops.whence_test.unnamed_(tensors[1])
    tensors.append(torch.ops.whence_test.square(tensors[0]).clone())


CHANGES = (
    foreach, fused, outs, memory, views, inference, unscaled, statistics, made, library,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Operators of a library: in place by others, and by none that torch has a kernel for."""
    library = torch.library.Library("whence_test", "FRAGMENT")
    library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("twice_", lambda x: x.add_(x), "CompositeExplicitAutograd")
    library.define("unnamed_(Tensor x) -> ()")
    library.impl("unnamed_", lambda x: [x.add_(1)].clear(), "CPU")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: (x * x).clone(), "CPU")
    yield
    library._destroy()


class Changed(nn.Module):
    """Changes tensors in a way, inside a module."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, tensors):
        self.change(tensors)
        return x


def versions(change, call=None):
    """Versions of tensors that are changed so, once by a module and once outside."""
    tensors = [ones(), ones()]
    (call or Changed(change))(ones(), tensors)
    with torch.no_grad():
        change(tensors)
    return [t._version for t in tensors]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("change", CHANGES)
def test_versions_are_those_of_the_bare_program(change, level, tmp_path):
    expected = versions(change)
    model = Changed(change)
    with whence.capture(model, tmp_path / "run", **LEVELS[level]):
        assert versions(change, model) == expected


def trained(make, **options):
    """Versions after steps of an optimizer, and what a second backward pass after them says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = make(model.parameters())
    with whence.capture(model, **options) if options else contextlib.nullcontext():
        for _ in range(2):
            loss = model(torch.randn(2, 4)).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
        try:
            loss.backward()
            said = ""
        except RuntimeError as error:
            said = str(error)
    return [p._version for p in model.parameters()], said, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [
    lambda p: SGD(p, 0.1, momentum=0.9, foreach=True),
    lambda p: Adam(p, 0.1, foreach=True),
    lambda p: AdamW(p, 0.1, fused=True),
    lambda p: SGD(p, 0.1, foreach=False),
])  # fmt: skip
def test_a_second_backward_after_a_step_is_as_without_a_capture(make, level, tmp_path):
    bare, inside = trained(make), trained(make, path=tmp_path / "run", **LEVELS[level])
    assert inside[:2] == bare[:2]
    assert all(map(torch.equal, inside[2], bare[2]))


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_list_is_changed_by_before_the_backward_pass_is_refused(level, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with whence.capture(model, tmp_path / "run", **LEVELS[level]):
        loss = model(torch.randn(2, 4)).sum()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_a_gradient_flows_through_what_an_operator_without_a_derivative_runs(level, tmp_path):
    model = Changed(lambda tensors: tensors.append(torch.ops.whence_test.square(tensors[0])))
    x = torch.full((2,), 3.0, requires_grad=True)
    with whence.capture(model, tmp_path / "run", **LEVELS[level]):
        model(ones(), tensors := [x])
        tensors[1].sum().backward()
    assert tensors[1]._version == 0
    assert x.grad.tolist() == [6.0, 6.0]


def test_a_mode_below_counts_nothing_more():
    """A mode of the program's between counts what it counts without us."""

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Restoring(Plain):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with restored(func, ()):
                return func(*args, **(kwargs or {}))

    counted = []
    for modes in ([Plain()], [Plain(), Restoring()]):
        tensors = [ones(), ones()]
        for mode in modes:
            mode.__enter__()
        foreach(tensors)
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        counted.append([t._version for t in tensors])
    assert counted[0] == counted[1]


def test_outside_of_a_handler_nothing_is_switched():
    excluded = str(torch._C._dispatch_tls_local_exclude_set())
    with restored(torch.ops.aten._foreach_add_.Scalar, ()):
        assert str(torch._C._dispatch_tls_local_exclude_set()) == excluded
    assert str(torch._C._dispatch_tls_local_exclude_set()) == excluded
