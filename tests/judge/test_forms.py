"""GELU by the error function, by tanh and by a sigmoid, told apart by their bits; against torch's
kernels.
"""

import numpy as np
import pytest

from whence import judge

torch = pytest.importorskip("torch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def call(x, form, dtype):
    """(input, output) of torch's GELU as arrays."""
    from whence.frameworks.array_protocols import to_host

    given = torch.tensor(x).to(DTYPES[dtype])
    if form == "sigmoid":
        made = (given.float() * torch.sigmoid(1.702 * given.float())).to(given.dtype)
    else:
        made = torch.nn.functional.gelu(given, approximate="tanh" if form == "tanh" else "none")
    return to_host(given, "x"), to_host(made, "y")


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("reference", DTYPES)
@pytest.mark.parametrize("forms", [("erf", "tanh"), ("tanh", "erf"), ("erf", "sigmoid")])
def test_other_forms_are_told_apart_in_any_dtype(reference, target, forms):
    x = np.random.default_rng(2).standard_normal((64, 128))
    found = judge.told_apart(
        "GELU", call(x, forms[0], reference), call(x * 1.001, forms[1], target)
    )
    assert found is not None
    assert (found.reference, found.target) == forms
    assert found.agree >= 0.9 * found.parts


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("reference", DTYPES)
@pytest.mark.parametrize("form", ["erf", "tanh", "sigmoid"])
def test_one_form_in_two_dtypes_is_silent(reference, target, form):
    for seed in range(5):
        x = np.random.default_rng(seed).standard_normal((64, 128)) * 2
        assert (
            judge.told_apart("gelu", call(x, form, reference), call(x * 1.001, form, target))
            is None
        )


def test_what_was_rounded_in_between_is_silent():
    x = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    given = torch.tensor(x).bfloat16()
    steps = given * 0.5 * (1 + torch.erf(given * 0.70710678))  # every step rounds to bfloat16
    from whence.frameworks.array_protocols import to_host

    assert (
        judge.told_apart(
            "GELU", call(x, "erf", "float32"), (to_host(given, "x"), to_host(steps, "y"))
        )
        is None
    )


def test_other_operators_few_elements_and_what_is_not_finite_are_left_alone():
    x = np.random.default_rng(1).standard_normal((64, 128))
    pair = call(x, "erf", "bfloat16"), call(x, "tanh", "bfloat16")
    assert judge.told_apart("SiLU", *pair) is None
    assert judge.told_apart("GELU", *((a[:1, :2], b[:1, :2]) for a, b in pair)) is None
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, 1e30])
    assert (
        judge.told_apart("GELU", call(odd, "erf", "float32"), call(odd, "tanh", "float32")) is None
    )
    assert (
        judge.told_apart(
            "GELU", (np.zeros((0, 3)), np.zeros((0, 3))), (np.zeros((0, 3)), np.zeros((0, 3)))
        )
        is None
    )
