"""What a page is given: the order and the flow of calls, the noise that explains an error, and
elements looked at closely against numpy.
"""

import json
import math

import ml_dtypes
import numpy as np
import pytest

import whence
from whence import metrics
from whence.api import load_comparison
from whence.errors import OutputExists, UnreadableRun, UsageError
from whence.metrics import error_profile
from whence.workflows.page.measure import page_of


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((3, 40, 130)).astype(np.float32)
    target = reference + (1e-4 * rng.standard_normal(reference.shape)).astype(np.float32)
    target[:, :, 64:70] += 0.1
    target[0, 0, :7] = reference[0, 0, :7]
    return reference, target


def test_histogram_and_equal_places(pair):
    found = metrics.closely(*pair)
    error = np.abs(pair[1].astype(np.float64) - pair[0].astype(np.float64)).ravel()
    assert found.zeros == np.count_nonzero(error == 0) >= 7
    assert found.counts.sum() + found.zeros == error.size
    assert found.edges[0] <= error[error > 0].min()
    assert found.edges[-1] >= error.max()
    for low, high, count in zip(found.edges, found.edges[1:], found.counts):
        assert count == pytest.approx(np.count_nonzero((error >= low) & (error < high)), abs=2)


def test_worst_elements_are_the_largest_in_order(pair):
    found = metrics.closely(*pair)
    error = np.abs(pair[1].astype(np.float64) - pair[0].astype(np.float64)).ravel()
    assert error[found.worst].tolist() == sorted(error, reverse=True)[: found.worst.size]
    assert found.worst.size == 10


def test_places_that_only_one_side_has_not_finite_come_first(pair):
    reference, target = pair[0].copy(), pair[1].copy()
    target[1, 2, 3] = np.nan
    reference[2, 0, 5] = target[2, 0, 5] = np.inf
    found = metrics.closely(reference, target)
    assert found.worst[0] == np.ravel_multi_index((1, 2, 3), target.shape)
    assert np.ravel_multi_index((2, 0, 5), target.shape) not in found.worst
    assert found.not_finite == (1, 2)
    assert np.isfinite(found.heat.values).all()


def test_the_heatmap_is_the_root_mean_square_of_its_blocks(pair):
    heat = metrics.closely(*pair).heat
    error = (pair[1].astype(np.float64) - pair[0]).reshape(-1, 130)
    rows, columns = math.ceil(120 / heat.values.shape[0]), math.ceil(130 / heat.values.shape[1])
    expected = [
        [
            math.sqrt((error[r : r + rows, c : c + columns] ** 2).mean())
            for c in range(0, 130, columns)
        ]
        for r in range(0, 120, rows)
    ]
    np.testing.assert_allclose(heat.values, expected, rtol=1e-12)
    np.testing.assert_allclose(heat.by_channel, (error**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(heat.by_row, (error**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize(
    ("rows", "channels", "blocks"),
    [
        (2, 2, (2, 2)),
        (40, 80, (40, 80)),
        (41, 81, (21, 41)),
        (80, 161, (40, 54)),
        (3, 1000, (3, 77)),
    ],
)
def test_the_heatmap_has_at_most_40_by_80_blocks(rows, channels, blocks):
    """As many as there are places, else of the smallest size that leaves no more."""
    one = np.ones((rows, channels), np.float32)
    assert metrics.closely(one, 3 * one).heat.values.tolist() == np.full(blocks, 2.0).tolist()


def test_quantiles_of_a_normal_error_lie_on_the_diagonal():
    rng = np.random.default_rng(1)
    reference = np.zeros((200, 200))
    found = metrics.closely(reference, 0.25 * rng.standard_normal(reference.shape))
    expected, seen = found.quantiles[
        :-3
    ].T  # of the last few there are only as many as of dice throws
    np.testing.assert_allclose(seen, 0.25 * expected, rtol=0.1, atol=2e-3)


def test_the_scatter_holds_pairs_of_the_tensor_and_the_largest_error(pair):
    found = metrics.closely(*pair).magnitude
    error = np.abs(pair[1].astype(np.float64) - pair[0].astype(np.float64)).ravel()
    table = set(zip(np.abs(pair[0]).ravel().astype(np.float64).tolist(), error.tolist()))
    assert {tuple(row) for row in found.tolist()} <= table
    assert found[:, 1].max() == error.max()
    assert len(found) <= 600


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (1, 1), (3, 0, 2)])
def test_small_tensors(shape):
    one = np.ones(shape, np.float32)
    found = metrics.closely(one, one * 2)
    assert found.counts.sum() == one.size
    assert found.zeros == 0
    assert len(found.worst) == one.size


@pytest.mark.parametrize(
    "dtype", [np.int64, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_other_dtypes(dtype):
    zeros, ones = np.zeros((4, 4), dtype), np.ones((4, 4), dtype)
    found = metrics.closely(zeros, ones)
    assert found.counts.sum() == 16
    assert found.heat.values.tolist() == [[1.0] * 4] * 4


def test_an_error_in_few_channels_is_concentrated_and_an_even_one_is_not(pair):
    heat = metrics.closely(*pair).heat
    first, last, share = error_profile.concentrated(heat.by_channel)
    assert (first, last) in {(64, 69), (64, 68), (65, 69)}
    assert share == pytest.approx(heat.by_channel[first : last + 1].sum() / heat.by_channel.sum())
    assert error_profile.concentrated(heat.by_row) is None
    assert error_profile.concentrated(np.ones(100)) is None
    assert error_profile.concentrated(np.zeros(100)) is None
    assert error_profile.concentrated(np.array([0.0, 1.0])) is None
    assert error_profile.concentrated(np.eye(20)[7]) == (7, 7, 1.0)


# ---- of a comparison

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self, broken=False):
        super().__init__()
        self.up, self.mid, self.down = (
            torch.nn.Linear(32, 64),
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 8),
        )
        self.broken = broken

    def forward(self, x):
        x = self.up(x)
        return self.down(self.mid(x) * (1.01 if self.broken else 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("paging")
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(16, 32)
    other = Net(broken=True).eval()
    other.load_state_dict(net.state_dict())
    for name, model in (("ref", net), ("tgt", other)):
        with whence.capture(model, place / name), torch.no_grad():
            model(x)
    whence.compare(place / "ref", place / "tgt", output=place / "cmp")
    return place


@pytest.mark.torch
def test_calls_stand_in_order_with_their_tree_and_flow(folder):
    page = page_of(load_comparison(folder / "cmp"))
    names = [c.name for c in page.calls]
    assert names == ["Net", "up", "mid", "down"]
    assert [c.parent for c in page.calls] == [-1, 0, 0, 0]
    assert page.calls[names.index("mid")].reads == (names.index("up"),)
    assert page.calls[names.index("down")].reads == (
        0,
    )  # what it reads was made between the modules
    assert page.missing == ()


@pytest.mark.torch
def test_what_is_introduced_is_above_what_explains_it_and_what_is_inherited_below(folder):
    page = page_of(load_comparison(folder / "cmp"))
    by_name = {c.name: c for c in page.calls}
    assert by_name["Net"].verdict == "introduced"
    assert by_name["Net"].error > 1000 * by_name["Net"].noise
    assert by_name["down"].verdict == "inherited"
    assert by_name["down"].error <= by_name["down"].noise
    assert by_name["up"].error == 0.0


class Rounded(torch.nn.Linear):
    """The kernel of another processor: its rounding points away from what `reference` gave, as an
    inherited error may.
    """

    reference: torch.Tensor

    def forward(self, x):
        y = super().forward(x)
        return torch.nextafter(y, torch.where(y >= self.reference, torch.inf, -torch.inf))


@pytest.mark.torch
def test_rounding_that_points_the_way_of_the_inherited_error_is_explained(folder, tmp_path):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(16, 32)
    target = Net(broken=True).eval()
    target.down = Rounded(64, 8)
    with torch.no_grad():
        target.load_state_dict(net.state_dict())
        Rounded.reference = net(x)
        with whence.capture(target, tmp_path / "target"):
            target(x)
    compared = whence.compare(folder / "ref", tmp_path / "target")
    down = next(c for c in page_of(compared).calls if c.name == "down")
    assert down.verdict == "inherited"
    inherited = next(v.numbers["inherited_rel"] for v in compared.verdicts if v.pair == down.pair)
    # What came in does not explain all that is seen: the rounding is needed.
    assert inherited < down.error <= down.noise < 1.001 * down.error


@pytest.mark.torch
def test_the_finding_is_looked_at_closely(folder):
    compared = load_comparison(folder / "cmp")
    page = page_of(compared)
    first = page.details[0]
    assert page.calls[first.call].pair == compared.findings[0].pair
    assert first.slot == "down:input.0"
    index, reference, target = first.worst[0]
    assert target == pytest.approx(1.01 * reference, rel=1e-5)
    assert index == compared.findings[0].worst_index
    assert first.noise > 0
    assert page_of(compared, details=0).details == ()
    assert {d.call for d in page_of(compared, details=1).details} == {first.call}


@pytest.mark.torch
def test_facts_of_both_sides(folder):
    page = page_of(load_comparison(folder / "cmp"))
    assert dict(page.reference.facts)["torch"] == torch.__version__
    assert "started" not in page.reference.differing


@pytest.mark.torch
def test_without_the_runs_the_page_says_what_is_missing(folder, tmp_path):
    import msgspec

    compared = load_comparison(folder / "cmp")
    gone = msgspec.structs.replace(compared, reference=str(tmp_path / "gone"))
    page = page_of(gone)
    assert len(page.missing) == 1
    assert "gone" in page.missing[0]
    assert page.details == ()
    assert [(c.name, c.verdict, c.error) for c in page.calls] == [
        (c.name, c.verdict, c.error) for c in page_of(compared).calls
    ]
    swapped = msgspec.structs.replace(
        compared, rows=tuple(msgspec.structs.replace(r, name=f"x.{r.name}") for r in compared.rows)
    )
    assert "not those that were compared" in page_of(swapped).missing[0]


@pytest.mark.torch
def test_runs_are_found_from_the_folder_of_the_comparison(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    whence.compare("ref", "tgt", output="below/cmp")
    monkeypatch.chdir(tmp_path)
    page = whence.api.page(folder / "below" / "cmp")
    assert page.missing == ()
    assert page.details


def test_arrays_in_memory_are_looked_at_too(pair, tmp_path):
    whence.compare({"a": pair[0]}, {"a": pair[1]}, html=tmp_path / "report.html")
    told = json.loads(
        (tmp_path / "report.html").read_text().split('id="data">')[1].split("</script>")[0]
    )
    assert told["missing"] == []
    assert told["details"][0]["worst"]


@pytest.mark.torch
def test_pages_are_written_from_code(folder, tmp_path):
    file = tmp_path / "deep" / "report.html"
    assert whence.report_html(folder / "cmp", file) == file
    assert "The error starts in Net" in file.read_text()
    with pytest.raises(OutputExists, match="--force"):
        whence.report_html(folder / "cmp", file)
    result = whence.compare(folder / "ref", folder / "tgt", html=tmp_path / "two.html")
    assert (
        "whence repro"
        not in (tmp_path / "two.html").read_text().split('id="data"')[1].split("</script>")[0]
    )
    result.report(str(tmp_path / "three.html"))
    assert (tmp_path / "three.html").stat().st_size == pytest.approx(
        (tmp_path / "two.html").stat().st_size, rel=0.05
    )
    with pytest.raises(OutputExists):
        whence.compare(folder / "ref", folder / "tgt", html=tmp_path / "two.html")
    with pytest.raises(UnreadableRun, match="whence compare"):
        whence.report_html(tmp_path / "nothing", tmp_path / "x.html")
    with pytest.raises(UsageError, match="details"):
        whence.report_html(folder / "cmp", tmp_path / "x.html", details=-1)
    with pytest.raises(UnreadableRun, match="whence tokens"):
        whence.report_html(
            folder / "cmp", tmp_path / "x.html", tokens=folder / "cmp" / "summary.json"
        )


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.o(self.q(x).softmax(-1) * self.k(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = torch.nn.LayerNorm(16), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


@pytest.mark.torch
def test_flow_goes_through_the_code_between_modules(tmp_path):
    """What a container's own code reads and makes; what it only hands on to a call in it is not
    made by it.
    """
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(Block(), Block()).eval(), torch.randn(4, 16)
    with torch.no_grad(), whence.capture(net, tmp_path / "a"):
        net(x)
    page = page_of(whence.compare(tmp_path / "a", tmp_path / "a"))
    names = [c.name for c in page.calls]
    assert {c.name: sorted(names[k] for k in c.reads) for c in page.calls} == {
        "Sequential": [],
        "0": ["0.attn.o"],
        "0.norm": [],
        "0.attn": ["0.attn.k", "0.attn.q", "0.norm"],
        "0.attn.q": ["0.norm"],
        "0.attn.k": ["0.norm"],
        "0.attn.o": ["0.attn"],
        "1": ["0", "1.attn.o"],
        "1.norm": ["0"],
        "1.attn": ["1.attn.k", "1.attn.q", "1.norm"],
        "1.attn.q": ["1.norm"],
        "1.attn.k": ["1.norm"],
        "1.attn.o": ["1.attn"],
    }


@pytest.mark.torch
def test_without_the_runs_the_tree_still_has_its_root(folder, tmp_path):
    import msgspec

    compared = load_comparison(folder / "cmp")
    page = page_of(
        msgspec.structs.replace(
            compared, reference=str(tmp_path / "gone"), target=str(tmp_path / "gone")
        )
    )
    assert page.missing
    names = [c.name for c in page.calls]
    assert {names[c.parent] if c.parent >= 0 else "" for c in page.calls if c.name != "Net"} == {
        "Net"
    }


@pytest.mark.torch
def test_of_statistics_alone_the_page_shows_how_far_they_are_off(tmp_path):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(16, 32)
    for name in "ab":
        with torch.no_grad(), whence.capture(net, tmp_path / name, keep="stats"):
            net(x)
        net.mid.weight.data *= 1.5
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    calls = {c.name: c for c in page_of(result).calls}
    judged = {
        row.name: v.numbers.get("e_out")
        for v in result.verdicts
        for row in result.rows
        if row.pair == v.pair
    }
    assert calls["down"].error == judged["down"] > 0.01
    assert not calls["up"].error  # equal statistics prove nothing of elements
