"""`whence.locate`: what the error at the output is made of, against an oracle computed by hand;
commands that are run again.
"""

import json
import re
import shutil
import textwrap
from collections import OrderedDict

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import warm
import whence
from whence.errors import CaptureError, OutputExists, UnreadableRun, UsageError
from whence.instrument.launch import interpreter, redaction
from whence.records import MemoryRun
from whence.report.locate import location
from whence.workflows.locate.locate import output_errors
from whence.workflows.rerun import Command, recorded

pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def net():
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 8),
    ]
    # Names without numbers: faults of numbered siblings are one finding.
    return nn.Sequential(OrderedDict(zip("abcdefg", layers))).eval()


GIVEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def use(model):
    with torch.no_grad():
        model(GIVEN)
        model(GIVEN * 0.5)


def broken():
    model = net()
    with torch.no_grad():
        model[0].bias.add_(0.02)
        model[4].weight.mul_(1.01)
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("locate") / "ref"
    with whence.capture(model := net(), path):
        use(model)
    return path


def by_hand(model, patched=None):
    """Outputs in float64; patched: a model whose layers of these numbers are used instead."""
    other, numbers = patched or (None, ())
    outs = []
    for scale in (1.0, 0.5):
        h = GIVEN.double() * scale
        for i in range(7):
            layer = (other if i in numbers else model)[i]
            h = (
                torch.tanh(h)
                if isinstance(layer, nn.Tanh)
                else h @ layer.weight.detach().double().T + layer.bias.detach().double()
            )
        outs.append(h.numpy())
    return np.concatenate(outs)


def rel(a, b):
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def test_two_faults_are_found_in_turn_and_their_shares_are_those_of_float64(reference):
    said = []
    result = whence.locate(reference, model=broken(), use=use, tell=said.append)
    # A layer whose input is the reference's and that is patched computes as the reference does.
    right, first, both = (
        by_hand(net()),
        by_hand(broken(), (net(), (0,))),
        by_hand(broken(), (net(), (0, 4))),
    )
    errors = [rel(right, by_hand(broken())), rel(right, first), rel(right, both)]
    assert (result.status, [r.name for r in result.rounds]) == ("different", ["a", "e"])
    assert [r.finding.cause for r in result.rounds] == ["parameter", "parameter"]
    assert result.error == pytest.approx(errors[0], rel=1e-4)
    for i, one in enumerate(result.rounds):
        assert (one.calls, one.refused) == (2, ())
        assert one.before == pytest.approx(errors[i], rel=1e-4, abs=1e-6)
        assert one.after == pytest.approx(errors[i + 1], rel=1e-4, abs=1e-6)
        assert one.share == pytest.approx(
            (errors[i] ** 2 - errors[i + 1] ** 2) / errors[0] ** 2, rel=1e-3
        )
    assert sum(r.share for r in result.rounds) == pytest.approx(1, abs=1e-6)
    assert [r.remaining for r in result.rounds] == [("e",), ()]
    assert (result.remaining, result.runs) == ((), 3)
    assert {s[:2] for s in result.rounds[0].steps} == {("Sequential", 0), ("Sequential", 1)}
    assert any(s.startswith("patching a") for s in said)
    text = location(result)
    assert text.startswith("OUTPUT ERROR")
    assert "no finding remains" in text
    assert "100% of the squared error explained" in text


def test_most(reference):
    result = whence.locate(reference, model=broken(), use=use, most=1)
    assert ([r.name for r in result.rounds], result.remaining) == (["a"], ("e",))
    assert "still at fault   e" in location(result)


def test_calls_that_the_user_names(reference):
    result = whence.locate(reference, model=broken(), use=use, patch=["e", "a@1"])
    assert [r.name for r in result.rounds] == ["e", "a@1"]
    assert [r.calls for r in result.rounds] == [2, 1]
    by_step = {s[1]: s[2:] for s in result.rounds[1].steps}
    # Layer e is right already, so with layer a patched at step 1 nothing is left there; at step 0
    # nothing changed.
    assert by_step[0][0] == by_step[0][1]
    assert by_step[1][1] < 1e-6


def test_search_names_the_call_where_the_error_arises(reference):
    one = net()
    with torch.no_grad():
        one[4].weight.mul_(1.05)
    result = whence.locate(reference, model=one, use=use, search=True)
    assert result.rounds[-1].name == "e"
    assert result.rounds[-1].after == 0
    assert result.rounds[-1].share == pytest.approx(1, abs=1e-6)
    # 7 modules: the target, all of them, and at most ceil(log2 7) halvings and their neighbours.
    assert result.runs <= 7


def test_search_in_the_roots_own_code(tmp_path):
    class Own(nn.Module):
        def __init__(self, factor):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.factor = nn.Linear(16, 4), factor

        def forward(self, x):
            return self.fc(x) * self.factor

    with whence.capture(model := Own(1.0), tmp_path / "ref"):
        use(model)
    result = whence.locate(tmp_path / "ref", model=Own(1.1), use=use, search=True)
    assert "root's own code" in result.rounds[0].notes[0]
    assert result.rounds[0].share == pytest.approx(0)


def test_siblings_are_one_finding_and_one_patch(tmp_path):
    model = nn.Sequential(*(nn.LayerNorm(16, eps=1e-5) for _ in range(3))).eval()
    with whence.capture(model, tmp_path / "ref"):
        use(model)
    for norm in model:
        norm.eps = 1e-2
    result = whence.locate(tmp_path / "ref", model=model, use=use)
    assert [(r.name, r.points, r.calls) for r in result.rounds] == [
        ("0 and 2 like it", ("0", "1", "2"), 6)
    ]
    assert result.left == 0


def test_nothing_to_explain(reference):
    result = whence.locate(reference, model=net(), use=use)
    assert (result.status, result.error, result.rounds) == ("same", 0.0, ())
    assert "there is no error to explain" in location(result)


def test_nothing_is_left_but_what_was_asked_for(reference, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    whence.locate(reference, model=broken(), use=use, most=1)
    assert list((tmp_path / "tmp").iterdir()) == []
    whence.locate(reference, model=broken(), use=use, most=1, keep=tmp_path / "kept")
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"target", "patched-1"}
    assert whence.open_run(str(tmp_path / "kept" / "patched-1")).ended == ""
    with pytest.raises(OutputExists, match="new or empty folder"):
        whence.locate(reference, model=broken(), use=use, keep=tmp_path / "kept")


def test_a_run_that_does_not_end_is_removed(reference, tmp_path):
    calls = []

    def interrupted(model):
        calls.append(1)
        use(model)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whence.locate(reference, model=broken(), use=interrupted, keep=tmp_path / "kept")
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"target"}


def test_what_cannot_be_meant(reference, tmp_path):
    for given, said in (
        ({}, r"which program is the target\?.*whence locate"),
        ({"model": net()}, "or model with use"),
        ({"command": ["true"], "patch": ["a"], "search": True}, "give one of them"),
        ({"command": ["true"], "most": 0}, "at least one"),
        ({"command": ["true"], "patch": ["9"]}, "no output of a call 9"),
    ):
        with pytest.raises(UsageError, match=said):
            whence.locate(reference, **given)
    with pytest.raises(UnreadableRun, match="no run at"):
        whence.locate(reference, tmp_path / "nowhere")


def test_another_input_is_told(reference):
    with pytest.raises(UsageError, match="not asked what the reference was"):
        whence.locate(reference, model=net(), use=lambda m: m(GIVEN + 1))


# ---- commands

SCRIPT = """
    import sys, torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).eval()
    x = torch.randn(4, 16)
    if "bad" in sys.argv:
        with torch.no_grad():
            model[0].weight.mul_(1.1)
    if "fail" in sys.argv:
        print("one line before", file=sys.stderr)
        raise SystemExit(7)
    with torch.no_grad():
        print(model(x).sum().item())
    if "odd" in sys.argv:
        raise SystemExit(5)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from whence import api

    folder = tmp_path_factory.mktemp("commands")
    (folder / "infer.py").write_text(textwrap.dedent(SCRIPT))
    for name in ("ref", "bad"):
        command = [warm.TORCH, str(folder / "infer.py"), *([] if name == "ref" else [name])]
        assert api.run_command(command, str(folder / name), tell=lambda line: None) == 0
    whence.compare(folder / "ref", folder / "bad", output=folder / "cmp")
    return folder


def test_a_comparison_is_enough(place, capfd):
    result = whence.locate(place / "cmp")
    assert [(r.name, r.calls, r.share) for r in result.rounds] == [
        ("0", 1, pytest.approx(1, abs=1e-6))
    ]
    assert (result.runs, result.command[-1]) == (1, "bad")
    assert capfd.readouterr().out == ""  # what the command prints is not the answer


def test_a_comparison_holds_both_runs(place):
    with pytest.raises(UsageError, match="one too many"):
        whence.locate(place / "cmp", place / "bad")


def test_a_run_that_was_made_in_a_folder_that_is_gone(place, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(place / "bad", moved)
    info = json.loads((moved / "run.json").read_text())
    (moved / "run.json").write_text(json.dumps({**info, "cwd": str(tmp_path / "gone")}))
    with pytest.raises(UnreadableRun, match="gone, which is not there"):
        whence.locate(place / "ref", moved)
    (moved / "run.json").write_text(
        json.dumps({**info, "command": ["python", "x.py", "--token", "***"]})
    )
    with pytest.raises(UnreadableRun, match="had secrets"):
        whence.locate(place / "ref", moved)
    (moved / "run.json").write_text(json.dumps({**info, "command": []}))
    with pytest.raises(UnreadableRun, match="does not say which command made it"):
        whence.locate(place / "ref", moved)


def test_a_command_that_fails_is_told_with_its_last_words(place, tmp_path):
    command = [warm.TORCH, str(place / "infer.py"), "fail"]
    with pytest.raises(CaptureError, match=r"ended with exit code 7.*\n.*one line before"):
        whence.locate(place / "ref", command=command, keep=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_command_may_end_with_the_code_that_a_recorded_run_had(place, tmp_path):
    command = [warm.TORCH, str(place / "infer.py"), "bad", "odd"]
    with pytest.raises(CaptureError, match="ended with exit code 5"):
        whence.locate(place / "ref", command=command)
    shutil.copytree(place / "ref", tmp_path / "ref")
    info = json.loads((tmp_path / "ref" / "run.json").read_text())
    (tmp_path / "ref" / "run.json").write_text(
        json.dumps({**info, "settings": {**info["settings"], "exit_code": 5}})
    )
    assert [r.name for r in whence.locate(tmp_path / "ref", command=command, most=1).rounds] == [
        "0"
    ]


@pytest.mark.parametrize(
    ("name", "was", "words"),
    [
        ("torch", "1.0.0", rf"torch {re.escape(torch.__version__)}, was 1\.0\.0\. Install what"),
        ("python", "3.0.1", r"python 3\.\d+\.\d+, was 3\.0\.1"),
        ("tensorflow", "2.1", None),
        ("transformers", None, None),
    ],
)
def test_a_command_is_not_run_with_other_libraries_than_it_had(
    place, tmp_path, monkeypatch, name, was, words
):
    shutil.copytree(place / "bad", tmp_path / "bad")
    info = json.loads((tmp_path / "bad" / "run.json").read_text())
    versions = {k: v for k, v in {**info["versions"], name: was}.items() if v is not None}
    (tmp_path / "bad" / "run.json").write_text(json.dumps({**info, "versions": versions}))
    if words is None:  # no library that the program loads, or one whose version was not recorded
        assert recorded(whence.open_run(tmp_path / "bad").info, "bad").command[-1] == "bad"
        return
    monkeypatch.setattr(Command, "capture", lambda *_, **__: pytest.fail("the program was run"))
    with pytest.raises(UsageError, match=words):
        whence.locate(place / "ref", tmp_path / "bad")


def test_a_command_runs_with_the_search_path_that_it_had(place, monkeypatch):
    info = whence.open_run(place / "bad").info
    environment = {k: v for k, v in info.environment.items() if k != "PYTHONPATH"}
    info = msgspec.structs.replace(info, environment=environment)
    monkeypatch.setenv("PYTHONPATH", "of here")
    assert "PYTHONPATH" not in recorded(info, "bad").environment()
    given = redaction.environment({"PYTHONPATH": "a release", "HOME": "x"})
    assert given == {"PYTHONPATH": "a release"}
    changed = msgspec.structs.replace(info, environment={**info.environment, **given})
    assert recorded(changed, "bad").environment()["PYTHONPATH"] == "a release"


def test_many_changed_libraries_are_counted(place):
    info = whence.open_run(place / "bad").info
    others = dict.fromkeys(["python", *interpreter.PACKAGES], "0.1")
    changed = msgspec.structs.replace(info, versions=others)
    with pytest.raises(UsageError, match=rf"and {len(others) - 3} more\. Install"):
        recorded(changed, "bad")


# ---- patches that locate nothing


class Wrapped(nn.Module):
    """A model of one container. calls_fc: or its layer is computed without being called."""

    def __init__(self, factor=1.0, calls_fc=True, repeats=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(OrderedDict(fc=nn.Linear(16, 16), act=nn.Tanh()))
        self.factor, self.calls_fc, self.repeats, self.count = factor, calls_fc, repeats, 0

    def forward(self, x):
        self.count += 1
        x = x * (self.factor if self.repeats else self.factor + self.count)
        fc, act = self.inner
        if not self.calls_fc:
            return act(nn.functional.linear(x, fc.weight, fc.bias))
        return self.inner(x)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    path = tmp_path_factory.mktemp("wrapped") / "ref"
    with whence.capture(model := Wrapped(), path):
        use(model)
    return path


def test_a_container_that_is_the_whole_model_locates_nothing(wrapped):
    (one,) = whence.locate(wrapped, model=Wrapped(1.1), use=use, patch=["inner"]).rounds
    assert (one.after, one.calls) == (0, 2)
    assert one.notes[0] == (
        "it is the whole model: it returns what the model returns, so patching it explains "
        "everything and locates nothing"
    )


def test_a_layer_that_returns_what_the_model_returns_is_told(wrapped):
    (one,) = whence.locate(wrapped, model=Wrapped(1.1), use=use, patch=["inner.act"]).rounds
    assert one.after == 0
    assert one.notes[0].startswith("it returns what the model returns, so patching it takes away")


def test_a_call_in_the_middle_is_no_whole_model(wrapped):
    (one,) = whence.locate(wrapped, model=Wrapped(1.1), use=use, patch=["inner.fc"]).rounds
    assert (one.calls, one.notes) == (2, ())


@pytest.mark.parametrize("repeats", [True, False])
def test_nothing_is_credited_to_a_patch_that_was_applied_to_nothing(wrapped, repeats):
    model = Wrapped(1.1, calls_fc=False, repeats=repeats)
    result = whence.locate(wrapped, model=model, use=use, patch=["inner.fc"])
    (one,) = result.rounds
    assert (one.calls, one.share) == (0, None)
    (note,) = result.notes
    assert note.startswith("inner.fc: the patch was applied to nothing, so nothing is credited")
    assert ("the program does not repeat itself" in note) is not repeats
    assert "nothing was patched, so nothing is credited to it" in location(result)


# ---- models that return a cache


class Kept:
    """Keys of all tokens so far; the next step has one of its own."""

    def __init__(self, *keys):
        self.keys = torch.cat(keys)


class Caching(nn.Module):
    """hidden: the name under which it returns what it computed."""

    def __init__(self, factor, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.factor, self.hidden = nn.Linear(16, 16), factor, hidden

    def forward(self, x, past_key_values):
        hidden = self.fc(x) * self.factor
        kept = Kept(past_key_values.keys, hidden * 100 * self.factor)
        return {self.hidden: hidden, "past_key_values": kept}


class Generating(nn.Module):
    def __init__(self, factor=1.0, hidden="hidden"):
        super().__init__()
        self.model, self.head = Caching(factor, hidden), nn.Linear(16, 8)

    def forward(self, x, past_key_values):
        out = self.model(x, past_key_values)
        return {
            "logits": self.head(out[self.model.hidden]),
            "past_key_values": out["past_key_values"],
        }


def generate(model):
    kept = Kept(torch.zeros(1, 16))
    with torch.no_grad():
        for scale in (1.0, 0.5):
            kept = model(GIVEN * scale, past_key_values=kept)["past_key_values"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "ref"
    with whence.capture(model := Generating(), path):
        generate(model)
    return path


def test_a_cache_is_no_part_of_the_error_and_stops_no_patch(generated):
    result = whence.locate(generated, model=Generating(1.1), use=generate, patch=["model"])
    right, wrong = (
        np.concatenate(
            [
                model.head(model.model.fc(GIVEN * scale) * model.model.factor).detach().numpy()
                for scale in (1.0, 0.5)
            ]
        )
        for model in (Generating(), Generating(1.1))
    )
    assert result.error == pytest.approx(rel(right, wrong), rel=1e-4)
    (one,) = result.rounds
    assert (one.calls, one.after, one.refused) == (2, 0, ())
    assert one.notes[0] == (
        "model: output.past_key_values.keys could not be replaced, only what else it returns"
    )


def test_nothing_is_run_for_a_patch_that_can_replace_nothing(generated):
    model = Generating(1.1, hidden="other")
    result = whence.locate(generated, model=model, use=generate, patch=["model", "model.fc"])
    assert [r.calls for r in result.rounds] == [0, 2]
    assert result.runs == 2
    assert result.rounds[0].refused == (
        "model returns output.hidden in the reference and output.other in the target, so no run "
        "was made for it",
    )
    assert result.rounds[0].before == result.rounds[0].after


# ---- the error at the output


def run_of(path, model, given, **options):
    with torch.no_grad(), whence.capture(model, path, **options):
        model(given)
    return whence.open_run(str(path))


def test_output_errors_are_taken_in_float64(tmp_path):
    class Two(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift = shift

        def forward(self, x):
            return {"a": x + self.shift, "b": x * 100, "tokens": x.argmax(-1)}

    left, right = run_of(tmp_path / "a", Two(0.0), GIVEN), run_of(tmp_path / "b", Two(0.5), GIVEN)
    (found,) = output_errors(left, right).values()
    a, b = GIVEN.double().numpy(), (GIVEN + 0.5).double().numpy()
    assert found.error == pytest.approx(np.linalg.norm(b - a), rel=1e-6)
    assert found.norm == pytest.approx(
        np.hypot(np.linalg.norm(a), np.linalg.norm(a * 100)), rel=1e-6
    )
    assert found.same_question


def test_output_errors_that_are_not_defined(tmp_path):
    class One(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return torch.where(x == x.max(), self.value, x)

    left = run_of(tmp_path / "a", One(1.0), GIVEN)
    (found,) = output_errors(left, run_of(tmp_path / "b", One(float("nan")), GIVEN)).values()
    assert found.error is None
    (found,) = output_errors(left, run_of(tmp_path / "c", One(1.0), GIVEN, keep="stats")).values()
    assert found.error is None
    assert output_errors(left, MemoryRun((), (), {})) == {}
    # Equal infinities on both sides (a mask) are not an error.
    masked = [run_of(tmp_path / f"m{i}", One(float("-inf")), GIVEN) for i in range(2)]
    (found,) = output_errors(*masked).values()
    assert found.error == 0


def test_steps_with_other_tokens_answer_another_question(tmp_path):
    model = nn.Embedding(8, 4)
    left = run_of(tmp_path / "a", model, torch.tensor([[1, 2]]))
    right = run_of(tmp_path / "b", model, torch.tensor([[1, 3]]))
    assert [e.same_question for e in output_errors(left, right).values()] == [False]
    assert [e.same_question for e in output_errors(left, left).values()] == [True]
