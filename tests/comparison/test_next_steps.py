"""Commands that take an answer further: chosen for it, and accepted by the command line."""

import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from handmade import net
from whence import api, cli
from whence.comparison.answer.next_steps import MOST, next_steps
from whence.records import Note, RunInfo
from whence.records.marks import STOPPED
from whence.report.answer import answer
from whence.results import NextStep


def scaled(name, factor=1.5):
    return lambda n, value: value * factor if n == name else value


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def captured(path, *, command=(), cwd="", **changes):
    """A run made by hand as `whence run` would have captured it."""
    run = net(**changes)
    Path(path).mkdir(parents=True, exist_ok=True)
    run.path, run.info = (
        path,
        RunInfo(command=command, cwd=cwd, interpreter="python" if command else ""),
    )
    return run


def accepted(command):
    """The subcommands of a line, each parsed as the command line parses it."""
    names = []
    for part in re.sub(r"^\(cd \S+ && (.*)\)$", r"\1", command).split(" && "):
        assigned = re.match(r"([A-Z_]+=('[^']*'|\S*) )*", part.strip("()"))
        program, name, *words = shlex.split(part.strip("()")[assigned.end() :])
        if program == "cd":
            continue
        assert program == "whence"
        subcommand = cli.group.get_command(None, name)
        subcommand.make_context(name, words)
        names.append(name)
    return names


def steps_of(reference, target, **options):
    result = api.compare(reference, target, **options)
    assert len(result.next) <= MOST
    for step in result.next:
        assert accepted(step.command), step
        assert step.decides
        assert step.fill_in == bool(re.search(r"\b[A-Z_]{3,}\b(?!=)", step.command)), step
    return result.next


def test_nothing_follows_an_answer_same():
    assert steps_of(net(), net()) == ()


def test_a_parameter_is_shown_on_both_sides():
    steps = steps_of(captured("runs/a"), captured("runs/b", change=scaled("w2", 2)))
    assert [s.command for s in steps[:2]] == [
        "whence show runs/a fc2:param.weight",
        "whence show runs/b fc2:param.weight",
    ]


def test_a_module_is_captured_operator_by_operator_with_its_own_command():
    steps = steps_of(
        captured("runs/a", command=("python", "infer.py")),
        captured("runs/b", command=("python", "infer.py", "--fast path"), change=scaled("h")),
    )
    assert steps[0].command == (
        "whence run --level op -o runs/a-op -- python infer.py && "
        "whence run --level op -o runs/b-op -- python infer.py '--fast path' && "
        "whence compare runs/a-op runs/b-op"
    )
    assert steps[0].decides == "which operator inside fc1 differs"
    assert steps[1].command == "whence locate"


def test_a_program_that_ran_elsewhere_runs_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (step, *_) = steps_of(
        captured("a", command=("python", "x.py"), cwd="/else where"),
        captured("b", command=("python", "x.py"), cwd=str(tmp_path), change=scaled("h")),
    )
    assert f"(cd '/else where' && whence run --level op -o {tmp_path / 'a-op'} -- " in step.command


def test_a_command_that_nobody_recorded_is_to_be_filled_in():
    (*_, step) = steps_of(captured("a"), captured("b", change=scaled("h")))
    assert step.fill_in and step.command.count("-- COMMAND") == 2


def test_runs_without_a_common_name():
    strange = captured("b", names=("p", "q"), root="Other", drop=("fc1",))
    steps = next_steps(
        msgspec.structs.replace(
            result := api.compare(captured("a"), strange),
            status="undecided",
            findings=(),
            coverage=msgspec.structs.replace(result.coverage, paired=0),
        ),
        captured("a"),
        strange,
    )
    assert [s.command for s in steps[:2]] == [
        "whence compare a b --match order",
        "whence align a b -o map.yaml",
    ]
    for step in steps:
        assert accepted(step.command)


def test_differing_inputs_are_seeded_and_shown():
    reference = captured("a", command=("python", "infer.py"))
    target = captured("b", command=("python", "infer.py"), change=scaled("x", 2))
    steps = steps_of(reference, target)
    assert [s.command for s in steps[:2]] == [
        "whence show a Net:input.1",
        "whence show b Net:input.1",
    ]
    assert steps[2].command.startswith("whence run --seed 0 -o a-seed -- python infer.py && ")


@pytest.mark.torch
def test_inputs_of_another_shape_are_not_seeded(tmp_path):
    torch = pytest.importorskip("torch")
    for name, shape in (("ref", (3, 4)), ("tgt", (2, 7))):
        net = torch.nn.Tanh()
        with api.capture(net, tmp_path / name):
            net(torch.rand(shape))
    steps = steps_of(tmp_path / "ref", tmp_path / "tgt")
    assert [shlex.split(s.command)[1] for s in steps] == ["show", "show"]


def test_statistics_alone_ask_for_elements():
    steps = steps_of(
        captured("a", keep=False, command=("python", "x.py")),
        captured("b", keep=False, command=("python", "x.py"), change=scaled("h", 2)),
    )
    assert steps[0].command.startswith("whence run --keep full -o a-full -- python x.py && ")


@pytest.mark.parametrize("output", ["cmp", "a folder"])
def test_the_folder_of_a_comparison_is_named_once_it_is_known(output, tmp_path):
    command = "python", "x.py"
    result = api.compare(
        captured("a", command=command), captured("b", command=command, change=scaled("h"))
    )
    named = result.in_folder(output)
    assert f"whence locate {shlex.quote(output)}   # " in answer(named)
    assert named.in_folder("elsewhere") == named
    assert NextStep("whence show a", "").about("cmp").command == "whence show a"
    api.write(result, tmp_path / "cmp")
    assert f"whence locate {tmp_path / 'cmp'}" in (tmp_path / "cmp" / "summary.json").read_text()
    assert api.load_comparison(tmp_path / "cmp").next[1].command.startswith("whence locate ")


def test_names_that_are_taken_get_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").touch()
    (tmp_path / "a-op").mkdir()
    command = "python", "x.py"
    steps = steps_of(
        captured("a", command=command), captured("b", command=command, change=scaled("h"))
    )
    assert steps[0].command.endswith("whence compare a-op-2 b-op")
    assert steps[-1].command == "whence report -o report-2.html"


def test_a_command_that_failed_alone_is_no_pass_and_is_repeated():
    def run(path, code):
        made = captured(path, command=("python", "x.py"))
        made.info = msgspec.structs.replace(made.info, settings={"exit_code": code})
        return made

    assert api.compare(run("a", 1), run("b", 1)).status == "same"
    for codes in ((0, 1), (1, 0)):
        result = api.compare(run("a", codes[0]), run("b", codes[1]))
        assert result.status == "undecided"
        side = "target" if codes[1] else "reference"
        assert f"the {side}'s command failed (exit code 1)" in result.headline
        path = "b" if codes[1] else "a"
        assert result.next[0].command == f"whence run -o {path}-again -- python x.py"


@pytest.mark.parametrize("stopped", ["reference", "target", "both"])
def test_a_capture_that_stopped_while_its_program_went_on_is_no_pass(stopped):
    """Both may have stopped at one place: what came later was compared in neither."""
    runs = {side: captured(side) for side in ("reference", "target")}
    for side, run in runs.items():
        if stopped in (side, "both"):
            run.notes = (Note(STOPPED, "No space left on device"),)
    result = api.compare(*runs.values())
    assert (result.status, result.findings) == ("undecided", ())
    whose = "neither run is" if stopped == "both" else f"the {stopped} is not"
    assert f"{whose} whole: the capture stopped before its program ended" in result.headline
    assert result.next == ()
    for run in runs.values():
        run.info = RunInfo(command=("python", "x.py"), interpreter="python")
    step = api.compare(*runs.values()).next[0]
    path = "reference" if stopped == "both" else stopped
    assert step.command == f"whence run -o {path}-again -- python x.py"
    assert "No space left on device" in result.headline


def test_dumps_without_inputs_are_captured_instead_of_replayed(tmp_path, monkeypatch):
    """A model would have nothing to run on. What is compared is what was captured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "reference").mkdir(parents=True)

    def dump(change=None):
        run = net(change=change)
        run.info = RunInfo(kind="npy")
        calls = [
            msgspec.structs.replace(c, refs=tuple(r for r in c.refs if r.slot.startswith("output")))
            for c in run.calls
        ]
        run.calls = tuple(calls)
        return run

    result = api.compare(dump(), dump(lambda n, v: v * 1.01 if n in ("h", "y") else v))
    undecided = msgspec.structs.replace(result, status="undecided", findings=())
    steps = next_steps(undecided, dump(), dump())
    assert steps[0].command == (
        "whence run -o runs/reference-2 -- COMMAND && whence run -o runs/target -- COMMAND && "
        "whence compare runs/reference-2 runs/target"
    )
    assert steps[0].fill_in
    assert not any("--model" in s.command for s in steps)


def recorded(path, environment, **changes):
    run = captured(path, command=("python", "x.py"), **changes)
    run.info = msgspec.structs.replace(
        run.info, environment=environment, interpreter=sys.executable
    )
    return run


def test_the_variables_and_the_python_of_a_run_are_in_its_line(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    same = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "HF_HUB_OFFLINE": "***"}
    step = steps_of(
        recorded("a", {**same, "PYTHONPATH": "old release"}),
        recorded("b", {**same, "PYTHONPATH": "new"}, change=scaled("h")),
    )[0]
    first, second, _ = step.command.split(" && ")
    assert first.startswith("PYTHONPATH='old release' whence run --level op")
    assert second.startswith("PYTHONPATH=new whence run --level op")
    assert second.endswith(f"-- {sys.executable} x.py")


def test_a_search_path_of_here_is_not_that_of_a_run_without_one(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    run = (
        recorded("a", {"OMP_DYNAMIC": "x"}),
        recorded("b", {"OMP_DYNAMIC": "x"}, change=scaled("h")),
    )
    assert "PYTHONPATH='' OMP_DYNAMIC=x whence run" in steps_of(*run)[0].command


def test_no_line_names_a_run_without_a_folder(tmp_path):
    """Labels of one program and arrays of this process lie in none."""
    reference, target = captured("a"), captured("b", change=scaled("w2", 2))
    target.path = "a/run (target labels)"
    commands = [step.command for step in steps_of(reference, target)]
    assert commands
    assert not any("target labels" in command for command in commands)


def test_a_line_with_words_to_fill_in_comes_last_and_does_not_look_typed():
    result = api.compare(captured("a"), captured("b", change=scaled("h")))
    assert [step.fill_in for step in result.next] == sorted(step.fill_in for step in result.next)
    lines = [line for line in answer(result).splitlines() if "COMMAND" in line]
    assert lines
    assert all("# fill in: " in line for line in lines)


@pytest.mark.torch
def test_logits_alone_ask_for_the_layers_up_to_the_first_bad_token(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("sys.argv", ["-c"])
    for name, factor in (("ref", 1.0), ("tgt", 1.2)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)).eval()
        with torch.no_grad(), api.capture(net, tmp_path / name, level="logits"):
            ids = torch.tensor([[1, 2]])
            for token in range(4):
                if token == 2:
                    net[1].weight *= factor
                ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)
    lines = [s.command for s in steps_of(tmp_path / "ref", tmp_path / "tgt")]
    (again,) = [line for line in lines if "--keep full" in line]
    assert again.count("--keep full --steps :3 -o ") == 2
    for name in ("ref", "tgt"):
        of_command = '{"command": ["python", "ask.py"], "interpreter": "/usr/bin/python", '
        info = tmp_path / name / "run.json"
        info.write_text(of_command + info.read_text().replace('"command"', '"was"').lstrip("{ \n"))
    lines = [s.command for s in steps_of(tmp_path / "ref", tmp_path / "tgt")]
    assert f"whence compare {tmp_path / 'ref'} {tmp_path / 'tgt'} --layers layers" in lines
