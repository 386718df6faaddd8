"""Another choice among tied scores is not a fault, and what follows it is compared knowing it; a wrong
choice is one, with the gap.
"""

import contextlib
import warnings

import pytest

torch = pytest.importorskip("torch")

import whence  # noqa: E402

pytestmark = pytest.mark.torch
D, E, K, T = 16, 8, 3, 24


def picked(scores, k, how):
    """The k largest; `how`: of equal ones the last first, or what is wrong."""
    if how in ("smallest", "skips the best"):
        v, i = torch.topk(scores, k + 1, -1, largest=how != "smallest")
        v, i = (v[:, 1:], i[:, 1:]) if how == "skips the best" else (v[:, :k], i[:, :k])
        return scores.gather(-1, i), i
    if how in ("ties", "one token", "one expert further"):
        i = torch.topk(scores.flip(-1), k, -1).indices
        i = scores.shape[-1] - 1 - i
        if how == "one token":
            i[3, -1] = scores[3].argmin()
        return scores.gather(-1, (i + (how == "one expert further")) % scores.shape[-1]), (
            i + (how == "one expert further")
        ) % E
    return torch.topk(scores, k, -1)


class Gate(torch.nn.Module):
    """Scores of which every second pair is equal."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(E, D)
        weight[1::2] = weight[0::2]
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


class Pick(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, scores):
        return picked(scores, K, self.how)


class Indices(Pick):
    """Returns only indices."""

    def forward(self, scores):
        return super().forward(scores)[1]


class Whole(torch.nn.Module):
    """Shows nothing of what it chooses."""

    def __init__(self, how):
        super().__init__()
        gate = Gate()
        self.weight, self.how, self.experts = (
            gate.weight,
            how,
            torch.nn.Parameter(torch.randn(E, D)),
        )

    def forward(self, x):
        v, i = picked(Gate.forward(self, x), K, self.how)
        return x + (torch.softmax(v.float(), -1)[..., None].to(x.dtype) * self.experts[i]).sum(-2)


class Model(torch.nn.Module):
    """kind: where the choice is made. A loop hands every expert its tokens, as Mixtral did for
    years.
    """

    def __init__(self, kind, how="torch"):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.how = kind, how
        self.up, self.gate, self.down = torch.nn.Linear(D, D), Gate(), torch.nn.Linear(D, D)
        self.pick = {"values": Pick, "indices": Indices, "whole": Whole}.get(kind, Pick)(how)
        self.experts = (
            torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(E)) if kind == "loop" else None
        )
        self.table = torch.nn.Embedding(E, D)

    def forward(self, x):
        h = self.up(x)
        if self.kind == "whole":
            return self.down(self.pick(h))
        scores = self.gate(h)
        if self.kind == "values":
            v, i = self.pick(scores)
        elif self.kind == "indices":
            i = self.pick(scores)
            v = torch.ones_like(i, dtype=h.dtype)
        else:
            v, i = picked(scores, K, self.how)
        if self.experts is None:
            return self.down(
                h + (torch.softmax(v.float(), -1)[..., None].to(h.dtype) * self.table(i)).sum(-2)
            )
        out = torch.zeros_like(h)
        mask = torch.nn.functional.one_hot(i, E).permute(2, 1, 0)
        for n, expert in enumerate(self.experts):
            rank, token = torch.where(mask[n])
            out.index_add_(0, token, expert(h[token]) * v[token, rank, None])
        return self.down(out)


def compared(folder, kind, how, dtype=torch.float32, **options):
    torch.manual_seed(0)
    x = torch.randn(T, D).to(dtype)
    for n, side in enumerate(("torch", how)):
        model = Model(kind, side).to(dtype)
        with torch.no_grad(), whence.capture(model, folder / str(n)):
            model(x)
    return whence.compare(folder / "0", folder / "1", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["values", "indices", "container", "whole", "loop"])
def test_another_of_equal_scores_is_no_fault(tmp_path, kind, dtype):
    result = compared(tmp_path, kind, "ties", dtype)
    assert (result.status, result.findings) == ("same", ()), result.headline
    assert [note for note in result.notes if "chose differently among tied scores" in note]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("values", "pick"), ("indices", "pick"), ("container", "Model"), ("whole", "pick")],
)
@pytest.mark.parametrize("how", ["one token", "one expert further"])
def test_a_wrong_choice_is_named_with_the_gap(tmp_path, kind, name, how):
    result = compared(tmp_path, kind, how)
    assert (result.status, result.findings[0].name) == ("different", name)
    if kind != "whole":
        assert "apart, rounding explains" in result.findings[0].sentence


@pytest.mark.parametrize("how", ["one token", "one expert further", "smallest", "skips the best"])
def test_experts_of_a_loop_that_are_given_other_rows_are_told_with_the_choice(tmp_path, how):
    """Each has a number of rows of its own, so the recorded program does not serve; the target's
    own choice explains what they get.
    """
    result = compared(tmp_path, "loop", how)
    (finding,) = [f for f in result.findings if f.confidence == "certain"]
    assert (result.status, finding.name) == ("different", "Model")
    assert "topk in row [" in finding.sentence and "apart, rounding explains" in finding.sentence


def test_rows_are_named_and_counted(tmp_path):
    result = compared(tmp_path, "values", "ties")
    verdict = next(v for v in result.verdicts if v.numbers.get("tied_rows"))
    assert (
        verdict.verdict == "noise"
        and "topk chooses differently in" in verdict.sentence
        and "among scores that tie" in verdict.sentence
    )
    model = Model("values")
    torch.manual_seed(0)
    scores = model.gate(model.up(torch.randn(T, D)))
    parted = (picked(scores, K, "torch")[1] != picked(scores, K, "ties")[1]).any(-1)
    assert verdict.numbers["tied_rows"] == int(parted.sum()) > 0


@pytest.mark.parametrize("kind", ["values", "indices"])
def test_without_replay_the_scores_beside_the_indices_tell(tmp_path, kind):
    assert compared(tmp_path / "same", kind, "ties", replay=False).status == "same"
    wrong = compared(tmp_path / "wrong", kind, "one token", replay=False)
    assert (wrong.status, wrong.findings[0].name) == ("different", "pick")
    assert (
        "does not have its rank" in wrong.findings[0].sentence
        and "rounding explains" in wrong.findings[0].sentence
    )


def test_without_replay_and_scores_nothing_is_claimed(tmp_path):
    result = compared(tmp_path, "whole", "ties", replay=False)
    assert (
        result.status == "undecided" and "only a replay shows whether they tie" in result.headline
    )


@pytest.mark.parametrize("stable", [True, False])
def test_a_sort_may_order_equal_scores_either_way(tmp_path, stable):
    class Order(torch.nn.Module):
        def __init__(self, other):
            super().__init__()
            self.other = other

        def forward(self, x):
            if not self.other:
                return torch.sort(x, dim=-1, descending=True, stable=stable)
            v, i = torch.sort(x.flip(-1), dim=-1, descending=True, stable=True)
            return v, x.shape[-1] - 1 - i

    x = (torch.randn(4, 64) * 4).round()
    for n in range(2):
        model = Order(bool(n))
        with whence.capture(model, tmp_path / str(n)):
            model(x)
    assert whence.compare(tmp_path / "0", tmp_path / "1").status == "same"
    assert whence.compare(tmp_path / "0", tmp_path / "1", replay=False).status == "same"


class GroupedExperts(torch.nn.Module):
    """Tokens sorted by their expert, each expert on its rows, and back in their order. lost: the
    last two rows are exchanged on the way back, as a kernel with a wrong index would.
    """

    def __init__(self, lost=False):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(E, D, D) / D**0.5)
        self.down = torch.nn.Parameter(torch.randn(E, D, D) / D**0.5)
        self.act = torch.nn.SiLU()
        self.lost = lost

    def forward(self, x, expert):
        sorted_by, order = torch.sort(expert)
        rows = torch.einsum("sd,sdf->sf", x[order], self.up[sorted_by])
        rows = torch.einsum("sd,sdf->sf", self.act(rows), self.down[sorted_by])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        if self.lost:
            back = torch.cat([back[:-2], back[-2:].flip(0)])
        return rows[back]


def equal_keys_reversed(self, dim=-1, descending=False):
    """A sort that is not stable: of equal whole numbers the last comes first."""
    stable = torch.ops.aten.sort.stable
    if self.is_floating_point():
        return stable(self, stable=False, dim=dim, descending=descending)
    values, index = stable(self.flip(dim), stable=True, dim=dim, descending=descending)
    return values, self.shape[dim] - 1 - index


@contextlib.contextmanager
def another_sort():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        library = torch.library.Library("aten", "IMPL")
        library.impl("sort", equal_keys_reversed, "CPU")
    try:
        yield
    finally:
        library._destroy()


def grouped(path, lost=False, steps=1):
    torch.manual_seed(0)
    model = GroupedExperts(lost)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expert = torch.randint(0, E, (T,))
    with whence.capture(model, path):
        for _ in range(steps):
            model(torch.randn(T, D), expert).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_rows_of_equal_keys_may_lie_in_any_order(tmp_path):
    """Forward, backward, and in two steps; tokens of one expert lie in another order between."""
    grouped(tmp_path / "reference", steps=2)
    with another_sort():
        grouped(tmp_path / "target", steps=2)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "same", [f.sentence for f in result.findings]
    assert "chose differently among tied scores" in "\n".join(result.notes)


def test_rows_that_come_back_in_a_wrong_order_are_a_fault(tmp_path):
    grouped(tmp_path / "reference")
    with another_sort():
        grouped(tmp_path / "target", lost=True)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "different"
    assert result.findings[0].op_type == "GroupedExperts" and not result.findings[0].phase


class Positions(torch.nn.Module):
    """Its own Python code reads the tokens and gives each a position."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.rotary, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8)

    def forward(self, ids, image):
        places = [k * self.step if token == 7 else k for k, token in enumerate(ids.tolist())]
        return self.head(self.rotary(torch.tensor(places)) + image)


@pytest.mark.parametrize(("step", "status"), [(1, "same"), (2, "different")])
def test_positions_of_python_code_are_no_choices(step, status, tmp_path):
    ids, image = torch.tensor([3, 7, 7, 5]), torch.randn(4, 8)
    for run, its_step in (("reference", 1), ("target", step)):
        torch.manual_seed(0)
        model = Positions(its_step)
        with torch.no_grad(), whence.capture(model, tmp_path / run):
            model(ids, image)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == status
    places = [(finding.name, finding.slot) for finding in result.findings]
    assert places == [("Positions", "rotary:input.0")][: step - 1]
