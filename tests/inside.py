"""whence's commands, and programs that use it, without the two seconds in which a new process
imports torch.
"""

import contextlib
import io
import os
import subprocess
from pathlib import Path

import warm
from whence import cli


def whence(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `whence WORDS` in a folder, and give its exit code and what it printed as subprocess.run
    does.
    """
    line = [*map(str, words)]
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.execute(line)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    printed, told = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(["whence", *line], code, printed, told)


def or_outside(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`whence WORDS` in this process, and in one of its own where it starts a program: that writes
    to the real stdout and stderr.
    """
    if "--" in words or "--exec" in words:
        line = [warm.TORCH, "-m", "whence", *map(str, words)]
        return subprocess.run(
            line, cwd=folder, capture_output=True, text=True, timeout=1800, check=False
        )
    return whence(folder, *words)


def program(
    folder: Path, text: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Write a program to script.py in a folder, and run it there in a process of its own."""
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [warm.TORCH, "script.py", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
