"""Where rounding may carry an argument across a jump (a round, a floor, a comparison), the other side
is not a fault; another way to round, and another scale, are.
"""

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402

pytestmark = pytest.mark.torch
ROWS, WIDTH, OUT = 24, 64, 12


def levels(x, scale, how, most):
    """x over scale, rounded. `other`: the scale's reciprocal, as compiled code takes it."""
    if how == "reference":
        return (x / scale).round().clamp(-most, most)
    rounded = torch.floor if how == "floor" else torch.round
    return rounded(x * (1 / scale)).clamp(-most, most)


def per_row(x, how):
    scale = x.abs().amax(-1, keepdim=True) / 127 * (1.02 if how == "scale" else 1)
    return levels(x, scale, how, 127) * scale


def per_tensor(x, how):
    scale = x.abs().amax() / 127 * (1.02 if how == "scale" else 1)
    return levels(x, scale, how, 127).to(torch.int8).to(x.dtype) * scale


def per_channel(x, how):
    scale = x.abs().amax(0, keepdim=True) / 7 * (1.02 if how == "scale" else 1)
    return levels(x, scale, how, 7) * scale


def straight_through(x, how):
    return x + (per_row(x, how) - x).detach()


def positions(x, how):
    p = torch.arange(len(x) * 5, dtype=torch.float32)[::5]
    blocks = {"reference": lambda: torch.floor(p / 5 / 7), "floor": lambda: torch.ceil(p / 5 / 7)}
    block = blocks.get(how, lambda: torch.floor(p * (1 / 35)))()
    return x * (1 + block[:, None] * (0.11 if how == "scale" else 0.1))


def threshold(x, how):
    y = torch.sigmoid(x) if how == "reference" else 1 / (1 + torch.exp(-x))
    least = {"floor": 0.5999, "scale": 0.61}.get(how, 0.6)
    return x * (y > least)


WAYS = {
    f.__name__: f
    for f in (per_row, per_tensor, per_channel, straight_through, positions, threshold)
}


class Quantised(torch.nn.Module):
    def __init__(self, way, how):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(OUT, WIDTH) / 8)
        self.way, self.how = WAYS[way], how

    def forward(self, x):
        return torch.nn.functional.linear(self.way(x, self.how), self.weight)


def given(way):
    """Inputs of which some lie at a jump, but for rounding."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH)
    x[:, 0], x[0] = torch.linspace(4, 6, ROWS), 4.0  # the largest of every row and channel
    k = torch.randint(-40, 40, x.shape) + 0.5
    at = {
        "per_channel": 2.5 * (x.abs().amax(0, keepdim=True) / 7),
        "threshold": torch.logit(torch.tensor(0.6)) * (1 + 1e-7 * torch.randn(ROWS, WIDTH)),
        "per_tensor": k * (x.abs().amax() / 127),
    }.get(way, k * (x.abs().amax(-1, keepdim=True) / 127))
    is_at = torch.rand(ROWS, WIDTH) < 0.03
    is_at[0] = is_at[:, 0] = False
    return torch.where(is_at, at.expand_as(x), x)


def compared(way, how, folder, **options):
    x, training = given(way), way == "straight_through"
    for name, side, more in (("r", "reference", {}), ("t", how, options)):
        model = Quantised(way, side)
        with whence.capture(model, folder / name, **more), torch.set_grad_enabled(training):
            y = model(x)
            if training:
                y.square().mean().backward()
    return whence.compare(folder / "r", folder / "t")


@pytest.mark.parametrize("way", WAYS)
def test_the_other_side_of_a_jump_is_no_fault(way, tmp_path):
    result = compared(way, "other", tmp_path)
    assert result.status == "same", result.findings


@pytest.mark.parametrize("how", ["floor", "scale"])
@pytest.mark.parametrize("way", WAYS)
def test_another_way_to_round_and_another_scale_are_faults(way, how, tmp_path):
    result = compared(way, how, tmp_path)
    assert result.status == "different"
    assert result.findings[0].cause == "semantic"


def test_rows_on_the_other_side_are_counted(tmp_path):
    (verdict,) = compared("per_row", "other", tmp_path).verdicts
    with torch.no_grad():
        x = given("per_row")
        moved = (per_row(x, "other") - per_row(x, "reference")).abs().amax(1) > 1e-3
    assert verdict.numbers["tied_rows"] >= int(moved.sum()) > 0
    assert f"of {ROWS} rows" in verdict.sentence
    assert "round falls on the other side of a jump in" in verdict.sentence


def test_where_nothing_is_rounded_before_a_jump_the_other_side_is_a_fault(tmp_path):
    """Halves that are exact: to even in the reference, away from zero in the target."""
    x = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) % 16 / 2
    for name, mode in (("r", torch.round), ("t", lambda v: torch.floor(v + 0.5))):
        model = Rounded(mode)
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(x)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == "different"


class Rounded(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(OUT, WIDTH) / 8)
        self.mode = mode

    def forward(self, x):
        return torch.nn.functional.linear(self.mode(x), self.weight)


@pytest.mark.parametrize(("how", "status"), [("other", "same"), ("scale", "different")])
def test_a_call_that_shows_no_inside_is_followed_too(how, status, tmp_path):
    x = given("per_row")
    for name, side, more in (("r", "reference", {}), ("t", how, {"max_depth": 0})):
        model = torch.nn.Sequential(Quantised("per_row", side), torch.nn.LayerNorm(OUT))
        with whence.capture(model, tmp_path / name, **more), torch.no_grad():
            model(x)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status
