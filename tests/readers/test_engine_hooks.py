"""Folders of hooks of serving engines: AWS's NxD Inference and vLLM."""

import pytest

import whence
from whence.readers import open_run

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

MODULES = ("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "norm", "lm_head")
TOKENS = (5, 1, 1)


def tensors(step, module, scale=1.0):
    generator = torch.Generator().manual_seed(100 * step + MODULES.index(module))
    return torch.randn(1, TOKENS[step], 8, generator=generator) * scale


def captured(folder, wrong=None):
    """As NxD Inference writes; a tuple is numbered."""
    for step in range(3):
        for module in MODULES:
            phase, number = ("cte" if step == 0 else "tkg"), "_0" * (module == "layers.0.self_attn")
            name = f"captured_tensors_{phase}_step_{step + 1}_module_{module}_output{number}.pt"
            folder.mkdir(exist_ok=True)
            value = tensors(step, module, 1.01 if (step, module) == wrong else 1.0)
            torch.save(value, folder / name)
    return folder


def logged(folder, identifier="010fed05", wrong=None):
    """As vLLM writes."""
    for step in range(3):
        for module in MODULES:
            place = folder / identifier / f"step_{step}" / f"model.{module}"
            place.mkdir(parents=True)
            value = tensors(step, module, 1.01 if (step, module) == wrong else 1.0)
            torch.save(tensors(step, module), place / "inputs_0_cuda_0.pt")
            torch.save(value, place / "outputs_cuda_0.pt")
            (place / "inputs.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("write", "prefix"), [(captured, ""), (logged, "model.")])
def test_phases_are_steps_and_names_are_modules(tmp_path, write, prefix):
    run = open_run(write(tmp_path / "dump"))
    assert run.reader == "engine_hooks"
    calls = {(c.step, c.scope) for c in run.calls if c.scope}
    assert calls == {(step, prefix + module) for step in range(3) for module in MODULES}
    for call in run.calls:
        if call.scope:
            assert run.records[call.slots("output")[0].record].shape[1] == TOKENS[call.step]


@pytest.mark.parametrize("write", [captured, logged])
def test_two_folders_are_compared_step_by_step(tmp_path, write):
    left = write(tmp_path / "left")
    options = {"identifier": "77aa"} if write is logged else {}
    assert whence.compare(left, write(tmp_path / "same", **options)).status == "same"
    wrong = write(tmp_path / "wrong", wrong=(1, "layers.0.mlp"), **options)
    result = whence.compare(left, wrong)
    assert result.status != "same"
    rows = [row for row in result.rows if row.verdict != "identical"]
    differing = {(row.step, row.name.removeprefix("model.")) for row in rows}
    assert differing == {(1, "layers.0.mlp")}


def test_a_file_that_cannot_be_read_loses_only_its_own_tensors(tmp_path):
    folder = captured(tmp_path / "dump")
    damaged = folder / "captured_tensors_tkg_step_2_module_norm_output.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    run = open_run(folder)
    assert not any(call.scope == "norm" and call.step == 1 for call in run.calls)
    assert any(damaged.name in str(part) for part in run.missing)


def test_files_of_the_cpu_and_calls_in_their_order(tmp_path):
    """vLLM lists calls as they begin; the second call of a module has a folder of its own."""
    calls = ["model.tail", "model.norm", "model.norm_1", "model.first", "model.norm_2"]
    step = tmp_path / "step_0"
    for n, name in enumerate(calls):
        (step / name).mkdir(parents=True)
        torch.save(torch.full((2,), float(n)), step / name / "outputs_cpu.pt")
    (step / "module_calls.txt").write_text("\n".join(calls) + "\n")
    run = open_run(tmp_path)
    assert run.reader == "engine_hooks"
    assert not run.missing
    named = [(c.scope, c.occurrence) for c in sorted(run.calls, key=lambda c: c.order) if c.leaf]
    assert named == [
        ("model.tail", 0), ("model.norm", 0), ("model.norm", 1), ("model.first", 0),
        ("model.norm", 2),
    ]  # fmt: skip


def padded(folder, wrong="", token=True):
    """Fills the prefill up to a bucket of 16 tokens, with one token unless told otherwise."""
    captured(folder, wrong=(0, wrong))
    for path in folder.glob("*_cte_*.pt"):
        rest = torch.randn(1, 11, 8)
        if token and "embed_tokens" in path.name:
            rest[:] = rest[:, :1]
        torch.save(torch.cat([torch.load(path), rest], 1), path)
    return folder


def test_tokens_that_fill_a_bucket_are_left_out(tmp_path):
    reference = captured(tmp_path / "reference")
    assert whence.compare(reference, padded(tmp_path / "padded")).status == "same"
    finding = whence.compare(reference, padded(tmp_path / "wrong", "layers.0.mlp")).findings[0]
    assert (finding.step, finding.name) == (0, "layers.0.mlp")
    longer = whence.compare(reference, padded(tmp_path / "longer", token=False))
    assert longer.status == "undecided"


def test_tensors_that_the_model_registers_are_read(tmp_path):
    folder = captured(tmp_path / "dump")
    torch.save(torch.ones(3), folder / "captured_tensors_tkg_step_2_manual_tensor_0.pt")
    (folder / "capture_metadata.json").write_text("{}")
    run = open_run(folder)
    assert not run.missing
    assert [call.step for call in run.calls if call.scope == "manual_tensor_0"] == [1]
