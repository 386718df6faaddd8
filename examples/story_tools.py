"""What the scripts here share: a folder of their own, and commands that are shown as typed."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SCREEN = 24  # lines of an answer
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def folder() -> Path:
    """A new folder, which is the current one from here on."""
    place = Path(tempfile.mkdtemp(prefix="whence-story-"))
    os.chdir(place)
    return place


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def run(line: str) -> str:
    """Run a line as it is typed; what it prints. `python` and `whence` are those that run this."""
    print(f"$ {line}", flush=True)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() or done.stderr.splitlines()
    print("\n".join(lines[:SCREEN]) + ("\n..." if len(lines) > SCREEN else ""), flush=True)
    return done.stdout


def names(said: str, *wanted: str) -> None:
    """End the script unless the answer says all of this on its first screen."""
    screen = "\n".join(said.splitlines()[:SCREEN])
    missing = [text for text in wanted if text not in screen]
    if missing:
        sys.exit(f"the answer does not say {missing}")
