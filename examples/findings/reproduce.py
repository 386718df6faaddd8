"""Types the commands of README.md, a finding at a time: python reproduce.py [NAME ...]

NAME: a script's, without its ending. Releases go into a temporary folder, some 300 MB for all. A
finding is reproduced when each line of its answer is printed, figures aside.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d.]*(e[+-]?\d+)?")


def findings():
    """{script's name: (title, commands, lines of the answer)}"""
    out = {}
    for title, text in SECTION.findall((HERE / "README.md").read_text(encoding="utf-8")):
        blocks = dict(BLOCK.findall(text))
        name = re.search(r"python (\w+)\.py", blocks["sh"])[1]
        out[name] = (title, blocks["sh"], blocks["text"].splitlines())
    return out


def lost(name, commands, answer):
    """Lines of the answer that the commands do not print, and all that they print."""
    with tempfile.TemporaryDirectory(prefix="finding-") as place:
        shutil.copy(HERE / f"{name}.py", place)
        done = subprocess.run(
            ["bash", "-c", commands], cwd=place, capture_output=True, text=True, check=False
        )
    printed = [FIGURE.sub("#", line) for line in done.stdout.splitlines()]
    missing = [
        line for line in answer if not any(p.startswith(FIGURE.sub("#", line)) for p in printed)
    ]
    return missing, done.stdout + done.stderr


def main():
    """Reproduce what is asked for, or all; the exit code says how many are not."""
    known, failed = findings(), 0
    for name in sys.argv[1:] or known:
        title, commands, answer = known[name]
        missing, printed = lost(name, commands, answer)
        failed += bool(missing)
        print(f"{'not reproduced' if missing else 'reproduced'}: {name} ({title})", flush=True)
        if missing:
            print(*missing, printed, sep="\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
