"""What compiled graphs return is seen from outside of them: nothing of the compiler is switched, and
nothing of ours stays.
"""

import pytest
import torch
import torch._functorch.config as autograd
import torch._inductor.config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.instrument.torch.compiled import inductor_taps as taps
from whence.instrument.torch.compiled.results import Results
from whence.instrument.torch.compiled.what_returned import read

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def plain(graph, inputs):
    """A backend that has no cache and compiles nothing."""
    return graph.forward


@pytest.fixture
def results(tmp_path):
    torch._dynamo.reset()
    watching = Results(tmp_path)
    watching.install()
    yield watching
    watching.remove()
    torch._dynamo.reset()


def left(results, folder):
    results.finish(["CUDA graphs"])
    return read(folder)


def test_each_execution_has_a_digest_of_what_it_returned(results, tmp_path):
    @torch.compile(backend=plain, dynamic=True)
    def double(x):
        return x * 2

    for value in (1.0, 1.0, 3.0):
        assert double(torch.full((3,), value)).tolist() == [2 * value] * 3
    (found,) = left(results, tmp_path)
    first, second, third = (e.digest for e in found.executions)
    assert first == second != third
    assert (found.rank, found.count, found.switched) == (0, 3, ("CUDA graphs",))
    assert found.graphs[0].startswith("0/0 (test_compiled_results.py:")


def test_what_a_graph_leaves_in_its_inputs_is_seen(results, tmp_path):
    @torch.compile(backend=plain)
    def write(x, scale):
        x.mul_(scale)

    write(torch.ones(3), torch.tensor(2.0))
    write(torch.ones(3), torch.tensor(5.0))
    (found,) = left(results, tmp_path)
    assert found.executions[0].digest != found.executions[1].digest


def test_the_gradients_of_a_compiled_backward_pass_are_seen(results, tmp_path):
    @torch.compile(backend="aot_eager")
    def scaled(x):
        return (x * x).sum().view(1)

    x = torch.ones(3, requires_grad=True)
    scaled(x).backward()
    scaled(x).backward(torch.tensor([2.0]))
    assert x.grad.tolist() == [6.0] * 3
    (found,) = left(results, tmp_path)
    assert [e.backward for e in found.executions] == [False, True, False, True]
    forward, backward, again, twice = (e.digest for e in found.executions)
    assert forward == again
    assert backward != twice


def test_modes_and_versions_of_the_program_see_nothing_of_it(results):
    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    compiled = torch.compile(lambda x: x + 1, backend=plain)
    x = torch.ones(3)
    with Seen():
        out = compiled(x)
    assert set(names) <= {"aten.add.Tensor"}
    assert (x._version, out._version) == (0, 0)


def test_nothing_is_left_by_a_program_that_compiles_nothing(results, tmp_path):
    torch.compile(lambda x: x, backend=plain)
    assert left(results, tmp_path) == []


def test_torch_is_put_back(tmp_path):
    kinds = torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper
    before = [kind.__call__ for kind in kinds]
    watching = Results(tmp_path)
    watching.install()
    assert [kind.__call__ for kind in kinds] != before
    watching.remove()
    assert [kind.__call__ for kind in kinds] == before


def test_a_forked_process_begins_with_nothing(results, tmp_path):
    torch.compile(lambda x: x + 1, backend=plain)(torch.ones(2))
    results.renew()
    assert left(results, tmp_path) == []


def test_a_result_that_cannot_be_read_is_told(results, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no bytes")

    monkeypatch.setattr("whence.instrument.torch.compiled.results.canonical", fails)
    assert torch.compile(lambda x: x + 1, backend=plain)(torch.ones(2)).tolist() == [2, 2]
    (found,) = left(results, tmp_path)
    assert "no bytes" in found.problem


def test_what_is_compiled_for_a_package_is_left_as_it_is(results, tmp_path):
    with autograd.patch(force_autograd_cache=True):
        assert taps.is_precompiling()
        torch.compile(lambda x: x + 1, backend=plain)(torch.ones(2))
    assert not taps.is_precompiling()
    assert left(results, tmp_path) == []


def test_what_a_capture_switches_off_is_what_is_on():
    with (
        inductor.patch({"fx_graph_cache": True, "triton.cudagraphs": True}),
        autograd.patch(enable_autograd_cache=True),
    ):
        assert taps.switched() == [taps.CACHES, taps.CUDA_GRAPHS]
        with taps.off((taps.CACHES,)):
            assert taps.switched() == [taps.CUDA_GRAPHS]
            assert not autograd.enable_autograd_cache
        with taps.outside():
            assert taps.switched() == []
        with inductor.patch(force_disable_caches=True):
            assert taps.switched() == [taps.CUDA_GRAPHS]
        assert inductor.fx_graph_cache
        assert inductor.triton.cudagraphs


def test_what_runs_without_a_capture_can_have_the_same_off(tmp_path):
    met = []

    def backend(graph, inputs):
        met.append(inductor.fx_graph_cache)
        return graph.forward

    for names in ((), (taps.CACHES,)):
        torch._dynamo.reset()
        watching = Results(tmp_path, names)
        with inductor.patch(fx_graph_cache=True):
            watching.install()
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        watching.remove()
    assert met == [True, False]


@pytest.mark.slow
def test_cuda_graphs_of_one_compile_are_off_while_it_is_captured(tmp_path, monkeypatch):
    """Options of `torch.compile` reach inductor beside its settings."""
    from torch._inductor import compile_fx

    import whence
    from whence.store import open_run

    met = []
    original = compile_fx.compile_fx_inner

    def spied(*args, **how):
        met.append(bool(how.get("cudagraphs")))
        return original(*args, **how)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spied)
    torch._dynamo.reset()
    net = torch.nn.Linear(2, 2).eval()
    with (
        torch.no_grad(),
        whence.compile(net, tmp_path / "run", torch_mode="reduce-overhead") as compiled,
    ):
        compiled(torch.ones(1, 2))
    assert met == [False]
    notes = [note.text for note in open_run(tmp_path / "run").notes if note.kind == "switched"]
    assert "CUDA graphs are off while graphs are captured" in notes
