"""Python processes that need not import torch or Paddle: forked from a server that has imported it.

`TORCH` and `PADDLE` are commands that stand for `sys.executable` where a new process is not the
subject of a test. They take a script, `-c` or `-m`, and run it as Python does: PYTHONPATH and
sitecustomize, streams, folder, signals (but for SIGKILL and those to a process group) and exit
code. `import torch` still goes through the import system, so that what waits for it (the hook of
`whence run`) sees it. Where options or variables ask for more, or no server can be reached, the
real interpreter runs in its place.
"""

import atexit
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_sockets = tempfile.TemporaryDirectory(prefix="warm")
_servers: dict[str, subprocess.Popen[bytes]] = {}
# Set before a test copies the environment for its processes.
os.environ["WHENCE_TESTS_SOCKETS"] = _sockets.name
os.environ["WHENCE_TESTS_PYTHON"] = sys.executable


def __getattr__(name: str) -> str:
    """The path of the command; starts the server behind it."""
    framework = name.lower()
    if name not in ("TORCH", "PADDLE"):
        raise AttributeError(name)
    if importlib.util.find_spec(framework) is None:
        return sys.executable
    if framework not in _servers:
        server = subprocess.Popen(
            [sys.executable, str(_HERE / "server.py"), framework, f"{_sockets.name}/{framework}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", **os.environ, "PYTHONPATH": ""},
        )
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        _servers[framework] = server
    return str(_HERE / framework / "python3")


@atexit.register
def _leave() -> None:
    for server in _servers.values():
        server.kill()
        server.communicate()
