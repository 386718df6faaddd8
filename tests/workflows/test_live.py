"""`whence.compare_live`: a program uses one model, and another is compared with it meanwhile."""

import copy
import gc
import random

import numpy as np
import pytest

import whence
from whence.errors import CaptureError, OutputExists, UsageError
from whence.testing import ParityError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def net(eps=1e-5, dropout=0.0):
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(32, eps=eps)
    ).eval()


def batches():
    made = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=made) for _ in range(3)]


def test_the_fault_of_the_target_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with whence.compare_live(net(), target := net(eps=0.1)) as watch:
        for batch in batches():
            target(batch)
    result = watch.result
    assert (result.status, [f.name for f in result.findings]) == ("different", ["3"])
    assert (watch.calls, len(result["3"].calls)) == (3, 3)
    assert result.next == ()
    assert "give compare_live(..., output=FOLDER)" in watch.answer()
    assert repr(watch) == "<Live comparison, 3 calls of the target: different>"
    with pytest.raises(ParityError, match=r"eps is 1e-05 in the reference, 0.1 in the target"):
        watch.check()
    result.report(tmp_path / "page.html")
    del watch
    gc.collect()
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_equal_models_are_the_same_bits_with_the_random_numbers_of_the_target():
    reference, target = net(dropout=0.5).train(), net(dropout=0.5).train()
    with whence.compare_live(reference, target) as watch:
        for batch in batches():
            target(batch)
    assert set(watch.check().counts) == {"identical"}


def test_the_program_computes_the_same_bits_and_draws_the_same_numbers(tmp_path):
    """Of the model that is watched, and of what the program does beside it."""

    class Drawing(torch.nn.Module):
        def forward(self, x):
            return x * random.random() * np.random.rand() * torch.rand(())

    def program(model, watched):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        seen = []
        for batch in batches():
            batch.requires_grad_()
            model(batch).sum().backward()
            seen += [batch.grad, *(p.grad.clone() for p in model.parameters())]
            seen += [torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        return seen

    def model():
        return torch.nn.Sequential(net(dropout=0.3).train(), Drawing())

    alone, watched = program(model(), None), model()
    with whence.compare_live(Drawing(), watched) as watch:
        seen = program(watched, watch)
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))
    assert not hasattr(torch.nn.Module.__call__, "whence")


def test_another_dtype_is_rounding():
    half = net().bfloat16()
    with whence.compare_live(net(), half) as watch, torch.no_grad():
        half(batches()[0].bfloat16())
    assert watch.check().status == "same"


@pytest.mark.slow
def test_compiled_code_that_shares_the_modules():
    model = net()
    compiled = torch.compile(model, backend="eager")
    with whence.compare_live(model, compiled) as watch, torch.no_grad():
        compiled(batches()[0])
    assert watch.check().status == "same"
    assert len({row.name for row in watch.result.rows}) == 1  # the inside was not seen


def test_a_model_that_is_part_of_the_other_is_captured_once():
    reference = net()
    target = torch.nn.Sequential(*reference)
    with whence.compare_live(reference, target) as watch, torch.no_grad():
        target(batches()[0])
    assert set(watch.check().counts) == {"identical"}
    assert {len(watch.result[name].calls) for name in ("0", "1", "3")} == {1}


def test_arguments_by_name_and_objects_that_a_call_writes_into_are_copied():
    class Cache:
        def __init__(self):
            self.seen = []

    class Model(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.lin = net()
            self.factor = factor

        def forward(self, x, *, cache):
            cache.seen.append(self.lin(x * self.factor))
            return sum(cache.seen)

    cache, target = Cache(), Model(1.0)
    with whence.compare_live(Model(1.0).double(), target) as watch, torch.no_grad():
        for batch in batches():
            target(batch, cache=cache)
    assert len(cache.seen) == 3
    assert {value.dtype for value in cache.seen} == {torch.float32}
    assert watch.result.status == "same"


def test_a_block_may_call_both_itself(tmp_path):
    reference, target = net(), net()
    both = whence.compare_live(reference, target, mirror=False, output=tmp_path / "live")
    with both as watch, torch.no_grad():
        for batch in batches():
            torch.testing.assert_close(target(batch), reference(batch))
    assert set(watch.check().counts) == {"identical"}
    assert len(watch.result["0"].calls) == 3
    assert sorted(p.name for p in (tmp_path / "live").iterdir()) == ["cmp", "reference", "target"]
    assert f"written to {tmp_path / 'live' / 'cmp'}" in watch.answer()
    with pytest.raises(OutputExists):
        whence.compare_live(reference, target, output=tmp_path / "live")


def test_what_the_reference_raises_is_told_at_the_end_and_the_program_goes_on():
    target = net()
    other = torch.nn.Sequential(torch.nn.Linear(8, 4))
    watch = whence.compare_live(other, target)
    with pytest.raises(CaptureError, match="the reference raised RuntimeError"), watch:
        outputs = [target(batch) for batch in batches()]
    assert len(outputs) == 3
    with pytest.raises(UsageError, match="the runs could not be compared"):
        watch.result


def test_mistakes_are_told_before_the_program_runs_where_they_can_be(tmp_path):
    model = net()
    with pytest.raises(UsageError, match="did you mean 'strict'"):
        whence.compare_live(model, net(), stict=True)
    with pytest.raises(UsageError, match="one object"):
        whence.compare_live(model, model)
    with pytest.raises(CaptureError, match="cannot capture a int"):
        whence.compare_live(model, 3)
    watch = whence.compare_live(model, net())
    with pytest.raises(CaptureError, match="did not call the target"), watch:
        model(batches()[0])
    watch = whence.compare_live(model, net())
    with pytest.raises(UsageError, match="has not been entered"):
        watch.result
    with pytest.raises(KeyError), watch:
        raise KeyError
    with pytest.raises(UsageError, match="the block was left by KeyError"):
        watch.result
    with pytest.raises(UsageError, match="one block"), watch:
        pass
    assert not hasattr(torch.nn.Module.__call__, "whence")


def test_operators_of_the_reference_are_not_the_targets():
    """At level op a listener sees what its thread runs, the other model's operators too."""
    target = net()
    watch = whence.compare_live(copy.deepcopy(target), target, capture={"level": "op"})
    with watch, torch.no_grad():
        target(batches()[0])
    result = watch.check()
    assert result.unmatched == 0 and set(result.counts) == {"identical"}


@pytest.mark.paddle
def test_a_paddle_layer_against_a_torch_module():
    paddle = pytest.importorskip("paddle")
    model = net()
    layer = paddle.nn.Sequential(
        paddle.nn.Linear(16, 32), paddle.nn.GELU(), paddle.nn.Dropout(0.0), paddle.nn.LayerNorm(32)
    )
    layer.eval()
    state = {
        name: value.detach().numpy().T if value.dim() == 2 else value.detach().numpy()
        for name, value in model.state_dict().items()
    }
    layer.set_state_dict(
        {name: paddle.to_tensor(np.ascontiguousarray(v)) for name, v in state.items()}
    )
    call = paddle.nn.Layer.__call__
    with whence.compare_live(model, layer) as watch:
        for batch in batches():
            layer(paddle.to_tensor(batch.numpy()))
    assert watch.result.status == "same"
    assert watch.result["3"].op_type == "LayerNorm"
    assert paddle.nn.Layer.__call__ is call
