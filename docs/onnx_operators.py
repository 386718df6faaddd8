"""Prints the operators of ONNX whose nodes become programs, a row for each kind.

python docs/onnx_operators.py             the table
python docs/onnx_operators.py --write     into docs/dev/programs.md, between its markers
"""

from __future__ import annotations

import sys
from pathlib import Path

from whence.replay.onnx_translation import translation

PAGE = Path(__file__).resolve().parent / "dev" / "programs.md"
MARKS = "<!-- onnx operators -->", "<!-- end of onnx operators -->"
DOMAIN = "com.microsoft."


def table() -> str:
    """One row for each file of the translation; operators of ONNX Runtime last, in italics."""
    rows = ["| operators | of ONNX, and *of ONNX Runtime* |", "|---|---|"]
    for title, operators in translation.families():
        own = [name for name in operators if not name.startswith(DOMAIN)]
        theirs = [f"*{name.removeprefix(DOMAIN)}*" for name in operators if name not in own]
        rows.append(f"| {title} | {', '.join([*own, *theirs])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(MARKS[0])
        _, after = rest.split(MARKS[1])
        PAGE.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")
    else:
        print(table())
