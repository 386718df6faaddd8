"""A fault travels; what something behind it takes back is another form of the same computation."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import whence
from whence.comparison.verdicts.channel_factors import factor_in_words
from whence.comparison.verdicts.regions import SegmentJudge
from whence.comparison.verdicts.step_gradients import StepGradients
from whence.comparison.verdicts.travels import Neighbourhoods
from whence.records import Operation, Program
from whence.records.program import inputs_of
from whence.report.answer import answer
from whence.results import Evidence, Verdict, VerdictKind

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 32)
        self.act, self.down, self.scale = nn.GELU(), nn.Linear(32, 16), scale

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x)))) * self.scale


class Experts(nn.Module):
    def __init__(self, is_swapped=False, is_reversed=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.is_swapped, self.is_reversed = is_swapped, is_reversed

    def forward(self, x, first, second):
        index, share = (second, first) if self.is_swapped else (first, second)
        index = index.flip(0) if self.is_reversed else index
        return (x[:, None] @ self.weight[index])[:, 0] * share[:, None]


class Mixture(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.experts = Experts(**options)

    def forward(self, x):
        index, share = x.sum(1).abs().long() % 4, x.mean(1).sigmoid()
        arguments = (share, index) if self.experts.is_swapped else (index, share)
        return x + self.experts(x, *arguments)


def net(first=1.0, second=1.0):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, 16), Block(first), Block(second), nn.LayerNorm(16), nn.Linear(16, 4)
    ).eval()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.bias, 0, 0.2)
    return model


def folded(model):
    """A factor per channel moved from the first block's norm to the linear behind it."""
    factor = torch.linspace(0.5, 3.5, 16)
    with torch.no_grad():
        model[1].norm.weight.div_(factor)
        model[1].norm.bias.div_(factor)
        model[1].up.weight.mul_(factor)
    return model


def rounder(model):
    model[3].eps = 1e-1
    return model


def mixture(**options):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), Mixture(**options), nn.Linear(16, 4)).eval()


def compared(tmp_path, reference, target):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    for name, model in (("r", reference), ("t", target)):
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(x)
    return whence.compare(tmp_path / "r", tmp_path / "t")


def test_a_factor_that_is_taken_back_is_another_form(tmp_path):
    result = compared(tmp_path, net(), folded(net()))
    assert result.status == "same"
    assert result.counts["other-form"] == 2
    remarks = {r.name: r.sentence for r in result.remarks if r.kind == "other-form"}
    assert "a factor per channel" in remarks["1.norm"]
    text = str(answer(result))
    assert "another form of the same computation" in text
    assert "OTHER FORM" in text


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (lambda: folded(net(second=1.05)), "2"),
        (lambda: folded(net(first=1.05)), "1"),
        (lambda: rounder(folded(net())), "3"),
    ],
)
def test_a_fault_beside_another_form_is_named_alone(tmp_path, target, name):
    result = compared(tmp_path, net(), target())
    assert [f.name for f in result.findings] == [name]


def test_half_of_a_fold_travels(tmp_path):
    broken = folded(net())
    with torch.no_grad():
        broken[1].norm.bias.mul_(torch.linspace(0.5, 3.5, 16))  # as it was before the fold
    result = compared(tmp_path, net(), broken)
    assert result.status == "different"
    assert result.findings[0].name == "1.norm"


def test_a_fault_that_the_model_itself_removes_stands_and_says_so(tmp_path):
    def model(gain):
        torch.manual_seed(4)
        norm = nn.LayerNorm(16, eps=0.0)
        return nn.Sequential(nn.Linear(8, 16), Gain(gain), norm, nn.Linear(16, 4)).eval()

    class Gain(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.gain = gain

        def forward(self, x):
            return x * self.gain

    result = compared(tmp_path, model(1.0), model(1.5))
    assert [f.name for f in result.findings] == ["1"]
    assert result.findings[0].sentence.endswith("no effect at the outputs on these inputs")


def test_arguments_that_change_places_are_no_fault(tmp_path):
    result = compared(tmp_path, mixture(), mixture(is_swapped=True))
    assert result.status == "same"


def test_a_fault_behind_arguments_that_change_places_is_named(tmp_path):
    result = compared(tmp_path, mixture(), mixture(is_swapped=True, is_reversed=True))
    assert [f.name for f in result.findings] == ["1.experts"]


def test_what_a_clean_stretch_holds_costs_no_coverage(tmp_path):
    class Chosen(nn.Module):
        def __init__(self, is_loop):
            super().__init__()
            self.is_loop, self.act = is_loop, nn.SiLU()
            self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)

        def forward(self, x):
            index = torch.arange(len(x)) % 4
            if not self.is_loop:
                return self.act(torch.einsum("tj,tij->ti", x, self.weight[index]))
            result = torch.zeros_like(x)
            for expert in range(4):
                rows = (index == expert).nonzero()[:, 0]
                result[rows] = self.act(x[rows] @ self.weight[expert].T)
            return result

    def model(is_loop):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), Chosen(is_loop), nn.Linear(16, 4)).eval()

    assert compared(tmp_path, model(True), model(False)).status == "same"


def test_a_factor_that_the_code_of_its_own_module_takes_out_is_another_form(tmp_path):
    class Table(nn.Linear):
        divisor = 1.0

        def forward(self, x):
            return super().forward(x) / self.divisor

    def model(divisor, extra=1.0):
        torch.manual_seed(5)
        table = Table(8, 16, bias=False)
        with torch.no_grad():
            table.weight.mul_(divisor * extra)
        table.divisor = divisor
        return nn.Sequential(table, nn.GELU(), nn.Linear(16, 4)).eval()

    assert compared(tmp_path / "form", model(1.0), model(4.0)).status == "same"
    fault = compared(tmp_path / "fault", model(1.0), model(4.0, extra=1.25))
    assert [f.name for f in fault.findings] == ["0"]


def test_a_call_whose_inside_cannot_be_measured_is_named_by_what_it_returns(tmp_path):
    class Routed(nn.Module):
        """Each expert gets rows; is_rotated: those of the next expert."""

        def __init__(self, is_rotated):
            super().__init__()
            self.act, self.is_rotated = nn.SiLU(), is_rotated
            self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)

        def forward(self, x):
            index = (x[:, 0] > 0.5) * 1 + (x[:, 1] > 0) * 2
            result = torch.zeros_like(x)
            for expert in range(4):
                rows = (index == (expert + self.is_rotated) % 4).nonzero()[:, 0]
                result[rows] = self.act(x[rows] @ self.weight[expert].T)
            return result

    def model(is_rotated):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), Routed(is_rotated), nn.Linear(16, 4)).eval()

    result = compared(tmp_path, model(False), model(True))
    assert result.status == "different"
    assert [f.name for f in result.findings] == ["1"]


def test_an_activation_that_its_layer_applies_already_is_another_form(tmp_path):
    """The reference's own activation hides it: twice is once."""

    class Activated(nn.Linear):
        gain = 1.0

        def forward(self, x):
            return torch.relu(super().forward(x)) * self.gain

    def model(layer, act, gain=1.0):
        torch.manual_seed(5)
        first, last = layer(8, 16), nn.Linear(16, 4)
        first.gain = gain
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(first, act, last)).eval()

    plain = model(nn.Linear, nn.ReLU())
    moved = compared(tmp_path / "form", plain, model(Activated, nn.Identity()))
    assert moved.status == "same"
    assert compared(tmp_path / "twice", plain, model(Activated, nn.ReLU())).status == "different"
    fault = compared(tmp_path / "fault", plain, model(Activated, nn.Identity(), gain=1.1))
    assert fault.findings[0].name == "1.0"


def test_factors_in_words():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6, 4)).astype(np.float32)
    assert factor_in_words(x, x * 2) == "a factor of 2"
    assert factor_in_words(x, x * np.arange(1, 5, dtype=np.float32)) == "a factor per channel"
    assert factor_in_words(x, generator.normal(size=(6, 4)).astype(np.float32)) == ""
    assert factor_in_words(x[:1], x[:1] * 2) == ""


def trained(tmp_path, name, *, scale=1.0, is_undone=False, is_clipped=True, has_loss=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model.train(has_loss)  # in evaluation mode no loss is recorded
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with whence.capture(model, tmp_path / name, gradients=True):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(12, 8, generator=generator)).pow(2).sum() * scale
            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= scale if is_undone else 1.0
            if is_clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@pytest.mark.parametrize(("is_undone", "status"), [(True, "same"), (False, "different")])
@pytest.mark.parametrize("is_clipped", [True, False])
@pytest.mark.parametrize("has_loss", [True, False])
def test_a_scale_of_the_loss_is_taken_back_by_code_and_not_by_clipping(
    tmp_path, is_undone, status, is_clipped, has_loss
):
    if is_undone and is_clipped and not has_loss:
        pytest.skip("clipping gives the same with and without that code: nothing tells them apart")
    how = {"is_clipped": is_clipped, "has_loss": has_loss}
    trained(tmp_path, "r", **how)
    trained(tmp_path, "t", scale=1000.0, is_undone=is_undone, **how)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


class Attention(nn.Module):
    """Returns its weights too, as eager attention of transformers does."""

    def __init__(self, scale=0.25, share=1.0):
        super().__init__()
        self.qkv, self.scale, self.share = nn.Linear(16, 48), scale, share

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * self.scale).masked_fill(~mask, -1e30).softmax(-1)
        return weights @ v, weights * self.share


class Language(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.attention = nn.Embedding(50, 16), Attention(**options)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids, attention_mask):
        size = input_ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None]
        mask = causal & attention_mask[:, None].bool() | torch.eye(size, dtype=torch.bool)[None]
        return self.head(self.attention(self.embed(input_ids), mask)[0])


@pytest.mark.parametrize(
    ("options", "status"),
    [({}, "same"), ({"scale": 0.2}, "different"), ({"share": 1.3}, "different")],
)
def test_padding_on_the_other_side_is_no_fault(tmp_path, options, status):
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    zeros, ones = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    for name, order, own in (("r", (0, 1), {}), ("t", (1, 0), options)):
        torch.manual_seed(0)
        model = Language(**own).eval()
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(
                input_ids=torch.cat([(ids, zeros)[k] for k in order], 1),
                attention_mask=torch.cat([(ones, zeros)[k] for k in order], 1),
            )
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


def test_inputs_of_an_operand_are_those_that_lead_to_it():
    add = Operation("aten.add.Tensor", ({"in": 0}, {"in": 1}))
    double = Operation("aten.mul.Scalar", ({"op": [0, 0]}, 2))
    program = Program("", (add, double), ("a", "b", "c"), ())
    assert inputs_of(program, [{"op": [1, 0]}]) == {"a", "b"}
    assert inputs_of(program, [{"in": 2}]) == {"c"}


class Branched(Language):
    """Adds what attention makes to what it was given, and returns its weights."""

    def __init__(self, share=1.0):
        super().__init__()
        self.share = share

    def forward(self, input_ids, attention_mask):
        size = input_ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None]
        mask = causal & attention_mask[:, None].bool() | torch.eye(size, dtype=torch.bool)[None]
        x = self.embed(input_ids)
        made, weights = self.attention(x, mask)
        return self.head(x + self.share * made), weights


@pytest.mark.parametrize(("share", "status"), [(1.0, "same"), (0.93, "different")])
def test_what_code_does_not_read_explains_none_of_its_errors(tmp_path, share, status):
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    zeros, ones = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    for name, order, own in (("r", (0, 1), 1.0), ("t", (1, 0), share)):
        torch.manual_seed(0)
        model = Branched(own).eval()
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(
                input_ids=torch.cat([(ids, zeros)[k] for k in order], 1),
                attention_mask=torch.cat([(ones, zeros)[k] for k in order], 1),
            )
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


@pytest.mark.parametrize(
    ("of_inner", "is_acquitted"), [(set(), False), ({"1:input.0"}, False), (None, True)]
)
def test_a_model_that_drowns_a_wrong_module_takes_nothing_back(of_inner, is_acquitted):
    outer = SimpleNamespace(id=0, parent=-1, phase="forward")
    inner = SimpleNamespace(id=1, parent=0, phase="forward")
    calls, right = [outer, inner], {0: {"output.0"}, 1: of_inner}
    neighbourhoods = SimpleNamespace(
        _own_inputs=SimpleNamespace(right=lambda call, partner: right[call.id]),
        _is_read=lambda call, slot: True,
        _paired=SimpleNamespace(
            calls=calls,
            pair_of={0: 0, 1: 1},
            pair=lambda index: SimpleNamespace(call=calls[index], partner=calls[index]),
        ),
    )
    verdict = Verdict(1, VerdictKind.INTRODUCED, evidence=Evidence.TWO_DUMPS, slot="output.0")
    is_cut = Neighbourhoods._is_cut_otherwise(neighbourhoods, inner, verdict)
    assert is_cut == is_acquitted


class Placed(Attention):
    """Is handed numbers that follow from positions: once, or for every row."""

    def forward(self, x, mask, table):
        table = table[..., None].expand(*table.shape, 2).flatten(-2)  # as rotations repeat each
        return super().forward(x * table, mask)


class PlacedLanguage(Language):
    def __init__(self, **options):
        super().__init__(**options)
        self.attention = Placed(**options)

    def forward(self, input_ids, attention_mask, position_ids=None):
        size = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(size)[None]
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None]
        mask = causal & attention_mask[:, None].bool() | torch.eye(size, dtype=torch.bool)[None]
        table = (position_ids[..., None] * torch.linspace(0.1, 1, 8)).cos()
        return self.head(self.attention(self.embed(input_ids), mask, table)[0])


@pytest.mark.parametrize(("options", "status"), [({}, "same"), ({"share": 1.3}, "different")])
def test_positions_given_for_every_row_are_no_fault(tmp_path, options, status):
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    zeros, ones = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    for name, order, own in (("r", (0, 1), {}), ("t", (1, 0), options)):
        torch.manual_seed(0)
        model = PlacedLanguage(**own).eval()
        mask = torch.cat([(ones, zeros)[k] for k in order], 1)
        places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if name == "t" else {}
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(
                input_ids=torch.cat([(ids, zeros)[k] for k in order], 1),
                attention_mask=mask,
                **places,
            )
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


class Beside(nn.Module):
    """Returns what its parent takes a factor out of, and shares that the parent does not read."""

    def __init__(self, factor=1.0, share=1.0):
        super().__init__()
        self.linear, self.factor, self.share = nn.Linear(16, 16), factor, share

    def forward(self, x):
        y = self.linear(x)
        return y * self.factor, y.softmax(-1) * self.share


class Counting(nn.Module):
    def __init__(self, factor=1.0, is_counted=True):
        super().__init__()
        self.factor, self.is_counted = factor, is_counted
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = x @ self.weight
        if self.is_counted:
            self.mean.mul_(0.9).add_(0.1 * y.mean(0).detach())
        return y * self.factor, None


class Undone(nn.Module):
    def __init__(self, kind, factor=1.0, **options):
        super().__init__()
        self.up, self.factor = nn.Linear(8, 16), factor
        self.inner, self.down = kind(factor, **options), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.inner(self.up(x))[0] / self.factor)


def undone(*args, **options):
    torch.manual_seed(1)
    return Undone(*args, **options).eval()


def test_what_nothing_reads_is_not_taken_back_with_what_is_read(tmp_path):
    (tmp_path / "clean").mkdir()
    clean = compared(tmp_path / "clean", undone(Beside), undone(Beside, 2.0))
    assert clean.status == "same"
    result = compared(tmp_path, undone(Beside), undone(Beside, 2.0, share=1.3))
    assert [f.name for f in result.findings] == ["inner"]


@pytest.mark.parametrize("writes", [(True, False), (False, True)])
def test_a_buffer_that_one_run_alone_writes_is_not_taken_back(tmp_path, writes):
    reference = undone(Counting, is_counted=writes[0])
    target = undone(Counting, 2.0, is_counted=writes[1])
    assert compared(tmp_path, reference, target).status == "different"


class Table(nn.Module):
    """Calls its modules, or runs them as functions, as a compiler does."""

    def __init__(self, is_inlined=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 4)
        self.is_inlined = is_inlined

    def forward(self, x):
        x = x.abs().long() % 40
        if not self.is_inlined:
            return self.head(self.embed(x))
        x = nn.functional.embedding(x, self.embed.weight)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def test_rows_of_a_parameter_that_nothing_reads_are_not_taken_back(tmp_path):
    torch.manual_seed(0)
    reference = Table().eval()
    target = Table(is_inlined=True).eval()
    target.load_state_dict(reference.state_dict())
    with torch.no_grad():
        target.embed.weight[45:] *= 2
    result = compared(tmp_path, reference, target)
    assert result.status == "different"
    assert result.findings[0].sentence.endswith("no effect at the outputs on these inputs")


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


class Half(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(8, 8), before, after

    def forward(self, x):
        x = self.linear(WrongGradient.apply(x, self.before))
        return WrongGradient.apply(x, self.after)


def two_optimisers(path, before=1.0, after=1.0, period=1):
    torch.manual_seed(1)
    model = nn.Sequential(Half(before, after), nn.GELU(), nn.Linear(8, 4))
    head = torch.optim.SGD(model[2].parameters(), lr=1e-2)
    body = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with whence.capture(model, path, gradients=True):
        for step in range(period):
            x = torch.randn(12, 8, generator=generator, requires_grad=True)
            model(x).pow(2).mean().backward()
            for optimiser in (head, body) if step == period - 1 else (head,):
                optimiser.step()
                optimiser.zero_grad()


@pytest.mark.parametrize("period", [1, 2])
def test_the_step_of_one_optimiser_says_nothing_of_another(tmp_path, period):
    two_optimisers(tmp_path / "r", period=period)
    two_optimisers(tmp_path / "t", after=1.5, period=period)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == "different"


def test_a_wrong_gradient_of_the_input_is_not_taken_back_at_the_step(tmp_path):
    two_optimisers(tmp_path / "r")
    two_optimisers(tmp_path / "t", before=1.5)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == "different"


class Keeping(nn.Module):
    """Returns what a module inside keeps as an attribute."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.linear, self.factor = Kept(factor), factor
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.linear(x)), self.linear.last


class Kept(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 16), factor

    def forward(self, x):
        y = self.linear(x)
        self.last = y * self.factor
        return y


def test_an_output_that_no_program_makes_is_not_right_with_the_others(tmp_path):
    models = []
    for factor in (1.0, 1.3):
        torch.manual_seed(0)
        models.append(Keeping(factor).eval())
    assert compared(tmp_path, *models).status == "different"


class Mixed(nn.Module):
    """Sends rows through one of two experts, each by itself, and their activation through one
    module: other rows of a batch are other calls.
    """

    def __init__(self, is_loop=True, gain=1.0):
        super().__init__()
        self.is_loop, self.gain, self.act = is_loop, gain, nn.SiLU()
        self.weight = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x):
        index = (x[:, 0] > 0).long()
        if not self.is_loop:
            every = self.act(torch.einsum("tj,eij->tei", x, self.weight))
            return x + every[torch.arange(len(x)), index] * self.gain
        result = torch.zeros_like(x)
        for expert in range(2):
            rows = (index == expert).nonzero()[:, 0]
            result[rows] = self.act(x[rows] @ self.weight[expert].T)
        return x + result * self.gain


def in_parts(path, parts=1, *, divided_by=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Mixed(**options), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with whence.capture(model, path, gradients=True):
        for _ in range(2):
            optimizer.zero_grad()
            for rows in torch.randn(12, 8, generator=generator).chunk(parts):
                loss = model(rows).pow(2).mean()
                (loss / (divided_by or parts)).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("how", "is_same"),
    [
        ({"parts": 2}, True),
        ({"parts": 2, "divided_by": 1.0}, False),
        ({"parts": 2, "gain": 1.2}, False),
        ({"is_loop": False}, True),
        ({"is_loop": False, "gain": 1.2}, False),
    ],
)
def test_parts_of_a_batch_are_taken_back_at_the_step(tmp_path, how, is_same):
    in_parts(tmp_path / "r")
    in_parts(tmp_path / "t", **how)
    assert (whence.compare(tmp_path / "r", tmp_path / "t").status == "same") == is_same


class Wrong(torch.autograd.Function):
    """Changes a gradient on its way back."""

    @staticmethod
    def forward(context, x, change):
        context.change = change
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return context.change(gradient.clone()), None


def one_element(gradient):
    gradient.view(-1)[37] *= -1
    return gradient


class Weak(nn.Module):
    """A linear layer whose weight has a change in the way of its gradient."""

    def __init__(self, share, change):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.share, self.change = share, change

    def forward(self, x):
        weight = Wrong.apply(self.weight, self.change) if self.change else self.weight.clone()
        return x + self.share * (x @ weight)


def in_bfloat16(path, share, change=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Weak(share, change), nn.Linear(64, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with whence.capture(model, path, gradients=True):
        model(torch.randn(12, 16, generator=generator).bfloat16()).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("share", "change"), [(1.0, one_element), (1e-6, torch.neg)], ids=["element", "small"]
)
def test_a_step_acquits_only_what_it_resolves(tmp_path, share, change):
    in_bfloat16(tmp_path / "r", share)
    in_bfloat16(tmp_path / "t", share, change)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == "different"


class Router(nn.Module):
    """Returns scores that nobody reads, the share of the chosen expert, and which that is."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 16) / 4), gain

    def forward(self, x):
        scores = x @ self.weight.T
        share, index = scores.softmax(-1).max(-1)
        return scores * self.gain, share, index


class Routed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.router, self.experts = Router(**options), Experts()

    def forward(self, x):
        _, share, index = self.router(x)
        return x + self.experts(x, index, share)


@pytest.mark.parametrize(("gain", "status"), [(1.0, "same"), (1.3, "different")])
def test_experts_in_another_order_are_no_fault(tmp_path, gain, status):
    models = []
    for factor in (1.0, gain):
        torch.manual_seed(2)
        models.append(nn.Sequential(nn.Linear(8, 16), Routed(gain=factor), nn.Linear(16, 4)).eval())
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for module in (models[1][1].router, models[1][1].experts):
            module.weight.copy_(module.weight[order])
    assert compared(tmp_path, *models).status == status


@pytest.mark.parametrize(
    ("errors", "is_right"),
    [
        ([(0.01, 0.0, 1.0), (0.01, 0.0, 1.0)], True),
        ([(0.01, 2.0, 1.0), (0.01, 0.0, 1.0)], False),  # one element stands out
        ([(0.01, 0.0, 1.0), (2.0, 0.0, 1e-5)], True),  # a bias that cancels beside its weight
        ([(2.0, 0.0, 1e-6)], False),  # a small gradient that is turned round, alone in its module
    ],
)
def test_gradients_of_a_module_are_right_by_their_own_size(errors, is_right):
    error = {
        k: SimpleNamespace(exact=False, value=v, lone=o, u=2**-8)
        for k, (v, o, _) in enumerate(errors)
    }
    records = {
        k: SimpleNamespace(statistics=SimpleNamespace(norm=norm))
        for k, (_, _, norm) in enumerate(errors)
    }
    run = SimpleNamespace(records=records, calls=[])
    paired = SimpleNamespace(reference=run, target=run)
    stub = SimpleNamespace(paired=paired, of=lambda pair: error[pair.reference_record])
    pairs = [SimpleNamespace(reference_record=k) for k in error]
    assert (StepGradients(stub, {})._distance_in_module(pairs, 0.0) <= 1) == is_right


def test_what_earlier_steps_left_in_parameters_is_what_the_model_shows_of_it():
    error = {"parameter": 1e-4, "returned": 1e-6, "earlier": 0.5}
    where = {"rank": 0, "root": "Net", "parent": -1}
    calls = [
        SimpleNamespace(id=0, step=0, phase="forward", **where),
        SimpleNamespace(id=1, step=1, phase="forward", **where),
        SimpleNamespace(id=2, step=1, phase="optimizer", **where),
        SimpleNamespace(id=3, step=0, phase="optimizer", **where),
    ]
    slots = [{"output.0": "earlier"}, {"output.0": "returned"}, {"input.param": "parameter"}]
    paired = SimpleNamespace(
        calls=calls, slots_of=lambda call: slots[call] if call < len(slots) else {}
    )
    stub = SimpleNamespace(
        paired=paired, of=lambda pair: SimpleNamespace(value=error[pair], lone=0.0)
    )
    assert StepGradients(stub, {})._came_in((0, "Net", 1)) == 1e-6
    assert StepGradients(stub, {})._came_in((0, "Net", 0)) == 0.0


@pytest.mark.parametrize(
    ("width", "with_bias", "status"),
    [
        (0.1, True, "same"),  # alone, half of the fold would be within what rounding may make
        (0.2, False, "different"),  # what is left of it is so too, and far above what it makes
    ],
)
def test_a_fold_in_16_bits_is_held_to_what_half_of_it_would_do(tmp_path, width, with_bias, status):
    factor, reference, target = torch.linspace(1 - width, 1 + width, 16), net(), net()
    with torch.no_grad():
        target[3].weight.div_(factor)
        target[4].weight.mul_(factor)
        if with_bias:
            target[3].bias.div_(factor)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name, model, given in (("r", reference, x.float()), ("t", target.bfloat16(), x)):
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(given)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


class WithState(nn.Module):
    """A model that keeps a state in float32 beside its outputs."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.gain = gain

    def forward(self, x):
        x = self.body(x)
        return self.head(self.norm(x)) * self.gain, x.float().cumsum(0)


@pytest.mark.parametrize(("gain", "status"), [(1.0, "same"), (1.1, "different")])
def test_a_state_in_more_digits_is_as_exact_as_the_stretch(tmp_path, gain, status):
    torch.manual_seed(0)
    reference, target = WithState(), WithState(gain)
    target.load_state_dict(reference.state_dict())
    factor = torch.linspace(0.5, 2, 16)
    with torch.no_grad():
        target.norm.weight.div_(factor)
        target.norm.bias.div_(factor)
        target.head.weight.mul_(factor)
    x = torch.randn(8, 16).bfloat16()
    for name, model, given in (("r", reference, x.float()), ("t", target.bfloat16(), x)):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(given)
    assert whence.compare(tmp_path / "r", tmp_path / "t").status == status


class Heads(nn.Module):
    """Attention that returns its weights and keeps what it read."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.register_buffer("kept", torch.zeros(2, 3, 5, 4))

    def forward(self, x):
        q, k, v = (f(x).view(2, 5, 3, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.kept.copy_(v)
        weights = (q @ k.mT).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(2, 5, 12)), weights


@pytest.mark.parametrize("is_fault", [False, True])
def test_heads_in_another_order_are_so_in_what_is_kept_of_them(tmp_path, is_fault):
    torch.manual_seed(0)
    reference, target = Heads(), Heads()
    target.load_state_dict(reference.state_dict())
    order = torch.arange(12).view(3, 4).roll(1, 0)
    with torch.no_grad():
        for layer in (target.q, target.k, target.v):
            layer.weight.copy_(layer.weight[order.flatten()])
            layer.bias.copy_(layer.bias[order.flatten()])
        rows = order.flip(0) if is_fault else order
        target.o.weight.copy_(target.o.weight[:, rows.flatten()])
    x = torch.randn(2, 5, 12)
    for name, model in (("r", reference), ("t", target)):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
    result = whence.compare(tmp_path / "r", tmp_path / "t")
    assert result.status == ("different" if is_fault else "same")


def neighbours_turned(sign):
    """Rotary positions of neighbouring channels, of a transformers model."""

    def turned(x, cos, sin):
        half = cos.shape[-1] // 2
        c, s = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        pair = first * c - second * s, second * c + sign * first * s
        return torch.stack(pair, -1).flatten(-2)

    return lambda q, k, cos, sin, *_: (turned(q, cos, sin), turned(k, cos, sin))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_channels_in_another_order_are_so_in_code_and_in_a_cache(tmp_path, monkeypatch, sign):
    transformers = pytest.importorskip("transformers")
    modeling = transformers.models.llama.modeling_llama
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    x, plain = torch.randint(0, 40, (2, 6)), modeling.apply_rotary_pos_emb
    forms = itertools.cycle((neighbours_turned(sign), plain))  # of the first layer alone
    order = torch.arange(16).view(2, 2, 4).transpose(1, 2).flatten()
    for name in ("r", "t"):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
        attention = model.model.layers[0].self_attn
        with torch.no_grad():
            for layer in (attention.q_proj, attention.k_proj):
                layer.weight.copy_(layer.weight[order[: len(layer.bias)]])
                layer.bias.copy_(layer.bias[order[: len(layer.bias)]])
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda *a, **k: next(forms)(*a, **k))
    result = whence.compare(tmp_path / "r", tmp_path / "t")
    assert result.status == ("same" if sign > 0 else "different")


def test_a_parameter_that_the_target_lacks_is_missed_where_rounding_hides_its_growth(tmp_path):
    """In 16 bits a small bias makes the error grow by less than one operator may."""

    def model():
        torch.manual_seed(7)
        layer = nn.Linear(64, 64)
        with torch.no_grad():
            layer.bias.normal_(0, 0.01)
        return nn.Sequential(nn.Linear(64, 64), layer, nn.LayerNorm(64)).eval()

    reference, target = model(), model().bfloat16()
    target[1].bias = None
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name, net_of, given in (("r", reference, x.float()), ("t", target, x)):
        with whence.capture(net_of, tmp_path / name), torch.no_grad():
            net_of(given)
    result = whence.compare(tmp_path / "r", tmp_path / "t")
    assert result.findings[0].name == "1"
    assert "`bias` is a parameter of the reference only" in result.findings[0].sentence


def test_positions_are_not_blamed_for_outputs_behind_a_fault(tmp_path):
    class Placed(nn.Module):
        """Positions count from any start."""

        def __init__(self, gain):
            super().__init__()
            torch.manual_seed(8)
            self.place, self.up, self.gain = nn.Embedding(16, 8), nn.Linear(8, 8), gain

        def forward(self, x, position_ids):
            place = self.place(position_ids - position_ids.min())
            return torch.tanh(self.up(x) * self.gain + place)

    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2))
    for name, gain, start in (("r", 1.0, 0), ("t", 1.05, 3)):
        model = Placed(gain).eval()
        with whence.capture(model, tmp_path / name), torch.no_grad():
            model(x, position_ids=torch.arange(start, start + 6)[None])
    result = whence.compare(tmp_path / "r", tmp_path / "t")
    assert result.status == "different"
    assert all("given another" not in f.sentence for f in result.findings)


def test_what_a_cache_holds_is_named_by_the_call_that_reads_it():
    attention = SimpleNamespace(id=1, scope="layer.attention", leaf=False, refs=(), notes=())
    layer = SimpleNamespace(id=0, scope="layer", notes=())
    judge = SegmentJudge.__new__(SegmentJudge)
    judge.paired = SimpleNamespace(
        kids={0: [1]}, calls=[layer, attention], pair_of={1: 1}, slot=lambda *_: None
    )
    verdict = Verdict(
        0,
        VerdictKind.INTRODUCED,
        0,
        Evidence.TWO_DUMPS,
        slot="0:input.past_key_values.layers.0.keys",
        sentence="the error grows",
    )
    named = judge.located(verdict, SimpleNamespace(call=0, stretch=0))
    assert (named.where, named.named) == ("layer.attention", 1)
    assert named.sentence == "held by its cache: the error grows"
    own = judge.located(verdict.replace(slot="0:input.0"), SimpleNamespace(call=0, stretch=0))
    assert not own.where


class ByHand(torch.optim.Optimizer):
    """Adam by its formulas."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(n=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
            state["n"] += 1
            state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            m, v = state["m"] / (1 - 0.9 ** state["n"]), state["v"] / (1 - 0.999 ** state["n"])
            parameter.sub_(1e-2 * m / (v.sqrt() + 1e-8))


def test_steps_of_one_run_alone_are_right_by_the_parameters_that_are_read(tmp_path):
    def run(name, made):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        optimizer = made(model.parameters())
        with whence.capture(model, tmp_path / name, gradients=True):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.linspace(-1, 1, 96).reshape(12, 8)).pow(2).mean().backward()
                optimizer.step()
        return tmp_path / name

    reference = run("r", lambda own: torch.optim.Adam(own, lr=1e-2, foreach=False))
    result = whence.compare(reference, run("t", ByHand))
    assert result.status == "same", (result.headline, result.coverage)


class Sequences(nn.Module):
    """The mean over rows of several lengths, packed for a recurrent layer or masked behind it."""

    def __init__(self, is_packed, longest=12):
        super().__init__()
        torch.manual_seed(2)
        self.rnn, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)
        self.is_packed, self.longest = is_packed, longest

    def forward(self, x, lengths):
        if self.is_packed:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], True)
        else:
            out, _ = self.rnn(x)
            out = out * (torch.arange(12) < lengths[:, None].clamp(max=self.longest))[..., None]
        return self.head(out.sum(1) / lengths[:, None])


@pytest.mark.parametrize(("longest", "status"), [(12, "same"), (9, "different")])
def test_a_last_state_that_nothing_reads_is_no_fault(tmp_path, longest, status):
    x, lengths = (
        torch.linspace(-2, 3, 4 * 12 * 8).sin().reshape(4, 12, 8),
        torch.tensor([12, 5, 9, 3]),
    )
    for name in ("reference", "target"):
        model = Sequences(name == "reference", longest).eval()
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x, lengths)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == status


class Patches(nn.Module):
    """Mixes patches of an image, by convolutions or by linears; the patches' order may be wrong."""

    def __init__(self, kind, is_wrong=False):
        super().__init__()
        self.patch, self.kind, self.is_wrong = nn.Conv2d(3, 12, 4, 4), kind, is_wrong
        self.mixes = nn.ModuleList(kind(12, 12, *([1] if kind is nn.Conv1d else [])) for _ in "ab")

    def forward(self, x):
        x = self.patch(x).flatten(2).relu()
        x = x.flip(1) if self.is_wrong else x
        x = x if self.kind is nn.Conv1d else x.mT
        for mix in self.mixes:
            x = x + mix(x).tanh()
        return x.mean(2 if self.kind is nn.Conv1d else 1)


def test_axes_that_no_elements_confirm_behind_a_fault_follow_from_shapes(tmp_path):
    torch.manual_seed(0)
    reference, target = Patches(nn.Conv1d), Patches(nn.Linear, is_wrong=True)
    weights = {k: v.squeeze(-1) if "mixes" in k else v for k, v in reference.state_dict().items()}
    target.load_state_dict(weights)
    for name, model in (("reference", reference), ("target", target)):
        with torch.no_grad(), whence.capture(model.eval(), tmp_path / name):
            model(torch.linspace(-2, 3, 2 * 3 * 16 * 16).mul(7).sin().reshape(2, 3, 16, 16))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.findings and result.findings[0].name == "Patches"
    assert "flip" in result.findings[0].sentence
    assert not any("mixes" in n for f in result.findings for n in (f.name, *f.also))


def test_gradients_that_one_run_takes_of_every_row_prove_nothing(tmp_path):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.linspace(-2, 3, 96).sin().reshape(12, 8)

    def loss(held, row):
        return torch.func.functional_call(made, held, (row[None],)).square().mean()

    state = {k: v.clone() for k, v in made.state_dict().items()}
    for name in ("reference", "target"):
        made.load_state_dict(state)
        own = torch.optim.SGD(made.parameters(), 0.1)
        with whence.capture(made, tmp_path / name):
            for _ in range(2):
                made(x)
                if name == "reference":
                    made(x).square().mean().backward()
                else:
                    held = {k: v.detach() for k, v in made.named_parameters()}
                    rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(held, x)
                    for key, p in made.named_parameters():
                        p.grad = rows[key].mean(0)
                own.step()
                own.zero_grad()
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status != "different", result.findings


class Centred(nn.Module):
    """A norm of what a linear layer leaves: with its mean taken out, or `by_size` alone."""

    def __init__(self, *, by_size=False):
        super().__init__()
        self.grow, self.norm = nn.Linear(12, 32), nn.LayerNorm(32)
        self.last, self.by_size = nn.Linear(32, 5), by_size
        if by_size:
            weight, bias = self.grow.weight.data, self.grow.bias.data
            self.norm = nn.RMSNorm(32, eps=1e-5)
            self.grow.weight.data, self.grow.bias.data = weight - weight.mean(0), bias - bias.mean()

    def forward(self, x):
        return self.last(self.norm(self.grow(x)))


def test_a_mean_that_a_norm_among_operators_no_longer_takes_out(tmp_path):
    runs = tmp_path / "reference", tmp_path / "target"
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    for run, by_size in zip(runs, (False, True), strict=True):
        torch.manual_seed(0)
        model = Centred(by_size=by_size)
        torch.manual_seed(1)
        model.last.load_state_dict(nn.Linear(32, 5).state_dict())
        with torch.no_grad(), whence.capture(model, run, level="op"):
            model(x)
    assert whence.compare(*runs).status == "same"
