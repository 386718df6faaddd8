"""A fault in the code is named where it is smaller than rounding, and two ways to write one formula
are one formula.
"""

import math

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import whence
from whence.comparison.replays.formulas import with_reference_constants
from whence.judge import formula_difference
from whence.judge.policy import parse
from whence.records import Operation, Program

WIDTH = 64


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), eps

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class NormOtherwise(Norm):
    """The same norm, written by someone else."""

    def forward(self, x):
        wide = x.float()
        mean = (wide * wide).sum(-1, keepdim=True) / x.shape[-1]
        return self.weight * (wide / (mean + self.eps).sqrt()).to(x.dtype)


class NormOutside(Norm):
    """Its epsilon is added to the root."""

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(
            x.dtype
        )


class Act(nn.Module):
    """x times a function of x."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x * self.function(x)


class Gated(nn.Module):
    """Code of its own between two modules."""

    def __init__(self, scale):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x):
        gate = torch.sigmoid(x * self.scale)
        return self.down(torch.tanh(self.up(x)) * gate)


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def compared(tmp_path):
    def compare(reference, target, dtypes=("float32", "bfloat16"), **how):
        level = how.pop("level", "modules")
        for name, middle, dtype in zip(("a", "b"), (reference, target), dtypes, strict=True):
            model = network(middle).to(getattr(torch, dtype))
            torch.manual_seed(1)
            with torch.no_grad(), whence.capture(model, tmp_path / name, level=level, force=True):
                model(torch.randn(48, WIDTH).to(getattr(torch, dtype)))
        return whence.compare(tmp_path / "a", tmp_path / "b", **how)

    return compare


def names(result):
    return [(f.name, f.cause) for f in result.findings]


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_an_epsilon_is_named_below_the_rounding_of_16_bits(compared, dtypes):
    result = compared(lambda: Norm(1e-6), lambda: Norm(2e-4), dtypes)
    assert names(result) == [("1", "semantic")]
    finding = result.findings[0]
    assert "1e-06 in the reference, 0.0002 in the target" in finding.sentence
    assert finding.sentence.startswith("add.Tensor: other is 1e-06 in the reference")
    assert "; introduced here, below its rounding" in finding.sentence
    verdict = next(v for v in result.verdicts if "formula" in v.numbers)
    # The weight of a row of mean square m changes from (m + 1e-6)^-1/2 to (m + 2e-4)^-1/2.
    assert 2e-5 < verdict.numbers["formula"] < 1e-2
    assert verdict.numbers["rho"] < 2  # nothing else shows it
    assert compared(lambda: Norm(1e-6), lambda: Norm(1e-6), dtypes).status == "same"


@pytest.mark.parametrize(
    ("reference", "target", "words"),
    [
        (
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.LayerNorm(WIDTH, eps=1e-2),
            "eps is 1e-05 in the reference, 0.01 in the target",
        ),
        (
            lambda: nn.LeakyReLU(0.1),
            lambda: nn.LeakyReLU(0.102),
            "negative_slope is 0.1 in the reference, 0.102 in the target",
        ),
    ],
)
def test_an_argument_of_an_operator_is_named_below_the_rounding_of_16_bits(
    compared, reference, target, words
):
    result = compared(reference, target, ("bfloat16", "bfloat16"), level="op")
    assert result.status == "different"
    assert result.findings[0].name == "1"
    assert words in result.findings[0].sentence
    assert compared(reference, reference, level="op").status == "same"


def test_a_declared_tolerance_holds(compared):
    policy = parse({"allow": [{"module": "1", "declare": "tolerance", "rel_l2": 0.01}]})
    assert compared(lambda: Norm(1e-6), lambda: Norm(2e-4), policy=policy).status == "same"


def test_constants_of_hardly_an_effect_are_a_remark_that_counts_with_strict(compared):
    result = compared(lambda: Norm(1e-6), lambda: Norm(2e-6))
    assert result.status == "same"
    (remark,) = result.remarks
    assert (remark.kind, remark.name) == ("semantic", "1")
    assert remark.sentence.startswith("add.Tensor: other is 1e-06 in the reference, 2e-06")
    assert compared(lambda: Norm(1e-6), lambda: Norm(2e-6), strict=True).status == "different"


def test_an_epsilon_outside_the_root_is_named_in_float32(compared):
    result = compared(lambda: Norm(1e-5), lambda: NormOutside(1e-5), ("float32", "float32"))
    assert names(result) == [("1", "semantic")]


@pytest.mark.parametrize(("scale", "status"), [(0.5, "same"), (0.502, "different")])
def test_a_constant_in_code_between_modules_is_named(compared, scale, status):
    result = compared(lambda: Gated(0.5), lambda: Gated(scale))
    assert result.status == status
    assert names(result) == [("1", "semantic")] * (status == "different")
    assert all(f.sentence.startswith("between up and down: ") for f in result.findings)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16")]
)
def test_one_formula_written_in_two_ways_is_no_fault(compared, dtypes):
    result = compared(lambda: Norm(1e-6), lambda: NormOtherwise(1e-6), dtypes)
    assert (result.status, result.remarks) == ("same", ())


def test_a_number_of_seven_digits_is_the_number_where_the_code_is_another(compared):
    def exact(x):
        return 1 / (1 + torch.exp(-x))

    def by_powers_of_two(x):
        return torch.reciprocal(torch.exp2(-1.442695 * x) + 1)  # log2 e, to seven digits

    result = compared(lambda: Act(exact), lambda: Act(by_powers_of_two), ("float32", "float32"))
    assert result.status == "same"


@pytest.mark.parametrize(("number", "status"), [(0.08837890625, "same"), (0.0884, "different")])
def test_a_constant_rounded_to_the_dtype_of_the_target_is_the_constant(compared, number, status):
    """1 / (8 sqrt 2) = 0.0883883...; the nearest number of bfloat16 is further away than 0.0884."""

    def gate(factor):
        return lambda: Act(lambda x: torch.sigmoid(16 * (x * factor)))

    result = compared(gate(1 / (8 * math.sqrt(2))), gate(number))
    assert result.remarks == ()
    assert result.status == status


def test_what_follows_from_a_dtype_is_no_difference(compared):
    """Code that adds the epsilon of its dtype, or fills with its smallest number."""

    def normalised(x):
        return 1 / (x.abs().mean(-1, keepdim=True) + 100 + torch.finfo(x.dtype).eps)

    result = compared(lambda: Act(normalised), lambda: Act(normalised))
    assert (result.status, result.remarks) == ("same", ())


def test_another_form_of_an_activation_is_named_in_bfloat16(compared):
    result = compared(
        lambda: Act(lambda x: F.softplus(x)), lambda: Act(lambda x: F.softplus(x, beta=1.002))
    )
    assert names(result) == [("1", "semantic")]


@pytest.mark.parametrize(
    "whole",
    [
        torch.round,
        lambda x: torch.div(x, 1, rounding_mode="floor"),
        lambda x: x.to(torch.int32).to(x.dtype),
    ],
)
def test_results_that_jump_are_left_to_the_replay(compared, whole):
    """A last bit before a rounding to codes may be a whole step behind it."""

    def codes(scale):
        return lambda x: whole(x / scale) * scale

    result = compared(
        lambda: Act(codes(1 / 3)), lambda: Act(codes(0.3333333333)), ("float32", "float32")
    )
    assert "formula" not in {key for v in result.verdicts for key in v.numbers}


class Chain(nn.Module):
    """Code of its own before each of its modules, the same but for the last."""

    def __init__(self, last):
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)), last

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(torch.tanh(x))
        return self.layers[-1](self.last(x))


def test_agreement_in_one_place_is_none_in_another(compared):
    """The code before the fifth module is written otherwise, after four places that agree."""
    result = compared(
        lambda: Chain(torch.tanh), lambda: Chain(lambda x: torch.tanh(x) + x.square() * 3e-3)
    )
    assert names(result) == [("1", "semantic")]
    sentence = result.findings[0].sentence
    assert sentence.startswith(
        "between layers.3 and layers.4: pow.Tensor_Scalar (operator 6 of 8) "
    )
    assert "; introduced here, below its rounding" in sentence


def test_a_table_made_in_another_dtype_is_no_other_formula(compared):
    """Tensors that code makes of Python numbers are held against each other, not trusted."""
    frequencies = [10000 ** (-k / WIDTH) for k in range(WIDTH)]

    def in_float32(x):
        return torch.cos(7 * torch.tensor(frequencies, dtype=torch.float32)).to(x.dtype)

    def in_bfloat16(x):
        return torch.cos(7 * torch.tensor(frequencies, dtype=torch.bfloat16)).to(x.dtype)

    result = compared(lambda: Act(in_float32), lambda: Act(in_bfloat16))
    assert not [v for v in result.verdicts if "formula" in v.numbers]


class WithPrograms:
    """A run whose programs were damaged."""

    def __init__(self, run, damage):
        self._run = run
        self.programs = {key: damage(program) for key, program in run.programs.items()}

    def __getattr__(self, name):
        return getattr(self._run, name)


@pytest.mark.parametrize(
    "argument", [{"op": [99, 0]}, {"in": 7}, {"in": "x"}, {"op": 3}, {"param": "weight"}, {"y": 1}]
)
def test_a_damaged_program_of_the_target_is_no_evidence(compared, tmp_path, argument):
    compared(lambda: Norm(1e-6), lambda: Norm(2e-4))

    def damage(program):
        if not program.operations:
            return program
        first = msgspec.structs.replace(program.operations[0], args=(argument, 2.0))
        return msgspec.structs.replace(program, operations=(first, *program.operations[1:]))

    damaged = WithPrograms(whence.open_run(tmp_path / "b"), damage)
    result = whence.compare(tmp_path / "a", damaged)
    assert not [v for v in result.verdicts if "formula" in v.numbers]


def _program(*numbers, base="bfloat16"):
    operations = tuple(Operation("aten.mul.Tensor", ({"in": 0}, number), {}) for number in numbers)
    return Program(f"p{numbers}", operations, ("input.0",), (), base=base)


def _numbers(program):
    return [operation.args[1] for operation in program.operations]


def test_constants_of_the_target_become_those_of_the_reference():
    eps = [torch.finfo(d).eps for d in (torch.float32, torch.bfloat16)]
    reference = _program(0.1, eps[0], 3.0, -torch.finfo(torch.float32).max)
    target = _program(0.10009765625, eps[1], 4.0, -torch.finfo(torch.bfloat16).max)
    assert _numbers(with_reference_constants(reference, target)) == [
        0.1, eps[0], 4.0, -torch.finfo(torch.float32).max,
    ]  # fmt: skip
    # A number that both have stands for itself, whatever limit of a dtype it is.
    assert _numbers(with_reference_constants(_program(eps[0], eps[1]), target))[1] == eps[1]


def test_the_limit_of_a_difference():
    """A hundredth of a rounding; where more than constants differs at least 2.4e-7, and up to 3e-6
    four times what the program rounds itself.
    """

    def limit(error, unit_roundoff, own=0.0, *, only_constants=False):
        difference = formula_difference(
            "output.0", error, unit_roundoff, lambda: own, only_constants=only_constants
        )
        return None if difference is None else (difference.limit, difference.is_fault)

    assert limit(1e-4, 2**-8) == (pytest.approx(0.01 * 2**-8), True)
    assert limit(3e-5, 2**-8) is None
    assert limit(3e-5, 2**-8, only_constants=True) == (pytest.approx(0.01 * 2**-8), False)
    assert limit(1e-13, 2**-24, only_constants=True) is None
    assert limit(5e-7, 2**-24, own=1e-7) == (pytest.approx(4e-7), True)
    assert limit(5e-7, 2**-24, own=2e-7) is None
    assert limit(4e-6, 2**-24, own=1e-3) == (2.4e-7, True)
