"""What stands on a terminal and not in a pipe: progress that comes late and goes again, and tables
of its width.
"""

import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

WORK = """
import sys, time
from whence.cli import _progress
with _progress.shown() as line:
    for done in range(6):
        if line.count is not None:
            line.count(done, 6, "measure \\x1b[31m[b]")
        time.sleep({pause})
with _progress.shown() as line:
    line.say("patching")
print("end")
"""


def on_a_terminal(words, width=100):
    """Everything that a program wrote to a terminal of its own."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    said = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(leader)
    assert process.wait(60) == 0
    return said.decode()


def left(said):
    """What a terminal shows in the end: lines that were rewritten or erased are gone."""
    lines = [""]
    at = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", said):
        if token == "\n":
            at += 1
            if at == len(lines):
                lines.append("")
        elif token == "\x1b[2K" or token == "\r\x1b[K":
            lines[at] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            at = max(0, at - int(token[2:-1] or 1))
        elif token != "\r" and not token.startswith("\x1b"):
            lines[at] += token
    return [line for line in lines if line.strip()]


def work(pause):
    return [sys.executable, "-c", textwrap.dedent(WORK.format(pause=pause))]


def test_long_work_shows_how_far_it_is_and_leaves_nothing():
    said = on_a_terminal(work(0.5))
    assert "/6" in said
    assert r"measure \x1b[31m[b]" in said, "as text, whatever it holds"
    assert left(said) == ["end"]


def test_short_work_says_nothing():
    assert on_a_terminal(work(0.02)) == "end\r\n"


def test_nothing_in_a_pipe():
    done = subprocess.run(work(0.25), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")


FINISH = """
import time
from whence.workflows.capture.setup import finishing
tell = finishing("runs/\u00e9\x1b[31m")
for done in range(1, 5):
    if tell is not None:
        tell(done, 4)
    time.sleep({pause})
"""


def test_a_large_capture_says_that_it_is_being_finished():
    def finish(pause):
        return [sys.executable, "-c", FINISH.format(pause=pause)]

    said = on_a_terminal(finish(0.6))
    assert r"whence: finishing runs/\xe9\x1b[31m: 75 %" in said
    assert said.endswith("\r\x1b[K")
    assert on_a_terminal(finish(0.01)) == ""
    assert subprocess.run(finish(0.6), capture_output=True, text=True, check=True).stderr == ""


def test_tables_are_as_wide_as_the_terminal(tmp_path):
    torch = pytest.importorskip("torch")
    import whence

    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for _ in range(12):
        inner = torch.nn.Sequential(inner)
    with whence.capture(inner, tmp_path / "run", level="op"), torch.no_grad():
        inner(torch.ones(2, 4))
    for words in (
        ["show", str(tmp_path / "run"), "--format", "table"],
        ["ops", "list", str(tmp_path / "run")],
    ):
        command = [sys.executable, "-m", "whence", *words]
        lines = [line.rstrip("\r") for line in on_a_terminal(command, 90).split("\n")]
        assert max(map(len, lines)) <= 90
        assert any("…" in line for line in lines)
    piped = subprocess.run(
        [sys.executable, "-m", "whence", "show", str(tmp_path / "run"), "--format", "table"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ".".join("0" * 13) in piped.stdout
    assert "…" not in piped.stdout
