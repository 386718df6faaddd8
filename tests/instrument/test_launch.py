"""`whence run` from outside: real processes, a stand-in for torch, and an attach function that
writes one call.
"""

import importlib.util
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from whence import errors, extras, store
from whence.errors import CaptureError
from whence.instrument.framework import set_determinism
from whence.instrument.launch import interpreter, outcome, redaction
from whence.instrument.launch import launcher as launch
from whence.instrument.launch.child_process import EndedProcess
from whence.instrument.options import CaptureOptions, make
from whence.records import Call, MemoryRun, Note, RunInfo, Step
from whence.store import open_run

DRIVER = """
import json, sys
from whence import errors, store
from whence.instrument.launch import launcher as launch
from whence.instrument.options import make

run, options, command = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
try:
    code = launch.launch(
        command, run, make(**options), attach="stand_in:attach",
        runs=launch.RunStore(
            lambda path, info, force: store.create(path, info, force=force),
            store.update_info, store.open_run,
            lambda path, also, folder: store.discard(path, also=also, folder=folder),
            store.reasons, lambda path, also, force: store.SetAside(path, also=also, force=force),
        ),
        terminal=launch.Terminal(lambda line: print(line, file=sys.stderr, flush=True)),
    )
except errors.WhenceError as err:
    print(f"whence: {err}", file=sys.stderr)
    code = err.exit_code
sys.exit(code)
"""

STAND_IN = """
import os
from whence import store
from whence.records import Call, Ref, Step

def attach(options, run, framework):
    if os.environ.get("STAND_IN") == "fails":
        raise RuntimeError("no listener\\nfor this torch")
    if os.environ.get("STAND_IN") == "silent":
        return
    writer = store.Writer(run, 0)
    record = writer.record("float32", (0,), None, b"", None, None, why="stand-in")
    writer.call(Call(0, "", "model", 0, 0, op_type="Tiny", refs=(Ref("output.0", record),)))
    writer.step(Step("model", 0, 0, True))
    writer.close()
"""

FAKE_TORCH = """
import types
seeds, algorithms = [], []
manual_seed = seeds.append
def use_deterministic_algorithms(on, warn_only=False): algorithms.append((on, warn_only))
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(deterministic=False, benchmark=True))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the driver, and a library folder on PYTHONPATH with a fake torch and the attach
    function.
    """
    library = tmp_path / "library"
    (library / "torch").mkdir(parents=True)
    (library / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (library / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "driver.py").write_text(DRIVER)
    work = tmp_path / "work"
    work.mkdir()
    return Place(tmp_path, work, library)


class Place:
    def __init__(self, top, work, library):
        self.top, self.work, self.library = top, work, library
        self.run = top / "run"

    def environment(self, **more):
        return {
            **os.environ,
            "PYTHONPATH": str(self.library),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def argv(self, command, options):
        return [
            sys.executable,
            str(self.top / "driver.py"),
            str(self.run),
            json.dumps(options),
            *map(str, command),
        ]

    def launch(self, *command, options=None, env=None, **more):
        return subprocess.run(
            self.argv(command, options or {}),
            env=self.environment(**(env or {})),
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=120,
            **more,
        )

    def start(self, *command, env=None, **more):
        return subprocess.Popen(
            self.argv(command, {}),
            env=self.environment(**(env or {})),
            cwd=self.work,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def script(self, text, name="script.py", mode=0o644):
        path = self.work / name
        path.write_text(textwrap.dedent(text))
        path.chmod(mode)
        return path

    def info(self):
        return json.loads((self.run / "run.json").read_text())


SUMMARY = r"whence: captured 1 step, 1 call, [\d.]+ k?B in "


# -- what is captured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "import torch"),
        (sys.executable, "-u", "-X", "utf8", "script.py"),
        (sys.executable, "-m", "script"),
        ("bash", "-c", f"cd /; {sys.executable} $OLDPWD/script.py"),
        ("bash", "run.sh"),
        ("env", "A=1", sys.executable, "script.py"),
        ("./tool",),
        (
            sys.executable,
            "-c",
            "import os, sys; os.chdir('/'); os.execv(sys.executable, [sys.executable, '-c', "
            "'import torch'])",
        ),
        (
            sys.executable,
            "-c",
            "import importlib.util; importlib.util.find_spec('torch'); import importlib; "
            "importlib.import_module('torch')",
        ),
        (sys.executable, "spawn.py", "spawn"),
        (sys.executable, "spawn.py", "fork"),
    ],
    ids=[
        "-c",
        "script",
        "-m",
        "shell",
        "bash run.sh",
        "env",
        "console script",
        "chdir and exec",
        "find_spec first",
        "spawn",
        "fork",
    ],
)
def test_every_way_to_start_a_python_is_captured(place, command):
    place.script("import torch\n")
    place.script(f"#!{sys.executable}\nimport torch\n", "tool", 0o755)
    place.script(f"set -e\ntrue\n{sys.executable} script.py\n", "run.sh")
    place.script(
        """
        import multiprocessing, sys
        def work(): import torch
        if __name__ == "__main__":
            process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
            process.start()
            process.join()
            sys.exit(process.exitcode)
        """,
        "spawn.py",
    )
    done = place.launch(*command)
    assert done.returncode == 0, done.stderr
    assert re.search(SUMMARY, done.stderr), done.stderr
    assert len(open_run(place.run).calls) == 1
    assert not (place.run / launch.ERRORS).exists()
    assert not (place.run / launch.LOG).exists()


def test_pytest_runs_under_capture(place):
    place.script("def test_it():\n    import torch\n    assert torch.manual_seed\n", "test_it.py")
    done = place.launch(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SUMMARY, done.stderr)


def test_the_program_sees_nothing_of_it(place):
    """Same sys.path, modules, meta path (after torch) and output as without."""
    look = place.script("""
        import sys, torch
        print(sys.path, torch.__spec__.loader.__class__.__name__, vars(torch.__spec__.loader), sys.argv)
        print(sorted(type(f).__name__ for f in sys.meta_path), __name__)
    """)
    bare = subprocess.run(
        [sys.executable, look, "-o", "x"],
        env=place.environment(),
        cwd=place.work,
        capture_output=True,
        text=True,
        check=True,
    )
    done = place.launch(sys.executable, look, "-o", "x")
    assert done.returncode == 0, done.stderr
    # What is installed and not imported yet is still waited for.
    waits = "'Watcher', " if importlib.util.find_spec("paddle") is not None else ""
    assert done.stdout.replace(waits, "", 1) == bare.stdout
    assert len(done.stderr.splitlines()) == 1


def test_an_import_that_fails_can_be_tried_again(place):
    (place.library / "torch" / "__init__.py").write_text(
        "import os\nif os.environ.pop('FAIL', ''): raise ImportError('first')\n" + FAKE_TORCH
    )
    done = place.launch(
        sys.executable,
        "-c",
        "try:\n    import torch\nexcept ImportError: import torch\n",
        env={"FAIL": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SUMMARY, done.stderr)


# -- standard streams, codes, signals ---------------------------------------------------------------------------------


def test_stdin_stdout_stderr_and_folder_are_kept(place):
    script = place.script("""
        import os, sys, torch
        print(sys.stdin.read().upper(), os.getcwd())
        print("complaint", file=sys.stderr)
    """)
    done = place.launch(sys.executable, script, input="hello")
    assert done.stdout == f"HELLO {place.work}\n"
    assert done.stderr.splitlines()[0] == "complaint"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 77, 255])
def test_the_exit_code_is_the_commands(place, code):
    assert (
        place.launch(sys.executable, "-c", f"import torch, sys; sys.exit({code})").returncode
        == code
    )
    assert place.info()["settings"]["exit_code"] == code


def test_a_program_that_raises_keeps_its_code(place):
    done = place.launch(sys.executable, "-c", "import torch; 1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_death_by_a_signal(place):
    assert (
        place.launch(sys.executable, "-c", "import torch, os; os.kill(os.getpid(), 9)").returncode
        == 137
    )


def test_open_descriptors_reach_the_command(place):
    read, write = os.pipe()
    done = place.launch(
        sys.executable, "-c", f"import torch, os; os.write({write}, b'here')", pass_fds=[write]
    )
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert os.read(read, 10) == b"here"
    os.close(read)


COUNTING = """
    import signal, sys, time, torch
    seen = []
    signal.signal(signal.{name}, lambda n, frame: seen.append(n))
    print("ready", flush=True)
    until = time.monotonic() + 300
    while not seen and time.monotonic() < until: time.sleep(0.01)
    time.sleep(1.0)
    print("seen", len(seen), flush=True)
    sys.exit(40 + len(seen))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("to", ["launcher", "group"])
def test_a_signal_reaches_the_child_once(place, name, to):
    script = place.script(COUNTING.format(name=name))
    process = place.start(sys.executable, script, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    number = getattr(signal, name)
    if to == "launcher":
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=300)
    assert (out, process.returncode) == ("seen 1\n", 41), err


def test_a_child_that_dies_of_the_forwarded_signal(place):
    script = place.script(
        "import signal, time, torch\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = place.start(sys.executable, script, start_new_session=True)
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.search(SUMMARY, err)


def in_terminal(place, script, keys=b""):
    """Run under a pseudo terminal; `keys` are typed once the program prints "ready". Returns output
    and exit code.
    """
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(place.work)
        argv = place.argv([sys.executable, script], {})
        os.execve(argv[0], argv, place.environment())
    output, until, typed = b"", time.monotonic() + 300, False
    while time.monotonic() < until:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        output += data
        if keys and not typed and b"ready" in output:
            time.sleep(0.3)
            os.write(master, keys)
            typed = True
    os.close(master)
    return output.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("is_step", [True, False])
def test_a_command_that_handles_ctrl_c_interrupts_what_it_is_a_step_of(tmp_path, is_step):
    """In a process of its own: a signal must not reach the one that runs the tests."""
    asks, outer = tmp_path / "asks.py", tmp_path / "outer.py"
    ready = str(tmp_path / "ready")
    asks.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda n, frame: sys.exit(2))\n"
        f"pathlib.Path({ready!r}).touch()\ntime.sleep(60)\n"
    )
    outer.write_text(
        textwrap.dedent(f"""
            import os, pathlib, signal, sys, threading, time
            from whence.instrument.launch import child_process

            def interrupt():
                while not pathlib.Path({ready!r}).exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            words = [sys.executable, {str(asks)!r}]
            log = open({str(tmp_path / "log")!r}, "wb") if {is_step} else None
            try:
                print(child_process.execute(words, dict(os.environ), log).exit_code)
            except KeyboardInterrupt:
                print("interrupted")
        """)
    )
    done = subprocess.run(
        [sys.executable, str(outer)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["interrupted" if is_step else "2"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_terminal_is_kept(place):
    script = place.script("""
        import os, sys, torch
        print([os.isatty(fd) for fd in (0, 1, 2)], os.tcgetpgrp(0) == os.getpgrp())
    """)
    output, code = in_terminal(place, script)
    assert "[True, True, True] True" in output
    assert code == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_control_c_reaches_the_program_once(place):
    script = place.script(COUNTING.format(name="SIGINT"))
    output, code = in_terminal(place, script, b"\x03")
    assert "seen 1" in output
    assert code == 41


# -- other sitecustomize ----------------------------------------------------------------------------------------------


def test_another_sitecustomize_still_runs(place):
    (place.library / "sitecustomize.py").write_text(
        "import sys\nsys.flag_of_theirs = __name__, __file__\nhere = 1\n"
    )
    (place.library / "usercustomize.py").write_text("import sys\nsys.flag_of_user = 1\n")
    check = (
        "import sys, sitecustomize, torch; print(sys.flag_of_theirs[0], "
        "sys.flag_of_theirs[1], sitecustomize.here)"
    )
    done = place.launch(sys.executable, "-c", check)
    assert done.stdout == f"sitecustomize {place.library / 'sitecustomize.py'} 1\n"
    assert re.search(SUMMARY, done.stderr)


def test_another_sitecustomize_may_import_torch_or_fail(place):
    (place.library / "sitecustomize.py").write_text("import torch\nraise RuntimeError('theirs')\n")
    done = place.launch(sys.executable, "-c", "print('on')")
    assert done.stdout == "on\n"
    assert "theirs" in done.stderr
    assert re.search(SUMMARY, done.stderr)


# -- what cannot be captured is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-I", "-S", "-E", "-Is", "-uE", "-Bs -S"])
def test_flags_that_hide_the_environment(place, flag):
    done = place.launch(sys.executable, *flag.split(), "-c", "print('started')")
    assert (done.returncode, done.stdout) == (3, "")
    letter = next(letter for letter in flag if letter in "ISE")
    assert f"drop -{letter}" in done.stderr
    assert "whence.capture" in done.stderr
    assert not place.run.exists()


def test_flags_of_the_program_are_its_own(place):
    assert place.launch(sys.executable, "-c", "import torch", "-I", "-S").returncode == 0


def test_flags_in_the_first_line_of_a_script(place):
    script = place.script(f"#!{sys.executable} -Es\nimport torch\n", "tool", 0o755)
    done = place.launch(script)
    assert done.returncode == 3
    assert "the first line of" in done.stderr


def other_python(place, source="raise ImportError"):
    """A python that cannot import whence: the real one, given other import paths."""
    blind = place.top / "blind" / "whence"
    blind.mkdir(parents=True)
    (blind / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'whence'\", name='whence')\n"
    )
    path = place.top / "bin" / "python3"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{blind.parent}"\nexport PYTHONPATH\nexec '
        f'{sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_an_interpreter_without_whence(place):
    python = other_python(place)
    done = place.launch(python, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot import whence" in done.stderr
    assert f"-m pip install {extras.whence_source()}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not place.run.exists()


def test_an_interpreter_without_whence_behind_a_shell(place):
    python = other_python(place)
    done = place.launch("bash", "-c", f"{python} -c 'import torch; print(1)'; true")
    assert (done.returncode, done.stdout) == (3, "1\n")
    assert len(done.stderr.splitlines()) == 1
    assert "nothing was captured" in done.stderr
    assert f"pip install {extras.whence_source()}" in done.stderr
    assert "cannot import whence" in done.stderr
    assert not place.run.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("no-such-command",), "not found on PATH"),
        (("./nowhere/tool",), "no such file"),
        (("./script.py",), "whence run ... -- python ./script.py"),
        (("./folder/",), "is a folder"),
    ],
)
def test_commands_that_cannot_be_run(place, command, said):
    place.script("import torch")
    (place.work / "folder").mkdir()
    done = place.launch(*command)
    assert done.returncode == 3
    assert said in done.stderr
    assert not place.run.exists()


def test_a_script_without_a_first_line_runs_like_in_a_shell(place):
    script = place.script(f"{sys.executable} -c 'import torch'\n", "tool", 0o755)
    assert place.launch(script).returncode == 0


@pytest.mark.parametrize(
    ("command", "env", "said"),
    [
        (
            (sys.executable, "-c", "1"),
            {},
            "none of torch, paddle, onnxruntime, openvino was ever imported (1 Python process)",
        ),
        (("true",), {}, "no Python process of the command loaded whence"),
        (
            (sys.executable, "-c", "import torch"),
            {"STAND_IN": "fails"},
            "RuntimeError: no listener for this torch",
        ),
        ((sys.executable, "-c", "import torch"), {"STAND_IN": "silent"}, "no module was called"),
        (
            ("bash", "-c", f"env -u PYTHONPATH {sys.executable} -c 1"),
            {},
            "Does it replace PYTHONPATH",
        ),
    ],
)
def test_nothing_captured_says_why(place, command, env, said):
    done = place.launch(*command, env=env)
    assert done.returncode == 3
    assert said in done.stderr.splitlines()[-1]
    assert not place.run.exists(), "nothing is in the way of the next try"


@pytest.mark.parametrize(
    "lines",
    [
        "def f(:\n",
        "raise ValueError('early')\n",
        "import no_such_module\n",
        "import os; os._exit(9)\n",
    ],
)
def test_a_script_that_fails_early_leaves_no_run(place, lines):
    place.script(lines)
    for _ in range(2):
        done = place.launch(sys.executable, "script.py")
        assert done.returncode not in (0, 3)
        assert "nothing was captured" in done.stderr.splitlines()[-1]
        assert not place.run.exists()


def test_a_run_that_was_deleted_meanwhile_is_said_to_be_gone(tmp_path):
    said = []
    asked = outcome.Outcome(
        "run",
        str(tmp_path / "run"),
        CaptureOptions(),
        EndedProcess(0, 1.0),
        outcome.Processes(0, 0, {}, ()),
        [],
    )
    assert outcome.conclude(asked, open_run, lambda: False, said.append) == 3
    (line,) = said
    assert "its run is gone: run was deleted, moved or unmounted" in line
    assert "kept" not in line


def test_a_process_that_left_inside_its_first_call_is_said_to_have(tmp_path):
    store.create(tmp_path / "run", RunInfo())
    writer = store.Writer(tmp_path / "run", 0)
    writer.call(Call(0, "fc", "model", 0, 0))
    (said,) = store.reasons(tmp_path / "run")
    assert "os._exit" in said
    writer.close()
    assert store.reasons(tmp_path / "run") == []


@pytest.mark.parametrize("begun", [True, False])
def test_compiled_code_is_blamed_only_where_no_module_was_called(monkeypatch, begun):
    pytest.importorskip("torch")
    from whence.instrument.torch.compiled import stages

    monkeypatch.setattr(stages, "_counted", lambda: (1, {}))
    notes = []
    note = lambda kind, text: notes.append(text)  # noqa: E731
    stages.note_unseen(types.SimpleNamespace(active=True, begun=begun, note=note))
    assert bool(notes) != begun


def test_names_that_are_no_utf_8_are_written_as_escapes():
    info = launch.describe(["python", "b\udcff.py"], CaptureOptions())
    assert info.command == ("python", "b\\udcff.py")


def test_what_was_captured_before_a_failure_is_kept(place):
    place.script("import torch\nraise SystemExit(4)\n")
    done = place.launch(sys.executable, "script.py")
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert re.match(SUMMARY, last)
    assert "the command ended with exit code 4" in last and "--force" in last
    assert len(open_run(place.run).calls) == 1
    assert "--force" in place.launch(sys.executable, "script.py").stderr


def test_interrupted_before_anything_was_captured(place):
    script = place.script("import time; print('ready', flush=True); time.sleep(60)\n")
    process = place.start(sys.executable, script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the command was stopped by SIGINT, and nothing was captured" in said
    assert not place.run.exists()


def test_only_an_empty_run_of_ours_is_deleted(place):
    place.script("raise SystemExit(1)\n")
    place.run.mkdir()
    place.launch(sys.executable, "script.py")
    assert list(place.run.iterdir()) == [], "the folder was there before"
    script = place.script(
        """
        import os, sys
        open(os.path.join(sys.argv[1], "notes.txt"), "w").close()
        sys.exit(1)
        """
    )
    done = place.launch(sys.executable, script, place.run)
    assert (place.run / "notes.txt").exists() and (place.run / "run.json").exists()
    assert "is kept: --force replaces it, or choose another -o" in done.stderr


def test_nothing_captured_names_the_selection(place):
    done = place.launch(
        sys.executable,
        "-c",
        "import torch",
        options={"include": "x*", "ids": "3"},
        env={"STAND_IN": "silent"},
    )
    assert "no module call matched the selection (--include, --ids)" in done.stderr


def test_nothing_captured_never_hides_the_commands_failure(place):
    done = place.launch(sys.executable, "-c", "raise SystemExit(5)")
    assert done.returncode == 5
    assert "nothing was captured" in done.stderr


def test_a_capture_that_cannot_attach_lets_the_program_run(place):
    done = place.launch(
        sys.executable, "-c", "import torch; print('on')", env={"STAND_IN": "fails"}
    )
    assert done.stdout == "on\n"
    assert (
        "whence: not capturing this process: RuntimeError: no listener for this torch\n"
        in done.stderr
    )
    assert done.stderr.count("no listener for this torch") == 2
    assert not place.run.exists()


def test_an_existing_run_stays(place):
    command = (sys.executable, "-c", "import torch; print('ran')")
    assert place.launch(*command).returncode == 0
    done = place.launch(*command)
    assert (done.returncode, done.stdout) == (3, "")
    assert "--force" in done.stderr
    (place.run / launch.ERRORS).write_text("old\n")
    done = place.launch(*command, options={"force": True})
    assert done.returncode == 0
    assert not (place.run / launch.ERRORS).exists()


def test_a_run_to_replace_stays_until_something_is_captured(place):
    """A command that fails before it captures anything loses nothing that was there."""
    assert place.launch(sys.executable, "-c", "import torch; print('ran')").returncode == 0
    before = sorted(p.relative_to(place.run) for p in place.run.rglob("*"))
    done = place.launch(sys.executable, "-c", "raise SystemExit(4)", options={"force": True})
    assert done.returncode == 4
    assert "the run that --force would have replaced is still in" in done.stderr
    assert sorted(p.relative_to(place.run) for p in place.run.rglob("*")) == before
    with pytest.raises(errors.OutputExists):
        store.create(place.run, store.open_run(place.run).info)


def test_a_killed_launch_leaves_the_run_that_it_would_have_replaced(place):
    assert place.launch(sys.executable, "-c", "import torch; print('ran')").returncode == 0
    aside = store.SetAside(place.run)
    assert not place.run.joinpath("run.json").exists()
    beside = place.run.with_name(f"{place.run.name}.replaced")
    assert store.open_run(beside).calls
    assert place.launch(sys.executable, "-c", "import torch; print('ran')").returncode == 0
    # the next --force leaves it alone, as it is not what it replaces
    options = {"force": True}
    done = place.launch(sys.executable, "-c", "import torch; print('ran')", options=options)
    assert done.returncode == 0
    assert store.open_run(beside).calls
    assert aside.keep(in_its_place=False) == str(beside)


# -- what is written down ---------------------------------------------------------------------------------------------


def test_the_run_says_what_was_run(place):
    subprocess.run(["git", "init", "-q"], cwd=place.work, check=True)
    place.script("import torch\n")
    subprocess.run(["git", "add", "."], cwd=place.work, check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-qm", "x"], cwd=place.work, check=True)
    place.launch(
        sys.executable,
        "script.py",
        "--lr",
        "1",
        options={"keep": "stats", "seed": 3},
        env={"OMP_NUM_THREADS": "2", "SECRET_SAUCE": "x"},
    )
    info = place.info()
    assert info["command"] == [sys.executable, "script.py", "--lr", "1"]
    assert info["cwd"] == str(place.work)
    assert re.fullmatch(r"[0-9a-f]{40}", info["git"])
    assert info["options"] == {"keep": "stats", "seed": 3}
    assert info["seed"] == 3
    assert info["environment"]["OMP_NUM_THREADS"] == "2"
    assert "SECRET_SAUCE" not in info["environment"]
    assert info["versions"]["python"] == sys.version.split()[0]
    assert {"whence", "numpy"} <= set(info["versions"])
    assert info["user"]
    assert info["host"]
    assert info["started"].endswith("+00:00")
    assert info["settings"]["duration_s"] > 0
    assert info["settings"]["attached_processes"] == 1
    place.script("import torch  # changed\n")
    place.launch(sys.executable, "script.py", options={"force": True})
    assert place.info()["git"].endswith(" (dirty)")
    assert stat.S_IMODE(place.run.stat().st_mode) == 0o700


def test_secrets_are_masked_in_the_run(place):
    place.launch(
        sys.executable,
        "-c",
        "import torch",
        "--token",
        "s3cr3t",
        "--api-key=s3cr3t",
        "HF_TOKEN=s3cr3t",
        "--url",
        "https://u:s3cr3t@host/x",
        "--max-tokens",
        "8",
        env={
            "HF_TOKEN": "s3cr3t",
            "HF_HOME": "/hf",
            "NCCL_API_KEY": "s3cr3t",
            "TF_VAR_db_pass": "s3cr3t",
            "HF_HUB_OFFLINE": "1",
        },
    )
    text = (place.run / "run.json").read_text()
    assert "s3cr3t" not in text
    info = place.info()
    assert info["command"][-2:] == ["--max-tokens", "8"]
    assert not {"HF_TOKEN", "HF_HOME", "NCCL_API_KEY", "TF_VAR_db_pass"} & set(info["environment"])
    assert info["environment"]["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        (["--token", "abc"], ["--token", "***"]),
        (["--hf_token=abc"], ["--hf_token=***"]),
        (["-password", "abc"], ["-password", "***"]),
        (["--apiKey=abc"], ["--apiKey=***"]),
        (["--token", "--next"], ["--token", "--next"]),
        (["bash", "-c", "run.sh --token abc --lr 1"], ["bash", "-c", "run.sh --token *** --lr 1"]),
        (["-c", "login(token='abc def', x=1)"], ["-c", "login(token=***, x=1)"]),
        (["AWS_SECRET_ACCESS_KEY=abc"], ["AWS_SECRET_ACCESS_KEY=***"]),
        (["postgres://me:abc@db/x"], ["postgres://***@db/x"]),
        (["Authorization: Bearer abcdefghijk"], ["Authorization: Bearer ***"]),
        (["hf_abcdefghijklmnopqrst"], ["***"]),
        (["ghp_abcdefghijklmnopqrst"], ["***"]),
        (
            ["--db-pass", "abc", "--login=abc", "--proxyAuth", "abc"],
            ["--db-pass", "***", "--login=***", "--proxyAuth", "***"],
        ),
        (
            ["TF_VAR_db_pass=abc", "GIT_PAT=abc", "FTP_PWD=abc"],
            ["TF_VAR_db_pass=***", "GIT_PAT=***", "FTP_PWD=***"],
        ),
        (
            ["--client-credentials", "abc", "AUTH_TOKEN=abc"],
            ["--client-credentials", "***", "AUTH_TOKEN=***"],
        ),
        (
            [
                "--tokens",
                "a.json",
                "max_new_tokens=8",
                "PATH=/bin",
                "--keep",
                "full",
                "--author",
                "me",
                "--compass",
                "n",
            ],
            None,
        ),
        (
            [
                "--eos-token-id",
                "2",
                "pad_token=0",
                "--num-key-value-heads",
                "4",
                "--prompt-key",
                "src",
                "--patch",
                "fc",
                "--bypass",
                "y",
            ],
            None,
        ),
        (["--tokenizer", "gpt2", "--max-new-tokens=8", "--monkey", "x", "--keyframes", "3"], None),
        (["python", "infer.py", "--dtype", "bf16", "a=b", "x:y"], None),
        (["-H", "Authorization: Bearer ab"], ["-H", "Authorization: Bearer ***"]),
        (["Authorization:", "Bearer", "ab"], ["Authorization:", "Bearer", "***"]),
        (["Proxy-Authorization:Basic YQ=="], ["Proxy-Authorization:Basic ***"]),
        (["Cookie: a=b; c=d"], ["Cookie: ***"]),
        (
            ["bash", "-c", "curl -H 'Authorization: tok en' -u me:abc x; run"],
            ["bash", "-c", "curl -H 'Authorization: ***' -u me:*** x; run"],
        ),
        (["-u", "me:abc"], ["-u", "me:***"]),
        (
            ["--pw", "abc", "--bearer", "abc", "--cookie", "abc", "--session-id=abc"],
            ["--pw", "***", "--bearer", "***", "--cookie", "***", "--session-id=***"],
        ),
        (["--private", "abc", "SESSION_ID=abc"], ["--private", "***", "SESSION_ID=***"]),
        (["-p", "abc", "-pAbc", "-pab1", "-p=abc"], ["-p", "***", "-p***", "-p***", "-p=***"]),
        (["bash", "-c", "mysql -pa1 -p abc x"], ["bash", "-c", "mysql -p*** -p *** x"]),
        (["-p", "8080", "-p0.9", "-p", "./out", "-pthread", "-prec=fp16", "-p", "--x"], None),
        (["python", "-m", "pytest", "-p", "no:xdist", "-p", "plugin"], None),
        (["bash", "-c", "mkdir -p out && python infer.py --session-len 64"], None),
    ],
)
def test_masks(given, masked):
    assert list(redaction.command(given)) == (given if masked is None else masked)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_seeds_are_set_before_user_code(place):
    script = place.script("""
        import os, random
        first = random.random()
        import numpy as np
        second = float(np.random.rand())
        import torch
        cublas = os.environ["CUBLAS_WORKSPACE_CONFIG"]
        print(first, second, random.random(), torch.seeds, torch.algorithms, torch.backends.cudnn, hash("x"), cublas)
    """)
    options = {"seed": 11, "deterministic": True}
    one = place.launch(sys.executable, script, options=options)
    two = place.launch(sys.executable, script, options={**options, "force": True})
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert "[11] [(True, True)] namespace(deterministic=True, benchmark=False)" in one.stdout
    import random

    import numpy as np

    generator = random.Random(11)
    expected = [generator.random(), float(np.random.RandomState(11).rand()), generator.random()]
    assert [float(x) for x in one.stdout.split()[:3]] == expected


def test_the_programs_own_seeds_win(place):
    done = place.launch(
        sys.executable,
        "-c",
        "import random; random.seed(5); a = random.random(); import torch; print(a, "
        "random.random())",
        options={"seed": 1},
    )
    import random

    generator = random.Random(5)
    assert [float(x) for x in done.stdout.split()] == [generator.random(), generator.random()]


# -- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("script.py -I", ""),
        ("-u script.py", ""),
        ("-I script.py", "I"),
        ("-Is -c x", "I"),
        ("-sE -m x", "E"),
        ("-W error -S x", "S"),
        ("-Werror -S x", "S"),
        ("-X dev -I", "I"),
        ("-Xdev -c pass -I", ""),
        ("-cimport -I", ""),
        ("-mpkg.I -E", ""),
        ("--check-hash-based-pycs never -E x", "E"),
        ("- -I", ""),
        ("-ISE", "ISE"),
        ("", ""),
    ],
)
def test_flags_python_would_obey(words, flags):
    assert interpreter.hiding_flags(words.split()) == flags


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("#!{python}", ()),
        ("#!{python} -Es", ("-Es",)),
        ("#! /usr/bin/env -S python3 -I", ("-I",)),
        ("#!/usr/bin/env python3", ()),
        ("#!/bin/sh\n'''exec' \"{python}\" -s \"$0\" \"$@\"\n' '''", ("-s",)),
        ("#!/bin/bash", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_first_lines(tmp_path, line, options):
    script = tmp_path / "tool"
    script.write_text(line.format(python=sys.executable) + "\nimport x\n")
    found = interpreter.of_script(
        script, {"PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]}
    )
    assert (found and found.options) == options


def test_a_first_line_with_a_python_that_is_gone(tmp_path):
    script = tmp_path / "tool"
    script.write_text("#!/gone/python3\n")
    with pytest.raises(CaptureError, match="/gone/python3, which is not there"):
        interpreter.of_script(script, os.environ)


def test_something_called_python_that_is_none(tmp_path):
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho broken >&2\nexit 9\n")
    fake.chmod(0o755)
    with pytest.raises(CaptureError, match="does not run Python: broken"):
        interpreter.check(interpreter.Interpreter(str(fake), (), "the command line"), os.environ)


def test_what_is_needed_is_what_the_package_requires(monkeypatch):
    assert {"numpy", "click", "xxhash"} <= set(interpreter.needed())
    assert {"torch", "safetensors", "pytest"}.isdisjoint(interpreter.needed())
    required = ["PyYAML>=6", "ml_dtypes", "not-installed-here>=1", "pytest>=8; extra == 'test'"]
    monkeypatch.setattr(interpreter.metadata, "requires", lambda name: required)
    assert set(interpreter.needed()) == {"PyYAML", "ml_dtypes"}
    assert "yaml" in interpreter.needed()["PyYAML"]


def test_a_python_in_which_something_needed_is_missing(monkeypatch):
    needed = {"numpy": ("numpy",), "lost-package": ("lost", "_lost")}
    monkeypatch.setattr(interpreter, "needed", lambda: needed)
    with pytest.raises(CaptureError, match="whence is there, but not lost-package"):
        interpreter.check(interpreter.Interpreter(sys.executable, (), "the command line"), {})


def test_child_environment_changes_nothing_else():
    before = {"A": "1", "PYTHONPATH": "/x:/y"}
    after = launch.child_environment(before, "/run", CaptureOptions(), "m:f")
    assert after.pop("PYTHONPATH") == f"{launch.SITE}:/x:/y"
    assert json.loads(after.pop(launch.ENVIRONMENT))["run"] == "/run"
    assert after == {"A": "1"}
    seeded = launch.child_environment({}, "/run", make(seed=4, deterministic=True), "m:f")
    assert seeded["PYTHONHASHSEED"] == "4"
    assert seeded["PYTHONPATH"] == str(launch.SITE)


def test_no_determinism_asked_no_torch_needed():
    set_determinism(CaptureOptions())


def test_the_closing_line_says_how_many_steps_hold_no_elements():
    steps = [Step("Net", n, 10, n < 4) for n in range(30)]
    run = MemoryRun([], [], {}, steps=steps, notes=[Note("budget", "it does not fit")])
    assert "26 of 30 steps hold no elements" in outcome._over_budget(run)
    assert outcome._over_budget(MemoryRun([], [], {}, steps=steps)) == ""
