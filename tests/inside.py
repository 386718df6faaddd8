"""whence's commands in this process: what the command line does, without the two seconds in which a
new process imports torch.
"""

import contextlib
import io
import subprocess
from pathlib import Path

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
