"""One program, other shapes: sizes follow the inputs where only one reading is possible; else the
shape is refused.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402
import program_zoo as modules  # noqa: E402

from whence.errors import ReplayRefused  # noqa: E402

pytestmark = pytest.mark.torch


def decode(length):
    return (
        modules.heads(0, b=3, h=4, t=1),
        modules.heads(1, b=3, h=2, t=length),
        modules.heads(2, b=3, h=2, t=length),
    )


def test_one_program_serves_all_decode_steps():
    recordings = [recording.record(modules.DecodeAttention(), *decode(n))[1] for n in (7, 9, 21)]
    assert len({r.recording.program.id for r in recordings}) == 1
    loaded = recordings[0].load()
    assert [r.check(loaded) for r in recordings] == ["", "", ""]


def test_linear_on_another_batch_and_length():
    module = torch.nn.Linear(8, 5)
    first = recording.record(module, modules.g(3, 6, 8))[1]
    other = recording.record(module, modules.g(2, 11, 8))[1]
    assert first.recording.program.id == other.recording.program.id
    assert other.check(first.load()) == ""


def test_a_number_taken_from_a_shape_fixes_the_shape():
    first = recording.record(modules.MeanBySize(), modules.g(3, 7))[1]
    loaded = first.load()
    assert first.check(loaded) == ""
    with pytest.raises(ReplayRefused, match=r"recorded for input.0 with extent 7 on axis 1"):
        loaded.run({"input.0": np.ones((3, 9), np.float32)}, {})


def test_a_size_that_may_be_either_of_two_axes():
    """Two axes of one extent: which one a size meant cannot be known, so they must go on
    agreeing.
    """

    class Flat(torch.nn.Module):
        def forward(self, x):
            return x.transpose(0, 1).reshape(x.shape[0], -1)

    first = recording.record(Flat(), modules.g(4, 4, 3))[1]
    loaded = first.load()
    assert recording.record(Flat(), modules.g(5, 5, 3))[1].check(loaded) == ""
    with pytest.raises(ReplayRefused, match="as long as"):
        loaded.run({"input.0": np.ones((4, 5, 3), np.float32)}, {})


def test_a_product_of_two_readings_stays_a_literal():
    class Flat(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x.flatten(0, 1), x.flatten(0, 1)]).view(-1, 1).expand(-1, 12)

    first = recording.record(Flat(), modules.g(2, 6, 3, 4))[1]
    with pytest.raises(ReplayRefused, match=r"recorded for input.0"):
        first.load().run({"input.0": np.ones((2, 5, 3, 4), np.float32)}, {})


def test_an_axis_of_one_may_not_grow_where_sizes_are_written_down():
    class Spread(torch.nn.Module):
        def forward(self, x):
            return x.expand(x.shape[0], 5)

    first = recording.record(Spread(), modules.g(4, 1))[1]
    with pytest.raises(ReplayRefused, match=r"extent 1 on axis 1"):
        first.load().run({"input.0": np.ones((4, 5), np.float32)}, {})


def test_extents_that_moved_together_must_go_on_doing_so():
    class Cut(torch.nn.Module):
        def forward(self, x, y):
            return x[:, : y.shape[0]] * 2

    first = recording.record(Cut(), modules.g(2, 9), modules.g(6))[1]
    loaded = first.load()
    assert loaded.run(
        {"input.0": np.ones((2, 9), np.float32), "input.1": np.ones(4, np.float32)}, {}
    )["output.0"].shape == (2, 4)
    both = recording.record(Cut(), modules.g(2, 6), modules.g(6))[1]
    with pytest.raises(ReplayRefused, match="as long as"):
        both.load().run(
            {"input.0": np.ones((2, 9), np.float32), "input.1": np.ones(4, np.float32)}, {}
        )


def test_strides_choose_the_kernel_and_are_rebuilt():
    module = torch.nn.Conv2d(3, 8, 3)
    x = modules.g(2, 3, 9, 9).to(memory_format=torch.channels_last)
    recorded = recording.record(module, x)[1]
    assert recorded.check() == ""
    expanded = recording.record(modules.Spectrum(), modules.g(1, 8).expand(5, 8))[1]
    assert expanded.check() == ""
    # An expanded layout that other values do not have is left out, not forced.
    other = {"input.0": np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)}
    assert expanded.load().run(other, {}, strides=expanded.strides)["output.0"].shape == (5, 8)


def test_a_view_that_does_not_fit_the_layout_becomes_a_reshape():
    recorded = recording.record(torch.nn.Flatten(), modules.g(2, 3, 4))[1]
    strides = {"input.0": (12, 1, 3)}
    got = recorded.load().run(recorded.inputs, {}, strides=strides)["output.0"]
    np.testing.assert_array_equal(got, recorded.outputs["output.0"])


def test_a_view_that_is_written_through_is_not_copied():
    class Through(torch.nn.Module):
        def forward(self, x):
            y = x * 1
            y.view(-1)[:3] = 0
            return y

    recorded = recording.record(Through(), modules.g(4, 3))[1]
    assert recorded.check() == ""
    with pytest.raises(ReplayRefused, match="what it views is written"):
        recorded.load().run(recorded.inputs, {}, strides={"input.0": (1, 4)})
