"""whence's commands, and programs that use it, without the two seconds in which a new process
imports torch.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

from whence import cli

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "numba", "whence"])


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
        line = [sys.executable, "-m", "whence", *map(str, words)]
        return subprocess.run(
            line, cwd=folder, capture_output=True, text=True, timeout=1800, check=False
        )
    return whence(folder, *words)


def program(
    folder: Path, text: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, as `python script.py ARGUMENTS` does in a folder,
    forked from one that has imported torch.
    """
    words = ["script.py", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        streams = [Path(place) / name for name in ("out", "err")]
        process = _FORKS.Process(
            target=_main,
            args=(str(folder), text, words, {**os.environ, **variables}, [*map(str, streams)]),
        )
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, 300)
        return subprocess.CompletedProcess(
            words, process.exitcode, *(stream.read_text() for stream in streams)
        )


def _main(
    folder: str, text: str, words: list[str], variables: dict[str, str], streams: list[str]
) -> None:
    """What the forked process does; it ends as Python ends."""
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv, sys.path[0:0] = words, [folder]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = str(Path(folder) / words[0])
    code: object = 0
    try:
        exec(compile(text, main.__file__, "exec"), main.__dict__)  # noqa: S102 - a program that a test wrote
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(code)
