"""A module borrowed from the user's model, by itself: what it computes, in which dtype, and how its
arguments are put together.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from whence.errors import ReplayRefused  # noqa: E402
from whence.records import Call, Ref  # noqa: E402
from whence.replay.module_arguments import Kid, arguments  # noqa: E402
from whence.replay.user_module import Borrowed  # noqa: E402

pytestmark = pytest.mark.torch

X = np.random.default_rng(0).standard_normal((6, 8))
W = np.random.default_rng(1).standard_normal((4, 8))


class Narrowing(nn.Module):
    """Names float32 in every way that code does, and makes a tensor in the default dtype."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x):
        y = x.to(torch.float32) @ self.weight.float().T
        steps = torch.arange(4, dtype=torch.float32) / 3 + torch.ones(4)
        return torch.softmax(y * steps, -1, dtype=torch.float32).to(x.dtype)


def borrowed(module, slots, kids=(), **facts):
    known = {slot: ("float32", shape) for slot, shape in slots.items()}
    call = Call(
        0,
        "m",
        "M",
        0,
        0,
        refs=tuple(Ref(slot, i) for i, slot in enumerate(slots)),
        leaf=not kids,
        **facts,
    )
    return Borrowed(module, call, known, kids, name="test")


def narrowing():
    return borrowed(Narrowing(), {"input.0": (6, 8), "param.weight": (4, 8), "output.0": (6, 4)})


def right(x, w):
    y = x @ w.T * (np.arange(4) / 3 + 1)
    e = np.exp(y - y.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_wide_is_float64_all_the_way():
    x, w = X.astype(np.float32), W.astype(np.float32)
    module = narrowing()
    wide = module.run({"input.0": x}, {"param.weight": w}, working="float64")["output.0"]
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, right(x.astype(np.float64), w.astype(np.float64)), rtol=1e-13)
    assert module.length == 8
    recorded = module.run({"input.0": x}, {"param.weight": w})["output.0"]
    assert recorded.dtype == np.float32
    error = np.abs(recorded - wide).max()
    assert 0 < error < 1e-6
    assert torch.get_default_dtype() is torch.float32


def test_sixteen_bits_keep_what_the_code_widens():
    import ml_dtypes

    x, w = X.astype(ml_dtypes.bfloat16), W.astype(ml_dtypes.bfloat16)
    made = narrowing().run({"input.0": x}, {"param.weight": w}, working="bfloat16")["output.0"]
    assert made.dtype == ml_dtypes.bfloat16
    wide = narrowing().run({"input.0": x}, {"param.weight": w}, working="float32")["output.0"]
    assert wide.dtype == np.float32
    np.testing.assert_allclose(wide, right(x.astype(np.float64), w.astype(np.float64)), rtol=1e-4)
    np.testing.assert_array_equal(made, wide.astype(ml_dtypes.bfloat16))  # rounded once, at the end


def test_held_parameters_serve_their_own_dtype_only():
    module = narrowing()
    held = module.hold({"param.weight": W.astype(np.float32)}, working="float64")
    x = X.astype(np.float32)
    np.testing.assert_array_equal(
        module.run({"input.0": x}, held, working="float64")["output.0"],
        module.run({"input.0": x}, {"param.weight": W.astype(np.float32)}, working="float64")[
            "output.0"
        ],
    )
    with pytest.raises(
        ReplayRefused, match="parameters held for float64 given to a run in float32"
    ):
        module.run({"input.0": x}, held, working="float32")
    with pytest.raises(ReplayRefused, match=r"needs param\.weight, which is not there"):
        module.run({"input.0": x}, {})
    with pytest.raises(ReplayRefused, match="float8"):
        module.run({"input.0": x}, {}, working="float8")


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_module_that_holds_more_than_was_recorded_is_refused(kind):
    module = Narrowing()
    if kind == "parameter":
        module.scale = nn.Parameter(torch.ones(3))
    else:
        module.register_buffer("scale", torch.ones(3))
    slots = {"input.0": (6, 8), "param.weight": (4, 8), "output.0": (6, 4)}
    with pytest.raises(ReplayRefused, match="has scale, for which nothing was recorded"):
        borrowed(module, slots)


def test_in_place_of_a_child_stands_what_it_left():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x * 2) + self.inner(x * 3)

    outer = Outer()
    kids = [
        Kid("m.inner", outer.inner, ("input.0",), ("output.0",), torch.empty(0)) for _ in range(2)
    ]
    module = borrowed(outer, {"input.0": (6, 8), "output.0": (6, 8)}, kids)
    assert module.program.inputs == ("input.0", "0:output.0", "1:output.0")
    assert [slot for slot, _ in module.program.outputs] == ["0:input.0", "1:input.0", "output.0"]
    assert module.needs("0:input.0") == {"input.0"}
    assert module.determined(["input.0", "0:output.0"]) == ["0:input.0", "1:input.0"]
    first = module.run({"input.0": X}, {}, outputs=["0:input.0"])
    np.testing.assert_array_equal(first["0:input.0"], X * 2)
    given = {"input.0": X, "0:output.0": X + 5, "1:output.0": X - 1}
    np.testing.assert_array_equal(
        module.run(given, {}, outputs=["output.0"])["output.0"], (X + 5) + (X - 1)
    )
    asked = []

    def child(k, handed):
        asked.append((k, handed["input.0"].copy()))
        return {"output.0": handed["input.0"] + k}

    made = module.run({"input.0": X}, {}, child=child)
    np.testing.assert_array_equal(made["output.0"], X * 2 + (X * 3 + 1))
    assert [k for k, _ in asked] == [0, 1]
    np.testing.assert_array_equal(asked[1][1], X * 3)
    asked.clear()
    module.run(given, {}, child=child)
    assert asked == [], "nothing is computed that is given"
    module.run({k: v for k, v in given.items() if k != "1:output.0"}, {}, child=child)
    assert [k for k, _ in asked] == [1]


def test_what_a_child_was_given_is_what_follows_starts_from():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            y = x * 2
            return y + self.inner(y)

    outer = Outer()
    kid = Kid(
        "m.inner", outer.inner, ("input.0",), ("output.0",), torch.empty(0), fresh=("input.0",)
    )
    module = borrowed(outer, {"input.0": (6, 8), "output.0": (6, 8)}, [kid])
    assert module.needs("0:input.0") == {"input.0"}
    assert module.needs("output.0") == {"input.0", "0:input.0", "0:output.0"}
    made = module.run({"input.0": X, "0:input.0": X * 7, "0:output.0": X}, {})
    np.testing.assert_array_equal(made["0:input.0"], X * 2)
    np.testing.assert_array_equal(made["output.0"], X * 7 + X)


def test_another_order_of_children_is_a_guard():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else self.two(x)

    outer = Outer()
    module = borrowed(
        outer,
        {"input.0": (6, 8), "output.0": (6, 8)},
        [Kid("m.one", outer.one, ("input.0",), ("output.0",), torch.empty(0))],
    )
    there = {"0:output.0": X}
    assert module.run({"input.0": abs(X), **there}, {})["output.0"].shape == (6, 8)
    with pytest.raises(
        ReplayRefused, match=r"guard: the model's Outer calls|uses a weight of a module below"
    ):
        module.run({"input.0": -abs(X), **there}, {})


def forward(a, b, *rest, c, d=3):
    """Takes what the slots below say."""


def test_arguments_from_slots():
    args, kwargs = arguments(
        {"input.0": "t0", "input.2.1": "t21", "input.d.key.0": "td", "input.c.mask": "tm"},
        {"input.2.0": 5, "input.d.name": "text", "input.d.flag": True},
        forward,
    )
    assert args == ["t0", None, (5, "t21")]
    assert kwargs == {"c": {"mask": "tm"}, "d": {"key": ("td",), "name": "text", "flag": True}}
    assert kwargs["c"].mask == "tm"  # an object with fields, or a dict
    assert arguments({}, {}, forward) == ([], {"a": None, "b": None, "c": None})
    assert arguments({"input.0": 1, "input.b": 2, "input.c": 3}, {}, forward) == (
        [1],
        {"b": 2, "c": 3},
    )
    with pytest.raises(ReplayRefused, match="several pieces"):
        arguments({"input.0.values": 1}, {"input.0": "NestedTensor(values)"}, forward)
