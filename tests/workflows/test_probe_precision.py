"""Precision tables: effects are measured, plans hold when they are followed by other code."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import inside
import warm
import whence
from whence.errors import UsageError
from whence.report.probe import probed_text
from whence.results import Held, Status
from whence.workflows.probe.torch.precision.asking import Ratios
from whence.workflows.probe.torch.precision.narrowing import rounded

pytestmark = pytest.mark.torch

IDS = torch.randint(0, 32, (3, 20), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Ids to logits. offset: added in one layer, and taken away after it."""

    def __init__(self, offset=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm, self.head, self.offset = nn.LayerNorm(16), nn.Linear(16, 32, bias=False), offset
        with torch.no_grad():
            self.layers[2].bias += offset

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            x = x + (layer(x) - (self.offset if number == 2 else 0.0)).tanh()
        return {"logits": self.head(self.norm(x))}


def asked(model, to, budget, **options):
    result = whence.probe(
        model, {"input_ids": IDS}, properties=["precision"], to=to, budget=budget, **options
    )
    return result, result["precision"]


def error(model, mixed, ids):
    with torch.no_grad():
        a, b = (m(ids)["logits"].double() for m in (model, mixed))
    return float((a - b).norm() / a.norm())


def by_hand(model, path, dtype):
    """One linear layer that is cast by other code."""
    mixed = copy.deepcopy(model)
    layer = mixed.get_submodule(path).to(dtype)
    layer.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    layer.register_forward_hook(lambda _m, _a, out: out.float())
    return mixed


def test_the_effect_of_each_module_is_what_casting_it_by_hand_gives():
    model = Net().eval()
    _, answer = asked(model, ["bfloat16"], 1e-2)
    rows = {row.module: row for row in answer.precision.rows["bfloat16"]}
    assert set(rows) == {"embed", *(f"layers.{n}" for n in range(4)), "norm", "head"}
    for path in ("layers.1", "head"):
        assert rows[path].error == pytest.approx(
            error(model, by_hand(model, path, torch.bfloat16), IDS), rel=1e-6
        )
    assert rows["head"].parameters == 32 * 16


def test_the_module_that_matters_most_is_first_and_is_kept():
    _, answer = asked(Net(offset=100.0).eval(), ["bfloat16"], 4e-3)
    plan = answer.precision.plans[0]
    assert answer.precision.rows["bfloat16"][0].module == plan.keep[0] == "layers.2"
    assert plan.modules


@pytest.mark.parametrize(("to", "budget"), [("bfloat16", 4e-3), ("int8", 2e-2)])
def test_a_plan_that_is_followed_holds_on_inputs_that_it_never_saw(to, budget):
    model = Net().eval()
    _, answer = asked(model, [to], budget)
    plan = answer.precision.plans[0]
    assert answer.held == Held.MEASURED
    assert 0 < len(plan.modules) < 7
    assert plan.predicted <= budget
    assert plan.predicted == pytest.approx(plan.quadrature * plan.correction * plan.margin)
    assert [c.planned_on for c in plan.checks] == [True, False, False, False]
    mixed = copy.deepcopy(model)
    with whence.narrow(mixed, plan):
        for seed in range(5):
            ids = torch.randint(0, 32, (3, 20), generator=torch.Generator().manual_seed(90 + seed))
            assert 0 < error(model, mixed, ids) <= plan.predicted


def test_a_budget_that_holds_nothing_says_so():
    result, answer = asked(Net().eval(), ["int8"], 1e-6)
    plan = answer.precision.plans[0]
    assert (plan.modules, result.status) == ((), Status.SAME)
    assert "no module fits the budget" in probed_text(result)


def test_several_types_have_a_plan_each_and_norms_are_not_offered_in_8_bits():
    result, answer = asked(Net().eval(), ["float16", "float8_e4m3fn"], 2e-2)
    assert [plan.to for plan in answer.precision.plans] == ["float16", "float8_e4m3fn"]
    norm = next(r for r in answer.precision.rows["float8_e4m3fn"] if r.module == "norm")
    assert norm.error is None
    assert "LayerNorm" in norm.why
    text = probed_text(result)
    assert "predicted" in text
    assert "not offered" in text


def test_a_module_that_overflows_in_float16_is_kept():
    class Squares(nn.Linear):
        def forward(self, x):
            y = super().forward(x) * 1e3
            return y.square() / y.square().sum(-1, keepdim=True)

    model = Net().eval()
    model.layers[1] = Squares(16, 16)
    _, answer = asked(model, ["float16"], 1e-2)
    plan = answer.precision.plans[0]
    assert "layers.1" not in plan.modules
    assert plan.modules
    assert answer.precision.rows["float16"][0].why.startswith("NaN or Inf")


def test_rows_of_an_embedding_that_the_call_does_not_read_count():
    model = Net().eval()
    with torch.no_grad():
        model.embed.weight[20:] += 300.0  # rounded coarsely; a norm takes it away
    ids = IDS % 20
    result = whence.probe(model, {"input_ids": ids}, properties=["precision"], budget=1e-2)
    plan = result["precision"].precision.plans[0]
    assert "embed" in plan.keep


class Switch(nn.Module):
    """Another branch for some inputs: what is measured on one call says nothing of another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return self.last(y if float(x[0, 0]) < 100 else 1e3 * (y - self.first(x).round(decimals=2)))


def test_further_calls_that_err_more_shrink_the_plan_or_leave_it_untold():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    far = x.clone()
    far[0, 0] = 200.0
    model = Switch().eval()
    result = whence.probe(model, x, properties=["precision"], budget=1e-2, others=[far])
    plan = result["precision"].precision.plans[0]
    assert plan.shrunk
    assert "first" not in plan.modules or not plan.holds


def test_a_correction_is_the_most_that_groups_erred_and_the_margin_covers_the_rest():
    ratios = Ratios((), (), 0.0).and_also([1.6, 1.0]).and_also([0.9, 1.1])
    assert ratios.correction == 1.6
    logs = [math.log(r) for r in (1.6, 1.0, 0.9, 1.1)]
    mean = sum(logs) / 4
    deviation = math.sqrt(sum((v - mean) ** 2 for v in logs) / 3)
    assert ratios.bound == pytest.approx(math.exp(mean + 3.5 * deviation))
    assert ratios.correction * ratios.margin == pytest.approx(ratios.bound)


def test_8_bit_values_are_those_of_the_definition():
    x = torch.tensor([[0.5, -1.0, 0.3], [0.0, 0.0, 0.0]])
    codes = torch.tensor([[64.0, -127.0, 38.0], [0.0, 0.0, 0.0]])  # 63.5 rounds to even
    assert torch.allclose(rounded(x, "int8", 0), codes / 127)
    assert torch.equal(rounded(x, "float8_e4m3fn")[0, 1], torch.tensor(-1.0))
    scaled = (x / (1 / 448)).to(torch.float8_e4m3fn).float() / 448
    assert torch.allclose(rounded(x, "float8_e4m3fn"), scaled)


def test_narrowed_modules_leave_the_model_and_tied_weights_as_they_are():
    model = Net().eval()
    model.head.weight = model.embed.weight
    before = model(IDS)["logits"]
    with whence.narrow(model, {"head": "bfloat16"}) as narrowed:
        assert not torch.equal(model(IDS)["logits"], before)
        assert torch.equal(model.embed(IDS), model.embed.weight[IDS])
    assert torch.equal(model(IDS)["logits"], before)
    narrowed.remove()
    assert model.head.weight is model.embed.weight


def test_a_recurrent_layer_computes_in_the_narrower_type():
    lstm = nn.LSTM(8, 8, batch_first=True).eval()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = copy.deepcopy(lstm).bfloat16()(x.bfloat16())[0].float()
        with whence.narrow(nn.Sequential(lstm), {"0": "bfloat16"}):
            narrow = lstm(x)[0]
        again = lstm(x)[0]
    assert torch.equal(narrow, expected)
    assert again.dtype == torch.float32
    assert not torch.equal(again, narrow)


def test_what_cannot_be_narrowed_is_refused_with_the_reason():
    model = Net().eval()
    for types, words in (
        ({"nowhere": "int8"}, "no module 'nowhere'"),
        ({"norm": "int8"}, "LayerNorm is not a product"),
        ({"head": "int3"}, "one of bfloat16"),
    ):
        with pytest.raises(UsageError, match=words):
            whence.narrow(model, types)
    with pytest.raises(UsageError, match="budget between 0 and 1"):
        asked(model, ["int8"], 2.0)
    with pytest.raises(UsageError, match="one of bfloat16"):
        asked(model, ["float4"], 1e-2)
    with pytest.raises(UsageError, match="already"):
        whence.narrow(Net().bfloat16(), {"head": "bfloat16"})


PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
print(net(torch.randn(40, 8)).double().sum().item().hex())
"""


def test_a_command_is_asked_for_a_table(tmp_path):
    bare = inside.program(tmp_path, PROGRAM)
    words = ["probe", "--only", "precision", "--to", "int8", "--budget", "0.02"]
    asked = inside.or_outside(tmp_path, *words, "--format", "json", "--", warm.TORCH, "script.py")
    printed, _, answer = asked.stdout.partition("\n")
    assert printed == bare.stdout.strip()
    assert asked.returncode == 0
    plan = json.loads(answer)["answers"][0]["precision"]["plans"][0]
    assert (plan["to"], plan["budget"]) == ("int8", 0.02)
    assert plan["checks"][0]["error"] <= plan["predicted"]
