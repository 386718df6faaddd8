"""The law of the verdict where each operator is a call: stretches are wired from what it read and
left, batches are compared by module, steps by the parameters that they leave.
"""

import copy

import pytest

import whence

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional
pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        halves = torch.zeros_like(x)
        halves[..., :4] = x[..., :4] * self.mix[:4]  # written through views
        halves[..., 4:] = x[..., 4:] * self.mix[4:]
        return halves + self.down(F.gelu(self.up(self.norm(x))))


class Heads(nn.Module):
    """Rows and heads in one axis, as attention has them, and a table as long as the batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.query, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        rows, n, width = x.shape
        heads = self.query(x).view(rows, n, 2, 4).transpose(1, 2).reshape(2 * rows, n, 4)
        mixed = torch.bmm(torch.bmm(heads, heads.mT).softmax(-1), heads)
        order = torch.arange(rows)
        return self.out(mixed.view(rows, 2, n, 4).transpose(1, 2).reshape(rows, n, width)[order])


def blocks():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for block in model[1:3]:
            block.norm.bias.normal_(0, 0.2)
    return model


def folded(model, is_bias_forgotten=False):
    """A factor per channel moved from the first block's norm to the linear behind it."""
    factor = torch.linspace(0.5, 3.5, 8)
    with torch.no_grad():
        model[1].norm.weight.div_(factor)
        if not is_bias_forgotten:
            model[1].norm.bias.div_(factor)
        model[1].up.weight.mul_(factor)
    return model


def compared(tmp_path, reference, target):
    for name, (model, drive) in (("r", reference), ("t", target)):
        with whence.capture(model, tmp_path / name, level="op"):
            drive(model)
    return whence.compare(tmp_path / "r", tmp_path / "t")


def inferred(tmp_path, reference, target):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def drive(model):
        with torch.no_grad():
            model(x)

    return compared(tmp_path, (reference, drive), (target, drive))


def test_weights_that_what_is_behind_takes_back_are_another_form(tmp_path):
    result = inferred(tmp_path, blocks(), folded(blocks()))
    assert result.status == "same"
    assert result.counts["other-form"] >= 2


def test_half_of_a_fold_travels(tmp_path):
    result = inferred(tmp_path, blocks(), folded(blocks(), is_bias_forgotten=True))
    assert result.status == "different"
    assert result.findings[0].name == "1.norm"


def test_a_fault_beside_a_fold_is_named_alone(tmp_path):
    target = folded(blocks())
    target[2].norm.eps = 0.3
    result = inferred(tmp_path, blocks(), target)
    assert [f.name for f in result.findings] == ["2.norm"]


@pytest.mark.parametrize("is_bias_moved", [False, True])
def test_columns_in_another_order_leave_the_bias_where_it_is(tmp_path, is_bias_moved):
    """Of an operator, a parameter is one input more; in 16 bits its bits differ."""
    torch.manual_seed(4)
    reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    target, order = copy.deepcopy(reference), [2, 3, 4, 5, 6, 7, 0, 1]
    with torch.no_grad():
        for moved in (*target[0].parameters(), target[2].weight.T):
            moved.copy_(moved[order])
        if is_bias_moved:
            target[2].bias.copy_(target[2].bias[order])
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def drive(model):
        with torch.no_grad():
            model(x.to(model[0].weight.dtype))

    result = compared(tmp_path, (reference, drive), (target.to(torch.bfloat16), drive))
    assert result.status == ("different" if is_bias_moved else "same")


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 0, 1]])
def test_rows_in_another_order_are_compared_by_module(tmp_path, order):
    torch.manual_seed(3)
    model, ids = Heads().eval(), torch.arange(15).reshape(3, 5) % 11

    def asks(rows):
        def drive(model):
            with torch.no_grad():
                model(input_ids=rows)

        return drive

    pair = (model, asks(ids)), (model, asks(ids[order]))
    assert compared(tmp_path, *pair).status == "same"


def test_operators_of_the_script_between_batches_hide_no_batch(tmp_path):
    model, x = blocks(), torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def whole(model):
        with torch.no_grad():
            model(x)

    def halves(model):
        with torch.no_grad():
            for k in (0, 3):
                model(x.index_select(0, torch.arange(k, k + 3)))

    assert compared(tmp_path, (model, whole), (model, halves)).status == "same"


# ---- training


def trained(optimiser, loss):
    def drive(model):
        steps = optimiser(model)
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))
        for batch in x:
            loss(model(batch), batch[:, :3]).backward()
            steps.step()
            steps.zero_grad()

    return drive


def sgd(**options):
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def in_groups(model):
    first = [p for p in model.parameters() if p.ndim > 1]
    second = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1, foreach=False)


def adamw(*groups):
    """Which counts its steps in tensors that it also reads. groups: of parameters, by their axes."""

    def made(model):
        chosen = [[p for p in model.parameters() if p.ndim in axes] for axes in groups]
        return torch.optim.AdamW([{"params": p} for p in chosen], lr=0.01, foreach=False)

    return made


def mean(out, y):
    return F.mse_loss(out, y)


def summed(out, y):
    return F.mse_loss(out, y, reduction="sum") / y.numel()


LOOPED = sgd(foreach=False)


@pytest.mark.parametrize(
    ("optimiser", "loss"),
    [
        (LOOPED, summed),
        (sgd(foreach=True), mean),
        (sgd(foreach=False, fused=True), mean),
        (in_groups, mean),
    ],
    ids=["loss", "foreach", "fused", "groups"],
)
def test_training_that_is_written_otherwise_is_right_by_its_steps(tmp_path, optimiser, loss):
    pair = (blocks(), trained(LOOPED, mean)), (blocks(), trained(optimiser, loss))
    assert compared(tmp_path, *pair).status == "same"


@pytest.mark.parametrize(("groups", "is_right"), [(((2,), (1,)), True), (((2,),), False)])
def test_an_optimiser_that_counts_its_steps_is_run_again(tmp_path, groups, is_right):
    whole, other = adamw((1, 2)), adamw(*groups)
    pair = (blocks(), trained(whole, mean)), (blocks(), trained(other, mean))
    assert (compared(tmp_path, *pair).status == "same") == is_right


@pytest.mark.parametrize(
    ("optimiser", "loss"),
    [
        (LOOPED, lambda out, y: summed(out, y) * 1.01),
        (sgd(foreach=True, lr=0.101), mean),
        (lambda model: in_groups(model[1:]), mean),
    ],
    ids=["loss", "rate", "left out"],
)
def test_training_that_is_wrong_is_not(tmp_path, optimiser, loss):
    pair = (blocks(), trained(LOOPED, mean)), (blocks(), trained(optimiser, loss))
    assert compared(tmp_path, *pair).status != "same"


def test_clipping_that_is_forgotten_is_named_where_the_step_forgets_its_scale(tmp_path):
    def drive_with(limit):
        def drive(model):
            steps = adamw((1, 2))(model)
            for batch in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2)):
                mean(model(batch), batch[:, :3]).backward()
                if limit:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)
                steps.step()
                steps.zero_grad()

        return drive

    result = compared(tmp_path, (blocks(), drive_with(0.01)), (blocks(), drive_with(0.0)))
    assert result.status == "different"
    assert result.findings[0].phase == "optimizer"


def test_clipping_hides_no_wrong_scale(tmp_path):
    def drive_with(loss):
        def drive(model):
            steps = LOOPED(model)
            for batch in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2)):
                loss(model(batch), batch[:, :3]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)
                steps.step()
                steps.zero_grad()

        return drive

    pair = (blocks(), drive_with(mean)), (blocks(), drive_with(lambda o, y: 2 * mean(o, y)))
    assert compared(tmp_path, *pair).status == "different"


def test_a_step_of_other_operators_is_not_blamed_for_a_wrong_gradient(tmp_path):
    def drive_with(foreach):
        def drive(model):
            steps = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
            for batch in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2)):
                mean(model(batch), batch[:, :3]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
                steps.step()
                steps.zero_grad()

        return drive

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 5 * gradient

    class Plain(nn.Module):
        def forward(self, x):
            return x.clone()

    class Wrong(nn.Module):
        def forward(self, x):
            return Scaled.apply(x)

    reference, target = blocks(), blocks()
    reference.insert(1, Plain())
    target.insert(1, Wrong())
    result = compared(tmp_path, (reference, drive_with(False)), (target, drive_with(True)))
    assert result.status == "different"
    assert "optimizer" not in {finding.phase for finding in result.findings}


def one_behind_the_other(rate):
    """Two optimisers, of every other parameter each; the second with this rate."""

    class Both:
        def __init__(self, model):
            halves = list(model.parameters())[::2], list(model.parameters())[1::2]
            self.own = [
                torch.optim.AdamW(parameters, lr=lr, foreach=False)
                for parameters, lr in zip(halves, (0.01, rate), strict=True)
            ]

        def step(self):
            for own in self.own:
                own.step()

        def zero_grad(self):
            for own in self.own:
                own.zero_grad()

    return Both


@pytest.mark.parametrize(("rate", "is_right"), [(0.01, True), (0.0101, False)])
def test_two_optimisers_one_behind_the_other_are_one_step(tmp_path, rate, is_right):
    pair = (
        (blocks(), trained(adamw((1, 2)), mean)),
        (
            blocks(),
            trained(one_behind_the_other(rate), mean),
        ),
    )
    assert (compared(tmp_path, *pair).status == "same") == is_right


class Filled(nn.Module):
    """Puts two halves into memory that nothing wrote before."""

    def __init__(self, is_split):
        super().__init__()
        self.linear, self.is_split = nn.Linear(4, 4), is_split

    def forward(self, x):
        both = x.new_empty(len(x), 6)
        both[:, :2] = x[:, :2]
        both[:, 2:] = self.product(x)
        return both

    def product(self, x):
        if not self.is_split:
            return self.linear(x)
        weight = self.linear.weight
        return x[:, :2] @ weight[:, :2].T + x[:, 2:] @ weight[:, 2:].T + self.linear.bias


class Turned(Filled):
    """Exchanges the axes of a tensor in place."""

    def forward(self, x):
        return self.product(x).clone().transpose_(0, 1).contiguous().T


@pytest.mark.parametrize("kind", [Filled, Turned])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_backward_pass_of_other_operators_is_right_by_its_step(tmp_path, kind, factor):
    sides = []
    for is_split, times in ((False, 1.0), (True, factor)):
        torch.manual_seed(3)
        drive = trained(LOOPED, lambda out, y, times=times: times * mean(out[:, :3], y))
        sides.append((nn.Sequential(nn.Linear(4, 4), kind(is_split)), drive))
    assert (compared(tmp_path, *sides).status == "same") == (factor == 1.0)


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.5, False)])
def test_gradients_under_autocast_round_as_its_operators_do(tmp_path, factor, is_right):
    def drive_under(is_on, times):
        def drive(model):
            steps = LOOPED(model)
            for batch in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                    out = model(batch)
                (times * mean(out.float(), batch[:, :3])).backward()
                steps.step()
                steps.zero_grad()

        return drive

    pair = (blocks(), drive_under(False, 1.0)), (blocks(), drive_under(True, factor))
    assert (compared(tmp_path, *pair).status == "same") == is_right
