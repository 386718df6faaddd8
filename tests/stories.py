"""Pages of the docs that tell a story: what they show of an answer, and what was said."""

import re

NUMBER = re.compile(r"(?<![\w.])-?\d[\d.]*(e[+-]?\d+)?")


def shown_in_order(shown, said):
    """Every line shown is said, in this order, but for figures, which differ from CPU to CPU; "..."
    stands for any lines.
    """
    lines = iter(NUMBER.sub("#", line).rstrip() for line in said.splitlines())
    for line in shown.splitlines():
        if line.strip() and line != "...":
            wanted = NUMBER.sub("#", line).rstrip()
            assert any(found == wanted for found in lines), f"not said, or not here: {line}\n{said}"


def first_clauses(text):
    """Evidence up to the first semicolon: which patterns stand behind it is a matter of figures."""
    return re.sub(r"^(  evidence [^;\n]*).*$", r"\1", text, flags=re.MULTILINE)
